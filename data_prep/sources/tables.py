"""Tables of text: csv and tsv files as rows by their header.

A csv file quotes as RFC 4180 says, a tsv file not at all: a tab or line break ends a field there. A quote
that is never closed would make one row of all that follow, so what does not quote properly is refused.
"""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from typing import IO, Any, Literal

from emo.common.errors import UserError, one_line
from emo.data_prep.inputs import File, open_raw, refuse_other_encodings, unpacked_stream
from emo.data_prep.rows import Rejected

DELIMITERS = {".csv": ",;\t", ".tsv": "\t"}  # the first of them that the header has
# Times data.max_chars: characters of a line and of a field; a quote that is not closed takes all the rest.
LIMIT = 4


class TextTable:
    """A csv or tsv file, plain or packed: rows in order, from any number on."""

    def __init__(self, path: File, name: str, suffix: str, max_chars: int, size: int) -> None:
        self.path, self.name, self.delimiters, self.size = path, name, DELIMITERS[suffix], size
        self.limit, self.quoted = LIMIT * max_chars, suffix != ".tsv"
        self._raw: IO[bytes] | None = None

    def position(self) -> int:
        """Return how many of the stored bytes were read."""
        if self._raw is None:
            return 0
        return self.size if self._raw.closed else self._raw.tell()

    def rows(self, start: int) -> Iterator[Any]:
        """Rows from number `start` on: {column: text}, or what is wrong with one. Raises UserError."""
        self._raw, line = open_raw(self.path), 0
        with self._raw, unpacked_stream(self._raw, self.path) as stream:
            try:
                lines = self._lines(stream)
                header = next((text for text in lines if text.strip()), "")
                delimiter = next((text for text in self.delimiters if text in header), self.delimiters[0])
                csv.field_size_limit(self.limit)  # its own is far below a document
                quoting: Literal[0, 3] = csv.QUOTE_MINIMAL if self.quoted else csv.QUOTE_NONE
                reader = csv.reader(chain([header], lines), delimiter=delimiter, quoting=quoting, strict=True)
                names, number = self._names(next(reader, [])), 0
                while True:
                    line = reader.line_num
                    try:
                        row = _row(next(reader), names, self.quoted)
                    except StopIteration:
                        return
                    except csv.Error as error:
                        if reader.line_num != line + 1:  # it took in other rows
                            raise
                        row = Rejected("wrong_type", f"line {line + 1}: {one_line(error)}")
                    if row is not None:
                        if number >= start:
                            yield row
                        number += 1
            except csv.Error as error:
                raise UserError(
                    f"{self.name}, after line {line}: not a row of a table ({one_line(error)}); is a quote "
                    "not closed?",
                    code="broken-table",
                ) from None
            except OSError as error:
                why = one_line(error)
                raise UserError(f"{self.name} cannot be unpacked ({why}); it is damaged") from None

    def _lines(self, stream: Any) -> Iterator[str]:
        """Lines with their ends; bytes that are not UTF-8 become half characters, and are then rejected."""
        beginning = io.BufferedReader(_Readable(stream), 1 << 18)
        refuse_other_encodings(beginning.peek(4)[:4], self.name)
        text = io.TextIOWrapper(beginning, "utf-8-sig", "surrogateescape", newline="")
        while line := text.readline(self.limit):
            if len(line) >= self.limit:
                raise csv.Error("it is too long")
            yield line

    def _names(self, row: list[str]) -> list[str]:
        """The names of the columns; those without one are numbered."""
        names = [name.strip() or f"column {i}" for i, name in enumerate(row, 1)]
        twice = next((name for name, count in Counter(names).items() if count > 1), None)
        if twice is not None:
            raise UserError(f"{self.name} has two columns {twice!r} in its first line; rename one")
        return names


class _Readable(io.RawIOBase):
    """A stream that only reads, as io's classes want it."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        content = self._stream.read(len(buffer))
        buffer[: len(content)] = content
        return len(content)


def _row(row: list[str], names: list[str], quoted: bool) -> dict[str, str] | Rejected | None:
    """Return a row by its columns, or what is wrong with it; None for a blank line."""
    if not row:
        return None
    if len(row) != len(names):
        problem = (
            f"{len(row)} fields under a header of {len(names)}; quote what holds delimiters or line breaks"
        )
        return Rejected("wrong_type", problem)
    if not quoted and any(len(text) > 2 and text[0] == text[-1] == '"' and '""' in text for text in row):
        return Rejected("wrong_type", "a field is quoted as in a csv file; call the file .csv")
    return dict(zip(names, row, strict=True))
