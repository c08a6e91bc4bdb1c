"""How commands that can be run again end."""

from __future__ import annotations

import errno
import subprocess
import sys

import pytest

import emo.data_prep.cli
import emo.eval.cli
import emo.pipeline.cli
from emo.common.errors import AGAIN, DiskFullError, FailureError, UserError, may_pass, outcome

ENDINGS = [
    (UserError("no such key"), 2, "error: no such key"),
    (FailureError("a worker was killed"), 1, "error: a worker was killed"),
    (
        FileNotFoundError(errno.ENOENT, "No such file", "a.jsonl"),
        2,
        "error: [Errno 2] No such file: 'a.jsonl'",
    ),
    (OSError(errno.EIO, "Input/output error"), 1, f"error: [Errno 5] Input/output error; {AGAIN}"),
    (OSError("the service answers 503"), 1, f"error: the service answers 503; {AGAIN}"),
    (KeyboardInterrupt(), 130, f"interrupted; {AGAIN}"),
]


@pytest.mark.parametrize(("error", "code", "line"), ENDINGS, ids=lambda value: type(value).__name__)
def test_an_ending_is_one_line_and_a_code(
    error: BaseException, code: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def work() -> int:
        raise error

    assert outcome(work) == code
    assert capsys.readouterr().err == line + "\n"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UserError("no such key"), 2),
        (FailureError("a worker was killed"), 1),
        (DiskFullError("no space left"), 1),
        (ConnectionError("reset"), 1),
        (OSError(errno.EIO, "Input/output error"), 1),
        (PermissionError(errno.EACCES, "Permission denied"), 2),
        (KeyboardInterrupt(), 130),
        (None, 0),
    ],
    ids=lambda value: type(value).__name__,
)
def test_every_command_ends_with_the_same_code(
    error: BaseException | None, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(args: object) -> int:
        if error is not None:
            raise error
        return 0

    monkeypatch.setitem(emo.data_prep.cli.COMMANDS, "inspect", work)
    monkeypatch.setattr(emo.pipeline.cli, "_report", work)
    monkeypatch.setattr(emo.eval.cli, "_compare", work)
    assert emo.data_prep.cli.main(["inspect", "x"]) == code
    assert emo.pipeline.cli.main(["report", "x"]) == code
    monkeypatch.setattr(sys, "argv", ["eval", "compare", "a", "b"])
    assert emo.eval.cli.main() == code


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (DiskFullError("no space left"), True),
        (OSError(errno.ENOSPC, "No space left on device"), True),
        (OSError(errno.ESTALE, "Stale file handle"), True),
        (ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"), True),
        (PermissionError(errno.EACCES, "Permission denied"), False),
        (FileNotFoundError("not in the cache, and the hub cannot be reached"), False),  # without a number
        (OSError(errno.EROFS, "Read-only file system"), False),
        (OSError("nobody knows"), None),
        (OSError(errno.ENODEV, "No such device"), None),
    ],
)
def test_errors_tell_whether_they_may_pass(error: OSError, passes: bool | None) -> None:
    assert may_pass(error) is passes


def test_failures_of_the_code_keep_their_trace() -> None:
    with pytest.raises(ZeroDivisionError):
        outcome(lambda: 1 // 0)


@pytest.mark.parametrize("buffer", [[], ["-u"]])
@pytest.mark.parametrize("size", [1, 10**6])  # what is written at the end, and what fails at once
def test_a_reader_that_leaves_ends_the_command_quietly(size: int, buffer: list[str]) -> None:
    program = "import sys; from emo.common.errors import outcome; "
    program += f"sys.exit(outcome(lambda: print('x' * {size}) or 0))"
    process = subprocess.Popen(
        [sys.executable, *buffer, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={}
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b"" and process.wait() == 141


def test_a_broken_connection_is_no_reader_that_left(capsys: pytest.CaptureFixture[str]) -> None:
    def work() -> int:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    assert outcome(work) == 1 and AGAIN in capsys.readouterr().err
