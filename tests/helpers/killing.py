"""Wait for processes, or kill and restart them until one runs to its end."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable

FORK = multiprocessing.get_context("fork")  # a child starts at once, because all imports are done


def to_the_end(
    run: Callable[..., object], arguments: tuple[object, ...], kills: int, moment: Callable[[], float]
) -> int:
    """Call run(*arguments) in new processes until one ends. Return the number of kills, at most `kills`.

    moment: returns the seconds until the next process is killed. A process that fails is an error.
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
    """Wait until a condition holds. The timeout is long, because the machine may be busy."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"no {event} after {timeout:.0f} s"
        time.sleep(0.05)
