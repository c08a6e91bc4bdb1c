"""The scan: every row is read once, by any number of jobs, and noted in the part of its unit.

The sources are cut into units, and any job takes the next one that is free. A part is a Parquet file with a
row for each row of the unit (COLUMNS), which is there when it is whole; its metadata hold the pieces that the
rows came in, what was seen of each input, and a key of what it was made from. Reading and checking text is
far cheaper than tokenising it, and what becomes of a row depends on all others, see selection.py.

Units depend on the sources alone, never on the jobs, so that the bytes are the same for any number of jobs.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import chain, groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from emo.common.errors import UserError
from emo.common.files import part_file
from emo.common.lease import Lease, held
from emo.common.parallel import Workers
from emo.data_prep.arrow import array_of, bytes_of, lists_of
from emo.data_prep.grams import mixed
from emo.data_prep.inputs import PIECE, Extent, Input, Piece, TextInput, open_text
from emo.data_prep.near import band_keys, signatures
from emo.data_prep.rows import (
    CODE,
    REASONS,
    STRUCTURE,
    UNREADABLE,
    Judged,
    Rejected,
    RowSpec,
    checksum,
    columns,
    judge,
)
from emo.data_prep.templates import Chat, ChatTemplate, Conversation, RefusedError, render_chat

UNITS = 4096  # about as many at most, but for inputs whose size is not known
UNIT = 8 << 20  # bytes of a unit at least, as they are stored
POLL = 0.5  # seconds between looks at what other jobs have done, at most: those that began together soon end
GROUP = 1 << 17  # rows of a row group, or those of one piece
BEYOND_LIMIT = "beyond_limit"  # in the identity of an input that is not read: its source's limit is reached
COLUMNS = {
    "source": pa.int32(),  # number of the input
    "split": pa.uint16(),  # among DataConfig.splits
    "copies": pa.uint16(),  # by the source's weight
    "hash": pa.uint64(),
    "chars": pa.uint32(),
    "reason": pa.uint8(),  # index into REASONS; 0: usable
}
NEAR = {"signature": pa.large_binary(), "bands": pa.list_(pa.uint64())}  # where dedup is near
SPLIT_SALT, WEIGHT_SALT = 1, 2


class Stretch(NamedTuple):
    """A part of an input that a unit reads."""

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
        """Return the name of its files."""
        return f"{self.number:06d}"


@dataclass
class Seen:
    """Notes on an input, from one stretch of it or from all."""

    input: int
    identity: dict[str, Any] = field(default_factory=dict)  # see Input.identity; with its first stretch
    rejected: dict[str, int] = field(default_factory=dict)  # by reason
    rows: int = 0
    messages: int = 0  # of conversations, that were left out
    columns: list[str] = field(default_factory=list)  # that are read; of its first rows
    not_read: list[str] = field(default_factory=list)

    def add(self, other: Seen) -> None:
        """Add another stretch of the same input."""
        self.identity |= other.identity
        self.rejected = dict(Counter(self.rejected) + Counter(other.rejected))
        self.rows += other.rows
        self.messages += other.messages
        self.columns += other.columns
        self.not_read += other.not_read


class Part(NamedTuple):
    """A whole part on disk."""

    path: Path
    pieces: np.ndarray  # int64 [pieces, 5]: input, start, length, rows, checksum
    notes: list[Seen]

    @staticmethod
    def read(directory: Path, unit: Unit, key: str) -> Part | None:
        """Return the part of a unit, or None where it has to be made, from what `key` stands for."""
        path = directory / f"{unit.name}.parquet"
        try:
            note = json.loads(pq.read_metadata(path).metadata[b"note"])
            if note["key"] != key:
                return None
            pieces = np.array(note["pieces"], np.int64).reshape(-1, 5)
            return Part(path, pieces, [Seen(**summary) for summary in note["seen"]])
        except (OSError, ValueError, KeyError, TypeError, pa.ArrowException):
            return None


class ScanSettings(NamedTuple):
    """All that a worker needs to know to judge rows."""

    near: float | None  # threshold of near duplicates, where these are looked for
    chat: ChatTemplate | None  # that must be able to write the rows
    seed: int
    validation_fraction: float


class ScannedPiece(NamedTuple):
    """All that is noted of the rows of a piece."""

    extent: Extent
    check: int  # checksum of the piece
    columns: dict[str, Any]  # COLUMNS but the source, as arrays; of NEAR as lists
    fault: tuple[int, str] | None = None  # the first row that breaks the structure, and how
    read: tuple[set[str], set[str]] = (set(), set())  # columns read and not read; of an input's first piece
    messages: int = 0  # of conversations, that were left out


def divide(inputs: list[Input]) -> list[Unit]:
    """Return the inputs as units, in order: the same for any number of jobs.

    Small inputs are put together and large plain files cut. A packed file is read by one job, and so is a
    source with a limit, of which the first rows count.
    """
    goal = max(UNIT, sum(each.size for each in inputs) // UNITS)
    units: list[Unit] = []
    waiting: list[Stretch] = []

    def put(stretches: list[Stretch], size: int) -> None:
        if stretches:
            units.append(Unit(len(units), tuple(stretches), size))

    for _, group in groupby(enumerate(inputs), lambda item: id(item[1].source)):
        waiting, size = [], 0
        for number, each in group:
            limited = each.source.limit is not None
            if limited or 0 < each.size <= goal:
                waiting.append(Stretch(number, 0, None))
                size += each.size
                if limited or size < goal:
                    continue
            put(waiting, size)
            waiting, size = [], 0
            if each.size > goal and each.cuttable:
                for begin in range(0, each.size, goal):
                    end = begin + goal if begin + goal < each.size else None
                    put([Stretch(number, begin, end)], (end or each.size) - begin)
            elif not 0 < each.size <= goal:
                put([Stretch(number, 0, None)], each.size)
        put(waiting, size)
    return units


def shared_out(
    units: list[Unit],
    directory: Path,
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
    reported, pause = False, POLL / 32
    while left:
        holder = ""  # of a unit that this job cannot have
        for unit in left:
            if done(unit):
                continue
            lease = Lease(directory, f"{unit.name}.lease")
            with held(lease) as free:
                if not free:
                    holder = str(lease.holder() or "one that has just begun")
                elif not done(unit):
                    yield unit
        left = [unit for unit in left if not done(unit)]
        if left and holder:
            if not reported:
                reported = True
                count = f"{len(left)} of {len(units)}"
                waiting(f"waiting for {count} parts of the sources; other jobs read them: {holder}")
            time.sleep(pause)
            pause = min(2 * pause, POLL)


def digest(values: Any) -> str:
    """Return the hash of JSON values: parts with another one were made from something else."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def scanner(settings: ScanSettings) -> Callable[[tuple[Piece, RowSpec, float, int]], ScannedPiece]:
    """Return a worker's function: a piece, its spec, its source's weight and its split -> what is in it."""

    def scan_piece(item: tuple[Piece, RowSpec, float, int]) -> ScannedPiece:
        (extent, payload), spec, weight, split = item
        judged = [Judged(Rejected("too_long"))] if payload is None else list(judge(payload, spec))
        if settings.chat is not None:
            judged = [_written(each, settings.chat) for each in judged]
        fault = None
        reasons = np.zeros(len(judged), np.uint8)
        for number, (row, _, _) in enumerate(judged):
            if isinstance(row, Rejected):
                reasons[number] = CODE[row.reason]
                if fault is None and row.reason in STRUCTURE:
                    fault = number, row.detail
        hashes = np.array([each.hash for each in judged], np.uint64)
        chars = np.array([each.chars for each in judged], np.uint32)
        noted: dict[str, Any] = weighed(hashes, weight, split, settings.seed, settings.validation_fraction)
        noted |= {"hash": hashes, "chars": chars, "reason": reasons}
        if settings.near is not None:
            noted |= _near(judged, spec.kind, settings.near)
        talks = [each.row.unused for each in judged if isinstance(each.row, Conversation | Chat)]
        read = (set(), set()) if payload is None or extent.start else columns(payload, spec)
        return ScannedPiece(
            extent, 0 if payload is None else checksum(payload), noted, fault, read, sum(talks)
        )

    return scan_piece


def _near(judged: list[Judged], kind: str, threshold: float) -> dict[str, Any]:
    """Return the NEAR columns of some rows."""
    usable = [number for number, each in enumerate(judged) if not isinstance(each.row, Rejected)]
    rows = [each.row for each in judged if not isinstance(each.row, Rejected)]
    signed = signatures(rows, kind)
    marks, bands = [b""] * len(judged), [np.zeros(0, np.uint64)] * len(judged)
    for number, signature, keys in zip(usable, signed, band_keys(signed, threshold), strict=True):
        marks[number], bands[number] = signature.tobytes(), keys
    return {"signature": marks, "bands": bands}


def weighed(
    hashes: np.ndarray, weight: float, split: int, seed: int, validation_fraction: float
) -> dict[str, np.ndarray]:
    """Return the splits and the copies of a source's rows, uint16."""
    copies = np.full(len(hashes), int(weight), np.uint16)
    splits = np.full(len(hashes), split, np.uint16)
    if weight % 1:
        copies += uniform(hashes, seed, WEIGHT_SALT) < weight % 1
    if validation_fraction:
        splits[:] = uniform(hashes, seed, SPLIT_SALT) < validation_fraction
    return {"split": splits, "copies": copies}


def uniform(hashes: np.ndarray, seed: int, salt: int) -> np.ndarray:
    """Return a number in [0, 1) for each content hash, independent for each salt."""
    return mixed(hashes + np.uint64((seed * 4 + salt) * 0x9E3779B97F4A7C15 % 2**64)) / 2.0**64


def _written(judged: Judged, chat: ChatTemplate) -> Judged:
    """Return the row, or its rejection where it is a chat that the template does not write."""
    try:
        if isinstance(judged.row, Chat):
            render_chat(judged.row, chat)
    except RefusedError as error:
        return Judged(Rejected(error.reason, error.detail))
    return judged


class PartWriter:
    """Writes a part in a `with` block, which publishes it at its end: `add` its pieces, then `finish`."""

    def __init__(self, directory: Path, unit: Unit, near: bool) -> None:
        self.columns = COLUMNS | (NEAR if near else {})
        self._part = part_file(directory / f"{unit.name}.parquet")
        self._places: list[list[int]] = []
        self._waiting: list[dict[str, Any]] = []
        self._waiting_rows = 0

    def __enter__(self) -> PartWriter:
        options: Any = {"compression": "zstd", "use_dictionary": False}
        self._writer = pq.ParquetWriter(
            self._part.__enter__(), pa.schema(list(self.columns.items())), **options
        )
        return self

    def __exit__(self, *error: Any) -> None:
        with contextlib.suppress(ValueError):  # where it was not finished
            self._writer.close()
        self._part.__exit__(*error)

    def add(self, number: int, piece: ScannedPiece) -> None:
        """Append a piece of an input."""
        rows = len(piece.columns["reason"])
        self._places.append([number, *piece.extent, rows, piece.check])
        self._waiting.append({"source": np.full(rows, number, np.int32)} | piece.columns)
        self._waiting_rows += rows
        if self._waiting_rows >= GROUP:
            self._write()

    def _write(self) -> None:
        arrays = []
        for name in self.columns if self._waiting else ():
            parts = [columns[name] for columns in self._waiting]
            if name == "signature":
                arrays.append(bytes_of(list(chain.from_iterable(parts))))
            elif name == "bands":
                bands = list(chain.from_iterable(parts))
                offsets = np.append(0, np.cumsum(list(map(len, bands))))
                arrays.append(lists_of(offsets, np.concatenate([np.zeros(0, np.uint64), *bands])))
            else:
                arrays.append(array_of(np.concatenate(parts)))
        if arrays:
            self._writer.write_table(pa.Table.from_arrays(arrays, schema=self._writer.schema))
        self._waiting, self._waiting_rows = [], 0

    def finish(self, key: str, summaries: list[Seen]) -> None:
        """Write what waits, and what the part is."""
        self._write()
        note = {"key": key, "pieces": self._places, "seen": [asdict(each) for each in summaries]}
        self._writer.add_key_value_metadata({"note": json.dumps(note)})
        self._writer.close()


def scan_unit(
    directory: Path,
    unit: Unit,
    key: str,
    inputs: list[Input],
    strict: bool,
    near: bool,
    workers: Workers,
    advance: Callable[[int], None],
) -> None:
    """Make the part of a unit in `place`. `workers` run a `scanner`; `at` is told bytes that have been read.

    Raises UserError for inputs that cannot be used.
    """
    left = inputs[unit.stretches[0].input].source.limit  # units of a source with a limit hold all of it
    summaries: list[Seen] = []
    done = 0
    with PartWriter(directory, unit, near) as writer:
        for stretch in unit.stretches:
            opened = inputs[stretch.input]
            summary = Seen(stretch.input)
            summaries.append(summary)
            if left == 0:
                summary.identity = {"name": opened.name, BEYOND_LIMIT: True}
                continue
            for piece in _pieces(opened, stretch, left, workers):
                if strict and piece.fault is not None:
                    raise _located(opened, piece)
                reasons = piece.columns["reason"]
                counts = by_reason(np.bincount(reasons, minlength=len(REASONS)))
                first = piece.read if not summary.rows else (set(), set())
                read, unread = map(sorted, first)
                summary.add(Seen(stretch.input, {}, counts, len(reasons), piece.messages, read, unread))
                left = None if left is None else max(0, left - len(reasons))
                writer.add(stretch.input, piece)
                advance(done + max(0, opened.position() - stretch.begin))
            if stretch.begin == 0:
                summary.identity = opened.identity()
            if stretch.begin == 0 and stretch.end is None:
                require_usable(opened, summary, strict)
            done += (stretch.end or opened.size) - stretch.begin
            advance(done)
        writer.finish(key, summaries)


def _pieces(opened: Input, stretch: Stretch, left: int | None, workers: Workers) -> Iterator[ScannedPiece]:
    """Yield the pieces of a stretch, up to the one where what is left of its source's limit ends."""
    pieces = opened.pieces(stretch.begin, stretch.end)
    for piece in workers.map((piece, opened.spec, opened.source.weight, opened.split) for piece in pieces):
        if left is None:
            yield piece
            continue
        reasons = piece.columns["reason"]
        reasons[left:] = CODE["limit"]
        yield piece
        left -= len(reasons)
        if left <= 0:
            return


def by_reason(counts: np.ndarray) -> dict[str, int]:
    """Return the rows rejected by reason; counts: int [REASONS], of which the first is of usable rows."""
    return {reason: n for reason, n in zip(REASONS, counts.tolist(), strict=True) if reason and n}


def require_usable(opened: Input, summary: Seen, strict: bool) -> None:
    """Refuse, if strict, an input without rows, and one without a usable row because it is not UTF-8."""
    if not strict or summary.identity.get(BEYOND_LIMIT):
        return
    if not summary.rows:
        raise UserError(
            f"{opened.name} has no rows; leave it out, or set data.strict=false to pass over it",
            code="no-rows",
        )
    unusable = sum(summary.rejected.values()) == summary.rows
    if unusable and any(reason in summary.rejected for reason in UNREADABLE):
        by_code = sorted(summary.rejected.items(), key=lambda item: CODE[item[0]])
        reasons = ", ".join(f"{count:,} {reason.replace('_', ' ')}" for reason, count in by_code)
        raise UserError(
            f"{opened.name} has no usable row ({reasons}); convert it to UTF-8, leave it out, or set "
            "data.strict=false to skip and count",
            code="not-utf8",
        )


def _located(opened: Input, piece: ScannedPiece) -> UserError:
    """Return the error of a row that breaks its file's structure, with its line."""
    assert piece.fault is not None
    number, detail = piece.fault
    reason = REASONS[piece.columns["reason"][number]].replace("_", " ")
    where = f"row {piece.extent.start + number + 1}"
    if isinstance(opened, TextInput):
        with open_text(opened.path) as stream:
            before, left = 0, piece.extent.start
            while left > 0:
                chunk = stream.read(min(PIECE, left))
                before, left = before + chunk.count(b"\n"), left - len(chunk)
            payload = stream.read(piece.extent.length)
        lines = [i for i, line in enumerate(payload.split(b"\n")) if line.strip()]
        where = f"line {before + lines[number] + 1}"
    return UserError(
        f"{opened.name} {where}: {reason} ({detail}); correct it, or set data.strict=false to skip and count",
        code="broken-row",
    )
