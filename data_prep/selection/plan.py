"""The plan: which rows are used, how often, and in which shard.

The plan is a Parquet file with a row for each used row (COLUMNS), in order of the shards. Its metadata hold
the pieces that rows are read in, and a summary of all rows. A job reads the row groups with rows of its
shards. select.py makes the plan.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, NotRequired, TypedDict

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from emo.common.errors import UserError
from emo.common.io.files import part_file

from ..sources.files import AGAIN
from ..sources.reader import Extent, SourceReader
from ..sources.spec import Payload, RowSpec
from .arrow import array_of, numbers_of

MAX_PASSES = 1024  # passes over a shard's sources, to spread the copies of rows
GROUP_ROWS = 1 << 17  # rows of a row group
MAX_METADATA = 1 << 30  # bytes
COLUMNS = {"row": pa.int64(), "shard": pa.int32(), "copies": pa.uint16()}  # shard: counted through all splits
SAMPLED = 16  # approximate number of runs of rows in a sample, and rows of each run


class ShardPart(NamedTuple):
    """The rows that a shard takes from one payload."""

    name: str  # of the source file
    payload: Payload
    spec: RowSpec
    check: int  # checksum of the payload when it was scanned
    copies: np.ndarray  # uint16 [rows of the payload], 0: the shard does not take the row
    domain: str  # of all rows
    shard: int = 0  # counted through all splits
    number: int = 0  # among the parts of the shard


class PlannedRows(NamedTuple):
    """Rows that are used."""

    row: np.ndarray  # int64, ascending within a shard
    shard: np.ndarray  # int32
    copies: np.ndarray  # uint16: how often a row is used


class Summary(TypedDict):
    """The counts of all rows and the facts that shards and manifests need, as JSON."""

    sources: list[dict[str, Any]]  # identity and counts of each source, as in the manifest
    rejected: dict[str, int]  # rows by reason
    chars: dict[str, int]  # characters of the used rows of each split
    notes: NotRequired[list[str]]  # lines for the user, removed before the plan is saved
    chat_template: NotRequired[str]  # digest
    tokenizer: NotRequired[dict[str, Any]]  # TokenizerFacts
    by_words: NotRequired[bool]  # whether words may be encoded separately
    token_quotas: NotRequired[list[int]]  # most tokens of each training shard, if data.limit_tokens is set


class Plan:
    """The rows that each shard takes."""

    def __init__(self, path: Path, pieces: np.ndarray, summary: Summary) -> None:
        """Args:
        path: the Parquet file with COLUMNS, in order of shard and row.
        pieces: int64 [pieces, 5], input, start, length, rows, checksum.
        summary: the counts of all rows.
        """
        self.path = path
        self.pieces = pieces
        self.summary = summary
        self.ends = np.cumsum(pieces[:, 3])  # the row after the last of each piece
        with _open_parquet(path) as file:
            self._metadata = file.metadata
        groups = [self._metadata.row_group(number) for number in range(self._metadata.num_row_groups)]
        column = self._metadata.schema.names.index("shard")
        bounds = [group.column(column).statistics for group in groups]
        self._bounds = [(int(bound.min), int(bound.max)) for bound in bounds]  # shards of each group

    def save(self, path: Path) -> None:
        """Write the plan to a local file, completely or not at all."""
        schema = pa.schema(list(COLUMNS.items()))
        options: Any = {"compression": "zstd", "write_page_checksum": True}
        summary = {"summary": self.summary, "pieces": self.pieces.ravel().tolist()}
        packed = base64.b64encode(zlib.compress(json.dumps(summary).encode(), 1))  # has a checksum
        with (
            _open_parquet(self.path) as rows,
            part_file(path, Path.replace) as file,
            pq.ParquetWriter(file, schema, **options) as writer,
        ):
            for number in range(rows.num_row_groups):
                group = rows.read_row_group(number)
                arrays = [array_of(numbers_of(group[name])) for name in COLUMNS]
                writer.write_table(pa.Table.from_arrays(arrays, schema=schema), GROUP_ROWS)
            writer.add_key_value_metadata({"plan": packed.decode()})

    @staticmethod
    def load(path: Path) -> Plan:
        """Return the plan that `save` wrote. Raises ValueError and other errors for a damaged file."""
        with _open_parquet(path) as file:
            packed = base64.b64decode(file.metadata.metadata[b"plan"], validate=True)
        tree = json.loads(zlib.decompress(packed))
        return Plan(path, np.array(tree["pieces"], np.int64).reshape(-1, 5), tree["summary"])

    def rows(self, first: int, last: int) -> PlannedRows:
        """Return the rows of the shards from `first` to before `last`, in order."""
        groups = [i for i, (low, high) in enumerate(self._bounds) if low < last and high >= first]
        try:
            with pq.ParquetFile(self.path, metadata=self._metadata, page_checksum_verification=True) as file:
                table = file.read_row_groups(groups, columns=list(COLUMNS))
        except (OSError, ValueError, pa.ArrowException) as error:
            raise UserError(f"{self.path} is damaged ({error}); {AGAIN}", code="plan-damaged") from None
        rows = PlannedRows(*(numbers_of(table[name]) for name in COLUMNS))
        begin, end = np.searchsorted(rows.shard, (first, last)).tolist()
        return PlannedRows(*(column[begin:end] for column in rows))

    def inputs_of(self, rows: np.ndarray) -> np.ndarray:
        """Return the number of the input of each row, int64."""
        return self.pieces[np.searchsorted(self.ends, rows, side="right"), 0]

    def parts(self, inputs: list[SourceReader], shard: int) -> Iterator[ShardPart]:
        """Yield the rows that shard `shard` (counted through all splits) encodes, in order.

        Its sources are read in passes, over which the copies of a row are spread evenly. A row without copies
        comes in the pass that corresponds to its position, so that these rows keep their order.
        """
        rows, _, copies = self.rows(shard, shard + 1)
        copies = copies.astype(np.int64)  # the products below are larger than uint16
        passes = min(int(copies.max(initial=0)), MAX_PASSES)
        position = (np.arange(len(rows)) + 0.5) / max(1, len(rows))
        before = np.zeros(len(rows), np.int64)
        done = 0
        for number in range(1, passes + 1):
            due = copies if passes == 1 else np.ceil(number * copies / passes - position).astype(np.int64)
            times = due - before
            before = due
            for part in self._read(inputs, rows[times > 0], times[times > 0]):
                yield part._replace(shard=shard, number=done)
                done += 1

    def read_once(self, inputs: list[SourceReader], rows: np.ndarray) -> Iterator[ShardPart]:
        """Yield some rows, int64, ascending, each once."""
        return self._read(inputs, rows, np.ones(len(rows), np.int64))

    def training_sample(self, inputs: list[SourceReader], shards: int, step: int = 1) -> Iterator[ShardPart]:
        """Yield every `step`-th training row once. `shards`: the number of training shards."""
        count = 0
        for shard in range(shards):
            rows = self.rows(shard, shard + 1).row
            yield from self.read_once(inputs, rows[-count % step :: step])
            count += len(rows)

    def sample(self) -> np.ndarray:
        """Return some used rows, int64, ascending: runs of rows from all over the plan."""
        runs = []
        shards = np.unique(np.linspace(0, self._bounds[-1][1], SAMPLED).astype(np.int64)).tolist()
        for shard in shards:
            rows = self.rows(shard, shard + 1).row
            begins = np.linspace(0, max(0, len(rows) - SAMPLED), -(-SAMPLED // len(shards))).astype(np.int64)
            runs += [rows[begin : begin + SAMPLED] for begin in begins.tolist()]
        return np.unique(np.concatenate(runs))

    def _read(self, inputs: list[SourceReader], rows: np.ndarray, times: np.ndarray) -> Iterator[ShardPart]:
        """Yield rows in ascending order, each `times` often, read from their inputs."""
        pieces, begins = np.unique(np.searchsorted(self.ends, rows, side="right"), return_index=True)
        bounds = [*begins.tolist(), len(rows)]
        numbered = list(enumerate(pieces.tolist()))
        for number, group in groupby(numbered, lambda item: int(self.pieces[item[1], 0])):
            members = list(group)
            reader = inputs[number]
            extents = (Extent(*self.pieces[piece, 1:3].tolist()) for _, piece in members)
            for (i, piece), payload in zip(members, reader.read(extents), strict=True):
                part = slice(bounds[i], bounds[i + 1])
                count, check = self.pieces[piece, 3:].tolist()
                copies = np.zeros(count, np.uint16)
                copies[rows[part] - (self.ends[piece] - count)] = times[part]
                yield ShardPart(reader.name, payload, reader.spec, check, copies, reader.source.domain_name)


def _open_parquet(path: Path) -> pq.ParquetFile:
    """Open a Parquet file of rows, with limits that allow the metadata of millions of pieces."""
    limits: Any = {"thrift_string_size_limit": MAX_METADATA, "thrift_container_size_limit": MAX_METADATA}
    return pq.ParquetFile(path, page_checksum_verification=True, **limits)
