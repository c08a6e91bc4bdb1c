"""The report of one or several runs as a document: what was gained and lost, curves, launches, texts."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import yaml

from common.report.document import Block, Cell, Document, Fold, Items, Quote, Row, Section, Table
from common.report.figure import Curve, Curves, Dot, Dots, Figure, Points, pairs
from common.report.numbers import DASH, Effect, between, changes, formatted, listed, sentence
from common.untrusted import number
from pipeline.report import forgetting
from pipeline.report.gather import KILLED, Run, clock
from pipeline.report.pace import duration

COLOURED = 8  # runs that curves show in colour; more are grey
SAME = 1e-4  # relative difference of two values that a figure cannot tell apart
UNIT = "nats per token"
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
VERDICTS = {1: ("lost", "worse"), -1: ("gained", "better"), 0: ("no clear change", "unclear")}


class Runs(list[Run]):
    """The runs of a report. Curves show the first and those with the least loss in colour."""

    def __init__(self, runs: Sequence[Run]) -> None:
        super().__init__(runs)
        best = sorted(range(len(runs)), key=lambda i: (i > 0, last_loss(runs[i])))
        self.series = {i: n if n < COLOURED else None for n, i in enumerate(best)}
        self.order = best[::-1]  # as curves are drawn, the best on top

    @property
    def several(self) -> bool:
        """Return whether there is anything to tell apart."""
        return len(self) > 1

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
    runs, lines = Runs(run_list), forgetting.lines(run_list)
    panels = _curves(runs, over)
    picture = _changes_figure(runs, lines)
    if not picture and panels:
        picture, panels = runs.figure("Curve", panels[:1]), panels[1:]
    caption = (
        "Means since the record before; circles: held-out data. Of more than 400 records the line is the "
        "mean of neighbours, and the band goes from the least to the most of them."
    )
    evaluations = {
        str(path): quote(os.path.relpath(path, folder)) for run in runs for path in run.evaluations
    }
    sections = [
        Section("Gained and lost", _changes_table(runs, lines)),
        Section("Runs", _summary(runs)),
        Section("Curves", runs.figure("Curves", panels, caption)),
        Section("Launches", _launches(runs)),
        Section("Mixture of domains", _mixtures(runs)),
        Section("Plan and measurement", _plan(runs)),
        Section("Sampled text", "The likeliest continuations.", *_samples(runs), page_only=True),
        Section("Steps that went wrong", _bad(runs)),
        Section("Evaluations", Items(evaluations), page_only=True),
        Section("Settings", *_settings(runs), page_only=True),
    ]
    names = listed([run.name for run in runs])
    about = f"{len(runs)} runs." if runs.several else f"Run {runs[0].path}."
    remarks = [remark for run in runs for remark in run.remarks]
    answer, data = [*_answer(runs, lines), *_states(runs)], forgetting.as_json(runs)
    return Document(f"Run report: {names}", answer, about, sections, picture, remarks, data=data)


def last_loss(run: Run) -> float:
    """Return the last held-out loss of a run with one validation set, or of training; inf without any."""
    return (_held_out(run) or pairs(run.trained, "step", "nll") or [(0, float("inf"))])[-1][1]


def _held_out(run: Run, key: str = "validation_nll", over: str = "step") -> Points:
    """Return the measurements of a run with one validation set; of several none stands for the others."""
    return pairs(run.held_out(run.sets[0]), over, key) if len(run.sets) == 1 else []


def _answer(runs: Runs, lines: Sequence[forgetting.Line]) -> list[str]:
    """Return what was gained and lost on each validation set, or what is known without one."""
    effects: dict[str, list[Effect]] = {}
    for line in lines:
        if (c := line.change) is not None:
            label = line.run.name if runs.several else f"the loss on {line.name}"
            effect = Effect(label, -c.value, -c.high, -c.low, -c.direction)
            effects.setdefault(f"On {line.name}, " if runs.several else "Since step 0, ", []).append(effect)
    sentences = [sentence(start + changes(group, UNIT, "{:.3f}")) for start, group in effects.items()]
    if sentences:
        return [" ".join(sentences)] if len(sentences) < 4 else sentences
    best = min(runs, key=last_loss)
    if last_loss(best) == float("inf"):
        return ["No loss is recorded yet."]
    value = f"{last_loss(best):.4g} {UNIT}"
    if not runs.several:
        return [f"The last loss is {value}; nothing was measured before training to compare it with."]
    return [f"Of {len(runs)} runs {best.name} has the lowest last loss, {value}; no interval is known."]


def _states(runs: Runs) -> list[str]:
    states: dict[str, list[str]] = {}
    for run in runs:
        reached = f" after {_steps(run)} steps" if run.reached is not None else ""
        states.setdefault(f"{run.state(time.time())}{reached}", []).append(run.name)
    sentences = [f"{listed(v) if len(v) < 5 else f'{len(v)} runs'}: {state}" for state, v in states.items()]
    return [sentence("; ".join(sentences))] if len(sentences) < 5 else []


def _steps(run: Run) -> str:
    return DASH if run.reached is None else f"{run.reached:,}{f' of {run.steps:,}' if run.steps else ''}"


def _changes_figure(runs: Runs, lines: Sequence[forgetting.Line]) -> Figure:
    """Return a panel for each validation set, or of a single run a row."""
    panels: dict[str, list[Dot]] = {}
    for line in lines:
        if (c := line.change) is not None:
            title = line.name if runs.several else "Change since step 0"
            name = line.run.name if runs.several else line.name
            panels.setdefault(title, []).append(Dot(name, runs.series[line.number], c.value, c.low, c.high))
    caption = f"Change of the held-out loss since step 0 in {UNIT}: left of zero gained, right of it lost."
    return Figure("Gained and lost", [Dots(title, rows, 0.0) for title, rows in panels.items()], caption)


def _changes_table(runs: Runs, lines: Sequence[forgetting.Line]) -> Table:
    def change(c: Any) -> Cell:
        return Cell(formatted(c.value, "{:+.4f}"), between(c.low, c.high, "{:+.4f}")) if c else Cell(DASH)

    rows: list[Row] = []
    for line in lines:
        c = line.change
        word, tone = VERDICTS[c.direction] if c else ("not comparable", "quiet")
        if line.start is None or (c and number(c.low) is None):
            word, tone = "not measured at step 0" if line.start is None else "too few documents", "quiet"
        run: Row = [runs.name(line.number)] if runs.several else []
        beside: Row = [change(line.against_first)] if runs.several else []
        losses = [formatted(value, "{:.4f}") for value in (line.start, line.end)]
        counts = [f"{line.step:,}", f"{c.documents:,}" if c else DASH]
        rows.append([line.name, *run, Cell(word, tone=tone), change(c), *losses, *counts, *beside])
    head = ["Set", "Run", "Verdict", "Change", "Loss at step 0", "Loss now", "At step", "Documents"]
    caption = (
        "Nats per token, paired over documents: below zero gained, above zero lost. There is a verdict where "
        "the 95 % interval is without zero."
    )
    if not runs.several:
        return Table([head[0], *head[2:]], rows, caption, 2)
    return Table([*head, f"Against {runs[0].name}"], rows, caption, 3)


def _summary(runs: Runs) -> Table:
    rows: list[Row] = []
    for i, run in enumerate(runs):
        state = run.state(time.time())
        bad = state.startswith((KILLED, "failed"))
        tone = "better" if state == "finished" else "worse" if bad else "unclear"
        origin = str(run.value("model", "path") or "a new model")
        last, held_out = run.trained[-1] if run.trained else {}, [y for _, y in _held_out(run)]
        losses = [formatted(loss, "{:.4g}") for loss in (last.get("nll"), held_out[-1] if held_out else None)]
        skipped = sum(int(number(r.get("skipped")) or 0) for r in run.trained)
        spent = sum(seconds for _, seconds, _ in run.seconds())
        words: Row = [Cell(state, tone=tone), origin, run.objective, _steps(run)]
        rows.append(
            [runs.name(i), *words, formatted(last.get("tokens")), *losses, str(skipped), duration(spent)]
        )
    head = "Run | State | From | Objective | Steps | Tokens | Loss | Held-out loss | Skipped | Time"
    caption = (
        "Tokens: supervised ones. Losses: the last NLL, nats per token. Skipped: steps without a finite "
        "gradient, which changed nothing. Time: of training, without saving, validation and loading."
    )
    return Table(head, rows, caption, 4)


def _curves(runs: Runs, over: str) -> list[Curves]:
    """Return a panel for each quantity, each of several validation sets, and each domain."""
    drawn: list[tuple[str, Sequence[tuple[Points, Points]]]] = []
    single = all(len(run.sets) < 2 for run in runs)
    for key, title, held_out in QUANTITIES:
        points = [(pairs(r.trained, over, key), _held_out(r, held_out, over) if single else []) for r in runs]
        if not (key == "loss" and _is_likelihood(runs)) and (
            key != "skipped" or any(y for p, _ in points for _, y in p)
        ):
            drawn.append((title, points))
    for name in [] if single else dict.fromkeys(name for run in runs for name in run.sets):
        measured = [pairs(run.held_out(name), over, "validation_nll") for run in runs]
        drawn.append((f"Held-out loss on {name}", [(line, line) for line in measured]))
    for name in dict.fromkeys(name for run in runs for name in run.domains):
        drawn.append(
            (f"Loss on domain {name}", [(pairs(run.of_domain(name), over, "nll"), []) for run in runs])
        )
    unit = "steps" if over == "step" else "tokens"
    return [
        Curves(title, [Curve(runs.series[i], *points[i]) for i in runs.order if any(points[i])], unit)
        for title, points in drawn
        if any(map(any, points))
    ]


def _is_likelihood(runs: Runs) -> bool:
    """Return whether the loss is the NLL in every record, as that of EMO is: one curve is enough."""
    both = [(number(r.get("loss")), number(r.get("nll"))) for run in runs for r in run.records]
    finite = [(loss, nll) for loss, nll in both if loss is not None and nll is not None]
    return bool(finite) and all(abs(loss - nll) <= SAME * abs(nll) for loss, nll in finite)


def _launches(runs: Runs) -> Table:
    rows: list[Row] = []
    for i, run in enumerate(runs):
        for n, (begin, end) in enumerate(run.launches):
            last = end is None and n == len(run.launches) - 1
            ending = run.state(time.time()) if last else run.ending(n)
            finish = [clock(end.get("time")), f"{end['step']:,}"] if end else [DASH, DASH]
            facts = [formatted(begin.get(key)) for key in ("ranks", "hosts", "zero_stage", "micro_batch")]
            start = [str(begin.get("device", DASH)), clock(begin.get("time")), f"{begin['step']:,}"]
            rows.append([runs.name(i), ending, *start, *finish, *facts])
    head = "Run | How it ended | Device | Began | After step | Ended | At step | Ranks | Hosts | ZeRO stage"
    caption = "A launch that was killed has no end; the next one took the steps after its last save again."
    return Table(f"{head} | Rows per pass", rows, caption, 3)


def _mixtures(runs: Runs) -> Table:
    rows: list[Row] = []
    for i, run in enumerate(runs):
        noted = run.launches[-1].begin.get("mixtures") if run.launches else None
        for mixture in noted if isinstance(noted, list) else []:
            if isinstance(mixture, dict):
                label = str(mixture.get("mixture") or "none: all rows alike")
                rows.append([runs.name(i), label, formatted(mixture.get("step"))])
    caption = (
        "A mixture holds for the steps after the one named, until the next. Shares need not add up to 1."
    )
    return Table(["Run", "Mixture", "After step"], rows, caption, 2)


def _plan(runs: Runs) -> Table:
    rows: list[Row] = []
    for i, run in enumerate(runs):
        if not run.launches:
            continue
        begin, cells = run.launches[-1].begin, []
        plan = begin["planned"] if isinstance(begin.get("planned"), dict) else {}
        size = (number(begin.get("batch")) or 0) * (number(begin.get("block")) or 0)
        values = [run.measured(), [number(plan.get(key)) for key in ("seconds", "mfu", "memory_gib")]]
        both = [(s, size / s if s and size else None, mfu, memory) for s, mfu, memory in values]
        for after, before, form in zip(*both, ("{:.3g}", "{:,.0f}", "{:.1%}", "{:.1f}"), strict=True):
            ratio = f", ratio {after / before:.2f}" if before and after is not None else ""
            cells.append(
                Cell(formatted(after, form), f"planned {formatted(before, form)}{ratio}" if before else "")
            )
        rows += [[runs.name(i), *cells]] if any(x is not None for row in both for x in row) else []
    head = ["Run", "Seconds per step", "Tokens per second", "MFU", "Peak memory, GiB"]
    caption = (
        "Of the last launch, without its first record, in which libraries compile. Tokens: all that a batch "
        "has room for. MFU counts what the model needs, not what checkpointing computes again. Memory: rank "
        "0's."
    )
    return Table(head, rows, caption)


def _samples(runs: Runs) -> list[Block]:
    blocks: list[Block] = []
    for prompt in dict.fromkeys(str(r.get("prompt")) for run in runs for r in run.samples):
        for i, run in enumerate(runs):
            records = [r for r in run.samples if str(r.get("prompt")) == prompt]
            texts = [Quote(r["text"], prompt, f"{run.name}, after step {r['step']:,}") for r in records]
            blocks += [
                *texts[-1:],
                Fold(f"{run.name}: {len(texts) - 1} earlier", texts[:-1], runs.name(i).mark),
            ]
    return blocks


def _bad(runs: Runs) -> Table:
    rows: list[Row] = [
        [runs.name(i), f"{r['step']:,}", str(r.get("reason", DASH)), str(r.get("nll", DASH))]
        for i, run in enumerate(runs)
        for r in run.bad
    ]
    caption = "Their rows are in bad_batches.jsonl. A step stands here twice where it was taken again."
    return Table(["Run", "Step", "What", "Loss"], rows, caption)


def _settings(runs: Runs) -> list[Fold]:
    folds = []
    for run in (run for run in runs if run.config):
        begin = run.launches[-1].begin if run.launches else {}
        versions = [
            f"{key} {begin[key]}" for key in ("git", "torch", "transformers", "deepspeed") if key in begin
        ]
        text = yaml.safe_dump(run.config, sort_keys=False, allow_unicode=True)
        folds.append(Fold(run.name, [", ".join(versions), Quote(text)]))
    return folds
