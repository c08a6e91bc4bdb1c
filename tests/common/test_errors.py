"""How commands that can be run again end."""

from __future__ import annotations

import errno
import subprocess
import sys

import pytest

import emo.data_prep.cli
import emo.eval.cli
import emo.pipeline.cli
from emo.common.errors import DiskFullError, FailureError, UserError, may_pass, outcome


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UserError("no such key"), 2),
        (FailureError("a worker was killed"), 1),
        (DiskFullError("no space left"), 1),
        (OSError(errno.EIO, "Input/output error"), 1),
        (PermissionError(errno.EACCES, "Permission denied"), 2),
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), 1),  # of a connection: the output is still read
        (KeyboardInterrupt(), 130),
        (None, 0),
    ],
    ids=lambda value: type(value).__name__,
)
def test_every_command_ends_with_the_same_code_and_a_line(
    error: BaseException | None,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def work(args: object) -> int:
        if error is not None:
            raise error
        return 0

    monkeypatch.setattr(emo.data_prep.cli, "_run", work)
    monkeypatch.setattr(emo.pipeline.cli, "_report", work)
    monkeypatch.setattr(emo.eval.cli, "_compare", work)
    monkeypatch.setattr(sys, "argv", ["eval", "compare", "a", "b"])
    assert outcome(lambda: work(None)) == code
    assert capsys.readouterr().err.count("\n") == (error is not None)
    assert emo.data_prep.cli.main(["inspect", "x"]) == code
    assert emo.pipeline.cli.main(["report", "x"]) == code
    assert emo.eval.cli.main() == code


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), True),
        (OSError(errno.ESTALE, "Stale file handle"), True),
        (PermissionError(errno.EACCES, "Permission denied"), False),
        (FileNotFoundError("not in the cache, and the hub cannot be reached"), False),  # without a number
        (OSError("nobody knows"), None),
    ],
)
def test_errors_tell_whether_they_may_pass(error: OSError, passes: bool | None) -> None:
    assert may_pass(error) is passes


@pytest.mark.parametrize("size", [1, 10**6])  # what is written at the end, and what fails at once
def test_a_reader_that_leaves_ends_the_command_quietly(size: int) -> None:
    program = "import sys; from emo.common.errors import outcome; "
    program += f"sys.exit(outcome(lambda: print('x' * {size}) or 0))"
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={}
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b"" and process.wait() == 141
