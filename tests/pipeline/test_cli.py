"""The commands: arguments, expected errors as lines, exit codes, and output that nobody reads."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from common.errors import UserError
from common.exit_codes import ExitCode
from common.files import DiskFullError
from pipeline import cli
from pipeline.stop import Watch
from tests.conftest import REPO

RECIPE = REPO / "launch/recipes/llama-7b-wikitext103.yaml"


class Nothing(Watch):
    """A watch that sees nothing, and remembers the code that was reported."""

    def __init__(self) -> None:
        self.code: int | None = None

    def ended(self, code: int) -> None:
        self.code = code


@pytest.fixture(autouse=True)
def streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logging and the standard streams of the test process stay as they are."""
    monkeypatch.setattr(cli, "_set_up_logging", lambda: None)


def test_overrides_may_follow_options(capsys: pytest.CaptureFixture[str]) -> None:
    """defects D1"""
    argv = ["--local_rank=0", "plan", str(RECIPE), "--gpus", "8xA100-80G", "train.micro_batch=1"]
    assert cli.main(argv) in (ExitCode.DONE, ExitCode.FAILURE)
    assert "micro" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "first", "second"),
    [
        ("plan", ["--gpus", "8xA100-80G"], ["--network", "800"]),
        ("preflight", ["--local_rank=0"], ["--local_rank=1"]),  # which DeepSpeed's launcher adds
        ("score", ["--model", "some/where"], ["--part", "0/2"]),
    ],
)
def test_overrides_are_read_wherever_they_stand(
    command: str, first: list[str], second: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """A mistake in one shows that it was read."""
    right, wrong = "train.batch=64", "train.btch=1"
    for argv in (
        [str(RECIPE), wrong, *first, *second, right],
        [str(RECIPE), right, *first, wrong, *second],
        [str(RECIPE), right, *first, right, *second, wrong],
        [*first, str(RECIPE), right, *second, wrong],
        [*first, *second, str(RECIPE), wrong, right],
    ):
        assert cli.main([command, *argv]) == ExitCode.MISTAKE
        said = capsys.readouterr().err.splitlines()[-1]
        assert said.startswith("error: unknown key train.btch; did you mean batch"), argv


def test_a_mistake_is_a_line_and_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    watch = Nothing()
    assert cli.run_recipe("instruct", watch, [str(RECIPE)]) == ExitCode.MISTAKE == watch.code
    said = capsys.readouterr().err.splitlines()
    assert said[-1] == "exit code 2"
    assert said[-2].startswith("error: ") and "run launch/continual.sh" in said[-2]


def test_an_unknown_option_is_reported_too() -> None:
    watch = Nothing()
    assert cli.run_recipe("text", watch, [str(RECIPE), "--nonsense"]) == ExitCode.MISTAKE == watch.code


def test_a_crash_keeps_its_traceback_and_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*_: object) -> int:
        raise ZeroDivisionError("by nothing")

    monkeypatch.setattr(cli, "_run", crash)
    watch = Nothing()
    with pytest.raises(ZeroDivisionError):
        cli.run_recipe("text", watch, [str(RECIPE)])
    assert watch.code == ExitCode.FAILURE


def test_what_libraries_do_at_the_end_does_not_change_the_exit_code() -> None:
    program = (
        "import atexit, os; from pipeline.cli import leave\n"
        "atexit.register(os.abort); print('last words'); leave(75)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=REPO)
    assert (done.returncode, done.stdout) == (ExitCode.STOPPED, "last words\n")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), ExitCode.FAILURE),
        (DiskFullError("no space left while writing runs/a; make room in runs"), ExitCode.FAILURE),
        (FileNotFoundError(errno.ENOENT, "No such file", "costs.pt"), ExitCode.MISTAKE),
        (PermissionError(errno.EACCES, "Permission denied", "runs"), ExitCode.MISTAKE),
    ],
)
def test_resuming_is_offered_only_where_it_helps(error: OSError, code: ExitCode) -> None:
    """defects D4"""
    explained = cli._explain(error)
    assert explained is not None
    assert explained[0] == code
    assert ("resume" in explained[1]) == (code == ExitCode.FAILURE)


def test_a_programming_error_is_not_explained_away() -> None:
    assert cli._explain(KeyError("x")) is None
    assert cli._explain(UserError("x")) is None  # is handled before


def test_a_reader_that_is_gone_does_not_end_a_rank() -> None:
    """Ctrl-C ends `| tee log` too, and the rank still has to save."""
    program = (
        "import sys\nfrom pipeline.cli import Survivor\nsys.stdout = Survivor(sys.stdout)\n"
        "for _ in range(3):\n    print('x' * 100000, flush=True)\n"
        "sys.exit(75)\n"
    )
    read, write = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", program], cwd=REPO, stdout=write, stderr=subprocess.PIPE
    )
    os.close(write)
    os.close(read)
    assert process.communicate(timeout=60)[1] == b""
    assert process.returncode == ExitCode.STOPPED
