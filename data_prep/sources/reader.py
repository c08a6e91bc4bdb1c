"""The readers of source formats: the interface, and the base of all formats whose rows are records.

A source format is one class. Most formats hold records (a table, an array of objects) and subclass
`TableReader`, which needs one method: `rows`. Text whose rows are found by cutting bytes subclasses
`SourceReader`. `inputs.READERS` registers a reader under the endings of its files.

A reader divides its file into pieces that are small enough for one worker. The scan reads all pieces once and
stores their extents. The job of a shard later reads only the pieces that it needs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import IO, Any, ClassVar, NamedTuple

from emo.common.errors import UserError, one_line

from ..config import Source
from .files import AGAIN, File, file_mark, file_state, identify_file
from .rows import cut_positions
from .spec import Payload, Rejected, RowSpec

PIECE_ROWS = 256  # most records of a table in one piece
PIECE_CHARS = 1 << 20  # characters of records after which a piece ends


class Extent(NamedTuple):
    """The position of a piece in its file: in bytes of uncompressed text, or in rows of a table."""

    start: int
    length: int


class Piece(NamedTuple):
    """A piece of a file. The payload is None for a row that is longer than data.max_chars allows."""

    extent: Extent
    payload: Payload | None


class SourceReader(ABC):
    """Reads one file, hub data set or embedded corpus of a source.

    A format implements `scan`, `open_at` and `take`.
    """

    split = 0  # index in DataConfig.splits of the split that the rows belong to
    cuttable = False  # whether a range of the file can be read without the bytes before it
    _read_share = 0.0  # part of the file that was read, from 0 to 1, in readers that do not set `_raw`
    # The last partly read file: its reader, its stream, the next position, and the last piece, which two
    # shards may share. Shards take rows in order, so the next shard continues from here. One for all readers,
    # since each keeps a file open.
    _paused: ClassVar[tuple[SourceReader, Any, int, tuple[Extent, Payload]] | None] = None

    def __init__(
        self, source: Source, name: str, spec: RowSpec, size: int = 0, path: File | None = None
    ) -> None:
        """Args:
        source: the source in the recipe.
        name: the name of the file in manifests and messages.
        spec: how rows are parsed.
        size: stored bytes, or 0 if unknown.
        path: the file, or the directory of a saved data set.
        """
        self.source = source
        self.name = name
        self.spec = spec
        self.size = size
        self.path: Any = path
        self._raw: IO[bytes] | None = None  # the stored bytes, while they are being read
        self.state = file_state(path)  # before anything is read

    @abstractmethod
    def scan(self, begin: int, end: int | None) -> Iterator[Piece]:
        """Yield the pieces in order. Only a `cuttable` reader gets a range that is not the complete file."""

    @abstractmethod
    def open_at(self, start: int) -> tuple[Any, int]:
        """Return a stream at or before position `start`, and the position of the stream."""

    @abstractmethod
    def take(self, stream: Any, extent: Extent, before: int) -> Payload:
        """Return the payload of an extent that begins `before` bytes or rows after the stream's position."""

    def can_skip(self, end: int, start: int) -> bool:
        """Return whether opening at `start` is cheaper than reading on from `end`."""
        return False

    def position(self) -> int:
        """Return how many of the stored bytes `pieces` has read."""
        if self._raw is None:
            return int(self._read_share * self.size)
        return self.size if self._raw.closed else self._raw.tell()

    def pinned(self) -> dict[str, object]:
        """Return what identifies the content: the hash of a file, or the revision of a data set."""
        return identify_file(self.path)

    def mark(self) -> object:
        """Return values that change with the content, and are the same on all hosts that have it."""
        return self.pinned() if self.source.embedded else file_mark(self.path)

    def probe(self) -> None:
        """Raise UserError if the file cannot be opened."""
        next(self.scan(0, None), None)

    def pieces(self, begin: int = 0, end: int | None = None) -> Iterator[Piece]:
        """Yield all pieces in order, or for a `cuttable` file the pieces whose rows begin in a range."""
        yield from self.scan(begin, end)
        self._require_unchanged()

    def read(self, extents: Iterable[Extent]) -> Iterator[Payload]:
        """Yield the payloads of extents, which must be in order.

        Reading continues where the last call for the same file stopped. A file that cannot be entered in the
        middle is therefore read once, no matter how many shards take rows of it.
        """
        stream: Any = None
        end = 0
        last = None
        if SourceReader._paused is not None:
            paused, stream, end, last = SourceReader._paused
            SourceReader._paused = None
            if paused is not self:
                _close(stream)
                stream = last = None
        for extent in extents:
            if last is None or last[0] != extent:
                if stream is None or extent.start < end or self.can_skip(end, extent.start):
                    _close(stream)
                    stream, end = self.open_at(extent.start)
                last = extent, self.take(stream, extent, extent.start - end)
                end = extent.start + extent.length
            yield last[1]
        if last is not None:
            SourceReader._paused = self, stream, end, last

    def identity(self) -> dict[str, object]:
        """Return the name and what identifies the content that was read."""
        identity = {"name": self.name} | self.pinned()
        self._require_unchanged()
        return identity

    def _require_unchanged(self) -> None:
        if file_state(self.path, refresh=True) != self.state:
            raise UserError(
                f"{self.name} changed while it was read. Run the command again when no process writes to it",
                code="source-changed",
            )


class TableReader(SourceReader):
    """Reads a format whose rows are records with columns. A format implements `rows`."""

    @abstractmethod
    def rows(self, start: int) -> Iterator[Any]:
        """Yield the rows from number `start` on: a dict {column: value}, or Rejected for a broken row."""

    def scan(self, begin: int, end: int | None) -> Iterator[Piece]:
        start = 0
        for block in self._blocks():
            yield Piece(Extent(start, len(block)), self._payload(block))
            start += len(block)

    def open_at(self, start: int) -> tuple[Any, int]:
        return self.rows(start), start

    def take(self, stream: Any, extent: Extent, before: int) -> Payload:
        block = list(islice(stream, before, before + extent.length))
        if len(block) != extent.length:
            raise UserError(
                f"{self.name} has fewer rows than when it was scanned; {AGAIN}", code="source-changed"
            )
        return self._payload(block)

    def _blocks(self) -> Iterator[list[Any]]:
        """Yield blocks of rows. In WikiText, whose rows are lines, a block ends where a document ends."""
        rows = self.rows(0)
        if self.spec.format != "wikitext":
            yield from _cut_rows(rows)
            return
        block = []
        for row in rows:
            block.append(row)
            if len(block) > PIECE_ROWS and self._line(block[-2]).startswith(" = "):
                around = "x\n" + "".join(map(self._line, block[-3:]))
                if any(cut_positions(around.encode(), self.spec)):
                    yield block[:-3]
                    block = block[-3:]
        if block:
            yield block

    def _payload(self, block: list[Any]) -> Payload:
        if self.spec.format != "wikitext":
            return block
        return "".join(map(self._line, block)).encode("utf-8", "surrogatepass")

    def _line(self, row: Any) -> str:
        """Return a WikiText row as a line of text."""
        column = self.spec.find(row, "text") if isinstance(row, dict) else None
        if column is None or not isinstance(row[column], str):
            names = column or " or ".join(self.spec.names("text"))
            raise UserError(
                f"{self.name} has a row without text in column {names}. Set the source's column",
                code="no-text",
            )
        return row[column] if row[column].endswith("\n") else row[column] + "\n"


def _cut_rows(rows: Iterable[Any]) -> Iterator[list[Any]]:
    """Yield rows in blocks of limited size."""
    block = []
    size = 0
    for row in rows:
        block.append(row)
        size += _size_of(row)
        if len(block) == PIECE_ROWS or size >= PIECE_CHARS:
            yield block
            block = []
            size = 0
    if block:
        yield block


def _size_of(value: Any) -> int:
    """Return approximately how many characters a value has as text."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_size_of, value.values()))
    if isinstance(value, list) and not (value and isinstance(value[0], int)):
        return sum(map(_size_of, value))
    return 8 * len(value) if isinstance(value, list) else 8  # token ids are not added up one by one


def convert_rows(convert: Callable[[int, int], list[Any]], begin: int, end: int) -> list[Any]:
    """Return rows of a table as Python values. A row that Python cannot represent is rejected.

    convert: returns the rows from one number to before another.
    """
    try:
        return convert(begin, end)
    except (ValueError, OverflowError, KeyError) as error:  # no UTF-8, a year after 9999, a repeated key
        if end - begin == 1:
            reason = "bad_utf8" if isinstance(error, UnicodeDecodeError) else "wrong_type"
            return [Rejected(reason, one_line(error, 200))]
    middle = (begin + end) // 2
    return convert_rows(convert, begin, middle) + convert_rows(convert, middle, end)


def _close(stream: Any) -> None:
    """Close a stream, or an iterator of rows that can be closed."""
    if hasattr(stream, "close"):
        stream.close()
