"""The sources cut into units of work, and who does which: any job takes the next one that nobody has."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from common.lease import Lease, held
from data_prep.inputs import Input

UNITS = 4096  # about as many at most, but for inputs whose size is not known
UNIT = 8 << 20  # bytes of a unit at least, as they are stored
POLL = 0.5  # seconds between looks at what other jobs have done, at most: those that began together soon end


class Stretch(NamedTuple):
    """What a unit reads of an input."""

    input: int
    begin: int  # byte from which on rows begin; those that begin before are of the unit before
    end: int | None  # byte from which on they are of the next unit; None: there is none


class Unit(NamedTuple):
    """Inputs, or a stretch of one, that one job scans."""

    number: int
    stretches: tuple[Stretch, ...]
    size: int  # bytes

    @property
    def name(self) -> str:
        """Of its files."""
        return f"{self.number:06d}"


def divide(inputs: list[Input]) -> list[Unit]:
    """The inputs as units, in order: the same for any number of jobs.

    Small inputs are put together and large plain files cut. A packed file is read by one job, and so is a
    source with a limit, of which the first rows count.
    """
    goal = max(UNIT, sum(one.size for one in inputs) // UNITS)
    units: list[tuple[list[Stretch], int]] = []
    numbered = groupby(enumerate(inputs), lambda item: id(item[1].source))
    for own in (list(group) for _, group in numbered):
        if own[0][1].source.limit is not None:
            units.append(([Stretch(n, 0, None) for n, _ in own], sum(one.size for _, one in own)))
            continue
        units += _of_source(own, goal)
    return [Unit(number, tuple(stretches), size) for number, (stretches, size) in enumerate(units)]


def _of_source(own: list[tuple[int, Input]], goal: int) -> Iterator[tuple[list[Stretch], int]]:
    """Units of about `goal` bytes of a source's inputs."""
    small: list[Stretch] = []
    size = 0
    for number, one in own:
        whole = Stretch(number, 0, None)
        if 0 < one.size <= goal:
            small.append(whole)
            size += one.size
        if small and (size >= goal or not 0 < one.size <= goal):
            yield small, size
            small, size = [], 0
        if one.size > goal and one.cuttable:
            for begin in range(0, one.size, goal):
                end = begin + goal
                yield [Stretch(number, begin, end if end < one.size else None)], min(goal, one.size - begin)
        elif not 0 < one.size <= goal:
            yield [whole], one.size
    if small:
        yield small, size


def digest(values: Any) -> str:
    """Of JSON values: parts with another one were made from something else."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def shared_out(
    units: list[Unit],
    place: Path,
    done: Callable[[Unit], bool],
    first: float,
    waiting: Callable[[str], None],
) -> Iterator[Unit]:
    """Yield units for this job to do, until all are done, by whichever job.

    first: where among them this job begins, from 0 to 1, so that jobs do not read the same places. The caller
    has the lease of a unit while it does it; what a job that died had is taken over. `waiting` gets one line
    on what others still do, when nothing else is left.
    """
    start = int(first * len(units))
    left = units[start:] + units[:start]
    told, pause = False, POLL / 32
    while left:
        holder = ""  # of a unit that this job cannot have
        for unit in left:
            if done(unit):
                continue
            lease = Lease(place, f"{unit.name}.lease")
            with held(lease) as free:
                if not free:
                    holder = str(lease.holder() or "one that has just begun")
                elif not done(unit):
                    yield unit
        left = [unit for unit in left if not done(unit)]
        if left and holder:
            if not told:
                told = True
                count = f"{len(left)} of {len(units)}"
                waiting(f"waiting for {count} parts of the sources; other jobs read them: {holder}")
            time.sleep(pause)
            pause = min(2 * pause, POLL)
