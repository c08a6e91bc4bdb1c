"""The one command: every word leads to a room that has it, mistakes get a hint, missing packages a line."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from emo.__main__ import COMMANDS, main
from tests.conftest import REPO


@pytest.mark.parametrize("command", sorted(COMMANDS.keys() - {"train"}))  # which becomes another program
def test_every_command_answers_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        sys.exit(main([command, "--help"]))
    assert not end.value.code
    assert "usage: emo " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("prepar", "prepare"),
        ("prepare x --wrkers 3", "--workers"),
        ("sweep oracle.yaml --dry-rnu", "--dry_run"),
    ],
)
def test_a_mistake_is_answered_with_what_is_nearest(
    words: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        sys.exit(main(words.split()))
    assert end.value.code == 2
    assert f"{meant}?" in capsys.readouterr().err


def test_without_the_packages_a_line_says_so() -> None:
    done = subprocess.run(
        [sys.executable, "-S", "-m", "emo", "--version"],  # -S: no site-packages
        env={"PATH": os.environ["PATH"]},
        cwd=REPO,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
