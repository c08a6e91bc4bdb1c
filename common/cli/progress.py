"""Progress of long tasks: a bar on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..text import counted, printable

if TYPE_CHECKING:
    from rich.console import Console

QUIET = 4.5  # seconds between lines, so that no command is silent for more than 5
_activities: list[object] = []  # nested activities, of which only the innermost reports


def make_console(**options: Any) -> Console:
    """Return a rich console without markup. It raises BrokenPipeError if the reader closes the pipe."""
    from rich.console import Console

    class Printer(Console):
        def on_broken_pipe(self) -> None:
            raise  # instead of exiting with code 1, as rich does

    return Printer(markup=False, **options)


@contextmanager
def progress(label: str, total: int, say: Callable[[str], None]) -> Iterator[Callable[[int], None]]:
    """Show progress over `total` bytes (0: unknown) while the block runs.

    Yield a function that takes the number of bytes done so far. Without a terminal, lines go to `say`.
    """
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
    is_terminal = sys.stderr.isatty()
    last = time.monotonic()
    console = make_console(stderr=True)
    everything = TextColumn("{task.description}", markup=False), BarColumn(), *columns
    with Progress(*everything, console=console, transient=True, disable=not is_terminal) as bar:
        task = bar.add_task(label, total=total or None)

        def advance(done: int) -> None:
            nonlocal last
            bar.update(task, completed=done)
            if not is_terminal and time.monotonic() - last >= QUIET:
                last = time.monotonic()
                size, speed, left = (column.render(bar.tasks[0]) for column in columns)
                say(f"{label}: {size}, {speed}" + f", {left} left" * (total > 0))

        yield advance


@contextmanager
def show_activity(label: str, total: int = 0, unit: str = "") -> Iterator[Callable[[int], None]]:
    """Show progress on stderr while the block runs: a bar on a terminal, else a line every QUIET seconds.

    Yield a function that takes the number of further units done, out of `total` (0: not counted).
    """
    done = 0
    started = time.monotonic()
    finished = threading.Event()
    activity = object()

    def report() -> None:
        while not finished.wait(QUIET):
            if _activities[-1] is not activity:
                continue
            seconds = time.monotonic() - started
            left = f", about {seconds * (total - done) / done:.0f} s left" if done else ""
            state = f"{done:,} of {counted(total, unit)}{left}" if total else f"{seconds:.0f} s"
            print(printable(f"{label}: {state}"), file=sys.stderr, flush=True)

    def advance(count: int) -> None:
        nonlocal done
        done += count

    _activities.append(activity)
    try:
        if total > 0 and sys.stderr.isatty():
            from tqdm import tqdm

            with tqdm(total=total, desc=label, unit=unit) as bar:
                yield bar.update
            return
        thread = threading.Thread(target=report, daemon=True)
        thread.start()
        try:
            yield advance
        finally:
            finished.set()
            thread.join()
    finally:
        _activities.remove(activity)


def amount(count: int) -> str:
    """Format a number of bytes with a decimal unit."""
    from rich.filesize import decimal

    return decimal(count)
