"""A unit's rows as a part on disk, written while they are scanned and believed when its note is there.

000012.pieces   Parquet, a row for each piece: PIECES, its rows' hashes, lengths and reasons as lists
000012.near     signatures of all rows, where near duplicates are looked for
000012.inputs   Parquet, written last: what was seen of each input; in its metadata what it was made from
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from common.errors import UserError
from common.files import part_file
from common.parallel import Workers
from data_prep.arrow import array_of, lists_of, numbers_of, texts_of
from data_prep.inputs import PIECE, Input, TextInput, open_text
from data_prep.rows import CODE, REASONS, UNREADABLE
from data_prep.scan.near import PERMUTATIONS
from data_prep.scan.piece import ScannedPiece
from data_prep.scan.units import Stretch, Unit

PIECES = ("input", "start", "length", "rows", "check")  # int64: place and checksum of a piece
LISTS = {"hash": pa.uint64(), "chars": pa.uint32(), "reason": pa.uint8()}  # of its rows
SCHEMA = pa.schema([*((n, pa.int64()) for n in PIECES), *((n, pa.list_(of)) for n, of in LISTS.items())])
BEYOND_LIMIT = "beyond_limit"  # in the identity of an input that is not read: its source's limit is reached
GROUP = 1 << 17  # rows of a row group, or those of one piece


@dataclass
class Seen:
    """What was seen of an input, in one stretch of it or in all."""

    input: int
    identity: dict[str, Any] = field(default_factory=dict)  # see Input.identity; with its first stretch
    rejected: dict[str, int] = field(default_factory=dict)  # by reason
    rows: int = 0
    messages: int = 0  # of conversations, that were left out
    columns: list[str] = field(default_factory=list)  # that are read; of its first rows
    not_read: list[str] = field(default_factory=list)

    def add(self, other: Seen) -> None:
        """Another stretch of the same input."""
        self.identity |= other.identity
        self.rejected = dict(Counter(self.rejected) + Counter(other.rejected))
        self.rows += other.rows
        self.messages += other.messages
        self.columns += other.columns
        self.not_read += other.not_read


class Rows(NamedTuple):
    """Some rows that follow each other."""

    source: np.ndarray  # int32 [rows]: input that the row is from
    hashes: np.ndarray  # uint64 [rows]
    chars: np.ndarray  # uint32 [rows]
    reasons: np.ndarray  # uint8 [rows]: index into REASONS; 0: usable


@dataclass(frozen=True)
class Part:
    """A whole part."""

    path: Path  # of its files, without their endings
    count: int  # rows
    signed: int  # signatures of each row

    @staticmethod
    def read(place: Path, unit: Unit, key: str) -> Part | None:
        """Return the part of a unit, or None where it has to be made, from what `key` stands for."""
        path = place / unit.name
        try:
            note = json.loads(pq.read_schema(_file(path, "inputs")).metadata[b"note"])
            if note["key"] != key or any(
                _file(path, n).stat().st_size != b for n, b in note["bytes"].items()
            ):
                return None
            return Part(path, int(note["rows"]), int(note["signed"]))
        except (OSError, ValueError, KeyError, TypeError, pa.ArrowException):
            return None

    def seen(self) -> list[Seen]:
        """Return what was seen of each input."""
        with pq.ParquetFile(_file(self.path, "inputs")) as file:
            return [Seen(**json.loads(text)) for text in file.read()["seen"].to_pylist()]

    def pieces(self) -> np.ndarray:
        """Return PIECES of all pieces, int64 [pieces, 5]."""
        with pq.ParquetFile(_file(self.path, "pieces")) as file:
            table = file.read(columns=list(PIECES))
        return np.stack([numbers_of(table[name]) for name in PIECES], axis=1)

    def rows(self) -> Iterator[Rows]:
        """Yield all rows, some at a time."""
        with pq.ParquetFile(_file(self.path, "pieces")) as file:
            for group in range(file.num_row_groups):
                table = file.read_row_group(group, columns=["input", "rows", *LISTS])
                source = np.repeat(numbers_of(table["input"]), numbers_of(table["rows"])).astype(np.int32)
                yield Rows(source, *(numbers_of(table[name]) for name in LISTS))

    def signatures(self) -> np.ndarray:
        """Return the signatures of all rows, mapped: uint32 [rows, signed, PERMUTATIONS]."""
        shape = (self.count, self.signed, PERMUTATIONS)
        if not self.count:
            return np.zeros(shape, np.uint32)
        return np.memmap(_file(self.path, "near"), np.uint32, "r", shape=shape)


def _file(path: Path, ending: str) -> Path:
    return path.with_name(f"{path.name}.{ending}")


class PartWriter:
    """Writes a part: `add` its pieces, then `finish`."""

    def __init__(self, path: Path, files: contextlib.ExitStack) -> None:
        """files: closes and publishes what is written."""
        self.path, self.count, self.signed = path, 0, 0
        self._files = {name: files.enter_context(part_file(_file(path, name))) for name in ("pieces", "near")}
        options = {"compression": "zstd", "use_dictionary": False}
        self._pieces = files.enter_context(pq.ParquetWriter(self._files["pieces"], SCHEMA, **options))
        self._waiting: list[tuple[list[int], ScannedPiece]] = []
        self._waiting_rows = 0

    def add(self, number: int, piece: ScannedPiece) -> None:
        """Append a piece of an input."""
        rows = len(piece.reasons)
        self._waiting.append(([number, *piece.place, rows, piece.check], piece))
        self._waiting_rows += rows
        self.count += rows
        if piece.signatures is not None:
            self.signed = piece.signatures.shape[1]
            self._files["near"].write(piece.signatures.tobytes())
        if self._waiting_rows >= GROUP:
            self._write_group()

    def _write_group(self) -> None:
        if self._waiting:
            places = np.array([place for place, _ in self._waiting], np.int64)
            offsets = np.append(0, np.cumsum(places[:, 3]))
            pieces = [piece for _, piece in self._waiting]
            columns = ([p.hashes for p in pieces], [p.chars for p in pieces], [p.reasons for p in pieces])
            lists = [lists_of(offsets, np.concatenate(column)) for column in columns]
            self._pieces.write_table(pa.Table.from_arrays([*map(array_of, places.T), *lists], schema=SCHEMA))
        self._waiting, self._waiting_rows = [], 0

    def close(self) -> None:
        """Write what waits."""
        self._write_group()
        self._pieces.close()
        self._sizes = {name: file.tell() for name, file in self._files.items()}

    def finish(self, key: str, seen: list[Seen]) -> None:
        """Write the note, which says that the part is whole, once its files are closed and published."""
        note = {"key": key, "rows": self.count, "signed": self.signed, "bytes": self._sizes}
        schema = pa.schema([("seen", pa.large_string())], metadata={"note": json.dumps(note)})
        table = pa.Table.from_arrays([texts_of([json.dumps(asdict(one)) for one in seen])], schema=schema)
        with part_file(_file(self.path, "inputs")) as file:
            pq.write_table(table, file, compression="zstd")


def scan_unit(
    place: Path,
    unit: Unit,
    key: str,
    inputs: list[Input],
    strict: bool,
    workers: Workers,
    at: Callable[[int], None],
) -> None:
    """Make the part of a unit in `place`. `workers` run a `scanner`; `at` is told bytes that have been read.

    Raises UserError for inputs that cannot be used.
    """
    left = inputs[unit.stretches[0].input].source.limit  # units of a source with a limit hold all of it
    seen: list[Seen] = []
    done = 0
    with contextlib.ExitStack() as files:
        writer = PartWriter(place / unit.name, files)
        for stretch in unit.stretches:
            one = inputs[stretch.input]
            found = Seen(stretch.input)
            seen.append(found)
            if left == 0:
                found.identity = {"name": one.name, BEYOND_LIMIT: True}
                continue
            for piece in _pieces(one, stretch, left, workers):
                if strict and piece.fault is not None:
                    raise _located(one, piece)
                _note(found, piece)
                left = None if left is None else max(0, left - len(piece.reasons))
                writer.add(stretch.input, piece)
                at(done + max(0, one.position() - stretch.begin))
            if stretch.begin == 0:
                found.identity = one.identity()
            if stretch.begin == 0 and stretch.end is None:
                require_usable(one, found, strict)
            done += (stretch.end or one.size) - stretch.begin
            at(done)
        writer.close()
    writer.finish(key, seen)


def _pieces(one: Input, stretch: Stretch, left: int | None, workers: Workers) -> Iterator[ScannedPiece]:
    """The pieces of a stretch, up to the one where what is left of its source's limit ends."""
    given = one.pieces(stretch.begin, stretch.end)
    for found in workers.map((piece, one.spec) for piece in given):
        if left is None:
            yield found
            continue
        yield found.first(left)
        left -= len(found.reasons)
        if left <= 0:
            return


def _note(seen: Seen, piece: ScannedPiece) -> None:
    counts = np.bincount(piece.reasons, minlength=len(REASONS))
    seen.rejected = dict(Counter(seen.rejected) + Counter(by_reason(counts)))
    if not seen.rows:
        read, unread = piece.columns
        seen.columns, seen.not_read = sorted(read), sorted(unread)
    seen.rows += len(piece.reasons)
    seen.messages += piece.messages


def by_reason(counts: np.ndarray) -> dict[str, int]:
    """Rows rejected by reason; counts: int [REASONS], of which the first is of usable rows."""
    return {reason: n for reason, n in zip(REASONS, counts.tolist(), strict=True) if reason and n}


def require_usable(one: Input, seen: Seen, strict: bool) -> None:
    """Refuse, if strict, an input without rows, and one without a usable row because it is not UTF-8."""
    if not strict or seen.identity.get(BEYOND_LIMIT):
        return
    if not seen.rows:
        raise UserError(
            f"{one.name} has no rows; leave it out, or set data.strict=false to pass over it", code="no-rows"
        )
    unusable = sum(seen.rejected.values()) == seen.rows
    if unusable and any(reason in seen.rejected for reason in UNREADABLE):
        named = sorted(seen.rejected.items(), key=lambda item: CODE[item[0]])
        what = ", ".join(f"{count:,} {reason.replace('_', ' ')}" for reason, count in named)
        raise UserError(
            f"{one.name} has no usable row ({what}); convert it to UTF-8, leave it out, or set "
            "data.strict=false to skip and count"
        )


def _located(one: Input, found: ScannedPiece) -> UserError:
    """The error of a row that breaks its file's structure, with its line."""
    assert found.fault is not None
    at, detail = found.fault
    reason = REASONS[found.reasons[at]].replace("_", " ")
    where = f"row {found.place.start + at + 1}"
    if isinstance(one, TextInput):
        with open_text(one.path) as stream:
            before, left = 0, found.place.start
            while left > 0:
                chunk = stream.read(min(PIECE, left))
                before, left = before + chunk.count(b"\n"), left - len(chunk)
            payload = stream.read(found.place.length)
        lines = [i for i, line in enumerate(payload.split(b"\n")) if line.strip()]
        where = f"line {before + lines[at] + 1}"
    return UserError(
        f"{one.name} {where}: {reason} ({detail}); correct it, or set data.strict=false to skip and count"
    )
