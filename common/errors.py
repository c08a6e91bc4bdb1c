"""Errors that are reported as one line, and the exit codes of all commands."""

from __future__ import annotations

import contextlib
import difflib
import errno
import os
import pathlib
import select
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import IntEnum
from functools import cache
from typing import Any, Self

from .text import printable, without_secrets

LONGEST = 1500  # characters per reported line
AGAIN = "run the same command again to resume"


class ExitCode(IntEnum):
    """Exit codes of all commands (docs/reference/exit-codes.md)."""

    DONE = 0
    FAILURE = 1
    MISTAKE = 2
    REGRESSION = 3
    STOPPED = 75  # EX_TEMPFAIL in sysexits.h
    INTERRUPTED = 130  # 128 + SIGINT
    UNREAD = 141  # 128 + SIGPIPE

    @property
    def meaning(self) -> str:
        """Return what the code means, as the help of each command shows it."""
        return _MEANINGS[self]


_MEANINGS = {
    ExitCode.DONE: "success",
    ExitCode.FAILURE: "failure: a crash, a lost process or a full disk. The same command resumes",
    ExitCode.MISTAKE: "invalid input. Retrying cannot help",
    ExitCode.REGRESSION: "regression: a model is worse than its reference",
    ExitCode.STOPPED: "stopped on request after saving. The same command resumes",
    ExitCode.INTERRUPTED: "interrupted with Ctrl-C. The same command resumes",
    ExitCode.UNREAD: "the reader of the output closed it, as in `emo ... | head`",
}


class UserError(Exception):
    """Invalid input from the user. The message is one line: what is wrong, where, and what to set.

    Secrets and terminal control characters are removed from the message, and very long messages are
    shortened. `code` names the kind of error and is explained in `errors.yaml`. `more` holds further errors
    of the same input, or further lines of this one. `local` tells whether only some ranks may raise it.
    """

    local: bool | None = None  # None if it is not known

    def __init__(self, message: str, *, code: str, more: Iterable[UserError | str] = ()) -> None:
        super().__init__(message)
        self.code = code
        self.more = tuple(more)

    def __reduce__(self) -> tuple[Any, ...]:
        """Let processes and ranks exchange errors."""
        return _restore_error, (type(self), super().__str__(), self.code, self.more)

    @property
    def lines(self) -> list[str]:
        """Return each error as a line, without its code."""
        return [one_line(str(message), LONGEST) for message in (super().__str__(), *self.more)]

    @property
    def report(self) -> str:
        """Return the lines to print. Each ends in its code."""
        first = f"error: {self.lines[0]} [{self.code}]"
        return "\n".join(
            [first, *(e.report if isinstance(e, UserError) else f"error: {e}" for e in self.more)]
        )

    def __str__(self) -> str:
        return one_line("; also ".join(self.lines), LONGEST)

    @classmethod
    def of(cls, errors: Sequence[UserError]) -> Self:
        """Combine several errors into one, with the code of the first."""
        first, *others = errors
        return cls(str(first), code=first.code, more=others)


def _restore_error(kind: type[UserError], message: str, code: str, more: tuple[Any, ...]) -> UserError:
    return kind(message, code=code, more=more)


class FailureError(UserError):
    """A failure of the machine, for example a full disk. The same command resumes once it is fixed."""


class DiskFullError(OSError):
    """No space left on the device. The same command resumes once there is space."""


# Errors of disks and networks that may disappear without a change by the user.
TRANSIENT = {
    *(errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EPIPE),
    getattr(errno, "EREMOTEIO", errno.EIO),  # only Linux has it
    *(errno.ECONNRESET, errno.ECONNREFUSED, errno.ECONNABORTED, errno.EHOSTUNREACH, errno.ENETUNREACH),
}
# Errors that only a change by the user fixes. Libraries also raise these classes without an errno.
PERMANENT = FileNotFoundError | PermissionError | NotADirectoryError | IsADirectoryError | FileExistsError
PERMANENT_NUMBERS = {errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL}


def iterate_causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and the errors that led to it."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


def may_pass(error: OSError) -> bool | None:
    """Return whether the same command may succeed later, or None if the error does not tell."""
    if isinstance(error, DiskFullError) or error.errno in TRANSIENT:
        return True
    return False if isinstance(error, PERMANENT) or error.errno in PERMANENT_NUMBERS else None


@cache
def error_index() -> dict[str, dict[str, str]]:
    """Return the cause and the fix of each error code, from `errors.yaml`."""
    import yaml

    return yaml.safe_load(pathlib.Path(__file__).with_name("errors.yaml").read_text(encoding="utf-8"))


def explain_code(code: str) -> str | None:
    """Return the explanation of an error code, or None if there is no such code."""
    entry = error_index().get(code.strip("[]"))
    return None if entry is None else f"{entry['cause']}\n\n{entry['fix']}"


def exit_code_of(work: Callable[[], int], alone: bool | Callable[[UserError], bool] = True) -> int:
    """Run a command and return its exit code. An error is printed as one line.

    Args:
        work: The command. It returns its exit code.
        alone: Whether this process prints its UserErrors. Set it to False if another process on this host
            prints the errors that all processes raise. A function decides for each error.
    """
    try:
        _open_streams()
        try:
            code = work()
        except SystemExit:  # after --help
            sys.stdout.flush()
            raise
        sys.stdout.flush()
        return code
    except UserError as error:
        if alone(error) if callable(alone) else alone:
            print(error.report, file=sys.stderr, flush=True)
        return ExitCode.FAILURE if isinstance(error, FailureError) else ExitCode.MISTAKE
    except OSError as error:
        if isinstance(error, BrokenPipeError) and _is_unread():
            return ExitCode.UNREAD
        transient = may_pass(error) is not False
        print(f"error: {_describe(error)}" + f"; {AGAIN}" * transient + " [system]", file=sys.stderr)
        return ExitCode.FAILURE if transient else ExitCode.MISTAKE
    except KeyboardInterrupt:
        if alone:
            print(f"interrupted; {AGAIN}", file=sys.stderr)
        return ExitCode.INTERRUPTED


def _describe(error: OSError) -> str:
    """Return the paths of an error and what is wrong with them, as one line without the number."""
    files = [
        file for file in (error.filename, error.filename2) if isinstance(file, str | bytes | os.PathLike)
    ]
    return one_line(": ".join([*map(os.fsdecode, files), error.strerror]) if error.strerror else error)


def _open_streams() -> None:
    """Reopen standard streams that the caller closed (`>&-`), so that no other file gets their numbers."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            mode = "w" if number else "r"
            file = pathlib.Path(os.devnull).open(mode, encoding="utf-8")  # noqa: SIM115
            setattr(sys, name, file)
            with contextlib.suppress(OSError):  # usually the stream's own number, which children inherit
                os.set_inheritable(file.fileno(), True)


def _is_unread() -> bool:
    """Return whether the reader of stdout closed it, as in `... | head`. If so, discard further output."""
    poll = select.poll()
    with contextlib.suppress(OSError, ValueError):  # stdout may not be a system file
        poll.register(sys.stdout.fileno(), 0)
    closed = any(event & select.POLLERR for _, event in poll.poll(0))
    if closed:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return closed


def one_line(error: BaseException | str, limit: int = 300) -> str:
    """Return an error's text, or else its type, as one line of about `limit` characters.

    Secrets and terminal control characters are removed. A longer text keeps its beginning and its end.
    """
    text = without_secrets(" ".join(str(error).split()))
    if not text and isinstance(error, BaseException):
        text = type(error).__name__
    return printable(text if len(text) <= limit else f"{text[: limit // 2]} ... {text[-limit // 4 :]}")


def similar(name: str, options: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the option that is most similar to a misspelt name."""
    return next(iter(difflib.get_close_matches(name[:200], list(options), n=1, cutoff=cutoff)), None)


def nearest(name: str, options: Iterable[str], elsewhere: Mapping[str, str] | None = None) -> str:
    """Return a hint that suggests the most similar known name, or lists all of them. Case is ignored.

    elsewhere: known names by the names that other programs use.
    """
    names = {str(key).lower(): str(key) for key in options}
    if not names:
        return "there are none"
    meanings = {**(elsewhere or {}), **names}
    match = similar(name.lower(), meanings, 0.8) or similar(name.lower(), names, 0.5)
    return f"did you mean {meanings[match]}?" if match else f"known: {', '.join(names.values())}"
