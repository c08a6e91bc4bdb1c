"""The evidence as one page: the answers first, then every part's figures, and how they were made."""

from __future__ import annotations

import math
from typing import Any

from common.page.figures import INK, MUTED, NARROW, WIDE, colour, marker, plt, shortened, style, svg
from common.page.parts import Markup, definitions, figure, join, page, row, section, table, tag
from experiments.parts import Evidence

WORDS = {"yes": "Yes.", "no": "No.", "undecided": "Undecided."}
# What the numbers of a row mean, by name; without one the name itself is shown.
MEANING = {
    "validation_nll": "dev nats",
    "test_nats": "test nats",
    "js": "JS",
    "kl_pq": "KL(P, Q)",
    "kl_qp": "KL(Q, P)",
    "tv": "total variation",
    "tail_mass": "mass where P < 1e-4",
    "entropy": "entropy",
    "oracle_nats": "oracle's nats of its samples",
    "floor_nats": "floor",
    "temperature": "T of dev",
    "tempered_js": "JS at it",
    "baseline_temperature": "T of equal entropy",
    "gap_js": "JS minus tempered MLE",
    "gap_kl_pq": "KL(P, Q) minus tempered MLE",
    "gap_kl_qp": "KL(Q, P) minus tempered MLE",
    "gap_tail_mass": "tail minus tempered MLE",
    "forward_ce": "forward CE",
    "reverse_ce": "reverse CE",
    "rouge_l": "ROUGE-L",
    "distinct_2": "distinct-2",
    "repetition_4": "repetition-4",
}
FIXED = ("temperature", "entropy_q", "kl_pq", "kl_qp", "js", "kl_from_tempered_truth", "settled")
FIXED_WORDS = ("T of the truth", "entropy", "KL(P, Q)", "KL(Q, P)", "JS", "KL from tempered P", "settled")
PAIRED = (
    "Means with 95 % intervals of Student over repetitions, which share their sample and seed; an asterisk: "
    "differs from the baseline (paired, Holm over the objectives, 0.05). (end): chosen on development data "
    "at an end of the grid, so that a better value may lie beyond."
)
SETTLED = (
    "Where training would settle with unlimited data and capacity. T: the temperature at which the truth "
    "would be as certain; KL from tempered P: what is not explained by that temperature; settled: share of "
    "truths for which there is such a point."
)


def html(evidence: Evidence, results: dict[str, Any]) -> Markup:
    """The whole page. results: as `evidence.gather` returns them."""
    parts = [
        section(
            evidence.parts[name].title,
            tag("p", evidence.parts[name].about),
            tag("p", results["left_out"][name]) if name in results["left_out"] else "",
            _study(found) if "fixed_points" in found else _sweep(name, found),
        )
        for name, found in results["parts"].items()
    ]
    missing = [
        (evidence.parts[name].title, why)
        for name, why in results["left_out"].items()
        if name not in results["parts"]
    ]
    cut = section("What was cut", tag("ul", *(tag("li", line) for line in evidence.cut)))
    lost = section("What was left out", definitions(missing) if missing else "")
    code = results["code"]
    minutes = str(results["minutes"])
    made = section(
        "How it was made", definitions([("code", str(code)), ("minutes of the last start", minutes)])
    )
    lead = "Objectives for language models where the truth is known, and where it is not."
    sections = [section("Answers", _answers(results["verdicts"])), *parts, lost, cut, made]
    return page("Does the earth mover's distance help?", lead, sections)


def _answers(verdicts: dict[str, Any]) -> Markup:
    """The questions with what decides them, and what the other parts say of them."""
    lines = []
    for found in verdicts.values():
        lines.append(
            row(
                [
                    tag("span", found["question"], class_="method"),
                    tag("b", WORDS[found["answer"]]),
                    *effect(found),
                ],
                text=2,
            )
        )
        for part, other in found["also"].items():
            lines.append(row([f"also: {part}", WORDS[other["answer"]], *effect(other)], "quiet", text=2))
    head = ["question", "answer", "outcome", "better by", "95 % interval", "n"]
    caption = (
        "Better by: the paired difference that decides from what the objective is compared with; above zero "
        "is better. Yes: every interval lies above zero; no: at least one lies below; their level is raised "
        "so that all hold together. As written before the experiments were run, no needed every one below."
    )
    return table(head, lines, caption, text=2)


def effect(found: dict[str, Any]) -> list[str]:
    """Of a verdict: the outcome, by how much it is better, the interval, and the pairs."""
    better, *span = ("-" if found[key] is None else f"{found[key]:.4f}" for key in ("effect", "low", "high"))
    outcome = MEANING.get(found["outcome"], found["outcome"])
    return [outcome, better, f"[{', '.join(span)}]", str(found["n"])]


def _sweep(name: str, found: dict[str, Any]) -> Markup:
    """The rows of a sweep as tables, and its questions' outcomes as a figure."""
    rows = found["rows"]
    names = list(dict.fromkeys(key for one in rows for key in one["measures"]))
    outcomes = list(dict.fromkeys(v["outcome"] for v in found["verdicts"].values()))
    head = [*rows[0]["labels"], *rows[0].get("chosen", {})]
    steps = range(0, len(names), 9)
    tables = [
        table(
            [*head, *(MEANING.get(key, key) for key in names[i : i + 9])],
            [_row(one, names[i : i + 9]) for one in rows],
            PAIRED if i == steps[-1] else "",
            text=len(head),
        )
        for i in steps
    ]
    lost = [
        f"No number of {MEANING.get(key, key)}: {', '.join(runs)}." for key, runs in found["lacking"].items()
    ]
    return join(_dots(name, rows, outcomes), *tables, *(tag("p", line) for line in lost))


def _row(one: dict[str, Any], names: list[str]) -> Markup:
    ends = one.get("at_end", [])
    chosen = [f"{value} (end)" if axis in ends else value for axis, value in one.get("chosen", {}).items()]
    labels = [*one["labels"].values(), *chosen]
    return row([*labels, *(_cell(one, key) for key in names)], text=len(labels))


def _cell(one: dict[str, Any], key: str) -> Markup | str:
    measure = one["measures"].get(key)
    if measure is None or measure["mean"] is None:
        return "-"
    gap = one.get("differences", {}).get(key)
    mark = "*" if gap is not None and gap["p_holm"] is not None and gap["p_holm"] < 0.05 else ""
    shown = f"{measure['mean']:.4g}{mark}"
    if measure["low"] is None:
        return shown
    return join(shown, tag("span", f"± {measure['high'] - measure['mean']:.2g}", class_="ci"))


def _dots(name: str, rows: list[dict[str, Any]], outcomes: list[str]) -> Markup:
    """Each outcome: a dot with its interval for every row."""
    labels = [" ".join(one["labels"].values()) for one in rows]

    def draw(width: float, columns: int) -> Markup | str:
        lines = math.ceil(len(outcomes) / columns)
        with style():
            drawn, axes = plt.subplots(
                lines, columns, figsize=(width, lines * (0.6 + 0.3 * len(rows))), squeeze=False, sharey=True
            )
            for axis in axes.flat[len(outcomes) :]:
                axis.set_visible(False)
            for axis, outcome in zip(axes.flat, outcomes, strict=False):
                for place, one in enumerate(rows):
                    measure = one["measures"].get(outcome)
                    if measure is None or measure["mean"] is None:
                        continue
                    if measure["low"] is not None:
                        axis.plot([measure["low"], measure["high"]], [place, place], color=colour(place))
                    axis.plot([measure["mean"]], [place], marker(place), color=colour(place))
                if outcome.startswith("gap"):
                    axis.axvline(0, color=MUTED, linewidth=0.8)
                axis.set_title(MEANING.get(outcome, outcome), color=INK)
                axis.set_yticks(range(len(rows)), [shortened(label, 22) for label in labels])
                axis.invert_yaxis() if axis is axes.flat[0] else None
            return svg(drawn, f"{name}-{columns}", f"outcomes of {name}")

    if not outcomes:
        return Markup()
    caption = "The outcomes that the questions ask for; less is better. Dots with 95 % intervals."
    return figure(draw(WIDE, max(1, min(2, len(outcomes)))), draw(NARROW, 1), caption)


def _study(found: dict[str, Any]) -> Markup:
    """Fixed points, and the fitted learners' outcome in every cell."""
    points = [
        row([point["contestant"], *(f"{round(point[key], 4) + 0.0:.4f}" for key in FIXED)])
        for point in found["fixed_points"]
    ]
    fixed = table(["objective", *FIXED_WORDS], points, SETTLED)
    names = list(found["rows"][0]["contestants"])
    outcome = next(iter(found["verdicts"].values()))["outcome"] if found["verdicts"] else "js"
    lines = [
        row(
            [
                f"{one['V']} tokens, share {one['share']:g}, {one['tokens']:,} drawn",
                *(_measure(one["contestants"][label][outcome]) for label in names),
            ]
        )
        for one in found["rows"]
    ]
    caption = (
        f"{MEANING.get(outcome, outcome)} between truth and learner, in nats: means with 95 % intervals. "
        "Each objective has its own learning rate, chosen on a development sample. Share: how far tokens "
        "that are plausible together lie close together in the costs' embedding."
    )
    return join(fixed, table(["language and sample", *names], lines, caption))


def _measure(found: dict[str, Any]) -> Markup:
    half = found["high"] - found["mean"]
    return join(f"{found['mean']:.4f}", tag("span", f"± {half:.2g}", class_="ci"))
