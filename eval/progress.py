"""How far a piece of work is: a bar on a terminal, elsewhere a line every few seconds; never silence."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

EVERY = 4.5  # seconds between lines: no command is silent for more than 5
_active: list[Progress] = []  # outermost first; the innermost is shown


class Progress:
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
            print(self.line(), file=sys.stderr, flush=True)


@contextmanager
def progress(label: str, total: int | None = None, unit: str = "row") -> Iterator[Progress]:
    """Show the progress of the block, on stderr, as long as it runs; short work shows nothing."""
    shown, ended = Progress(label, total, unit), threading.Event()
    _active.append(shown)

    def beat() -> None:
        while not ended.wait(EVERY):
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


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
