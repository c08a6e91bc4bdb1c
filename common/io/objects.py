"""Directories in object stores. Code names a file of a store by the path of its local copy:

    s3://bucket/data/train/manifest.json    $EMO_MIRRORS/s3/bucket/data/train/manifest.json

So a path tells whether a file is shared through a store or through a file system. The functions take paths of
the first kind. A request that fails is repeated for PATIENCE seconds, because servers fail and restart.
"""

from __future__ import annotations

import os
import random
import re
import time
from collections.abc import Callable
from functools import cache, wraps
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, ParamSpec, TypeVar

from ..errors import PERMANENT, FailureError, UserError, one_line
from .store import NEEDS

if TYPE_CHECKING:
    from .fsspec_store import FsspecStore

PATIENCE = 180.0  # seconds
LONGEST_PAUSE = 5.0  # seconds between two attempts
RECENT = 0.5  # seconds
ADDRESS = re.compile(r"([a-z][a-z0-9]*)://([^/@]+(?:/[^/@]+)+)/?")

P = ParamSpec("P")
R = TypeVar("R")


def is_address(text: str) -> bool:
    """Return whether a directory is written as the address of a store."""
    return "://" in text


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


def mirrors() -> Path:
    """Return the directory of the local copies."""
    return Path(os.environ.get("EMO_MIRRORS") or "~/.cache/emo/mirrors").expanduser().absolute()


def address_of(path: Path) -> str | None:
    """Return the address of the file whose local copy is at `path`, or None if it belongs to no store."""
    if not path.is_relative_to(root := mirrors()):
        return None
    scheme, *parts = path.relative_to(root).parts
    return f"{scheme}://{'/'.join(parts)}"


def in_store(path: Path) -> bool:
    """Return whether `path` is the local copy of a file or directory of a store."""
    return address_of(path) is not None


def _locate(path: Path) -> tuple[FsspecStore, str]:
    """Return the store of a file and its name there."""
    scheme, bucket, *rest = path.relative_to(mirrors()).parts
    return _open_store(f"{scheme}://{bucket}", os.getpid()), "/".join(rest)


@cache
def _open_store(target: str, process: int) -> FsspecStore:
    """Open a store for a process. A forked process needs its own."""
    from .fsspec_store import FsspecStore

    try:
        return FsspecStore(target)
    except (ImportError, ValueError) as error:
        scheme = target.partition("://")[0]
        advice = f"pip install {NEEDS[scheme]}" if scheme in NEEDS else one_line(error, 200)
        raise UserError(
            f"{target} is not an address that fsspec can open ({advice})", code="address"
        ) from None


def _patient(request: Callable[P, R]) -> Callable[P, R]:
    """Repeat a request that fails, unless the error is permanent. Raises FailureError in the end."""

    @wraps(request)
    def repeated(*args: P.args, **options: P.kwargs) -> R:
        deadline = time.monotonic() + PATIENCE
        pause = 0.1
        while True:
            try:
                return request(*args, **options)
            except Exception as error:  # stores raise anything
                if isinstance(error, PERMANENT | UserError):
                    raise
                lasting = isinstance(error, ImportError) or "Credentials" in type(error).__name__
                if lasting or time.monotonic() > deadline:
                    kind = UserError if lasting else FailureError
                    problem = f"the object store cannot be used ({one_line(error, 200)})"
                    advice = "Run the command again when it is reachable"
                    raise kind(f"{problem}. {advice}", code="unreachable") from None
            time.sleep(pause * random.uniform(0.5, 1))
            pause = min(2 * pause, LONGEST_PAUSE)

    return repeated


@_patient
def list_objects(directory: Path, depth: int | None = None) -> dict[str, dict[str, Any]]:
    """Return what the store lists about each file below a directory, by its name relative to it.

    depth: levels of directories, or None for all.
    """
    store, name = _locate(directory)
    files = store.describe_files(name, depth)
    relative = {path.removeprefix(f"{name}/"): info for path, info in files.items()}
    return {path: info for path, info in relative.items() if ".." not in path.split("/")}


def describe_recently(path: Path) -> dict[str, Any] | None:
    """Return what the store lists about a file, or listed in the last RECENT seconds."""
    listed, files = _listings.get(path.parent, (-RECENT, {}))
    if time.monotonic() - listed >= RECENT:
        listed = time.monotonic()
        files = list_objects(path.parent, 1)
        _listings[path.parent] = listed, files
    return files.get(path.name)


def forget_listings() -> None:
    """Let `describe_recently` ask the store again."""
    _listings.clear()


_listings: dict[Path, tuple[float, dict[str, dict[str, Any]]]] = {}  # time and files, by directory


@_patient
def describe(path: Path) -> dict[str, Any] | None:
    """Return what the store lists about a file, or None if it has none."""
    store, name = _locate(path)
    return store.describe_file(name)


@_patient
def modified(path: Path) -> float:
    """Return when a file was written, by the store's clock."""
    store, name = _locate(path)
    return store.modified(name)


@_patient
def read(path: Path) -> bytes | None:
    """Return the content of a file, or None if the store has none."""
    store, name = _locate(path)
    return store.read(name)


@_patient
def open_object(path: Path) -> IO[bytes]:
    """Open a file of the store for reading at random positions."""
    store, name = _locate(path)
    return store.open(name)


@_patient
def download(path: Path, sink: IO[bytes]) -> None:
    """Write the content of a file of the store to `sink`, which is cut to it."""
    store, name = _locate(path)
    sink.seek(0)
    sink.truncate()
    store.download(name, sink)


@_patient
def upload(file: Path, path: Path) -> None:
    """Write the content of a local file to the store, or replace it there."""
    store, name = _locate(path)
    store.upload(name, file)
    forget_listings()


def create(path: Path, content: bytes) -> None:
    """Write a file that the store does not have. Of several writers one succeeds.

    The others get FileExistsError. The content must be unique, because a request whose answer is lost is
    repeated.
    """

    @_patient
    def put() -> None:
        store, name = _locate(path)
        store.create(name, content)

    try:
        put()
    except FileExistsError:
        if read(path) != content:
            raise


@_patient
def write(path: Path, content: bytes) -> None:
    """Write a small file, or replace it."""
    store, name = _locate(path)
    store.write(name, [content])


@_patient
def remove(path: Path) -> None:
    """Delete a file of the store, if it exists."""
    store, name = _locate(path)
    store.delete(name)
