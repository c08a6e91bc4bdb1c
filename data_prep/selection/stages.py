"""Stages of the selection: any number of jobs share the units of each, and every unit writes one file.

A unit reads its bucket of the files of an earlier stage. Files depend only on the rows and the sizes of
units, and the rows that are dropped do not depend on the units.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from emo.common.io.mirror import refresh
from emo.common.io.objects import existed_recently

from ..config import DataConfig, settings
from .buckets import Chunk, read_buckets, write_buckets
from .compare import find_copies, nodes_of, rows_of
from .row_units import BLOCK_ROWS, divide_rows
from .scan import ScanPart
from .units import complete_units

STAGE = "select"  # beginning of the names of directories


class PlanFinishedError(Exception):
    """Another job has finished the plan."""


class Dropped(NamedTuple):
    """Nodes that a stage drops, in buckets by the units of their rows."""

    paths: list[Path]
    code: int  # reason


class Stages:
    """The stages of the selection of one job."""

    def __init__(
        self,
        config: DataConfig,
        parts: list[ScanPart],
        directory: Path,
        first: float,
        ended: Callable[[], bool],
        say: Callable[[str], None],
    ) -> None:
        """Args:
        config: the data section of the recipe.
        parts: the parts of the scan, in order.
        directory: the directory of all stages.
        first: the unit that this job begins with, from 0 to 1.
        ended: returns whether another job has finished the plan.
        say: prints a line for the user.
        """
        self.units = divide_rows(parts)
        self.dropped: list[Dropped] = []
        self._ends = np.array([unit.first + unit.rows for unit in self.units])
        self._directory = directory
        self._first = first
        self.ended = ended
        self.say = say
        made_from = [settings(config), [part.key for part in parts], self._ends.tolist(), BLOCK_ROWS]
        self._key = hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()[:16]

    def run(
        self, name: str, chunks: Callable[[int], Iterable[Chunk]], buckets: int | None = None
    ) -> list[Path]:
        """Write the missing files of a stage, and return all, one for each unit.

        Raises PlanFinishedError if another job has finished the plan.

        Args:
            name: The name of the stage.
            chunks: Returns the records that a unit writes.
            buckets: The number of buckets of each file, as many as units by default.
        """
        if self.ended():
            raise PlanFinishedError
        directory = self._directory / f"{STAGE}-{name}"
        directory.mkdir(exist_ok=True)
        paths = [directory / f"{number:06d}.{self._key}" for number in range(len(self.units))]
        complete_units(
            len(paths),
            self._first,
            directory,
            lambda number: existed_recently(paths[number]) or self.ended(),
            lambda number: write_buckets(paths[number], buckets or len(self.units), chunks(number)),
            lambda count, job: self.say(
                f"waiting for {count} units of the selection; other jobs make them: {job}"
            ),
        )
        if not all(map(existed_recently, paths)):
            raise PlanFinishedError
        refresh(directory, [f"*.{self._key}"])
        return paths

    def units_of(self, nodes: np.ndarray) -> np.ndarray:
        """Return the unit of each node's row."""
        return np.searchsorted(self._ends, rows_of(nodes), side="right")

    def by_unit(self, nodes: np.ndarray) -> Chunk:
        """Return nodes as a chunk by the units of their rows."""
        return nodes[:, None], self.units_of(nodes)

    def drop(self, number: int, reasons: np.ndarray) -> None:
        """Set the reasons of a unit's rows that are dropped so far."""
        for paths, code in self.dropped:
            for batch in read_buckets(paths, number):
                reasons[rows_of(batch[:, 0]) - self.units[number].first] = code

    def live(self, number: int, *names: str) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
        """Return the used rows of a unit: their index in it, their nodes, and further columns of all rows."""
        unit = self.units[number]
        columns = unit.read("split", "copies", "reason", *names)
        self.drop(number, columns["reason"])
        index = np.flatnonzero((columns["reason"] == 0) & (columns["copies"] > 0))
        nodes = nodes_of(unit.first + index, columns["split"][index], columns["copies"][index])
        return index, nodes, columns


def drop_equal(stages: Stages, code: int) -> None:
    """Drop the rows with equal content."""

    def hashes_of(number: int) -> Iterator[Chunk]:
        index, nodes, columns = stages.live(number, "hash")
        hashes = columns["hash"][index]
        yield np.stack([hashes, nodes], axis=1), by_prefix(hashes, len(stages.units))

    hashes = stages.run("hashes", hashes_of)
    copies = stages.run(
        "equal", lambda number: map(stages.by_unit, find_copies(read_buckets(hashes, number)))
    )
    stages.dropped.append(Dropped(copies, code))


def by_prefix(hashes: np.ndarray, count: int) -> np.ndarray:
    """Return one of `count` numbers for each hash, uint64, by its range."""
    return (hashes >> np.uint64(32)) * np.uint64(count) >> np.uint64(32)
