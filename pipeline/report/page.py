"""The report of one or several runs as a document: what was gained and lost, curves, launches, texts."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import yaml

from emo.common.report.document import Block, Cell, Document, Fold, Items, Quote, Row, Section, Table
from emo.common.report.figure import Curve, Curves, Dot, Dots, Figure, Points, pairs
from emo.common.report.numbers import DASH, Effect, between, changes, formatted, listed
from emo.pipeline.report.console import duration
from emo.pipeline.report.runs import KILLED, Gain, Run, as_json, gains
from emo.pipeline.report.validation import Change

COLOURED = 8  # runs that curves show in colour; more are grey
SAME = 1e-4  # relative difference of two values that a figure cannot tell apart
UNIT = "nats per token"
EVALUATION = ("report.html", "results.json")  # what `emo report` and `watch` leave
# What is drawn over training, in order: key in metrics.jsonl, title, key of its value on held-out data.
QUANTITIES = (
    ("nll", "Loss in nats per token (NLL)", "validation_nll"),
    ("loss", "What the objective minimises", "validation_loss"),
    ("demd", "Expected transport cost (DEMD)", "validation_demd"),
    ("grad_norm", "Gradient norm before clipping", ""),
    ("lr", "Learning rate", ""),
    ("tokens_per_s", "Supervised tokens per second", ""),
    ("mfu", "Model FLOPs utilisation (MFU)", ""),
    ("memory_gib", "Peak memory of rank 0's GPU, GiB", ""),
    ("skipped", "Skipped steps", ""),
)
MIXED = "A mixture holds for the steps after the one named, until the next. Shares need not add up to 1."
BAD = "Their rows are in bad_batches.jsonl. A step stands here twice where it was taken again."
VERDICTS = {1: ("lost", "worse"), -1: ("gained", "better"), 0: ("no clear change", "unclear")}


class Runs(list[Run]):
    """The runs of a report. Curves show the first and those with the least loss in colour."""

    def __init__(self, runs: Sequence[Run]) -> None:
        super().__init__(runs)
        best = sorted(range(len(runs)), key=lambda i: (i > 0, last_loss(runs[i])))
        self.series = {i: n if n < COLOURED else None for n, i in enumerate(best)}
        self.order = best[::-1]  # as curves are drawn, the best on top
        self.several = len(self) > 1

    def name(self, index: int) -> Cell:
        """Return a run as rows call it."""
        return Cell(self[index].name, mark=self.series[index] if self.several else "")

    def figure(self, label: str, panels: Sequence[Dots | Curves], caption: str = "") -> Figure:
        """Return a figure with the coloured runs in its legend, and the names of the others."""
        legend = [(s, self[i].name) for i, s in sorted(self.series.items()) if s is not None]
        greys = [run.name for i, run in enumerate(self) if self.series[i] is None]
        return Figure(label, panels, caption, legend if self.several else (), greys)


def document(run_list: Sequence[Run], over: str, folder: Path) -> Document:
    """Return the report. over: `step` or `tokens`, for curves; links are relative to `folder`."""
    runs, measured = Runs(run_list), gains(run_list)
    panels = _curves(runs, over)
    dots: dict[str, list[Dot]] = {}  # a panel for each validation set, or of a single run a row
    for gain in measured:
        if (c := gain.change) is not None:
            title, name = (gain.name, runs[gain.run].name) if runs.several else ("Since step 0", gain.name)
            dots.setdefault(title, []).append(Dot(name, runs.series[gain.run], c.value, c.low, c.high))
    caption = f"Change of the held-out loss since step 0 in {UNIT}: left of zero gained, right of it lost."
    picture = Figure("Gained and lost", [Dots(title, rows, 0.0) for title, rows in dots.items()], caption)
    if not picture and panels:
        picture, panels = runs.figure("Curve", panels[:1]), panels[1:]
    caption = (
        "Means since the record before; circles: held-out data. Of more than 400 records the line is the "
        "mean of neighbours, and the band goes from the least to the most of them."
    )
    evaluations = [d for run in runs for d in (run.path / "eval", run.path.parent)]
    links = {
        str(d / EVALUATION[0]): quote(os.path.relpath(d / EVALUATION[0], folder))
        for d in evaluations
        if all((d / name).is_file() for name in EVALUATION)
    }
    mixtures = [
        [runs.name(i), m["mixture"] or "none: all rows alike", formatted(m["step"])]
        for i, run in enumerate(runs)
        for m in run.last_launch.get("mixtures", ())
    ]
    bad = [
        [runs.name(i), f"{r['step']:,}", r["reason"], str(r.get("nll", DASH))]
        for i, run in enumerate(runs)
        for r in run.bad
    ]
    sections = [
        Section("Gained and lost", _gains(runs, measured)),
        Section("Runs", _summary(runs)),
        Section("Curves", runs.figure("Curves", panels, caption)),
        Section("Launches", _launches(runs)),
        Section("Mixture of domains", Table(["Run", "Mixture", "After step"], mixtures, MIXED, 2)),
        Section("Plan and measurement", _plan(runs)),
        Section("Sampled text", "The likeliest continuations.", *_samples(runs), page_only=True),
        Section("Steps that went wrong", Table(["Run", "Step", "What", "Loss"], bad, BAD)),
        Section("Evaluations", Items(links), page_only=True),
        Section("Settings", *_settings(runs), page_only=True),
    ]
    about = f"{len(runs)} runs." if runs.several else f"Run {runs[0].path}."
    title = f"Run report: {listed([run.name for run in runs])}"
    remarks = [remark for run in runs for remark in run.remarks]
    answer = _answer(runs, measured)
    return Document(title, answer, about, sections, picture, remarks, data=as_json(runs))


def last_loss(run: Run) -> float:
    """Return the last held-out loss of a run with one validation set, or of training; inf without any."""
    return (_held_out(run) or pairs(run.trained, "step", "nll") or [(0, float("inf"))])[-1][1]


def _held_out(run: Run, key: str = "validation_nll", over: str = "step") -> Points:
    """Return the measurements of a run with one validation set; of several none stands for the others."""
    return pairs(run.held_out(run.sets[0]), over, key) if len(run.sets) == 1 else []


def _answer(runs: Runs, measured: Sequence[Gain]) -> list[str]:
    """Return what was gained and lost on each validation set, or what is known without one; and states."""
    effects: dict[str, list[Effect]] = {}
    for gain in measured:
        if (c := gain.change) is not None:
            label = runs[gain.run].name if runs.several else f"the loss on {gain.name}"
            effect = Effect(label, -c.value, -c.high, -c.low, -c.direction)
            effects.setdefault(f"On {gain.name}" if runs.several else "Since step 0", []).append(effect)
    answer = [f"{start}, {changes(group, UNIT, '{:.3f}')}." for start, group in effects.items()]
    if answer:
        answer = [" ".join(answer)] if len(answer) < 4 else answer
    else:
        best = min(runs, key=last_loss)
        value = f"{last_loss(best):.4g} {UNIT}"
        if last_loss(best) == float("inf"):
            answer = ["No loss is recorded yet."]
        elif runs.several:
            answer = [f"Of {len(runs)} runs {best.name} has the lowest last loss, {value}, with no interval."]
        else:
            answer = [f"The last loss is {value}; nothing was measured before training to compare it with."]
    states: dict[str, list[str]] = {}
    for run in runs:
        states.setdefault(f"{run.state(time.time())} at step {run.progress}", []).append(run.name)
    names = [f"{listed(v) if len(v) < 5 else f'{len(v)} runs'}: {state}" for state, v in states.items()]
    return [*answer, f"{'; '.join(names)}."] if len(states) < 5 else answer


def _gains(runs: Runs, measured: Sequence[Gain]) -> Table:
    def cell(c: Change | None) -> Cell:
        return Cell(formatted(c.value, "{:+.4f}"), between(c.low, c.high, "{:+.4f}")) if c else Cell(DASH)

    rows: list[Row] = []
    for gain in measured:
        c = gain.change
        word, tone = VERDICTS[c.direction] if c else ("not comparable", "quiet")
        if gain.start is None or (c and not c.interval):
            word, tone = "not measured at step 0" if gain.start is None else "too few documents", "quiet"
        run: Row = [runs.name(gain.run)] if runs.several else []
        beside: Row = [cell(gain.against_first)] if runs.several else []
        losses = [formatted(value, "{:.4f}") for value in (gain.start, gain.end)]
        counts = [f"{gain.step:,}", f"{c.documents:,}" if c else DASH]
        rows.append([gain.name, *run, Cell(word, tone=tone), cell(c), *losses, *counts, *beside])
    head = ["Verdict", "Change", "Loss at step 0", "Loss now", "At step", "Documents"]
    caption = (
        "Nats per token, paired over documents: below zero gained, above zero lost. There is a verdict where "
        "the 95 % interval is without zero."
    )
    if not runs.several:
        return Table(["Set", *head], rows, caption, 2)
    return Table(["Set", "Run", *head, f"Against {runs[0].name}"], rows, caption, 3)


def _summary(runs: Runs) -> Table:
    rows: list[Row] = []
    for i, run in enumerate(runs):
        state = run.state(time.time())
        tones = {"finished": "better", KILLED: "worse", "failed": "worse"}
        tone = tones.get(state.split(":")[0], "unclear")
        origin = str(run.config.get("model", {}).get("path") or "a new model")
        last, held_out = run.trained[-1] if run.trained else {}, [y for _, y in _held_out(run)]
        losses = [formatted(loss, "{:.4g}") for loss in (last.get("nll"), held_out[-1] if held_out else None)]
        skipped = str(sum(r.get("skipped", 0) for r in run.trained))
        spent = duration(sum(seconds for _, seconds, _ in run.seconds()))
        words: Row = [runs.name(i), Cell(state, tone=tone), origin, run.objective, run.progress]
        rows.append([*words, formatted(last.get("tokens")), *losses, skipped, spent])
    head = [
        "Run",
        "State",
        "From",
        "Objective",
        "Steps",
        "Tokens",
        "Loss",
        "Held-out loss",
        "Skipped",
        "Time",
    ]
    caption = (
        "Tokens: supervised ones. Losses: the last NLL, nats per token. Skipped: steps without a finite "
        "gradient, which changed nothing. Time: of training, without saving, validation and loading."
    )
    return Table(head, rows, caption, 4)


def _curves(runs: Runs, over: str) -> list[Curves]:
    """Return a panel for each quantity, each of several validation sets, and each domain."""
    drawn: dict[str, list[tuple[Points, Points]]] = {}  # by title; of each run a line and circles
    single = all(len(run.sets) < 2 for run in runs)
    records = [r for run in runs for r in run.records if None not in (r.get("loss"), r.get("nll"))]
    is_likelihood = all(abs(r["loss"] - r["nll"]) <= SAME * abs(r["nll"]) for r in records) and bool(records)
    skips = any(r.get("skipped") for run in runs for r in run.trained)
    for key, title, held_out in QUANTITIES:
        if (key != "loss" or not is_likelihood) and (key != "skipped" or skips):
            drawn[title] = [
                (pairs(run.trained, over, key), _held_out(run, held_out, over) if single else [])
                for run in runs
            ]
    for name in [] if single else dict.fromkeys(name for run in runs for name in run.sets):
        measured = [pairs(run.held_out(name), over, "validation_nll") for run in runs]
        drawn[f"Held-out loss on {name}"] = [(points, points) for points in measured]
    for name in dict.fromkeys(n for run in runs for r in run.trained for n in r.get("domains", ())):
        parts = [
            [{over: r.get(over), "nll": r.get("domains", {}).get(name, {}).get("nll")} for r in run.trained]
            for run in runs
        ]
        drawn[f"Loss on domain {name}"] = [(pairs(part, over, "nll"), []) for part in parts]
    unit = "steps" if over == "step" else "tokens"
    return [
        Curves(title, [Curve(runs.series[i], *points[i]) for i in runs.order if any(points[i])], unit)
        for title, points in drawn.items()
        if any(map(any, points))
    ]


def _launches(runs: Runs) -> Table:
    rows: list[Row] = []
    for i, run in enumerate(runs):
        for launch in run.launches:
            begin, end = launch.begin, launch.end or {}
            is_last = not end and launch is run.launches[-1]
            ending = run.state(time.time()) if is_last else launch.ending
            began, ended = (
                time.strftime("%Y-%m-%d %H:%M", time.localtime(t)) if t else DASH
                for t in (begin.get("time"), end.get("time"))
            )
            device, facts = str(begin.get("device", DASH)), ("ranks", "hosts", "zero_stage", "micro_batch")
            numbers = [formatted(begin.get(key)) for key in facts]
            steps = formatted(begin["step"]), formatted(end.get("step"))
            rows.append([runs.name(i), ending, device, began, steps[0], ended, steps[1], *numbers])
    head = ["Run", "How it ended", "Device", "Began", "After step", "Ended", "At step", "Ranks", "Hosts"]
    caption = "A launch that was killed has no end; the next one took the steps after its last save again."
    return Table([*head, "ZeRO stage", "Rows per pass"], rows, caption, 3)


def _plan(runs: Runs) -> Table:
    rows: list[Row] = []
    for i, run in enumerate(runs):
        plan, cells = run.last_launch.get("planned") or {}, []
        size = run.last_launch.get("batch", 0) * run.last_launch.get("block", 0)
        values = [run.measured(), [plan.get(key) for key in ("seconds", "mfu", "memory_gib")]]
        both = [(s, size / s if s and size else None, mfu, memory) for s, mfu, memory in values]
        for after, before, form in zip(*both, ("{:.3g}", "{:,.0f}", "{:.1%}", "{:.1f}"), strict=True):
            ratio = f", ratio {after / before:.2f}" if before and after is not None else ""
            cells.append(
                Cell(formatted(after, form), f"planned {formatted(before, form)}{ratio}" if before else "")
            )
        if run.launches and any(x is not None for row in both for x in row):
            rows.append([runs.name(i), *cells])
    head = ["Run", "Seconds per step", "Tokens per second", "MFU", "Peak memory, GiB"]
    caption = (
        "Of the last launch, without its first record, in which libraries compile. Tokens: all that a batch "
        "has room for. MFU counts what the model needs, not what checkpointing computes again. Memory: rank "
        "0's."
    )
    return Table(head, rows, caption)


def _samples(runs: Runs) -> list[Block]:
    blocks: list[Block] = []
    for prompt in dict.fromkeys(r["prompt"] for run in runs for r in run.samples):
        for i, run in enumerate(runs):
            records = [r for r in run.samples if r["prompt"] == prompt]
            texts = [Quote(r["text"], prompt, f"{run.name}, after step {r['step']:,}") for r in records]
            earlier = Fold(f"{run.name}: {len(texts) - 1} earlier", texts[:-1], runs.name(i).mark)
            blocks += [*texts[-1:], earlier]
    return blocks


def _settings(runs: Runs) -> list[Fold]:
    folds = []
    for run in runs:
        facts: dict[str, Any] = run.last_launch
        versions = [f"{k} {facts[k]}" for k in ("git", "torch", "transformers", "deepspeed") if k in facts]
        text = yaml.safe_dump(run.config, sort_keys=False, allow_unicode=True)
        folds += [Fold(run.name, [", ".join(versions), Quote(text)])] if run.config else []
    return folds
