"""How far a long piece of work is: a bar with the time left on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

EVERY = 30.0  # seconds between lines


@contextmanager
def progress(label: str, total: int, say: Callable[[str], None]) -> Iterator[Callable[[int], None]]:
    """Show work on `total` bytes (0: unknown) while the block runs: `with progress(...) as at: at(done)`."""
    began = spoken = time.monotonic()
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(label, total=total or None)
            yield lambda done: bar.update(task, completed=done)
        return

    def advance(done: int) -> None:
        nonlocal spoken
        now = time.monotonic()
        if now - spoken >= EVERY:
            spoken = now
            say(progress_line(label, done, total, now - began))

    yield advance


def progress_line(label: str, done: int, total: int, seconds: float) -> str:
    """Return one line: bytes, rate, and the time that is left where the total is known."""
    rate = done / max(seconds, 1e-9)
    line = f"{label}: {amount(done)}"
    if total:
        line += f" of {amount(total)} ({done / total:.0%})"
    line += f", {amount(int(rate))}/s"
    if total and done:
        line += f", {duration(max(0, total - done) / rate)} left"
    return line


def amount(count: int) -> str:
    """Return bytes in the unit that reads best."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            break
        count /= 1000  # type: ignore[assignment]
    return f"{count:,.0f} {unit}" if unit in ("bytes", "kB") else f"{count:,.1f} {unit}"


def duration(seconds: float) -> str:
    """Return hours, minutes and seconds."""
    whole = round(seconds)
    hours, minutes = whole // 3600, whole % 3600 // 60
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {whole % 60} s" if minutes else f"{whole} s"
