"""The report's part on judged answers, as HTML, Markdown and JSON. Answers and replies are data: escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from common.errors import UserError
from common.page.parts import Markup, details, figure, join, legend, row, section, table, tag
from common.text import markdown as plain
from eval.judging.results import Judgement
from eval.judging.terminal import remarks
from eval.judging.win_rates import paired
from eval.report.numbers import DASH, markdown_head, markdown_row, p_value, percent, points, span

SIDES = {"a": "A is better", "b": "B is better", "tie": "tie", None: "unreadable"}
OUTCOMES = SIDES | {"changed": "changes with the order: a tie", "unreadable": "unreadable"}
CAPTION = (
    "Per cent of B, with 95 % intervals; the unit is the question. Win rate: a tie counts half. At equal "
    "lengths: AlpacaEval's length-controlled win rate in its offline form, without instructions' difficulty. "
    "Characters: mean length of B's answers, and of A's. Both orders: pairs with the same verdict whichever "
    "answer comes first. Pairs with an unreadable verdict are left out."
)
PAIRED = (
    "Points between win rates against the same A by the same judge on the same pairs; 95 % intervals "
    "and p of random signs have the question as their unit. Models that were judged on no common question "
    "are left out."
)
HUMAN = (
    "Per cent, with 95 % intervals; a verdict that is unreadable or changes with the order is wrong. In "
    "brackets: with unreadable verdicts as ties. Kappa: Cohen's, of judge and majority. People: Fleiss'."
)


@dataclass(frozen=True)
class Pairing:
    """Two judgements on the same pairs: how much higher the second's win rate is."""

    first: str
    second: str
    judge: str
    questions: str
    n: int
    difference: float
    low: float
    high: float
    p: float


def pairings(judgements: Sequence[Judgement], skipped: list[str]) -> list[Pairing]:
    """Each judgement beside the first by the same judge, against the same A, on the same questions."""
    groups: dict[tuple[str, ...], list[Judgement]] = {}
    for judgement in judgements:
        found = judgement.found
        same = tuple(found[name] for name in ("judge", "by", "a", "questions"))
        groups.setdefault(same, []).append(judgement)
    pairs: list[Pairing] = []
    for first, *others in groups.values():
        for other in others:
            try:
                pairs += _pairing(first, other)
            except UserError as error:
                skipped.append(str(error))
    return pairs


def _pairing(first: Judgement, second: Judgement) -> Iterable[Pairing]:
    """On the questions that both have a readable verdict on; nothing where these are fewer than two."""
    one, other = first.scores, second.scores
    keys = [key for key in one if key in other and one[key][0] == other[key][0]]  # ids may be row numbers
    if len(keys) > 1:
        questions = [one[key][0] for key in keys]
        mean, interval, p = paired([one[k][1] for k in keys], [other[k][1] for k in keys], questions)
        names = first.found["b"], second.found["b"], first.found["by"], first.found["questions"]
        yield Pairing(*names, len(keys), mean, interval.low, interval.high, p)


def html(judgements: Sequence[Judgement], pairs: Sequence[Pairing]) -> list[Markup]:
    """The sections; none without judgements."""
    if not judgements:
        return []
    found = [judgement.found for judgement in judgements]
    return [
        section("Answers, judged", _figure(judgements), _table(found), _paired(pairs), _human(found)),
        _shown(found),
    ]


def title(found: dict[str, Any]) -> str:
    """B against A, and on which questions."""
    return f"{found['b']} {_against(found)}"


def _against(found: dict[str, Any]) -> str:
    return f"against {found['a']}{_on(found['questions'])}"


def _on(questions: str) -> str:
    return f" on {questions}" if questions else ""


def _figure(judgements: Sequence[Judgement]) -> Markup:
    from common.page.figures import NARROW, WIDE  # matplotlib: only who draws waits for it
    from eval.report import plots

    bars = [
        (
            title(j.found),
            j.found["by"],
            [(j.found[s]["value"], j.interval(s)) for s in ("win", "tie", "loss")],
        )
        for j in judgements
        if j.found["read"]
    ]
    if not bars:
        return Markup()
    wide, narrow = (plots.judged_figure(bars, width) for width in (WIDE, NARROW))
    caption = (
        "Share of questions (%) that B wins, ties and loses; lines: 95 % intervals of wins and of losses."
    )
    names = zip(plots.JUDGED_COLOURS, ("win", "tie", "loss"), strict=True)
    return figure(wide, narrow, caption, legend(names))


def _share(found: dict[str, Any], name: str) -> Markup:
    value = found[name]
    if value is None:
        return Markup(DASH)
    return join(percent(value["value"]), tag("span", span(value["low"], value["high"]), class_="ci"))


def _table(found: Sequence[dict[str, Any]]) -> Markup:
    rows = [
        row(
            [
                join(tag("span", f["b"], class_="method"), tag("span", _against(f), class_="sub")),
                f["by"],
                f"{f['read']:,} of {f['pairs']:,}",
                *(_share(f, name) for name in ("win", "tie", "loss", "win_rate")),
                percent(f["length_controlled"]),
                f"{f['lengths']['b']:.0f} / {f['lengths']['a']:.0f}",
                percent(f["consistency"]),
            ],
            text=2,
        )
        for f in found
    ]
    head = ["B", "Judge", "Pairs", "Win", "Tie", "Loss", "Win rate", "At equal lengths", "Characters"]
    notes = [
        tag("li", f"{title(f)} ({f['by']}): {f['counts'][name]:,} {text}")
        for f in found
        for name, text in remarks(f)
    ]
    return join(
        table([*head, "Both orders"], rows, CAPTION, text=2),
        tag("ul", *notes, class_="plain") if notes else "",
    )


def _paired(pairs: Sequence[Pairing]) -> Markup:
    if not pairs:
        return Markup()
    rows = [
        row([p.second, p.first, p.judge + _on(p.questions), f"{p.n:,}", points(p.difference),
             span(p.low, p.high, signed=True), p_value(p.p)], text=3)
        for p in pairs
    ]  # fmt: skip
    head = ["Model", "Compared with", "Judge", "Pairs", "Points", "95 %", "p"]
    return join(tag("h3", "Between models"), table(head, rows, PAIRED, text=3))


def _human(found: Sequence[dict[str, Any]]) -> Markup:
    rows = []
    for f in found:
        human = f.get("human")
        if human:
            ties = human["unreadable_as_ties"]
            shown = _share(human, "agreement")
            if ties != human["agreement"]["value"]:
                shown = join(shown, f" ({percent(ties)})")
            kappas = [_kappa(human["kappa"]), _kappa(human["kappa_of_people"])]
            rows.append(row([f["by"], f["judge"], f"{human['rows']:,}", shown, *kappas], text=2))
    if not rows:
        return Markup()
    head = ["Verdicts", "Judge", "Pairs", "Agreement", "Kappa", "People"]
    return join(tag("h3", "Agreement with people"), table(head, rows, HUMAN, text=2))


def _kappa(value: float | None) -> str:
    return DASH if value is None else f"{value:.3f}"


def _shown(found: Sequence[dict[str, Any]]) -> Markup:
    blocks = [details(f"{title(f)} · {f['by']}", *map(_pair, f["shown"])) for f in found if f["shown"]]
    text = "Evenly spaced pairs of each comparison, none picked; answers and replies as they are."
    return section("Judged pairs", tag("p", text), *blocks) if blocks else Markup()


def _pair(pair: dict[str, Any]) -> Markup:
    """A question, both answers, and what the judge said in each order."""
    asked = [tag("h4", "Question"), tag("pre", pair["question"])]
    answers = [
        part for who in "ab" for part in (tag("h4", f"Answer of {who.upper()}"), tag("pre", pair[who]))
    ]
    orders = ("A first", "B first") if len(pair["verdicts"]) > 1 else ("verdict",)
    said = [f"{order}: {SIDES.get(v, v)}" for order, v in zip(orders, pair["verdicts"], strict=False)]
    verdict = tag("p", tag("b", OUTCOMES.get(pair["outcome"], pair["outcome"])), f" ({'; '.join(said)})")
    replies = [
        part
        for order, reply in zip(orders, pair["replies"], strict=False)
        for part in (tag("h4", f"Reply, {order}"), tag("pre", reply["text"]))
    ]
    folded = details("Replies of the judge", *replies) if replies else ""
    return tag("div", *asked, *answers, tag("h4", "Verdict"), verdict, folded, class_="sample")


def as_json(judgements: Sequence[Judgement], pairs: Sequence[Pairing]) -> dict[str, Any]:
    """The numbers and the pairs shown."""
    return {"judgements": [j.found for j in judgements], "paired_judgements": [vars(p) for p in pairs]}


def markdown(judgements: Sequence[Judgement], pairs: Sequence[Pairing]) -> list[str]:
    """Tables and pairs; every text escaped."""
    if not judgements:
        return []
    found = [judgement.found for judgement in judgements]
    lines = ["", "## Answers, judged", "", CAPTION, ""]
    lines += markdown_head(["B", "A", "judge", "pairs", "win", "tie", "loss", "win rate", "95 % interval",
                    "at equal lengths", "characters B", "characters A", "both orders alike"])  # fmt: skip
    for f in found:
        rate = f["win_rate"]
        interval = span(rate["low"], rate["high"]) if rate else DASH
        against = f["a"] + _on(f["questions"])
        lines.append(markdown_row([f["b"], against, f["by"], f"{f['read']} of {f['pairs']}",
            *(percent(f[name]["value"] if f[name] else None) for name in ("win", "tie", "loss", "win_rate")),
            interval, percent(f["length_controlled"]),
            f"{f['lengths']['b']:.0f}", f"{f['lengths']['a']:.0f}", percent(f["consistency"])]))  # fmt: skip
    notes = [f"- {plain(title(f))}: {f['counts'][n]} {plain(text)}" for f in found for n, text in remarks(f)]
    lines += ["", *notes] if notes else []
    if pairs:
        lines += ["", "### Between models", "", PAIRED, ""]
        lines += markdown_head(["model", "compared with", "judge", "pairs", "points", "95 % interval", "p"])
        lines += [
            markdown_row([p.second, p.first, p.judge + _on(p.questions), str(p.n), points(p.difference),
                  span(p.low, p.high, signed=True), p_value(p.p)])
            for p in pairs
        ]  # fmt: skip
    return [*lines, *_human_lines(found), *_shown_lines(found)]


def _human_lines(found: Sequence[dict[str, Any]]) -> list[str]:
    with_people = [f for f in found if f.get("human")]
    if not with_people:
        return []
    head = [
        "verdicts",
        "judge",
        "pairs",
        "agreement",
        "95 % interval",
        "unreadable as ties",
        "kappa",
        "people",
    ]
    lines = ["", "### Agreement with people", "", HUMAN, "", *markdown_head(head)]
    for f in with_people:
        human = f["human"]
        value = human["agreement"]
        shown = [
            percent(value["value"]),
            span(value["low"], value["high"]),
            percent(human["unreadable_as_ties"]),
        ]
        kappas = [_kappa(human["kappa"]), _kappa(human["kappa_of_people"])]
        lines.append(markdown_row([f["by"], f["judge"], str(human["rows"]), *shown, *kappas]))
    return lines


def _shown_lines(found: Sequence[dict[str, Any]]) -> list[str]:
    lines = []
    for f in found:
        lines += ["", f"### Pairs: {plain(title(f))} ({plain(f['by'])})", ""]
        lines += markdown_head(["question", "answer of A", "answer of B", "verdict"])
        for pair in f["shown"]:
            outcome = OUTCOMES.get(pair["outcome"], pair["outcome"])
            lines.append(markdown_row([pair["question"], pair["a"], pair["b"], outcome]))
    return lines
