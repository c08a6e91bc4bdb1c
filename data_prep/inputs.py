"""Inputs -> pieces: stretches of a file, small enough for a worker, that can be read again on their own.

A text file is cut between rows into payloads of about PIECE bytes, a table into blocks of rows. The scan goes
over all pieces once and keeps their extents; a shard's job later reads just the pieces that it needs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, ClassVar, Literal, NamedTuple, Protocol

from emo.common.errors import UserError, one_line
from emo.common.files import signature
from emo.data_prep.config import Source
from emo.data_prep.rows import Payload, RowSpec, cuts, raw_rows

PIECE = 256 << 10  # bytes of text in a piece
PIECE_ROWS = 256  # rows of a table in a piece
STRADDLE = 4096  # bytes that the place between two rows has at most
PACKED = {".gz": "gzip", ".zst": "zstd"}
TEXT_LIMIT = 1 << 30  # bytes that `read_text` holds at most: a small packed file may unpack to any number
# Byte order marks. Those of UTF-32 come first: one begins like one of UTF-16.
MARKS = {
    b"\xff\xfe\0\0": "UTF-32",
    b"\0\0\xfe\xff": "UTF-32",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}
UTF8_MARK = b"\xef\xbb\xbf"
AGAIN = "run prepare with --force to start over"


class Extent(NamedTuple):
    """The place of a piece in its file: bytes of the unpacked text, or rows of the table."""

    start: int
    length: int


class Piece(NamedTuple):
    """A place and its content; payload None: a row longer than data.max_chars allows."""

    extent: Extent
    payload: Payload | None


class Reader(NamedTuple):
    """An input that was read in order up to some place, so that reading can go on there."""

    input: Input
    stream: Any  # of a text its bytes, of a table an iterator of its rows
    end: int  # the place that comes next
    last: tuple[Extent, Payload] | None  # the piece before, which two shards may share


class File(Protocol):
    """A local path, or a file at an address."""

    @property
    def suffix(self) -> str: ...

    @property
    def stem(self) -> str: ...

    def open(self, mode: Literal["rb"]) -> IO[bytes]:
        """The file's bytes."""


class Input:
    """One file, hub data set or embedded corpus of a source."""

    split = 0  # number of the split that its rows are for, among DataConfig.splits
    cuttable = False  # whether a stretch of it can be read without what is before
    # The last one that was read in part: shards take rows in order, so the next goes on where it ended.
    # Of all inputs one, since each would be an open file.
    _paused: ClassVar[Reader | None] = None

    def __init__(
        self, source: Source, name: str, spec: RowSpec, size: int = 0, path: File | None = None
    ) -> None:
        self.source, self.name, self.spec = source, name, spec
        self.size = size  # bytes as they are stored; 0: unknown
        self.path = path  # of its file, or the directory of a saved data set
        self._state = state(path)  # before anything is read

    def position(self) -> int:
        """Return how many of the stored bytes `pieces` has read."""
        return 0

    def probe(self) -> None:
        """Raise UserError if the input cannot be opened at all."""
        raise NotImplementedError

    def pieces(self, begin: int = 0, end: int | None = None) -> Iterator[Piece]:
        """Yield all pieces, in order; of a `cuttable` input, those of the rows that begin in a stretch.

        Raises UserError at the end if the file is not the same any more.
        """
        yield from self._pieces(begin, end)
        self._require_same()

    def _pieces(self, begin: int, end: int | None) -> Iterator[Piece]:
        raise NotImplementedError

    def read(self, extents: Iterable[Extent]) -> Iterator[Payload]:
        """Yield the payloads at some extents, which come in order.

        What was read of an input last is gone on with, by the next call too, so that a file which cannot be
        entered in the middle is read once however many shards take rows of it.
        """
        reader, Input._paused = Input._paused, None
        if reader is not None and reader.input is not self:
            _close(reader.stream)
            reader = None
        for extent in extents:
            if reader is not None and reader.last is not None and reader.last[0] == extent:
                yield reader.last[1]
                continue
            if reader is None or extent.start < reader.end or self._jumps(reader.end, extent.start):
                if reader is not None:
                    _close(reader.stream)
                reader = Reader(self, *self._opened(extent.start), None)
            payload = self._taken(reader.stream, extent, extent.start - reader.end)
            reader = Reader(self, reader.stream, extent.start + extent.length, (extent, payload))
            yield payload
        Input._paused = reader

    def _opened(self, start: int) -> tuple[Any, int]:
        """Return a stream that is at `start`, or before it, and where it is."""
        raise NotImplementedError

    def _jumps(self, end: int, start: int) -> bool:
        """Return whether opening at `start` is cheaper than reading on from `end`."""
        return False

    def _taken(self, stream: Any, extent: Extent, before: int) -> Payload:
        """Return the payload at an extent, `before` bytes or rows ahead of where the stream is."""
        raise NotImplementedError

    def identity(self) -> dict[str, Any]:
        """Return what pins the content that was read: name, and hash or revision.

        Raises UserError if the file is not the same as when the input was made.
        """
        pinned = {"name": self.name} | self._pinned()
        self._require_same()
        return pinned

    def _pinned(self) -> dict[str, Any]:
        assert self.path is not None
        return file_identity(self.path, self.name)

    def _require_same(self) -> None:
        if state(self.path, again=True) != self._state:
            raise UserError(
                f"{self.name} changed while it was read; run the same again when nothing writes to it",
                code="source-changed",
            )


class TextInput(Input):
    """A .txt or .jsonl file, plain or packed."""

    def __init__(self, source: Source, name: str, spec: RowSpec, path: File, size: int) -> None:
        super().__init__(source, name, spec, size, path)
        self.path: File = path
        self._raw: IO[bytes] | None = None

    def probe(self) -> None:
        open_text(self.path).close()

    def position(self) -> int:
        if self._raw is None:
            return 0
        return self.size if self._raw.closed else self._raw.tell()

    @property
    def cuttable(self) -> bool:  # type: ignore[override]
        plain = isinstance(self.path, Path) and self.path.suffix not in PACKED
        return plain and self.spec.format != "document"

    def _pieces(self, begin: int, end: int | None) -> Iterator[Piece]:
        self._raw = open_raw(self.path)
        with self._raw, unpacked_stream(self._raw, self.path) as stream:
            last = None if end is None else self._row_from(stream, end)
            start = self._row_from(stream, begin) if begin else 0
            if last is not None:
                stream.seek(start)
                unpacked = _before(chunks(stream, self.name), last - start)
            else:
                unpacked = chunks(stream, self.name)
            if not begin:
                first = next(unpacked, b"")
                refuse_other_encodings(first, self.name)
                if not self.spec.lines and self.spec.format != "document":
                    _refuse_old_line_ends(first, self.name)
                unpacked = chain([first], unpacked)
            for piece in _cut(unpacked, self.spec, 4 * self.spec.max_chars, start):
                yield (
                    piece
                    if piece.payload is None
                    else Piece(piece.extent, _unmarked(piece.payload, piece.extent))
                )

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

    def _opened(self, start: int) -> tuple[Any, int]:
        return open_text(self.path), 0

    def _taken(self, stream: Any, extent: Extent, before: int) -> Payload:
        try:
            skip(stream, before)
            payload: bytes = stream.read(extent.length)
        except OSError as error:
            raise _damaged(self.name, error) from None
        if len(payload) != extent.length:
            raise UserError(f"{self.name} is shorter than when it was scanned; {AGAIN}")
        return _unmarked(payload, extent)


class TableInput(Input):
    """Rows that can be had by number: parquet, .json, a hub data set, an embedded corpus."""

    def __init__(
        self,
        source: Source,
        name: str,
        spec: RowSpec,
        rows: Callable[[int], Iterator[Any]],  # rows from a number on
        pinned: Callable[[], dict[str, Any]] | None = None,
        size: int = 0,
        position: Callable[[], int] = lambda: 0,
        path: File | None = None,
        jumps: Callable[[int, int], bool] = lambda end, start: False,
    ) -> None:
        """`pinned`: what identifies the content of what is no file.

        `jumps`: whether it is cheaper to ask for the rows from the second number on than to pass over those
        from the first.
        """
        super().__init__(source, name, spec, size, path)
        self._rows, self._position, self._cheaper, self._identity = rows, position, jumps, pinned

    def position(self) -> int:
        return self._position()

    def probe(self) -> None:
        self._rows(0)

    def _pieces(self, begin: int, end: int | None) -> Iterator[Piece]:
        start = 0
        for block in self._blocks():
            yield Piece(Extent(start, len(block)), self._payload(block))
            start += len(block)

    def _pinned(self) -> dict[str, Any]:
        return super()._pinned() if self._identity is None else self._identity()

    def _jumps(self, end: int, start: int) -> bool:
        return self._cheaper(end, start)

    def _opened(self, start: int) -> tuple[Any, int]:
        return self._rows(start), start

    def _taken(self, stream: Any, extent: Extent, before: int) -> Payload:
        block = list(islice(stream, before, before + extent.length))
        if len(block) != extent.length:
            raise UserError(f"{self.name} has fewer rows than when it was scanned; {AGAIN}")
        return self._payload(block)

    def _blocks(self) -> Iterator[list[Any]]:
        """Blocks of rows; in WikiText, whose rows are lines, they end where a document ends."""
        rows = self._rows(0)
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

    def _payload(self, block: list[Any]) -> Payload:
        if self.spec.format != "wikitext":
            return block
        return "".join(map(self._line, block)).encode("utf-8", "surrogatepass")

    def _line(self, row: Any) -> str:
        """A WikiText row as the line that it was."""
        column = self.spec.column or "text"
        if not isinstance(row, dict) or not isinstance(row.get(column), str):
            raise UserError(f"{self.name} has a row without text in column {column}; set its column")
        return row[column] if row[column].endswith("\n") else row[column] + "\n"


def open_text(path: File) -> Any:
    """A file's bytes as a stream, unpacked on the way; a file that ends too early raises OSError.

    Raises UserError when the file cannot be opened.
    """
    return unpacked_stream(open_raw(path), path)


def open_raw(path: File) -> IO[bytes]:
    """A file's bytes as they are stored. Raises UserError when it cannot be opened."""
    try:
        return path.open("rb")
    except OSError as error:
        raise unreadable(path, error) from None


def unpacked_stream(raw: IO[bytes], path: File) -> Any:
    """The same bytes unpacked, if the file's name says that they are packed."""
    packed = PACKED.get(path.suffix)
    try:
        if packed is None:
            return raw
        import pyarrow  # most of a second, which a command's first word does not wait for

        return pyarrow.input_stream(raw, compression=packed, buffer_size=PIECE)
    except OSError as error:
        raise unreadable(path, error) from None


def refuse_other_encodings(beginning: bytes, name: str) -> None:
    """Raise UserError for a file that is marked as UTF-16 or UTF-32."""
    encoding = next((name for mark, name in MARKS.items() if beginning.startswith(mark)), None)
    if encoding is not None:
        raise UserError(f"{name} is {encoding}, not UTF-8; convert it: iconv -f {encoding} -t UTF-8")


def _refuse_old_line_ends(beginning: bytes, name: str) -> None:
    """Raise UserError for a text without line feeds whose lines end in carriage returns."""
    if b"\n" not in beginning and b"\r" in beginning.rstrip(b"\r"):
        raise UserError(f"{name} ends its lines with CR alone; convert it: tr '\\r' '\\n'", code="line-ends")


def _unmarked(payload: Payload, extent: Extent) -> Payload:
    """Return the payload of a text without the byte order mark that its file may begin with."""
    if isinstance(payload, bytes) and extent.start == 0:
        return payload.removeprefix(UTF8_MARK)
    return payload


def _close(stream: Any) -> None:
    """Close a stream, or an iterator of rows that can be."""
    if hasattr(stream, "close"):
        stream.close()


def state(path: Any, again: bool = False) -> list[Any]:
    """Return what changes when a file does, or one of a directory; nothing where it is not there.

    Of a file at an address it is what its server said when it was listed, unless it shall be asked `again`.
    """
    if isinstance(path, Path):
        files = sorted(path.rglob("*")) if path.is_dir() else []
        return [signature(file) for file in (path, *files) if file.exists()]
    return [] if path is None else path.state(again)


def unreadable(path: File | str, error: OSError) -> UserError:
    return UserError(f"{path} cannot be read: {error.strerror or one_line(error, 200)}")


def skip(stream: Any, count: int) -> None:
    """Pass over bytes of a stream."""
    if count and stream.seekable():
        stream.seek(count, 1)
        return
    while count > 0 and (chunk := stream.read(min(PIECE, count))):
        count -= len(chunk)


def file_identity(path: File, name: str) -> dict[str, Any]:
    """Name, size and hash of a file. Raises UserError when it cannot be read."""
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]
            return {"name": name, "bytes": file.tell(), "sha256": digest}
    except OSError as error:
        raise unreadable(path, error) from None


def chunks(stream: Any, name: str) -> Iterator[bytes]:
    """A stream in reads of PIECE bytes. Raises UserError when it cannot be unpacked."""
    try:
        while chunk := stream.read(PIECE):
            yield chunk
    except OSError as error:
        raise _damaged(name, error) from None


def read_text(path: Path) -> str:
    """A whole file as text, unpacked. For files that are small by nature, as those of tasks and prefixes are.

    Raises UserError when it cannot be read or unpacked, is not UTF-8, or unpacks to more than TEXT_LIMIT.
    """
    content = bytearray()
    with open_text(path) as stream:
        for chunk in chunks(stream, str(path)):
            content += chunk
            if len(content) > TEXT_LIMIT:
                raise UserError(f"{path} holds more than {TEXT_LIMIT >> 20:,} MiB of text; give it in part")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise UserError(f"{path} line {line} is not UTF-8 text") from None


def _damaged(name: str, error: OSError) -> UserError:
    return UserError(f"{name} cannot be unpacked ({one_line(error)}); the file is damaged")


def _before(stretches: Iterable[bytes], left: int) -> Iterator[bytes]:
    """The first `left` bytes of a stream."""
    for chunk in stretches:
        if left <= 0:
            return
        yield chunk[:left]
        left -= len(chunk)


def _cut(stretches: Iterable[bytes], spec: RowSpec, limit: int, start: int) -> Iterator[Piece]:
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
            yield Piece(Extent(start, skipped + ends[0]), None)
            start, buffer = start + skipped + ends[0], buffer[ends[0] :]
            ends, skipped = [p - ends[0] for p in ends[1:]], 0
        if ends:
            yield Piece(Extent(start, ends[-1]), buffer[: ends[-1]])
            start, buffer = start + ends[-1], buffer[ends[-1] :]
        elif len(buffer) > limit or skipped:
            keep = min(len(buffer), STRADDLE)  # a place may straddle two reads
            skipped, buffer = skipped + len(buffer) - keep, buffer[-keep:]
    if skipped:
        yield Piece(Extent(start, skipped + len(buffer)), None)
    elif raw_rows(buffer, spec):
        yield Piece(Extent(start, len(buffer)), buffer)
