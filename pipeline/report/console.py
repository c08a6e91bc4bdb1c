"""What a person sees of a run while it trains: one line of progress, and a line where something happens.

On a terminal the progress is drawn over and over in one place. Elsewhere it is a plain line every few
seconds, or with --json every record as an object; --quiet leaves warnings, errors and how the run ended.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TextIO

from tqdm import tqdm

from common.text import printable, without_secrets
from pipeline.report.pace import duration
from pipeline.report.streams import Chatter

Kind = Literal["terminal", "lines", "json", "quiet", "silent"]  # silent: ranks other than 0, errors alone
DRAW_EVERY, LINE_EVERY = 0.2, 10.0  # seconds between two drawings, and between two plain lines of progress
REMEMBERED = 20  # messages: what is checked before and after loading has others between
BOLD, YELLOW, GREEN = "1", "33", "32"
WARNING = logging.WARNING
ENDS = ("finished", "stopped")  # events that --quiet shows


@dataclass(frozen=True)
class Progress:
    """The state of a run."""

    step: int
    steps: int
    loss: float  # per supervised token, over the steps since the record before
    tokens_per_s: float | None
    left: float | None  # seconds
    upcoming: str  # what comes next, as `pace.upcoming` says it

    def line(self) -> str:
        """Return `step 120/2,000  loss 2.31  41,200 tokens/s  12 min left  validation at 200`."""
        parts = [f"step {self.step:,}/{self.steps:,}"]
        parts.append(f"loss {self.loss:.4g}" if math.isfinite(self.loss) else "loss not finite")
        if self.tokens_per_s is not None:
            parts.append(f"{self.tokens_per_s:,.0f} tokens/s")
        if self.left is not None and self.step < self.steps:
            parts.append(f"{duration(self.left)} left")
        return "  ".join([*parts, *([self.upcoming] if self.upcoming else [])])


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
        self._said: deque[tuple[int, str]] = deque(maxlen=REMEMBERED)  # messages that were no warnings

    def progress(self, make: Callable[[], Progress]) -> None:
        """Draw a step that was taken, on a terminal and only as often as an eye can follow."""
        if self.kind == "terminal" and self._due(DRAW_EVERY):
            if self._bar is None:
                self._bar = tqdm(
                    bar_format="{desc}", dynamic_ncols=True, leave=False, file=self._stream, desc=" "
                )
            self._bar.set_description_str(make().line())

    def record(self, record: dict[str, Any], make: Callable[[], Progress]) -> None:
        """Show a line of metrics.jsonl, with None where JSON has no number."""
        if self.kind == "json":
            self._object("train", record)
        elif self.kind == "lines" and (record["step"] == make().steps or self._due(LINE_EVERY)):
            self._print(make().line())

    def event(self, name: str, line: str, colour: str = "", /, **fields: Any) -> None:
        """Something happened: `line` for people, the fields for programs."""
        if self.kind == "json":
            self._object(name, fields)
        elif self.kind in ("terminal", "lines") or (self.kind == "quiet" and name in ENDS):
            self._print(line, colour)

    def message(self, text: str, level: int = logging.INFO) -> None:
        """Show a line of a library or of this program's log."""
        if (self.kind == "silent" and level < logging.ERROR) or (level, text) in self._said:
            return  # who checks before and after loading says the same twice
        if level < WARNING:
            self._said.append((level, text))
        if self.kind == "json":
            self._object("message", {"level": logging.getLevelName(level).lower(), "text": text})
        elif level >= WARNING:
            self._print(f"{logging.getLevelName(level).lower()}: {text}", YELLOW)
        elif self.kind != "quiet":
            self._print(text)

    def open(self, run_dir: Path, main: bool) -> None:
        """Send what libraries print to the log in the run directory, now that it is this launch's."""
        if self.chatter is None:
            return
        self.chatter.move(run_dir, main)
        if main and self.chatter.path is not None:
            self.event("log", f"log of the launcher, compilers and libraries: {self.chatter.path}",
                       path=str(self.chatter.path))  # fmt: skip

    def compiling(self) -> contextlib.AbstractContextManager[object]:
        """Enclose what compiles: its output is chatter."""
        return self.chatter.prints() if self.chatter is not None else contextlib.nullcontext()

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
        self._write(json.dumps({"event": name, "time": round(time.time(), 3), **fields}, allow_nan=False))

    def _print(self, text: str, colour: str = "") -> None:
        line = printable(text)
        self._write(f"\x1b[{colour}m{line}\x1b[0m" if self._colour and colour else line)

    def _write(self, line: str) -> None:
        tqdm.write(without_secrets(line), file=self._stream)
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


def made(json_lines: bool, quiet: bool, main: bool, chatter: Chatter | None) -> Console:
    """Return the console that fits standard output and what was asked for. main: of rank 0."""
    able = sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    kind: Kind = "terminal" if able else "lines"
    if quiet:
        kind = "quiet"
    if json_lines:
        kind = "json"
    if not main:
        kind = "silent"
    return Console(kind, sys.stdout, colour=able and not os.environ.get("NO_COLOR"), chatter=chatter)
