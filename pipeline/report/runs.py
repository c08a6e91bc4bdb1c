"""Runs as their directories tell them, and what each gained and lost on its validation sets."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from emo.common.config.recipe import read_written
from emo.common.errors import UserError, nearest
from emo.common.io.untrusted import is_plain_name, number
from emo.common.report.numbers import DASH
from emo.common.text import counted

from ..control.run_dir import (
    ALIVE,
    BAD_BATCHES,
    CONFIG,
    ENDED,
    EXPORT,
    LAUNCHES,
    METRICS,
    SAMPLES,
    read_heartbeat,
    read_records,
)
from ..monitor.validation import FEWEST, Change, change, read

KILLED = "ended without a record"  # killed, or the machine went down
Record = dict[str, Any]


class Run:
    """One run directory, as its files tell it."""

    series: int | None = 0  # in figures; None: in grey
    mark: int | str | None = ""  # in tables

    def __init__(self, path: Path) -> None:
        """Read what is there. Raises UserError for what is no run."""
        self.path = path.absolute()
        self.name = self.path.name
        if not any((path / name).is_file() for name in (CONFIG, METRICS, LAUNCHES)):
            problem = f"{path} is no run directory: neither {CONFIG} nor {METRICS} is there"
            raise UserError(f"{problem}; give an output_dir")
        self.remarks: list[str] = []  # on what could not be read
        self.config: Record = {}
        try:
            self.config = read_written(path / CONFIG)
        except (OSError, ValueError):
            self.remarks.append(f"{self.path / CONFIG} is missing or cannot be read.")
        self.records = self._lines(METRICS)
        if not self.records:
            self.remarks.append(f"{self.path / METRICS}: no step is recorded yet.")
        self.samples, self.bad = self._lines(SAMPLES), self._lines(BAD_BATCHES)
        self.launches: list[Record] = []  # first lines, each with the last one that follows it as `end`
        for line in self._lines(LAUNCHES):
            if line["event"] == "begin":
                self.launches.append(line | {"end": {}})
            elif self.launches:
                self.launches[-1]["end"] = self.launches[-1]["end"] or line
        self.last_launch: Record = self.launches[-1] if self.launches else {"end": {}}
        self.held_out: dict[str, list[Record]] = {}  # by validation set, in the recipe's order
        self.trained: list[Record] = []  # with the seconds that so many steps took where there is a rate
        tokens = step = 0
        for record in self.records:
            if "loss" in record:
                rate, total = record.get("tokens_per_s"), record.get("tokens") or tokens
                if rate and total > tokens and record["step"] > step:
                    record |= {"seconds": (total - tokens) / rate, "steps": record["step"] - step}
                tokens, step = total, record["step"]
                self.trained.append(record)
            elif is_plain_name(record.get("set")):
                self.held_out.setdefault(record["set"], []).append(record)

    def _lines(self, name: str) -> list[Record]:
        records, damaged = read_records(self.path / name)
        if damaged:
            self.remarks.append(f"{self.path / name}: {counted(damaged, 'damaged line')} left out.")
        return records

    @property
    def progress(self) -> str:
        """Return the last step on record, which may be later than the last metrics, of how many."""
        launch = self.last_launch
        records = (*self.trained[-1:], read_heartbeat(self.path), launch, launch["end"])
        steps = [int(step) for r in records if (step := number(r.get("step"))) is not None]
        total = f" of {launch['steps']:,}" if launch.get("steps") else ""
        return f"{max(steps):,}{total}" if steps else DASH

    @property
    def state(self) -> str:
        """Return how the run is doing, in words."""
        beat = read_heartbeat(self.path)
        doing = str(beat.get("doing", ENDED[0]))
        if (self.path / EXPORT).is_dir():
            return "finished"
        if time.time() - (number(beat.get("time")) or -math.inf) < ALIVE and doing not in ENDED:
            return f"runs: {doing}"
        return ending(self.last_launch) if self.launches else "unknown"

    def measured(self) -> dict[str, float | None]:
        """Return seconds per step, MFU and memory of the last launch, as `planned` has them.

        Its first record, in which libraries compile, is left out where there are others.
        """
        launched = [r for r in self.trained if r["step"] > self.last_launch.get("step", 0)]
        rows = [r for r in launched if "seconds" in r]
        rows = rows[1:] or rows
        seconds, steps = (sum(row[key] for row in rows) for key in ("seconds", "steps"))
        shares = [(row["mfu"], row["seconds"]) for row in rows if row.get("mfu") is not None]
        peaks = [peak for row in launched if (peak := row.get("memory_gib")) is not None]
        return {
            "seconds": seconds / steps if rows else None,
            "mfu": statistics.fmean(*zip(*shares, strict=True)) if shares else None,
            "memory_gib": max(peaks, default=None),
        }


def ending(launch: Record) -> str:
    """Return how a launch ended, as it noted."""
    end = launch["end"]
    return f"{end['how']}: {end['reason']}" if end.get("reason") else str(end.get("how", KILLED))


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Return all runs, named apart. Raises UserError for what is no run, and where nothing is recorded."""
    runs = [Run(path) for path in paths]
    if len({run.name for run in runs}) < len(runs):
        for run in runs:
            run.name = f"{run.path.parent.name}/{run.name}"
    if not any(run.records for run in runs):
        files = ", ".join(str(run.path / METRICS) for run in runs)
        raise UserError(f"{files}: no step is recorded yet; the first is after train.logging_steps steps")
    return runs


class Gain(NamedTuple):
    """The last measurement of a run's validation set, and how its NLL changed since step 0."""

    run: Run
    set: str
    step: int
    start: float | None  # NLL at step 0, nats per token
    end: float | None
    change: Change | None
    against_first: Change | None  # from the first run's last measurement of the same documents to this one

    def as_json(self) -> Record:
        """Return its numbers."""
        changes = {"change": self.change, "against_first": self.against_first}
        numbers = {key: c and c._asdict() for key, c in changes.items()}
        return self._asdict() | {"run": str(self.run.path)} | numbers


def gains(runs: Sequence[Run]) -> list[Gain]:
    """Return every set of every run, set by set; only what was measured after step 0."""
    lines = []
    for name in dict.fromkeys(name for run in runs for name in run.held_out):
        reference = None  # of the first run
        for run in (run for run in runs if name in run.held_out):
            first, last = run.held_out[name][0], run.held_out[name][-1]
            start = first if first["step"] == 0 else {}
            before, after = (read(run.path, name, r["step"]) if r else None for r in (start, last))
            if last["step"] > 0:
                changes = [change(d, after) if d and after else None for d in (before, reference)]
                values = (r.get("validation_nll") for r in (start, last))
                lines.append(Gain(run, name, last["step"], *values, *changes))
            reference = after if run is runs[0] else reference
    return lines


def regressions(runs: Sequence[Run], names: Sequence[str]) -> list[tuple[bool, str]]:
    """Return (it was lost for sure, a line that says so) for each run and named set.

    Raises UserError for a set that a run does not have, and where nothing can be said yet.
    """
    measured = {(gain.run.path, gain.set): gain for gain in gains(runs)}
    verdicts = []
    for run in runs:
        for name in names:
            if name not in run.held_out:
                raise UserError(f"{run.path} has no validation set {name}; {nearest(name, run.held_out)}")
            gain = measured.get((run.path, name))
            if gain is None or gain.change is None or not gain.change.interval:
                problem = f"has not measured {FEWEST} documents or more both at step 0 and after it"
                cure = "measure more (train.eval_rows, data.validation) in a new output_dir"
                if gain is None:
                    cure = "resume it to its end, which measures again, or set train.eval_steps"
                raise UserError(f"no verdict on {name}: {run.path} {problem}; {cure}", code="no-verdict")
            lost = gain.change.direction > 0
            word = "regression" if lost else "no regression"
            amount = f"{gain.change} nats per token since step 0, at step {gain.step:,}"
            verdicts.append((lost, f"{run.name}: {word} on {name}: {amount}"))
    return verdicts
