"""The one command: every word leads to a room that has it, mistakes get a hint, missing packages a line."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from emo import __version__
from emo.__main__ import COMMANDS, main
from emo.common.errors import ExitCode
from tests.conftest import REPO


@pytest.mark.parametrize("command", sorted(COMMANDS.keys() - {"train"}))  # which becomes another program
def test_every_command_answers_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        sys.exit(main([command, "--help"]))
    assert not end.value.code
    assert "usage: emo " in capsys.readouterr().out


def test_the_command_lists_its_commands_and_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    listed = capsys.readouterr().out
    assert all(f"\n  {command} " in listed for command in COMMANDS)
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"emo {__version__}\n"


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("prepar", "prepare"),
        ("prepare x --wrkers 3", "--workers"),
        ("eval --model m --data d --lmit=10", "--limit"),
        ("sweep oracle.yaml --dry-rnu", "--dry_run"),
        ("prepare", ""),
        ("quickstart now", ""),
    ],
)
def test_a_mistake_is_answered_with_what_is_nearest(
    words: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        sys.exit(main(words.split()))
    assert end.value.code == 2
    assert (f"did you mean {meant}?" if meant else "error: ") in capsys.readouterr().err


@pytest.mark.parametrize("module", ["emo", "emo.experiments.evidence"])
def test_without_the_packages_a_line_says_so(module: str) -> None:
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


def test_the_quickstart_is_not_handed_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("emo.launch.quickstart.signal.signal", lambda *_: None)
    monkeypatch.setattr("emo.launch.quickstart.run", lambda commands: [ExitCode.STOPPED])
    assert main(["quickstart"]) == ExitCode.STOPPED
