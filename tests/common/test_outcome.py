"""How commands that can be run again end."""

from __future__ import annotations

import errno

import pytest

from common.errors import FailureError, UserError
from common.outcome import AGAIN, outcome

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


def test_what_work_returns_is_the_code() -> None:
    assert outcome(lambda: 3) == 3


def test_failures_of_the_code_keep_their_trace() -> None:
    with pytest.raises(ZeroDivisionError):
        outcome(lambda: 1 // 0)
