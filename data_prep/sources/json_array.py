"""Reader of .json files that hold all rows in one JSON value."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from emo.common.errors import UserError, one_line

from .files import UTF8_MARK, File, open_text, read_chunks, require_utf8
from .reader import TableReader
from .rows import STRICT_JSON
from .spec import CHAT_COLUMNS, TEXT_COLUMNS

JSON_LIMIT = 1 << 30  # bytes of a .json value, which is loaded into memory


class JsonReader(TableReader):
    """Reads a .json file with an array of rows, or with an object that holds one array of rows."""

    _held: ClassVar[tuple[JsonReader, list[Any]] | None] = None  # one file at a time, as it may be large

    def rows(self, start: int) -> Iterator[Any]:
        if JsonReader._held is None or JsonReader._held[0] is not self:
            JsonReader._held = None  # before the next file is in memory
            JsonReader._held = self, self._load()
        rows = JsonReader._held[1]
        for number in range(start, len(rows)):
            self._read_share = (number + 1) / len(rows)
            yield rows[number]

    def _load(self) -> list[Any]:
        with open_text(self.path) as stream:
            data = b"".join(read_chunks(stream, self.name, JSON_LIMIT + 1))
        if len(data) > JSON_LIMIT:
            raise UserError(
                f"{self.name} is too large for one JSON value. Convert it to jsonl", code="too-large"
            )
        require_utf8(data, self.name)
        try:
            tree = STRICT_JSON.decode(data.decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:
            raise UserError(f"{self.name} is not JSON: {one_line(error)}", code="not-json") from None
        rows = _array_of_rows(tree) if isinstance(tree, dict) else tree
        if not isinstance(rows, list):
            raise UserError(
                f"{self.name} must be an array of rows, or an object with one array of rows",
                code="source-format",
            )
        return rows


def is_one_value(path: File) -> bool:
    """Return whether a .json file is one value with all rows, as opposed to one row on each line."""
    line: list[bytes] = []  # chunks of the first line
    size = 0
    newline = b""
    single = True
    with open_text(path) as stream:
        for chunk in read_chunks(stream, str(path)):
            others = chunk
            if not newline:
                text = chunk if line else chunk.removeprefix(UTF8_MARK).lstrip()
                if not line and text.startswith(b"["):
                    return True
                text, newline, others = text.partition(b"\n")
                line += [text] if text else []
            size += len(chunk)
            single = not others.strip() and size <= JSON_LIMIT
            if not single:
                break
    try:
        row = json.loads(b"".join(line))
    except (ValueError, RecursionError):
        return not single
    return single and isinstance(row, dict) and _array_of_rows(row) is not None


def _array_of_rows(tree: Mapping[str, object]) -> list[Any] | None:
    """Return the array of rows in an object, or None if the object is itself a row."""
    arrays = [(name, value) for name, value in tree.items() if isinstance(value, list)]
    if len(arrays) != 1 or arrays[0][0] in CHAT_COLUMNS or any(name in tree for name in TEXT_COLUMNS):
        return None
    return arrays[0][1]
