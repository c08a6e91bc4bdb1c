"""Sweeps: run the stages of an experiment by the commands of this project, with any number of workers.

The stages in `before` are done once for all runs. Each run then has preparation (shared by all runs with the
same data), training, and its measures. A finished stage leaves a note (see stages.py). Workers take stages by
leases, so that several machines can share a sweep, and a killed worker loses at most one stage.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from emo.common.errors import ExitCode, FailureError, UserError, one_line
from emo.common.io.lease import hold_if_free
from emo.common.io.untrusted import read_json
from emo.common.provenance import shipped
from emo.eval.results import store
from emo.pipeline.config import RunConfig, load_config
from emo.pipeline.control.run_dir import EXPORT, read_export_info, read_metrics

from .code import code_digest, find_sources
from .design import (
    OF_RUNS,
    PREPARE,
    TRAIN,
    VALIDATION,
    Experiment,
    Labels,
    RunSpec,
    choose_runs,
    expand,
    fill_variables,
    find_trials,
    split_command,
    validation_metrics,
)
from .stages import Stage, command_origin, data_origin, read_stage_note, run_origin
from .workers import CommandPool

POLL = 2.0  # seconds between looks for work while other workers hold all of it
PORTS = range(20_000, 32_768)  # rendezvous ports of runs, below the kernel's ephemeral ports
SCRIPTS = {"text": "launch/continual.sh", "instruct": "launch/instruct.sh"}


class RunTask(NamedTuple):
    """A run and its stages in order."""

    run: RunSpec
    stages: list[Stage]

    @property
    def done(self) -> bool:
        """Return whether all stages are done."""
        return all(stage.done for stage in self.stages)


class Sweep:
    """An experiment and its files."""

    def __init__(self, experiment: Experiment, log: Callable[[str], None] = print) -> None:
        self.experiment = experiment
        self.log = log
        self.commands = CommandPool(experiment.ranks)
        self.runs = expand(experiment)
        self._stages: dict[tuple[str, str | None], list[Stage]] = {}

    def directory(self, run: RunSpec) -> Path:
        """Return the run directory."""
        return self.experiment.out / "runs" / run.name

    def data(self, run: RunSpec) -> Path:
        """Return the data directory, which runs with the same data overrides share."""
        overrides = {key: value for key, value in run.overrides.items() if key.partition(".")[0] == "data"}
        text = json.dumps(overrides, sort_keys=True, default=str)
        return self.experiment.out / f"data-{hashlib.sha256(text.encode()).hexdigest()[:8]}"

    def note(self, run: RunSpec, stage: str) -> Path:
        """Return the path of a stage's note."""
        return self.experiment.out / "notes" / run.name / f"{stage}.json"

    def config(self, run: RunSpec) -> RunConfig:
        """Resolve the recipe of a run. Raises UserError with the run's name."""
        overrides = [*run.arguments(), f"data.dir={self.data(run)}", f"output_dir={self.directory(run)}"]
        try:
            return load_config(self.experiment.recipe, overrides)
        except UserError as error:
            raise UserError(f"{run.name}: {error}", code=error.code) from None

    def variables(self, run: RunSpec, baseline: RunSpec | None = None) -> dict[str, object]:
        """Return the variables of a run's commands."""
        directory = self.directory(run)
        variables = {"run": run.name, "dir": directory, "export": directory / EXPORT}
        if baseline is not None:
            variables |= {"baseline": self.directory(baseline) / EXPORT, "baseline_run": baseline.name}
        return variables | run.variables

    def before(self) -> list[Stage]:
        """Return the stages that all runs share, in order."""
        stages: list[Stage] = []
        for name, text in self.experiment.before.items():
            note = self.experiment.out / "notes" / f"before.{name}.json"
            command = split_command(text, self.experiment.variables, f"before.{name}")
            origin = command_origin(command, self.experiment.out)
            stages.append(Stage(name, command, note, origin, tuple(stages[-1:])))
        return stages

    def stages(self, run: RunSpec, baseline: RunSpec | None = None) -> list[Stage]:
        """Return the stages of a run. Measures against the baseline need `baseline`."""
        key = run.name, baseline and baseline.name
        if (cached := self._stages.get(key)) is not None:
            return cached
        stages = self.training(run) if baseline is None else [*self.stages(run)]
        needs = [] if baseline is None else self.stages(baseline)[-1:]
        for name, measure in self.experiment.measures.items():
            if measure.against_baseline == (baseline is not None):
                command = split_command(measure.command, self.variables(run, baseline), f"measures.{name}")
                origin = command_origin(command, self.experiment.out) | {"read": measure.read}
                stages.append(Stage(name, command, self.note(run, name), origin, (stages[-1], *needs)))
        self._stages[key] = stages
        return stages

    def training(self, run: RunSpec) -> list[Stage]:
        """Return the stages of preparation and training, from the files as they are now."""
        config = self.config(run)
        data = self.data(run)
        directory = self.directory(run)
        shared = self.before()
        note = self.note(run, TRAIN)
        recipe = str(self.experiment.recipe)
        script = str(shipped(Path(SCRIPTS[config.data.kind])))
        prepare = Stage(
            PREPARE,
            ["python", "-m", "emo", "prepare", recipe, *run.arguments("data"), f"data.dir={data}"],
            self.experiment.out / "notes" / f"{data.name}.json",
            {f"before.{stage.name}": stage.origin for stage in shared} | data_origin(config.data),
            tuple(shared[-1:]),
            data,
        )
        command = ["deepspeed", "--num_gpus", str(self.experiment.ranks), script, recipe, *run.arguments()]
        command += [f"data.dir={data}", f"output_dir={directory}"]
        recorded = read_stage_note(note).get("made_with", {}) if directory.exists() else {}
        return [prepare, Stage(TRAIN, command, note, run_origin(config, recorded), (prepare,), directory)]

    def reject_changes(self) -> None:
        """Raise UserError if a run was begun with another origin than it has now."""
        find_sources.cache_clear()
        code_digest.cache_clear()
        self._stages.clear()
        for run in self.runs:
            if self.data(run).exists() or self.directory(run).exists():
                for stage in self.stages(run):
                    stage.reject_changes(run.name)

    def tasks(self) -> list[RunTask]:
        """Return the current tasks: trials until all are done, then the chosen runs.

        A trial ends with the measure that decides the choice, or with training.
        """
        trials = self._trial_tasks()
        if not all(task.done for task in trials):
            return trials
        axis = self.experiment.compare.axis
        label = self.experiment.compare.baseline
        runs = sorted(self.reported(), key=lambda run: run.labels[axis] != label)  # baselines first
        baselines = {self._shared_labels(run): run for run in runs if run.labels[axis] == label}
        return [RunTask(run, self.stages(run, baselines[self._shared_labels(run)])) for run in runs]

    def _trial_tasks(self) -> list[RunTask]:
        by = self.experiment.choose.by if self.experiment.choose else VALIDATION
        last = next((name for name, measure in self.experiment.measures.items() if by in measure.read), TRAIN)
        tasks = []
        for run in find_trials(self.experiment, self.runs):
            stages = self.stages(run)
            tasks.append(RunTask(run, stages[: [stage.name for stage in stages].index(last) + 1]))
        return tasks

    def reported(self) -> list[RunSpec]:
        """Return the runs in the table. All trials must be done."""
        choose = self.experiment.choose
        if choose is None:
            return self.runs
        values = {run.name: self.values(run) for run in find_trials(self.experiment, self.runs)}
        scores = {name: numbers.get(choose.by, math.nan) for name, numbers in values.items()}
        return choose_runs(self.experiment, self.runs, scores)

    def values(self, run: RunSpec) -> dict[str, float]:
        """Return the numbers of a run so far, by metric. Those of validations describe the exported model."""
        values = {}
        directory = self.directory(run)
        records = [record for record in read_metrics(directory) if "set" in record]
        if records and self.config(run).train.load_best_at_end:
            step = read_export_info(directory / EXPORT).get("step")
            records = [record for record in records if record["step"] == step]
        last = {record["set"]: record for record in records}
        for dataset, record in last.items():
            for metric, key in zip(validation_metrics(dataset), OF_RUNS, strict=True):
                if record.get(key) is not None:
                    values[metric] = float(record[key])
        for name in self.experiment.measures:
            values |= read_stage_note(self.note(run, name)).get("numbers", {})
        return values

    def read_measure(self, run: RunSpec, name: str) -> dict[str, float]:
        """Read the numbers that a measure's command has written, by metric.

        They are kept in the note of the stage, because other commands may replace the files. Raises UserError
        for a missing number.
        """
        numbers = {}
        for metric, sources in self.experiment.measures[name].read.items():
            files = fill_variables(sources, self.variables(run), f"measures.{name}.read.{metric}")
            numbers[metric] = fmean(map(read_number, files))
        return numbers

    def work(self) -> None:
        """Do stages until none is left, and wait while other workers hold all of them.

        Raises UserError with the path of the log if a command fails (FailureError if a retry may help), and
        PoolClosedError if another thread failed.
        """
        self.reject_changes()  # before shared stages are repeated
        while pending := self.pending():
            if not any(self.advance(run, stage) for run, stage in pending):
                self.commands.wait(POLL)

    def pending(self) -> list[tuple[RunSpec | None, Stage]]:
        """Return the next stages and their runs: shared ones first."""
        if shared := [stage for stage in self.before() if not stage.done]:
            self._stages.clear()  # shared stages may change the origins of runs
            return [(None, stage) for stage in shared]
        return [(task.run, stage) for task in self.tasks() for stage in task.stages if not stage.done]

    def advance(self, run: RunSpec | None, stage: Stage) -> bool:
        """Do a stage if its needs are done and it is free, and return whether it was free.

        Another worker may hold it, or another launch its run.
        """
        if not all(need.done for need in stage.needs):
            return False
        name = run.name if run else "before"
        lease = store.lease(self.experiment.out / "leases", f"{stage.note.parent.name}.{stage.note.stem}")
        with hold_if_free(lease) as acquired:
            if acquired and not stage.done:
                if run and stage.directory is not None:
                    stage.reject_changes(name)
                    latest = {stage.name: stage for stage in self.training(run)}[stage.name]
                else:
                    origin = stage.origin | command_origin(stage.command, self.experiment.out)
                    latest = replace(stage, origin=origin)
                _reject_new(name, stage, latest.identity != stage.identity or stage.code_changed)
                return self._run(run, stage)
        return acquired

    def _run(self, run: RunSpec | None, stage: Stage) -> bool:
        """Run the command of a stage, with its output in a log. `run` is None for a shared stage.

        Returns whether the run was free.
        """
        name = run.name if run else "before"
        if stage.directory is not None and not stage.read():
            for later in self._all_stages():
                if later.follows(stage):  # it read what is made again
                    later.note.unlink(missing_ok=True)
            stage.write()
        path = self.experiment.out / "logs" / f"{name}.{stage.name}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        self.log(f"{name}: {stage.name}")
        command = stage.command
        if stage.name == TRAIN:
            # --num_gpus would mean the first GPUs of the host, not those of this thread.
            options = command[3:] if self.commands.gpus else command[1:]
            command = [command[0], f"--master_port={random.choice(PORTS)}", *options]
        started = time.monotonic()
        with path.open("a+b") as log:  # has the output of all attempts
            offset = log.tell()
            code = self.commands.run(command, log)
            log.seek(offset)
            lines = [line for line in log.read().decode(errors="replace").splitlines() if line.strip()]
        if code:
            reason = next((line for line in reversed(lines) if line.startswith("error")), "".join(lines[-1:]))
            if stage.name == TRAIN and reason.endswith("[run-in-use]"):
                self.log(f"{name}: another launch trains this run. Waiting for it")
                return False
            error = UserError if code == ExitCode.MISTAKE else FailureError
            message = f"{name}: {stage.name} exited with code {code} ({path}): {reason}"
            raise error(message, code="stage-failed")
        numbers = (
            self.read_measure(run, stage.name) if run and stage.name in self.experiment.measures else None
        )
        _reject_new(name, stage, stage.code_changed)
        stage.write(time.monotonic() - started, numbers)
        return True

    def _all_stages(self) -> Iterator[Stage]:
        """Yield the stages of all runs against every possible baseline, also of runs that wait for trials."""
        axis = self.experiment.compare.axis
        baselines: dict[Labels, list[RunSpec]] = {}
        for run in self.runs:
            if run.labels[axis] == self.experiment.compare.baseline:
                baselines.setdefault(self._shared_labels(run), []).append(run)
        for run in self.runs:
            yield from self.stages(run)
            for baseline in baselines.get(self._shared_labels(run), []):
                yield from self.stages(run, baseline)

    def _shared_labels(self, run: RunSpec) -> Labels:
        """Return the labels that a run has in common with its baseline."""
        choose = self.experiment.choose
        axis = self.experiment.compare.axis
        return run.without(*((axis, choose.axis) if choose else (axis,)))


def _reject_new(run: str, stage: Stage, changed: bool) -> None:
    """Raise UserError if a file that a stage depends on has changed since its origin was determined."""
    if changed:
        message = f"{run}: a file that {stage.name} depends on has just changed; run the command again"
        raise UserError(message, code="stage-changed")


def read_number(source: str) -> float:
    """Read the number at "FILE:key.key"."""
    path, _, keys = source.rpartition(":")
    try:
        value = read_json(Path(path), store.STORED_BYTES)
        for key in keys.split("."):
            value = value[int(key)] if isinstance(value, list) else value[key]
        return float(value)
    except (OSError, ValueError, LookupError, TypeError) as error:
        reason = f"{type(error).__name__}: {one_line(error, 120)}"
        raise UserError(f"{source} has no number ({reason})", code="no-number") from None
