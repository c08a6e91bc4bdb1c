"""Doing the runs of an experiment: stage by stage, by the rooms' own commands, by any number of workers.

The stages in `before` are done first, once for all runs. A run's own are preparation (shared by all runs with
the same data), training, and its measures. A stage that is done leaves a note (see stages.py). Workers take
stages through leases, so the same command on more machines shares the work, and one that is killed loses one
stage.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import time
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from emo.common.errors import ExitCode, FailureError, UserError, one_line
from emo.common.io.lease import hold_if_free
from emo.common.io.untrusted import read_json
from emo.common.provenance import shipped
from emo.eval.results import store
from emo.pipeline.config import RunConfig, load_config
from emo.pipeline.control.run_dir import EXPORT, read_metrics

from .code import code_digest
from .design import (
    CHANGE,
    PREPARE,
    TRAIN,
    VALIDATION,
    Experiment,
    Run,
    chosen,
    expand,
    fill,
    split_command,
    trials,
    validation_metrics,
)
from .stages import Stage, command_origin, data_origin, read_note, run_origin
from .workers import Workers

POLL = 2.0  # seconds between looks for work when others hold all of it
PORTS = range(20_000, 32_768)  # where the ranks of runs meet: below those that the kernel gives away
SCRIPTS = {"text": "launch/continual.sh", "instruct": "launch/instruct.sh"}


class Task(NamedTuple):
    """A run and its stages in order."""

    run: Run
    stages: list[Stage]

    @property
    def done(self) -> bool:
        """Return whether every stage has been done."""
        return all(stage.done for stage in self.stages)


class Sweep:
    """An experiment on disk."""

    def __init__(self, experiment: Experiment, log: Callable[[str], None] = print) -> None:
        self.experiment, self.log = experiment, log
        self.workers = Workers()
        self.runs = expand(experiment)
        self._stages: dict[tuple[str, str | None], list[Stage]] = {}  # as of when they were listed

    def directory(self, run: Run) -> Path:
        """Return the run directory of a run."""
        return self.experiment.out / "runs" / run.name

    def data(self, run: Run) -> Path:
        """Return the directory of a run's data, one for all runs whose data overrides are the same."""
        overrides = {key: value for key, value in run.overrides.items() if key.partition(".")[0] == "data"}
        text = json.dumps(overrides, sort_keys=True, default=str)
        return self.experiment.out / f"data-{hashlib.sha256(text.encode()).hexdigest()[:8]}"

    def note(self, run: Run, stage: str) -> Path:
        """Return the note of a stage of a run's own."""
        return self.experiment.out / "notes" / run.name / f"{stage}.json"

    def config(self, run: Run) -> RunConfig:
        """Return the resolved recipe of a run. Raises UserError naming the run."""
        overrides = [*run.arguments(), f"data.dir={self.data(run)}", f"output_dir={self.directory(run)}"]
        try:
            return load_config(self.experiment.recipe, overrides)
        except UserError as error:
            raise UserError(f"{run.name}: {error}") from None

    def variables(self, run: Run, baseline: Run | None = None) -> dict[str, Any]:
        """Return the variables of the commands of a run."""
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
            stages.append(self._commanded(name, command, note, *stages[-1:]))
        return stages

    def stages(self, run: Run, baseline: Run | None = None) -> list[Stage]:
        """Return the stages of a run, with measures against the baseline only where that is given."""
        key = run.name, baseline and baseline.name
        if (listed := self._stages.get(key)) is not None:
            return listed
        stages = self.training(run) if baseline is None else [*self.stages(run)]
        needs = [] if baseline is None else self.stages(baseline)[-1:]
        for name, measure in self.experiment.measures.items():
            if measure.against_baseline == (baseline is not None):
                words = split_command(measure.command, self.variables(run, baseline), f"measures.{name}")
                stages.append(self._commanded(name, words, self.note(run, name), stages[-1], *needs))
        self._stages[key] = stages
        return stages

    def _commanded(self, name: str, command: list[str], note: Path, *needs: Stage) -> Stage:
        """Return the stage of a command of the file, which decides with its files what it makes."""
        return Stage(name, command, note, command_origin(command, self.experiment.out), needs)

    def training(self, run: Run) -> list[Stage]:
        """Return the stages that prepare a run's data and train, as they would be now."""
        config, shared, note = self.config(run), self.before(), self.note(run, TRAIN)
        data, directory = self.data(run), self.directory(run)
        recipe, script = str(self.experiment.recipe), str(shipped(Path(SCRIPTS[config.data.kind])))
        prepare = Stage(
            PREPARE,
            ["python", "-m", "emo", "prepare", recipe, *run.arguments("data"), f"data.dir={data}"],
            self.experiment.out / "notes" / f"{data.name}.json",
            {f"before.{stage.name}": dict(stage.origin) for stage in shared} | data_origin(config.data),
            tuple(shared[-1:]),
            data,
        )
        command = ["deepspeed", "--num_gpus", str(self.experiment.ranks), script, recipe, *run.arguments()]
        command += [f"data.dir={data}", f"output_dir={directory}"]
        recorded = read_note(note).get("made_with", {}) if directory.exists() else {}
        return [prepare, Stage(TRAIN, command, note, run_origin(config, recorded), (prepare,), directory)]

    def refuse_changes(self) -> None:
        """Raise UserError where a run was begun or done with something else than it would be now."""
        code_digest.cache_clear()
        self._stages.clear()
        for run in self.runs:
            if self.data(run).exists() or self.directory(run).exists():
                for stage in self.stages(run):
                    stage.refuse_changes(run.name)

    def tasks(self) -> list[Task]:
        """Return what is to be done: the trials until all are done, then what they choose.

        A trial ends with the measure that is chosen by, or with training.
        """
        experiment, choose = self.experiment, self.experiment.choose
        by = choose.by if choose else VALIDATION
        last = next((name for name, measure in experiment.measures.items() if by in measure.read), TRAIN)
        first = []
        for run in trials(experiment, self.runs):
            stages = self.stages(run)
            first.append(Task(run, stages[: [stage.name for stage in stages].index(last) + 1]))
        if not all(task.done for task in first):
            return first
        axis, label = experiment.compare.axis, experiment.compare.baseline
        aside = (axis, choose.axis) if choose else (axis,)
        runs = sorted(self.reported(), key=lambda run: run.labels[axis] != label)  # baselines first
        baselines = {run.without(*aside): run for run in runs if run.labels[axis] == label}
        return [Task(run, self.stages(run, baselines[run.without(*aside)])) for run in runs]

    def reported(self) -> list[Run]:
        """Return the runs that the table shows; all trials must be done."""
        choose = self.experiment.choose
        if choose is None:
            return self.runs
        values = {run.name: self.values(run) for run in trials(self.experiment, self.runs)}
        scores = {name: numbers.get(choose.by, math.nan) for name, numbers in values.items()}
        return chosen(self.experiment, self.runs, scores)

    def values(self, run: Run) -> dict[str, float]:
        """Return the numbers of a run so far, by metric. Raises UserError where a measure left no number."""
        values = {}
        last = {record["set"]: record for record in read_metrics(self.directory(run)) if "set" in record}
        for dataset, record in last.items():
            for metric, key in zip(validation_metrics(dataset), (VALIDATION, CHANGE), strict=True):
                if record.get(key) is not None:
                    values[metric] = float(record[key])
        for name, measure in self.experiment.measures.items():
            if read_note(self.note(run, name)):
                for metric, sources in measure.read.items():
                    texts = fill(sources, self.variables(run), f"measures.{name}.read.{metric}")
                    values[metric] = fmean(map(read_number, texts))
        return values

    def work(self) -> None:
        """Do what all runs share, then runs until none is left; wait for what other workers hold.

        Raises UserError, naming the log, when a command fails (FailureError where that may pass), and
        EndedError when another worker of this process has failed.
        """
        self.refuse_changes()  # before what all runs share is made anew for some
        while pending := self.pending():
            if not any(self.advance(run, stage) for run, stage in pending):
                self.workers.wait(POLL)

    def pending(self) -> list[tuple[Run | None, Stage]]:
        """Return the stages that are not done, with their runs: first those that all share."""
        if shared := [stage for stage in self.before() if not stage.done]:
            self._stages.clear()  # these stages may make what runs begin from
            return [(None, stage) for stage in shared]
        return [(task.run, stage) for task in self.tasks() for stage in task.stages if not stage.done]

    def advance(self, run: Run | None, stage: Stage) -> bool:
        """Do a stage if it can be done now and no other worker is at it; return whether there is progress."""
        if not all(need.done for need in stage.needs):
            return False
        name = run.name if run else "before"
        lease = store.lease(self.experiment.out / "leases", f"{stage.note.parent.name}.{stage.note.stem}")
        with hold_if_free(lease) as acquired:
            if acquired and not stage.done:
                if run and stage.directory is not None:
                    stage.refuse_changes(name)
                    latest = {stage.name: stage for stage in self.training(run)}[stage.name]
                    if latest.identity != stage.identity:  # a file has changed since the stages were listed
                        message = f"{name}: what it is made with has just changed; run the same command again"
                        raise UserError(message, code="stage-changed")
                self._run(name, stage)
        return acquired

    def _run(self, name: str, stage: Stage) -> None:
        if stage.directory is not None and not stage.read():
            stage.write()
        path = self.experiment.out / "logs" / f"{name}.{stage.name}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        self.log(f"{name}: {stage.name}")
        command, began = stage.command, time.monotonic()
        if stage.name == TRAIN:
            command = [command[0], f"--master_port={random.choice(PORTS)}", *command[1:]]
        with path.open("a+b") as log:  # it holds every attempt
            start = log.tell()
            code = self.workers.run(command, log)
            log.seek(start)
            text = log.read().decode(errors="replace") if code else ""
        if code:
            lines = [line for line in text.splitlines() if line.strip()] or [""]
            reason = next((line for line in reversed(lines) if line.startswith("error")), lines[-1])
            error = UserError if code == ExitCode.MISTAKE else FailureError
            raise error(
                f"{name}: {stage.name} ended with code {code} ({path}): {reason}", code="stage-failed"
            )
        stage.write(time.monotonic() - began)


def read_number(source: str) -> float:
    """Return the number at "FILE:key.key"."""
    path, _, keys = source.rpartition(":")
    try:
        value = read_json(Path(path), store.STORED_BYTES)
        for key in keys.split("."):
            value = value[int(key)] if isinstance(value, list) else value[key]
        return float(value)
    except (OSError, ValueError, LookupError, TypeError) as error:
        reason = f"{type(error).__name__}: {one_line(error, 120)}"
        raise UserError(f"{source} holds no number ({reason})", code="no-number") from None
