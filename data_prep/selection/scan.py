"""The scan: every row is read once, by any number of jobs, and recorded in the part of its unit.

The sources are divided into units, and each job takes the next free unit. The part of a unit is a Parquet
file with a row for each row of the unit (COLUMNS). It only exists when it is complete. Its metadata hold the
pieces that the rows came in, facts about each input, and a key of everything that the part was made from.

Reading and checking text is far cheaper than tokenizing it, and whether a row is used depends on all other
rows, see select.py. Units depend only on the sources, so the data are the same for any number of jobs.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from emo.common.cli.progress import progress
from emo.common.errors import UserError
from emo.common.io.files import part_file
from emo.common.io.objects import existed_recently, in_store, locate
from emo.common.parallel import WorkerPool

from ..config import FORMAT, DataConfig
from ..encoding.chat_templates import ChatTemplate, RefusedError
from ..encoding.chat_writer import REQUIRED, THOUGHTS, ChatWriter
from ..encoding.templates import Chat, Conversation
from ..sources.files import open_text, read_chunks
from ..sources.reader import Extent, Piece, SourceReader
from ..sources.rows import JudgedRow, checksum, content_hash, find_columns, judge_rows
from ..sources.spec import CODE, LEFT_OUT, REASONS, STRUCTURE, Payload, Rejected, RowSpec
from ..sources.text import TextReader
from .arrow import array_of, numbers_of
from .similarity.grams import mixed
from .similarity.near import near_columns, signatures
from .units import complete_units

MAX_UNITS = 4096  # approximately, without inputs of unknown size
UNIT_BYTES = 8 << 20  # smallest unit, in stored bytes
GROUP_ROWS = 1 << 17  # rows of a row group, unless one piece has more
BEYOND_LIMIT = "beyond_limit"  # marks an input that is not read because the limit of its source is reached
COLUMNS = {
    "source": pa.int32(),  # number of the input
    "split": pa.uint16(),  # index in DataConfig.splits
    "copies": pa.uint16(),  # by the source's weight
    "hash": pa.uint64(),
    "chars": pa.uint32(),
    "reason": pa.uint8(),  # index in REASONS, 0: usable
}
NEAR = {"signature": pa.large_binary(), "bands": pa.list_(pa.uint64())}  # further columns if dedup is near
BROKEN = [CODE[reason] for reason in STRUCTURE]
SPLIT_SALT = 1
WEIGHT_SALT = 2

Advance = Callable[[int], None]  # gets the bytes that have been read


class Stretch(NamedTuple):
    """The range of an input that a unit reads."""

    input: int
    begin: int  # byte. Rows that begin before it belong to the unit before
    end: int | None  # byte. Rows that begin from it on belong to the next unit. None: there is no next unit


class Unit(NamedTuple):
    """Inputs, or a range of one input, that one job scans."""

    number: int
    stretches: tuple[Stretch, ...]
    size: int  # bytes


class InputNote(NamedTuple):
    """Facts about one input, from the scan of a unit."""

    input: int
    messages: int  # messages of conversations that were left out
    fields: dict[str, int]  # rows by field that the chat template leaves out
    facts: dict[str, object]  # columns and identity, if the unit reads the beginning of the input


class PartNote(TypedDict):
    """The metadata of a part, as JSON."""

    key: str  # hash of everything that the part was made from
    broken: bool  # whether a row breaks the structure of its file
    pieces: list[list[int]]  # input, start, length, rows, checksum
    inputs: list[InputNote]


class ScanPart(NamedTuple):
    """A complete part on disk."""

    path: Path
    key: str
    inputs: list[InputNote]
    groups: list[int]  # rows of each row group

    def pieces(self) -> np.ndarray:
        """Return the pieces, int64 [pieces, 5]: input, start, length, rows, checksum."""
        note = json.loads(pq.read_metadata(self.path).metadata[b"note"])
        return np.array(note["pieces"], np.int64).reshape(-1, 5)


class ScannedPiece(NamedTuple):
    """The rows of a piece, and facts about them."""

    extent: Extent
    check: int  # checksum of the piece
    rows: pa.RecordBatch
    columns: dict[str, list[str]]  # read and unread columns, for the first piece of an input
    messages: int  # messages of conversations that were left out
    fields: Counter[str]  # rows by field that the chat template leaves out


# --- units ------------------------------------------------------------------------------------------------


def divide_into_units(inputs: list[SourceReader]) -> list[Unit]:
    """Return the inputs as units, in order: the same for any number of jobs.

    Small inputs are combined, and large plain files are cut. A compressed file is read by one job, and so is
    a source with a limit, since its first rows count.
    """
    goal = max(UNIT_BYTES, sum(each.size for each in inputs) // MAX_UNITS)
    units: list[Unit] = []

    def add_unit(stretches: list[Stretch], size: int) -> None:
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
            add_unit(waiting, size)
            waiting = []
            size = 0
            if each.size > goal and each.cuttable:
                for begin in range(0, each.size, goal):
                    end = begin + goal if begin + goal < each.size else None
                    add_unit([Stretch(number, begin, end)], (end or each.size) - begin)
            elif not 0 < each.size <= goal:
                add_unit([Stretch(number, 0, None)], each.size)
        add_unit(waiting, size)
    return units


class Scan:
    """The work of one job on the parts of all units."""

    def __init__(
        self, config: DataConfig, inputs: list[SourceReader], chat: ChatTemplate | None, directory: Path
    ) -> None:
        """Args:
        config: the data section of the recipe.
        inputs: the readers of the sources.
        chat: the template that must be able to write the rows, if the recipe uses one.
        directory: the directory of the parts.
        """
        self.config = config
        self.inputs = inputs
        self.chat = chat
        self.directory = directory
        self.units = divide_into_units(inputs)
        self.parts: dict[int, ScanPart] = {}  # the complete parts seen so far, by number of the unit
        self._keys = [self._key_of(unit) for unit in self.units]

    def _key_of(self, unit: Unit) -> str:
        """Return a hash of everything that the part of a unit is made from.

        Other settings may change without reading the sources again. `strict` decides about single rows only
        with a chat template, see `judge_payload`.
        """
        config = self.config
        made_with: list[object] = [FORMAT, config.seed, config.validation_fraction]
        made_with += [config.near_threshold if config.dedup == "near" else None]
        made_with += [None if self.chat is None else (self.chat.digest, config.strict)]
        origins = []
        for reader in (self.inputs[stretch.input] for stretch in unit.stretches):
            source = reader.source
            origins.append([reader.name, reader.size, reader.mark(), reader.spec, reader.split])
            origins[-1] += [source.weight, source.limit, source.split, source.revision]
        text = json.dumps([made_with, unit.stretches, origins], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def run(self, first: float, workers: int, ended: Callable[[], bool], say: Callable[[str], None]) -> None:
        """Make parts until all exist or the scan has ended. Units of dead jobs are taken over.

        Args:
            first: The unit that this job begins with, from 0 to 1, so that jobs do not read the same files.
            workers: Number of worker processes.
            ended: Returns whether another job has finished the plan.
            say: Prints a line for the user.
        """
        total = sum(unit.size for unit in self.units)
        with (
            WorkerPool(workers, scanner, self.config, self.chat) as pool,
            progress("reading", total, say) as advance,
        ):
            complete_units(
                len(self.units),
                first,
                self.directory,
                lambda number: self.is_complete(self.units[number]) or ended(),
                lambda number: self.make_part(self.units[number], pool, advance),
                lambda count, job: say(
                    f"waiting for {count} parts of the sources; other jobs read them: {job}"
                ),
            )

    def is_complete(self, unit: Unit) -> bool:
        """Return whether the part of a unit exists, made from the current sources."""
        if unit.number not in self.parts:
            path = self._path(unit)
            part = None
            if existed_recently(path):
                part = read_part(path, self._keys[unit.number], self.config.strict)
            if part is not None:
                self.parts[unit.number] = part
        return unit.number in self.parts

    def _path(self, unit: Unit) -> Path:
        return self.directory / f"{unit.number:06d}.parquet"

    def make_part(self, unit: Unit, pool: WorkerPool, advance: Advance) -> None:
        """Make the part of a unit.

        `pool` runs a `scanner`. Raises UserError for inputs that cannot be used.
        """
        note: PartNote = {"key": self._keys[unit.number], "broken": False, "pieces": [], "inputs": []}
        done = sum(self.units[number].size for number in self.parts)

        def advance_stretch(count: int) -> None:
            advance(done + count)

        def batches() -> Iterator[pa.RecordBatch]:
            nonlocal done
            left = self.inputs[unit.stretches[0].input].source.limit  # the unit holds all of such a source
            for stretch in unit.stretches:
                left = yield from self._scan_stretch(stretch, left, pool, note, advance_stretch)
                done += (stretch.end or self.inputs[stretch.input].size) - stretch.begin
                advance(done)

        write_part(self._path(unit), self.config.dedup == "near", batches(), note)

    def _scan_stretch(
        self, stretch: Stretch, left: int | None, pool: WorkerPool, note: PartNote, advance: Advance
    ) -> Generator[pa.RecordBatch, None, int | None]:
        """Yield the rows of a stretch, and return how many rows its source may still have.

        left: rows up to the limit of the source, or None. Pieces and facts are added to `note`.
        """
        number, begin, end = stretch
        reader = self.inputs[number]
        messages = 0
        beyond = left == 0
        fields: Counter[str] = Counter()
        facts: dict[str, object] = {"columns": [], "columns_not_read": []} if begin == 0 else {}
        pieces = iter(()) if beyond else reader.pieces(begin, end)
        items = ((number, piece, reader.spec, reader.source.weight, reader.split) for piece in pieces)
        for piece in pool.map(items):
            rows = piece.rows
            reasons = numbers_of(piece.rows["reason"])
            if left is not None:
                reasons = np.where(np.arange(len(reasons)) < left, reasons, np.uint8(CODE["limit"]))
                rows = rows.set_column(list(COLUMNS).index("reason"), "reason", array_of(reasons))
                left = max(0, left - len(reasons))
            if np.isin(reasons, BROKEN).any():
                if self.config.strict:
                    raise self._broken_row_error(reader, piece.extent)
                note["broken"] = True
            note["pieces"].append([number, *piece.extent, len(reasons), piece.check])
            facts |= piece.columns
            messages += piece.messages
            fields += piece.fields
            yield rows
            advance(max(0, reader.position() - begin))
            if left == 0:
                break
        if begin == 0:
            facts |= {"name": reader.name, BEYOND_LIMIT: True} if beyond else reader.identity()
        note["inputs"].append(InputNote(number, messages, fields, facts))
        return left

    # --- errors -------------------------------------------------------------------------------------------

    def first_fault(self) -> str:
        """Return the problem and the position of the first rejected row, or '' if no row was rejected."""
        pieces = (piece for unit in self.units for piece in self.parts[unit.number].pieces().tolist())
        for number, start, length, *_ in pieces:
            if first := self._find_rejected(self.inputs[number], Extent(start, length), REASONS):
                where, row = first
                return f"{where}: {row.reason.replace('_', ' ')}" + f" ({row.detail})" * bool(row.detail)
        return ""

    def _broken_row_error(self, reader: SourceReader, extent: Extent) -> UserError:
        """Return the error for the first row of a piece that breaks the structure of its file."""
        first = self._find_rejected(reader, extent, STRUCTURE)
        assert first is not None
        where, broken = first
        left_out = broken.reason == LEFT_OUT
        return UserError(
            f"{where}: {broken.reason.replace('_', ' ')} ({broken.detail}). Correct it, or set "
            f"data.strict=false to {'use and' if left_out else 'skip and'} count such rows",
            code="left-out-by-template" if left_out else "broken-row",
        )

    def _find_rejected(
        self, reader: SourceReader, extent: Extent, reasons: Iterable[str]
    ) -> tuple[str, Rejected] | None:
        """Return the position and the first row of a piece that is rejected for one of `reasons`."""
        payload = next(reader.read([extent]))
        writer = None if self.chat is None else ChatWriter(self.chat)
        rows = (each.row for each in judge_payload(payload, reader.spec, writer, self.config.strict))
        faults = (
            (n, row) for n, row in enumerate(rows) if isinstance(row, Rejected) and row.reason in reasons
        )
        if (first := next(faults, None)) is None:
            return None
        number, broken = first
        where = f"row {extent.start + number + 1}"
        by_line = reader.spec.lines or reader.spec.format == "lines"
        if by_line and isinstance(reader, TextReader) and isinstance(payload, bytes):
            lines = [i for i, line in enumerate(payload.split(b"\n")) if line.strip()]
            with open_text(reader.path) as stream:
                before = sum(c.count(b"\n") for c in read_chunks(stream, reader.name, extent.start))
            where = f"line {before + lines[number] + 1}"
        return f"{reader.name} {where}", broken


# --- parts ------------------------------------------------------------------------------------------------


def write_part(path: Path, near: bool, batches: Iterable[pa.RecordBatch], note: PartNote) -> None:
    """Write rows as the part at `path`, with the note as it is after the last batch."""
    schema = pa.schema(list((COLUMNS | (NEAR if near else {})).items()))
    options: Any = {"compression": "zstd", "use_dictionary": False}
    waiting: list[pa.RecordBatch] = []
    count = 0  # waiting rows
    with part_file(path) as file, pq.ParquetWriter(file, schema, **options) as writer:
        for batch in batches:
            waiting.append(batch)
            count += batch.num_rows
            if count >= GROUP_ROWS:
                writer.write_table(pa.Table.from_batches(waiting))
                waiting = []
                count = 0
        if waiting:
            writer.write_table(pa.Table.from_batches(waiting))
        writer.add_key_value_metadata({"note": json.dumps(note)})


def read_part(path: Path, key: str, strict: bool) -> ScanPart | None:
    """Return a part, or None if it does not exist, has another key or, if `strict`, has a broken row."""
    try:
        if in_store(path):  # this host may have an old copy
            store, name = locate(path)
            metadata = store.inspect(name, pq.read_metadata)
        else:
            metadata = pq.read_metadata(path)
        note = json.loads(metadata.metadata[b"note"])
        if note["key"] != key or (strict and note["broken"]):
            return None
        groups = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
        return ScanPart(path, key, [InputNote(*entry) for entry in note["inputs"]], groups)
    except (OSError, ValueError, KeyError, TypeError, pa.ArrowException):
        return None


def scanner(config: DataConfig, chat: ChatTemplate | None) -> Callable[..., ScannedPiece]:
    """Return a worker's function: number, piece, spec, weight and split of an input -> ScannedPiece."""

    writer = None if chat is None else ChatWriter(chat)

    def scan_piece(item: tuple[int, Piece, RowSpec, float, int]) -> ScannedPiece:
        number, (extent, payload), spec, weight, split = item
        judged = judge_payload(payload, spec, writer, config.strict)
        reasons = [CODE[each.row.reason] if isinstance(each.row, Rejected) else 0 for each in judged]
        arrays: dict[str, np.ndarray] = {
            "hash": np.array([each.hash for each in judged], np.uint64),
            "chars": np.array([each.chars for each in judged], np.uint32),
            "reason": np.array(reasons, np.uint8),
        }
        groups = np.array([each.group or each.hash for each in judged], np.uint64)
        arrays |= draw_copies(number, arrays["hash"], groups, weight, split, config)
        rows = {name: array_of(values) for name, values in arrays.items()}
        if config.dedup == "near":
            usable = [each.row for each in judged if not isinstance(each.row, Rejected)]
            signed = signatures(usable, spec.kind)
            rows |= near_columns(signed, arrays["reason"] == 0, config.near_threshold)
        columns: dict[str, list[str]] = {}
        if payload is not None and extent.start == 0:
            read, unread = find_columns(payload, spec)
            columns = {"columns": sorted(read), "columns_not_read": sorted(unread)}
        messages = sum(each.row.unused for each in judged if isinstance(each.row, Conversation | Chat))
        fields = Counter(field for each in judged for field in each.left_out)
        check = 0 if payload is None else checksum(payload)
        return ScannedPiece(extent, check, batch_of(rows), columns, messages, fields)

    return scan_piece


def batch_of(rows: Mapping[str, pa.Array]) -> pa.RecordBatch:
    """Return columns as rows of a part, in the order of COLUMNS."""
    names = [name for name in (*COLUMNS, *NEAR) if name in rows]
    return pa.RecordBatch.from_arrays([rows[name] for name in names], names)


def judge_payload(
    payload: Payload | None, spec: RowSpec, writer: ChatWriter | None, strict: bool
) -> list[JudgedRow]:
    """Return the rows of a payload, with the rows that the chat template cannot write rejected.

    If `strict`, rows of which the template leaves something out are rejected too. A chat is compared by its
    written text: other keys and ids do not make it another chat.
    """
    if payload is None:
        return [JudgedRow(Rejected("too_long"))]
    judged = list(judge_rows(payload, spec))
    for number, each in enumerate(judged if writer is not None else ()):
        if writer is None or not isinstance(each.row, Chat):
            continue
        try:
            examples = writer.examples(each.row)
            left_out = writer.left_out(each.row, examples)
        except RefusedError as error:
            judged[number] = JudgedRow(Rejected(error.reason, error.detail))
            continue
        lost = [field for field in left_out if field in REQUIRED]
        if strict and lost:
            only_thoughts = {*lost} <= {*THOUGHTS}
            advice = "Set data.reasoning=drop" if only_thoughts else "Use a template that writes them"
            detail = f"the chat_template leaves out {', '.join(lost)}. {advice}, or remove them"
            judged[number] = JudgedRow(Rejected(LEFT_OUT, detail))
        else:
            written = [(text, [answer[:4] for answer in answers]) for text, answers in examples]  # no weights
            judged[number] = each._replace(hash=content_hash(json.dumps(written)), left_out=tuple(left_out))
    return judged


def draw_copies(
    number: int, hashes: np.ndarray, groups: np.ndarray, weight: float, split: int, config: DataConfig
) -> dict[str, np.ndarray]:
    """Return the columns source, split and copies of rows.

    Args:
        number: The number of the input.
        hashes: uint64 [rows], content hashes.
        groups: uint64 [rows]. Rows with the same number are in the same split.
        weight: The weight of the source.
        split: The split of the input, without data.validation_fraction.
        config: The data section of the recipe.
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
