"""Doing the runs of an experiment: stage by stage, by the rooms' own commands, by any number of workers.

The stages in `before` are done first, once for all runs. A run's own are preparation (shared by all runs with
the same data), training, and its measures. A stage that is done leaves a note (see stages.py). Workers take
runs through leases, so the same command on more machines shares the work, and one that is killed loses one
stage.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import random
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from emo.common.errors import ExitCode, FailureError, UserError, one_line
from emo.common.lease import held
from emo.common.provenance import shipped
from emo.common.untrusted import read_json
from emo.data_prep.config import load_data_config
from emo.eval import store
from emo.experiments.code import code_digest
from emo.experiments.design import (
    CHANGE,
    PREPARE,
    TRAIN,
    VALIDATION,
    Experiment,
    Run,
    chosen,
    executable,
    expand,
    fill,
    split_command,
    trials,
    validation_metric,
)
from emo.experiments.stages import Stage, command_origin, data_origin, read_note, run_origin
from emo.experiments.workers import Workers
from emo.pipeline.config import RunConfig, load_config
from emo.pipeline.run_dir import EXPORT, read_metrics

POLL = 2.0  # seconds between looks for work when others hold all of it
PORTS = range(20_000, 32_768)  # where the ranks of runs meet: below those that the kernel gives away
Stages = tuple[Stage, ...]
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
        self.notes = experiment.out / "notes"
        self.script = SCRIPTS[load_data_config(experiment.recipe, self.overrides(self.runs[0])).kind]
        self._stages: dict[tuple[str, str | None], list[Stage]] = {}  # as of when they were listed

    @staticmethod
    def overrides(run: Run, section: str = "") -> list[str]:
        """Return a run's overrides, all or those of a section, as on a command line."""
        return [
            f"{key}={json.dumps(value) if isinstance(value, dict | list | bool | None) else value}"
            for key, value in run.overrides.items()
            if section in ("", key.partition(".")[0])
        ]

    def directory(self, run: Run) -> Path:
        """Return the run directory of a run."""
        return self.experiment.out / "runs" / run.name

    def data(self, run: Run) -> Path:
        """Return the directory of a run's data, one for all runs whose data overrides are the same."""
        overrides = {key: value for key, value in run.overrides.items() if key.partition(".")[0] == "data"}
        text = json.dumps(overrides, sort_keys=True, default=str)
        return self.experiment.out / f"data-{hashlib.sha256(text.encode()).hexdigest()[:8]}"

    def config(self, run: Run) -> RunConfig:
        """Return the resolved recipe of a run. Raises UserError naming the run."""
        overrides = [*self.overrides(run), f"data.dir={self.data(run)}", f"output_dir={self.directory(run)}"]
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
        return dict(run.labels) | variables | self.experiment.variables | dict(run.names)

    def _command(self, key: str, text: str, variables: Mapping[str, Any], note: str, needs: Stages) -> Stage:
        """Return the stage of a command of the file, which decides with its files what it makes."""
        command = split_command(text, variables, key)
        origin = command_origin(command, self.experiment.out)
        return Stage(key.partition(".")[2], command, self.notes / f"{note}.json", origin, needs)

    def before(self) -> list[Stage]:
        """Return the stages that all runs share, in order."""
        stages: list[Stage] = []
        for key, text in ((f"before.{name}", text) for name, text in self.experiment.before.items()):
            stages.append(self._command(key, text, self.experiment.variables, key, tuple(stages[-1:])))
        return stages

    def stages(self, run: Run, baseline: Run | None = None) -> list[Stage]:
        """Return the stages of a run, with measures against the baseline only where that is given."""
        key = run.name, baseline and baseline.name
        if key not in self._stages:
            stages = self._training(run) if baseline is None else [*self.stages(run)]
            variables = self.variables(run, baseline)
            for name, measure in self.experiment.measures.items():
                if measure.against_baseline == (baseline is not None):
                    needs = (stages[-1], *(self.stages(baseline)[-1:] if baseline is not None else ()))
                    note = f"{run.name}/{name}"
                    stages.append(self._command(f"measures.{name}", measure.command, variables, note, needs))
            self._stages[key] = stages
        return self._stages[key]

    def _training(self, run: Run) -> list[Stage]:
        """Return the stages that prepare a run's data and train, as they would be now."""
        config, shared, data, directory = self.config(run), self.before(), self.data(run), self.directory(run)
        note = self.notes / run.name / f"{TRAIN}.json"
        recorded = read_note(note).get("made_with") if directory.exists() else None
        origin = {
            f"before.{stage.name}.{key}": value for stage in shared for key, value in stage.origin.items()
        }
        data_dir, recipe = f"data.dir={data}", str(self.experiment.recipe)
        prepare = Stage(
            PREPARE,
            ["python", "-m", "emo", "prepare", recipe, *self.overrides(run, "data"), data_dir],
            self.notes / f"{data.name}.json",
            origin | data_origin(config.data),
            tuple(shared[-1:]),
            data,
        )
        launch = ["deepspeed", "--num_gpus", str(self.experiment.ranks), str(shipped(Path(self.script)))]
        train = Stage(
            TRAIN,
            [*launch, recipe, *self.overrides(run), data_dir, f"output_dir={directory}"],
            note,
            origin | run_origin(config, recorded if isinstance(recorded, dict) else {}),
            (prepare,),
            directory,
        )
        return [prepare, train]

    def refuse_changes(self) -> None:
        """Raise UserError where a run was begun or done with something else than it would be now."""
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
        runs = sorted(self.reported(), key=lambda run: run.label(axis) != label)  # baselines first
        baselines = {run.without(*aside): run for run in runs if run.label(axis) == label}
        return [Task(run, self.stages(run, baselines[run.without(*aside)])) for run in runs]

    def reported(self) -> list[Run]:
        """Return the runs that the table shows; all trials must be done."""
        choose = self.experiment.choose
        if choose is None:
            return self.runs
        values = {run.name: self.values(run) for run in trials(self.experiment, self.runs)}
        scores = {name: numbers.get(choose.by, math.nan) for name, numbers in values.items()}
        worst = math.inf if choose.least else -math.inf
        finite = {name: score if math.isfinite(score) else worst for name, score in scores.items()}
        return chosen(self.experiment, self.runs, finite)

    def values(self, run: Run) -> dict[str, float]:
        """Return the numbers of a run so far, by metric. Raises UserError where a measure left no number."""
        values = {}
        last = {record["set"]: record for record in read_metrics(self.directory(run)) if "set" in record}
        for dataset, record in last.items():
            for metric in (VALIDATION, CHANGE):
                if record.get(metric) is not None:
                    values[validation_metric(metric, dataset)] = float(record[metric])
        for name, measure in self.experiment.measures.items():
            if read_note(self.notes / run.name / f"{name}.json"):
                for metric, sources in measure.read.items():
                    key, variables = f"measures.{name}.read.{metric}", self.variables(run)
                    values[metric] = fmean(read_number(fill(source, variables, key)) for source in sources)
        return values

    def work(self) -> None:
        """Do what all runs share, then runs until none is left; wait for those that other workers hold.

        Raises UserError, naming the log, when a command fails (FailureError where that may pass), and
        EndedError when another worker of this process has failed.
        """
        code_digest.cache_clear()
        self.refuse_changes()  # before what all runs share is made anew for some
        for stage in self.before():
            self._run_once("before", stage)
        self._stages.clear()  # these stages may have made what runs begin from
        while tasks := [task for task in self.tasks() if not task.done]:
            worked = False
            for task in tasks:
                with held(store.lease(self.experiment.out / "leases", task.run.name)) as acquired:
                    worked |= acquired and self.advance(task)
            if not worked:
                self.workers.wait(POLL)

    def advance(self, task: Task) -> bool:
        """Do the stages of a run that can be done now; return whether there was one."""
        worked, name = False, task.run.name
        for index, stage in enumerate(task.stages):
            if stage.done:
                continue
            if stage.directory is not None:  # the recipe may have changed since the stages were listed
                code_digest.cache_clear()
                latest = self._training(task.run)[index]
                latest.refuse_changes(name)
                if latest.identity != stage.identity:
                    message = f"{name}: what it is made with has just changed; run the same command again"
                    raise UserError(message, code="stage-changed")
            if not all(need.done for need in stage.needs):  # the baseline's, which another worker does
                break
            (self._run_once if stage.name == PREPARE else self._run)(name, stage)
            worked = True
        return worked

    def _run_once(self, name: str, stage: Stage) -> None:
        """Do what several runs share: one worker does it, the others wait."""
        while not stage.done:
            with held(store.lease(self.experiment.out / "leases", f"once.{stage.note.stem}")) as acquired:
                if acquired and not stage.done:
                    self._run(name, stage)
            if not acquired:
                self.workers.wait(POLL)

    def _run(self, name: str, stage: Stage) -> None:
        if stage.directory is not None and not stage.read():
            stage.write()
        log = self.experiment.out / "logs" / f"{name}.{stage.name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log(f"{name}: {stage.name}")
        command = executable(stage.command)
        if stage.name == TRAIN:
            command[1:1] = ["--master_port", str(free_port())]
        environment = os.environ | {"PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
        began = time.monotonic()
        with log.open("ab") as output:
            start = output.tell()  # the log holds every attempt
            code = self.workers.run(command, output, environment)
        if code:
            with log.open("rb") as file:
                file.seek(start)
                text = file.read().decode(errors="replace")
            lines = [line for line in text.splitlines() if line.strip()] or [""]
            reason = next((line for line in reversed(lines) if line.startswith("error")), lines[-1])
            error = UserError if code == ExitCode.MISTAKE else FailureError
            raise error(f"{name}: {stage.name} ended with code {code} ({log}): {reason}", code="stage-failed")
        stage.write(time.monotonic() - began)


def read_number(source: str) -> float:
    """Return the number at "FILE:key.key"."""
    path, _, keys = source.rpartition(":")
    try:
        value = read_json(Path(path), store.STORED_BYTES)
        for key in keys.split("."):
            value = value[int(key)] if isinstance(value, list) else value[key]
        return float(value)
    except (OSError, ValueError, KeyError, IndexError, TypeError, OverflowError) as error:
        reason = f"{type(error).__name__}: {one_line(error, 120)}"
        raise UserError(f"{source} holds no number ({reason})", code="no-number") from None


def free_port() -> int:
    """Return one of PORTS that nothing on this host listens at."""
    for port in random.sample(PORTS, len(PORTS)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # ended runs leave theirs free
            probe.bind(("", port))
            return port
    raise FailureError(f"no port of this host between {PORTS.start} and {PORTS.stop} is free")
