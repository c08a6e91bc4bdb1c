"""The run report: one or several runs as one HTML file, of the same parts as the evaluation's report."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import yaml

from common.errors import UserError
from common.files import write_text
from common.page.figures import NARROW, WIDE, Curve, Panel, Points, css_colour, curves_figure
from common.page.parts import (
    Markup,
    chip,
    details,
    figure,
    join,
    legend,
    page,
    row,
    section,
    table,
    tag,
)
from common.untrusted import number
from pipeline.report.forgetting import gained_and_lost
from pipeline.report.gather import DASH, KILLED, Launch, Run, clock
from pipeline.report.pace import duration

MOST = 400  # points of a curve; of more, neighbours are averaged
COLUMNS = 2  # of panels where the page is wide
SAME = 1e-4  # relative difference of two values that a figure cannot tell apart


class Quantity(NamedTuple):
    """Something to draw over training: its key in metrics.jsonl, and that of its value on held-out rows."""

    key: str
    title: str
    held_out: str | None = None


# What the page draws, in order: the one place that knows. A quantity that no record has is left out.
QUANTITIES = (
    Quantity("loss", "Loss (what the objective minimises)", "validation_loss"),
    Quantity("nll", "NLL (nats per token)", "validation_nll"),
    Quantity("demd", "DEMD (expected transport cost)", "validation_demd"),
    Quantity("grad_norm", "Gradient norm before clipping"),
    Quantity("lr", "Learning rate"),
    Quantity("tokens_per_s", "Supervised tokens per second"),
    Quantity("mfu", "MFU (share of the peak)"),
    Quantity("memory_gib", "Peak memory of rank 0's GPU (GiB)"),
    Quantity("skipped", "Skipped steps"),
)
ONLY_IF_ANY = ("skipped",)  # drawn where one value is not zero


def write_report(runs: Sequence[Run], out: Path | None, over: str) -> Path:
    """The page of the runs, whole or not at all; where it is. over: `step` or `tokens`.

    Raises UserError for a place that cannot be written.
    """
    target = out or runs[0].path / "report.html"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_text(target, html(runs, over, target.absolute().parent))
    except OSError as error:
        raise UserError(f"{target} cannot be written ({error.strerror}); set another --out") from None
    return target


def html(runs: Sequence[Run], over: str, place: Path) -> str:
    """The whole page; links are relative to `place`, where it is going to be."""
    names = ", ".join(run.name for run in runs)
    lead = f"{len(runs)} runs, a colour each." if len(runs) > 1 else str(runs[0].path)
    sections = [
        _summary(runs),
        gained_and_lost(runs),
        _curves(runs, over),
        _launches(runs),
        _mixtures(runs),
        _plan(runs),
        _samples(runs),
        _bad(runs),
        _evaluations(runs, place),
        _settings(runs),
    ]
    remarks = " ".join(remark for run in runs for remark in run.remarks)
    return page(f"Run report: {names}", lead, sections, remarks)


def _name(number_: int, run: Run, runs: Sequence[Run]) -> Markup:
    return join(chip(css_colour(number_)) if len(runs) > 1 else "", tag("span", run.name, class_="method"))


def _summary(runs: Sequence[Run]) -> Markup:
    def line(i: int, run: Run) -> Markup:
        last = run.trained[-1] if run.trained else {}
        of = f" of {run.steps:,}" if run.steps else ""
        held_out = [x for x in (number(r.get("validation_nll")) for r in _only_set(run)) if x is not None]
        spent = sum(seconds for _, seconds, _ in run.seconds())
        skipped = sum(int(number(r.get("skipped")) or 0) for r in run.trained)
        cells: list[str] = [
            _name(i, run, runs),
            run.state(time.time()),
            str(run.value("model", "path") or "a new model"),
            _objective(run),
            f"{run.reached:,}{of}" if run.reached is not None else DASH,
            _shown(last.get("tokens"), "{:,.0f}"),
            _shown(last.get("nll"), "{:.4g}"),
            f"{held_out[-1]:.4g}" if held_out else DASH,
            str(skipped),
            duration(spent) if spent else DASH,
        ]
        return row(cells, text=4)

    head = ["Run", "State", "From", "Objective", "Steps", "Tokens", "NLL", "Held-out NLL", "Skipped", "Time"]
    caption = (
        "Steps: the last that is known of. Tokens (supervised ones) and NLL (nats per token): the last "
        "record's; held-out: the last validation, of one set. Skipped: steps without a finite gradient, "
        "which changed no weight. Time: of training the kept steps, without saving, validation and loading."
    )
    rows = [line(i, run) for i, run in enumerate(runs)]
    return section("Runs" if len(runs) > 1 else "Run", table(head, rows, caption, text=4))


def _only_set(run: Run) -> list[dict[str, Any]]:
    """The validation records of a run with one set; of several none stands for the others."""
    return run.held_out(run.sets[0]) if len(run.sets) == 1 else []


def _objective(run: Run) -> str:
    parts = run.value("objective", "sum")
    if isinstance(parts, list):
        return " + ".join(str(part.get("name")) for part in parts if isinstance(part, dict))
    return str(run.value("objective", "name") or DASH)


def _curves(runs: Sequence[Run], over: str) -> Markup:
    drawn = [panel for q in _distinct(runs) if (panel := _panel(q, runs, over)) is not None]
    if any(len(run.sets) > 1 for run in runs):
        drawn += [_of_set(name, runs, over) for name in dict.fromkeys(n for run in runs for n in run.sets)]
    told = dict.fromkeys(name for run in runs for name in run.domains)
    drawn += [_of_domain(name, runs, over) for name in told]
    unit = "steps" if over == "step" else "tokens"
    wide, narrow = (
        curves_figure(drawn, COLUMNS, unit, width, f"run-{kind}", "Curves of training")
        for width, kind in ((WIDE, "wide"), (NARROW, "narrow"))
    )
    if not wide:
        return Markup()
    caption = "Means over the steps since the record before. Open circles: validation."
    if any(_objective(run) == "emo" for run in runs) and len(_distinct(runs)) < len(QUANTITIES):
        caption += (
            " EMO's loss has the value of the NLL, because its weight, a token's NLL over its DEMD, makes "
            "both of its terms equal; its gradient is another."
        )
    longest = max(len(run.trained) for run in runs)
    if longest > MOST:
        caption += f" Curves of more than {MOST} records: means of neighbours."
    if any("mfu" in record for run in runs for record in run.trained):
        caption += " MFU counts what the model needs; what checkpointing computes again does not count."
    names = [(css_colour(i), run.name) for i, run in enumerate(runs)] if len(runs) > 1 else []
    return section("Curves", figure(wide, narrow, caption, legend(names) if names else ""))


def _distinct(runs: Sequence[Run]) -> list[Quantity]:
    """The quantities without the loss where it is the NLL everywhere, as that of some objectives is."""
    pairs = [(number(r.get("loss")), number(r.get("nll"))) for run in runs for r in run.records]
    known = [(loss, nll) for loss, nll in pairs if loss is not None and nll is not None]
    equal = known and all(abs(loss - nll) <= SAME * abs(nll) for loss, nll in known)
    _, nll, *others = QUANTITIES
    return (
        [nll._replace(title="Loss, which is the NLL (nats per token)"), *others]
        if equal
        else list(QUANTITIES)
    )


def _panel(quantity: Quantity, runs: Sequence[Run], over: str) -> Panel | None:
    """The curves of a quantity; None where no run has any."""
    curves = [
        Curve(
            i,
            thinned(_points(run.records, quantity.key, over)),
            _points(_only_set(run), quantity.held_out, over) if quantity.held_out else [],
        )
        for i, run in enumerate(runs)
    ]
    values = [y for curve in curves for _, y in (*curve.points, *curve.held_out)]
    if not values or (quantity.key in ONLY_IF_ANY and not any(values)):
        return None
    return Panel(quantity.title, curves)


def _of_set(name: str, runs: Sequence[Run], over: str) -> Panel:
    """The NLL of a validation set in each run."""
    found = [_points(run.held_out(name), "validation_nll", over) for run in runs]
    curves = [Curve(i, points, points) for i, points in enumerate(found)]
    return Panel(f"NLL of validation set {name} (nats per token)", curves)


def _of_domain(name: str, runs: Sequence[Run], over: str) -> Panel:
    """The NLL of a domain's training rows in each run."""
    found = [_points(run.of_domain(name), "nll", over) for run in runs]
    curves = [Curve(i, thinned(points), []) for i, points in enumerate(found)]
    return Panel(f"NLL of domain {name} (nats per token)", curves)


def _points(records: Sequence[dict[str, Any]], key: str, over: str) -> Points:
    found = [(number(r.get(over)), number(r.get(key))) for r in records]
    return [(x, y) for x, y in found if x is not None and y is not None]


def thinned(points: Points, most: int = MOST) -> Points:
    """At most `most` points: each the mean of as many neighbours as it takes."""
    group = -(-len(points) // most) or 1
    parts = [points[i : i + group] for i in range(0, len(points), group)]
    return [(sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)) for part in parts]


def _launches(runs: Sequence[Run]) -> Markup:
    rows = []
    for i, run in enumerate(runs):
        for n, launch in enumerate(run.launches):
            name = _name(i, run, runs) if n == 0 else ""
            rows.append(row([name, *_launch(run, n, launch)], kind="" if n or not i else "first", text=3))
    head = ["Run", "How it ended", "Device", "Began", "After step", "Ended", "At step"]
    head += ["Ranks", "Hosts", "ZeRO", "Rows per pass"]
    caption = (
        "A launch that was killed has no end; the steps after its last save were taken again by the next one."
    )
    return section("Launches", table(head, rows, caption, text=3)) if rows else Markup()


def _launch(run: Run, index: int, launch: Launch) -> list[str]:
    begin, end = launch.begin, launch.end
    if end is not None:
        how = f"{end.get('how')}: {end['reason']}" if end.get("reason") else str(end.get("how"))
    else:
        last = index == len(run.launches) - 1
        how = run.state(time.time()) if last else KILLED
    fields = [how, str(begin.get("device", DASH)), clock(begin.get("time")), f"{begin['step']:,}"]
    fields += [clock(end.get("time")), f"{end['step']:,}"] if end is not None else [DASH, DASH]
    keys = ("ranks", "hosts", "zero_stage", "micro_batch")
    return fields + [_shown(begin.get(key), "{:,.0f}") for key in keys]


def _mixtures(runs: Sequence[Run]) -> Markup:
    """Which shares of domains held when, as the last launch says."""
    rows: list[Markup] = []
    for i, run in enumerate(runs):
        given = run.launches[-1].begin.get("mixtures") if run.launches else None
        held = [one for one in given if isinstance(one, dict)] if isinstance(given, list) else []
        for n, one in enumerate(held):
            name = _name(i, run, runs) if n == 0 else ""
            cells = [
                name,
                str(one.get("mixture") or "none: all rows alike"),
                _shown(one.get("step"), "{:,.0f}"),
            ]
            rows.append(row(cells, kind="first" if i and not n else "", text=2))
    if not rows:
        return Markup()
    caption = (
        "Shares need not add up to 1. A mixture holds for the steps after the one named, until the next."
    )
    return section("Mixture of domains", table(["Run", "Mixture", "After step"], rows, caption, text=2))


def _plan(runs: Sequence[Run]) -> Markup:
    """Planned beside measured, for the last launch of each run."""
    rows: list[Markup] = []
    for i, run in enumerate(runs):
        if not run.launches:
            continue
        begin, found = run.launches[-1].begin, run.measured()
        plan = begin["planned"] if isinstance(begin.get("planned"), dict) else {}
        planned = {key: number(plan.get(key)) for key in ("seconds", "mfu", "memory_gib")}
        size = (number(begin.get("batch")) or 0) * (number(begin.get("block")) or 0)
        rates = [size / x if x and size else None for x in (planned["seconds"], found.seconds)]
        lines: list[tuple[str, float | None, float | None, str]] = [
            ("seconds per step", planned["seconds"], found.seconds, "{:.3g}"),
            ("tokens per second, all that a batch has room for", rates[0], rates[1], "{:,.0f}"),
            ("MFU", planned["mfu"], found.mfu, "{:.1%}"),
            ("peak memory of a GPU, GiB", planned["memory_gib"], found.memory_gib, "{:.1f}"),
        ]
        shown = [line for line in lines if line[1] is not None or line[2] is not None]
        for n, (what, first, second, form) in enumerate(shown):
            ratio = f"{second / first:.2f}" if first and second is not None else DASH
            name = _name(i, run, runs) if n == 0 else ""
            cells = [name, what, _shown(first, form), _shown(second, form), ratio]
            rows.append(row(cells, kind="first" if i and not n else "", text=2))
    if not rows:
        return Markup()
    caption = (
        "Of the last launch, measured without its first record, in which libraries compile and warm up. "
        "A dash: no plan is made for hardware whose figures are not known. Memory is rank 0's. MFU: model "
        "FLOPs, in both columns."
    )
    head = ["Run", "What", "Planned", "Measured", "Measured / planned"]
    return section("The plan and what came of it", table(head, rows, caption, text=2))


def _samples(runs: Sequence[Run]) -> Markup:
    prompts = list(dict.fromkeys(str(r.get("prompt")) for run in runs for r in run.samples))
    parts: list[Markup] = []
    for prompt in prompts:
        parts.append(tag("h3", prompt or "(nothing)"))
        for i, run in enumerate(runs):
            mine = [r for r in run.samples if str(r.get("prompt")) == prompt]
            if mine:
                parts.append(_texts(mine, _name(i, run, runs) if len(runs) > 1 else Markup()))
    lead = tag("p", "The likeliest continuation of each prompt, at every save; the last one is shown first.")
    return section("Text", lead, *parts) if parts else Markup()


def _texts(samples: list[dict[str, Any]], name: Markup) -> Markup:
    def text(sample: dict[str, Any]) -> Markup:
        label = tag("span", f"after step {sample['step']:,}", class_="ci")
        return join(label, tag("blockquote", tag("i", str(sample.get("prompt"))), sample["text"]))

    earlier = [text(sample) for sample in samples[:-1]]
    folded = details(f"{len(earlier)} earlier", *earlier) if earlier else Markup()
    return tag("div", name, text(samples[-1]), folded)


def _bad(runs: Sequence[Run]) -> Markup:
    rows = [
        row([_name(i, run, runs), f"{r['step']:,}", str(r.get("reason", DASH)), str(r.get("nll", DASH))])
        for i, run in enumerate(runs)
        for r in run.bad
    ]
    caption = "Their rows are in bad_batches.jsonl. A step may stand here twice when it was taken again."
    return (
        section("Steps that went wrong", table(["Run", "Step", "What", "NLL"], rows, caption))
        if rows
        else Markup()
    )


def _evaluations(runs: Sequence[Run], place: Path) -> Markup:
    found = {path: None for run in runs for path in run.evaluations}
    links = [tag("li", tag("a", str(path), href=quote(os.path.relpath(path, place)))) for path in found]
    return section("Evaluations", tag("ul", *links)) if links else Markup()


def _settings(runs: Sequence[Run]) -> Markup:
    parts = []
    for run in runs:
        if run.config:
            begin = run.launches[-1].begin if run.launches else {}
            versions = [
                f"{key} {begin[key]}" for key in ("git", "torch", "transformers", "deepspeed") if key in begin
            ]
            text = yaml.safe_dump(run.config, sort_keys=False, allow_unicode=True)
            parts.append(details(run.name, tag("p", ", ".join(versions)), tag("pre", text)))
    return section("Settings", *parts) if parts else Markup()


def _shown(value: Any, form: str) -> str:
    given = number(value)
    return DASH if given is None else form.format(given)
