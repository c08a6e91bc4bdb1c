"""Bounded reading of files that others wrote."""

from __future__ import annotations

import contextlib
import json
import math
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from pickle import UnpicklingError
from tokenize import TokenError
from typing import Any

from ..errors import one_line

JSON_BYTES = 32 << 20  # of a JSON file at most: the index of the largest published checkpoint has 9 MB


def read_bytes(path: Path, limit: int) -> bytes:
    """Return the content of a file. Raises ValueError when it has more than `limit` bytes or is no file."""
    if path.exists() and not path.is_file():
        raise ValueError("it is not a file")  # a pipe in its place would be waited for, for ever
    with path.open("rb") as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise ValueError(f"it has more than {limit >> 10:,} KiB")
    return content


def read_json(path: Path, limit: int = JSON_BYTES) -> Any:
    """Return the JSON value in a file. Raises OSError, or ValueError for what is too large or no JSON."""
    return parse_json(read_bytes(path, limit).decode())


def parse_json(text: str) -> Any:
    """Return the JSON value of a text. Raises ValueError, also for one that is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


@contextlib.contextmanager
def numpy_value_errors() -> Iterator[None]:
    """In the block, turn whatever NumPy raises for a damaged file, OSError apart, into a ValueError."""
    try:
        yield
    except (
        *(EOFError, KeyError, MemoryError, SyntaxError, TokenError),
        *(UnpicklingError, zipfile.BadZipFile, zlib.error),
    ) as error:
        raise ValueError(one_line(error)) from None


def number(value: Any) -> float | None:
    """Return the value as a float where it is a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    with contextlib.suppress(OverflowError):
        return float(value) if math.isfinite(value) else None
    return None


def is_plain_name(name: object) -> bool:
    """Return whether a name is of something in its directory, not above or below it."""
    if not isinstance(name, str) or name in ("", ".", "..") or set(name) & set("/\\\0"):
        return False
    return len(name.encode("utf-8", "replace")) <= 255  # file systems take no longer ones
