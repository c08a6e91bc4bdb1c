"""Imports flow one way, light modules load nothing heavy, CONTRIBUTING.md and the workflow say what is so."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest
import yaml

from emo.data_prep.config import load_data_config
from emo.eval.icl.tasks import load_task
from emo.pipeline.loss.objectives import get_objective
from tests.conftest import REPO
from tests.helpers.changed import NEEDED, needed

COMMON_NEEDS = {"psutil", "pydantic", "yaml"}  # beside the standard library
TEXT = (REPO / "CONTRIBUTING.md").read_text()
FURTHER_NEEDS = {  # of files of common whose users have these libraries loaded anyway
    "emo.common.commands": {"argcomplete"},
    "emo.common.progress": {"rich"},
    "emo.common.report.document": {"jinja2", "markupsafe"},
    "emo.common.report.figure": {"markupsafe", "matplotlib"},
    "emo.common.weights": {"transformers"},
}


def tracked() -> list[str]:
    listed = subprocess.run(["git", "ls-files"], cwd=REPO, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [f for f in listed.stdout.splitlines() if (REPO / f).exists()]


def test_imports_flow_one_way() -> None:
    """The contracts of pyproject.toml hold."""
    command = [Path(sys.executable).parent / "lint-imports", "--no-logo", "--no-cache"]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    return grimp.build_graph("emo", include_external_packages=True, cache_dir=None)


def test_no_two_files_import_each_other(graph: grimp.ImportGraph) -> None:
    imports = {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}
    TopologicalSorter(imports).prepare()  # raises CycleError, which names the circle


def test_common_stands_on_little(graph: grimp.ImportGraph) -> None:
    for module in {"emo.common", *graph.find_descendants("emo.common")}:
        needs = {name for name in graph.find_modules_directly_imported_by(module) if "." not in name}
        needs -= COMMON_NEEDS | {"emo"} | FURTHER_NEEDS.get(module, set()) | sys.stdlib_module_names
        assert not needs, f"{module} imports {needs}"


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("emo.pipeline.run_dir", {"torch", "deepspeed", "transformers", "numpy"}),
        ("emo.loss", {"deepspeed", "transformers", "pydantic", "yaml"}),
        ("emo.common.recipe", {"torch", "numpy"}),
    ],
)
def test_light_modules_load_nothing_heavy(module: str, absent: set[str]) -> None:
    code = f"import sys, {module}; print(*(set({sorted(absent)}) & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def example(name: str, directory: Path) -> Path:
    """An example, written to the file that its first line names."""
    blocks = re.findall(r"```\w+\n(# (\S+?\.\w+)[:\n].*?)```", TEXT, re.DOTALL)
    (path,) = [directory / file for _, file in blocks if file == name]
    path.write_text(next(text for text, file in blocks if file == name))
    assert len(path.read_text().strip().splitlines()) <= 10
    return path


def test_the_examples_of_contributing_work(tmp_path: Path) -> None:
    path = example("my_objective.py", tmp_path)
    assert get_objective(f"{path}:unsure", strength=1.0).needs == {"H"}  # after a check against autograd
    assert load_task(str(example("my_task.yaml", tmp_path))).labels == ["German", "French"]
    config = load_data_config(example("my_recipe.yaml", tmp_path), [])
    assert [source.weight for source in config.sources] == [2, 1]


def test_every_named_number_has_that_owner() -> None:
    for name in set(re.findall(r"`((?:\w+\.)+[A-Z_]+|[a-z_.]+\.__all__)`", TEXT)):
        module, _, constant = name.rpartition(".")
        assert hasattr(importlib.import_module(module), constant), name


def test_every_make_target_exists() -> None:
    workflow = (REPO / ".github/workflows/test.yml").read_text()
    makefile = (REPO / "Makefile").read_text()
    targets = {word for line in re.findall(r"^([a-z][a-z -]*):", makefile, re.M) for word in line.split()}
    names = set(re.findall(r"\bmake ([a-z-]+)", TEXT + workflow)) - {"it"}
    assert names and names <= targets


def test_workflow_and_templates_are_whole() -> None:
    files = [*(REPO / ".github").rglob("*.yml"), REPO / ".pre-commit-config.yaml", REPO / "CITATION.cff"]
    trees = {path.name: yaml.safe_load(path.read_text()) for path in files}
    steps = [step for job in trees["test.yml"]["jobs"].values() for step in job["steps"]]
    assert any(step.get("run") == ".ci/run" for step in steps)


def test_a_changed_file_needs_the_tests_of_its_folder() -> None:
    loss = ["tests/loss", "tests/pipeline/test_hf.py", "tests/pipeline/test_model.py"]
    for file, expected in (
        ("pipeline/loss/fused.py", loss),
        ("tests/eval/test_stats.py", ["tests/eval/test_stats.py"]),
        ("tests/bench/data.py", []),
    ):
        assert needed([file]) == ["tests/test_repository.py", *expected]
    assert needed(["tests/bench/data.py", "tests/helpers/launching.py"]) == ["tests"]
    for prefix, tests in NEEDED.items():
        assert (REPO / prefix).exists(), prefix
        assert all((REPO / "tests" / name).exists() for name in tests), prefix
