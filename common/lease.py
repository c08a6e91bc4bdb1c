"""The right to do a piece of work, among processes that share a file system, on one machine or many.

    NAME.000002     a lease file: who holds NAME; the highest number counts

To take a lease is to create the file with the next number, which O_EXCL lets exactly one process do. No locks
of the file system are needed, which not all shared ones have. A holder renews its file's time; one that has
stopped doing so for `seconds`, or whose process is gone from this machine, is superseded by the next number.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from common.untrusted import read_json

BEATS = 4  # renewals per lease time
WRITING_SECONDS = 5.0  # a lease file whose content does not appear within this is of a dead process
LEASE_BYTES = 4096  # of a lease file at most


class Holder(NamedTuple):
    """The process that a lease file names."""

    host: str
    pid: int
    since: float  # seconds since the epoch
    here: bool  # on this machine
    renewed: float  # time of the last renewal, by the file system's clock


class Lease:
    """One process's hold, or attempt to take hold, of `name` in `directory`."""

    def __init__(self, directory: Path, name: str, seconds: float, every: float | None = None) -> None:
        """seconds: after which a lease that is not renewed has ended. every: seconds between renewals."""
        self.directory, self.name, self.seconds = directory, name, seconds
        self.every = every or seconds / BEATS
        self.path: Path | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def acquire(self, renewed: Callable[[], None] | None = None) -> bool:
        """Take the lease unless somebody alive holds it; does not wait.

        A thread then renews it, and calls `renewed` each time.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        newest = self._newest()
        if newest is not None and _alive(newest, self.seconds):
            return False
        number = 1 if newest is None else _number(newest) + 1
        path = self.directory / f"{self.name}.{number:06d}"
        try:
            handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        except FileExistsError:
            return False
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(_myself(), file)
        if self._newest() != path:  # this process slept while others took, gave back and cleared the number
            path.unlink(missing_ok=True)
            return False
        self.path = path
        if newest is not None:
            newest.unlink(missing_ok=True)
        self._thread = threading.Thread(target=self._beat, args=(renewed,), daemon=True)
        self._thread.start()
        return True

    def held(self) -> bool:
        """Whether no other process has superseded this one."""
        return self.path is not None and self._newest() in (self.path, None)

    def holder(self) -> Holder | None:
        """Who holds the lease, or None when that cannot be read."""
        newest = self._newest()
        try:
            found = read_json(newest, LEASE_BYTES)  # type: ignore[arg-type]
            host = found["machine"].partition(":")[0]
            here = found["machine"] == _myself()["machine"]
            return Holder(host, int(found["pid"]), float(found["time"]), here, newest.stat().st_mtime)  # type: ignore[union-attr]
        except (OSError, ValueError, AttributeError, KeyError, TypeError, OverflowError):
            return None

    def release(self) -> None:
        """Give the lease back; only this holder's file is touched."""
        if self.path is None:
            return
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        with contextlib.suppress(OSError):
            self.path.write_text(json.dumps({"released": True}), encoding="utf-8")
        self.path = None

    def _newest(self) -> Path | None:
        found = self.directory.glob(f"{glob.escape(self.name)}.[0-9]*")
        return max((path for path in found if path.suffix[1:].isdecimal()), default=None, key=_number)

    def _beat(self, renewed: Callable[[], None] | None) -> None:
        while not self._stop.wait(self.every):
            with contextlib.suppress(OSError):
                os.utime(self.path)  # type: ignore[arg-type]
            if renewed is not None:
                renewed()


@contextlib.contextmanager
def held(lease: Lease) -> Iterator[bool]:
    """`with held(lease) as mine:`: mine says whether it was free."""
    mine = lease.acquire()
    try:
        yield mine
    finally:
        if mine:
            lease.release()


def _number(path: Path) -> int:
    """The number of a lease file."""
    return int(path.suffix[1:])


def _alive(path: Path, seconds: float) -> bool:
    """Whether the holder named in a lease file still works on it."""
    owner: Any = None
    try:
        age = now_there(path.parent) - path.stat().st_mtime
        with contextlib.suppress(ValueError):
            owner = read_json(path, LEASE_BYTES)
    except OSError:
        return True  # it is changing right now; ask again later
    if age > seconds:
        return False
    if not isinstance(owner, dict):
        return age < WRITING_SECONDS  # just created: the owner's name follows
    if owner.get("released"):
        return False
    if owner.get("machine") != _myself()["machine"]:
        return True
    pid = owner.get("pid")
    return isinstance(pid, int) and _started(pid) == owner.get("started")


def now_there(directory: Path) -> float:
    """The file system's clock, which may differ from this machine's."""
    probe = directory / f".clock.{uuid.uuid4().hex}"
    probe.touch()
    try:
        return probe.stat().st_mtime
    finally:
        probe.unlink()


def _myself() -> dict[str, Any]:
    """This process, recognisable from another one on the same machine."""
    namespace = Path("/proc/self/ns/pid")
    machine = f"{socket.gethostname()}:{namespace.readlink() if namespace.exists() else ''}"
    return {"machine": machine, "pid": os.getpid(), "started": _started(os.getpid()), "time": time.time()}


def _started(pid: int) -> float | None:
    """What tells a process from an earlier one of the same number; None when there is none but a zombie."""
    import psutil

    with contextlib.suppress(OSError):  # Linux: ticks since boot, where psutil's time moves with the clock
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        return None if fields[0] in "ZX" else float(fields[19])
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.Error:
        return None
