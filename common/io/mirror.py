"""Local copies of the files of object stores, see objects.py. Paths of file systems are left as they are."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

from ..errors import UserError
from . import objects
from .files import PART, THREADS, Hashes, list_files, match_name, part_file
from .store import version_of


def refresh(directory: Path, patterns: Sequence[str]) -> None:
    """Make the local copies of matching files the same as in the store: new, changed and deleted ones."""
    if not objects.in_store(directory):
        return
    objects.forget_listings()
    files = objects.list_objects(directory)
    listed = {directory / name: info for name, info in files.items() if match_name(name, patterns)}
    for path in list(list_files(directory)):
        name = path.relative_to(directory).as_posix()
        if path not in listed and match_name(name, patterns) and path.suffix != PART:
            path.unlink(missing_ok=True)
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(_copy_version, listed, listed.values()))


def _copy_version(path: Path, info: Mapping[str, object]) -> None:
    """Download a file unless its local copy has the listed version, which its time stands for."""
    digest = hashlib.sha256(str(version_of(info)).encode()).digest()
    time = (int.from_bytes(digest[:4]) >> 1) * 10**9  # full seconds, which all file systems store
    with contextlib.suppress(OSError):
        if path.stat().st_mtime_ns == time:
            return
    # The file may have been deleted since it was listed.
    with contextlib.suppress(FileNotFoundError), part_file(path, Path.replace) as sink:
        _download(path, sink)
        sink.flush()
        os.utime(sink.fileno(), ns=(time, time))


def copy_verified(files: Mapping[Path, str], hashes: Hashes, again: bool = False) -> None:
    """Download the files that have no local copy with their sha256, or all files if `again`.

    Raises UserError for a file that is missing or has another content.
    """
    cure = "Delete it, and run `emo prepare RECIPE` again"

    def copy(path: Path, digest: str) -> None:
        if not again and path.is_file() and hashes.sha256(path) == digest:
            return
        with part_file(path, Path.replace) as sink:
            try:
                _download(path, sink)
            except FileNotFoundError:
                problem = f"{objects.address_of(path)} is missing"
                raise UserError(f"{problem}. Run `emo prepare RECIPE` again", code="damaged-data") from None
            sink.seek(0)
            if hashlib.file_digest(sink, "sha256").hexdigest() != digest:  # type: ignore[arg-type]
                problem = f"{objects.address_of(path)} has another content than its manifest lists"
                raise UserError(f"{problem}. {cure}", code="damaged-data")
        hashes.sha256(path)

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(copy, files, files.values()))
    hashes.save()


def size_of(path: Path) -> int:
    """Return the size of a file, in its store if it belongs to one. Raises OSError if there is none."""
    if not objects.in_store(path):
        return path.stat().st_size
    info = objects.describe_recently(path)
    if info is None:
        raise FileNotFoundError(path)
    return int(info["size"])


def _download(path: Path, sink: IO[bytes]) -> None:
    store, name = objects.locate(path)
    store.download(name, sink)
