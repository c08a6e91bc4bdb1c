"""The `emo` command: help, exit codes and suggestions."""

from __future__ import annotations

import errno
import os
import pathlib
import re
import shlex
import subprocess
import sys

import pytest

import emo.pipeline.cli
from emo.__main__ import COMMANDS, main
from emo.common.errors import DiskFullError, FailureError, UserError, exit_code_of
from tests.conftest import REPO


@pytest.mark.parametrize("command", sorted(COMMANDS.keys() - {"train"}))  # which becomes another program
def test_every_command_answers_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        sys.exit(main([command, "--help"]))
    assert not end.value.code
    assert "usage: emo " in capsys.readouterr().out


def test_missing_packages_are_reported_in_one_line() -> None:
    command = [sys.executable, "-S", "-m", "emo", "--version"]  # -S: no site-packages
    done = subprocess.run(command, env={"PATH": os.environ["PATH"]}, cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == "" and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UserError("no such key"), 2),
        (FailureError("a worker was killed"), 1),
        (DiskFullError("no space left"), 1),
        (OSError(errno.ESTALE, "Stale file handle"), 1),
        (OSError("nobody knows"), 1),
        (PermissionError(errno.EACCES, "Permission denied"), 2),
        (FileNotFoundError("not in the cache, and the hub cannot be reached"), 2),  # without a number
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), 1),  # of a connection: the output is still read
        (KeyboardInterrupt(), 130),
    ],
    ids=lambda value: type(value).__name__,
)
def test_errors_are_one_line_and_an_exit_code(
    error: BaseException, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def work() -> int:
        raise error

    assert exit_code_of(work) == code
    assert capsys.readouterr().err.count("\n") == 1


def test_misspelt_options_get_suggestions(capsys: pytest.CaptureFixture[str]) -> None:
    report = ("repot x", "report x --ovr y", "report x --out y", "report x --over stps")
    for words in (*report, "plan x --gpus y --bst a=1"):
        with pytest.raises(SystemExit) as end:
            emo.pipeline.cli.main(words.split())
        assert end.value.code == 2
    meant = re.findall(r"mean (\S+)\?", capsys.readouterr().err)
    assert meant == ["report", "--over", "--output_path", "step", "--best"]


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", "<&- >&- 2>&-"])
def test_closed_streams_do_not_fail_a_command(closed: str, tmp_path: pathlib.Path) -> None:
    """And no file that it opens gets their numbers."""
    program = "import sys; from emo.common.errors import exit_code_of; "
    program += "sys.exit(exit_code_of(lambda: print('said') or int(open('file', 'w').fileno() < 3)))"
    command = f"exec {shlex.quote(sys.executable)} -c {shlex.quote(program)} {closed}"
    environment = {"PYTHONPATH": str(REPO)}
    assert subprocess.run(["sh", "-c", command], env=environment, cwd=tmp_path).returncode == 0


def test_a_report_on_a_missing_path_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "--over=tokens", "/no/where"]) == 2
    assert capsys.readouterr().err.startswith("error: /no/where does not exist; ")


def test_a_full_stdout_is_named_in_the_error() -> None:
    program = "import sys; from pathlib import Path; from emo.common.errors import exit_code_of; "
    program += "from emo.common.io.files import full_disk; from emo.data_prep.cli import _say\n"
    program += "def work():\n with full_disk(Path('data')): _say('x')\nsys.exit(exit_code_of(work))"
    with open("/dev/full", "w", encoding="utf-8") as full:  # noqa: PTH123
        done = subprocess.run([sys.executable, "-c", program], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1 and "standard output" in done.stderr and "data" not in done.stderr


def test_a_signal_during_imports_stops_the_command() -> None:
    program = "import os, signal; from emo.pipeline.control.stop import leave_early; leave_early(); "
    program += "os.kill(os.getpid(), signal.SIGTERM)"
    done = subprocess.run([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True)
    assert done.returncode == 75 and "SIGTERM" in done.stderr and done.stderr.count("\n") == 1


RICH = "__import__('emo.common.cli.progress').common.cli.progress.make_console().print('x')"


@pytest.mark.parametrize(
    "printing", ["print('x')", "print('x' * 10**6)", RICH]
)  # fails at the end, or at once
def test_a_closed_pipe_ends_the_command_quietly(printing: str) -> None:
    program = "import sys; from emo.common.errors import exit_code_of; "
    program += f"sys.exit(exit_code_of(lambda: {printing} or 0))"
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-c", program], env={}, stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")
