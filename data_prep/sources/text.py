"""Reader of .txt and .jsonl files: bytes that are cut into pieces between rows."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

from emo.common.errors import UserError

from .files import AGAIN, UTF8_MARK, decompress, open_text, read_chunks, require_utf8
from .reader import Extent, Piece, SourceReader
from .rows import cut_positions, raw_rows
from .spec import Payload, RowSpec

MAX_SEPARATOR = 4096  # longest separator between two rows, in bytes


class TextReader(SourceReader):
    """Reads a .txt or .jsonl file, plain or compressed."""

    def scan(self, begin: int, end: int | None) -> Iterator[Piece]:
        raw = self._raw = self.path.open("rb")
        with raw, decompress(raw, self.path) as stream:
            left = sys.maxsize
            if end is not None:
                left = self._seek_row(stream, end)
                stream.seek(0)
            start = self._seek_row(stream, begin) if begin else 0
            chunks = read_chunks(stream, self.name, left - start)
            if not begin:
                first = next(chunks, b"")
                self._check_beginning(first)
                chunks = chain([first], chunks)
            for extent, payload in cut_pieces(chunks, self.spec, start):
                yield Piece(extent, payload and _without_mark(payload, extent))

    def _check_beginning(self, beginning: bytes) -> None:
        """Raise UserError for a file in UTF-16, or with lines that end with CR alone."""
        require_utf8(beginning, self.name)
        by_lines = not self.spec.lines and self.spec.format != "document"
        if by_lines and b"\n" not in beginning and b"\r" in beginning.rstrip(b"\r"):
            raise UserError(
                f"{self.name} ends its lines with CR alone; convert it: tr '\\r' '\\n'", code="line-ends"
            )

    def _seek_row(self, stream: Any, byte: int) -> int:
        """Move a stream to the first beginning of a row at or after `byte`, and return that position.

        The result depends only on the file and on `byte`, so that adjacent ranges share their border.
        """
        stream.seek(byte)
        buffer = b""
        for chunk in read_chunks(stream, self.name):
            buffer = buffer[-MAX_SEPARATOR:] + chunk
            byte += len(chunk)
            cut = next(cut_positions(buffer, self.spec), None)
            if cut is not None:
                byte += cut - len(buffer)
                break
        stream.seek(byte)
        return byte

    def open_at(self, start: int) -> tuple[Any, int]:
        return open_text(self.path), 0

    def take(self, stream: Any, extent: Extent, before: int) -> Payload:
        if stream.seekable():
            stream.seek(before, 1)
        else:
            deque(read_chunks(stream, self.name, before), maxlen=0)
        payload = b"".join(read_chunks(stream, self.name, extent.length))
        if len(payload) != extent.length:
            raise UserError(
                f"{self.name} is shorter than when it was scanned; {AGAIN}", code="source-changed"
            )
        return _without_mark(payload, extent)


def cut_pieces(chunks: Iterable[bytes], spec: RowSpec, start: int) -> Iterator[tuple[Extent, bytes | None]]:
    """Cut a stream of text that begins at byte `start` of its file into pieces, between rows.

    A row that is too long for data.max_chars in any encoding has no payload.
    """
    buffer = b""
    skipped = 0
    limit = 4 * spec.max_chars
    for chunk in chunks:
        buffer += chunk
        if spec.format == "document" and len(buffer) <= limit:
            continue
        ends = list(cut_positions(buffer, spec)) if spec.format != "document" else []
        if skipped and ends:  # the too long row ends at the first cut
            yield Extent(start, skipped + ends[0]), None
            start = start + skipped + ends[0]
            buffer = buffer[ends[0] :]
            ends = [end - ends[0] for end in ends[1:]]
            skipped = 0
        if ends:
            yield Extent(start, ends[-1]), buffer[: ends[-1]]
            start = start + ends[-1]
            buffer = buffer[ends[-1] :]
        elif len(buffer) > limit or skipped:
            keep = min(len(buffer), MAX_SEPARATOR)  # a separator may straddle two reads
            skipped = skipped + len(buffer) - keep
            buffer = buffer[-keep:]
    if skipped:
        yield Extent(start, skipped + len(buffer)), None
    elif raw_rows(buffer, spec):
        yield Extent(start, len(buffer)), buffer


def _without_mark(payload: bytes, extent: Extent) -> bytes:
    """Return a payload without the byte order mark at the beginning of its file."""
    return payload.removeprefix(UTF8_MARK) if extent.start == 0 else payload
