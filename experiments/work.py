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
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from common.errors import FailureError, UserError, one_line
from common.exit_codes import ExitCode
from common.lease import Lease, held
from common.provenance import shipped
from common.untrusted import read_json
from data_prep.config import load_data_config
from eval import store
from experiments.code import code_digest
from experiments.crew import Crew
from experiments.design import (
    CHANGE,
    PREPARE,
    TRAIN,
    VALIDATION,
    Experiment,
    Measure,
    Run,
    chosen,
    expand,
    fill,
    interpreted,
    reported,
    trials,
    words,
)
from experiments.origin import command_origin, data_origin, flattened, run_origin
from experiments.stages import SECONDS, Stage, in_order, read_note, refuse_others, said
from pipeline.config import RunConfig, load_config
from pipeline.run_dir import EXPORT, read_metrics

POLL = 2.0  # seconds between looks for work when others hold all of it
PORTS = 20_000, 32_768  # where the ranks of runs meet: below those that the kernel gives away
SCRIPTS = {"text": "continual", "instruct": "instruct"}


class Task(NamedTuple):
    """A run and its stages in order; those from `alone` on also need the run's baseline."""

    run: Run
    stages: list[Stage]
    alone: int
    baseline: Run | None = None

    @property
    def done(self) -> bool:
        """Return whether every stage has been done."""
        return all(stage.done for stage in self.stages)


class Work:
    """An experiment on disk."""

    def __init__(self, experiment: Experiment, say: Callable[[str], None] = print) -> None:
        self.experiment, self.say = experiment, say
        self.crew = Crew()
        self.runs = expand(experiment)
        self._origins: dict[str, dict[str, Any]] = {}  # of runs, as of when their stages were last listed
        self.notes = experiment.out / "notes"
        self.script = SCRIPTS[load_data_config(experiment.recipe, self.overrides(self.runs[0])).kind]

    def directory(self, run: Run) -> Path:
        """Return the run directory of a run."""
        return self.experiment.out / "runs" / run.name

    def config(self, run: Run) -> RunConfig:
        """Return the resolved recipe of a run. Raises UserError naming the run."""
        overrides = [*self.overrides(run), f"data.dir={self._data(run)}", f"run_dir={self.directory(run)}"]
        try:
            return load_config(self.experiment.recipe, overrides)
        except UserError as error:
            raise UserError(f"{run.name}: {error}") from None

    def refuse_others(self) -> None:
        """Raises UserError where a run was begun or done with something else than it would be now."""
        begun = [run for run in self.runs if self._data(run).exists() or self.directory(run).exists()]
        refuse_others((run.name, stage) for run in begun for stage in self._shared_and_own(run))

    def before(self) -> list[Stage]:
        """Return the stages that all runs share, in order."""
        stages = []
        for name, text in self.experiment.before.items():
            command = interpreted(words(text, self.experiment.places, f"before.{name}"))
            origin = command_origin(said(command), self.experiment.out)
            stages.append(Stage(name, command, self.notes / f"before.{name}.json", origin))
        return in_order(stages)

    def whole(self, run: Run, baseline: Run | None = None) -> Task:
        """Return a run with all its measures; those against the baseline only where that is given."""
        own = {n: m for n, m in self.experiment.measures.items() if not m.against_baseline}
        measures = [self._measuring(run, name, measure) for name, measure in own.items()]
        stages = self._shared_and_own(run)
        stages += in_order(measures, stages[-1])
        if baseline is None:
            return Task(run, stages, len(stages))
        last = {n: m for n, m in self.experiment.measures.items() if m.against_baseline}
        after = in_order(
            (self._measuring(run, name, measure, baseline) for name, measure in last.items()),
            stages[-1],
            self.whole(baseline).stages[-1],
        )
        return Task(run, [*stages, *after], len(stages), baseline)

    def trial(self, run: Run) -> Task:
        """Return the stages of a run that `choose` needs: none after the measure that it goes by."""
        task, by = self.whole(run), self.experiment.choose.by if self.experiment.choose else VALIDATION
        deciding = [name for name, m in self.experiment.measures.items() if by in m.read] or [TRAIN]
        end = [stage.name for stage in task.stages].index(deciding[0]) + 1
        return Task(run, task.stages[:end], end)

    def tasks(self) -> list[Task]:
        """Return what is to be done: the trials until all are done, then what they choose."""
        first = [self.trial(run) for run in trials(self.experiment, self.runs)]
        if not all(task.done for task in first):
            return first
        reported = self.reported()
        compare = self.experiment.compare
        aside = (compare.axis, *([self.experiment.choose.axis] if self.experiment.choose else ()))
        bases = {run.without(*aside): run for run in reported if run.label(compare.axis) == compare.baseline}
        return [
            self.whole(run, bases[run.without(*aside)])
            for run in sorted(reported, key=lambda run: run.label(compare.axis) != compare.baseline)
        ]

    def reported(self) -> list[Run]:
        """Return the runs that the table shows; all trials must be done."""
        choose = self.experiment.choose
        if choose is None:
            return self.runs
        scores = {}
        for run in trials(self.experiment, self.runs):
            score = self.values(run).get(choose.by, math.nan)
            scores[run.name] = score if math.isfinite(score) else math.inf * (1 if choose.least else -1)
        return chosen(self.experiment, self.runs, scores)

    def values(self, run: Run) -> dict[str, float]:
        """Return the numbers of a run so far, by name. Raises UserError where a measure left no number."""
        found = {}
        last = {r["set"]: r for r in read_metrics(self.directory(run)) if "set" in r}
        for name, record in last.items():
            for number in (VALIDATION, CHANGE):
                if record.get(number) is not None:
                    found[reported(number, name)] = float(record[number])
        for name, measure in self.experiment.measures.items():
            if read_note(self.notes / run.name / f"{name}.json") is not None:
                where, places = f"measures.{name}.read", self.places(run)
                for key, given in measure.read.items():
                    files = [given] if isinstance(given, str) else given
                    found[key] = fmean(_number(fill(place, places, f"{where}.{key}")) for place in files)
        return found

    def seconds(self) -> Iterator[float]:
        """Yield the seconds that each run took that is done."""
        for task in self.tasks():
            notes = [read_note(stage.note) for stage in task.stages if stage.name != PREPARE]
            if all(note is not None and SECONDS in note for note in notes):
                yield sum(float(note[SECONDS]) for note in notes if note is not None)

    def work(self) -> None:
        """Do what all runs share, then runs until none is left; wait for those that other workers hold.

        Raises UserError, naming the log, when a command fails (FailureError where that may pass), and
        EndedError when another worker of this process has failed.
        """
        code_digest.cache_clear()
        self.refuse_others()  # before what all runs share is made anew for some
        for stage in self.before():
            self._once("before", stage)
        self._origins.clear()  # these stages may have made what runs begin from
        while left := [task for task in self.tasks() if not task.done]:
            worked = False
            for task in left:
                with held(self._lease(task.run.name)) as mine:
                    worked |= mine and self._do(task)
            if not worked:
                self.crew.wait(POLL)

    def _do(self, task: Task) -> bool:
        """Do the stages that can be done now; return whether there was one."""
        worked = False
        for place, stage in enumerate(task.stages):
            if stage.done:
                continue
            if stage.place is not None:
                self._look_again(task.run, stage)
            if place >= task.alone and task.baseline is not None and not self.whole(task.baseline).done:
                break
            if stage.name == PREPARE:
                self._once(task.run.name, stage)
            else:
                self._run(task.run.name, stage)
            worked = True
        return worked

    def _look_again(self, run: Run, stage: Stage) -> None:
        """Raises UserError where the recipe is not what it was when the stages were listed."""
        self._origins.pop(run.name, None)
        code_digest.cache_clear()
        now = next(one for one in self._shared_and_own(run) if one.name == stage.name)
        refuse_others([(run.name, now)])
        if now.content != stage.content:
            raise UserError(f"{run.name}: what it is made with has just changed; run the same command again")

    def _once(self, owner: str, stage: Stage) -> None:
        """Do what several runs share: one worker does it, the others wait."""
        while not stage.done:
            with held(self._lease(f"once.{stage.note.stem}")) as mine:
                if mine and not stage.done:
                    self._run(owner, stage)
            if not mine:
                self.crew.wait(POLL)

    def _lease(self, name: str) -> Lease:
        return store.lease(self.experiment.out / "leases", name)

    def _run(self, owner: str, stage: Stage) -> None:
        stage.claim()
        log = self.experiment.out / "logs" / f"{owner}.{stage.name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        self.say(f"{owner}: {stage.name}")
        began, command = time.monotonic(), stage.command
        if stage.name == TRAIN:
            command = [*command[:1], "--master_port", str(_port(f"{log.resolve()}")), *command[1:]]
        with log.open("ab") as sink:
            before = sink.tell()
            code = self.crew.run(command, sink, _environment())
        if code:
            told = f"{owner}: {stage.name} ended with code {code} ({log}): {_reason(log, before)}"
            raise UserError(told) if code == ExitCode.MISTAKE else FailureError(told)
        stage.finish(time.monotonic() - began)

    def _shared_and_own(self, run: Run) -> list[Stage]:
        """Return the stages that prepare the data and train, after all that runs share."""
        shared = self.before()
        data, place = self._data(run), self.directory(run)
        notes = self.notes / f"{data.name}.json", self.notes / run.name / f"{TRAIN}.json"
        origins = self._origins.get(run.name)
        if origins is None:
            config, note = self.config(run), (place.exists() and read_note(notes[1])) or {}
            recorded = note.get("made_with")
            training = run_origin(config, recorded if isinstance(recorded, dict) else {})
            origins = self._origins[run.name] = {PREPARE: data_origin(config.data), TRAIN: training}
        before = flattened({f"before.{stage.name}": dict(stage.made_with) for stage in shared})
        prepare, train = (before | origins[name] for name in (PREPARE, TRAIN))
        commands = self._training(run, data)
        return in_order(
            [
                Stage(PREPARE, commands[0], notes[0], prepare, place=data),
                Stage(TRAIN, commands[1], notes[1], train, place=place),
            ],
            *shared[-1:],
        )

    def _training(self, run: Run, data: Path) -> tuple[list[str], list[str]]:
        """Return the commands that prepare a run's data and train."""
        overrides = self.overrides(run)
        of_data = [text for text in overrides if text.startswith("data.")]
        recipe, place = str(self.experiment.recipe), f"data.dir={data}"
        prepare = [sys.executable, "-m", "data_prep", "prepare", recipe, *of_data, place]
        train = [_bin("deepspeed"), "--num_gpus", str(self.experiment.ranks)]
        train += [str(shipped(Path(f"launch/{self.script}.sh"))), recipe]
        return prepare, [*train, *overrides, place, f"run_dir={self.directory(run)}"]

    def _measuring(self, run: Run, name: str, measure: Measure, baseline: Run | None = None) -> Stage:
        command = interpreted(words(measure.command, self.places(run, baseline), f"measures.{name}"))
        origin = command_origin(said(command), self.experiment.out)
        return Stage(name, command, self.notes / run.name / f"{name}.json", origin)

    @staticmethod
    def overrides(run: Run) -> list[str]:
        """Return a run's overrides as on a command line."""
        return [f"{key}={_yaml(value)}" for key, value in run.overrides.items()]

    def _data(self, run: Run) -> Path:
        """Return the directory of a run's data, one for all runs whose data overrides are the same."""
        own = {key: value for key, value in run.overrides.items() if key.split(".")[0] == "data"}
        key = hashlib.sha256(json.dumps(own, sort_keys=True, default=str).encode()).hexdigest()[:8]
        return self.experiment.out / f"data-{key}"

    def places(self, run: Run, baseline: Run | None = None) -> dict[str, Any]:
        """Return what the commands of a run can refer to."""
        directory = self.directory(run)
        places = {"run": run.name, "dir": directory, "export": directory / EXPORT}
        if baseline is not None:
            places |= {"baseline": self.directory(baseline) / EXPORT, "baseline_run": baseline.name}
        return dict(run.labels) | places | self.experiment.places | dict(run.names)


def _reason(log: Path, start: int) -> str:
    """Return the last line of a log that says what went wrong, from the byte `start` on."""
    with log.open("rb") as file:
        file.seek(start)
        lines = [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    return next((line for line in reversed(lines) if line.startswith("error")), lines[-1] if lines else "")


def _number(place: str) -> float:
    """Return the number at "FILE:key.key"."""
    path, _, keys = place.rpartition(":")
    try:
        value = read_json(Path(path), store.STORED_BYTES)
        for key in keys.split("."):
            value = value[int(key)] if isinstance(value, list) else value[key]
        return float(value)
    except (OSError, ValueError, KeyError, IndexError, TypeError, OverflowError) as error:
        raise UserError(f"{place} holds no number ({type(error).__name__}: {one_line(error, 120)})") from None


def _yaml(value: Any) -> str:
    """Return a value as an override on the command line."""
    return json.dumps(value) if isinstance(value, dict | list | bool) or value is None else str(value)


def _bin(name: str) -> str:
    beside = Path(sys.executable).parent / name
    return str(beside) if beside.exists() else name


def _port(of: str) -> int:
    """Return a free port where the ranks of a run meet; other runs begin to look at other ones."""
    first, end = PORTS
    start = int(hashlib.sha256(of.encode()).hexdigest()[:8], 16)
    for offset in range(end - first):
        port = first + (start + offset) % (end - first)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # ended runs leave theirs free
            probe.bind(("", port))
            return port
    raise FailureError(f"no port of this host between {first} and {end} is free")


def _environment() -> dict[str, str]:
    return os.environ | {"PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
