"""What a person sees of a run while it trains, and where all other output goes.

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
from pathlib import Path
from typing import Any, Literal, TextIO

from tqdm import tqdm

from emo.common.text import printable, without_secrets

from ..control.output import receive_stdout
from ..control.run_dir import LOG
from ..control.stop import CONSOLE

Kind = Literal["terminal", "lines", "json", "quiet"]
DRAW_EVERY, LINE_EVERY = 0.2, 10.0  # seconds between two drawings, and between two plain lines of progress
REMEMBERED = 20  # messages: what is checked before and after loading has others between
RECENT = 20  # steps that tell how fast it goes now
ENDS = ("finished", "stopped")  # events that --quiet shows
BOLD, YELLOW, GREEN = "1", "33", "32"
COLOURS = {"validation": BOLD, "stopping": YELLOW, "stopped": YELLOW, "finished": GREEN}  # of events


class Progress:
    """How far a run is, and how fast. The first step, which compiles, counts until there are others."""

    def __init__(self, step: int, steps: int, every: dict[str, int]) -> None:
        """every: what comes up, by name, and steps between it; 0 for never."""
        self.step, self.steps, self._every = step, steps, every
        self.loss = math.nan  # per supervised token, over the steps since the record before
        self._recent: deque[tuple[float, int]] = deque(maxlen=RECENT)  # seconds, tokens
        self._steps = -1  # of this launch, after its first
        self._seconds = 0.0  # since that, with pauses

    def count(self, step: int, seconds: float, pause: float, tokens: int, loss: float) -> None:
        """Count a step of so many supervised tokens, which took `seconds` of training after a pause."""
        self._steps += 1
        self._seconds += pause + seconds if self._steps else 0.0
        if self._steps == 1:
            self._recent.clear()
        self._recent.append((seconds, tokens))
        self.step, self.loss = step, loss

    def __str__(self) -> str:
        """Return `step 120/2,000  loss 2.31  41,200 tokens/s  12 min left  validation at 200`.

        Tokens are supervised ones per second of training; what is left has as many pauses as came so far.
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


def duration(seconds: float) -> str:
    """Return a time as `45 s`, `12 min`, `3 h 05 min` or `2 d 3 h`."""
    if seconds < 59.5:
        return f"{seconds:.0f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    if hours < 48:
        return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min"
    return f"{hours // 24} d {hours % 24} h"


class Console(logging.Handler):
    """Rank 0's way to the user: log records, events and progress. Safe to use from several threads.

    A log record that carries fields beside its text (`event_fields`) is an event, any other a message.
    """

    def __init__(
        self,
        kind: Kind = "lines",
        stream: TextIO | None = None,
        colour: bool = False,
        chatter: Chatter | None = None,
    ) -> None:
        super().__init__()
        self.kind, self.chatter = kind, chatter
        self._stream = stream if stream is not None else sys.stdout
        self._colour, self._clock = colour, time.monotonic
        self._last = -math.inf  # when progress was last shown
        self._bar: tqdm[Any] | None = None
        self._messages: deque[str] = deque(maxlen=REMEMBERED)  # that were no warnings

    def progress(self, progress: Progress) -> None:
        """Draw a step that was taken, on a terminal and only as often as an eye can follow."""
        if self.kind == "terminal" and self._due(DRAW_EVERY):
            if self._bar is None:
                form: dict[str, Any] = {"bar_format": "{desc}", "desc": " ", "dynamic_ncols": True}
                self._bar = tqdm(file=self._stream, leave=False, **form)
            self._bar.set_description_str(str(progress))

    def record(self, record: dict[str, Any], progress: Progress) -> None:
        """Show a line of metrics.jsonl, with None where JSON has no number."""
        if self.kind == "json":
            self.event("", "train", **record)
        elif self.kind == "lines" and (progress.step == progress.steps or self._due(LINE_EVERY)):
            self._print(str(progress))

    def event(self, line: str, event: str, **fields: Any) -> None:
        """Something happened: `line` for people, the name of the event and its fields for programs."""
        if self.kind == "json":
            record = {"event": event, "time": round(time.time(), 3), **fields}
            self._print(json.dumps(record, allow_nan=False))
        elif self.kind != "quiet" or event in ENDS:
            self._print(line, COLOURS.get(event, ""))

    def emit(self, record: logging.LogRecord) -> None:
        """Show a log record; a message that was shown lately and is no warning is not shown again."""
        text, level = record.getMessage(), record.levelname.lower()
        is_warning = record.levelno >= logging.WARNING
        if "distutils" in record.pathname and self.chatter is not None:  # DeepSpeed tries the compiler
            print(text, file=self.chatter.stream)
            return
        if record.name == "DeepSpeed" and (not is_warning or record.module == "real_accelerator"):
            return  # its log is chatter; that there is no GPU this program says itself
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
        """Send what libraries print to the log in the run directory, now that it is this launch's."""
        if self.chatter is None:
            return
        self.chatter.move(run_dir, main)
        if main and self.chatter.path is not None:
            path = str(self.chatter.path)
            self.event(f"log of the launcher, compilers and libraries: {path}", "log", path=path)

    def compiling(self) -> contextlib.AbstractContextManager[object]:
        """Enclose what compiles: its output is chatter."""
        return contextlib.redirect_stdout(self.chatter.stream) if self.chatter else contextlib.nullcontext()

    def close(self) -> None:
        """Take the progress away; what follows starts on a line of its own."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        super().close()

    def _due(self, seconds: float) -> bool:
        now = self._clock()
        if now - self._last < seconds:
            return False
        self._last = now
        return True

    def _print(self, text: str, colour: str = "") -> None:
        line = without_secrets(printable(text))
        tqdm.write(f"\x1b[{colour}m{line}\x1b[0m" if self._colour and colour else line, file=self._stream)
        self._stream.flush()


class Survivor(io.FileIO):
    """An output that a lost reader does not break: what is written from then on goes nowhere.

    Ctrl-C ends `... | tee log` as well, and a connection that drops takes the terminal with it; a rank that
    died of its next line of output would not save.
    """

    def write(self, data: Any) -> int:
        """Write `data`, or drop it."""
        try:
            return super().write(data)
        except OSError:
            with Path(os.devnull).open("wb") as nowhere:
                os.dup2(nowhere.fileno(), self.fileno())
            return len(data)


class Chatter:
    """The output of libraries, compilers and launchers: out of sight, and not lost."""

    def __init__(self, shared: bool) -> None:
        """Descriptor 1 leads there already; shared: with the launcher and the other ranks of this host."""
        self._shared = shared
        self.stream = _stream(1)
        self.path: Path | None = None  # once it is in a run directory

    def move(self, run_dir: Path, main: bool) -> None:
        """Send the output to the run's log from now on, after what was kept so far.

        main: this rank copies what is shared. Where the log cannot be written, it stays where it is.
        """
        with contextlib.suppress(OSError), (run_dir / LOG).open("a+b", buffering=0) as log:
            if main:
                stamp = time.strftime("%Y-%m-%d %H:%M:%S")
                log.write(f"--- {stamp}, process {os.getpid()} on {socket.gethostname()}\n".encode())
            if main or not self._shared:
                log.write(self._text())
            os.dup2(log.fileno(), 1)
            self.path = run_dir / LOG

    def show(self) -> None:
        """Show what was kept, or its path, on standard error when an unexpected error ends this process."""
        path = f"log of the launcher, compilers and libraries: {self.path}\n"
        text = path if self.path else printable(self._text().decode(errors="replace"))
        print(text, end="", file=sys.stderr, flush=True)

    def _text(self) -> bytes:
        """Return what was kept so far."""
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
    sys.stdout, sys.stderr = _stream(console), _stream(sys.stderr.fileno())
    return Chatter(shared=launched)


def _stream(descriptor: int) -> TextIO:
    raw = io.BufferedWriter(Survivor(descriptor, "w", closefd=False))
    return io.TextIOWrapper(raw, encoding=sys.stdout.encoding, errors="backslashreplace", line_buffering=True)
