"""The display of a run while it trains, and the destination of all other output.

On a terminal the progress is redrawn in place. Elsewhere it is a plain line every few seconds, or with --json
every record as an object. --quiet leaves warnings, errors and how the run ended.

Standard error and Python's `print` stay as they are. File descriptor 1, which compilers, C libraries and
child processes write to, goes to a temporary file until the run directory is locked, then to `log.txt` in it.
Under launch/supervise.py the launcher's own lines go there as well, and the ranks receive the real standard
output from the supervisor (control/output.py).
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import math
import os
import socket
import sys
import tempfile
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TextIO

from tqdm import tqdm

from emo.common.cli.progress import show_activity
from emo.common.text import duration, printable, without_secrets

from ..control.output import receive_stdout
from ..control.run_dir import LOG
from ..control.stop import CONSOLE

Kind = Literal["terminal", "lines", "json", "quiet"]
DRAW_EVERY = 0.2  # shortest seconds between redraws
LINE_EVERY = 4.0  # shortest seconds between plain lines of progress
REMEMBERED = 20  # recent messages that are not shown again
RECENT = 20  # recent steps that the shown speed is averaged over
ENDS = ("finished", "stopped")  # events that --quiet shows
BOLD = "1"
YELLOW = "33"
GREEN = "32"
COLOURS = {"validation": BOLD, "stopping": YELLOW, "stopped": YELLOW, "finished": GREEN}  # of events


class Progress:
    """The step and speed of a run. The first step, which compiles, counts only until there are others."""

    def __init__(self, step: int, steps: int, every: dict[str, int]) -> None:
        """`every` is the interval in steps of each recurring event, such as validation, or 0."""
        self.step = step
        self.steps = steps
        self._every = every
        self.loss = math.nan  # per supervised token, over the steps since the last record
        self._recent: deque[tuple[float, int]] = deque(maxlen=RECENT)  # seconds, tokens
        self._steps = -1  # of this launch, without its first
        self._seconds = 0.0  # of these steps, including pauses

    def count(self, step: int, seconds: float, pause: float, tokens: int, loss: float) -> None:
        """Count a step.

        Args:
            step: Its number.
            seconds: Time of training it.
            pause: Time of validation and saving before it.
            tokens: Its supervised tokens.
            loss: Loss per supervised token.
        """
        self._steps += 1
        self._seconds += pause + seconds if self._steps else 0.0
        if self._steps == 1:
            self._recent.clear()
        self._recent.append((seconds, tokens))
        self.step = step
        self.loss = loss

    def __str__(self) -> str:
        """Return `step 120/2,000  loss 2.31  41,200 tokens/s  12 min left  validation at 200`.

        The rate counts supervised tokens and training time. The remaining time includes pauses as frequent as
        so far.
        """
        parts = [f"step {self.step:,}/{self.steps:,}"]
        parts.append(f"loss {self.loss:.4g}" if math.isfinite(self.loss) else "loss not finite")
        seconds, tokens = map(sum, zip((0.0, 0), *self._recent, strict=True))
        parts += [f"{tokens / seconds:,.0f} tokens/s"] if seconds else []
        if self._steps > 0 and self.step < self.steps:
            parts.append(f"{duration((self.steps - self.step) * self._seconds / self._steps)} left")
        due = {name: (self.step // n + 1) * n for name, n in self._every.items() if n > 0}
        first = min(due.values(), default=self.steps)
        names = " and ".join(name for name, step in due.items() if step == first)
        return "  ".join([*parts, f"{names} at {first:,}"] if first < self.steps else parts)


class Console(logging.Handler):
    """Rank 0's output to the user: log records, events and progress. Safe to use from several threads.

    A log record that has fields (`event_fields`) is shown as an event, any other as a message.
    """

    def __init__(
        self,
        kind: Kind = "lines",
        stream: TextIO | None = None,
        colour: bool = False,
        chatter: Chatter | None = None,
    ) -> None:
        super().__init__()
        self.kind = kind
        self.chatter = chatter
        self._stream = stream if stream is not None else sys.stdout
        self._colour = colour
        self._clock = time.monotonic
        self._last = -math.inf  # time of the last progress that was shown
        self._bar: tqdm[Any] | None = None
        self._messages: deque[str] = deque(maxlen=REMEMBERED)  # recent ones, without warnings

    def progress(self, progress: Progress) -> None:
        """Show the progress, at most every DRAW_EVERY seconds on a terminal and every LINE_EVERY as lines."""
        if self.kind == "lines" and (progress.step == progress.steps or self._is_due(LINE_EVERY)):
            self._print(str(progress))
        elif self.kind == "terminal" and self._is_due(DRAW_EVERY):
            if self._bar is None:
                self._bar = tqdm(
                    file=self._stream, leave=False, bar_format="{desc}", desc=" ", dynamic_ncols=True
                )
            self._bar.set_description_str(str(progress))

    def record(self, record: Mapping[str, object]) -> None:
        """Show a record of metrics.jsonl to programs. NaN and infinities are None."""
        if self.kind == "json":
            self.event("", "train", **record)

    def event(self, line: str, event: str, **fields: Any) -> None:
        """Show an event: `line` for people, its name and fields as JSON for programs."""
        if self.kind == "json":
            record = {"event": event, "time": round(time.time(), 3), **fields}
            self._print(json.dumps(record, allow_nan=False))
        elif self.kind != "quiet" or event in ENDS:
            self._print(line, COLOURS.get(event, ""))

    def emit(self, record: logging.LogRecord) -> None:
        """Show a log record. A message that was shown recently is not shown again, unless it is a warning."""
        text = record.getMessage()
        level = record.levelname.lower()
        is_warning = record.levelno >= logging.WARNING
        if "distutils" in record.pathname and self.chatter is not None:  # DeepSpeed tests the compiler
            print(text, file=self.chatter.stream)
            return
        if record.name == "DeepSpeed" and (not is_warning or record.module == "real_accelerator"):
            return  # the program reports a missing GPU itself
        if hasattr(record, "event_fields"):
            self.event(text, **record.event_fields)
            return
        if not is_warning:
            if text in self._messages:
                return
            self._messages.append(text)
        if self.kind == "json":
            self.event("", "message", level=level, text=text)
        elif is_warning:
            self._print(f"{level}: {text}", YELLOW)
        elif self.kind != "quiet":
            self._print(text)

    def open(self, run_dir: Path, main: bool) -> None:
        """Redirect the output of libraries to the log in the run directory, which this launch has locked."""
        if self.chatter is None:
            return
        self.chatter.move(run_dir, main)
        if main and self.chatter.path is not None:
            path = str(self.chatter.path)
            self.event(f"log of the launcher, compilers and libraries: {path}", "log", path=path)

    def compiling(self) -> contextlib.AbstractContextManager[object]:
        """Return a context in which Python's `print` goes to the log too."""
        return contextlib.redirect_stdout(self.chatter.stream) if self.chatter else contextlib.nullcontext()

    def waiting(self, label: str) -> contextlib.AbstractContextManager[object]:
        """Return a context that prints a line every few seconds, if this console prints progress as lines."""
        shown = self.kind == "lines" and self.level <= logging.INFO
        return show_activity(label) if shown else contextlib.nullcontext()

    def close(self) -> None:
        """Remove the progress line."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        super().close()

    def _is_due(self, seconds: float) -> bool:
        now = self._clock()
        if now - self._last < seconds:
            return False
        self._last = now
        return True

    def _print(self, text: str, colour: str = "") -> None:
        line = without_secrets(printable(text))
        tqdm.write(f"\x1b[{colour}m{line}\x1b[0m" if self._colour and colour else line, file=self._stream)
        self._stream.flush()


class UnbreakableOutput(io.FileIO):
    """An output that discards what is written once its reader has gone.

    Ctrl-C also ends the reader in `... | tee log`, and a lost connection closes the terminal. A rank that
    failed on its next line of output would not save.
    """

    def write(self, data: Any) -> int:
        """Write `data`, or discard it."""
        try:
            return super().write(data)
        except OSError:
            with Path(os.devnull).open("wb") as null:
                os.dup2(null.fileno(), self.fileno())
            return len(data)


class Chatter:
    """The output of libraries, compilers and launchers, which is kept in a file."""

    def __init__(self, shared: bool) -> None:
        """Write to descriptor 1, which the launcher and the other ranks of this host share if `shared`."""
        self._shared = shared
        self.stream = _open_stream(1)
        self.path: Path | None = None  # in the run directory, once there is one

    def move(self, run_dir: Path, main: bool) -> None:
        """Append the output so far to the run's log, and redirect later output there.

        Only the `main` rank copies the shared part. If the log cannot be written, the output stays in place.
        """
        with contextlib.suppress(OSError), (run_dir / LOG).open("a+b", buffering=0) as log:
            if main:
                stamp = time.strftime("%Y-%m-%d %H:%M:%S")
                log.write(f"--- {stamp}, process {os.getpid()} on {socket.gethostname()}\n".encode())
            if main or not self._shared:
                log.write(self._read())
            os.dup2(log.fileno(), 1)
            self.path = run_dir / LOG

    def show(self) -> None:
        """Print the output so far, or the path of the log, to standard error after an unexpected error."""
        path = f"log of the launcher, compilers and libraries: {self.path}\n"
        text = path if self.path else printable(self._read().decode(errors="replace"))
        print(text, end="", file=sys.stderr, flush=True)

    def _read(self) -> bytes:
        self.stream.flush()
        return os.pread(1, os.fstat(1).st_size, 0)


def split_output() -> Chatter:
    """Separate this process's output: sys.stdout stays the user's, descriptor 1 receives everything else."""
    sys.stdout.flush()
    console = receive_stdout(os.environ[CONSOLE]) if CONSOLE in os.environ else None
    launched = console is not None  # descriptor 1 is the launcher's log, which all ranks of this host share
    if console is None:
        console = os.dup(1)
        with tempfile.TemporaryFile(prefix="log-") as file:
            os.dup2(file.fileno(), 1)
    sys.stdout = _open_stream(console)
    sys.stderr = _open_stream(sys.stderr.fileno())
    return Chatter(shared=launched)


def _open_stream(descriptor: int) -> TextIO:
    raw = io.BufferedWriter(UnbreakableOutput(descriptor, "w", closefd=False))
    return io.TextIOWrapper(raw, encoding=sys.stdout.encoding, errors="backslashreplace", line_buffering=True)
