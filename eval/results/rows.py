"""Rows of input files (JSON lines, a JSON array or plain text, also compressed), and samples of rows."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from emo.common.errors import UserError, one_line
from emo.data_prep.sources.files import format_ending, read_text

T = TypeVar("T")
TABLES = (".csv", ".tsv", ".parquet")
SURROGATE = re.compile("[\ud800-\udfff]")
ESCAPED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class FileRow(dict[str, Any]):
    """The fields of a row of a file. source: the file and the number of the row, for errors."""

    source = ""

    def text(self, *names: str) -> str:
        """Return the text of the first field in `names` that the row has, or raise UserError."""
        for name in names:
            if isinstance(self.get(name), str):
                return self[name]
        fields = ", ".join(self)
        raise UserError(
            f"{self.source} has no text in the field {' or '.join(names)}. Its fields: {fields}",
            code="no-text",
        )


def read_json_rows(path: Path) -> list[FileRow]:
    """Return the objects of a JSON array or of JSON lines, at least one.

    Raises UserError when the file is cut off or contains anything else. Lone surrogates, which no file can
    store, are replaced one by one, so lengths stay the same.
    """
    text = read_text(path).removeprefix("\ufeff")  # the byte order mark that some programs write
    is_array = text.lstrip().startswith("[")
    values: list[Any] = []
    for number, part in enumerate([text] if is_array else text.split("\n"), start=1):
        if not part.strip():
            continue
        try:
            value = json.loads(part)
            if ESCAPED_SURROGATE.search(part):
                value = json.loads(SURROGATE.sub("\ufffd", json.dumps(value, ensure_ascii=False)))
        except (ValueError, RecursionError) as error:
            source = path if is_array else f"{path} line {number}"
            reason = getattr(error, "msg", type(error).__name__)
            raise UserError(
                f"{source} is not valid JSON ({reason}). The file may be incomplete.", code="not-json"
            ) from None
        values += value if is_array else [value]
    if not values or not all(isinstance(value, dict) for value in values):
        raise UserError(f"{path} must contain JSON objects, one for each row", code="not-an-object")
    rows = [FileRow(value) for value in values]
    for number, row in enumerate(rows, start=1):
        row.source = f"{path} row {number}"
    return rows


def read_texts(path: Path, field: str = "text") -> list[str]:
    """Return the stripped texts of a file: `field` of its JSON rows, or its lines.

    The ending of the file decides, as in data preparation. Raises UserError for tables.
    """
    ending = format_ending(path)
    if ending in (".jsonl", ".json"):
        return [row.text(field).strip() for row in read_json_rows(path)]
    if ending in TABLES:
        raise UserError(f"{path} is a table. Convert it to .jsonl or .txt", code="unknown-ending")
    return [line.strip() for line in read_text(path).split("\n")]


def evenly_spaced(rows: Sequence[T], limit: int | None) -> list[T]:
    """Return at most `limit` of the rows, evenly spaced."""
    if limit is not None and limit < 1:
        raise UserError(f"--limit {limit} must be at least 1", code="option-value")
    count = len(rows) if limit is None else min(limit, len(rows))
    return [rows[i * len(rows) // count] for i in range(count)]


def load_from_hub(name: str, load: Callable[[], T]) -> T:
    """Return the result of `load`, or raise UserError if the hub cannot deliver it."""
    try:
        return load()
    except Exception as error:  # many kinds: no network, no such id, no such split
        raise UserError(
            f"cannot load {name} from the hub ({one_line(error, 200)}). Set --data to a directory.",
            code="hub",
        ) from None


def find_file(title: str, data: str, stems: Iterable[str], endings: Iterable[str]) -> Path:
    """Return the first existing file of DATA/[*/]STEM.ENDING. title: its name in a UserError."""
    folders = (Path(data), *sorted(Path(data).glob("*")))
    paths = (folder / f"{stem}{ending}" for stem in stems for folder in folders for ending in endings)
    if path := next(filter(Path.is_file, paths), None):
        return path
    raise UserError(
        f"{title}: no file {' or '.join(stems)} ({', '.join(endings)}) under --data {data}",
        code="no-task-data",
    )
