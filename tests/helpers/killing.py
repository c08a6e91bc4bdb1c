"""Processes that are waited for, or killed with -9 and begun again until one of them is left to end."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable

FORK = multiprocessing.get_context("fork")  # a child starts at once, with everything imported


def to_the_end(
    run: Callable[..., object], arguments: tuple[object, ...], kills: int, moment: Callable[[], float]
) -> int:
    """Call run(*arguments) in a process of its own until it ends; how often it was killed, `kills` at most.

    moment: seconds that the next process has until it is killed. One that fails is an error.
    """
    killed = 0
    while True:
        process = FORK.Process(target=run, args=arguments)
        process.start()
        process.join(moment() if killed < kills else None)
        if not process.is_alive():
            assert process.exitcode == 0, arguments
            return killed
        process.kill()
        process.join()
        killed += 1


def wait_for(condition: Callable[[], object], event: str, timeout: float = 300) -> None:
    """Until a condition holds; generous, because the machine may be busy."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"no {event} after {timeout:.0f} s"
        time.sleep(0.05)
