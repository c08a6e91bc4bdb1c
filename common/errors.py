"""The errors that a user sees as a line, the exit codes of every command, and how one leads to the other."""

from __future__ import annotations

import contextlib
import difflib
import errno
import os
import pathlib
import select
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import IntEnum
from typing import Self

from .text import printable, without_secrets

LONGEST = 1500  # characters of a line
AGAIN = "run the same command again to resume"


class ExitCode(IntEnum):
    """The meaning of a command's end to the script that called it (docs/operations.md)."""

    DONE = 0
    FAILURE = 1  # a crash, a lost rank, a full disk: the same command resumes from what is complete
    MISTAKE = 2  # in the input, or a crash before training's first step: running it again cannot help
    REGRESSION = 3  # a model is worse than the one that it was compared with, or than before it was trained
    STOPPED = 75  # sysexits' EX_TEMPFAIL: nothing is wrong; the same command resumes
    INTERRUPTED = 130  # Ctrl-C, as shells say it (128 + SIGINT), where nothing is saved first: likewise
    UNREAD = 141  # nobody reads the output any more, as in `... | head` (128 + SIGPIPE)


class UserError(Exception):
    """A mistake in what the user gave. Its text is one line: what is wrong, where, what to set.

    The line may quote data and other programs: secrets, and what could act on a terminal, are left out, and
    the middle of what is very long. `code` names the kind of mistake for programs and tests: it stays when
    the wording changes. `more`: further mistakes in the same file, each of which is printed as a line.
    """

    def __init__(self, message: str = "", *, code: str = "", more: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.code, self.more = code, tuple(more)

    @property
    def lines(self) -> list[str]:
        """Return each mistake as a line."""
        return [one_line(message, LONGEST) for message in (super().__str__(), *self.more)]

    def __str__(self) -> str:
        return one_line("; also ".join(self.lines), LONGEST)

    @classmethod
    def of(cls, errors: Sequence[UserError]) -> Self:
        """Return one error for several mistakes; the first gives the code."""
        first, *others = errors
        return cls(str(first), code=first.code, more=map(str, others))


class FailureError(UserError):
    """A failure of the machine, a full disk for example: once it is cured, the same command resumes."""


class DiskFullError(OSError):
    """No space left to write to. It may pass, so it is no UserError: the same command resumes after it."""


# Disks are cleared, networks and file servers come back.
PASSING = {
    *(errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EREMOTEIO, errno.ESTALE, errno.ETIMEDOUT, errno.EPIPE),
    *(errno.ECONNRESET, errno.ECONNREFUSED, errno.ECONNABORTED, errno.EHOSTUNREACH, errno.ENETUNREACH),
}
# Only a change by the user cures these. Libraries raise the classes without a number as well.
LASTING = FileNotFoundError | PermissionError | NotADirectoryError | IsADirectoryError | FileExistsError
MISTAKES = {errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL}


def may_pass(error: OSError) -> bool | None:
    """Return whether the same command may succeed later; None where the error alone does not tell."""
    if isinstance(error, DiskFullError) or error.errno in PASSING:
        return True
    return False if isinstance(error, LASTING) or error.errno in MISTAKES else None


def exit_code_of(work: Callable[[], int], alone: bool | Callable[[], bool] = True) -> int:
    """Return the exit code of a command: that of `work`, or that of its error, which is printed as one line.

    alone: False where another process of this host prints the errors that all of them meet; a function where
    that is known only then.
    """
    try:
        _open_streams()
        code = work()
        sys.stdout.flush()
        return code
    except UserError as error:
        if alone() if callable(alone) else alone:
            print("\n".join(f"error: {line}" for line in error.lines), file=sys.stderr, flush=True)
        return ExitCode.FAILURE if isinstance(error, FailureError) else ExitCode.MISTAKE
    except OSError as error:
        if isinstance(error, BrokenPipeError) and _is_unread():
            return ExitCode.UNREAD
        passing = may_pass(error) is not False
        print(f"error: {one_line(error)}" + f"; {AGAIN}" * passing, file=sys.stderr)
        return ExitCode.FAILURE if passing else ExitCode.MISTAKE
    except KeyboardInterrupt:
        if alone:
            print(f"interrupted; {AGAIN}", file=sys.stderr)
        return ExitCode.INTERRUPTED


def _open_streams() -> None:
    """Open standard streams that the caller closed (`>&-`), so that no other file takes their numbers."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            mode = "w" if number else "r"
            file = pathlib.Path(os.devnull).open(mode, encoding="utf-8")  # noqa: SIM115
            setattr(sys, name, file)
            with contextlib.suppress(OSError):  # the lowest free number, as a rule that of the stream
                os.set_inheritable(file.fileno(), True)


def _is_unread() -> bool:
    """Return whether the reader of the output has gone, as in `... | head`; the rest then goes nowhere."""
    poll = select.poll()
    with contextlib.suppress(OSError, ValueError):  # it may be no file of the system
        poll.register(sys.stdout.fileno(), 0)
    gone = any(event & select.POLLERR for _, event in poll.poll(0))
    if gone:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return gone


def one_line(error: BaseException | str, limit: int = 300) -> str:
    """Return the text of an error without line breaks, or its type, in about `limit` characters.

    Secrets are left out, what could act on a terminal, and the middle of what is longer: the end often says
    what to do.
    """
    text = without_secrets(" ".join(str(error).split()))
    if not text and isinstance(error, BaseException):
        text = type(error).__name__
    return printable(text if len(text) <= limit else f"{text[: limit // 2]} ... {text[-limit // 4 :]}")


def similar(name: str, options: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the option that was probably meant by a misspelt name."""
    return next(iter(difflib.get_close_matches(name[:200], list(options), n=1, cutoff=cutoff)), None)


def nearest(name: str, options: Iterable[str], elsewhere: Mapping[str, str] | None = None) -> str:
    """Return a hint at the known name that was probably meant, or at all of them.

    elsewhere: what other programs call something, and what it is called here. Case does not matter.
    """
    names = {str(key).lower(): str(key) for key in options}
    if not names:
        return "there are none"
    meanings = {**(elsewhere or {}), **names}
    match = similar(name.lower(), meanings, 0.8) or similar(name.lower(), names, 0.5)
    return f"did you mean {meanings[match]}?" if match else f"known: {', '.join(names.values())}"
