"""The commands: arguments, expected errors as lines, and exit codes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from torch import OutOfMemoryError

from emo.common.errors import ExitCode
from emo.pipeline import cli
from emo.pipeline.report.console import Console
from emo.pipeline.stop import STARTING, Watch
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


@pytest.mark.parametrize(
    ("command", "first", "second"),
    [
        ("plan", ["--gpus", "8xA100-80G"], ["--network", "800"]),
        ("preflight", ["--local_rank=0"], ["--local_rank=1"]),  # which DeepSpeed's launcher adds
    ],
)
def test_overrides_are_read_wherever_they_stand(
    command: str, first: list[str], second: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """A mistake in one shows that it was read."""
    right, wrong = "train.global_batch_size=64", "train.warmup_ration=1"
    for argv in (
        [str(RECIPE), right, *first, wrong, *second],
        [str(RECIPE), right, *first, right, *second, wrong],
        [*first, *second, str(RECIPE), wrong, right],
    ):
        assert cli.main([command, *argv]) == ExitCode.MISTAKE
        assert "train.btch" in capsys.readouterr().err.splitlines()[-1], argv


def test_a_mistake_is_a_line_and_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    watch = Nothing()
    assert cli.run_recipe(watch, [str(RECIPE), "train.global_batch_size=0"]) == ExitCode.MISTAKE == watch.code
    output = capsys.readouterr().err.splitlines()
    assert output[-1] == "exit code 2"
    assert output[-2].startswith("error: ")


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

    def run(watch: Watch, _: object) -> int:
        if stepped:
            watch.stepped()
        raise error

    left: list[int] = []
    monkeypatch.setattr(cli, "_run", run)
    monkeypatch.setattr(cli, "leave", lambda code: left.append(code) or sys.exit(code))
    watch = Nothing()
    assert cli.run_recipe(watch, [str(RECIPE)]) == code == watch.code
    assert left == [code]
    output = capsys.readouterr().err
    assert ("Traceback" in output) == traceback
    line, last = [line for line in output.splitlines() if line.startswith(("error: ", "exit code"))][:2]
    assert ("before the first step" in line) == (not stepped) and last == f"exit code {code}"
