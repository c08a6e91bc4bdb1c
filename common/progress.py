"""How far a long piece of work is: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

EVERY = 30.0  # seconds between lines


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


def amount(count: int) -> str:
    """Return bytes in the unit that reads best."""
    from rich.filesize import decimal

    return decimal(count)
