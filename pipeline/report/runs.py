"""Read run directories, and compute how much each run gained or lost on its validation sets."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

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
    TASK_SCORES,
    Record,
    read_best,
    read_export_info,
    read_heartbeat,
    read_records,
)
from ..monitor.documents import FEWEST, Change, compute_change, read_documents

KILLED = "ended without a record"  # the process was killed or the machine failed
KL = "validation_kl_from_base"


class RecordedRun:
    """The contents of one run directory."""

    series: int | None = 0  # colour in figures, None for grey
    mark: int | str | None = ""  # colour in tables

    def __init__(self, path: Path) -> None:
        """Read the files of a run. Raises UserError if there are none."""
        self.path = path.absolute()
        self.name = self.path.name
        if not any((path / name).is_file() for name in (CONFIG, METRICS, LAUNCHES)):
            problem = f"{path} is not a run directory: it has neither {CONFIG} nor {METRICS}"
            raise UserError(f"{problem}. Give the output_dir of a run.", code="no-run")
        self.remarks: list[str] = []  # about files that cannot be read
        self.config: Record = {}
        try:
            written = read_written(path / CONFIG)
            self.config = {key: value for key, value in written.items() if value is not None}
        except (OSError, ValueError):
            self.remarks.append(f"{self.path / CONFIG} is missing or cannot be read.")
        self.records = self._read_lines(METRICS)
        if not self.records:
            self.remarks.append(f"{self.path / METRICS}: no step is recorded yet.")
        self.samples, self.bad = self._read_lines(SAMPLES), self._read_lines(BAD_BATCHES)
        self.scores = self._read_lines(TASK_SCORES)
        self.best = read_best(path)
        if (best := self.best) is not None:
            found = f"step {best.step:,} with {best.metric} {best.value:.4g}"
            self.remarks.append(f"{self.path}: the best checkpoint is {found}.")
        self.launches = self._read_launches()
        self.last_launch: Record = self.launches[-1] if self.launches else {"end": {}}
        self.held_out: dict[str, list[Record]] = {}  # by validation set, in the recipe's order
        self.trained: list[Record] = []
        self._sort_records()

    def _read_launches(self) -> list[Record]:
        """Return the first record of each launch, with its last one as `end`."""
        launches: list[Record] = []
        for line in self._read_lines(LAUNCHES):
            if line.get("event") == "begin":
                launches.append(line | {"end": {}})
            elif launches:
                launches[-1]["end"] = launches[-1]["end"] or line
        return launches

    def _sort_records(self) -> None:
        """Separate records of training and validation. Those of training get their seconds and steps."""
        first = self.launches[0] if self.launches else {}  # of a branch, it is at a step of the trunk
        tokens, step = (number(first.get(key)) or 0 for key in ("tokens", "step"))
        for record in self.records:
            if "loss" in record:
                rate = number(record.get("tokens_per_s"))
                total = number(record.get("tokens")) or tokens
                if rate and total > tokens and record["step"] > step:
                    record |= {"seconds": (total - tokens) / rate, "steps": record["step"] - step}
                tokens = total
                step = record["step"]
                self.trained.append(record)
            elif is_plain_name(record.get("set")):
                self.held_out.setdefault(record["set"], []).append(record)

    def _read_lines(self, name: str) -> list[Record]:
        records, damaged = read_records(self.path / name)
        if damaged:
            self.remarks.append(f"{self.path / name}: {counted(damaged, 'damaged line')} skipped.")
        return records

    @property
    def progress(self) -> str:
        """Return the last known step and the total number. It may be later than the last metrics."""
        launch = self.last_launch
        records = (*self.trained[-1:], read_heartbeat(self.path), launch, launch["end"])
        steps = [int(step) for r in records if (step := number(r.get("step"))) is not None]
        total = f" of {launch['steps']:,}" if launch.get("steps") else ""
        return f"{max(steps):,}{total}" if steps else DASH

    @property
    def state(self) -> str:
        """Return what the run does, or how it ended."""
        beat = read_heartbeat(self.path)
        doing = str(beat.get("doing", ENDED[0]))
        if (self.path / EXPORT).is_dir():
            return "finished"
        if time.time() - (number(beat.get("time")) or -math.inf) < ALIVE and doing not in ENDED:
            return f"runs: {doing}"
        return describe_end(self.last_launch) if self.launches else "unknown"

    def measure_launch(self) -> dict[str, float | None]:
        """Return seconds per step, MFU and memory of the last launch, with the keys of `planned`.

        The first record, in which libraries compile, does not count if there are others.
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


def describe_end(launch: Record) -> str:
    """Return how a launch ended."""
    end = launch["end"]
    return f"{end['how']}: {end['reason']}" if end.get("reason") else str(end.get("how", KILLED))


def read_runs(paths: Sequence[Path]) -> list[RecordedRun]:
    """Read runs and give them distinct names. Raises UserError if none has recorded a step."""
    runs = [RecordedRun(path) for path in paths]
    if len({run.name for run in runs}) < len(runs):
        for run in runs:
            run.name = f"{run.path.parent.name}/{run.name}"
    if not any(run.records for run in runs):
        files = ", ".join(str(run.path / METRICS) for run in runs)
        raise UserError(
            f"{files}: no step is recorded yet. The first is recorded after train.logging_steps steps.",
            code="no-steps",
        )
    return runs


class Gain(NamedTuple):
    """The measurement of a run's validation set at the end, and how its NLL changed since step 0.

    With train.load_best_at_end, the end is the exported step.
    """

    run: RecordedRun
    set: str
    step: int
    start: float | None  # NLL at step 0, nats per token
    end: float | None
    change: Change | None
    against_first: Change | None  # compared with the first run's last measurement of the same documents
    kl_from_base: float | None = None  # nats per token, if it was measured

    def as_json(self) -> Record:
        """Return the numbers for JSON."""
        changes = {"change": self.change, "against_first": self.against_first}
        numbers = {key: c and c._asdict() for key, c in changes.items()}
        return self._asdict() | {"run": str(self.run.path)} | numbers


def compute_gains(runs: Sequence[RecordedRun]) -> list[Gain]:
    """Return the gain of every validation set and run, by set. A set needs a measurement after step 0."""
    gains = []
    for name in dict.fromkeys(name for run in runs for name in run.held_out):
        reference = None  # last measurement of the first run
        for run in (run for run in runs if name in run.held_out):
            first = run.held_out[name][0]
            if (last := _exported_record(run, name)) is None:
                continue
            start = first if first["step"] == 0 else {}
            before, after = (read_documents(run.path, name, step) for step in (0, last["step"]))
            if before is not None and not start:  # a branch has the measurement of its trunk
                start = {"validation_nll": before.nll.sum() / before.tokens.sum()}
            if last["step"] > 0:
                changes = [compute_change(d, after) if d and after else None for d in (before, reference)]
                values = (r.get("validation_nll") for r in (start, last))
                gain = Gain(run, name, last["step"], *values, *changes)
                gains.append(gain._replace(kl_from_base=number(last.get(KL))))
            reference = after if run is runs[0] else reference
    return gains


def _exported_record(run: RecordedRun, name: str) -> Record | None:
    """Return the last record of a validation set, or that of the exported step with train.load_best_at_end.

    It is None if the exported step was not validated.
    """
    records = run.held_out[name]
    train = run.config.get("train")
    if not (isinstance(train, dict) and train.get("load_best_at_end") and (run.path / EXPORT).is_dir()):
        return records[-1]
    step = read_export_info(run.path / EXPORT).get("step")
    return next((record for record in reversed(records) if record["step"] == step), None)


def regressions(
    runs: Sequence[RecordedRun], names: Sequence[str], max_kl: float | None = None
) -> list[tuple[bool, str]]:
    """Return for each run and named set whether its NLL has certainly risen, and a line that reports it.

    With `max_kl`, a larger KL from the base is a regression, too. Raises UserError for an unknown set, or one
    that has no interval or KL yet.
    """
    measured = {(gain.run.path, gain.set): gain for gain in compute_gains(runs)}
    verdicts = []
    for run in runs:
        for name in names:
            if name not in run.held_out:
                raise UserError(
                    f"{run.path} has no validation set {name}; {nearest(name, run.held_out)}",
                    code="unknown-name",
                )
            gain = measured.get((run.path, name))
            if gain is not None and gain.change is not None and gain.change.diverged:
                verdicts.append((True, f"{run.name}: regression on {name}: its NLL is not finite"))
                continue
            if gain is None or gain.change is None or not gain.change.interval:
                problem = f"has not measured at least {FEWEST} documents both at step 0 and after it"
                cure = "Measure more (train.eval_rows, data.validation) in a new output_dir."
                if gain is None:
                    cure = "Resume it to its end, which measures again, or set train.eval_steps."
                raise UserError(f"no verdict on {name}: {run.path} {problem}. {cure}", code="no-verdict")
            lost = gain.change.direction > 0
            verdict = "regression" if lost else "no regression"
            amount = f"{gain.change} nats per token since step 0, at step {gain.step:,}"
            verdicts.append((lost, f"{run.name}: {verdict} on {name}: {amount}"))
            if max_kl is not None:
                verdicts.append(_judge_kl(gain, max_kl))
    return verdicts


def _judge_kl(gain: Gain, limit: float) -> tuple[bool, str]:
    """Return whether the KL from the base is above a limit, and a line that reports it."""
    kl = gain.kl_from_base
    if kl is None:
        problem = f"{gain.run.path} did not measure the KL from the base at step {gain.step:,}"
        cure = "Set train.kl_from_base in a new output_dir."
        raise UserError(f"no verdict on {gain.set}: {problem}. {cure}", code="no-verdict")
    verdict = "above" if kl > limit else "within"
    amount = f"KL from the base {kl:.4f} nats per token, {verdict} the limit of {limit:g}"
    return kl > limit, f"{gain.run.name}: {amount}, on {gain.set} at step {gain.step:,}"
