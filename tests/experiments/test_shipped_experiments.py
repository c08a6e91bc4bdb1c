"""Every experiment in the repository can be started as its header says: checked without network or GPU."""

from __future__ import annotations

import functools
import re
import shlex
import socket
from pathlib import Path
from typing import Any

import pytest

from emo.__main__ import COMMANDS, EVALUATION
from emo.common.recipe import Section, load_section
from emo.eval.cli import parser
from emo.eval.icl.tasks import PAPER_ORDER, load_task
from emo.experiments.cli import main
from emo.experiments.design import expand, read_experiment
from emo.experiments.evidence import Evidence
from emo.experiments.known_truth.study import Study
from emo.experiments.sweep import Sweep
from emo.pipeline.config import load_config
from emo.pipeline.planning.checks import check
from tests.conftest import REPO

FOLDER = REPO / "experiments"
DEVELOPMENT = FOLDER / "paper" / "dev"  # task files
OTHERS: dict[str, type[Section]] = {"known-truth": Study, "evidence": Evidence}  # by how their names begin
FILES = sorted(
    path
    for path in (*FOLDER.glob("*.yaml"), *FOLDER.glob("paper/*.yaml"))
    if not path.name.startswith(tuple(OTHERS)) and not path.is_relative_to(DEVELOPMENT)
)
every_experiment = pytest.mark.parametrize(
    "path", FILES, ids=lambda path: path.relative_to(FOLDER).with_suffix("").as_posix()
)


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.chdir(REPO)


experiment = functools.cache(lambda path: read_experiment(path, []))


@every_experiment
def test_the_command_in_a_header_can_be_run(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head = path.read_text(encoding="utf-8").split("\n\n")[0].splitlines()
    lines = [line[1:].strip() for line in head if line.startswith("#")]
    (command,) = [shlex.split(line) for line in lines if line.startswith("emo sweep ")]
    assert command[:2] == ["emo", "sweep"]
    assert REPO / command[2] == path
    arguments = [str(tmp_path / word) if word.endswith(".sbatch") else word for word in command[2:]]
    assert main(["sweep", *arguments, "--dry_run", f"out={tmp_path / 'out'}"]) == 0
    assert "to do" in capsys.readouterr().out
    for script in tmp_path.glob("*.sbatch"):
        assert f"#SBATCH --gpus={experiment(path).ranks}\n" in script.read_text()


@every_experiment
def test_measures_are_commands_of_the_evaluator(path: Path) -> None:
    """A result below OUT/models/NAME or OUT/judgements is of a command with this --output_path and --name."""
    sweep = Sweep(experiment(path))
    first, last = sweep.runs[0], sweep.runs[-1]  # the first is of the baseline, which some compare with
    written = []
    for stage in (*sweep.before(), *sweep.stages(first, first), *sweep.stages(last, first)):
        if stage.command[1:3] != ["-m", "emo"] or COMMANDS[stage.command[3]].function != EVALUATION:
            continue
        arguments = parser().parse_args(stage.command[3:])
        if arguments.command == "eval" and arguments.tasks != "all":
            assert [load_task(name).name for name in arguments.tasks.split(",")] == list(PAPER_ORDER)
        if arguments.command in ("eval", "generate", "answer"):
            written.append(f"{arguments.output_path}/models/{arguments.name}/")
        if arguments.command == "judge":
            written.append(f"{arguments.output_path}/judgements/{arguments.name}.json:")
    for measure in experiment(path).measures.values():
        for source in (source for sources in measure.read.values() for source in sources):
            file = source.format(**sweep.variables(last))
            if "/models/" in file or "/judgements/" in file:
                assert file.startswith(tuple(written)), file


@pytest.mark.parametrize("path", [p for p in FILES if p.parent.name == "paper"], ids=lambda path: path.stem)
def test_runs_of_the_paper_can_be_trained(path: Path) -> None:
    """All that training would refuse, one run for each objective."""
    last = {run.labels["objective"]: run for run in expand(experiment(path))}
    for run in (last["tailr"], last["emo"]):
        overrides = [*run.arguments(), "output_dir=runs/nowhere", "data.dir=runs/nowhere-data"]
        config = load_config(experiment(path).recipe, overrides)
        ready = check(config, experiment(path).ranks, local=False)
        assert ready.batch.batch == config.train.global_batch_size


def test_development_rows_are_not_test_rows() -> None:
    for name in PAPER_ORDER:
        development, task = load_task(str(DEVELOPMENT / f"{name}.yaml")), load_task(name)
        assert development.identity() == task.identity()
        ours, others = development.spec.splits, task.spec.splits
        assert not ours.test.startswith(others.test)
        assert not ours.demonstrations.startswith(others.test)
        slices = [re.fullmatch(r"(\w+)\[(.*)\]", split) for split in (ours.test, ours.demonstrations)]
        if all(slices):  # two parts of one split that meet
            test, shots = (results.group(2) for results in slices if results)
            assert test == f"{shots.removeprefix(':')}:"
        else:
            assert ours.test != ours.demonstrations


def test_the_other_files_are_read() -> None:
    for name, kind in OTHERS.items():
        for path in FOLDER.glob(f"{name}*.yaml"):
            assert load_section(kind, path, [])
