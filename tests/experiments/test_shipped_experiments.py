"""Every experiment in the repository can be started as its header says: checked without network or GPU."""

from __future__ import annotations

import functools
import re
import shlex
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from common.recipe import Section, load_section
from eval.cli import parser
from eval.icl.tasks import PAPER_ORDER, load_task
from experiments.__main__ import main
from experiments.design import Experiment, expand, read_experiment
from experiments.evidence import Evidence
from experiments.known_truth.study import Study
from experiments.work import Work
from pipeline.config import load_config
from pipeline.planning.checks import check
from tests.conftest import REPO

FOLDER = REPO / "experiments"
DEVELOPMENT = FOLDER / "paper" / "dev"  # task files
OTHERS: dict[str, type[Section]] = {"known-truth": Study, "evidence": Evidence}  # by how their names begin
FILES = sorted(
    path
    for path in FOLDER.rglob("*.yaml")
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


@functools.cache
def experiment(path: Path) -> Experiment:
    return read_experiment(path, [])


def header_commands(path: Path) -> list[list[str]]:
    """What a file's first comment says to run."""
    head = path.read_text(encoding="utf-8").split("\n\n")[0].splitlines()
    lines = [line[1:].strip() for line in head if line.startswith("#")]
    return [shlex.split(line) for line in lines if line.startswith("python -m experiments ")]


@every_experiment
def test_a_dry_run_needs_no_network(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(path), "--dry-run", f"out={tmp_path}"]) == 0, capsys.readouterr().err
    assert "to do" in capsys.readouterr().out


@every_experiment
def test_the_command_in_a_header_can_be_run(path: Path, tmp_path: Path) -> None:
    (command,) = header_commands(path)
    assert command[:4] == ["python", "-m", "experiments", "run"]
    assert REPO / command[4] == path
    arguments = [str(tmp_path / word) if word.endswith(".sbatch") else word for word in command[4:]]
    assert main(["run", *arguments, "--dry-run", f"out={tmp_path / 'out'}"]) == 0
    for script in tmp_path.glob("*.sbatch"):
        assert f"#SBATCH --gpus={experiment(path).ranks}\n" in script.read_text()


def evaluations(path: Path) -> Iterator[list[str]]:
    """The words after `python -m eval` of every such command of an experiment's first and last run."""
    work = Work(experiment(path))
    first = work.runs[0]  # of the baseline, for the measures that compare with it
    stages = [stage for run in (first, work.runs[-1]) for stage in work.whole(run, first).stages]
    for stage in (*work.before(), *stages):
        if stage.command[1:3] == ["-m", "eval"]:
            yield stage.command[3:]


@every_experiment
def test_measures_are_commands_of_the_evaluator(path: Path) -> None:
    for words in evaluations(path):
        arguments = parser().parse_args(words)
        if arguments.command == "run" and arguments.tasks != "all":
            assert [load_task(name).name for name in arguments.tasks.split(",")] == list(PAPER_ORDER)


@every_experiment
def test_numbers_are_read_where_they_are_written(path: Path) -> None:
    """A result below OUT/models/NAME or OUT/judgements belongs to a command with this --out and --name."""
    work = Work(experiment(path))
    run = work.runs[-1]
    places = work.places(run)
    texts = [place for m in experiment(path).measures.values() for place in m.read.values()]
    files = [one.format(**places) for text in texts for one in ([text] if isinstance(text, str) else text)]
    written = []
    for words in evaluations(path):
        arguments = parser().parse_args(words)
        if arguments.command in ("run", "generate", "answer"):
            written.append(f"{arguments.out}/models/{arguments.name}/")
        if arguments.command == "judge":
            written.append(f"{arguments.out}/judgements/{arguments.name}.json:")
    for file in files:
        if "/models/" in file or "/judgements/" in file:
            assert any(file.startswith(place) for place in written), file


@pytest.mark.parametrize("path", [p for p in FILES if p.parent.name == "paper"], ids=lambda path: path.stem)
def test_runs_of_the_paper_can_be_trained(path: Path) -> None:
    """All that training would refuse, one run for each objective."""
    last = {run.label("objective"): run for run in expand(experiment(path))}
    for run in (last["tailr"], last["emo"]):
        overrides = [*Work.overrides(run), "run_dir=runs/nowhere", "data.dir=runs/nowhere-data"]
        config = load_config(experiment(path).recipe, overrides)
        assert check(config, experiment(path).ranks, local=False).batch.batch == config.train.batch


@pytest.mark.parametrize("name", PAPER_ORDER)
def test_development_rows_are_not_test_rows(name: str) -> None:
    development, task = load_task(str(DEVELOPMENT / f"{name}.yaml")), load_task(name)
    assert development.identity() == task.identity()
    ours, theirs = development.spec.splits, task.spec.splits
    assert not ours.test.startswith(theirs.test)
    assert not ours.demonstrations.startswith(theirs.test)
    slices = [re.fullmatch(r"(\w+)\[(.*)\]", split) for split in (ours.test, ours.demonstrations)]
    if all(slices):  # two parts of one split that meet
        test, shots = (found.group(2) for found in slices if found)
        assert test == f"{shots.removeprefix(':')}:"
    else:
        assert ours.test != ours.demonstrations


@pytest.mark.parametrize(
    "path", sorted(p for name in OTHERS for p in FOLDER.glob(f"{name}*.yaml")), ids=lambda path: path.stem
)
def test_the_other_files_are_read(path: Path) -> None:
    kind = next(kind for name, kind in OTHERS.items() if path.name.startswith(name))
    assert load_section(kind, path, [])


def test_the_page_on_the_paper_lists_every_experiment() -> None:
    page = (REPO / "docs" / "paper.md").read_text()
    named = set(re.findall(r"experiments/paper/([\w.-]+)\.yaml", page)) - {"FILE"}
    assert named == {path.stem for path in FILES if path.parent.name == "paper"}
    rows = re.findall(r"^\| [^|]+ \| `((?:table|figure)[\w.-]+)`", page, flags=re.MULTILINE)
    assert set(rows) <= named
