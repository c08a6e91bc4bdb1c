"""Every error code is explained, and every explanation belongs to a code."""

from __future__ import annotations

import ast
import re

import pytest

from emo.__main__ import main
from emo.common.errors import error_index
from tests.conftest import REPO

PACKAGES = ("common", "data_prep", "pipeline", "eval", "launch", "experiments", "emo")


def codes() -> set[str]:
    """Return the codes of all errors, and the prefixes of codes that are completed at run time."""
    found: set[str] = set()
    files = [path for package in PACKAGES for path in (REPO / package).rglob("*.py")]
    for path in {path.resolve() for path in files}:
        text = path.read_text(encoding="utf-8")
        found |= set(re.findall(r" \[([a-z][a-z0-9-]+)\](?:\\n)?\"", text))
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.keyword) and node.arg == "code":
                constants = [part for part in ast.walk(node.value) if isinstance(part, ast.Constant)]
                found |= {part.value for part in constants if isinstance(part.value, str)}
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "code":
                value = getattr(node.value, "value", None)
                found |= {value} if isinstance(value, str) else set()
    return found - {"options"}  # part of a usage line


def test_every_code_is_explained_and_used() -> None:
    index = error_index()
    used = codes() | {"hardware"}
    open_ended = tuple(code for code in used if code.endswith("-"))
    assert sorted(used - index.keys() - set(open_ended)) == []
    assert [code for code in index if code not in used and not code.startswith(open_ended)] == []
    assert all(any(code.startswith(beginning) for code in index) for beginning in open_ended)
    assert all(set(entry) == {"cause", "fix"} and all(entry.values()) for entry in index.values())


def test_help_explains_a_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", "[no-recipe]"]) == 0
    with pytest.raises(SystemExit, match="0"):
        main(["help", "export"])  # a command, too
    assert error_index()["no-recipe"]["fix"] in capsys.readouterr().out
    assert main(["help", "no-recipee"]) == 2
    assert "no-recipe" in capsys.readouterr().err
