"""The errors that a user sees as a line, and how their line is made."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from common.text import on_one_line, printable, without_secrets

LONGEST = 1500  # characters of a line


class UserError(Exception):
    """A mistake in what the user gave. Its text is one line: what is wrong, where, what to set.

    The line may quote data and other programs: secrets, and what could act on a terminal, are left out, and
    the middle of what is very long.
    """

    def __str__(self) -> str:
        text = without_secrets(on_one_line(super().__str__()))
        if len(text) <= LONGEST:
            return text
        return f"{text[: LONGEST // 2]} ... {text[-LONGEST // 4 :]}"  # its end says what to do


class FailureError(UserError):
    """A failure of the machine, a full disk for example: once it is cured, the same command resumes."""


def one_line(error: BaseException | str, limit: int = 300) -> str:
    """The text of an error without line breaks, at most `limit` characters; its type where it has none.

    As in a UserError, nothing in it can act on a terminal, and secrets are taken out.
    """
    text = without_secrets(" ".join(str(error).split()))
    if not text and isinstance(error, BaseException):
        text = type(error).__name__
    return printable(text if len(text) <= limit else text[: limit - 3] + "...")


def nearest(given: str, known: Iterable[str]) -> str:
    """A hint at the known name that was probably meant, or all of them."""
    names = [str(name) for name in known]
    if not names:
        return "there are none"
    near = difflib.get_close_matches(given[:200], names, n=1, cutoff=0.5)
    return f"did you mean {near[0]}?" if near else f"known: {', '.join(names)}"
