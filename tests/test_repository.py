"""Imports flow one way and never in a circle, light modules load nothing heavy, documents are finished."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.conftest import REPO

ROOMS = ["common", "data_prep", "pipeline", "eval"]  # each may import itself and those before it
# What a room may know of the rooms before it: the format they leave behind, not how it is made.
KNOWN = {
    "data_prep": {"common"},
    "pipeline": {"common", "data_prep.config", "data_prep.scores", "data_prep.shards", "data_prep.tokenizer"},
    "pipeline.loss": {"common", "pipeline.loss"},
    "eval": {"common", "data_prep", "pipeline.run_dir"},
}
COMMON_NEEDS = {"psutil", "pydantic", "yaml"}  # beside the standard library
OWN_NEEDS = {  # of files of common whose users have these libraries loaded anyway
    "common/commands.py": {"argcomplete"},
    "common/progress.py": {"rich"},
    "common/report/document.py": {"jinja2", "markupsafe"},
    "common/weights.py": {"transformers"},
}


def tracked() -> list[str]:
    listed = subprocess.run(["git", "ls-files"], cwd=REPO, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [f for f in listed.stdout.splitlines() if (REPO / f).exists()]


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def sources(room: str) -> Iterator[Path]:
    return (path for path in (REPO / room.replace(".", "/")).rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(REPO).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def modules() -> dict[str, Path]:
    return {module_name(path): path for room in ROOMS for path in sources(room)}


def imports(path: Path) -> set[str]:
    """Absolute names that a file imports anywhere in it, types included."""
    found: set[str] = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.module and not node.level, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def below(name: str, module: str) -> bool:
    return name == module or name.startswith(module + ".")


@pytest.mark.parametrize("room", KNOWN)
def test_a_room_knows_only_the_formats_of_those_before_it(room: str) -> None:
    for path in sources(room):
        for name in imports(path):
            top = name.split(".")[0]
            if top in ROOMS and (room == "pipeline.loss" or top != room):
                assert any(below(name, known) for known in KNOWN[room]), f"{path} imports {name}"
            assert top not in ("tests", "experiments"), f"{path} imports {name}"


def test_common_stands_on_little() -> None:
    for path in sources("common"):
        for name in imports(path):
            top = name.split(".")[0]
            own = OWN_NEEDS.get(path.relative_to(REPO).as_posix(), set())
            allowed = top in sys.stdlib_module_names or top in COMMON_NEEDS | {"common"} | own
            assert allowed, f"{path} imports {name}"


def test_no_circles() -> None:
    known = modules()
    graph = {
        name: {m for i in imports(path) for m in (i, i.rpartition(".")[0]) if m in known and m != name}
        for name, path in known.items()
    }
    # a package's __init__ that offers names of its modules is no circle: they do not import it
    state: dict[str, int] = {}

    def visit(name: str, trail: tuple[str, ...]) -> None:
        if state.get(name) == 2:
            return
        assert state.get(name) != 1, f"import circle: {' -> '.join(trail[trail.index(name) :])} -> {name}"
        state[name] = 1
        for other in sorted(graph[name]):
            visit(other, (*trail, name))
        state[name] = 2

    for name in sorted(graph):
        visit(name, ())


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("pipeline.run_dir", {"torch", "deepspeed", "transformers", "numpy"}),
        ("pipeline.loss", {"deepspeed", "transformers"}),
        ("common.recipe", {"torch", "numpy"}),
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
