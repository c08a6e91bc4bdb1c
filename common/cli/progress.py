"""How far a long piece of work is: a bar on a terminal, a line now and then elsewhere."""

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

QUIET = 4.5  # seconds between lines: no command is silent for more than 5
_working: list[object] = []  # blocks at work, outermost first: the innermost reports


def make_console(**options: Any) -> Console:
    """Return a rich console; a reader that leaves (`... | head`) ends the command as it ends others."""
    from rich.console import Console

    class Printer(Console):
        def on_broken_pipe(self) -> None:
            raise  # rich would exit with 1

    return Printer(**options)


@contextmanager
def progress(label: str, total: int, say: Callable[[str], None]) -> Iterator[Callable[[int], None]]:
    """Show work on `total` bytes (0: unknown) while the block runs.

    Yield the function that takes how many bytes are done. Without a terminal, `say` gets a line at times.
    """
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
    is_terminal, last = sys.stderr.isatty(), time.monotonic()
    console = make_console(stderr=True)
    everything = "{task.description}", BarColumn(), *columns
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
    """Show on stderr that the block is at work: a bar on a terminal, else a line every QUIET seconds.

    Yield the function that takes how many more of `total` units are done. total: 0 if nothing is counted.
    """
    done, begun, over = 0, time.monotonic(), threading.Event()
    has_bar, me = total > 0 and sys.stderr.isatty(), object()

    def report() -> None:
        while not over.wait(QUIET):
            if _working[-1] is not me:
                continue
            seconds = time.monotonic() - begun
            left = f", about {seconds * (total - done) / done:.0f} s left" if done else ""
            state = f"{done:,} of {counted(total, unit)}{left}" if total else f"{seconds:.0f} s"
            print(printable(f"{label}: {state}"), file=sys.stderr, flush=True)

    def advance(count: int) -> None:
        nonlocal done
        done += count

    _working.append(me)
    try:
        if has_bar:
            from tqdm import tqdm

            with tqdm(total=total, desc=label, unit=unit) as bar:
                yield bar.update
            return
        thread = threading.Thread(target=report, daemon=True)
        thread.start()
        try:
            yield advance
        finally:
            over.set()
            thread.join()
    finally:
        _working.remove(me)


def amount(count: int) -> str:
    """Return bytes in the unit that reads best."""
    from rich.filesize import decimal

    return decimal(count)
