"""The plan: which rows each shard takes, as Parquet: a row for each row that is used, in order of the shards.

Its metadata hold the pieces that rows are read in, and a summary of what became of all rows. A job reads the
row groups that have rows of its shards.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterator
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from emo.common.errors import UserError
from emo.common.files import part_file
from emo.data_prep.arrow import array_of, numbers_of
from emo.data_prep.inputs import AGAIN, Extent, Input
from emo.data_prep.rows import Payload, RowSpec

PASSES = 1024  # times that a shard's sources are gone through at most, to spread the copies of rows
GROUP = 1 << 17  # rows of a row group
LARGEST = 1 << 30  # bytes of what its metadata say at most
ROWS = {"row": pa.int64(), "shard": pa.int32(), "copies": pa.uint16()}  # shard: counted through all splits
SAMPLED = 16  # extents that a sample is from, and rows of each


class Part(NamedTuple):
    """Rows that a shard takes of a payload."""

    name: str  # of the input
    payload: Payload
    spec: RowSpec
    check: int  # checksum that the payload had when it was scanned
    copies: np.ndarray  # uint16 [rows of the payload]; 0: not of this shard
    domain: str  # of all of its rows


class Rows(NamedTuple):
    """Rows that are used."""

    row: np.ndarray  # int64, ascending within a shard
    shard: np.ndarray  # int32
    copies: np.ndarray  # uint16: times that a row is used


class Plan:
    """The rows that each shard takes; `path` holds ROWS, in order of shard and row."""

    def __init__(self, path: Path, pieces: np.ndarray, summary: dict[str, Any]) -> None:
        """pieces: int64 [pieces, 5], input, start, length, rows, checksum.

        summary: per source identity and counts; rejected rows by reason; characters per split.
        """
        self.path, self.pieces, self.summary = path, pieces, summary
        self.ends = np.cumsum(pieces[:, 3])  # the row after the last of each piece
        self._group = lru_cache(maxsize=2)(self._read_group)
        limits: Any = {"thrift_string_size_limit": LARGEST, "thrift_container_size_limit": LARGEST}
        with pq.ParquetFile(path, **limits) as file:
            self._metadata = file.metadata
        groups = [self._metadata.row_group(number) for number in range(self._metadata.num_row_groups)]
        self._starts = np.cumsum([0, *(group.num_rows for group in groups)])
        column = self._metadata.schema.names.index("shard")
        bounds = [group.column(column).statistics for group in groups]
        self._bounds = [(int(bound.min), int(bound.max)) for bound in bounds]  # shards of each group

    def save(self, path: Path) -> None:
        """Write it, whole or not at all."""
        schema = pa.schema(list(ROWS.items()))
        options: Any = {"compression": "zstd", "write_page_checksum": True}
        summary = {"summary": self.summary, "pieces": self.pieces.ravel().tolist()}
        packed = base64.b64encode(zlib.compress(json.dumps(summary).encode(), 1))  # whose checksum is checked
        with part_file(path) as file, pq.ParquetWriter(file, schema, **options) as writer:
            for number in range(len(self._bounds)):
                arrays = [array_of(column) for column in self._group(number)]
                writer.write_table(pa.Table.from_arrays(arrays, schema=schema), GROUP)
            writer.add_key_value_metadata({"plan": packed.decode()})

    @staticmethod
    def load(path: Path) -> Plan:
        """Return the plan that `save` wrote. Raises ValueError and others where it is damaged."""
        limits: Any = {"thrift_string_size_limit": LARGEST, "thrift_container_size_limit": LARGEST}
        with pq.ParquetFile(path, **limits) as file:
            packed = base64.b64decode(file.metadata.metadata[b"plan"], validate=True)
        unpacker = zlib.decompressobj()
        text = unpacker.decompress(packed, LARGEST)
        if not unpacker.eof:
            raise ValueError("what it says of its rows is cut")
        tree = json.loads(text)
        return Plan(path, np.array(tree["pieces"], np.int64).reshape(-1, 5), tree["summary"])

    def _read_group(self, number: int) -> Rows:
        try:
            with pq.ParquetFile(self.path, metadata=self._metadata, page_checksum_verification=True) as file:
                table = file.read_row_group(number, columns=list(ROWS))
            return Rows(*(numbers_of(table[name]) for name in ROWS))
        except (OSError, ValueError, KeyError, pa.ArrowException) as error:
            raise UserError(f"{self.path} is damaged ({error}); {AGAIN}", code="plan-damaged") from None

    def rows(self, first: int, last: int) -> Rows:
        """Return the rows of the shards from `first` to before `last`, in order."""
        parts = [Rows(*(np.zeros(0, kind.to_pandas_dtype()) for kind in ROWS.values()))]
        for number, (least, most) in enumerate(self._bounds):
            if least < last and most >= first:
                group = self._group(number)
                begin, end = np.searchsorted(group.shard, (first, last)).tolist()
                parts.append(Rows(*(column[begin:end] for column in group)))
        return Rows(*(np.concatenate(column) for column in zip(*parts, strict=True)))

    def inputs_of(self, rows: np.ndarray) -> np.ndarray:
        """Return the numbers of the inputs that rows are from, int64."""
        return self.pieces[np.searchsorted(self.ends, rows, side="right"), 0]

    def part_sizes(self, shard: int, sizes: np.ndarray) -> int:
        """Return the sum over what `parts` yields of the sizes of the pieces, int64 [pieces]."""
        passes = (
            np.unique(np.searchsorted(self.ends, rows, side="right")) for rows, _ in self._passes(shard)
        )
        return sum(int(sizes[pieces].sum()) for pieces in passes)

    def parts(self, inputs: list[Input], shard: int) -> Iterator[Part]:
        """Yield what shard `shard` (counted through all splits) encodes, in order."""
        for rows, times in self._passes(shard):
            yield from self._read(inputs, rows, times)

    def once(self, inputs: list[Input], rows: np.ndarray) -> Iterator[Part]:
        """Yield some rows, int64, ascending, each once."""
        return self._read(inputs, rows, np.ones(len(rows), np.int64))

    def training(self, inputs: list[Input], shards: int, step: int = 1) -> Iterator[Part]:
        """Yield every `step`-th training row, each once; `shards` of a split."""
        count = 0
        for shard in range(shards):
            rows = self.rows(shard, shard + 1).row
            yield from self.once(inputs, rows[-count % step :: step])
            count += len(rows)

    def sample(self) -> np.ndarray:
        """Return some rows that are used, int64, ascending: runs of them from all over the plan."""
        runs = []
        for position in np.linspace(0, max(0, self._starts[-1] - SAMPLED), SAMPLED).astype(np.int64).tolist():
            group = int(np.searchsorted(self._starts, position, side="right")) - 1
            begin = position - int(self._starts[group])
            runs.append(self._group(group).row[begin : begin + SAMPLED])
        return np.unique(np.concatenate(runs))

    def _passes(self, shard: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield a shard's rows and how often each comes, int64, in each pass over its sources.

        The copies of a row are spread evenly over the passes; a row without copies comes in the pass that
        corresponds to its place, so that those keep their order.
        """
        rows, _, copies = self.rows(shard, shard + 1)
        copies = copies.astype(np.int64)  # the products below are larger than uint16
        passes = min(int(copies.max(initial=0)), PASSES)
        position = (np.arange(len(rows)) + 0.5) / max(1, len(rows))
        before = np.zeros(len(rows), np.int64)
        for number in range(1, passes + 1):
            due = copies if passes == 1 else np.ceil(number * copies / passes - position).astype(np.int64)
            times = due - before
            before = due
            yield rows[times > 0], times[times > 0]

    def _read(self, inputs: list[Input], rows: np.ndarray, times: np.ndarray) -> Iterator[Part]:
        """Yield rows, ascending, as often as they come, read from their inputs."""
        pieces, begins = np.unique(np.searchsorted(self.ends, rows, side="right"), return_index=True)
        bounds = [*begins.tolist(), len(rows)]
        numbered = list(enumerate(pieces.tolist()))
        for number, group in groupby(numbered, lambda item: int(self.pieces[item[1], 0])):
            members = list(group)
            opened = inputs[number]
            extents = (Extent(*self.pieces[piece, 1:3].tolist()) for _, piece in members)
            for (i, piece), payload in zip(members, opened.read(extents), strict=True):
                part = slice(bounds[i], bounds[i + 1])
                count, check = self.pieces[piece, 3:].tolist()
                copies = np.zeros(count, np.uint16)
                copies[rows[part] - (self.ends[piece] - count)] = times[part]
                yield Part(opened.name, payload, opened.spec, check, copies, opened.source.domain_name)
