"""`emo report`: describe runs in a document with results, curves, launches and sampled text."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

import yaml

from emo.common.io.untrusted import number
from emo.common.report.document import Cell, Document, Fold, Items, Quote, ReportSection, Row, Table, drawn
from emo.common.report.figure import Curve, Curves, Figure, Points, choose_series, finite_points, mean_points
from emo.common.report.numbers import CHANGED, COMPARED, DASH, Effect, describe_effects, formatted, join_words
from emo.common.text import duration
from emo.data_prep.shards.cost_table import cost_tables

from ..checkpoint.config import TASK
from ..control.run_dir import EXPORT
from ..monitor.documents import Change
from .runs import KILLED, KL, Gain, RecordedRun, compute_gains, describe_end

COLOURED = 8  # runs that curves show in colour, not grey
EQUAL = 1e-4  # largest relative difference of two values that a figure cannot show
UNIT = "nats per token"
EVALUATION = ("report.html", "results.json")  # files of an evaluation, which runs link to
KL_TITLE = "KL from the base model, nats per token"
# Quantities drawn over training, in order: key in metrics.jsonl, title, key on held-out data.
QUANTITIES = (
    ("nll", "Loss, nats per token", "validation_nll"),
    ("loss", "Training objective", "validation_loss"),
    ("demd", "Embedding distance to the target (DEMD)", "validation_demd"),
    ("divergence", "Divergence from the teacher", "validation_divergence"),
    ("", KL_TITLE, KL),
    ("grad_norm", "Gradient norm before clipping", ""),
    ("lr", "Learning rate", ""),
    ("tokens_per_s", "Supervised tokens per second", ""),
    ("mfu", "GPU utilisation (MFU)", ""),
    ("memory_gib", "Peak memory of rank 0's GPU, GiB", ""),
    ("skipped", "Skipped steps", ""),
)
STATES_OF_A_STEP = ("lr", "memory_gib", "skipped")  # no means since the previous record
CURVES = (
    "Points are means since the previous record. A short last record is joined with the one before. Circles "
    "are held-out data. Above 400 records the line is a mean of neighbours, and the band is their range."
)
CHANGES = (
    "Change of the held-out loss since step 0 in nats per token, with 95 % intervals, paired by document. "
    "Left of zero is an improvement. A change is clear if its interval excludes zero."
)
DRIFT = " KL from base: how far the predictions are from those before training, in nats per token."
ONE_RUN = "The intervals cover the choice of held-out documents, not the training seed."
SUMMARY = (
    "Tokens: supervised tokens. Losses: the last ones in nats per token. Skipped: steps that were not "
    "applied because the gradient was not finite. Time: only training, no saving, validation or loading."
)
LAUNCHED = "A launch that was killed has no end. The next launch repeated the steps after its last save."
MIXED = "A mixture applies to the steps after the given one, until the next. Shares need not add up to 1."
PLANNED = (
    "The last launch, without its first record, in which libraries compile. Tokens: all slots of a batch. "
    "MFU does not count recomputation for checkpointing. Memory: of rank 0."
)
BAD = "The rows of these steps are in bad_batches.jsonl. A step that was repeated is listed twice."
SCORED = "Accuracies that `emo watch` has given to checkpoints. Best: the one that train.keep_best keeps."
SCORE_HEAD = ["Run", "Task", "Step", "Accuracy", ""]
SUMMARY_HEAD = ["Run", "State", "From", "Objective", "Steps", "Tokens", "Loss", "Held-out loss"]
SUMMARY_HEAD += ["Skipped", "Time"]
LAUNCH_HEAD = ["Run", "How it ended", "Device", "Began", "After step", "Ended", "At step", "Ranks", "Hosts"]
LAUNCH_HEAD += ["ZeRO stage", "Rows per pass"]
PLAN_HEAD = ["Run", "Seconds per step", "Tokens per second", "GPU utilisation (MFU)", "Peak memory, GiB"]
VERDICTS = {1: ("worse", "worse"), -1: ("improved", "better"), 0: ("no clear change", "unclear")}
STATES = {"finished": "better", KILLED: "worse", "failed": "worse"}


def build_run_report(runs: Sequence[RecordedRun], over: str, folder: Path) -> Document:
    """Return the report of one or several runs.

    Curves show the first run and those with the lowest loss in colour, the best on top.

    The x-axis of the curves is `over`, which is step or tokens. Links are relative to `folder`.
    """
    several = len(runs) > 1
    gains = compute_gains(runs)
    ranked = sorted(runs, key=lambda run: (run is not runs[0], last_loss(run)))
    series = choose_series([_series_name(run, runs) for run in ranked[:COLOURED]])
    for n, run in enumerate(ranked):
        run.series = series[n] if n < COLOURED else None
        run.mark = run.series if several else ""
    picture, curves = _figures(ranked, gains, over)
    mixtures = [
        [_name(run), m["mixture"] or "none: all rows", m["step"]]
        for run in runs
        for m in run.last_launch.get("mixtures", ())
    ]
    bad = [[_name(run), r["step"], r["reason"], str(r.get("nll", DASH))] for run in runs for r in run.bad]
    sections = [
        ReportSection("Runs", Table(SUMMARY_HEAD, [_summary_row(run) for run in runs], SUMMARY, 4)),
        ReportSection("Curves", curves),
        ReportSection(
            "Scores of checkpoints",
            Table(SCORE_HEAD, [r for run in runs for r in _score_rows(run)], SCORED, 2),
        ),
        ReportSection(
            "Launches", Table(LAUNCH_HEAD, [r for run in runs for r in _launch_rows(run)], LAUNCHED, 3)
        ),
        ReportSection("Mixture of domains", Table(["Run", "Mixture", "After step"], mixtures, MIXED, 2)),
        ReportSection(
            "Plan and measurement", Table(PLAN_HEAD, list(filter(None, map(_plan_row, runs))), PLANNED)
        ),
        ReportSection("Preparation of the data", *cost_tables(run.config for run in runs)),
        ReportSection("Sampled text", "The most likely continuations.", *_samples(runs), page_only=True),
        ReportSection("Steps that went wrong", Table(["Run", "Step", "What", "Loss"], bad, BAD)),
        ReportSection("Evaluations", Items(_evaluation_links(runs, folder)), page_only=True),
        ReportSection("Settings", *(_settings(run) for run in runs if run.config), page_only=True),
    ]
    about = f"{len(runs)} runs." if several else f"Run {runs[0].path}."
    title = f"Run report: {join_words([run.name for run in runs])}"
    remarks = [ONE_RUN] if several and any(gain.against_first for gain in gains) else []
    remarks += [remark for run in runs for remark in run.remarks]
    data = [gain.as_json() for gain in gains]
    return Document(title, _answer(runs, gains), about, sections, picture, remarks, data=data)


def _series_name(run: RecordedRun, runs: Sequence[RecordedRun]) -> str:
    """Return the name that decides how a run is drawn: its objective, or "" if the others started from it."""
    origins = [Path(str(other.config.get("model", {}).get("path"))).resolve() for other in runs]
    return "" if (run.path / EXPORT).resolve() in origins else _objective(run)


def _objective(run: RecordedRun) -> str:
    objective = run.config.get("objective", {})
    return " + ".join(part["name"] for part in objective.get("sum") or ()) or str(objective.get("name", ""))


def _figures(
    ranked: Sequence[RecordedRun], gains: Sequence[Gain], over: str
) -> tuple[Figure | Table, Figure]:
    """Return the picture at the top and the section of curves, for runs with the best first.

    The picture is the first curve if there is no held-out loss to report.
    """
    several = len(ranked) > 1
    panels = _curves(ranked[::-1], over)
    legend = [(run.series, run.name) for run in ranked if run.series is not None] if several else ()
    greys = [run.name for run in ranked if run.series is None]
    picture: Figure | Table = _gains_table(gains, ranked[0].name if several else "")
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
    points = _held_out_after_start(run) or mean_points(run.trained, "step", "nll")
    return points[-1][1] if points else math.inf


def _held_out_after_start(run: RecordedRun) -> Points:
    return [(step, loss) for step, loss in _held_out(run) if step > 0]


def _held_out(run: RecordedRun, key: str = "validation_nll", over: str = "step") -> Points:
    """Return the measurements of a run's validation set, unless there are several."""
    measured = [*run.held_out.values()]
    return finite_points(measured[0], over, key) if len(measured) == 1 else []


def _name(run: RecordedRun) -> Cell:
    return Cell(run.name, mark=run.mark)


def _answer(runs: Sequence[RecordedRun], gains: Sequence[Gain]) -> list[str]:
    """Return sentences on differences between runs, on changes since step 0, and on the runs' states."""
    several = len(runs) > 1
    answer: list[str] = []
    for name in dict.fromkeys(gain.set for gain in gains if gain.against_first):
        pairs = [(g.run.name, g.against_first) for g in gains if g.set == name]
        effects = [_improvement(label, change) for label, change in pairs if change]
        start = f"On {name}" if answer else f"Compared with {runs[0].name} on {name}"
        answer.append(f"{start}, {describe_effects(effects, COMPARED, UNIT, '{:.3f}')}.")
    for name in dict.fromkeys(gain.set for gain in gains) if several else [""]:
        changes = [
            (g.run.name if several else f"the loss on {g.set}", g) for g in gains if name in ("", g.set)
        ]
        if effects := [_improvement(label, g.change) for label, g in changes if g.change]:
            start = f"Since step 0 on {name}" if several else "Since step 0"
            answer.append(f"{start}, {describe_effects(effects, CHANGED, UNIT, '{:.3f}')}.")
    answer = answer or _describe_last_loss(runs)
    states: dict[str, list[str]] = {}
    for run in runs:
        states.setdefault(f"{run.state} at step {run.progress}", []).append(run.name)
    names = [f"{join_words(v) if len(v) < 5 else f'{len(v)} runs'}: {state}" for state, v in states.items()]
    return [*answer, f"{'; '.join(names)}."] if len(states) < 5 else answer


def _improvement(name: str, change: Change) -> Effect:
    """Return a change of a loss with the opposite sign, so that positive is better."""
    return Effect(name, None, -change.direction, -change.value, -change.high, -change.low)


def _describe_last_loss(runs: Sequence[RecordedRun]) -> list[str]:
    """Return the lowest loss of the runs, and why there is no change to report."""
    best, *others = sorted(runs, key=last_loss)
    known = "No training loss is recorded yet"
    if math.isfinite(last_loss(best)):
        known = f"The last loss is {last_loss(best):.4g} {UNIT}"
        if others and math.isfinite(last_loss(others[0])):
            gap = last_loss(others[0]) - last_loss(best)
            known = f"{best.name} has the lowest last loss, {last_loss(best):.4g} {UNIT}, "
            known += f"{formatted(gap, '{:.3g}')} below {others[0].name}"
    reason = "There is no measurement before training to compare it with"
    if best.held_out and all(records[-1]["step"] == 0 for records in best.held_out.values()):
        reason = "The held-out loss was measured at step 0 only, not again yet"
    return [f"{known}.", f"{reason}."]


def _gains_table(gains: Sequence[Gain], first: str) -> Table:
    """Return the table of changes. Several runs are compared with the run `first`."""
    rows: list[Row] = []
    has_kl = any(gain.kl_from_base is not None for gain in gains)
    for i, (run, name, step, start, end, change, against, kl) in enumerate(gains):
        verdict, tone = VERDICTS[change.direction] if change else ("not comparable", "quiet")
        if start is None or (change and not change.interval):
            verdict = "not measured at step 0" if start is None else "too few documents"
            tone = "quiet"
        if change and change.diverged:
            verdict, tone = "not finite", "worse"
        losses = [formatted(value, "{:.4f}") for value in (start, end)]
        row = [Cell(verdict, tone=tone), *_drawn(run, change), *losses, step, change and change.documents]
        row += [formatted(kl, "{:.4f}")] if has_kl else []
        title = Cell(name, tone="again" * (i > 0 and gains[i - 1].set == name))
        rows.append([title, _name(run), *row, _drawn(run, against)[1]] if first else [title, *row])
    head = ["Verdict", "← better · worse →", "Change", "Loss at step 0", "Loss now", "At step", "Documents"]
    head += ["KL from base"] if has_kl else []
    head = ["Held-out set", "Run", *head, f"Against {first}"] if first else ["Held-out set", *head]
    return Table(head, rows, CHANGES + DRIFT * has_kl, 3 if first else 2)


def _drawn(run: RecordedRun, change: Change | None) -> list[Cell]:
    if change is None:
        return [Cell(""), Cell(DASH)]
    return drawn(Effect("", run.series, 0, change.value, change.low, change.high), "{:+.4f}")


def _summary_row(run: RecordedRun) -> Row:
    state = run.state
    origin = str(run.config.get("model", {}).get("path") or "a new model")
    about = Cell(state, tone=STATES.get(state.split(":")[0], "unclear"))
    texts = [about, origin, _objective(run) or DASH, run.progress]
    last = run.trained[-1] if run.trained else {}
    losses = [
        formatted(points[-1][1] if points else None, "{:.4g}")
        for points in (mean_points(run.trained, "step", "nll"), _held_out_after_start(run))
    ]
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
        read = finite_points if key in STATES_OF_A_STEP else mean_points
        if not excluded.get(key):
            drawn[title] = [
                (read(run.trained, over, key), _held_out(run, held_out, over) if single else [])
                for run in runs
            ]
    for name in [] if single else dict.fromkeys(name for run in runs for name in run.held_out):
        for title, key in (("Held-out loss", "validation_nll"), (KL_TITLE, KL)):
            measured = [finite_points(run.held_out.get(name, []), over, key) for run in runs]
            drawn[f"{title} on {name}"] = [(points, points) for points in measured]
    for name in dict.fromkeys(name for r in records for name in r.get("domains", ())):
        parts = [
            [r.get("domains", {}).get(name, {}) | {over: r.get(over)} for r in run.trained] for run in runs
        ]
        drawn[f"Loss on domain {name}"] = [(mean_points(part, over, "nll"), []) for part in parts]
    unit = "steps" if over == "step" else "tokens"
    return [
        Curves(title, [Curve(run.series, *p) for run, p in zip(runs, points, strict=True) if any(p)], unit)
        for title, points in drawn.items()
        if any(map(any, points))
    ]


def _score_rows(run: RecordedRun) -> list[Row]:
    """Return the last score of each task and checkpoint, with a mark for the best checkpoint."""
    best = None if run.best is None else (run.best.metric, run.best.step)
    last = {(f"{TASK}{r.get('task')}", r["step"]): number(r.get("value")) for r in run.scores}
    return [
        [_name(run), metric.removeprefix(TASK), step, formatted(last[metric, step], "{:.1%}"),
         Cell("best", tone="better") if (metric, step) == best else ""]
        for metric, step in sorted(last)
    ]  # fmt: skip


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
