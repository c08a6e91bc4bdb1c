"""How commands that can be run again end: expected errors as one line each, and the exit code."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable

from common.errors import FailureError, UserError, one_line
from common.exit_codes import ExitCode
from common.files import may_pass

AGAIN = "run the same command again to resume"


def outcome(work: Callable[[], int], alone: bool | Callable[[], bool] = True) -> int:
    """Return what `work` returns as exit code; 1 for a failure that may pass, 2 a mistake, 130 Ctrl-C.

    alone: False where another process of this host says the errors that all of them meet; a function where
    that is known only then.
    """
    try:
        code = work()
        sys.stdout.flush()
        return code
    except UserError as error:
        if alone() if callable(alone) else alone:
            print(f"error: {error}", file=sys.stderr, flush=True)
        return ExitCode.FAILURE if isinstance(error, FailureError) else ExitCode.MISTAKE
    except OSError as error:
        if isinstance(error, BrokenPipeError) and is_unread():
            return ExitCode.UNREAD
        passing = may_pass(error) is not False
        print(f"error: {one_line(error)}" + f"; {AGAIN}" * passing, file=sys.stderr)
        return ExitCode.FAILURE if passing else ExitCode.MISTAKE
    except KeyboardInterrupt:
        if alone:
            print(f"interrupted; {AGAIN}", file=sys.stderr)
        return ExitCode.INTERRUPTED


def is_unread() -> bool:
    """Return whether the reader of the output has gone, as in `... | head`; the rest then goes nowhere."""
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
        gone = any(event & select.POLLERR for _, event in poll.poll(0))
    except (OSError, ValueError):  # it is no file of the system
        return False
    if gone:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return gone
