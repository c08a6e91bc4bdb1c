"""An object store in a directory for fsspec, `bucket://NAME/...`, with the guarantees and failures of S3.

A file appears complete or not at all, and exactly one of several writers creates it. Forked processes share
the store. It needs no server. tests/campaigns/stores.py has a real one.
"""

from __future__ import annotations

import os
import random
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from emo.common.io import objects

FAULTS = {"share": 0.0, "pause": 0.0}  # share of requests that fail, and seconds that a listing takes
ROOT = "EMO_TEST_BUCKETS"


class Bucket(LocalFileSystem):
    """Files below the directory in the environment variable that ROOT names."""

    protocol = "bucket"

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        path = str(path).removeprefix("bucket://")
        return path if path.startswith("/") else f"{os.environ[ROOT]}/{path}".rstrip("/")

    def put_file(self, path1: str, path2: str, callback: Any = None, **options: Any) -> None:
        self._put(path2, lambda part: shutil.copyfile(path1, part), os.replace)

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        publish = os.link if mode == "create" else os.replace
        self._put(path, lambda part: Path(part).write_bytes(value), publish)

    def _put(self, path: str, write: Callable[[str], Any], publish: Callable[[str, str], None]) -> None:
        path = self._strip_protocol(path)
        part = f"{os.environ[ROOT]}/.part-{uuid.uuid4().hex}"
        _fail()
        write(part)
        publish(part, path)
        Path(part).unlink(missing_ok=True)
        _fail()  # the response is lost

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        _fail()
        return super()._open(path, mode, **options)

    def find(self, *arguments: Any, **options: Any) -> Any:
        _fail()
        time.sleep(FAULTS["pause"])
        return super().find(*arguments, **options)


def _fail() -> None:
    if random.random() < FAULTS["share"]:
        raise ConnectionResetError("500 Internal Server Error")


@contextmanager
def bucket(root: Path) -> Iterator[Path]:
    """Provide the store and a directory of local copies within a block, and yield the buckets' directory."""
    (root / "buckets").mkdir()
    fsspec.register_implementation("bucket", Bucket, clobber=True)
    objects._open_store.cache_clear()
    changes = {ROOT: str(root / "buckets"), "EMO_MIRRORS": str(root / "mirrors")}
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield root / "buckets"
    finally:
        FAULTS.update(share=0.0, pause=0.0)
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
