"""Size-limited readers for untrusted files."""

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

JSON_BYTES = 32 << 20  # largest JSON file; the index of the largest published checkpoint has 9 MB

# What NumPy raises for damaged files, besides OSError and ValueError.
DAMAGED = (EOFError, KeyError, MemoryError, SyntaxError, TokenError, UnpicklingError, zlib.error)


def read_bytes(path: Path, limit: int) -> bytes:
    """Read a file. Raises ValueError if it has more than `limit` bytes or is not a regular file."""
    if path.exists() and not path.is_file():
        raise ValueError("it is not a file")  # reading a pipe would block
    with path.open("rb") as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise ValueError(f"it has more than {limit >> 10:,} KiB")
    return content


def read_json(path: Path, limit: int = JSON_BYTES) -> Any:
    """Read a JSON file. Raises OSError, or ValueError if it is too large or invalid."""
    return parse_json(read_bytes(path, limit).decode())


def parse_json(text: str) -> Any:
    """Parse JSON. Raises ValueError if it is invalid or nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


@contextlib.contextmanager
def numpy_value_errors() -> Iterator[None]:
    """Convert the errors that NumPy raises for damaged files, except OSError, to ValueError."""
    try:
        yield
    except (*DAMAGED, zipfile.BadZipFile) as error:
        raise ValueError(one_line(error)) from None


def number(value: Any) -> float | None:
    """Return a finite number as a float, and None for any other value."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    with contextlib.suppress(OverflowError):
        return float(value) if math.isfinite(value) else None
    return None


def is_plain_name(name: object) -> bool:
    """Return whether a name stays within its directory: no separators, no `.` or `..`."""
    if not isinstance(name, str) or name in ("", ".", "..") or set(name) & set("/\\\0"):
        return False
    return len(name.encode("utf-8", "replace")) <= 255  # the limit of file systems
