"""The interface of a store, to which `train.copy_to` copies runs.

To add one, subclass `Store` in a new file, and list it in STORES (copies.py) under its scheme.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import IO

# Packages for stores without directories, by scheme.
NEEDS = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs"}
VERSION = ("size", "etag", "lastmodified", "mtime", "updated", "generation", "md5hash")


def version_of(info: Mapping[str, object]) -> list[str]:
    """Return the size, version and times of a file in its file system.

    They are the same from a listing and from a query of the file. Stores use other keys, time zones and
    fractions of seconds in the two.
    """
    found = {}
    for key, value in info.items():
        time = int(value.timestamp()) if isinstance(value, datetime) else value
        found[key.lower().replace("-", "").replace("_", "")] = str(time)
    return [found[name] for name in VERSION if name in found]


class Store(ABC):
    """Files under names such as `step-000100/COMPLETE`.

    Threads and hosts call the methods at the same time. They may raise any exception when the store cannot be
    reached.
    """

    @abstractmethod
    def __init__(self, target: str) -> None:
        """Open the store at the address `train.copy_to`."""

    @abstractmethod
    def list_files(self, directory: str) -> dict[str, int]:
        """Return the size in bytes of every file below `directory`, by full name. "" lists all files."""

    @abstractmethod
    def read(self, name: str) -> bytes | None:
        """Return the newest content of a file that any host wrote, or None if there is none."""

    @abstractmethod
    def write(self, name: str, pieces: Iterable[bytes]) -> None:
        """Write a file, or replace it."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """Delete a file if it exists."""

    def download(self, name: str, sink: IO[bytes]) -> None:
        """Write the content of a file to `sink`. A store of large files should not read them at once.

        Raises FileNotFoundError if there is none.
        """
        content = self.read(name)
        if content is None:
            raise FileNotFoundError(name)
        sink.write(content)
