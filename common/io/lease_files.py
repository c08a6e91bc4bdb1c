"""The files of leases, in a file system or an object store, with the operations that both have."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from . import objects

RELEASED = "released"  # content of a released lease in a store


class LeaseFiles:
    """The lease files of a directory in a file system."""

    poll = 0.1  # seconds between attempts to take a lease

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def names(self) -> list[str]:
        """Return the names of all files."""
        return [path.name for path in self.directory.glob("*")]

    def name_lists(self) -> Iterator[list[str]]:
        """Yield the names of all files. All lists but the last may be outdated."""
        yield self.names()

    def create(self, name: str, content: str) -> None:
        """Write a new file. Raises FileExistsError if it exists."""
        self.directory.mkdir(parents=True, exist_ok=True)
        with (self.directory / name).open("x", encoding="utf-8") as file:
            file.write(content)

    def read(self, name: str) -> tuple[str, float]:
        """Return the content of a file and when it was renewed. Raises OSError if there is none."""
        path = self.directory / name
        return path.read_text(encoding="utf-8"), path.stat().st_mtime

    def renew(self, name: str) -> None:
        """Renew the time of a file."""
        os.utime(self.directory / name)

    def clear(self, name: str) -> None:
        """Remove the holder from a file, and make it old."""
        os.truncate(self.directory / name, 0)
        os.utime(self.directory / name, (0, 0))

    def remove(self, name: str) -> None:
        """Delete a file, if it exists."""
        (self.directory / name).unlink(missing_ok=True)

    def now(self) -> float:
        """Return the time by the clock of the file system."""
        return file_system_now(self.directory)


class LeaseObjects(LeaseFiles):
    """The lease files of a directory in an object store."""

    poll = 1.0

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._store, self._name = objects.locate(directory)

    def names(self) -> list[str]:
        return list(objects.list_now(self.directory))

    def name_lists(self) -> Iterator[list[str]]:
        yield list(objects.last_listing(self.directory))  # often enough, and listing is slow
        yield self.names()

    def create(self, name: str, content: str) -> None:
        self._store.create(f"{self._name}/{name}", content.encode())

    def read(self, name: str) -> tuple[str, float]:
        content = self._store.read(f"{self._name}/{name}")
        if content is None:
            raise FileNotFoundError(name)
        return content.decode(), self._store.modified(f"{self._name}/{name}")

    def renew(self, name: str) -> None:
        content = self._store.read(f"{self._name}/{name}")
        if content is not None:  # a store has no times to set
            self._store.write(f"{self._name}/{name}", [content])

    def clear(self, name: str) -> None:
        self._store.write(f"{self._name}/{name}", [RELEASED.encode()])

    def remove(self, name: str) -> None:
        self._store.delete(f"{self._name}/{name}")

    def now(self) -> float:
        """Return the time by the store's clock. A process compares it with its own clock once."""
        bucket = str(objects.address_of(self.directory)).split("/")[2]
        if bucket not in _clocks:
            probe = f"{self._name}/.clock.{uuid.uuid4().hex}"
            self._store.write(probe, [b""])
            _clocks[bucket] = self._store.modified(probe) - time.monotonic()
            self._store.delete(probe)
        return _clocks[bucket] + time.monotonic()


_clocks: dict[str, float] = {}  # by bucket: the store's clock minus the monotonic clock


def lease_files(directory: Path) -> LeaseFiles:
    """Return the lease files of a directory."""
    return (LeaseObjects if objects.in_store(directory) else LeaseFiles)(directory)


def file_system_now(directory: Path) -> float:
    """Return the time by the file system's clock, which may differ from this machine's."""
    probe = directory / f".clock.{uuid.uuid4().hex}"
    probe.touch()
    try:
        return probe.stat().st_mtime
    finally:
        probe.unlink()
