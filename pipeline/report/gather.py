"""A run as its directory tells it. Nothing here draws, or loads anything heavy."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from common.errors import UserError
from common.recipe import read_written
from common.report.numbers import DASH
from common.text import counted
from common.untrusted import is_plain_name, number
from pipeline.report.validation import Documents, read
from pipeline.run_dir import (
    BAD_BATCHES,
    CONFIG,
    EXPORT,
    LAUNCHES,
    METRICS,
    SAMPLES,
    read_heartbeat,
    read_records,
)

KILLED = "ended without a record"  # killed, or the machine went down
ENDED = ("finished", "stopped", "failed")  # what a heartbeat says of a launch that is over
ALIVE = 60.0  # seconds that a heartbeat of a living run is old at most
EVALUATION = ("report.html", "results.json")  # what `python -m eval report` and `watch` leave


class Launch(NamedTuple):
    """A launch that trained: its first line, and its last if it could write one."""

    begin: dict[str, Any]
    end: dict[str, Any] | None


class Measured(NamedTuple):
    """The speed of a launch, without its first record where there are others: it compiles and warms up."""

    seconds: float | None  # of training, per step
    mfu: float | None
    memory_gib: float | None


@dataclass
class Run:
    """One run directory."""

    name: str
    path: Path
    config: dict[str, Any] = field(default_factory=dict)
    records: list[dict[str, Any]] = field(default_factory=list)  # of metrics.jsonl
    launches: list[Launch] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)
    bad: list[dict[str, Any]] = field(default_factory=list)  # of bad_batches.jsonl
    beat: dict[str, Any] = field(default_factory=dict)
    evaluations: list[Path] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)  # on what could not be read

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

    def documents(self, name: str, index: int) -> Documents | None:
        """Return the index-th measurement of a validation set, document by document."""
        return read(self.path, name, self.held_out(name)[index]["step"])

    @property
    def domains(self) -> list[str]:
        """Return the domains whose training is recorded apart."""
        parts = [r["domains"] for r in self.trained if isinstance(r.get("domains"), dict)]
        return list(dict.fromkeys(name for part in parts for name in part))

    def of_domain(self, name: str) -> list[dict[str, Any]]:
        """Return the records of training with the `nll` of one domain; steps and tokens are the run's."""
        parts = [(r, r["domains"].get(name)) for r in self.trained if isinstance(r.get("domains"), dict)]
        return [r | {"nll": part.get("nll")} for r, part in parts if isinstance(part, dict)]

    @property
    def steps(self) -> int | None:
        """Return how many steps the whole run has."""
        steps = number(self.launches[-1].begin.get("steps")) if self.launches else None
        return None if steps is None else int(steps)

    @property
    def reached(self) -> int | None:
        """Return the last step on record: a run that was stopped has taken some since its last metrics."""
        lines = [*self.trained[-1:], self.beat]
        for launch in self.launches[-1:]:
            lines += [launch.begin, launch.end or {}]
        steps = [number(line.get("step")) for line in lines]
        return max((int(step) for step in steps if step is not None), default=None)

    def value(self, *keys: str) -> Any:
        """Return what the configuration has under these keys, or None."""
        tree: Any = self.config
        for key in keys:
            tree = tree.get(key) if isinstance(tree, dict) else None
        return tree

    @property
    def objective(self) -> str:
        """Return the name of what the run minimises."""
        parts = self.value("objective", "sum")
        if isinstance(parts, list):
            return " + ".join(str(part.get("name")) for part in parts if isinstance(part, dict))
        return str(self.value("objective", "name") or DASH)

    def state(self, now: float) -> str:
        """Return how the run is doing, in words."""
        if (self.path / EXPORT).is_dir():
            return "finished"
        doing = str(self.beat.get("doing", ENDED[0]))
        if now - (number(self.beat.get("time")) or -math.inf) < ALIVE and doing not in ENDED:
            return f"runs: {doing}"
        return self.ending(-1) if self.launches else "unknown"

    def ending(self, index: int) -> str:
        """Return how a launch ended, as it noted."""
        end = self.launches[index].end
        if end is None:
            return KILLED
        return f"{end.get('how')}: {end['reason']}" if end.get("reason") else str(end.get("how"))

    def seconds(self) -> list[tuple[dict[str, Any], float, int]]:
        """Return (record, seconds of training, steps) of every record that has a rate."""
        rows, tokens, step = [], 0.0, 0
        for record in self.trained:
            rate, total = number(record.get("tokens_per_s")), number(record.get("tokens"))
            if rate and total is not None and total > tokens and record["step"] > step:
                rows.append((record, (total - tokens) / rate, record["step"] - step))
            tokens, step = total if total is not None else tokens, record["step"]
        return rows

    def measured(self) -> Measured:
        """Return what the last launch took of time and memory."""
        first = self.launches[-1].begin["step"] if self.launches else 0
        rows = [row for row in self.seconds() if row[0]["step"] > first]
        rows = rows[1:] or rows
        shares = [(mfu, seconds) for r, seconds, _ in rows if (mfu := number(r.get("mfu"))) is not None]
        peaks = [number(r.get("memory_gib")) for r in self.trained if r["step"] > first]
        return Measured(
            sum(row[1] for row in rows) / sum(row[2] for row in rows) if rows else None,
            sum(mfu * s for mfu, s in shares) / sum(s for _, s in shares) if shares else None,
            max((peak for peak in peaks if peak is not None), default=None),
        )


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Return all runs, named apart. Raises UserError for what is no run, and where nothing is recorded."""
    runs = [_read(path) for path in paths]
    if len({run.name for run in runs}) < len(runs):
        for run in runs:
            run.name = f"{run.path.parent.name}/{run.name}"
    if not any(run.records for run in runs):
        files = ", ".join(str(run.path / METRICS) for run in runs)
        raise UserError(f"{files}: no step is recorded yet; the first is after train.log_every steps")
    return runs


def _read(path: Path) -> Run:
    run_dir = path.absolute()
    if not run_dir.is_dir():
        raise UserError(f"{path} is no directory; give the run_dir of a run")
    if not any((run_dir / name).is_file() for name in (CONFIG, METRICS, LAUNCHES)):
        raise UserError(f"{path} is no run directory: it has neither {CONFIG} nor {METRICS}; give a run_dir")
    run = Run(run_dir.name, run_dir, beat=read_heartbeat(run_dir))
    with contextlib.suppress(OSError, ValueError):
        config = read_written(run_dir / CONFIG)
        run.config = config if isinstance(config, dict) else {}
    if not run.config:
        run.remarks.append(f"{run_dir / CONFIG} is missing or cannot be read.")
    run.records = _lines(run, METRICS)
    for line in _lines(run, LAUNCHES):  # every beginning with the end that follows it
        if line.get("event") == "begin":
            run.launches.append(Launch(line, None))
        elif run.launches and line.get("event") == "end" and run.launches[-1].end is None:
            run.launches[-1] = run.launches[-1]._replace(end=line)
    run.samples = [r for r in _lines(run, SAMPLES) if isinstance(r.get("text"), str)]
    run.bad = _lines(run, BAD_BATCHES)
    if not run.records:
        run.remarks.append(f"{run_dir / METRICS}: no step is recorded yet.")
    folders = [run_dir / "eval", run_dir.parent]
    run.evaluations = [f / EVALUATION[0] for f in folders if all((f / name).is_file() for name in EVALUATION)]
    return run


def _lines(run: Run, name: str) -> list[dict[str, Any]]:
    records, damaged = read_records(run.path / name)
    if damaged:
        run.remarks.append(f"{run.path / name}: {counted(damaged, 'damaged line')} left out.")
    return records


def clock(seconds: Any) -> str:
    """Return a time of the epoch as `2026-11-22 12:00`, in local time; a dash for anything else."""
    with contextlib.suppress(OverflowError, ValueError, OSError):
        return DASH if number(seconds) is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
    return DASH
