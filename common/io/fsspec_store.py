"""The store of any address that fsspec can open: a directory, s3://, gs://, ..."""

from __future__ import annotations

import contextlib
import errno
import random
import secrets
import shutil
import time
from collections.abc import Callable, Iterable
from functools import wraps
from pathlib import Path
from typing import IO, Any, Concatenate, ParamSpec, TypeVar, get_args

import fsspec
from fsspec.implementations.local import LocalFileSystem

from ..errors import PERMANENT, FailureError, UserError, one_line
from .store import NEEDS, Store

NEW = ".new"  # in the suffix of a local file that is being written
PIECE = 16 << 20  # bytes that are read at once
PATIENCE = 180.0  # seconds
LONGEST_PAUSE = 5.0  # seconds between two attempts
PERMANENT_ERRORS = (UserError, ImportError, ValueError, *get_args(PERMANENT))
# s3fs raises these numbers for requests that the server rejects, for example because of the region.
REJECTED = {errno.EINVAL, getattr(errno, "EREMCHG", errno.EINVAL)}

P = ParamSpec("P")
R = TypeVar("R")


class FsspecStore(Store):
    """Files below a directory of a file system of fsspec."""

    def __init__(self, target: str) -> None:
        self._system, self._root = fsspec.core.url_to_fs(target)
        self._has_directories = target.partition("://")[0] not in NEEDS

    def list_files(self, directory: str) -> dict[str, int]:
        return {name: info["size"] for name, info in self.describe_files(directory).items()}

    def describe_files(self, directory: str, depth: int | None = None) -> dict[str, dict[str, Any]]:
        """Return what the file system lists about every file below `directory`, by full name.

        depth: levels of directories, or None for all.
        """
        self._system.invalidate_cache()
        try:
            files = self._system.find(self._path(directory).rstrip("/"), maxdepth=depth, detail=True)
        except FileNotFoundError:
            return {}
        return {path.removeprefix(f"{self._root}/"): info for path, info in files.items()}

    def read(self, name: str) -> bytes | None:
        self._system.invalidate_cache()
        with contextlib.suppress(FileNotFoundError):
            return self._system.cat_file(self._path(name))
        return None

    def write(self, name: str, pieces: Iterable[bytes]) -> None:
        path = self._new_path(name)
        local = isinstance(self._system, LocalFileSystem)  # others replace a file when it is closed
        written = f"{path}{NEW}-{secrets.token_hex(4)}" if local else path
        with self._system.open(written, "wb") as sink:
            for piece in pieces:
                sink.write(piece)
        if local:
            Path(written).replace(path)

    def create(self, name: str, content: bytes) -> None:
        """Write a file that does not exist. Of several writers one succeeds; others get FileExistsError."""
        try:
            self._system.pipe_file(self._new_path(name), content, mode="create")
        except OSError as error:
            if error.errno == errno.EINVAL:  # of s3fs, for a server that names no condition in its answer
                raise FileExistsError(name) from None
            raise

    def upload(self, name: str, file: Path) -> None:
        """Write the content of a local file, or replace it."""
        self._system.put_file(str(file), self._new_path(name))

    def modified(self, name: str) -> float:
        """Return when a file was written last, in seconds since the epoch by the store's clock."""
        self._system.invalidate_cache()
        return self._system.modified(self._path(name)).timestamp()

    def delete(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._system.rm_file(self._path(name))

    def inspect(self, name: str, read: Callable[[IO[bytes]], R]) -> R:
        """Return what a function reads from a file, at any positions."""
        with self._system.open(self._path(name), "rb") as source:
            return read(source)

    def download(self, name: str, sink: IO[bytes]) -> None:
        self.inspect(name, lambda source: shutil.copyfileobj(source, sink, PIECE))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _new_path(self, name: str) -> str:
        """Return the path of a file that is about to be written, in a directory that exists."""
        path = self._path(name)
        if self._has_directories:
            self._system.makedirs(path.rpartition("/")[0], exist_ok=True)
        return path


def _patient(request: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """Repeat a request that fails, unless the error is permanent. Raises FailureError in the end."""

    @wraps(request)
    def repeated(store: Any, *args: P.args, **options: P.kwargs) -> R:
        deadline = time.monotonic() + PATIENCE
        pause = 0.1
        while True:
            try:
                return request(store, *args, **options)
            except PERMANENT_ERRORS:
                raise
            except Exception as error:  # stores raise anything
                problem = f"the object store cannot be used ({one_line(error, 200)})"
                if "Credentials" in type(error).__name__:
                    raise UserError(f"{problem}. Set its keys", code="address") from None
                if isinstance(error, OSError) and error.errno in REJECTED:
                    advice = "Check the address, AWS_ENDPOINT_URL and AWS_DEFAULT_REGION"
                    raise UserError(f"{problem}. {advice}", code="address") from None
                if time.monotonic() > deadline:
                    advice = "Run the command again when it is reachable"
                    raise FailureError(f"{problem}. {advice}", code="unreachable") from None
            time.sleep(pause * random.uniform(0.5, 1))
            pause = min(2 * pause, LONGEST_PAUSE)

    return repeated


class PatientStore(FsspecStore):
    """A store that repeats failed requests for PATIENCE seconds, because servers fail and restart."""

    describe_files = _patient(FsspecStore.describe_files)
    modified = _patient(FsspecStore.modified)
    read = _patient(FsspecStore.read)
    write = _patient(FsspecStore.write)
    upload = _patient(FsspecStore.upload)
    delete = _patient(FsspecStore.delete)
    inspect = _patient(FsspecStore.inspect)

    def __init__(self, target: str) -> None:
        super().__init__(target)
        self._rejects_existing = False  # known after the first file

    def create(self, name: str, content: bytes) -> None:
        """Write a file that does not exist, with a unique content.

        By the content, a retry recognises a file that an earlier attempt wrote before its answer was lost.
        Raises UserError if the store replaces a file that exists, because two jobs could then take a lease.
        """
        try:
            _patient(super().create)(name, content)
        except FileExistsError:
            if self.read(name) != content:
                raise
        if self._rejects_existing:
            return
        # Another job may delete the file in between, so one repetition that succeeds proves nothing.
        self._rejects_existing = any(self._is_rejected(name, content) for _ in range(3))
        if not self._rejects_existing:
            problem = "the object store replaces a file where it should only create one"
            advice = "Jobs cannot share this store. Use another one, or set data.dir to a directory"
            raise UserError(f"{problem}. {advice}", code="store-overwrites")

    def _is_rejected(self, name: str, content: bytes) -> bool:
        """Return whether the store refuses to create a file that exists."""
        try:
            _patient(super().create)(name, content)
        except FileExistsError:
            return True
        return False

    @_patient
    def download(self, name: str, sink: IO[bytes]) -> None:
        sink.seek(0)
        sink.truncate()
        super().download(name, sink)
