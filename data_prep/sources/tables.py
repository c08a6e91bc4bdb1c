"""Readers of tables: .csv, .tsv and .parquet files."""

from __future__ import annotations

import csv
import io
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from functools import partial
from itertools import accumulate, chain
from typing import Any, Literal

from emo.common.errors import UserError, one_line

from .addresses import RemoteFile
from .files import READ_ERRORS, decompress, format_ending, reject_large_window, require_utf8
from .reader import PIECE_ROWS, TableReader, convert_rows
from .spec import Rejected

DELIMITERS = {".csv": ",;\t", ".tsv": "\t"}  # the first of them that is in the header
# Limit on characters of a line and of a field, in data.max_chars: an unclosed quote would take all the rest.
LINE_LIMIT = 4


class CsvReader(TableReader):
    """Reads a csv or tsv file, plain or compressed, by its header.

    A csv file is quoted as in RFC 4180. A tsv file has no quotes: a tab or a line break ends a field. An
    unclosed quote would make one row of all rows after it, so incorrect quoting is an error.
    """

    def rows(self, start: int) -> Iterator[Any]:
        raw = self._raw = self.path.open("rb")
        line = 0
        with raw, decompress(raw, self.path) as stream:
            try:
                reader, names, quoted = self._open_table(stream)
                number = 0
                while True:
                    line = reader.line_num
                    try:
                        fields = next(reader)
                    except StopIteration:
                        return
                    except csv.Error as error:
                        if reader.line_num != line + 1:  # the broken row includes other rows
                            raise
                        row: Any = Rejected("wrong_type", f"line {line + 1}: {one_line(error)}")
                    else:
                        if not fields:  # a blank line
                            continue
                        row = _as_record(fields, names, quoted)
                    if number >= start:
                        yield row
                    number += 1
            except (csv.Error, *READ_ERRORS) as error:
                reject_large_window(error, self.name)
                raise UserError(
                    f"{self.name} cannot be read after line {line} ({one_line(error)}). Look for a quote "
                    "that is not closed, or a damaged file",
                    code="broken-table",
                ) from None

    def _open_table(self, stream: Any) -> tuple[Any, list[str], bool]:
        """Return a csv reader after the header, the column names, and whether fields may be quoted."""
        ending = format_ending(self.path)
        lines = self._lines(stream)
        header = next((text for text in lines if text.strip()), "")
        require_utf8(header[:64].encode("utf-8", "surrogateescape"), self.name)
        delimiters = DELIMITERS[ending]
        delimiter = next((sign for sign in delimiters if sign in header), delimiters[0])
        csv.field_size_limit(LINE_LIMIT * self.spec.max_chars)  # the default is far below a document
        quoting: Literal[0, 3] = csv.QUOTE_MINIMAL if ending == ".csv" else csv.QUOTE_NONE
        reader = csv.reader(chain([header], lines), delimiter=delimiter, quoting=quoting, strict=True)
        names = [name.strip() or f"column {i}" for i, name in enumerate(next(reader, []), 1)]
        repeated = next((name for name, count in Counter(names).items() if count > 1), None)
        if repeated is not None:
            raise UserError(
                f"{self.name} has two columns {repeated!r} in its first line. Rename one", code="column"
            )
        return reader, names, ending == ".csv"

    def _lines(self, stream: Any) -> Iterator[str]:
        """Yield lines with their ends. Bytes that are not UTF-8 become surrogates and are rejected later."""
        text = io.TextIOWrapper(stream, "utf-8-sig", "surrogateescape", newline="")
        limit = LINE_LIMIT * self.spec.max_chars
        while line := text.readline(limit):
            if len(line) >= limit:
                raise csv.Error("it is too long")
            yield line


def _as_record(fields: list[str], names: list[str], quoted: bool) -> dict[str, str] | Rejected:
    """Return a row by its columns, or the reason why it is broken."""
    if len(fields) != len(names):
        problem = (
            f"{len(fields)} fields, but {len(names)} columns. Quote fields with delimiters or line breaks"
        )
        return Rejected("wrong_type", problem)
    if not quoted and any(len(text) > 2 and text[0] == text[-1] == '"' and '""' in text for text in fields):
        return Rejected("wrong_type", "a field is quoted as in a csv file. Rename the file to .csv")
    return dict(zip(names, fields, strict=True))


class ParquetReader(TableReader):
    """Reads a parquet file. Reading can begin at any row group. Columns that are not needed are null."""

    _group_ends: tuple[int, ...] = ()  # the row after the last of each row group

    def rows(self, start: int) -> Iterator[Any]:
        import pyarrow.parquet

        number = start
        try:
            opened = self.path.open(at_random=True) if isinstance(self.path, RemoteFile) else self.path
            file = pyarrow.parquet.ParquetFile(opened)
            groups = range(file.num_row_groups)
            self._group_ends = tuple(accumulate(file.metadata.row_group(i).num_rows for i in groups))
            first = bisect_right(self._group_ends, start)
            start -= self._group_ends[first - 1] if first else 0
            names = file.schema_arrow.names
            wanted = self.spec.wanted(names)
            nulls = dict.fromkeys(names)
            for batch in file.iter_batches(PIECE_ROWS, row_groups=groups[first:], columns=wanted):
                number += max(0, batch.num_rows - start)
                self._read_share = number / file.metadata.num_rows
                if start < batch.num_rows:
                    yield from convert_rows(partial(_rows_of, batch, nulls), start, batch.num_rows)
                start = max(0, start - batch.num_rows)
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            raise UserError(
                f"{self.name} is not a readable parquet file ({one_line(error, 200)})", code="damaged-file"
            ) from None

    def can_skip(self, end: int, start: int) -> bool:
        return bisect_right(self._group_ends, start) > bisect_right(self._group_ends, end)


def _rows_of(batch: Any, nulls: dict[str, None], begin: int, end: int) -> list[dict[str, Any]]:
    """Return rows of a batch as Python values. `nulls` has all columns of the file."""
    return [nulls | row for row in batch.slice(begin, end - begin).to_pylist(maps_as_pydicts="strict")]
