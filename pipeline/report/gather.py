"""What is known of a run, read from the files in its directory. It draws nothing, and loads nothing heavy."""

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
    """A launch that trained: how it began, and how it ended if it could say so."""

    begin: dict[str, Any]
    end: dict[str, Any] | None


class Measured(NamedTuple):
    """What a launch took, without its first record where there are others: that one compiles and warms up."""

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
    remarks: list[str] = field(default_factory=list)  # what could not be read

    @property
    def trained(self) -> list[dict[str, Any]]:
        """Records of training."""
        return [r for r in self.records if "loss" in r]

    @property
    def sets(self) -> list[str]:
        """Names of the validation sets that were measured, in the recipe's order."""
        return list(dict.fromkeys(r["set"] for r in self.records if is_plain_name(r.get("set"))))

    def held_out(self, name: str) -> list[dict[str, Any]]:
        """Records of a validation set."""
        return [r for r in self.records if r.get("set") == name]

    def documents(self, name: str, index: int) -> Documents | None:
        """The index-th measurement of a validation set, document by document."""
        return read(self.path, name, self.held_out(name)[index]["step"])

    @property
    def domains(self) -> list[str]:
        """The domains whose training is recorded apart."""
        told = [one for r in self.trained if isinstance(one := r.get("domains"), dict)]
        return list(dict.fromkeys(name for one in told for name in one))

    def of_domain(self, name: str) -> list[dict[str, Any]]:
        """Records of training with the `nll` of one domain; steps and tokens are those of the run."""
        parts = [(r, r["domains"].get(name)) for r in self.trained if isinstance(r.get("domains"), dict)]
        return [r | {"nll": part.get("nll")} for r, part in parts if isinstance(part, dict)]

    @property
    def steps(self) -> int | None:
        """How many steps the whole run has."""
        given = number(self.launches[-1].begin.get("steps")) if self.launches else None
        return None if given is None else int(given)

    @property
    def reached(self) -> int | None:
        """The last step that is known of: a run that was stopped has taken some since its last record."""
        records = self.trained[-1:]
        for launch in self.launches[-1:]:
            records += [launch.begin, launch.end or {}]
        known = [number(one.get("step")) for one in (*records, self.beat)]
        return max((int(step) for step in known if step is not None), default=None)

    def value(self, *keys: str) -> Any:
        """What the configuration says under these keys, or None."""
        found: Any = self.config
        for key in keys:
            found = found.get(key) if isinstance(found, dict) else None
        return found

    def state(self, now: float) -> str:
        """How the run is, in words."""
        if (self.path / EXPORT).is_dir():
            return "finished"
        if now - (number(self.beat.get("time")) or -math.inf) < ALIVE and "doing" in self.beat:
            doing = str(self.beat["doing"])
            if doing not in ENDED:
                return f"runs: {doing}"
        if self.launches and self.launches[-1].end is not None:
            return self.ending(self.launches[-1].end)
        return KILLED if self.launches else "unknown"

    @staticmethod
    def ending(end: dict[str, Any]) -> str:
        """Return how a launch ended, as it noted."""
        return f"{end.get('how')}: {end['reason']}" if end.get("reason") else str(end.get("how"))

    @property
    def objective(self) -> str:
        """Return the name of what the run minimises."""
        parts = self.value("objective", "sum")
        if isinstance(parts, list):
            return " + ".join(str(part.get("name")) for part in parts if isinstance(part, dict))
        return str(self.value("objective", "name") or DASH)

    def seconds(self) -> list[tuple[dict[str, Any], float, int]]:
        """(record, seconds of training, steps) of every record that says how fast it was."""
        found, tokens, step = [], 0.0, 0
        for record in self.trained:
            rate, here = number(record.get("tokens_per_s")), number(record.get("tokens"))
            if rate and here is not None and here > tokens and record["step"] > step:
                found.append((record, (here - tokens) / rate, record["step"] - step))
            tokens, step = here if here is not None else tokens, record["step"]
        return found

    def measured(self) -> Measured:
        """What the last launch took of time and memory."""
        first = self.launches[-1].begin["step"] if self.launches else 0
        rows = [row for row in self.seconds() if row[0]["step"] > first]
        rows = rows[1:] or rows
        time_, steps = sum(row[1] for row in rows), sum(row[2] for row in rows)
        shares = [(number(r.get("mfu")), s) for r, s, _ in rows]
        known = [(share, s) for share, s in shares if share is not None]
        peaks = [number(r.get("memory_gib")) for r in self.trained if r["step"] > first]
        return Measured(
            time_ / steps if steps else None,
            sum(share * s for share, s in known) / sum(s for _, s in known) if known else None,
            max((peak for peak in peaks if peak is not None), default=None),
        )


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """All runs, named apart. Raises UserError for what is no run, and where nothing is recorded."""
    runs = [_read(path) for path in paths]
    if len({run.name for run in runs}) < len(runs):
        for run in runs:
            run.name = f"{run.path.parent.name}/{run.name}"
    if not any(run.records for run in runs):
        places = ", ".join(str(run.path / METRICS) for run in runs)
        raise UserError(f"{places}: no step is recorded yet; the first is after train.log_every steps")
    return runs


def _read(path: Path) -> Run:
    place = path.absolute()
    if not place.is_dir():
        raise UserError(f"{path} is no directory; give the run_dir of a run")
    if not any((place / name).is_file() for name in (CONFIG, METRICS, LAUNCHES)):
        raise UserError(f"{path} is no run directory: it has neither {CONFIG} nor {METRICS}; give a run_dir")
    run = Run(place.name, place, beat=read_heartbeat(place))
    with contextlib.suppress(OSError, ValueError):
        found = read_written(place / CONFIG)
        run.config = found if isinstance(found, dict) else {}
    if not run.config:
        run.remarks.append(f"{place / CONFIG} is missing or cannot be read.")
    run.records, lines = _lines(run, METRICS), _lines(run, LAUNCHES)
    run.launches = _launches(lines)
    run.samples = [r for r in _lines(run, SAMPLES) if isinstance(r.get("text"), str)]
    run.bad = _lines(run, BAD_BATCHES)
    if not run.records:
        run.remarks.append(f"{place / METRICS}: no step is recorded yet.")
    for where in (place / "eval", place.parent):
        if all((where / name).is_file() for name in EVALUATION):
            run.evaluations.append(where / EVALUATION[0])
    return run


def _lines(run: Run, name: str) -> list[dict[str, Any]]:
    records, damaged = read_records(run.path / name)
    if damaged:
        lines = "1 line" if damaged == 1 else f"{damaged} lines"
        run.remarks.append(f"{run.path / name}: {lines} could not be read and are left out.")
    return records


def _launches(lines: list[dict[str, Any]]) -> list[Launch]:
    """Every beginning with the end that follows it."""
    found: list[Launch] = []
    for line in lines:
        if line.get("event") == "begin":
            found.append(Launch(line, None))
        elif found and line.get("event") == "end" and found[-1].end is None:
            found[-1] = found[-1]._replace(end=line)
    return found


def clock(seconds: Any) -> str:
    """A time of the epoch as `2026-11-22 12:00`, in this machine's time zone; a dash for what is none."""
    given = number(seconds)
    with contextlib.suppress(OverflowError, ValueError, OSError):
        return DASH if given is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(given))
    return DASH
