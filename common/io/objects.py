"""Directories in object stores. Code names a file of a store by the path of its local copy:

    s3://bucket/data/train/manifest.json    $EMO_MIRRORS/s3/bucket/data/train/manifest.json

The path of a file therefore shows whether a store or a file system shares it.
"""

from __future__ import annotations

import os
import re
import time
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UserError, one_line
from .store import NEEDS

if TYPE_CHECKING:
    from .fsspec_store import PatientStore

RECENT = 0.5  # seconds that a listing is used for, or as long as it took if that is longer
ADDRESS = re.compile(r"([a-z][a-z0-9]*)://([^/@]+(?:/[^/@]+)+)/?")


def local_directory(text: str) -> Path:
    """Return a directory given as a path, or the local copy of one given as an address.

    Raises ValueError for an address without a bucket and a directory, or with a password.
    """
    if not is_address(text):
        return Path(text)
    match = ADDRESS.fullmatch(text)
    if match is None or {".", ".."} & {*match[2].split("/")}:
        raise ValueError("an address is written like s3://BUCKET/DIRECTORY")
    return mirrors() / match[1] / match[2]


def is_address(text: str) -> bool:
    """Return whether a text is an address, also one whose second slash is missing or was removed by Path."""
    return re.match(r"[a-z][a-z0-9]+:/", text) is not None


def mirrors() -> Path:
    """Return the directory of the local copies."""
    return Path(os.environ.get("EMO_MIRRORS") or "~/.cache/emo/mirrors").expanduser().absolute()


def address_of(path: Path) -> str | None:
    """Return the address of the file whose local copy is at `path`, or None if it belongs to no store."""
    if not path.is_relative_to(root := mirrors()):
        return None
    scheme, *parts = path.relative_to(root).parts
    return f"{scheme}://{'/'.join(parts)}"


def shown(path: Path) -> str:
    """Return the address of a file of a store, or the path of another file, for messages."""
    return address_of(path) or str(path)


def in_store(path: Path) -> bool:
    """Return whether `path` is the local copy of a file or directory of a store."""
    return address_of(path) is not None


def locate(path: Path) -> tuple[PatientStore, str]:
    """Return the store of a file or directory and its name there."""
    scheme, bucket, *rest = path.relative_to(mirrors()).parts
    return _open_store(f"{scheme}://{bucket}", os.getpid()), "/".join(rest)


@cache
def _open_store(target: str, process: int) -> PatientStore:
    """Open a store for a process. A forked process needs its own."""
    from .fsspec_store import PatientStore

    try:
        return PatientStore(target)
    except (ImportError, ValueError) as error:
        scheme = target.partition("://")[0]
        advice = f"pip install {NEEDS[scheme]}" if scheme in NEEDS else one_line(error, 200)
        problem = f"{target} is not an address that fsspec can open ({advice})"
        raise UserError(problem, code="address") from None


def list_objects(directory: Path, depth: int | None = None) -> dict[str, dict[str, Any]]:
    """Return what the store lists about each file below a directory, by its name relative to it.

    depth: levels of directories, or None for all.
    """
    store, name = locate(directory)
    files = store.describe_files(name, depth)
    relative = {path.removeprefix(f"{name}/"): info for path, info in files.items()}
    return {path: info for path, info in relative.items() if ".." not in path.split("/")}


def describe_recently(path: Path) -> dict[str, Any] | None:
    """Return what the store lists about a file, or listed a moment ago."""
    until, files = _listings.get(path.parent, (0.0, {}))
    if time.monotonic() >= until:
        files = list_now(path.parent)
    return files.get(path.name)


def existed_recently(path: Path) -> bool:
    """Return whether a file exists or, if it belongs to a store, existed a moment ago."""
    return describe_recently(path) is not None if in_store(path) else path.is_file()


def list_now(directory: Path) -> dict[str, dict[str, Any]]:
    """Return what the store lists about each file in a directory, and remember it."""
    began = time.monotonic()
    files = list_objects(directory, 1)
    listed = time.monotonic()
    _listings[directory] = listed + max(RECENT, listed - began), files
    return files


def last_listing(directory: Path) -> dict[str, dict[str, Any]]:
    """Return what this process listed last in a directory, which may be old or nothing."""
    return _listings.get(directory, (0.0, {}))[1]


def forget_listings() -> None:
    """Let `describe_recently` and `existed_recently` ask the store again."""
    for directory, (_, files) in list(_listings.items()):  # threads may add some
        _listings[directory] = 0.0, files


# Until when a listing is used, and its files, by directory.
_listings: dict[Path, tuple[float, dict[str, dict[str, Any]]]] = {}
