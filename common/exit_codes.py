"""The exit codes of every command. docs/operations.md says which of them each launcher passes on."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """The meaning of a command's end to the script that called it."""

    DONE = 0
    FAILURE = 1  # a crash, a lost rank, a full disk: the same command resumes from what is complete
    MISTAKE = 2  # in the input, or a crash before training's first step: running it again cannot help
    REGRESSION = 3  # a model is worse than the one that it was compared with, or than before it was trained
    STOPPED = 75  # sysexits' EX_TEMPFAIL: nothing is wrong; the same command resumes
    INTERRUPTED = 130  # Ctrl-C, as shells say it (128 + SIGINT), where nothing is saved first: likewise
    UNREAD = 141  # nobody reads the output any more, as in `... | head` (128 + SIGPIPE); said to nobody
