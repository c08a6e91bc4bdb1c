"""How far a long piece of work is: a bar with the time left on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress

EVERY = 30.0  # seconds between lines


class Advance:
    """Told how much is done; says it."""

    def __init__(self, label: str, total: int, say: Callable[[str], None], bar: Progress | None) -> None:
        self._what, self._total, self._say, self._bar = label, total, say, bar
        self._began = self._said = time.monotonic()
        self._task = bar.add_task(label, total=total or None) if bar is not None else None

    def __call__(self, done: int) -> None:
        """`done` bytes of the total."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=done)
            return
        now = time.monotonic()
        if now - self._said >= EVERY:
            self._said = now
            self._say(progress_line(self._what, done, self._total, now - self._began))


@contextmanager
def progress(label: str, total: int, say: Callable[[str], None]) -> Iterator[Advance]:
    """Show work on `total` bytes (0: unknown) while the block runs: `with progress(...) as at: at(done)`."""
    if not sys.stderr.isatty():
        yield Advance(label, total, say, None)
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        yield Advance(label, total, say, bar)


def progress_line(label: str, done: int, total: int, seconds: float) -> str:
    """One line: bytes, rate, and the time that is left where the total is known."""
    rate = done / max(seconds, 1e-9)
    line = f"{label}: {amount(done)}"
    if total:
        line += f" of {amount(total)} ({done / total:.0%})"
    line += f", {amount(int(rate))}/s"
    if total and done:
        line += f", {duration(max(0, total - done) / rate)} left"
    return line


def amount(count: int) -> str:
    """Bytes in the unit that reads best."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            break
        count /= 1000  # type: ignore[assignment]
    return f"{count:,.0f} {unit}" if unit in ("bytes", "kB") else f"{count:,.1f} {unit}"


def duration(seconds: float) -> str:
    """Hours, minutes and seconds."""
    whole = round(seconds)
    hours, minutes = whole // 3600, whole % 3600 // 60
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {whole % 60} s" if minutes else f"{whole} s"
