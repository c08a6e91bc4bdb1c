"""The plan: which rows each shard takes, as Parquet: a row for each piece, with its rows' shards and copies.

A job reads the pieces' places whole, and of the lists the row groups that have rows of its shards.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from common.errors import UserError
from common.files import part_file
from data_prep.arrow import array_of, lists_of, numbers_of
from data_prep.inputs import AGAIN, Input, Place
from data_prep.rows import Payload, RowSpec
from data_prep.scan.parts import PIECES

PASSES = 1024  # times that a shard's sources are gone through at most, to spread the copies of rows
STRETCH = 1 << 17  # rows that are looked at together, in whole pieces: a row group of the plan
LARGEST = 1 << 30  # bytes of what its end says at most
MOST_ROWS = 1 << 24  # of a row group
SCHEMA = pa.schema(
    [
        *((name, pa.int64()) for name in PIECES),
        ("shard", pa.list_(pa.int32())),
        ("copies", pa.list_(pa.uint16())),
    ]
)


class Part(NamedTuple):
    """Rows that a shard takes of a payload."""

    name: str  # of the input
    payload: Payload
    spec: RowSpec
    check: int  # checksum that the payload had when it was scanned
    copies: np.ndarray  # uint16 [rows of the payload]; 0: not of this shard
    domain: str  # of all of its rows


class Extent(NamedTuple):
    """Where a shard's rows are."""

    begin: int  # its first row
    end: int  # the row after its last
    rows: int
    most: int  # copies of a row


class Column:
    """Numbers of a plan on disk, one for each row; slices of it are read."""

    def __init__(self, path: Path, name: str, metadata: pq.FileMetaData, begins: np.ndarray) -> None:
        """begins: the first row of each row group, and the number of rows."""
        self._path, self._name, self._metadata, self._begins = path, name, metadata, begins

    def __len__(self) -> int:
        return int(self._begins[-1])

    def __getitem__(self, part: slice) -> np.ndarray:
        begin, end, _ = part.indices(len(self))
        first = max(0, int(np.searchsorted(self._begins, begin, side="right")) - 1)
        last = int(np.searchsorted(self._begins, end))
        found = [np.zeros(0, str(SCHEMA.field(self._name).type.value_type))]
        try:
            with pq.ParquetFile(self._path, metadata=self._metadata, page_checksum_verification=True) as file:
                for group in range(first, last) if begin < end else ():
                    found.append(numbers_of(file.read_row_group(group, columns=[self._name])[self._name]))
        except (OSError, ValueError, pa.ArrowException) as error:
            raise UserError(f"{self._path} is damaged ({error}); {AGAIN}", code="plan-damaged") from None
        if begin < end and sum(map(len, found)) != self._begins[last] - self._begins[first]:
            raise UserError(f"{self._path} is damaged; {AGAIN}", code="plan-damaged")
        start = int(self._begins[first])
        return np.concatenate(found)[begin - start : end - start]


@dataclass(frozen=True)
class Assignment:
    """Which rows of which pieces each shard takes."""

    pieces: np.ndarray  # int64 [pieces, 5]: input, start, length, rows, checksum
    shard: Column | np.ndarray  # int32 [rows]: shard, counted through all splits; -1: unused
    copies: Column | np.ndarray  # uint16 [rows]: times that a row is used
    summary: dict[str, Any]  # per source: identity, counts; rejected rows by reason; rows per split
    saved_extents: dict[int, Extent] | None = None

    def save(self, path: Path) -> None:
        """Write it, whole or not at all."""
        extents = {shard: list(extent) for shard, extent in self.extents.items()}
        text = json.dumps({"summary": self.summary, "extents": extents})
        packed = base64.b64encode(zlib.compress(text.encode()))  # whose checksum is checked
        with part_file(path) as file:
            options = {"compression": "zstd", "write_page_checksum": True}
            with pq.ParquetWriter(file, SCHEMA, **options) as writer:
                for first, last in self._groups:
                    places = self.pieces[first:last]
                    end = int(self.ends[last - 1])
                    part = slice(end - int(places[:, 3].sum()), end)
                    offsets = np.append(0, np.cumsum(places[:, 3]))
                    lists = (
                        lists_of(offsets, np.asarray(column[part])) for column in (self.shard, self.copies)
                    )
                    writer.write_table(
                        pa.Table.from_arrays([*map(array_of, places.T), *lists], schema=SCHEMA)
                    )
                writer.add_key_value_metadata({"plan": packed.decode()})

    @staticmethod
    def load(path: Path) -> Assignment:
        """Return the assignment that `save` wrote. Raises ValueError and others where it is damaged."""
        limits = {"thrift_string_size_limit": LARGEST, "thrift_container_size_limit": LARGEST}
        with pq.ParquetFile(path, page_checksum_verification=True, **limits) as file:
            metadata = file.metadata
            if metadata.num_rows > path.stat().st_size:  # a piece takes some bytes, however it is packed
                raise ValueError("it holds more pieces than bytes")
            table = file.read(columns=list(PIECES))
        unpacker = zlib.decompressobj()
        text = unpacker.decompress(base64.b64decode(metadata.metadata[b"plan"], validate=True), LARGEST)
        if not unpacker.eof:
            raise ValueError("what it says of its rows is cut")
        tree = json.loads(text)
        extents = {int(shard): Extent(*extent) for shard, extent in tree["extents"].items()}
        pieces = np.stack([numbers_of(table[name]) for name in PIECES], axis=1)
        last = np.cumsum([metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)], dtype=int)
        begins = np.append(0, np.cumsum(pieces[:, 3])[last - 1])
        if (np.diff(begins) > MOST_ROWS).any():
            raise ValueError("it holds more rows than is written together")
        shard, copies = (Column(path, name, metadata, begins) for name in ("shard", "copies"))
        return Assignment(pieces, shard, copies, tree["summary"], extents)

    @cached_property
    def ends(self) -> np.ndarray:
        """The row after the last of each piece, int64 [pieces]."""
        return np.cumsum(self.pieces[:, 3])

    @cached_property
    def _groups(self) -> list[tuple[int, int]]:
        """First piece, and the piece after the last, of stretches of about STRETCH rows."""
        groups, first = [], 0
        while first < len(self.pieces):
            start = int(self.ends[first] - self.pieces[first, 3])
            last = max(first + 1, int(np.searchsorted(self.ends, start + STRETCH, side="right")))
            groups.append((first, last))
            first = last
        return groups

    @cached_property
    def extents(self) -> dict[int, Extent]:
        """Of each shard that has rows."""
        if self.saved_extents is not None:
            return self.saved_extents
        found: dict[int, Extent] = {}
        for part in self._stretches(0, len(self.shard)):
            shard, copies = self.shard[part], self.copies[part]
            used = np.flatnonzero(shard >= 0)
            order = used[np.argsort(shard[used], kind="stable")]
            numbers, begins = np.unique(shard[order], return_index=True)
            bounds = np.append(begins, len(order))
            for i, number in enumerate(numbers.tolist()):
                own = order[bounds[i] : bounds[i + 1]]
                end, most = part.start + int(own[-1]) + 1, int(copies[own].max())
                known = found.get(number, Extent(part.start + int(own[0]), 0, 0, 0))
                found[number] = Extent(known.begin, end, known.rows + len(own), max(known.most, most))
        return found

    def inputs_of(self, rows: np.ndarray) -> np.ndarray:
        """Numbers of the inputs that rows are from, int64."""
        return self.pieces[np.searchsorted(self.ends, rows, side="right"), 0]

    def restricted(
        self, shard: np.ndarray, copies: np.ndarray, left_out: np.ndarray, shards: int
    ) -> Assignment:
        """Another assignment of the same rows, `left_out` of which were used before; `shards` of a split."""
        summary = json.loads(json.dumps(self.summary))
        gone = np.bincount(self.inputs_of(left_out), minlength=len(summary["sources"])).tolist()
        used = np.flatnonzero((shard >= 0) & (shard < shards))
        times = np.bincount(self.inputs_of(used), copies[used], len(summary["sources"])).tolist()
        for source, less, train in zip(summary["sources"], gone, times, strict=True):
            source["train"] = int(train)
            _add_limit(source["rejected"], less)
        _add_limit(summary["rejected"], len(left_out))
        return Assignment(self.pieces, shard, copies, summary)

    def part_sizes(self, shard: int, sizes: np.ndarray) -> int:
        """The sum over what `parts` yields of the sizes of the pieces, int64 [pieces]."""
        chunks = (chunk for one in self._passes(shard) for chunk in self._due(shard, one))
        return sum(int(sizes[self._by_piece(rows)[0]].sum()) for rows, _ in chunks)

    def parts(self, inputs: list[Input], shard: int) -> Iterator[Part]:
        """What shard `shard` (counted through all splits) encodes, in order."""
        for one in self._passes(shard):
            yield from self._read(inputs, self._due(shard, one))

    def once(self, inputs: list[Input], rows: np.ndarray) -> Iterator[Part]:
        """Some rows, int64, ascending, each once."""
        return self._read(inputs, [(rows, np.ones(len(rows), np.int64))])

    def training(self, inputs: list[Input], shards: int, step: int = 1) -> Iterator[Part]:
        """Yield every `step`-th training row, each once; `shards` of a split."""

        def chunks() -> Iterator[tuple[np.ndarray, np.ndarray]]:
            count = 0
            for part in self._stretches(0, len(self.shard)):
                shard = self.shard[part]
                rows = part.start + np.flatnonzero((shard >= 0) & (shard < shards))
                chosen = rows[-count % step :: step]
                count += len(rows)
                yield chosen, np.ones(len(chosen), np.int64)

        return self._read(inputs, chunks())

    def _passes(self, shard: int) -> range:
        """Numbers of the passes over a shard's sources."""
        most = self.extents[shard].most if shard in self.extents else 0
        return range(1, min(most, PASSES) + 1)

    def _due(self, shard: int, one: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """A shard's rows and how often each comes in a pass over its sources, int64, some at a time.

        The copies of a row are spread evenly over the passes; a row without copies comes in the pass that
        corresponds to its place, so that those keep their order.
        """
        extent = self.extents[shard]
        passes = min(extent.most, PASSES)
        before = 0
        for part in self._stretches(extent.begin, extent.end):
            rows = np.flatnonzero(self.shard[part] == shard)
            copies = self.copies[part][rows].astype(np.int64)  # the products below are larger than uint16
            place = (before + np.arange(len(rows)) + 0.5) / extent.rows
            before += len(rows)
            times = copies if passes == 1 else _share(copies, place, one, passes)
            some = times > 0
            yield part.start + rows[some], times[some]

    def _stretches(self, begin: int, end: int) -> Iterator[slice]:
        """Yield slices that cover some rows and cut no piece in two."""
        for first, last in self._groups:
            part = slice(int(self.ends[first] - self.pieces[first, 3]), int(self.ends[last - 1]))
            if part.start < end and part.stop > begin:
                yield part

    def _by_piece(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The pieces of some rows, and where each one's rows begin among them."""
        return np.unique(np.searchsorted(self.ends, rows, side="right"), return_index=True)

    def _read(self, inputs: list[Input], chunks: Iterable[tuple[np.ndarray, np.ndarray]]) -> Iterator[Part]:
        """Rows and how often each comes, read from their inputs. No piece is in two chunks."""
        taken = (one for rows, times in chunks for one in self._copies(rows, times))
        for number, own in groupby(taken, lambda one: int(self.pieces[one[0], 0])):
            waiting: deque[tuple[int, np.ndarray]] = deque()
            for payload in inputs[number].read(self._places(own, waiting)):
                piece, copies = waiting.popleft()
                one, check = inputs[number], int(self.pieces[piece, 4])
                yield Part(one.name, payload, one.spec, check, copies, one.source.domain_name)

    def _places(
        self, taken: Iterable[tuple[int, np.ndarray]], waiting: deque[tuple[int, np.ndarray]]
    ) -> Iterator[Place]:
        """Places of pieces, each of which is put into `waiting` as its place is asked for."""
        for one in taken:
            waiting.append(one)
            yield Place(*self.pieces[one[0], 1:3].tolist())

    def _copies(self, rows: np.ndarray, times: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """Pieces, and how often each of a piece's rows is taken, uint16."""
        pieces, begins = self._by_piece(rows)
        bounds = np.append(begins, len(rows))
        for i, piece in enumerate(pieces.tolist()):
            part = slice(bounds[i], bounds[i + 1])
            count = int(self.pieces[piece, 3])
            copies = np.zeros(count, np.uint16)
            copies[rows[part] - (self.ends[piece] - count)] = times[part]
            yield piece, copies


def _share(copies: np.ndarray, place: np.ndarray, one: int, passes: int) -> np.ndarray:
    """How many of a row's copies come in pass `one`, from 1: int64 [rows]."""
    due, done = (np.ceil(i * copies / passes - place).astype(np.int64) for i in (one, one - 1))
    return due - done


def _add_limit(rejected: dict[str, int], count: int) -> None:
    if count:
        rejected["limit"] = rejected.get("limit", 0) + count
