"""Files of records in buckets, by which units exchange rows. A unit of a stage reads one bucket of all files.

A record has one or more numbers, uint64. A file has chunks, each with its records in order of the buckets.
The offsets of the buckets follow the chunks, and then the width of a record and the numbers of buckets and
chunks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from emo.common.io.files import part_file

BATCH_BYTES = 16 << 20  # of records that are held at once
_TRAILER = 3  # numbers

Chunk = tuple[np.ndarray, np.ndarray]  # uint64 [records, width], and the bucket of each


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
            offsets.append(written + np.append(0, np.cumsum(sizes)))
            written += len(records)
        file.write(np.concatenate([*offsets, [width, buckets, len(offsets)]]).astype(np.int64).data)


def read_buckets(paths: Iterable[Path], bucket: int, chunk: int | None = None) -> Iterator[np.ndarray]:
    """Yield the records of a bucket of all files, in order and in batches.

    chunk: the only chunk to read.
    """
    waiting: list[np.ndarray] = []
    size = 0
    for path in paths:
        with path.open("rb") as file:
            file.seek(-8 * _TRAILER, 2)
            end = file.tell()
            width, buckets, chunks = np.frombuffer(file.read(8 * _TRAILER), np.int64).tolist()
            for number in range(chunks) if chunk is None else (chunk,):
                file.seek(end - 8 * ((chunks - number) * (buckets + 1) - bucket))
                position, last = np.frombuffer(file.read(16), np.int64).tolist()
                while position < last:
                    count = min(last - position, max(1, (BATCH_BYTES - size) // (8 * width)))
                    file.seek(8 * width * position)
                    waiting.append(np.frombuffer(file.read(8 * width * count), np.uint64).reshape(-1, width))
                    position += count
                    size += waiting[-1].nbytes
                    if size >= BATCH_BYTES:
                        yield np.concatenate(waiting)
                        waiting = []
                        size = 0
    if waiting:
        yield np.concatenate(waiting)
