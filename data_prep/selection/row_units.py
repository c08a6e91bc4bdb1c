"""The scanned rows in units, which each stage of the selection reads again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow.parquet as pq

from .arrow import numbers_of
from .scan import ScanPart

UNIT_ROWS = 1 << 19  # approximately
BLOCK_ROWS = 1 << 14  # rows whose signatures are in memory at once
PAGE_BYTES = 1 << 20  # read at once


class Slice(NamedTuple):
    """Consecutive row groups of a part."""

    path: Path
    groups: range
    rows: int


class RowUnit(NamedTuple):
    """Consecutive rows."""

    first: int
    rows: int
    slices: tuple[Slice, ...]

    def read(self, *names: str) -> dict[str, np.ndarray]:
        """Return columns of numbers."""
        tables = [_open(part).read_row_groups(part.groups, names, use_threads=False) for part in self.slices]
        if not tables:
            return {name: np.zeros(0, np.uint64 if name == "hash" else np.int64) for name in names}
        return {name: np.concatenate([numbers_of(table[name]) for table in tables]) for name in names}

    def read_bands(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows that have bands, int64, counted from the first, and their bands, uint64."""
        rows = [np.zeros(0, np.int64)]
        bands = [np.zeros((0, 1), np.uint64)]
        before = 0
        for part in self.slices:
            for group in part.groups:
                column = (
                    _open(part).read_row_group(group, ["bands"], use_threads=False)["bands"].combine_chunks()
                )
                sizes = np.diff(numbers_of(column.offsets))
                rows.append(before + np.flatnonzero(sizes))
                before += len(sizes)
                if len(rows[-1]):
                    bands.append(numbers_of(column.flatten()).reshape(len(rows[-1]), -1))
        return np.concatenate(rows), np.concatenate(bands[1:] or bands)

    def blocks(self) -> list[int]:
        """Return the first row of each block of `read_signatures`."""
        begins: list[int] = []
        before = self.first
        for part in self.slices:
            begins += range(before, before + part.rows, BLOCK_ROWS)
            before += part.rows
        return begins

    def read_signatures(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield the signatures of each block: an index of each of its rows, int64, and uint64 [rows, words].

        Only rows that are compared have a signature.
        """
        for part in self.slices:
            for batch in _open(part).iter_batches(BLOCK_ROWS, part.groups, ["signature"], use_threads=False):
                column = batch.column(0)
                _, offsets, data = column.buffers()
                begins = (
                    np.frombuffer(offsets, np.int64)[column.offset : column.offset + len(column) + 1] // 8
                )
                words = int(np.diff(begins).max(initial=1))
                values = np.frombuffer(data or b"", np.uint64)[begins[0] : begins[-1]]
                yield (begins[:-1] - begins[0]) // words, values.reshape(-1, words)


def divide_rows(parts: Sequence[ScanPart]) -> list[RowUnit]:
    """Return the rows of all parts as units, at least one: the same for any number of jobs."""
    units: list[RowUnit] = []
    slices: list[Slice] = []
    first = rows = 0
    for part in parts:
        begin = 0
        for number, size in enumerate(part.groups, 1):
            rows += size
            full = rows >= UNIT_ROWS
            if full or number == len(part.groups):
                slices.append(Slice(part.path, range(begin, number), sum(part.groups[begin:number])))
                begin = number
            if full:
                units.append(RowUnit(first, rows, tuple(slices)))
                first += rows
                rows = 0
                slices = []
    if slices or not units:
        units.append(RowUnit(first, rows, tuple(slices)))
    return units


def _open(part: Slice) -> pq.ParquetFile:
    return pq.ParquetFile(part.path, buffer_size=PAGE_BYTES)
