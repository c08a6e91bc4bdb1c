"""The README tells the truth about the tree, and data flows one way."""

from __future__ import annotations

import ast
import fnmatch
import re
import subprocess
from pathlib import Path

import pytest

from tests.conftest import REPO

ROOMS = ["data_prep", "pipeline", "eval"]  # each may import itself and those before it
# The only parts of data_prep that the trainer knows: the format, not how it is made.
FORMAT = {"data_prep.config", "data_prep.shards", "data_prep.tokenizer"}


def tracked() -> list[str]:
    listed = subprocess.run(["git", "ls-files"], cwd=REPO, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [f for f in listed.stdout.splitlines() if (REPO / f).exists()]


def file_map() -> list[str]:
    section = (REPO / "README.md").read_text().split("## Files\n")[1].split("\n## ")[0]
    return re.findall(r"^    (\S+)  +\S", section, flags=re.MULTILINE)


def test_the_file_map_equals_the_tree() -> None:
    entries = file_map()
    assert "TODO" not in (REPO / "README.md").read_text()
    files = [f for f in tracked() if not f.endswith("__init__.py")]
    for file in files:
        matching = [e for e in entries if fnmatch.fnmatchcase(file, e)]
        assert matching, f"{file} is not in the README's file map"
    for entry in entries:
        assert fnmatch.filter(files, entry), f"the README's file map names {entry}, which does not exist"


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return found


@pytest.mark.parametrize("room", ROOMS)
def test_nothing_imports_backwards(room: str) -> None:
    later = ROOMS[ROOMS.index(room) + 1 :]
    for path in (REPO / room).glob("*.py"):
        for name in imports(path):
            assert name.split(".")[0] not in later, f"{path} imports {name}"
            if room == "pipeline" and name.startswith("data_prep."):
                assert any(name == f or name.startswith(f + ".") for f in FORMAT), f"{path} imports {name}"


def test_files_stay_small() -> None:
    for file in tracked():
        if file.endswith(".py"):
            lines = len((REPO / file).read_text().splitlines())
            most = 500 if file.startswith("tests/") else 420
            assert lines <= most, f"{file} has {lines} lines: it does more than one thing"
