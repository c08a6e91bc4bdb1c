"""The scan: every row is read once, by any number of jobs, and noted in the part of its unit.

The sources are cut into units, and any job takes the next one that is free. A part is a Parquet file with a
row for each row of the unit (COLUMNS), which is there when it is whole; its metadata hold the pieces that the
rows came in, what was seen of each input, and a key of what it was made from. Reading and checking text is
far cheaper than tokenising it, and what becomes of a row depends on all others, see plan.py.

Units depend on the sources alone, never on the jobs, so that the bytes are the same for any number of jobs.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from emo.common.cli.progress import progress
from emo.common.errors import UserError
from emo.common.io.files import part_file
from emo.common.io.lease import Lease, hold_if_free
from emo.common.parallel import WorkerPool

from ..config import FORMAT, DataConfig, settings
from ..encoding.chat_templates import ChatTemplate, RefusedError
from ..encoding.chats import CONTENT, THOUGHTS, ChatWriter
from ..encoding.templates import Chat, Conversation
from ..sources.inputs import PIECE, Extent, Input, Piece, TextInput, open_text
from ..sources.rows import (
    CODE,
    LEFT_OUT,
    REASONS,
    STRUCTURE,
    Judged,
    Payload,
    Rejected,
    RowSpec,
    checksum,
    columns,
    content_hash,
    judge,
)
from .arrow import array_of, numbers_of
from .grams import mixed
from .near import near_columns, signatures

UNITS = 4096  # about as many at most, but for inputs whose size is not known
UNIT = 8 << 20  # bytes of a unit at least, as they are stored
LEASES = 64  # in a directory
POLL = 0.5  # seconds between looks at what other jobs have done, at most: those that began together soon end
GROUP = 1 << 17  # rows of a row group, or those of one piece
BEYOND_LIMIT = "beyond_limit"  # of an input that is not read: its source's limit is reached
COLUMNS = {
    "source": pa.int32(),  # number of the input
    "split": pa.uint16(),  # among DataConfig.splits
    "copies": pa.uint16(),  # by the source's weight
    "hash": pa.uint64(),
    "chars": pa.uint32(),
    "reason": pa.uint8(),  # index into REASONS; 0: usable
}
NEAR = {"signature": pa.large_binary(), "bands": pa.list_(pa.uint64())}  # where dedup is near
BROKEN = [CODE[reason] for reason in STRUCTURE]
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


class ScanPart(NamedTuple):
    """A whole part on disk."""

    path: Path
    pieces: np.ndarray  # int64 [pieces, 5]: input, start, length, rows, checksum
    # input, messages left out, rows by field left out, facts where it is read from 0
    inputs: list[tuple[int, int, dict[str, int], dict[str, Any]]]


class ScannedPiece(NamedTuple):
    """All that is noted of the rows of a piece."""

    extent: Extent
    check: int  # checksum of the piece
    rows: pa.RecordBatch
    columns: dict[str, list[str]]  # that are read, and not; of an input's first piece
    messages: int  # of conversations, that were left out
    fields: Counter[str]  # rows by the fields that the chat template leaves out


def divide(inputs: list[Input]) -> list[Unit]:
    """Return the inputs as units, in order: the same for any number of jobs.

    Small inputs are put together and large plain files cut. A packed file is read by one job, and so is a
    source with a limit, of which the first rows count.
    """
    goal = max(UNIT, sum(each.size for each in inputs) // UNITS)
    units: list[Unit] = []

    def put(stretches: list[Stretch], size: int) -> None:
        if stretches:
            units.append(Unit(len(units), tuple(stretches), size))

    for _, group in groupby(enumerate(inputs), lambda item: id(item[1].source)):
        waiting: list[Stretch] = []
        size = 0
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


class Scan:
    """One job's share in making the parts of all units, in a directory."""

    def __init__(
        self, config: DataConfig, inputs: list[Input], chat: ChatTemplate | None, directory: Path
    ) -> None:
        """chat: the template that must be able to write the rows, where the recipe asks for it."""
        self.config, self.inputs, self.chat, self.directory = config, inputs, chat, directory
        self.units = divide(inputs)
        self.parts: dict[int, ScanPart] = {}  # by number of the unit, those that were seen whole
        made_with = [settings(config), FORMAT, None if chat is None else chat.digest]
        self._keys = []  # a part with another one was made from something else
        for unit in self.units:
            read = [inputs[stretch.input] for stretch in unit.stretches]
            origins = [(opened.name, opened.size, opened.state) for opened in read]
            text = json.dumps([made_with, unit.stretches, origins], sort_keys=True)
            self._keys.append(hashlib.sha256(text.encode()).hexdigest())

    def fault(self) -> str:
        """Return what is wrong with the first rejected row, and where it is; '' where none was rejected."""
        for number, start, length, *_ in (
            p for u in self.units for p in self.parts[u.number].pieces.tolist()
        ):
            opened = self.inputs[number]
            if first := _rejected(opened, Extent(start, length), self.chat, self.config, REASONS):
                where, row = first
                return f"{where}: {row.reason.replace('_', ' ')}" + f" ({row.detail})" * bool(row.detail)
        return ""

    def run(self, first: float, workers: int, ended: Callable[[], bool], say: Callable[[str], None]) -> None:
        """Make parts until all are there, by whichever job, or the scan has `ended`.

        first: where among the units this job begins, from 0 to 1, so that jobs do not read the same files.
        What a job that died had is taken over.
        """
        start = int(first * len(self.units))
        left = self.units[start:] + self.units[:start]
        pause, waiting = POLL / 32, False
        with (
            WorkerPool(workers, scanner, self.config, self.chat) as pool,
            progress("reading", sum(unit.size for unit in left), say) as advance,
        ):
            while left:
                holder = ""  # of a unit that this job cannot have
                for unit in left:
                    if self._whole(unit) or ended():
                        continue
                    # Few leases lie in a directory: to take one lists it.
                    lease = Lease(
                        self.directory / f"leases-{unit.number // LEASES}", f"{unit.number:06d}.lease"
                    )
                    with hold_if_free(lease) as free:
                        if not free:
                            holder = str(lease.holder() or "one that has just begun")
                        elif not (self._whole(unit) or ended()):
                            self.make(unit, pool, advance)
                left = [unit for unit in left if not (self._whole(unit) or ended())]
                if left and holder:
                    if not waiting:
                        waiting = True
                        count = f"{len(left)} of {len(self.units)}"
                        say(f"waiting for {count} parts of the sources; other jobs read them: {holder}")
                    time.sleep(pause)
                    pause = min(2 * pause, POLL)

    def _whole(self, unit: Unit) -> bool:
        """Return whether the part of a unit is there, made from what its sources are."""
        if unit.number not in self.parts:
            part = read_part(self._path(unit), self._keys[unit.number])
            if part is not None:
                self.parts[unit.number] = part
        return unit.number in self.parts

    def _path(self, unit: Unit) -> Path:
        return self.directory / f"{unit.number:06d}.parquet"

    def make(self, unit: Unit, pool: WorkerPool, advance: Callable[[int], None]) -> None:
        """Make the part of a unit; `pool` runs a `scanner`, `advance` gets the bytes that have been read.

        Raises UserError for inputs that cannot be used.
        """
        note: dict[str, Any] = {"key": self._keys[unit.number], "pieces": [], "inputs": []}
        done = sum(self.units[number].size for number in self.parts)

        def batches() -> Iterator[pa.RecordBatch]:
            nonlocal done
            left = self.inputs[unit.stretches[0].input].source.limit  # the unit holds all of such a source
            for number, begin, end in unit.stretches:
                opened, messages, beyond = self.inputs[number], 0, left == 0
                fields: Counter[str] = Counter()
                facts: dict[str, Any] = {"columns": [], "columns_not_read": []} if begin == 0 else {}
                pieces = iter(()) if beyond else opened.pieces(begin, end)
                items = ((number, piece, opened.spec, opened.source.weight, opened.split) for piece in pieces)
                for piece in pool.map(items):
                    rows, reasons = piece.rows, numbers_of(piece.rows["reason"])
                    if self.config.strict and np.isin(reasons, BROKEN).any():
                        raise _located(opened, piece.extent, self.chat, self.config)
                    if left is not None:
                        reasons = np.where(np.arange(len(reasons)) < left, reasons, np.uint8(CODE["limit"]))
                        rows = rows.set_column(list(COLUMNS).index("reason"), "reason", array_of(reasons))
                        left = max(0, left - len(reasons))
                    note["pieces"].append([number, *piece.extent, len(reasons), piece.check])
                    facts |= piece.columns
                    messages += piece.messages
                    fields += piece.fields
                    yield rows
                    advance(done + max(0, opened.position() - begin))
                    if left == 0:
                        break
                if begin == 0:
                    facts |= {"name": opened.name, BEYOND_LIMIT: True} if beyond else opened.identity()
                note["inputs"].append((number, messages, fields, facts))
                done += (end or opened.size) - begin
                advance(done)

        write_part(self._path(unit), self.config.dedup == "near", batches(), note)


def write_part(path: Path, near: bool, batches: Iterable[pa.RecordBatch], note: Mapping[str, Any]) -> None:
    """Write rows as the part at `path`, and the note as it is when all of them have come."""
    schema = pa.schema(list((COLUMNS | (NEAR if near else {})).items()))
    options: Any = {"compression": "zstd", "use_dictionary": False}
    waiting: list[pa.RecordBatch] = []
    count = 0  # rows that wait
    with part_file(path) as file, pq.ParquetWriter(file, schema, **options) as writer:
        for batch in batches:
            waiting.append(batch)
            count += batch.num_rows
            if count >= GROUP:
                writer.write_table(pa.Table.from_batches(waiting))
                waiting, count = [], 0
        if waiting:
            writer.write_table(pa.Table.from_batches(waiting))
        writer.add_key_value_metadata({"note": json.dumps(note)})


def read_part(path: Path, key: str) -> ScanPart | None:
    """Return a part, or None where it has to be made, from what `key` stands for."""
    try:
        note = json.loads(pq.read_metadata(path).metadata[b"note"])
        if note["key"] != key:
            return None
        return ScanPart(path, np.array(note["pieces"], np.int64).reshape(-1, 5), note["inputs"])
    except (OSError, ValueError, KeyError, TypeError, pa.ArrowException):
        return None


def scanner(config: DataConfig, chat: ChatTemplate | None) -> Callable[..., ScannedPiece]:
    """Return a worker's function: number, piece, spec, weight and split of an input -> what is in it."""

    writer = None if chat is None else ChatWriter(chat)

    def scan_piece(item: tuple[int, Piece, RowSpec, float, int]) -> ScannedPiece:
        number, (extent, payload), spec, weight, split = item
        judged = judged_rows(payload, spec, writer, config.strict)
        reasons = [CODE[each.row.reason] if isinstance(each.row, Rejected) else 0 for each in judged]
        arrays: dict[str, np.ndarray] = {
            "hash": np.array([each.hash for each in judged], np.uint64),
            "chars": np.array([each.chars for each in judged], np.uint32),
            "reason": np.array(reasons, np.uint8),
        }
        groups = np.array([each.group or each.hash for each in judged], np.uint64)
        arrays |= weighed(number, arrays["hash"], groups, weight, split, config)
        rows = {name: array_of(values) for name, values in arrays.items()}
        if config.dedup == "near":
            usable = [each.row for each in judged if not isinstance(each.row, Rejected)]
            signed = signatures(usable, spec.kind)
            rows |= near_columns(signed, arrays["reason"] == 0, config.near_threshold)
        read: dict[str, list[str]] = {}
        if payload is not None and extent.start == 0:
            names = columns(payload, spec)
            read = {"columns": sorted(names[0]), "columns_not_read": sorted(names[1])}
        messages = sum(each.row.unused for each in judged if isinstance(each.row, Conversation | Chat))
        fields = Counter(field for each in judged for field in each.left_out)
        check = 0 if payload is None else checksum(payload)
        return ScannedPiece(extent, check, batch_of(rows), read, messages, fields)

    return scan_piece


def judged_rows(
    payload: Payload | None, spec: RowSpec, writer: ChatWriter | None, strict: bool
) -> list[Judged]:
    """Return the rows of a payload.

    Those that the chat template does not write are rejected, and if `strict` those of which it leaves
    something out. A chat is known by what is written of it: other keys and ids do not make it another one.
    """
    if payload is None:
        return [Judged(Rejected("too_long"))]
    judged = list(judge(payload, spec))
    for number, each in enumerate(judged if writer is not None else ()):
        if writer is None or not isinstance(each.row, Chat):
            continue
        try:
            examples = writer.examples(each.row)
            left = writer.left_out(each.row, examples)
        except RefusedError as error:
            judged[number] = Judged(Rejected(error.reason, error.detail))
            continue
        lost = [field for field in left if field in CONTENT]
        if strict and lost:
            advice = (
                "Set data.reasoning=drop" if {*lost} <= {*THOUGHTS} else "Use a template that writes them"
            )
            detail = f"the chat_template leaves out {', '.join(lost)}. {advice}, or remove them"
            judged[number] = Judged(Rejected(LEFT_OUT, detail))
        else:
            judged[number] = each._replace(hash=content_hash(json.dumps(examples)), left_out=tuple(left))
    return judged


def batch_of(rows: Mapping[str, pa.Array]) -> pa.RecordBatch:
    """Return the rows of a part, whose columns come in any order."""
    names = [name for name in (*COLUMNS, *NEAR) if name in rows]
    return pa.RecordBatch.from_arrays([rows[name] for name in names], names)


def weighed(
    number: int, hashes: np.ndarray, groups: np.ndarray, weight: float, split: int, config: DataConfig
) -> dict[str, np.ndarray]:
    """Return the columns source, split and copies of the rows of input `number`.

    groups: rows with the same number are of the same split.
    """
    copies = np.full(len(hashes), int(weight), np.uint16)
    splits = np.full(len(hashes), split, np.uint16)
    if weight % 1:
        copies += uniform(hashes, config.seed, WEIGHT_SALT) < weight % 1
    if config.validation_fraction:
        splits[:] = uniform(groups, config.seed, SPLIT_SALT) < config.validation_fraction
    return {"source": np.full(len(hashes), number, np.int32), "split": splits, "copies": copies}


def uniform(hashes: np.ndarray, seed: int, salt: int) -> np.ndarray:
    """Return a number in [0, 1) for each content hash, independent for each salt."""
    return mixed(hashes + np.uint64((seed * 4 + salt) * 0x9E3779B97F4A7C15 % 2**64)) / 2.0**64


def _located(opened: Input, extent: Extent, chat: ChatTemplate | None, config: DataConfig) -> UserError:
    """Return the error of the first row of a piece that breaks its file's structure, with its line."""
    first = _rejected(opened, extent, chat, config, STRUCTURE)
    assert first is not None
    where, broken = first
    return UserError(
        f"{where}: {broken.reason.replace('_', ' ')} ({broken.detail}); correct it, or set "
        f"data.strict=false to {'use and' if broken.reason == LEFT_OUT else 'skip and'} count such rows",
        code="left-out-by-template" if broken.reason == LEFT_OUT else "broken-row",
    )


def _rejected(
    opened: Input, extent: Extent, chat: ChatTemplate | None, config: DataConfig, reasons: Iterable[str]
) -> tuple[str, Rejected] | None:
    """Return the first row of a piece that is rejected for one of `reasons`, after its file and line."""
    payload = next(opened.read([extent]))
    writer = None if chat is None else ChatWriter(chat)
    rows = (each.row for each in judged_rows(payload, opened.spec, writer, config.strict))
    faults = ((n, row) for n, row in enumerate(rows) if isinstance(row, Rejected) and row.reason in reasons)
    if (first := next(faults, None)) is None:
        return None
    number, broken = first
    where = f"row {extent.start + number + 1}"
    by_line = opened.spec.lines or opened.spec.format == "lines"
    if by_line and isinstance(opened, TextInput) and isinstance(payload, bytes):
        with open_text(opened.path) as stream:
            before, left = 0, extent.start
            while left > 0:
                chunk = stream.read(min(PIECE, left))
                before, left = before + chunk.count(b"\n"), left - len(chunk)
        lines = [i for i, line in enumerate(payload.split(b"\n")) if line.strip()]
        where = f"line {before + lines[number] + 1}"
    return f"{opened.name} {where}", broken
