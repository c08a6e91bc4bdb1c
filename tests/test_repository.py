"""Imports flow one way and never in a circle, light modules load nothing heavy, documents are finished."""

from __future__ import annotations

import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest

from tests.conftest import REPO

COMMON_NEEDS = {"psutil", "pydantic", "yaml"}  # beside the standard library
OWN_NEEDS = {  # of files of common whose users have these libraries loaded anyway
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
        needs -= COMMON_NEEDS | {"emo"} | OWN_NEEDS.get(module, set()) | sys.stdlib_module_names
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


def test_documents_are_finished() -> None:
    for file in tracked():
        if file.endswith(".md"):
            assert "TODO" not in (REPO / file).read_text(), file
