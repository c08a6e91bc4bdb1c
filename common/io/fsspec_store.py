"""The store of any address that fsspec can open: a directory, s3://, gs://, ..."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

import fsspec

from .store import NEEDS, Store

PIECE = 16 << 20  # bytes that are read at once


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

    def describe_file(self, name: str) -> dict[str, Any] | None:
        """Return what the file system lists about a file, or None if there is none."""
        self._system.invalidate_cache()
        with contextlib.suppress(FileNotFoundError):
            return self._system.info(self._path(name))
        return None

    def read(self, name: str) -> bytes | None:
        self._system.invalidate_cache()
        with contextlib.suppress(FileNotFoundError):
            return self._system.cat_file(self._path(name))
        return None

    def write(self, name: str, pieces: Iterable[bytes]) -> None:
        with self._system.open(self._new_path(name), "wb") as sink:
            for piece in pieces:
                sink.write(piece)

    def create(self, name: str, content: bytes) -> None:
        """Write a file that does not exist. Of several writers one succeeds; others get FileExistsError."""
        self._system.pipe_file(self._new_path(name), content, mode="create")

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

    def open(self, name: str) -> IO[bytes]:
        """Open a file for reading at random positions."""
        return self._system.open(self._path(name), "rb")

    def download(self, name: str, sink: IO[bytes]) -> None:
        with self.open(name) as source:
            shutil.copyfileobj(source, sink, PIECE)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _new_path(self, name: str) -> str:
        """Return the path of a file that is about to be written, in a directory that exists."""
        path = self._path(name)
        if self._has_directories:
            self._system.makedirs(path.rpartition("/")[0], exist_ok=True)
        return path
