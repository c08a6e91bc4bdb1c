"""Every experiment in the repository can be started by the command in its header (no network or GPU)."""

from __future__ import annotations

import copy
import functools
import re
import shlex
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from emo.__main__ import COMMANDS, EVALUATION
from emo.common.config import recipe
from emo.common.config.recipe import Section, load_section
from emo.eval.cli import make_parser
from emo.eval.icl.tasks import PAPER_ORDER, load_task
from emo.experiments.cli import main
from emo.experiments.evidence import Evidence
from emo.experiments.known_truth.study import Study
from emo.experiments.sweeps import code
from emo.experiments.sweeps.design import expand, read_experiment
from emo.experiments.sweeps.sweep import Sweep
from emo.pipeline.config import load_config
from emo.pipeline.planning.checks import check_plan
from tests.conftest import REPO

FOLDER = REPO / "experiments" / "configs"
OTHERS: dict[str, type[Section]] = {"known-truth": Study, "evidence": Evidence}  # by prefix of the file name
FILES = [
    path.relative_to(FOLDER).as_posix()
    for path in sorted((*FOLDER.glob("*.yaml"), *FOLDER.glob("paper/*.yaml")))
    if not path.name.startswith(tuple(OTHERS))
]
experiment = functools.cache(lambda name: read_experiment(FOLDER / name, []))


@pytest.fixture(scope="module", autouse=True)
def read_once() -> Iterator[None]:
    """Parse each file once, because files have hundreds of runs and do not change during these tests."""
    load = functools.cache(recipe._load_yaml)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipe, "_load_yaml", lambda content: copy.deepcopy(load(content)))
        patch.setattr(code, "find_sources", functools.cache(code.find_sources))
        yield


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.chdir(REPO)


@pytest.mark.parametrize("name", FILES)
def test_the_command_in_a_header_can_be_run(name: str, tmp_path: Path) -> None:
    head = (FOLDER / name).read_text(encoding="utf-8").split("\n\n")[0]
    ((file, *words),) = map(shlex.split, re.findall(r"^#\s*emo sweep (.*)$", head, re.M))
    assert REPO / file == FOLDER / name
    arguments = [str(tmp_path / word) if word.endswith(".sbatch") else word for word in words]
    assert main(["sweep", file, *arguments, "--dry_run", f"out={tmp_path / 'out'}"]) == 0
    for script in tmp_path.glob("*.sbatch"):
        assert f"#SBATCH --gpus={experiment(name).ranks}\n" in script.read_text()


@pytest.mark.parametrize("name", FILES)
def test_measures_are_commands_of_the_evaluator(name: str) -> None:
    """Below OUT/models/NAME and OUT/judgements a measure reads only files that a command writes."""
    sweep = Sweep(experiment(name))
    first, last = sweep.runs[0], sweep.runs[-1]  # the first run is a baseline
    written = []
    for stage in (*sweep.before(), *sweep.stages(first, first), *sweep.stages(last, first)):
        if stage.command[1:3] != ["-m", "emo"] or COMMANDS[stage.command[3]].function != EVALUATION:
            continue
        arguments = make_parser().parse_args(stage.command[3:])
        if arguments.command == "eval" and arguments.tasks != "all":
            assert [load_task(task).name for task in arguments.tasks.split(",")] == list(PAPER_ORDER)
        if arguments.command in ("eval", "generate", "answer"):
            written.append(f"{arguments.output_path}/models/{arguments.name}/")
        if arguments.command == "judge":
            written.append(f"{arguments.output_path}/judgements/{arguments.name}.json:")
    for measure in experiment(name).measures.values():
        for source in (source for sources in measure.read.values() for source in sources):
            file = source.format(**sweep.variables(last))
            if "/models/" in file or "/judgements/" in file:
                assert file.startswith(tuple(written)), file


@pytest.mark.parametrize("name", [name for name in FILES if name.startswith("paper/")])
def test_runs_of_the_paper_can_be_trained(name: str) -> None:
    """The checks of training pass for one run of TaiLr and one of EMO."""
    last = {run.labels["objective"]: run for run in expand(experiment(name))}
    for run in (last["tailr"], last["emo"]):
        overrides = [*run.arguments(), "output_dir=runs/nowhere", "data.dir=runs/nowhere-data"]
        config = load_config(experiment(name).recipe, overrides)
        ready = check_plan(config, experiment(name).ranks)
        assert ready.batch.batch == config.train.global_batch_size


@pytest.mark.parametrize("name", PAPER_ORDER)
def test_development_rows_are_not_test_rows(name: str) -> None:
    development, task = load_task(str(FOLDER / f"paper/dev/{name}.yaml")), load_task(name)
    assert development.identity() == task.identity()
    splits = development.spec.splits
    assert task.spec.splits.test not in splits.test + splits.demonstrations
    whole, _, end = splits.demonstrations.partition("[:")
    if end:  # two adjacent parts of one split
        assert splits.test == f"{whole}[{end.removesuffix(']')}:]"
    else:
        assert splits.test != splits.demonstrations


def test_studies_and_evidence_files_are_valid() -> None:
    for name, kind in OTHERS.items():
        for path in FOLDER.glob(f"{name}*.yaml"):
            assert load_section(kind, path, [])
