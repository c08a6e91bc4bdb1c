"""Reading what others wrote: bounded in size and depth, and nowhere but in the directory that it came in."""

from __future__ import annotations

import contextlib
import json
import math
import os
import stat
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from pickle import UnpicklingError
from tokenize import TokenError
from typing import Any

from common.errors import one_line

JSON_BYTES = 32 << 20  # of a JSON file at most: the index of the largest published checkpoint has 9 MB
LONGEST_NAME = 255  # bytes; file systems take no longer ones
PACKED = (UnpicklingError, zipfile.BadZipFile, zlib.error)
HUB_SNAPSHOTS = "snapshots"  # in the hub's cache files are links to ../../blobs


def read_bytes(path: Path, limit: int) -> bytes:
    """The content of a file. Raises ValueError when it has more than `limit` bytes or is no plain file."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError("it is not a file")  # a pipe in its place would be waited for, for ever
    with path.open("rb") as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise ValueError(f"it has more than {limit >> 10:,} KiB")
    return content


def read_json(path: Path, limit: int = JSON_BYTES) -> Any:
    """The JSON value in a file.

    Raises OSError when it cannot be read, and ValueError whatever else is wrong: too large, nested too
    deeply, not UTF-8, not JSON.
    """
    return parse_json(read_bytes(path, limit).decode())


def parse_json(text: str) -> Any:
    """The JSON value of a text. Raises ValueError, also for one that is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


@contextlib.contextmanager
def arrays() -> Iterator[None]:
    """In the block NumPy reads files: whatever it raises for what they hold, OSError apart, is a ValueError.

    A header is Python for it, and where that cannot be evaluated, Python's tokenizer has errors of its own.
    """
    try:
        yield
    except (EOFError, KeyError, MemoryError, SyntaxError, TokenError, *PACKED) as error:
        raise ValueError(one_line(error)) from None


def number(value: Any) -> float | None:
    """The value as a float where it is a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    with contextlib.suppress(OverflowError):
        return float(value) if math.isfinite(value) else None
    return None


def check_unpacked(path: Path) -> None:
    """Raise ValueError for a zip file, such as .npz, that is packed: a small one may unpack to any size."""
    with zipfile.ZipFile(path) as members:
        if any(member.compress_type != zipfile.ZIP_STORED for member in members.infolist()):
            raise ValueError("it is packed, as nothing here is written")


def is_plain_name(name: object) -> bool:
    """Return whether a name is of something in its directory, not above or below it."""
    if not isinstance(name, str) or name in ("", ".", "..") or set(name) & set("/\\\0"):
        return False
    return len(name.encode("utf-8", "replace")) <= LONGEST_NAME


def links_outside(directory: Path) -> Iterator[Path]:
    """Links in a directory, or further down, that lead out of it; the hub's own cache leads to its blobs.

    Whoever made the directory could have such a link show, hash or copy any file of its reader.
    """
    root = directory.resolve()
    roots = [root]
    if root.parent.name == HUB_SNAPSHOTS:
        roots.append(root.parent.parent / "blobs")
    for folder, names, files in os.walk(root):
        for name in sorted([*names, *files]):
            path = Path(folder) / name
            if path.is_symlink() and not any(path.resolve().is_relative_to(allowed) for allowed in roots):
                yield directory / path.relative_to(root)
