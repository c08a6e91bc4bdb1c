"""The commands: arguments, expected errors as lines, exit codes, and output that nobody reads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch import OutOfMemoryError

from common.errors import ExitCode, UserError
from pipeline import cli
from pipeline.report.console import Console
from pipeline.stop import STARTING, Watch
from tests.conftest import REPO

RECIPE = REPO / "launch/recipes/llama-7b-wikitext103.yaml"


class Nothing(Watch):
    """A watch that sees nothing, and remembers the code that was reported."""

    def __init__(self) -> None:
        self.code: int | None = None
        self.advanced = False
        self._phase = STARTING

    def ended(self, code: int) -> None:
        self.code = code


@pytest.fixture(autouse=True)
def streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logging and the standard streams of the test process stay as they are."""
    monkeypatch.setattr(cli, "split", lambda: None)
    monkeypatch.setattr(cli, "_set_up_logging", lambda *_: Console())


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


def test_what_the_user_called_is_what_a_mistake_names(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("PIPELINE_RANK_REPORTS", raising=False)
    cli.run_recipe("text", Nothing(), [])
    said = capsys.readouterr().err
    assert "usage: deepspeed launch/continual.sh" in said and "are required: recipe\n" in said
    cli.run_recipe("text", Nothing(), ["--num_gpus", "2", str(RECIPE)])
    assert "come first and end with --: launch/continual.sh --num_gpus 2 -- RECIPE" in capsys.readouterr().err
    monkeypatch.setenv("PIPELINE_COMMAND", "emo-continual")
    cli.run_recipe("text", Nothing(), [str(RECIPE), "--num_gpus", "2"])
    said = capsys.readouterr().err
    assert "usage: emo-continual " in said and "with --: emo-continual --num_gpus 2 -- RECIPE" in said


@pytest.mark.parametrize(
    ("error", "stepped", "code", "traceback"),
    [
        (ZeroDivisionError("by nothing"), False, ExitCode.MISTAKE, True),
        (ZeroDivisionError("by nothing"), True, ExitCode.FAILURE, True),
        (OutOfMemoryError("CUDA out of memory."), False, ExitCode.MISTAKE, False),
    ],
)
def test_a_crash_is_reported_and_worth_another_start_once_a_step_is_done(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
    stepped: bool,
    code: ExitCode,
    traceback: bool,
) -> None:
    """The rank ends at once, since others may be waiting for it."""

    def run(_: str, watch: Watch, __: object) -> int:
        if stepped:
            watch.stepped()
        raise error

    left: list[int] = []
    monkeypatch.setattr(cli, "_run", run)
    monkeypatch.setattr(cli, "leave", lambda code: left.append(code) or sys.exit(code))
    watch = Nothing()
    assert cli.run_recipe("text", watch, [str(RECIPE)]) == code == watch.code
    assert left == [code]
    said = capsys.readouterr().err
    assert ("Traceback" in said) == traceback
    line, last = [line for line in said.splitlines() if line.startswith(("error: ", "exit code"))][:2]
    assert ("before the first step" in line) == (not stepped) and last == f"exit code {code}"


def test_what_libraries_do_at_the_end_does_not_change_the_exit_code() -> None:
    program = (
        "import atexit, os; from pipeline.cli import leave\n"
        "atexit.register(os.abort); print('last words'); leave(75)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=REPO)
    assert (done.returncode, done.stdout) == (ExitCode.STOPPED, "last words\n")


def test_a_mistake_of_another_host_is_said_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A GPU that cannot be used, before the ranks have met: rank 0 knows nothing of it."""

    def run(*_: object) -> int:
        raise UserError("on node-2: no GPU")

    monkeypatch.setattr(cli, "_run", run)
    for rank, local, said in (("8", "0", True), ("9", "1", False), ("0", "0", True)):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("LOCAL_RANK", local)
        assert cli.run_recipe("text", Nothing(), [str(RECIPE)]) == ExitCode.MISTAKE
        assert ("error: on node-2: no GPU" in capsys.readouterr().err) == said


def test_a_reader_that_is_gone_does_not_end_a_rank() -> None:
    """Ctrl-C ends `| tee log` too, and the rank still has to save."""
    program = (
        "import sys\nfrom pipeline.report.streams import Survivor\nsys.stdout = Survivor(sys.stdout)\n"
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
