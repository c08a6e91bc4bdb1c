"""Contents and behaviour of the wheel and the source distribution."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

import emo
from emo.common.errors import ExitCode
from emo.common.provenance import code_version
from tests.conftest import REPO
from tests.unit.test_repository import tracked

PACKAGED = ("common/", "data_prep/", "pipeline/", "eval/", "launch/", "ds_configs/")


class Built(NamedTuple):
    wheel: Path
    source: Path
    site: Path  # the wheel, unpacked as by pip


def run(code: str, directory: Path, expected: int = 0, **environment: str) -> list[str]:
    """Run code in a new Python process and return the lines that it prints."""
    command, variables = [sys.executable, "-c", code], os.environ | environment
    done = subprocess.run(command, cwd=directory, env=variables, capture_output=True, text=True)
    assert done.returncode == expected, done.stderr
    return done.stdout.splitlines()


def build(tree: Path, kind: str, out: Path) -> Path:
    """Build a distribution and return the archive."""
    code = f"import setuptools.build_meta as backend; print(backend.build_{kind}({str(out)!r}))"
    return out / run(code, tree)[-1]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Build a wheel from the source distribution, which proves that both are complete."""
    directory = tmp_path_factory.mktemp("build")
    for file in tracked():
        if file.startswith(("emo/", "experiments/", *PACKAGED)) or "/" not in file:
            target = directory / "tree" / file
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPO / file, target, follow_symlinks=False)
    source = build(directory / "tree", "sdist", directory)
    with tarfile.open(source) as archive:
        archive.extractall(directory / "unpacked", filter="data")
    wheel = build(next((directory / "unpacked").iterdir()), "wheel", directory)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(directory / "site")
    return Built(wheel, source, directory / "site")


def test_a_wheel_has_all_files_of_its_packages_and_no_experiments_or_tests(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as archive:
        files = {name for name in archive.namelist() if ".dist-info/" not in name}
    top = {f"emo/{name}" for name in ("__init__.py", "__main__.py", "hf.py", "loss.py", "py.typed")}
    assert files == top | {f"emo/{file}" for file in tracked() if file.startswith(PACKAGED)}
    with tarfile.open(built.source) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "README.md", "pyproject.toml"} <= names
    assert not any(name.startswith(("tests", "emo/experiments")) for name in names)


@pytest.mark.slow
def test_commands_and_shipped_files_work_from_a_wheel(built: Built, tmp_path: Path) -> None:
    """The working directory has modules with the same names, which must not hide the package."""
    for name in ("eval.py", "pipeline.py", "common/__init__.py", "launch/__init__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("raise SystemExit('this is the file of the user')\n")
    code = """
from pathlib import Path
import emo.hf, emo.launch.supervise
from emo.__main__ import main
from emo.common.report.document import Document
from emo.common.provenance import REPOSITORY, code_version, shipped
from emo.common.config.recipe import read_recipe
from emo.eval.icl.tasks import known_tasks, load_task
recipe = read_recipe(Path("launch/recipes/quickstart-pretrain.yaml"), [])
assert shipped(Path(recipe["deepspeed"])).is_file() and len(known_tasks()) == 8
assert Document('', ['x'], '', []).html()
assert main(["world", "tasks", "--train", "8", "--test", "8"]) == 0
assert {main([name, "x.yaml"]) for name in ("sweep", "table", "advise")} == {2}
print(load_task("eval/icl/tasks/sst2.yaml").name, code_version(), REPOSITORY)
"""
    expected = ["sst2", emo.__version__, str(built.site / "emo")]
    assert run(code, tmp_path, PYTHONPATH=str(built.site))[-1].split() == expected
    assert len(list((tmp_path / "tasks").iterdir())) == 8


def test_training_starts_from_a_wheel(built: Built, tmp_path: Path) -> None:
    """A stand-in for `deepspeed` records its arguments, and whether the supervisor is its parent."""
    started = tmp_path / "started"
    words = 'echo "$@"\ntest "$PPID" = "$PIPELINE_SUPERVISOR" && echo supervised'
    programs = {"deepspeed": f"exec >{started}\n{words}", "python": f'exec {sys.executable} "$@"'}
    (tmp_path / "bin").mkdir()
    for name, text in programs.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "mine.yaml").write_text(
        "output_dir: r\ndata: { dir: d, kind: instruct, tokenizer: t, sources: [{ files: a.jsonl }] }\n"
        "model: { architecture: { model_type: llama } }\ntrain: { max_steps: 1 }\n"
    )
    code = f"""
import sys
sys.executable = {str(tmp_path / "bin" / "python")!r}
from emo.__main__ import main
sys.exit(main(['train', '--master_port=1', '--', 'mine.yaml', 'train.seed=1']))
"""
    # the launcher exits with 0, but no rank has finished
    run(code, tmp_path, ExitCode.FAILURE, PYTHONPATH=str(built.site))
    words = "--master_port=1 --module emo.launch.rank mine.yaml train.seed=1"
    assert started.read_text().splitlines() == [words, "supervised"]
    assert os.access(REPO / "launch" / "instruct.sh", os.X_OK)


def test_an_image_records_its_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Dockerfile passes REVISION on, because images have no .git."""
    assert "\nARG REVISION=unknown\nENV EMO_REVISION=${REVISION}\n" in (REPO / "Dockerfile").read_text()
    monkeypatch.setattr("emo.common.provenance.REPOSITORY", tmp_path)
    for revision, expected in (("4f2a", "4f2a"), ("unknown", emo.__version__), ("", emo.__version__)):
        monkeypatch.setenv("EMO_REVISION", revision)
        assert code_version() == expected


def test_shell_completion(tmp_path: Path) -> None:
    for line, expected in (("emo prep", {"prepare"}), ("emo plan --be", {"--best"})):
        environment = {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": "\n", "COMP_LINE": line}
        environment |= {"COMP_POINT": str(len(line)), "_ARGCOMPLETE_STDOUT_FILENAME": str(tmp_path / "words")}
        run("import sys; sys.argv = ['emo']; from emo.__main__ import main; main()", REPO, **environment)
        assert {word.strip() for word in (tmp_path / "words").read_text().split("\n")} == expected


def test_all_versions_are_equal(built: Built) -> None:
    (metadata,) = importlib.metadata.distributions(name="emo-pipeline", path=[str(built.site)])
    citation = yaml.safe_load((REPO / "CITATION.cff").read_text())
    assert metadata.version == citation["version"] == emo.__version__
    newest = re.search(r"^## (\S+)", (REPO / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None and newest[1] in (emo.__version__, "Unreleased")
