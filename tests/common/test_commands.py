"""What all commands have: a version, hints at mistakes, and a line where their packages are missing."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from emo.common import __version__
from tests.conftest import REPO

ROOMS = {
    "data_prep": "data_prep.__main__",
    "pipeline": "emo.pipeline.cli",
    "experiments": "experiments.__main__",
    "quickstart": "emo.launch.quickstart",
    "eval": "emo.eval.cli",
}


def called(module: str, *words: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """The exit code of a command that argparse ends."""
    main: Callable[[], int] = importlib.import_module(module).main
    monkeypatch.setattr(sys, "argv", [module, *words])
    with pytest.raises(SystemExit) as end:
        main()
    assert isinstance(end.value.code, int)
    return end.value.code


@pytest.mark.parametrize("room", ROOMS)
def test_every_command_has_a_version_and_help(
    room: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert called(ROOMS[room], "--version", monkeypatch=monkeypatch) == 0
    assert capsys.readouterr().out.split()[-1] == __version__
    assert called(ROOMS[room], "--help", monkeypatch=monkeypatch) == 0
    assert "--version" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("room", "words", "expected"),
    [
        ("data_prep", "prepar", "did you mean prepare?"),
        ("data_prep", "prepare x --wrkers 3", "unrecognized arguments: --wrkers 3; did you mean --workers?"),
        ("data_prep", "prepare", "the following arguments are required: recipe\n"),
        ("eval", "run --model m --data d --lmit=10", "did you mean --limit?"),
        ("experiments", "rum oracle.yaml", "did you mean run?"),
        ("experiments", "run oracle.yaml --dry-rnu", "did you mean --dry-run?"),
        ("quickstart", "now", "unrecognized arguments: now\n"),
    ],
)
def test_what_is_misspelt_is_answered_with_what_was_meant(
    room: str, words: str, expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert called(ROOMS[room], *words.split(), monkeypatch=monkeypatch) == 2
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize(
    "module", ["data_prep", "pipeline", "eval", "experiments", "emo.experiments.evidence"]
)
def test_without_the_packages_a_line_says_so(tmp_path: Path, module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-S", "-m", module, "--version"],  # -S: no site-packages
        env={"PATH": os.environ["PATH"]},
        cwd=REPO,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: the packages of this project are not here")
    assert len(done.stderr.splitlines()) == 1
