"""The report of one or several runs as a document: what was gained and lost, curves, launches, texts."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

import yaml

from emo.common.report.document import (
    Cell,
    Document,
    Fold,
    Items,
    Quote,
    ReportSection,
    Row,
    Table,
    estimated,
)
from emo.common.report.figure import Curve, Curves, Dots, Figure, Points, finite_points
from emo.common.report.numbers import DASH, Effect, describe_changes, formatted, join_words

from ..monitor.console import duration
from ..monitor.validation import Change
from .runs import KILLED, Gain, Run, ending, gains

COLOURED = 8  # runs that curves show in colour; more are grey
SAME = 1e-4  # relative difference of two values that a figure cannot tell apart
UNIT = "nats per token"
EVALUATION = ("report.html", "results.json")  # what `emo report` and `watch` leave
# What is drawn over training, in order: key in metrics.jsonl, title, key of its value on held-out data.
QUANTITIES = (
    ("nll", "Loss in nats per token (NLL)", "validation_nll"),
    ("loss", "What the objective minimises", "validation_loss"),
    ("demd", "Expected transport cost (DEMD)", "validation_demd"),
    ("divergence", "Divergence from the teacher", "validation_divergence"),
    ("grad_norm", "Gradient norm before clipping", ""),
    ("lr", "Learning rate", ""),
    ("tokens_per_s", "Supervised tokens per second", ""),
    ("mfu", "Model FLOPs utilisation (MFU)", ""),
    ("memory_gib", "Peak memory of rank 0's GPU, GiB", ""),
    ("skipped", "Skipped steps", ""),
)
CURVES = (
    "Means since the record before; circles: held-out data. Of more than 400 records the line is the mean of "
    "neighbours, and the band goes from the least to the most of them."
)
CHANGES = (
    "Nats per token, paired over documents: below zero gained, above zero lost. There is a verdict where the "
    "95 % interval is without zero."
)
SUMMARY = (
    "Tokens: supervised ones. Losses: the last NLL, nats per token. Skipped: steps without a finite "
    "gradient, which changed nothing. Time: of training, without saving, validation and loading."
)
LAUNCHED = "A launch that was killed has no end; the next one took the steps after its last save again."
MIXED = "A mixture holds for the steps after the one named, until the next. Shares need not add up to 1."
PLANNED = (
    "Of the last launch, without its first record, in which libraries compile. Tokens: all that a batch has "
    "room for. MFU counts what the model needs, not what checkpointing computes again. Memory: rank 0's."
)
BAD = "Their rows are in bad_batches.jsonl. A step stands here twice where it was taken again."
SUMMARY_HEAD = ["Run", "State", "From", "Objective", "Steps", "Tokens", "Loss", "Held-out loss"]
SUMMARY_HEAD += ["Skipped", "Time"]
LAUNCH_HEAD = ["Run", "How it ended", "Device", "Began", "After step", "Ended", "At step", "Ranks", "Hosts"]
LAUNCH_HEAD += ["ZeRO stage", "Rows per pass"]
PLAN_HEAD = ["Run", "Seconds per step", "Tokens per second", "MFU", "Peak memory, GiB"]
VERDICTS = {1: ("lost", "worse"), -1: ("gained", "better"), 0: ("no clear change", "unclear")}
STATES = {"finished": "better", KILLED: "worse", "failed": "worse"}


def document(runs: Sequence[Run], over: str, folder: Path) -> Document:
    """Return the report. over: `step` or `tokens`, for curves; links are relative to `folder`.

    Curves show the first run and those with the least loss in colour, the best on top.
    """
    several, measured = len(runs) > 1, gains(runs)
    best = sorted(runs, key=lambda run: (run is not runs[0], last_loss(run)))
    for n, run in enumerate(best):
        run.series = n if n < COLOURED else None
        run.mark = run.series if several else ""
    effects: dict[str, list[Effect]] = {}  # by validation set, or all of a single run together
    for gain in measured:
        if (c := gain.change) is not None:
            title, name = (gain.set, gain.run.name) if several else ("Since step 0", gain.set)
            effect = Effect(name, gain.run.series, c.direction, c.value, c.low, c.high)
            effects.setdefault(title, []).append(effect)
    panels = _curves(best[::-1], over)
    legend = [(run.series, run.name) for run in best if run.series is not None] if several else ()
    greys = [run.name for run in runs if run.series is None]
    caption = f"Change of the held-out loss since step 0 in {UNIT}: left of zero gained, right of it lost."
    picture = Figure("Gained and lost", [Dots(title, rows, 0.0) for title, rows in effects.items()], caption)
    if not picture and panels:
        picture, panels = Figure("Curve", panels[:1], "", legend, greys), panels[1:]
    links = {
        str(d / EVALUATION[0]): quote(os.path.relpath(d / EVALUATION[0], folder))
        for run in runs
        for d in (run.path / "eval", run.path.parent)
        if all((d / name).is_file() for name in EVALUATION)
    }
    mixtures = [
        [_name(run), m["mixture"] or "none: all rows alike", m["step"]]
        for run in runs
        for m in run.last_launch.get("mixtures", ())
    ]
    bad = [[_name(run), r["step"], r["reason"], str(r.get("nll", DASH))] for run in runs for r in run.bad]
    sections = [
        ReportSection("Gained and lost", _gains(measured, runs[0].name if several else "")),
        ReportSection("Runs", Table(SUMMARY_HEAD, [_summary(run) for run in runs], SUMMARY, 4)),
        ReportSection("Curves", Figure("Curves", panels, CURVES, legend, greys)),
        ReportSection(
            "Launches", Table(LAUNCH_HEAD, [row for run in runs for row in _launches(run)], LAUNCHED, 3)
        ),
        ReportSection("Mixture of domains", Table(["Run", "Mixture", "After step"], mixtures, MIXED, 2)),
        ReportSection(
            "Plan and measurement", Table(PLAN_HEAD, list(filter(None, map(_plan, runs))), PLANNED)
        ),
        ReportSection("Sampled text", "The likeliest continuations.", *_samples(runs), page_only=True),
        ReportSection("Steps that went wrong", Table(["Run", "Step", "What", "Loss"], bad, BAD)),
        ReportSection("Evaluations", Items(links), page_only=True),
        ReportSection("Settings", *(_settings(run) for run in runs if run.config), page_only=True),
    ]
    about = f"{len(runs)} runs." if several else f"Run {runs[0].path}."
    title = f"Run report: {join_words([run.name for run in runs])}"
    remarks = [remark for run in runs for remark in run.remarks]
    data = [gain.as_json() for gain in measured]
    return Document(title, _answer(runs, effects), about, sections, picture, remarks, data=data)


def last_loss(run: Run) -> float:
    """Return the last loss after step 0: held-out with one validation set, else of training; or inf."""
    return (_after_start(run) or finite_points(run.trained, "step", "nll") or [(0, float("inf"))])[-1][1]


def _after_start(run: Run) -> Points:
    """Return the held-out losses after step 0, which tells nothing about the training."""
    return [(step, loss) for step, loss in _held_out(run) if step > 0]


def _held_out(run: Run, key: str = "validation_nll", over: str = "step") -> Points:
    """Return the measurements of a run with one validation set; of several none stands for the others."""
    measured = [*run.held_out.values()]
    return finite_points(measured[0], over, key) if len(measured) == 1 else []


def _name(run: Run) -> Cell:
    return Cell(run.name, mark=run.mark)


def _answer(runs: Sequence[Run], effects: dict[str, list[Effect]]) -> list[str]:
    """Return what was gained and lost on each validation set, or what is known without one; and states."""
    several, answer = len(runs) > 1, []
    for title, group in effects.items():
        names = [e.label if several else f"the loss on {e.label}" for e in group]
        signs = [(-e.direction, -e.value, -e.high, -e.low) for e in group]  # of a loss less is better
        gained = [Effect(name, None, *sign) for name, sign in zip(names, signs, strict=True)]
        answer.append(f"{f'On {title}' if several else title}, {describe_changes(gained, UNIT, '{:.3f}')}.")
    if len(answer) in range(1, 4):
        answer = [" ".join(answer)]
    elif not answer:
        best = min(runs, key=last_loss)
        lowest = f" of {best.name}, the lowest of {len(runs)}," if several else ""
        known = f"The last loss{lowest} is {last_loss(best):.4g} {UNIT}"
        known = known if math.isfinite(last_loss(best)) else "No loss of training is recorded yet"
        why = "nothing was measured before training to compare it with"
        if best.held_out and all(records[-1]["step"] == 0 for records in best.held_out.values()):
            why = "the held-out loss was measured at step 0 only, not again yet"
        answer = [f"{known}; {why}."]
    states: dict[str, list[str]] = {}
    for run in runs:
        states.setdefault(f"{run.state} at step {run.progress}", []).append(run.name)
    names = [f"{join_words(v) if len(v) < 5 else f'{len(v)} runs'}: {state}" for state, v in states.items()]
    return [*answer, f"{'; '.join(names)}."] if len(states) < 5 else answer


def _gains(measured: Sequence[Gain], first: str) -> Table:
    """Return the table of changes; first: the run that others are compared with, where there are several."""

    def cell(change: Change | None) -> Cell | None:
        return change and estimated(change.value, change.low, change.high, "{:+.4f}")

    rows: list[Row] = []
    for run, name, step, start, end, change, against in measured:
        word, tone = VERDICTS[change.direction] if change else ("not comparable", "quiet")
        if start is None or (change and not change.interval):
            word, tone = "not measured at step 0" if start is None else "too few documents", "quiet"
        losses = [formatted(value, "{:.4f}") for value in (start, end)]
        row = [Cell(word, tone=tone), cell(change), *losses, step, change and change.documents]
        rows.append([name, _name(run), *row, cell(against)] if first else [name, *row])
    head = ["Verdict", "Change", "Loss at step 0", "Loss now", "At step", "Documents"]
    head = ["Set", "Run", *head, f"Against {first}"] if first else ["Set", *head]
    return Table(head, rows, CHANGES, 3 if first else 2)


def _summary(run: Run) -> Row:
    state, objective = run.state, run.config.get("objective", {})
    origin = str(run.config.get("model", {}).get("path") or "a new model")
    minimised = " + ".join(part["name"] for part in objective.get("sum") or ()) or objective.get("name")
    words = [Cell(state, tone=STATES.get(state.split(":")[0], "unclear")), origin, minimised, run.progress]
    last, held_out = run.trained[-1] if run.trained else {}, [y for _, y in _after_start(run)]
    losses = [formatted(loss, "{:.4g}") for loss in (last.get("nll"), held_out[-1] if held_out else None)]
    skipped, seconds = (sum(r.get(key, 0) for r in run.trained) for key in ("skipped", "seconds"))
    return [_name(run), *words, last.get("tokens"), *losses, skipped, duration(seconds)]


def _curves(runs: Sequence[Run], over: str) -> list[Curves]:
    """Return a panel for each quantity, each of several validation sets, and each domain."""
    single = all(len(run.held_out) < 2 for run in runs)
    records = [r for run in runs for r in run.trained]
    both = [(r["loss"], r["nll"]) for r in records if None not in (r["loss"], r.get("nll"))]
    is_likelihood = bool(both) and all(abs(loss - nll) <= SAME * abs(nll) for loss, nll in both)
    left_out = {"loss": is_likelihood, "skipped": not any(r.get("skipped") for r in records)}
    drawn: dict[str, list[tuple[Points, Points]]] = {}  # by title; of each run a line and circles
    for key, title, held_out in QUANTITIES:
        if not left_out.get(key):
            drawn[title] = [
                (finite_points(run.trained, over, key), _held_out(run, held_out, over) if single else [])
                for run in runs
            ]
    for name in [] if single else dict.fromkeys(name for run in runs for name in run.held_out):
        measured = [finite_points(run.held_out.get(name, []), over, "validation_nll") for run in runs]
        drawn[f"Held-out loss on {name}"] = [(points, points) for points in measured]
    for name in dict.fromkeys(name for r in records for name in r.get("domains", ())):
        parts = [
            [r.get("domains", {}).get(name, {}) | {over: r.get(over)} for r in run.trained] for run in runs
        ]
        drawn[f"Loss on domain {name}"] = [(finite_points(part, over, "nll"), []) for part in parts]
    unit = "steps" if over == "step" else "tokens"
    return [
        Curves(title, [Curve(run.series, *p) for run, p in zip(runs, points, strict=True) if any(p)], unit)
        for title, points in drawn.items()
        if any(map(any, points))
    ]


def _launches(run: Run) -> list[Row]:
    rows: list[Row] = []
    for launch in run.launches:
        end = launch["end"]
        is_last = not end and launch is run.last_launch
        times = [time.localtime(r["time"]) if r.get("time") else None for r in (launch, end)]
        began, ended = (t and time.strftime("%Y-%m-%d %H:%M", t) for t in times)
        words = [_name(run), run.state if is_last else ending(launch), launch.get("device")]
        numbers = [launch.get(key) for key in ("ranks", "hosts", "zero_stage", "micro_batch")]
        rows.append([*words, began, launch["step"], ended, end.get("step"), *numbers])
    return rows


def _plan(run: Run) -> Row:
    """Return what was measured beside what was planned; empty where there is neither."""
    launch, cells, both = run.last_launch, list[Cell](), []
    for values in (run.measured(), launch.get("planned") or {}):
        seconds, size = values.get("seconds"), launch.get("batch", 0) * launch.get("block", 0)
        tokens = size / seconds if seconds and size else None
        both.append((seconds, tokens, values.get("mfu"), values.get("memory_gib")))
    for after, before, form in zip(*both, ("{:.3g}", "{:,.0f}", "{:.1%}", "{:.1f}"), strict=True):
        ratio = f", ratio {after / before:.2f}" if before and after is not None else ""
        note = f"planned {formatted(before, form)}{ratio}" if before else ""
        cells.append(Cell(formatted(after, form), note))
    return [_name(run), *cells] if run.launches and any(map(any, both)) else []


def _samples(runs: Sequence[Run]) -> list[Quote | Fold]:
    blocks: list[Quote | Fold] = []
    for prompt in dict.fromkeys(r["prompt"] for run in runs for r in run.samples):
        for run in runs:
            records = [r for r in run.samples if r["prompt"] == prompt]
            texts = [Quote(r["text"], prompt, f"{run.name}, after step {r['step']:,}") for r in records]
            blocks += [*texts[-1:], Fold(f"{run.name}: {len(texts) - 1} earlier", texts[:-1], run.mark)]
    return blocks


def _settings(run: Run) -> Fold:
    names = ("git", "torch", "transformers", "deepspeed")
    versions = [f"{name} {run.last_launch[name]}" for name in names if name in run.last_launch]
    text = yaml.safe_dump(run.config, sort_keys=False, allow_unicode=True)
    return Fold(run.name, [", ".join(versions), Quote(text)])
