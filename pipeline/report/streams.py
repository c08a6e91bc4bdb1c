"""Where the output of a rank goes: lines for the user to the terminal, libraries' chatter to a log.

Standard error stays as it is, and so does Python's `print`. File descriptor 1, which compilers, C libraries
and child processes write to, leads to the log: a temporary file until the run directory is taken, then
`log.txt` in it. Under launch/supervise.py the launcher's own lines go there as well: the supervisor gives it
that file as standard output, and the real one as standard input, which neither launcher nor ranks read.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO, cast

from common.text import printable
from pipeline.run_dir import LOG
from pipeline.stop import CONSOLE


class Survivor:
    """A text stream that a lost reader does not break: what is written from then on goes nowhere.

    Ctrl-C ends `... | tee log` as well, and a connection that drops takes the terminal with it; a rank that
    died of its next line of output would not save.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write `text`, or drop it."""
        self._try(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        """Flush, or drop what is buffered."""
        self._try(self._stream.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _try(self, work: Callable[[], object]) -> None:
        try:
            work()
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)


class Chatter:
    """The output of libraries, compilers and launchers: kept out of sight, and not lost."""

    def __init__(self, shared: bool) -> None:
        """Descriptor 1 leads there already; shared: with the launcher and the other ranks of this host."""
        self._shared = shared
        self.stream = open(1, "w", encoding="utf-8", buffering=1, closefd=False, errors="backslashreplace")  # noqa: SIM115
        self.path: Path | None = None  # once it is in a run directory

    def move(self, run_dir: Path, main: bool) -> None:
        """Send the output to the run's log from now on, after what was kept so far.

        main: this rank copies what is shared. Where the log cannot be written, it stays where it is.
        """
        with contextlib.suppress(OSError):
            log = os.open(run_dir / LOG, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            before = self.text() if main or not self._shared else b""
            if main:
                stamp = time.strftime("%Y-%m-%d %H:%M:%S")
                before = f"--- {stamp}, process {os.getpid()} on {socket.gethostname()}\n".encode() + before
            os.write(log, before)
            os.dup2(log, 1)
            os.close(log)
            self.path = run_dir / LOG

    def text(self) -> bytes:
        """Return what was kept so far, until it has moved."""
        self.stream.flush()
        return os.pread(1, os.fstat(1).st_size, 0) if self.path is None else b""

    def show(self) -> None:
        """Show what was kept, or its path, on standard error when an unexpected error ends this process."""
        if self.path is not None:
            print(f"log of the launcher, compilers and libraries: {self.path}", file=sys.stderr, flush=True)
        else:
            print(printable(self.text().decode(errors="replace")), end="", file=sys.stderr, flush=True)

    def prints(self) -> contextlib.AbstractContextManager[object]:
        """Send Python's `print` there as well within the block, which encloses what compiles."""
        return contextlib.redirect_stdout(self.stream)


def split() -> Chatter:
    """Part this process's output in two: sys.stdout remains the user's, descriptor 1 becomes chatter."""
    sys.stdout.flush()
    launched = CONSOLE in os.environ and _is_writable(0)
    if launched:  # see above: standard input is the real standard output, and 1 the launcher's log
        console, nothing = os.dup(0), os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
    else:
        console, (file, name) = os.dup(1), tempfile.mkstemp(prefix="log-")
        Path(name).unlink()
        os.dup2(file, 1)
        os.close(file)
    stream = os.fdopen(console, "w", buffering=1, encoding=sys.stdout.encoding, errors="backslashreplace")
    sys.stdout, sys.stderr = cast("TextIO", Survivor(stream)), cast("TextIO", Survivor(sys.stderr))
    return Chatter(shared=launched)


def _is_writable(descriptor: int) -> bool:
    with contextlib.suppress(OSError):
        return fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY
    return False
