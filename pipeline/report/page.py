"""The report of one or several runs, as a document: what was gained and lost, curves, launches, texts."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import yaml

from common.report.document import Cell, Document, Fold, Items, Quote, Section, Table
from common.report.figure import Curve, Curves, Dot, Dots, Figure, pairs
from common.report.numbers import DASH, Effect, between, changes, listed, sentence, shown
from common.untrusted import number
from pipeline.report import forgetting
from pipeline.report.gather import KILLED, Run, clock
from pipeline.report.pace import duration

COLOURED = 8  # runs that curves show in colour; more are grey
SAME = 1e-4  # relative difference of two values that a figure cannot tell apart
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
UNIT = "nats per token"


class Runs(list[Run]):
    """The runs of a report, and which of them curves show in colour."""

    def __init__(self, runs: Sequence[Run]) -> None:
        super().__init__(runs)
        best = sorted(range(len(runs)), key=lambda i: (i > 0, last_loss(runs[i])))
        self.series = {i: n if n < COLOURED else None for n, i in enumerate(best)}

    def name(self, index: int) -> Cell:
        """Return the heading of a run's row."""
        return Cell(self[index].name, mark=self.series[index] if len(self) > 1 else "")

    def legend(self) -> list[tuple[int | None, str]]:
        """Return the coloured runs; empty for a single one."""
        found = [(s, self[i].name) for i, s in sorted(self.series.items()) if s is not None]
        return [*found] if len(self) > 1 else []

    def greys(self) -> list[str]:
        """Return the names of the others."""
        return [run.name for i, run in enumerate(self) if self.series[i] is None]


def document(runs: Sequence[Run], over: str, place: Path) -> Document:
    """Return the report. over: `step` or `tokens`, for curves; links are relative to the directory `place`."""
    runs = Runs(runs)
    found = forgetting.lines(runs)
    curves = _curves(runs, "steps" if over == "step" else "tokens", over)
    picture = _changes_figure(runs, found)
    if picture is None and curves:
        picture, *others = (Figure(p.title, [p], "", curves.legend, curves.greys) for p in curves.panels)
        curves.panels = [p.panels[0] for p in others]
    sections = [
        Section("Gained and lost", _changes_table(runs, found)),
        Section("Runs", [_summary(runs)]),
        Section("Curves", [curves] if curves and curves.panels else []),
        Section("Launches", _launches(runs)),
        Section("Mixture of domains", _mixtures(runs)),
        Section("Plan and measurement", _plan(runs)),
        Section("Sampled text", _samples(runs), page_only=True),
        Section("Steps that went wrong", _bad(runs)),
        Section("Evaluations", _evaluations(runs, place), page_only=True),
        Section("Settings", _settings(runs), page_only=True),
    ]
    answer = [sentence(text) for text in (*_answer(runs, found), _states(runs)) if text]
    names = listed([run.name for run in runs])
    about = (
        f"{len(runs)} runs{f': {names}' if len(runs) < 5 else ''}."
        if len(runs) > 1
        else f"Run {runs[0].path}."
    )
    remarks = [remark for run in runs for remark in run.remarks]
    data = forgetting.as_json(runs)
    return Document(f"Run report: {names}", answer, about, sections, picture, remarks, data=data)


def last_loss(run: Run) -> float:
    """Return the last held-out loss of a run with one validation set, else that of training; inf without any."""
    held_out = pairs(single_set(run), "step", "validation_nll")
    return (held_out or pairs(run.trained, "step", "nll") or [(0, float("inf"))])[-1][1]


def single_set(run: Run) -> list[dict[str, Any]]:
    """Return the validation records of a run with one set; of several none stands for the others."""
    return run.held_out(run.sets[0]) if len(run.sets) == 1 else []


def _answer(runs: Runs, found: Sequence[forgetting.Line]) -> list[str]:
    """Return what was gained and lost on each validation set, or what is known without one."""
    several, effects = len(runs) > 1, {}
    for line in found:
        if (c := line.change) is not None:
            label = line.run.name if several else f"the loss on {line.name}"
            effect = Effect(label, -c.value, -c.high, -c.low, -c.direction)
            effects.setdefault(line.name if several else "", []).append(effect)
    said = [
        f"{f'On {name}, ' if name else 'Since step 0, '}{changes(e, UNIT, '{:.3f}')}"
        for name, e in effects.items()
    ]
    if said:
        return [" ".join(map(sentence, said))] if len(said) < 4 else said
    losses = {run.name: last_loss(run) for run in runs if last_loss(run) < float("inf")}
    if not losses:
        return ["No loss is recorded that runs could be compared by"]
    best = min(losses, key=losses.__getitem__)
    if len(runs) == 1:
        return [
            f"The last recorded loss is {losses[best]:.4g} {UNIT}; nothing was measured before training to compare with"
        ]
    return [
        f"{best} has the lowest last loss of {len(runs)} runs, {losses[best]:.4g} {UNIT}; no interval is known"
    ]


def _states(runs: Runs) -> str:
    states: dict[str, list[str]] = {}
    for run in runs:
        of = f" of {run.steps:,}" if run.steps else ""
        reached = f" after {run.reached:,}{of} steps" if run.reached is not None else ""
        states.setdefault(f"{run.state(time.time())}{reached}", []).append(run.name)
    if len(states) > 4:
        return ""
    if len(runs) == 1:
        return f"State of the run: {next(iter(states))}"
    return "; ".join(
        f"{listed(names) if len(names) < 5 else f'{len(names)} runs'}: {s}" for s, names in states.items()
    )


def _changes_figure(runs: Runs, found: Sequence[forgetting.Line]) -> Figure | None:
    """Return a panel for each validation set, or for a single run a row."""
    drawn = [(line, line.change) for line in found if line.change is not None]
    if len(runs) == 1:
        rows = [Dot(line.name, 0, c.value, c.low, c.high) for line, c in drawn]
        panels = [Dots(f"Change since step 0, {UNIT}", rows, 0.0)] if rows else []
    else:
        sets = dict.fromkeys(line.name for line, _ in drawn)
        panels = [
            Dots(
                name,
                [
                    Dot(line.run.name, runs.series[line.number], c.value, c.low, c.high)
                    for line, c in drawn
                    if line.name == name
                ],
                0.0,
            )
            for name in sets
        ]
    caption = f"Change of the held-out loss since step 0 in {UNIT}, with 95 % intervals: left of zero gained, right of it lost."
    return Figure("Gained and lost", panels, caption) if panels else None


def _changes_table(runs: Runs, found: Sequence[forgetting.Line]) -> list[Table]:
    rows = []
    for line in found:
        c = line.change
        if c is None:
            verdict = Cell("not measured at step 0" if line.start is None else "not comparable", tone="quiet")
            change, documents = Cell(DASH), DASH
        else:
            word, tone = VERDICTS[c.direction]
            verdict, documents = Cell(word, tone=tone), f"{c.documents:,}"
            change = Cell(shown(c.value, "{:+.4f}"), between(c.low, c.high, "{:+.4f}"))
        against = line.against_first
        beside = (
            Cell(shown(against.value, "{:+.4f}"), between(against.low, against.high, "{:+.4f}"))
            if against
            else DASH
        )
        cells = [Cell(line.name), *([runs.name(line.number)] if len(runs) > 1 else []), verdict, change]
        cells += [
            Cell(shown(line.start, "{:.4f}")),
            Cell(shown(line.end, "{:.4f}")),
            Cell(f"{line.step:,}"),
            Cell(documents),
        ]
        rows.append([*cells, *([beside] if len(runs) > 1 else [])])
    if not rows:
        return []
    several = len(runs) > 1
    head = [
        "Set",
        *(["Run"] if several else []),
        "Verdict",
        "Change",
        "Loss at step 0",
        "Loss now",
        "At step",
        "Documents",
    ]
    caption = f"{UNIT.capitalize()}; below zero the set was gained, above zero lost, and where the 95 % interval has zero in it there is no verdict. Paired over documents."
    return [
        Table([*head, *([f"Against {runs[0].name}"] if several else [])], rows, caption, 3 if several else 2)
    ]


def _summary(runs: Runs) -> Table:
    rows = []
    for i, run in enumerate(runs):
        last = run.trained[-1] if run.trained else {}
        held_out = pairs(single_set(run), "step", "validation_nll")
        spent = sum(seconds for _, seconds, _ in run.seconds())
        state = run.state(time.time())
        tone = (
            "better"
            if state == "finished"
            else "worse"
            if state.startswith((KILLED, "failed"))
            else "unclear"
        )
        rows.append(
            [
                runs.name(i),
                Cell(state, tone=tone),
                str(run.value("model", "path") or "a new model"),
                run.objective,
                f"{run.reached:,}{f' of {run.steps:,}' if run.steps else ''}"
                if run.reached is not None
                else DASH,
                shown(last.get("tokens")),
                shown(last.get("nll"), "{:.4g}"),
                shown(held_out[-1][1] if held_out else None, "{:.4g}"),
                str(sum(int(number(r.get("skipped")) or 0) for r in run.trained)),
                duration(spent) if spent else DASH,
            ]
        )
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
        f"Tokens are supervised ones, losses the last recorded NLL in {UNIT}. Skipped: steps without a finite "
        "gradient, which changed nothing. Time: of training alone, without saving, validation and loading."
    )
    return Table(head, rows, caption, 4)


def _curves(runs: Runs, unit: str, over: str) -> Figure | None:
    def panel(title: str, drawn: Sequence[tuple[Any, Any]]) -> list[Curves]:
        order = sorted(range(len(runs)), key=lambda i: runs.series[i] is not None)  # grey ones lie below
        curves = [
            Curve(runs.series[i], drawn[i][0], drawn[i][1]) for i in order if drawn[i][0] or drawn[i][1]
        ]
        return [Curves(title, curves, unit)] if curves else []

    panels, single = [], all(len(run.sets) <= 1 for run in runs)
    for key, title, held_out in QUANTITIES:
        if key == "loss" and _is_likelihood(runs):
            continue
        if key == "skipped" and not any(number(r.get(key)) for run in runs for r in run.trained):
            continue
        sets = [single_set(run) if single and held_out else [] for run in runs]
        panels += panel(
            title,
            [
                (pairs(run.trained, over, key), pairs(s, over, held_out))
                for run, s in zip(runs, sets, strict=True)
            ],
        )
    for name in [] if single else dict.fromkeys(name for run in runs for name in run.sets):
        drawn = [pairs(run.held_out(name), over, "validation_nll") for run in runs]
        panels += panel(f"Held-out loss on {name}", [(points, points) for points in drawn])
    for name in dict.fromkeys(name for run in runs for name in run.domains):
        panels += panel(
            f"Loss on domain {name}", [(pairs(run.of_domain(name), over, "nll"), []) for run in runs]
        )
    caption = (
        "Means since the record before; circles: held-out data. Of curves with more than 400 records the line is the "
        "mean of neighbours, and the band goes from the least to the most of them."
    )
    return Figure("Curves", panels, caption, runs.legend(), runs.greys()) if panels else None


def _is_likelihood(runs: Runs) -> bool:
    """Return whether the loss is the NLL in every record, as that of EMO is: one curve is enough."""
    both = [(number(r.get("loss")), number(r.get("nll"))) for run in runs for r in run.records]
    known = [(loss, nll) for loss, nll in both if loss is not None and nll is not None]
    return bool(known) and all(abs(loss - nll) <= SAME * abs(nll) for loss, nll in known)


def _launches(runs: Runs) -> list[Table]:
    rows = []
    for i, run in enumerate(runs):
        for n, (begin, end) in enumerate(run.launches):
            last = n == len(run.launches) - 1
            how = run.ending(end) if end is not None else run.state(time.time()) if last else KILLED
            finish = [clock(end.get("time")), f"{end['step']:,}"] if end is not None else [DASH, DASH]
            facts = [shown(begin.get(key)) for key in ("ranks", "hosts", "zero_stage", "micro_batch")]
            device = str(begin.get("device", DASH))
            rows.append(
                [runs.name(i), how, device, clock(begin.get("time")), f"{begin['step']:,}", *finish, *facts]
            )
    head = [
        "Run",
        "How it ended",
        "Device",
        "Began",
        "After step",
        "Ended",
        "At step",
        "Ranks",
        "Hosts",
        "ZeRO stage",
        "Rows per pass",
    ]
    caption = "A launch that was killed has no end; the next one took the steps after its last save again."
    return [Table(head, rows, caption, 3)] if rows else []


def _mixtures(runs: Runs) -> list[Table]:
    rows = []
    for i, run in enumerate(runs):
        given = run.launches[-1].begin.get("mixtures") if run.launches else None
        for mixture in given if isinstance(given, list) else []:
            if isinstance(mixture, dict):
                label = str(mixture.get("mixture") or "none: all rows alike")
                rows.append([runs.name(i), label, shown(mixture.get("step"))])
    caption = (
        "A mixture holds for the steps after the one named, until the next. Shares need not add up to 1."
    )
    return [Table(["Run", "Mixture", "After step"], rows, caption, 2)] if rows else []


def _plan(runs: Runs) -> list[Table]:
    rows, forms = [], ("{:.3g}", "{:,.0f}", "{:.1%}", "{:.1f}")
    for i, run in enumerate(runs):
        if not run.launches:
            continue
        begin, measured = run.launches[-1].begin, run.measured()
        plan = begin["planned"] if isinstance(begin.get("planned"), dict) else {}
        size = (number(begin.get("batch")) or 0) * (number(begin.get("block")) or 0)
        values = []
        for seconds, mfu, memory in (
            measured,
            [number(plan.get(k)) for k in ("seconds", "mfu", "memory_gib")],
        ):
            values.append((seconds, size / seconds if seconds and size else None, mfu, memory))
        cells = []
        for after, before, form in zip(*values, forms, strict=True):
            ratio = f", ratio {after / before:.2f}" if before and after is not None else ""
            cells.append(Cell(shown(after, form), f"planned {shown(before, form)}{ratio}" if before else ""))
        if any(x is not None for pair in values for x in pair):
            rows.append([runs.name(i), *cells])
    head = ["Run", "Seconds per step", "Tokens per second", "MFU", "Peak memory, GiB"]
    caption = (
        "Measured in the last launch without its first record, in which libraries compile and warm up. Tokens: all "
        "that a batch has room for. MFU counts what the model needs, not what checkpointing computes again. Memory is rank 0's."
    )
    return [Table(head, rows, caption)] if rows else []


def _samples(runs: Runs) -> list[Any]:
    blocks: list[Any] = []
    for prompt in dict.fromkeys(str(r.get("prompt")) for run in runs for r in run.samples):
        for i, run in enumerate(runs):
            texts = [
                Quote(r["text"], prompt, f"{run.name}, after step {r['step']:,}")
                for r in run.samples
                if str(r.get("prompt")) == prompt
            ]
            blocks += texts[-1:]
            if texts[:-1]:
                blocks.append(Fold(f"{run.name}: {len(texts) - 1} earlier", texts[:-1], runs.name(i).mark))
    lead = "The likeliest continuation of each prompt, the last one first."
    return [lead, *blocks] if blocks else []


def _bad(runs: Runs) -> list[Table]:
    rows = [
        [runs.name(i), f"{r['step']:,}", str(r.get("reason", DASH)), str(r.get("nll", DASH))]
        for i, run in enumerate(runs)
        for r in run.bad
    ]
    caption = "Their rows are in bad_batches.jsonl. A step stands here twice where it was taken again."
    return [Table(["Run", "Step", "What", "Loss"], rows, caption)] if rows else []


def _evaluations(runs: Runs, place: Path) -> list[Items]:
    links = {str(path): quote(os.path.relpath(path, place)) for run in runs for path in run.evaluations}
    return [Items(links)] if links else []


def _settings(runs: Runs) -> list[Fold]:
    folds = []
    for run in runs:
        begin = run.launches[-1].begin if run.launches else {}
        versions = [
            f"{key} {begin[key]}" for key in ("git", "torch", "transformers", "deepspeed") if key in begin
        ]
        if run.config:
            text = yaml.safe_dump(run.config, sort_keys=False, allow_unicode=True)
            folds.append(Fold(run.name, [", ".join(versions), Quote(text)]))
    return folds
