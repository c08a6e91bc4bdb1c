"""Runs as their directories tell them, and what each gained and lost on its validation sets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from emo.common.errors import UserError, nearest
from emo.common.recipe import read_written
from emo.common.report.numbers import DASH
from emo.common.text import counted
from emo.common.untrusted import is_plain_name, number
from emo.pipeline.report.validation import FEWEST, Change, change, read
from emo.pipeline.run_dir import (
    BAD_BATCHES,
    CONFIG,
    EXPORT,
    LAUNCHES,
    METRICS,
    SAMPLES,
    read_heartbeat,
    read_metrics,
    read_records,
)

KILLED = "ended without a record"  # killed, or the machine went down
ENDED = ("finished", "stopped", "failed")  # what a heartbeat says of a launch that is over
ALIVE = 60.0  # seconds that a heartbeat of a living run is old at most


@dataclass
class Run:
    """One run directory."""

    name: str
    path: Path
    config: dict[str, Any] = field(default_factory=dict)
    records: list[dict[str, Any]] = field(default_factory=list)  # of metrics.jsonl
    launches: list[dict[str, Any]] = field(default_factory=list)  # first lines, with the last one as `end`
    samples: list[dict[str, Any]] = field(default_factory=list)
    bad: list[dict[str, Any]] = field(default_factory=list)  # of bad_batches.jsonl
    beat: dict[str, Any] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)  # on what could not be read
    series: int | None = 0  # in figures; None: in grey
    mark: int | str | None = ""  # in tables

    @property
    def trained(self) -> list[dict[str, Any]]:
        """Return the records of training."""
        return [r for r in self.records if "loss" in r]

    @property
    def sets(self) -> list[str]:
        """Return the names of the validation sets that were measured, in the recipe's order."""
        return list(dict.fromkeys(r["set"] for r in self.records if is_plain_name(r.get("set"))))

    def held_out(self, name: str) -> list[dict[str, Any]]:
        """Return the records of a validation set."""
        return [r for r in self.records if r.get("set") == name]

    @property
    def last_launch(self) -> dict[str, Any]:
        """Return the last launch; empty where there is none."""
        return self.launches[-1] if self.launches else {}

    @property
    def progress(self) -> str:
        """Return the last step on record, which may be later than the last metrics, of how many."""
        last = self.last_launch
        steps = [number(r.get("step")) for r in (*self.trained[-1:], self.beat, last, last.get("end", {}))]
        reached = max((int(step) for step in steps if step is not None), default=None)
        total = last.get("steps")
        return DASH if reached is None else f"{reached:,}{f' of {total:,}' if total else ''}"

    def state(self, now: float) -> str:
        """Return how the run is doing, in words."""
        if (self.path / EXPORT).is_dir():
            return "finished"
        doing = str(self.beat.get("doing", ENDED[0]))
        if now - (number(self.beat.get("time")) or -math.inf) < ALIVE and doing not in ENDED:
            return f"runs: {doing}"
        return ending(self.last_launch) if self.launches else "unknown"

    def seconds(self) -> list[tuple[dict[str, Any], float, int]]:
        """Return (record, seconds of training, steps) of every record that has a rate."""
        rows, tokens, step = [], 0.0, 0
        for record in self.trained:
            rate, total = record.get("tokens_per_s"), record.get("tokens")
            if rate and total is not None and total > tokens and record["step"] > step:
                rows.append((record, (total - tokens) / rate, record["step"] - step))
            tokens, step = tokens if total is None else total, record["step"]
        return rows

    def measured(self) -> dict[str, float | None]:
        """Return seconds per step, MFU and memory of the last launch, as `planned` has them.

        Its first record, in which libraries compile, is left out where there are others.
        """
        first = self.last_launch.get("step", 0)
        rows = [row for row in self.seconds() if row[0]["step"] > first]
        rows = rows[1:] or rows
        shares = [(mfu, seconds) for r, seconds, _ in rows if (mfu := r.get("mfu")) is not None]
        peaks = [p for r in self.trained if r["step"] > first and (p := r.get("memory_gib")) is not None]
        return {
            "seconds": sum(row[1] for row in rows) / sum(row[2] for row in rows) if rows else None,
            "mfu": sum(mfu * s for mfu, s in shares) / sum(s for _, s in shares) if shares else None,
            "memory_gib": max(peaks, default=None),
        }


def ending(launch: dict[str, Any]) -> str:
    """Return how a launch ended, as it noted."""
    end = launch["end"]
    return f"{end['how']}: {end['reason']}" if end.get("reason") else str(end.get("how", KILLED))


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Return all runs, named apart. Raises UserError for what is no run, and where nothing is recorded."""
    runs = [_read(path) for path in paths]
    if len({run.name for run in runs}) < len(runs):
        for run in runs:
            run.name = f"{run.path.parent.name}/{run.name}"
    if not any(run.records for run in runs):
        files = ", ".join(str(run.path / METRICS) for run in runs)
        raise UserError(f"{files}: no step is recorded yet; the first is after train.logging_steps steps")
    return runs


def _read(path: Path) -> Run:
    run_dir = path.absolute()
    if not any((run_dir / name).is_file() for name in (CONFIG, METRICS, LAUNCHES)):
        raise UserError(
            f"{path} is no run directory: neither {CONFIG} nor {METRICS} is there; give an output_dir"
        )
    run = Run(run_dir.name, run_dir, records=read_metrics(run_dir), beat=read_heartbeat(run_dir))
    try:
        run.config = read_written(run_dir / CONFIG)
    except (OSError, ValueError):
        run.remarks.append(f"{run_dir / CONFIG} is missing or cannot be read.")
    if not run.records:
        run.remarks.append(f"{run_dir / METRICS}: no step is recorded yet.")
    lines = {}
    for name in (METRICS, LAUNCHES, SAMPLES, BAD_BATCHES):
        lines[name], damaged = read_records(run_dir / name)
        damaged += len(lines[name]) - len(run.records) if name == METRICS else 0
        if damaged:
            run.remarks.append(f"{run_dir / name}: {counted(damaged, 'damaged line')} left out.")
    for line in lines[LAUNCHES]:  # every beginning with the end that follows it
        if line["event"] == "begin":
            run.launches.append(line | {"end": {}})
        elif run.launches:
            run.launches[-1]["end"] = run.launches[-1]["end"] or line
    run.samples, run.bad = lines[SAMPLES], lines[BAD_BATCHES]
    return run


class Gain(NamedTuple):
    """The last measurement of a run's validation set, and how its NLL changed since step 0."""

    run: Run
    set: str
    step: int
    start: float | None  # NLL at step 0, nats per token
    end: float | None
    change: Change | None
    against_first: Change | None  # from the first run's last measurement of the same documents to this one

    def as_json(self) -> dict[str, Any]:
        """Return its numbers."""
        changes = {key: c and c._asdict() for key, c in zip(self._fields[-2:], self[-2:], strict=True)}
        return self._asdict() | {"run": str(self.run.path)} | changes


def gains(runs: Sequence[Run]) -> list[Gain]:
    """Return every set of every run, set by set; only what was measured after step 0."""
    lines = []
    for name in dict.fromkeys(name for run in runs for name in run.sets):
        reference = None  # of the first run
        for run in runs:
            if not (records := run.held_out(name)):
                continue
            first, last = records[0], records[-1]
            after, initial = read(run.path, name, last["step"]), first["step"] == 0
            before = read(run.path, name, 0) if initial else None
            if last["step"] > 0:
                start = first.get("validation_nll") if initial else None
                changes = [change(d, after) if d and after else None for d in (before, reference)]
                lines.append(Gain(run, name, last["step"], start, last.get("validation_nll"), *changes))
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
            if name not in run.sets:
                raise UserError(f"{run.path} has no validation set {name}; {nearest(name, run.sets)}")
            gain = measured.get((run.path, name))
            if gain is None or gain.change is None or not math.isfinite(gain.change.low):
                raise UserError(
                    f"no verdict on {name}: {run.path} has not measured {FEWEST} documents or more both at "
                    "step 0 and after it; measure more (train.eval_rows, data.validation) in a new "
                    "output_dir",
                    code="no-verdict",
                )
            lost, amount = gain.change.direction > 0, f"{gain.change} nats per token since step 0"
            word = "regression" if lost else "no regression"
            verdicts.append((lost, f"{run.name}: {word} on {name}: {amount}, at step {gain.step:,}"))
    return verdicts
