"""Files of records in buckets, by which units exchange rows. A unit of a stage reads one bucket of all files.

A record has one or more numbers, uint64. A file has chunks, each with its records in order of the buckets.
The offset and the checksum of each bucket of each chunk follow the chunks, and then the width of a record,
the numbers of buckets and chunks, and a checksum of these three.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from emo.common.io.files import part_file

BATCH_BYTES = 16 << 20  # of records that are held at once
_TRAILER = 4  # numbers
_EMPTY = (
    0x9E3779B97F4A7C15  # checksum of an empty bucket. It is not 0, so that a file of zeros counts as damaged
)

Chunk = tuple[np.ndarray, np.ndarray]  # uint64 [records, width], and the bucket of each


class DamagedError(Exception):
    """A file of records is missing, or differs from what was written."""

    def __init__(self, path: Path) -> None:
        super().__init__(f"{path} is damaged")
        self.path = path


def write_buckets(path: Path, buckets: int, chunks: Iterable[Chunk]) -> None:
    """Write chunks of records to a file, completely or not at all. buckets: their number."""
    offsets: list[np.ndarray] = []
    written = 0
    width = 1
    with part_file(path) as file:
        for records, numbers in chunks:
            width = records.shape[1]
            if buckets > 1:
                small = numbers.astype(np.uint16) if buckets <= 1 << 16 else numbers  # is sorted faster
                records = records[np.argsort(small, kind="stable")]
            file.write(np.ascontiguousarray(records).data)
            sizes = np.bincount(numbers.astype(np.int64), minlength=buckets)
            ends = np.append(0, np.cumsum(sizes))
            sums = np.append(np.uint64(0), np.cumsum(_weighted(records, written)))[ends]
            checks = np.append(np.diff(sums) + np.uint64(_EMPTY), np.uint64(0))
            offsets.append(np.stack([(written + ends).astype(np.uint64), checks], axis=1).ravel())
            written += len(records)
        about = [width, buckets, len(offsets)]
        file.write(np.concatenate([*offsets, np.array([*about, _summary(about)], np.uint64)]).data)


def read_buckets(paths: Iterable[Path], bucket: int, chunk: int | None = None) -> Iterator[np.ndarray]:
    """Yield the records of a bucket of all files, in order and in batches. Raises DamagedError.

    chunk: the only chunk to read, which a file may not have.
    """
    waiting: list[np.ndarray] = []
    size = 0
    for records in itertools.chain.from_iterable(_read_file(path, bucket, chunk) for path in paths):
        if waiting and size + records.nbytes > BATCH_BYTES:
            yield np.concatenate(waiting)
            waiting = []
            size = 0
        waiting.append(records)
        size += records.nbytes
    if waiting:
        yield np.concatenate(waiting)


def _read_file(path: Path, bucket: int, chunk: int | None) -> Iterator[np.ndarray]:
    """Yield the records of a bucket of a file, with at most BATCH_BYTES at a time. Raises DamagedError."""
    try:
        with path.open("rb") as file:
            end = file.seek(0, 2) - 8 * _TRAILER
            file.seek(max(0, end))
            *about, summary = np.frombuffer(file.read(8 * _TRAILER), np.uint64).tolist()
            width, buckets, chunks = about
            _require(summary == _summary(about) and end >= 16 * chunks * (buckets + 1))
            count = max(1, BATCH_BYTES // (8 * width))
            for number in range(chunks) if chunk is None else range(chunks)[chunk : chunk + 1]:
                file.seek(end - 16 * ((chunks - number) * (buckets + 1) - bucket))
                first, check, last, _ = np.frombuffer(file.read(32), np.uint64).tolist()
                for position in range(first, last, count):
                    file.seek(8 * width * position)
                    rows = min(count, last - position)
                    records = np.frombuffer(file.read(8 * width * rows), np.uint64).reshape(rows, width)
                    check -= int(_weighted(records, position).sum())
                    yield records
                _require(check % 2**64 == _EMPTY)
    except (FileNotFoundError, ValueError, OverflowError):
        raise DamagedError(path) from None


def merged(chunks: Iterable[Chunk]) -> Iterator[Chunk]:
    """Join small chunks, because each has an offset for every bucket."""
    waiting: list[Chunk] = []
    size = 0
    for chunk in itertools.chain(chunks, [None]):
        if waiting and (chunk is None or size + chunk[0].nbytes > BATCH_BYTES):
            records, numbers = zip(*waiting, strict=True)
            yield np.concatenate(records), np.concatenate(numbers)
            waiting = []
            size = 0
        if chunk is not None:
            waiting.append(chunk)
            size += chunk[0].nbytes


def _weighted(records: np.ndarray, position: int) -> np.ndarray:
    """Return the sum of each record times an odd number that depends on its position, uint64 [records]."""
    odd = np.arange(position, position + len(records), dtype=np.uint64) * np.uint64(2) + np.uint64(1)
    return records.sum(axis=1, dtype=np.uint64) * odd


def _summary(about: list[int]) -> int:
    return (_EMPTY + sum(number * (2 * i + 3) ** 9 for i, number in enumerate(about))) % 2**64


def _require(condition: bool) -> None:
    if not condition:
        raise ValueError
