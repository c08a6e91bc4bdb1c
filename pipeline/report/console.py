"""What a person sees of a run while it trains, and where everything else that is printed goes.

On a terminal the progress is drawn over and over in one place. Elsewhere it is a plain line every few
seconds, or with --json every record as an object; --quiet leaves warnings, errors and how the run ended.

Standard error stays as it is, and so does Python's `print`. File descriptor 1, which compilers, C libraries
and child processes write to, leads to the log: a temporary file until the run directory is taken, then
`log.txt` in it. Under launch/supervise.py the launcher's own lines go there as well: the supervisor gives it
that file as standard output, and the real one as standard input, which neither launcher nor ranks read.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import math
import os
import socket
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, TextIO, cast

from tqdm import tqdm

from emo.common.text import printable, without_secrets
from emo.pipeline.run_dir import LOG
from emo.pipeline.stop import CONSOLE

Kind = Literal["terminal", "lines", "json", "quiet", "silent"]  # silent: ranks other than 0, errors alone
DRAW_EVERY, LINE_EVERY = 0.2, 10.0  # seconds between two drawings, and between two plain lines of progress
REMEMBERED = 20  # messages: what is checked before and after loading has others between
RECENT = 20  # steps that tell how fast it goes now
BOLD, YELLOW, GREEN = "1", "33", "32"
WARNING = logging.WARNING
ENDS = ("finished", "stopped")  # events that --quiet shows


class Progress:
    """How far a run is, and how fast. The first step, which compiles, counts until there are others."""

    def __init__(self, step: int, steps: int, every: dict[str, int]) -> None:
        """every: what comes up, by name, and steps between it; 0 for never."""
        self.step, self.steps, self._every = step, steps, every
        self.loss = math.nan  # per supervised token, over the steps since the record before
        self._recent: deque[tuple[float, int]] = deque(maxlen=RECENT)
        self._training = self._pausing = 0.0  # seconds, since the first step
        self._counted = 0

    def count(self, step: int, seconds: float, tokens: int, loss: float) -> None:
        """Count a step of so many supervised tokens, which took `seconds` of training."""
        if self._counted == 1:
            self._recent.clear()
            self._training = 0.0
        self.step, self.loss = step, loss
        self._counted += 1
        self._recent.append((seconds, tokens))
        self._training += seconds

    def pause(self, seconds: float) -> None:
        """Saving, validation or sampling took `seconds`. What came before the first step does not count."""
        if self._counted:
            self._pausing += seconds

    def __str__(self) -> str:
        """Return `step 120/2,000  loss 2.31  41,200 tokens/s  12 min left  validation at 200`.

        Tokens are supervised ones per second of training; what is left has as many pauses as came so far.
        """
        parts = [f"step {self.step:,}/{self.steps:,}"]
        parts.append(f"loss {self.loss:.4g}" if math.isfinite(self.loss) else "loss not finite")
        seconds, tokens = (
            (sum(column) for column in zip(*self._recent, strict=True)) if self._recent else (0, 0)
        )
        if seconds > 0:
            parts.append(f"{tokens / seconds:,.0f} tokens/s")
            left = (self.steps - self.step) * seconds / len(self._recent)
            left *= 1 + self._pausing / self._training
            parts += [f"{duration(left)} left"] if self.step < self.steps else []
        due = {name: (self.step // n + 1) * n for name, n in self._every.items() if n > 0}
        first = min(due.values(), default=self.steps)
        names = " and ".join(name for name, step in due.items() if step == first)
        return "  ".join([*parts, f"{names} at {first:,}"] if first < self.steps else parts)


def duration(seconds: float) -> str:
    """Return a time as `45 s`, `12 min`, `3 h 05 min` or `2 d 3 h`."""
    if seconds < 59.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    return f"{minutes // 1440} d {minutes % 1440 // 60} h"


class Console:
    """Rank 0's way to the user. Safe to use from several threads."""

    def __init__(
        self,
        kind: Kind = "lines",
        stream: TextIO | None = None,
        colour: bool = False,
        chatter: Chatter | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.kind, self.chatter = kind, chatter
        self._stream = stream if stream is not None else sys.stdout
        self._colour, self._clock = colour, clock
        self._last = -math.inf  # when progress was last shown
        self._bar: tqdm[Any] | None = None
        self._messages: deque[tuple[int, str]] = deque(maxlen=REMEMBERED)  # that were no warnings

    def progress(self, progress: Progress) -> None:
        """Draw a step that was taken, on a terminal and only as often as an eye can follow."""
        if self.kind == "terminal" and self._due(DRAW_EVERY):
            if self._bar is None:
                self._bar = tqdm(
                    bar_format="{desc}", desc=" ", dynamic_ncols=True, leave=False, file=self._stream
                )
            self._bar.set_description_str(str(progress))

    def record(self, record: dict[str, Any], progress: Progress) -> None:
        """Show a line of metrics.jsonl, with None where JSON has no number."""
        if self.kind == "json":
            self._object("train", record)
        elif self.kind == "lines" and (progress.step == progress.steps or self._due(LINE_EVERY)):
            self._print(str(progress))

    def event(self, name: str, line: str, colour: str = "", /, **fields: Any) -> None:
        """Something happened: `line` for people, the fields for programs."""
        if self.kind == "json":
            self._object(name, fields)
        elif self.kind in ("terminal", "lines") or (self.kind == "quiet" and name in ENDS):
            self._print(line, colour)

    def message(self, text: str, level: int = logging.INFO) -> None:
        """Show a line of a library or of this program's log; what was shown lately is not shown again."""
        if (self.kind == "silent" and level < logging.ERROR) or (level, text) in self._messages:
            return
        name = logging.getLevelName(level).lower()
        if level < WARNING:
            self._messages.append((level, text))
        if self.kind == "json":
            self._object("message", {"level": name, "text": text})
        elif level >= WARNING:
            self._print(f"{name}: {text}", YELLOW)
        elif self.kind != "quiet":
            self._print(text)

    def open(self, run_dir: Path, main: bool) -> None:
        """Send what libraries print to the log in the run directory, now that it is this launch's."""
        if self.chatter is None:
            return
        self.chatter.move(run_dir, main)
        if main and self.chatter.path is not None:
            path = str(self.chatter.path)
            self.event("log", f"log of the launcher, compilers and libraries: {path}", path=path)

    def compiling(self) -> contextlib.AbstractContextManager[object]:
        """Enclose what compiles: its output is chatter."""
        return contextlib.redirect_stdout(self.chatter.stream) if self.chatter else contextlib.nullcontext()

    def close(self) -> None:
        """Take the progress away; what follows starts on a line of its own."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _due(self, seconds: float) -> bool:
        now = self._clock()
        if now - self._last < seconds:
            return False
        self._last = now
        return True

    def _object(self, name: str, fields: dict[str, Any]) -> None:
        record = {"event": name, "time": round(time.time(), 3), **fields}
        self._print(json.dumps(record, allow_nan=False))

    def _print(self, text: str, colour: str = "") -> None:
        line = without_secrets(printable(text))
        tqdm.write(f"\x1b[{colour}m{line}\x1b[0m" if self._colour and colour else line, file=self._stream)
        self._stream.flush()


class Handler(logging.Handler):
    """Log records as lines of a console."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        """Show one record; the fields that it carries besides its text are an event."""
        fields = dict(getattr(record, "event_fields", {}))
        if fields:
            self._console.event(fields.pop("event"), record.getMessage(), **fields)
        else:
            self._console.message(record.getMessage(), record.levelno)


def open_console(json_lines: bool, quiet: bool, main: bool, chatter: Chatter | None) -> Console:
    """Return the console that fits standard output and the options. main: of rank 0."""
    able = sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    kind: Kind = "json" if json_lines else "quiet" if quiet else "terminal" if able else "lines"
    colour = able and not os.environ.get("NO_COLOR")
    return Console(kind if main else "silent", sys.stdout, colour, chatter)


class Survivor:
    """A text stream that a lost reader does not break: what is written from then on goes nowhere.

    Ctrl-C ends `... | tee log` as well, and a connection that drops takes the terminal with it; a rank that
    died of its next line of output would not save.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write `text`, or drop it."""
        with self._survived():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush, or drop what is buffered."""
        with self._survived():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextlib.contextmanager
    def _survived(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            with Path(os.devnull).open("wb") as nowhere:
                os.dup2(nowhere.fileno(), self._stream.fileno())


class Chatter:
    """The output of libraries, compilers and launchers: out of sight, and not lost."""

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


def split() -> Chatter:
    """Part this process's output in two: sys.stdout remains the user's, descriptor 1 becomes chatter."""
    sys.stdout.flush()
    launched = False
    with contextlib.suppress(OSError):
        writable = fcntl.fcntl(0, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY
        launched = CONSOLE in os.environ and writable
    console = os.dup(0 if launched else 1)
    if launched:  # standard input is the real standard output, and 1 the launcher's log
        with Path(os.devnull).open("rb") as nothing:
            os.dup2(nothing.fileno(), 0)
    else:
        with tempfile.TemporaryFile(prefix="log-") as file:
            os.dup2(file.fileno(), 1)
    stream = os.fdopen(console, "w", buffering=1, encoding=sys.stdout.encoding, errors="backslashreplace")
    sys.stdout, sys.stderr = cast("TextIO", Survivor(stream)), cast("TextIO", Survivor(sys.stderr))
    return Chatter(shared=launched)
