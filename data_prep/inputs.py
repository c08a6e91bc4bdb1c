"""Inputs -> pieces: stretches of a file, small enough for a worker, that can be read again on their own.

A text file is cut between rows into payloads of about PIECE bytes, a table into blocks of rows. The scan goes
over all pieces once and keeps their extents; a shard's job later reads just the pieces that it needs.
"""

from __future__ import annotations

import hashlib
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, ClassVar, NamedTuple

from emo.common.errors import UserError, one_line
from emo.common.files import signature
from emo.data_prep.addresses import RemoteFile
from emo.data_prep.config import Source
from emo.data_prep.rows import Payload, RowSpec, cuts, raw_rows

PIECE = 256 << 10  # bytes of text in a piece
PIECE_ROWS = 256  # rows of a table in a piece
STRADDLE = 4096  # bytes that the place between two rows has at most
PACKED = {".gz": "gzip", ".zst": "zstd"}
TEXT_LIMIT = 1 << 30  # bytes that `read_text` holds at most: a small packed file may unpack to any number
# Byte order marks. Those of UTF-32 come first: one begins like one of UTF-16.
MARKS = {b"\xff\xfe\0\0": "UTF-32", b"\0\0\xfe\xff": "UTF-32", b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}
UTF8_MARK = b"\xef\xbb\xbf"
AGAIN = "run prepare with --force to start over"

File = Path | RemoteFile


class Extent(NamedTuple):
    """The place of a piece in its file: bytes of the unpacked text, or rows of the table."""

    start: int
    length: int


class Piece(NamedTuple):
    """A place and its content; payload None: a row longer than data.max_chars allows."""

    extent: Extent
    payload: Payload | None


class Input:
    """One file, hub data set or embedded corpus of a source."""

    split = 0  # number of the split that its rows are for, among DataConfig.splits
    cuttable = False  # whether a stretch of it can be read without what is before
    # What was read in part last: the input, its stream, the place that comes next, and the piece before it,
    # which two shards may share. Shards take rows in order, so the next goes on where the last one ended. Of
    # all inputs one, since each would be an open file.
    _paused: ClassVar[tuple[Input, Any, int, tuple[Extent, Payload]] | None] = None

    def __init__(
        self, source: Source, name: str, spec: RowSpec, size: int = 0, path: File | None = None
    ) -> None:
        self.source, self.name, self.spec = source, name, spec
        self.size = size  # bytes as they are stored; 0: unknown
        self.path = path  # of its file, or the directory of a saved data set
        self._raw: IO[bytes] | None = None  # the stored bytes, while they are read
        self.state = _state(path)  # before anything is read

    def position(self) -> int:
        """Return how many of the stored bytes `pieces` has read."""
        if self._raw is None:
            return 0
        return self.size if self._raw.closed else self._raw.tell()

    def probe(self) -> None:
        """Raise UserError if the input cannot be opened at all."""
        raise NotImplementedError

    def pieces(self, begin: int = 0, end: int | None = None) -> Iterator[Piece]:
        """Yield all pieces, in order; of a `cuttable` input, those of the rows that begin in a stretch."""
        yield from self._pieces(begin, end)
        self._require_same()

    def _pieces(self, begin: int, end: int | None) -> Iterator[Piece]:
        raise NotImplementedError

    def read(self, extents: Iterable[Extent]) -> Iterator[Payload]:
        """Yield the payloads at some extents, which come in order.

        What was read of an input last is gone on with, by the next call too, so that a file which cannot be
        entered in the middle is read once however many shards take rows of it.
        """
        stream: Any = None
        end, last = 0, None
        if Input._paused is not None:
            paused, stream, end, last = Input._paused
            Input._paused = None
            if paused is not self:
                _close(stream)
                stream = last = None
        for extent in extents:
            if last is None or last[0] != extent:
                if stream is None or extent.start < end or self._jumps(end, extent.start):
                    _close(stream)
                    stream, end = self._open(extent.start)
                last = extent, self._take(stream, extent, extent.start - end)
                end = extent.start + extent.length
            yield last[1]
        if last is not None:
            Input._paused = self, stream, end, last

    def _open(self, start: int) -> tuple[Any, int]:
        """Return a stream that is at `start`, or before it, and where it is."""
        raise NotImplementedError

    def _jumps(self, end: int, start: int) -> bool:
        """Return whether opening at `start` is cheaper than reading on from `end`."""
        return False

    def _take(self, stream: Any, extent: Extent, before: int) -> Payload:
        """Return the payload at an extent, `before` bytes or rows ahead of where the stream is."""
        raise NotImplementedError

    def identity(self) -> dict[str, Any]:
        """Return what pins the content that was read: name, and hash or revision."""
        pinned = {"name": self.name} | self._pinned()
        self._require_same()
        return pinned

    def _pinned(self) -> dict[str, Any]:
        assert self.path is not None
        return file_identity(self.path)

    def _require_same(self) -> None:
        if _state(self.path, again=True) != self.state:
            raise UserError(
                f"{self.name} changed while it was read; run the same again when nothing writes to it",
                code="source-changed",
            )


class TextInput(Input):
    """A .txt or .jsonl file, plain or packed."""

    def __init__(self, source: Source, name: str, spec: RowSpec, path: File, size: int) -> None:
        super().__init__(source, name, spec, size, path)
        self.path: File = path
        plain = isinstance(path, Path) and path.suffix not in PACKED
        self.cuttable = plain and spec.format != "document"

    def probe(self) -> None:
        open_text(self.path).close()

    def _pieces(self, begin: int, end: int | None) -> Iterator[Piece]:
        self._raw = self.path.open("rb")
        with self._raw, unpacked(self._raw, self.path) as stream:
            left = sys.maxsize
            if end is not None:
                left = self._row_from(stream, end)
                stream.seek(0)
            start = self._row_from(stream, begin) if begin else 0
            stretches = chunks(stream, self.name, left - start)
            if not begin:
                first = next(stretches, b"")
                refuse_other_encodings(first, self.name)
                by_lines = not self.spec.lines and self.spec.format != "document"
                if by_lines and b"\n" not in first and b"\r" in first.rstrip(b"\r"):
                    raise UserError(
                        f"{self.name} ends its lines with CR alone; convert it: tr '\\r' '\\n'",
                        code="line-ends",
                    )
                stretches = chain([first], stretches)
            for extent, payload in _cut(stretches, self.spec, 4 * self.spec.max_chars, start):
                yield Piece(extent, payload and _unmarked(payload, extent))

    def _row_from(self, stream: Any, byte: int) -> int:
        """Return the first place from `byte` on where a row may begin; there the stream then is.

        It depends on the file and on `byte` alone, so that the stretches on its two sides meet.
        """
        stream.seek(byte)
        buffer = b""
        for chunk in chunks(stream, self.name):
            buffer = buffer[-STRADDLE:] + chunk
            byte += len(chunk)
            cut = next(cuts(buffer, self.spec), None)
            if cut is not None:
                byte += cut - len(buffer)
                break
        stream.seek(byte)
        return byte

    def _open(self, start: int) -> tuple[Any, int]:
        return open_text(self.path), 0

    def _take(self, stream: Any, extent: Extent, before: int) -> Payload:
        if stream.seekable():
            stream.seek(before, 1)
        else:
            deque(chunks(stream, self.name, before), maxlen=0)
        payload = b"".join(chunks(stream, self.name, extent.length))
        if len(payload) != extent.length:
            raise UserError(f"{self.name} is shorter than when it was scanned; {AGAIN}")
        return _unmarked(payload, extent)


class TableInput(Input):
    """Rows that can be had by number: csv, parquet, .json, a hub data set."""

    def rows(self, start: int) -> Iterator[Any]:
        """Return the rows from number `start` on."""
        raise NotImplementedError

    def probe(self) -> None:
        self.rows(0)

    def _pieces(self, begin: int, end: int | None) -> Iterator[Piece]:
        start = 0
        for block in self._blocks():
            yield Piece(Extent(start, len(block)), self._payload(block))
            start += len(block)

    def _blocks(self) -> Iterator[list[Any]]:
        """Yield blocks of rows; in WikiText, whose rows are lines, they end where a document ends."""
        rows = self.rows(0)
        if self.spec.format != "wikitext":
            while block := list(islice(rows, PIECE_ROWS)):
                yield block
            return
        block = []
        for row in rows:
            block.append(row)
            if len(block) > PIECE_ROWS and self._line(block[-2]).startswith(" = "):
                around = "x\n" + "".join(map(self._line, block[-3:]))
                if any(cuts(around.encode(), self.spec)):
                    yield block[:-3]
                    block = block[-3:]
        if block:
            yield block

    def _open(self, start: int) -> tuple[Any, int]:
        return self.rows(start), start

    def _take(self, stream: Any, extent: Extent, before: int) -> Payload:
        block = list(islice(stream, before, before + extent.length))
        if len(block) != extent.length:
            raise UserError(f"{self.name} has fewer rows than when it was scanned; {AGAIN}")
        return self._payload(block)

    def _payload(self, block: list[Any]) -> Payload:
        if self.spec.format != "wikitext":
            return block
        return "".join(map(self._line, block)).encode("utf-8", "surrogatepass")

    def _line(self, row: Any) -> str:
        """Return a WikiText row as the line that it was."""
        column = self.spec.column or "text"
        if not isinstance(row, dict) or not isinstance(row.get(column), str):
            raise UserError(f"{self.name} has a row without text in column {column}; set its column")
        return row[column] if row[column].endswith("\n") else row[column] + "\n"


def open_text(path: File) -> Any:
    """Return a file's bytes as a stream, unpacked on the way."""
    return unpacked(path.open("rb"), path)


def unpacked(raw: IO[bytes], path: File) -> Any:
    """Return the stored bytes of a file unpacked, if its name says that they are packed.

    Of a file that is damaged or ends too early, a read raises OSError.
    """
    if path.suffix not in PACKED:
        return raw
    import pyarrow  # most of a second, which a command's first word does not wait for

    return pyarrow.input_stream(raw, compression=PACKED[path.suffix], buffer_size=PIECE)


def chunks(stream: Any, name: str, left: int = sys.maxsize) -> Iterator[bytes]:
    """Yield a stream in reads of PIECE bytes, `left` bytes at most. Raises UserError for a damaged file."""
    try:
        while left > 0 and (chunk := stream.read(min(PIECE, left))):
            left -= len(chunk)
            yield chunk
    except OSError as error:
        raise UserError(f"{name} cannot be unpacked ({one_line(error)}); the file is damaged") from None


def read_text(path: Path) -> str:
    """Return a whole file as text, unpacked: of those that are small by nature, as tasks and prefixes are."""
    with open_text(path) as stream:
        content = b"".join(chunks(stream, str(path), TEXT_LIMIT + 1))
    if len(content) > TEXT_LIMIT:
        raise UserError(f"{path} holds more than {TEXT_LIMIT >> 20:,} MiB of text; give it in part")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise UserError(f"{path} line {line} is not UTF-8 text") from None


def refuse_other_encodings(beginning: bytes, name: str) -> None:
    """Raise UserError for a file that is marked as UTF-16 or UTF-32."""
    encoding = next((name for mark, name in MARKS.items() if beginning.startswith(mark)), None)
    if encoding is not None:
        raise UserError(f"{name} is {encoding}, not UTF-8; convert it: iconv -f {encoding} -t UTF-8")


def file_identity(path: File) -> dict[str, Any]:
    """Return size and hash of a file."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]
        return {"bytes": file.tell(), "sha256": digest}


def _state(path: File | None, again: bool = False) -> list[Any]:
    """Return what changes when a file does, or one of a directory; nothing where it is not there.

    Of a file at an address it is what its server said when it was listed, unless it shall be asked `again`.
    """
    if isinstance(path, Path):
        files = sorted(path.rglob("*")) if path.is_dir() else []
        return [signature(file) for file in (path, *files) if file.exists()]
    return [] if path is None else path.state(again)


def _close(stream: Any) -> None:
    """Close a stream, or an iterator of rows that can be."""
    if hasattr(stream, "close"):
        stream.close()


def _unmarked(payload: bytes, extent: Extent) -> bytes:
    """Return the payload of a text without the byte order mark that its file may begin with."""
    return payload.removeprefix(UTF8_MARK) if extent.start == 0 else payload


def _cut(
    stretches: Iterable[bytes], spec: RowSpec, limit: int, start: int
) -> Iterator[tuple[Extent, bytes | None]]:
    """Cut a stream of text into pieces between rows; a row of more than `limit` bytes has no payload.

    start: of the stream, in its file.
    """
    buffer, skipped = b"", 0
    for chunk in stretches:
        buffer += chunk
        if spec.format == "document" and len(buffer) <= limit:
            continue
        ends = list(cuts(buffer, spec)) if spec.format != "document" else []
        if skipped and ends:  # the row that was too long ends at the first extent
            yield Extent(start, skipped + ends[0]), None
            start, buffer = start + skipped + ends[0], buffer[ends[0] :]
            ends, skipped = [p - ends[0] for p in ends[1:]], 0
        if ends:
            yield Extent(start, ends[-1]), buffer[: ends[-1]]
            start, buffer = start + ends[-1], buffer[ends[-1] :]
        elif len(buffer) > limit or skipped:
            keep = min(len(buffer), STRADDLE)  # a place may straddle two reads
            skipped, buffer = skipped + len(buffer) - keep, buffer[-keep:]
    if skipped:
        yield Extent(start, skipped + len(buffer)), None
    elif raw_rows(buffer, spec):
        yield Extent(start, len(buffer)), buffer
