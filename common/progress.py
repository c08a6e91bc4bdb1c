"""How far a long piece of work is: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from emo.common.text import printable

EVERY = 30.0  # seconds between lines
QUIET = 4.5  # seconds between lines of a command on a model, which is never silent for more than 5
_active: list[Work] = []  # outermost first; the innermost is shown


@contextmanager
def progress(label: str, total: int, say: Callable[[str], None]) -> Iterator[Callable[[int], None]]:
    """Show work on `total` bytes (0: unknown) while the block runs.

    Yield the function that takes how many bytes are done. Without a terminal, `say` gets a line at times.
    """
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
    is_terminal, last = sys.stderr.isatty(), time.monotonic()
    console = Console(stderr=True)
    everything = "{task.description}", BarColumn(), *columns
    with Progress(*everything, console=console, transient=True, disable=not is_terminal) as bar:
        task = bar.add_task(label, total=total or None)

        def advance(done: int) -> None:
            nonlocal last
            bar.update(task, completed=done)
            if not is_terminal and time.monotonic() - last >= EVERY:
                last = time.monotonic()
                size, speed, left = (column.render(bar.tasks[0]) for column in columns)
                say(f"{label}: {size}, {speed}" + f", {left} left" * (total > 0))

        yield advance


class Work:
    """Counts finished units of work; `n` of `total` (None: unknown, and the time is shown alone)."""

    def __init__(self, label: str, total: int | None, unit: str) -> None:
        self.label, self.total, self.unit = label, total, unit
        self.n, self.began = 0, time.monotonic()
        self.bar: Any = None
        self._done_before: int | None = None  # units that were done before the work began
        if total is not None and sys.stderr.isatty():
            from tqdm import tqdm

            self.bar = tqdm(total=total, desc=label, unit=unit)

    def update(self, count: int) -> None:
        """Count units that were finished."""
        self.n += count
        if self._done_before is None:
            known = time.monotonic() - self.began < 0.05  # read, not computed: no measure of the speed
            self._done_before = self.n if known else 0
        if self.bar is not None:
            self.bar.update(count)

    def line(self) -> str:
        """Return how far the work is, and how long the rest takes at the speed so far."""
        seconds = time.monotonic() - self.began
        if self.total is None:
            return f"{self.label}: {seconds:.0f} s"
        text = f"{self.label}: {self.n:,} of {self.total:,} {self.unit}s, {seconds:.0f} s"
        if done := self.n - (self._done_before or 0):
            text += f", about {_duration(seconds / done * (self.total - self.n))} left"
        return text

    def show(self) -> None:
        """Refresh the bar, or print a line."""
        if self.bar is not None:
            self.bar.refresh()
        else:
            print(printable(self.line()), file=sys.stderr, flush=True)


@contextmanager
def at_work(label: str, total: int | None = None, unit: str = "row") -> Iterator[Work]:
    """Show on stderr how far the block is: a bar on a terminal, else a line every QUIET seconds."""
    shown, ended = Work(label, total, unit), threading.Event()
    _active.append(shown)

    def beat() -> None:
        while not ended.wait(QUIET):
            if _active[-1] is shown:
                shown.show()

    thread = threading.Thread(target=beat, daemon=True, name="progress")
    thread.start()
    try:
        yield shown
    finally:
        ended.set()
        thread.join()
        _active.remove(shown)
        if shown.bar is not None:
            shown.bar.close()


def amount(count: int) -> str:
    """Return bytes in the unit that reads best."""
    from rich.filesize import decimal

    return decimal(count)


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
