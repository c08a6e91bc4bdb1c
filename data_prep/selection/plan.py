"""The plan: which rows are used, how often, and in which shard.

One Parquet file has a row for each used row (COLUMNS), in order of the shards. The other has the pieces that
rows are read in (PIECES), and its metadata a summary of all rows. A job reads the row groups of both that its
shards need, one after another. select.py makes the plan.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import groupby, tee
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
ROWS = "rows.parquet"  # next to the file of pieces
COLUMNS = {"row": pa.int64(), "shard": pa.int32(), "copies": pa.uint16()}  # shard: counted through all splits
# first: its first row. check: checksum of the payload
PIECES = dict.fromkeys(("first", "input", "start", "length", "rows", "check"), pa.int64())
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


class PlannedPiece(NamedTuple):
    """A row of PIECES."""

    first: int
    input: int
    start: int
    length: int
    rows: int
    check: int


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
    contamination: NotRequired[str]  # digest of the task rows
    tokenizer: NotRequired[dict[str, Any]]  # TokenizerFacts
    by_words: NotRequired[bool]  # whether words may be encoded separately
    token_quotas: NotRequired[list[int]]  # most tokens of each training shard, if data.limit_tokens is set


class Plan:
    """The rows that each shard takes."""

    def __init__(self, path: Path, summary: Summary) -> None:
        """Args:
        path: the file with PIECES, in order. The file with COLUMNS is next to it.
        summary: the counts of all rows.
        """
        self.path = path
        self.summary = summary
        self.input_ends = np.cumsum([source["rows"] for source in summary["sources"]])
        self._rows = _Table(path.with_name(ROWS), COLUMNS)
        self._pieces = _Table(path, PIECES)

    def save(self, path: Path) -> None:
        """Write pieces and summary to a local file, completely or not at all."""
        tree = json.dumps({"summary": self.summary}).encode()
        packed = base64.b64encode(zlib.compress(tree, 1))  # has a checksum
        pieces = self._pieces.read("first", 0, self.input_ends[-1])
        write_table(path, PIECES, pieces, {"plan": packed.decode()})

    @staticmethod
    def load(path: Path) -> Plan:
        """Return the plan that `save` wrote. Raises ValueError and other errors for a damaged file."""
        with _open_parquet(path) as file:
            packed = base64.b64decode(file.metadata.metadata[b"plan"], validate=True)
        return Plan(path, json.loads(zlib.decompress(packed))["summary"])

    @property
    def pieces(self) -> int:
        """The number of pieces."""
        return self._pieces.metadata.num_rows

    def rows(self, first: int, last: int) -> Iterator[PlannedRows]:
        """Yield the rows of the shards from `first` to before `last`, in order and in batches."""
        for batch in self._rows.read("shard", first, last - 1):
            rows = PlannedRows(*batch)
            begin, end = np.searchsorted(rows.shard, (first, last)).tolist()
            yield PlannedRows(*(column[begin:end] for column in rows))

    def inputs_of(self, rows: np.ndarray) -> np.ndarray:
        """Return the number of the input of each row, int64."""
        return np.searchsorted(self.input_ends, rows, side="right")

    def parts(self, inputs: list[SourceReader], shard: int) -> Iterator[ShardPart]:
        """Yield the rows that shard `shard` (counted through all splits) encodes, in order.

        Its sources are read in passes, over which the copies of a row are spread evenly. A row without copies
        comes in the pass that corresponds to its position, so that these rows keep their order.
        """
        total = most = 0
        for batch in self.rows(shard, shard + 1):
            total += len(batch.row)
            most = max(most, int(batch.copies.max(initial=0)))
        passes = min(most, MAX_PASSES)

        def times(number: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
            """Yield the rows of a pass, and how often each is used in it."""
            before = 0
            for batch in self.rows(shard, shard + 1):
                copies = batch.copies.astype(np.int64)  # the products below are larger than uint16
                position = (np.arange(before, before + len(copies)) + 0.5) / total
                before += len(copies)
                if passes > 1:
                    due = np.ceil(np.array([[number - 1], [number]]) * copies / passes - position)
                    due[0] *= number > 1
                    copies = (due[1] - due[0]).astype(np.int64)
                yield batch.row[copies > 0], copies[copies > 0]

        done = 0
        for number in range(1, passes + 1):
            for part in self._read(inputs, times(number)):
                yield part._replace(shard=shard, number=done)
                done += 1

    def read_once(self, inputs: list[SourceReader], rows: np.ndarray) -> Iterator[ShardPart]:
        """Yield some rows, int64, ascending, each once."""
        return self._read(inputs, [(rows, np.ones(len(rows), np.int64))])

    def training_sample(self, inputs: list[SourceReader], shards: int, step: int = 1) -> Iterator[ShardPart]:
        """Yield every `step`-th training row once. `shards`: the number of training shards."""

        def sampled() -> Iterator[tuple[np.ndarray, np.ndarray]]:
            count = 0
            for batch in self.rows(0, shards):
                rows = batch.row[-count % step :: step]
                count += len(batch.row)
                yield rows, np.ones(len(rows), np.int64)

        return self._read(inputs, sampled())

    def sample(self) -> np.ndarray:
        """Return some used rows, int64, ascending: runs of rows from all over the plan."""
        taken = []
        last = int(self._rows.bounds("shard")[-1, 1])
        shards = np.unique(np.linspace(0, last, SAMPLED).astype(np.int64)).tolist()
        for shard in shards:
            total = sum(len(batch.row) for batch in self.rows(shard, shard + 1))
            begins = np.linspace(0, max(0, total - SAMPLED), -(-SAMPLED // len(shards))).astype(np.int64)
            wanted = (begins[:, None] + np.arange(SAMPLED)).ravel()
            for batch in self.rows(shard, shard + 1):
                taken.append(batch.row[wanted[(wanted >= 0) & (wanted < len(batch.row))]])
                wanted -= len(batch.row)
        return np.unique(np.concatenate(taken))

    def _read(
        self, inputs: list[SourceReader], batches: Iterable[tuple[np.ndarray, np.ndarray]]
    ) -> Iterator[ShardPart]:
        """Yield rows in ascending order, read from their inputs.

        batches: rows, and how often each is used.
        """
        for number, group in groupby(self._locate(batches), lambda located: located[0].input):
            reader = inputs[number]
            members, same = tee(group)
            extents = (Extent(piece.start, piece.length) for piece, _, _ in members)
            # The extents come first, because a reader looks at the next one before it ends.
            for payload, (piece, rows, times) in zip(reader.read(extents), same, strict=True):
                copies = np.zeros(piece.rows, np.uint16)
                copies[rows - piece.first] = times
                domain = reader.source.domain_name
                yield ShardPart(reader.name, payload, reader.spec, piece.check, copies, domain)

    def _locate(
        self, batches: Iterable[tuple[np.ndarray, np.ndarray]]
    ) -> Iterator[tuple[PlannedPiece, np.ndarray, np.ndarray]]:
        """Yield each piece that has some of the rows, with these rows, and how often each is used."""
        held: tuple[PlannedPiece, np.ndarray, np.ndarray] | None = None
        for rows, times in batches:
            for pieces in self._pieces.read("first", *rows[[0, -1]].tolist()) if len(rows) else ():
                begin, end = np.searchsorted(rows, (pieces[0][0], pieces[0][-1] + pieces[4][-1])).tolist()
                at = np.searchsorted(pieces[0], rows[begin:end], side="right") - 1
                numbers, begins = np.unique(at, return_index=True)
                bounds = begin + np.append(begins, end - begin)
                for number, first, last in zip(numbers.tolist(), bounds, bounds[1:], strict=False):
                    piece = PlannedPiece(*(int(column[number]) for column in pieces))
                    part = piece, rows[first:last], times[first:last]
                    if held is not None and held[0] == piece:
                        part = piece, np.append(held[1], part[1]), np.append(held[2], part[2])
                    elif held is not None:
                        yield held
                    held = part
        if held is not None:
            yield held


class _Table:
    """A Parquet file of whole numbers that is read by row groups."""

    def __init__(self, path: Path, columns: Mapping[str, pa.DataType]) -> None:
        self.path = path
        self.columns = list(columns)
        self._last: tuple[int, list[np.ndarray]] | None = None  # shards often read the same row group

    @cached_property
    def metadata(self) -> pq.FileMetaData:
        """The metadata of the file about its row groups."""
        with _open_parquet(self.path) as file:
            return file.metadata

    def bounds(self, name: str) -> np.ndarray:
        """Return the smallest and the largest number of a column in each row group, int64 [groups, 2]."""
        column = self.columns.index(name)
        numbers = range(self.metadata.num_row_groups)
        found = (self.metadata.row_group(number).column(column).statistics for number in numbers)
        return np.array([(int(each.min), int(each.max)) for each in found], np.int64).reshape(-1, 2)

    def read(self, name: str, low: int, high: int) -> Iterator[list[np.ndarray]]:
        """Yield the columns of the row groups that may have numbers of an ascending column in a range.

        The number before the range counts too, as its row may reach into it.
        """
        bounds = self.bounds(name)
        reach = np.append(bounds[1:, 0], np.iinfo(np.int64).max)
        for group in np.flatnonzero((bounds[:, 0] <= high) & (reach >= low)).tolist():
            yield self._read_group(group)

    def _read_group(self, group: int) -> list[np.ndarray]:
        if self._last is None or self._last[0] != group:
            try:
                with pq.ParquetFile(
                    self.path, metadata=self.metadata, page_checksum_verification=True
                ) as file:
                    table = file.read_row_group(group, self.columns, use_threads=False)
            except (OSError, ValueError, pa.ArrowException) as error:
                raise UserError(f"{self.path} is damaged ({error}); {AGAIN}", code="plan-damaged") from None
            self._last = group, [numbers_of(table[name]) for name in self.columns]
        return self._last[1]


def write_table(
    path: Path,
    columns: Mapping[str, pa.DataType],
    batches: Iterable[Sequence[np.ndarray]],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write columns of numbers to a local file in row groups of GROUP_ROWS, completely or not at all."""
    schema = pa.schema(list(columns.items()))
    table = pa.Table.from_batches([], schema)
    options: Any = {"compression": "zstd", "write_page_checksum": True}
    with part_file(path, Path.replace) as file, pq.ParquetWriter(file, schema, **options) as writer:
        for batch in batches:
            kinds = zip(batch, columns.values(), strict=True)
            arrays = [array_of(values.astype(str(kind), copy=False)) for values, kind in kinds]
            table = pa.concat_tables([table, pa.Table.from_arrays(arrays, schema=schema)])
            while table.num_rows >= GROUP_ROWS:
                writer.write_table(table.slice(0, GROUP_ROWS))
                table = table.slice(GROUP_ROWS)
        if table.num_rows:
            writer.write_table(table)
        writer.add_key_value_metadata(metadata or {})


def _open_parquet(path: Path) -> pq.ParquetFile:
    """Open a Parquet file of rows, with limits that allow the summary of millions of files."""
    limits: Any = {"thrift_string_size_limit": MAX_METADATA, "thrift_container_size_limit": MAX_METADATA}
    return pq.ParquetFile(path, page_checksum_verification=True, **limits)
