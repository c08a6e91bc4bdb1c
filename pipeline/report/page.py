"""`emo report`: describe runs in a document with results, curves, launches and sampled text."""

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
from .runs import KILLED, Gain, RecordedRun, compute_gains, describe_end

COLOURED = 8  # runs that curves show in colour, not grey
EQUAL = 1e-4  # largest relative difference of two values that a figure cannot show
UNIT = "nats per token"
EVALUATION = ("report.html", "results.json")  # files of an evaluation, which runs link to
# Quantities drawn over training, in order: key in metrics.jsonl, title, key on held-out data.
QUANTITIES = (
    ("nll", "Loss in nats per token (NLL)", "validation_nll"),
    ("loss", "Training objective", "validation_loss"),
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
    "Each point is the mean since the previous record. Circles are held-out data. Above 400 records the line "
    "is a mean of neighbours, and the band shows their range."
)
CHANGES = (
    "Nats per token, paired over documents. A negative change is a gain. The verdict is clear if the 95 % "
    "interval excludes zero."
)
SUMMARY = (
    "Tokens: supervised tokens. Losses: the last NLL in nats per token. Skipped: steps that were not applied "
    "because the gradient was not finite. Time: training only, without saving, validation and loading."
)
LAUNCHED = "A launch that was killed has no end. The next launch repeated the steps after its last save."
MIXED = "A mixture applies to the steps after the given one, until the next. Shares need not add up to 1."
PLANNED = (
    "The last launch, without its first record, in which libraries compile. Tokens: all slots of a batch. "
    "MFU does not count recomputation for checkpointing. Memory: of rank 0."
)
BAD = "The rows of these steps are in bad_batches.jsonl. A step that was repeated is listed twice."
SUMMARY_HEAD = ["Run", "State", "From", "Objective", "Steps", "Tokens", "Loss", "Held-out loss"]
SUMMARY_HEAD += ["Skipped", "Time"]
LAUNCH_HEAD = ["Run", "How it ended", "Device", "Began", "After step", "Ended", "At step", "Ranks", "Hosts"]
LAUNCH_HEAD += ["ZeRO stage", "Rows per pass"]
PLAN_HEAD = ["Run", "Seconds per step", "Tokens per second", "MFU", "Peak memory, GiB"]
VERDICTS = {1: ("lost", "worse"), -1: ("gained", "better"), 0: ("no clear change", "unclear")}
STATES = {"finished": "better", KILLED: "worse", "failed": "worse"}

Effects = dict[str, list[Effect]]  # by validation set, or all of a single run together


def build_run_report(runs: Sequence[RecordedRun], over: str, folder: Path) -> Document:
    """Return the report of one or several runs.

    Curves show the first run and those with the lowest loss in colour, the best on top.

    The x-axis of the curves is `over`, which is step or tokens. Links are relative to `folder`.
    """
    several = len(runs) > 1
    gains = compute_gains(runs)
    ranked = sorted(runs, key=lambda run: (run is not runs[0], last_loss(run)))
    for n, run in enumerate(ranked):
        run.series = n if n < COLOURED else None
        run.mark = run.series if several else ""
    effects = _effects(gains, several)
    picture, curves = _figures(ranked, effects, over)
    mixtures = [
        [_name(run), m["mixture"] or "none: all rows", m["step"]]
        for run in runs
        for m in run.last_launch.get("mixtures", ())
    ]
    bad = [[_name(run), r["step"], r["reason"], str(r.get("nll", DASH))] for run in runs for r in run.bad]
    sections = [
        ReportSection("Gained and lost", _gains_table(gains, runs[0].name if several else "")),
        ReportSection("Runs", Table(SUMMARY_HEAD, [_summary_row(run) for run in runs], SUMMARY, 4)),
        ReportSection("Curves", curves),
        ReportSection(
            "Launches", Table(LAUNCH_HEAD, [r for run in runs for r in _launch_rows(run)], LAUNCHED, 3)
        ),
        ReportSection("Mixture of domains", Table(["Run", "Mixture", "After step"], mixtures, MIXED, 2)),
        ReportSection(
            "Plan and measurement", Table(PLAN_HEAD, list(filter(None, map(_plan_row, runs))), PLANNED)
        ),
        ReportSection("Sampled text", "The most likely continuations.", *_samples(runs), page_only=True),
        ReportSection("Steps that went wrong", Table(["Run", "Step", "What", "Loss"], bad, BAD)),
        ReportSection("Evaluations", Items(_evaluation_links(runs, folder)), page_only=True),
        ReportSection("Settings", *(_settings(run) for run in runs if run.config), page_only=True),
    ]
    about = f"{len(runs)} runs." if several else f"Run {runs[0].path}."
    title = f"Run report: {join_words([run.name for run in runs])}"
    remarks = [remark for run in runs for remark in run.remarks]
    data = [gain.as_json() for gain in gains]
    return Document(title, _answer(runs, effects), about, sections, picture, remarks, data=data)


def _effects(gains: Sequence[Gain], several: bool) -> Effects:
    effects: Effects = {}
    for gain in gains:
        if (c := gain.change) is not None:
            title, name = (gain.set, gain.run.name) if several else ("Since step 0", gain.set)
            effect = Effect(name, gain.run.series, c.direction, c.value, c.low, c.high)
            effects.setdefault(title, []).append(effect)
    return effects


def _figures(ranked: Sequence[RecordedRun], effects: Effects, over: str) -> tuple[Figure, Figure]:
    """Return the picture at the top of the report and the section of curves, for runs with the best first.

    The picture is the first curve if no set was measured twice.
    """
    panels = _curves(ranked[::-1], over)
    legend = [(run.series, run.name) for run in ranked if run.series is not None] if len(ranked) > 1 else ()
    greys = [run.name for run in ranked if run.series is None]
    caption = f"Change of the held-out loss since step 0 in {UNIT}. Left of zero is an improvement."
    picture = Figure("Gained and lost", [Dots(title, rows, 0.0) for title, rows in effects.items()], caption)
    if not picture and panels:
        picture = Figure("Curve", panels[:1], "", legend, greys)
        panels = panels[1:]
    return picture, Figure("Curves", panels, CURVES, legend, greys)


def _evaluation_links(runs: Sequence[RecordedRun], folder: Path) -> dict[str, str]:
    """Return the addresses of the runs' evaluation reports by path."""
    return {
        str(directory / EVALUATION[0]): quote(os.path.relpath(directory / EVALUATION[0], folder))
        for run in runs
        for directory in (run.path / "eval", run.path.parent)
        if all((directory / name).is_file() for name in EVALUATION)
    }


def last_loss(run: RecordedRun) -> float:
    """Return the last loss after step 0, or infinity: held-out if there is one set, else of training."""
    return (_held_out_after_start(run) or finite_points(run.trained, "step", "nll") or [(0, float("inf"))])[
        -1
    ][1]


def _held_out_after_start(run: RecordedRun) -> Points:
    return [(step, loss) for step, loss in _held_out(run) if step > 0]


def _held_out(run: RecordedRun, key: str = "validation_nll", over: str = "step") -> Points:
    """Return the measurements of a run's validation set, unless there are several."""
    measured = [*run.held_out.values()]
    return finite_points(measured[0], over, key) if len(measured) == 1 else []


def _name(run: RecordedRun) -> Cell:
    return Cell(run.name, mark=run.mark)


def _answer(runs: Sequence[RecordedRun], effects: Effects) -> list[str]:
    """Return sentences on the change of each validation set, or on the loss, and on the runs' states."""
    several = len(runs) > 1
    answer = []
    for title, group in effects.items():
        names = [e.label if several else f"the loss on {e.label}" for e in group]
        signs = [(-e.direction, -e.value, -e.high, -e.low) for e in group]  # a lower loss is an improvement
        gained = [Effect(name, None, *sign) for name, sign in zip(names, signs, strict=True)]
        answer.append(f"{f'On {title}' if several else title}, {describe_changes(gained, UNIT, '{:.3f}')}.")
    if len(answer) in range(1, 4):
        answer = [" ".join(answer)]
    elif not answer:
        answer = [_describe_last_loss(runs)]
    states: dict[str, list[str]] = {}
    for run in runs:
        states.setdefault(f"{run.state} at step {run.progress}", []).append(run.name)
    names = [f"{join_words(v) if len(v) < 5 else f'{len(v)} runs'}: {state}" for state, v in states.items()]
    return [*answer, f"{'; '.join(names)}."] if len(states) < 5 else answer


def _describe_last_loss(runs: Sequence[RecordedRun]) -> str:
    """Return the lowest loss of the runs, and why there is no change to report."""
    best = min(runs, key=last_loss)
    lowest = f" of {best.name}, the lowest of {len(runs)}," if len(runs) > 1 else ""
    known = f"The last loss{lowest} is {last_loss(best):.4g} {UNIT}"
    known = known if math.isfinite(last_loss(best)) else "No training loss is recorded yet"
    reason = "there is no measurement before training to compare it with"
    if best.held_out and all(records[-1]["step"] == 0 for records in best.held_out.values()):
        reason = "the held-out loss was measured at step 0 only, not again yet"
    return f"{known}; {reason}."


def _gains_table(gains: Sequence[Gain], first: str) -> Table:
    """Return the table of changes. Several runs are compared with the run `first`."""

    def cell(change: Change | None) -> Cell | None:
        return change and estimated(change.value, change.low, change.high, "{:+.4f}")

    rows: list[Row] = []
    for run, name, step, start, end, change, against in gains:
        verdict, tone = VERDICTS[change.direction] if change else ("not comparable", "quiet")
        if start is None or (change and not change.interval):
            verdict = "not measured at step 0" if start is None else "too few documents"
            tone = "quiet"
        losses = [formatted(value, "{:.4f}") for value in (start, end)]
        row = [Cell(verdict, tone=tone), cell(change), *losses, step, change and change.documents]
        rows.append([name, _name(run), *row, cell(against)] if first else [name, *row])
    head = ["Verdict", "Change", "Loss at step 0", "Loss now", "At step", "Documents"]
    head = ["Set", "Run", *head, f"Against {first}"] if first else ["Set", *head]
    return Table(head, rows, CHANGES, 3 if first else 2)


def _summary_row(run: RecordedRun) -> Row:
    state = run.state
    objective = run.config.get("objective", {})
    origin = str(run.config.get("model", {}).get("path") or "a new model")
    minimised = " + ".join(part["name"] for part in objective.get("sum") or ()) or objective.get("name")
    texts = [Cell(state, tone=STATES.get(state.split(":")[0], "unclear")), origin, minimised, run.progress]
    last = run.trained[-1] if run.trained else {}
    held_out = [y for _, y in _held_out_after_start(run)]
    losses = [formatted(loss, "{:.4g}") for loss in (last.get("nll"), held_out[-1] if held_out else None)]
    skipped, seconds = (sum(r.get(key, 0) for r in run.trained) for key in ("skipped", "seconds"))
    return [_name(run), *texts, last.get("tokens"), *losses, skipped, duration(seconds)]


def _curves(runs: Sequence[RecordedRun], over: str) -> list[Curves]:
    """Return a panel for each quantity, for each of several validation sets and for each domain."""
    single = all(len(run.held_out) < 2 for run in runs)
    records = [r for run in runs for r in run.trained]
    losses = [(r["loss"], r["nll"]) for r in records if None not in (r["loss"], r.get("nll"))]
    is_mle = bool(losses) and all(abs(loss - nll) <= EQUAL * abs(nll) for loss, nll in losses)
    excluded = {"loss": is_mle, "skipped": not any(r.get("skipped") for r in records)}
    drawn: dict[str, list[tuple[Points, Points]]] = {}  # a line and circles of each run, by title
    for key, title, held_out in QUANTITIES:
        if not excluded.get(key):
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


def _launch_rows(run: RecordedRun) -> list[Row]:
    rows: list[Row] = []
    for launch in run.launches:
        end = launch["end"]
        is_last = not end and launch is run.last_launch
        times = [time.localtime(r["time"]) if r.get("time") else None for r in (launch, end)]
        began, ended = (t and time.strftime("%Y-%m-%d %H:%M", t) for t in times)
        texts = [_name(run), run.state if is_last else describe_end(launch), launch.get("device")]
        numbers = [launch.get(key) for key in ("ranks", "hosts", "zero_stage", "micro_batch")]
        rows.append([*texts, began, launch["step"], ended, end.get("step"), *numbers])
    return rows


def _plan_row(run: RecordedRun) -> Row:
    """Return the measurements of the last launch next to its plan, if there are any."""
    launch = run.last_launch
    cells = list[Cell]()
    both = []
    for values in (run.measure_launch(), launch.get("planned") or {}):
        seconds = values.get("seconds")
        size = launch.get("batch", 0) * launch.get("block", 0)
        tokens = size / seconds if seconds and size else None
        both.append((seconds, tokens, values.get("mfu"), values.get("memory_gib")))
    for measured, planned, form in zip(*both, ("{:.3g}", "{:,.0f}", "{:.1%}", "{:.1f}"), strict=True):
        ratio = f", ratio {measured / planned:.2f}" if planned and measured is not None else ""
        note = f"planned {formatted(planned, form)}{ratio}" if planned else ""
        cells.append(Cell(formatted(measured, form), note))
    return [_name(run), *cells] if run.launches and any(map(any, both)) else []


def _samples(runs: Sequence[RecordedRun]) -> list[Quote | Fold]:
    blocks: list[Quote | Fold] = []
    for prompt in dict.fromkeys(r["prompt"] for run in runs for r in run.samples):
        for run in runs:
            records = [r for r in run.samples if r["prompt"] == prompt]
            texts = [Quote(r["text"], prompt, f"{run.name}, after step {r['step']:,}") for r in records]
            blocks += [*texts[-1:], Fold(f"{run.name}: {len(texts) - 1} earlier", texts[:-1], run.mark)]
    return blocks


def _settings(run: RecordedRun) -> Fold:
    names = ("git", "torch", "transformers", "deepspeed")
    versions = [f"{name} {run.last_launch[name]}" for name in names if name in run.last_launch]
    text = yaml.safe_dump(run.config, sort_keys=False, allow_unicode=True)
    return Fold(run.name, [", ".join(versions), Quote(text)])
