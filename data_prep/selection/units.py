"""Units of work that any number of jobs share. Each unit is a file that exists only when it is complete."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from emo.common.errors import FailureError
from emo.common.io.lease import Lease, hold_if_free
from emo.common.io.objects import forget_listings, shown

LEASES = 64  # in a directory
POLL = 0.5  # longest time between checks of other jobs, in seconds


def complete_units(
    count: int,
    first: float,
    directory: Path,
    done: Callable[[int], bool],
    make: Callable[[int], None],
    waiting: Callable[[str, str], None],
) -> None:
    """Make units until all are done. Units of dead jobs are taken over.

    Args:
        count: The number of units.
        first: The unit to begin with, from 0 to 1, so that jobs do not make the same units.
        directory: The directory of the leases.
        done: Returns whether a unit exists or is not needed any more.
        make: Makes a unit.
        waiting: Is called once if only units of other jobs are left, with their count and one of the jobs.

    Raises FailureError for a unit that does not exist after it was made.
    """
    start = int(first * count)
    left = [*range(start, count), *range(start)]
    pause = POLL / 32
    announced = False
    made: set[int] = set()

    def make_once(number: int) -> None:
        if number in made:
            problem = f"{shown(directory)} has lost a file that was just written"
            raise FailureError(f"{problem}. Check its disk or store", code="file-lost")
        made.add(number)
        make(number)

    while left:
        holder = ""
        for number in left:
            if not done(number):
                holder = _try_unit(number, directory, done, make_once) or holder
        forget_listings()
        left = [number for number in left if not done(number)]
        if left and holder:
            if not announced:
                waiting(f"{len(left)} of {count}", holder)
            announced = True
            time.sleep(pause)
            pause = min(2 * pause, POLL)


def _try_unit(number: int, directory: Path, done: Callable[[int], bool], make: Callable[[int], None]) -> str:
    """Make a unit unless another job is making it. Return the name of that job, or ''."""
    # Few leases are in one directory, because taking a lease lists it.
    lease = Lease(directory / f"leases-{number // LEASES}", f"{number:06d}.lease")
    with hold_if_free(lease) as free:
        if not free:
            return str(lease.holder() or "one that has just begun")
        forget_listings()
        if not done(number):
            make(number)
    return ""
