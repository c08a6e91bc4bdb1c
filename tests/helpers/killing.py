"""Processes that are killed with -9 and begun again, until one of them is left to end."""

from __future__ import annotations

import functools
import multiprocessing
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path

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


def undisturbed_and_killed(
    run: Callable[[Path, Path], object], world: Path, place: Path, seed: int
) -> tuple[Path, Path]:
    """Directories that run(world, directory) filled: undisturbed, and killed once or twice at random."""
    whole, killed = place / "whole", place / "killed"
    draw = random.Random(seed)
    began = time.monotonic()
    run(world, whole)
    took = time.monotonic() - began

    def moment(share: float) -> float:
        return draw.uniform(0.1, 0.9) * share * took

    share = 1.0
    while not to_the_end(run, (world, killed), 2, functools.partial(moment, share)):
        shutil.rmtree(killed)  # it had ended before the first kill
        share /= 2
    return whole, killed
