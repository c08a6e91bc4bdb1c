"""The store of any address that fsspec can open: a directory, s3://, gs://, ..."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterable
from typing import IO

import fsspec

from .store import Store

PIECE = 16 << 20  # bytes that are read at once


class FsspecStore(Store):
    """Files below a directory of a file system of fsspec."""

    def __init__(self, target: str) -> None:
        self._system, self._root = fsspec.core.url_to_fs(target)

    def list_files(self, directory: str) -> dict[str, int]:
        self._system.invalidate_cache()
        try:
            files = self._system.find(f"{self._root}/{directory}".rstrip("/"), detail=True)
        except FileNotFoundError:
            return {}
        return {path.removeprefix(f"{self._root}/"): info["size"] for path, info in files.items()}

    def read(self, name: str) -> bytes | None:
        self._system.invalidate_cache()
        path = f"{self._root}/{name}"
        return self._system.cat_file(path) if self._system.exists(path) else None

    def write(self, name: str, pieces: Iterable[bytes]) -> None:
        path = f"{self._root}/{name}"
        self._system.makedirs(path.rpartition("/")[0], exist_ok=True)
        with self._system.open(path, "wb") as sink:
            for piece in pieces:
                sink.write(piece)

    def delete(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._system.rm_file(f"{self._root}/{name}")

    def download(self, name: str, sink: IO[bytes]) -> None:
        with self._system.open(f"{self._root}/{name}", "rb") as source:
            shutil.copyfileobj(source, sink, PIECE)
