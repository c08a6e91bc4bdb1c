"""Rows of files of questions, answers, verdicts and replies: a JSON array or JSON lines, maybe .zst."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from common.errors import UserError
from eval.generation.prefixes import content

Row = dict[str, Any]
NAMED = 3  # ids that an error names
HALF = re.compile("[\ud800-\udfff]")


def read_rows(path: Path) -> list[Row]:
    """The objects of a file, at least one. UserError when a line or the array is cut off, or holds others."""
    text = content(path).removeprefix("\ufeff")  # the mark that some programs begin a file with
    if text.lstrip()[:1] == "[":
        rows = _parsed(text, str(path))
        where = [f"{path} row {i}" for i in range(1, len(rows) + 1)]
    else:
        lines = [(i, line) for i, line in enumerate(text.split("\n"), start=1) if line.strip()]
        where = [f"{path} line {i}" for i, _ in lines]
        rows = [_parsed(line, position) for (_, line), position in zip(lines, where, strict=True)]
    for row, position in zip(rows, where, strict=True):
        if not isinstance(row, dict):
            raise UserError(f"{position} is not an object with fields")
    if not rows:
        raise UserError(f"{path} has no rows")
    return rows


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = getattr(error, "msg", type(error).__name__)
        raise UserError(f"{where} is cut off or not JSON ({reason}); is the file half-written?") from None


def text_of(row: Mapping[str, Any], names: Sequence[str], where: str) -> str:
    """The text of the first field in `names` that a row has; UserError where it has none."""
    for name in names:
        if isinstance(row.get(name), str):
            return whole_characters(row[name])
    raise UserError(f"{where}: no text in {' or '.join(names)}; its fields: {', '.join(map(str, row))}")


def answer_of(row: Mapping[str, Any], name: str, where: str) -> str:
    """A field's text. Published files also have null, an empty answer, and answers that became true or 3."""
    value = row.get(name)
    if name in row and value is None:
        return ""
    return str(value) if isinstance(value, bool | int | float) else text_of(row, (name,), where)


def whole_characters(text: str) -> str:
    """The text with halves of characters, which no file can hold, replaced one for one: lengths count."""
    return HALF.sub("\ufffd", text)


def named(ids: Iterable[str]) -> str:
    """The first ids of a list as an error shows them, and how many more there are."""
    all_ids = list(ids)
    text = ", ".join(repr(name if len(name) <= 60 else name[:57] + "...") for name in all_ids[:NAMED])
    return text + (f" and {len(all_ids) - NAMED} more" if len(all_ids) > NAMED else "")


def repeated(ids: Sequence[str]) -> list[str]:
    """The ids that come more than once, each once."""
    earlier: set[str] = set()
    return list(dict.fromkeys(name for name in ids if name in earlier or earlier.add(name)))  # type: ignore[func-returns-value]


def evenly(count: int, limit: int | None) -> list[int]:
    """At most `limit` of the numbers below `count`, evenly spaced."""
    if limit is not None and limit < 1:
        raise UserError(f"--limit {limit} must be at least 1")
    if limit is None or limit >= count:
        return list(range(count))
    return [i * count // limit for i in range(limit)]
