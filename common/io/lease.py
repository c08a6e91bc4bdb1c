"""The right to do a piece of work, among processes that share a file system, on one machine or many.

    NAME.000002     a lease: the process that holds NAME; the highest number counts

To take a lease is to create the file with the next number, which exactly one process can do: neither
locks of the file system nor exchanges of names are needed, which not all shared ones have. A holder renews
its file's time; one that has not done so for the lease's time, or whose process is gone from this machine, is
superseded by the next number. Released leases leave their file, empty and old, so that numbers never come
again.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

SECONDS = 60.0  # after which a lease that is not renewed has ended; it is renewed four times in them
WRITING_SECONDS = 5.0  # a lease file whose content does not appear within this is of a dead process
POLL = 0.1  # seconds between looks at a lease that is waited for


class Holder(NamedTuple):
    """A process, as lease files name it: no other one has the same machine, number and start."""

    machine: str  # and the process namespace there: a container's numbers are its own
    pid: int
    started: float | None  # see `_started`
    since: float  # at which it took the lease, seconds since the epoch
    renewed: float = 0.0  # time of the last renewal, by the file system's clock

    @staticmethod
    def current() -> Holder:
        """Return this process."""
        namespace = Path("/proc/self/ns/pid")
        machine = f"{socket.gethostname()}:{namespace.readlink() if namespace.exists() else ''}"
        return Holder(machine, os.getpid(), _started(os.getpid()), time.time())

    @property
    def here(self) -> bool:
        """Return whether it runs on this machine."""
        return self.machine == Holder.current().machine

    def __str__(self) -> str:
        return f"process {self.pid} on {self.machine.partition(':')[0]}"


class Lease:
    """One process's hold, or attempt to take hold, of `name` in `directory`."""

    def __init__(
        self, directory: Path, name: str, seconds: float = SECONDS, every: float | None = None
    ) -> None:
        """seconds: after which a lease that is not renewed has ended. every: seconds between renewals."""
        self.directory, self.name, self.seconds = directory, name, seconds
        self.every = every or seconds / 4
        self.path: Path | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def acquire(self, renewed: Callable[[], None] | None = None) -> bool:
        """Take the lease unless somebody alive holds it; return whether it was taken, without waiting.

        A thread then renews it, and calls `renewed` each time.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        newest = self._newest()
        if newest is not None and _alive(newest, self.seconds):
            return False
        number = 0 if newest is None else int(newest.suffix[1:])
        path = self.directory / f"{self.name}.{number + 1:06d}"
        try:
            with path.open("x", encoding="utf-8") as file:
                json.dump(Holder.current()._asdict(), file)
        except FileExistsError:
            return False
        if self._newest() != path:  # this process slept while others took, gave back and cleared the number
            path.unlink(missing_ok=True)
            return False
        self.path = path
        if newest is not None:
            newest.unlink(missing_ok=True)
        self._thread = threading.Thread(target=self._beat, args=(path, renewed), daemon=True)
        self._thread.start()
        return True

    def is_held(self) -> bool:
        """Return whether no other process has superseded this one."""
        return self.path is not None and self._newest() in (self.path, None)

    def holder(self) -> Holder | None:
        """Return who holds the lease, or None when that cannot be read."""
        newest = self._newest()
        with contextlib.suppress(OSError):
            return None if newest is None else _holder(newest)
        return None

    def release(self) -> None:
        """Give the lease back; only this holder's file is touched."""
        if self.path is None or self._thread is None:
            return
        self._stop.set()
        self._thread.join()
        with contextlib.suppress(OSError):
            os.truncate(self.path, 0)
            os.utime(self.path, (0, 0))
        self.path = None

    def _newest(self) -> Path | None:
        paths = self.directory.glob(f"{glob.escape(self.name)}.[0-9]*")
        numbered = (path for path in paths if path.suffix[1:].isdecimal())
        return max(numbered, default=None, key=lambda path: int(path.suffix[1:]))

    def _beat(self, path: Path, renewed: Callable[[], None] | None) -> None:
        while not self._stop.wait(self.every):
            with contextlib.suppress(OSError):
                os.utime(path)
            if renewed is not None:
                renewed()


@contextlib.contextmanager
def hold_if_free(lease: Lease) -> Iterator[bool]:
    """Hold a lease for a block, `with held(lease) as free:`, where it is free."""
    free = lease.acquire()
    try:
        yield free
    finally:
        lease.release()


@contextlib.contextmanager
def wait_and_hold(lease: Lease, waiting: Callable[[str], None] | None) -> Iterator[None]:
    """Hold a lease for a block, waiting for it; `waiting` gets the holder's name, once, if there is one."""
    while not lease.acquire():
        if waiting is not None:
            waiting(str(lease.holder() or "a process that has just begun"))
            waiting = None
        time.sleep(POLL)
    try:
        yield
    finally:
        lease.release()


@contextlib.contextmanager
def register_user(directory: Path, seconds: float = SECONDS) -> Iterator[None]:
    """Be among those that use what `directory` stands for, which any number may; see `users`.

    Whoever wants it alone, and whoever joins, has a common lease meanwhile.
    """
    lease = Lease(directory, f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}", seconds)
    with hold_if_free(lease):
        path = lease.path
        yield
    if path is not None:  # nobody waits for its name
        path.unlink(missing_ok=True)


def living_users(directory: Path, seconds: float = SECONDS) -> list[Holder]:
    """Return those who joined and still live; the files of others are removed."""
    living = []
    for path in sorted(directory.glob("*.[0-9]*")):
        if _alive(path, seconds):  # one that is being written has no holder yet
            living.append(_holder(path) or Holder("a host", 0, None, time.time()))
        else:
            path.unlink(missing_ok=True)
    return living


def process_mark() -> str:
    """Return this process's mark for the names of its files, which `signer_ended` reads."""
    process = Holder.current()
    machine = hashlib.sha256(process.machine.encode()).hexdigest()[:8]
    return f"{machine}-{process.pid}-{process.started:.0f}"


def marked_process_ended(mark: str) -> bool | None:
    """Return whether the process that made a mark has ended; None where that cannot be known here."""
    machine, pid, started = [*mark.split("-"), "", ""][:3]
    if machine != process_mark().partition("-")[0] or not pid.isdecimal():
        return None
    now = _started(int(pid))
    return now is None or f"{now:.0f}" != started


def _holder(path: Path) -> Holder | None:
    """Return the process that a lease file names; None while that is written, or where it is damaged."""
    try:
        holder = Holder(**json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError):
        return None
    return holder._replace(renewed=path.stat().st_mtime)


def _alive(path: Path, seconds: float) -> bool:
    """Return whether the holder named in a lease file still works on it."""
    try:
        holder, age = _holder(path), file_system_now(path.parent) - path.stat().st_mtime
    except OSError:
        return True  # it is changing right now; ask again later
    if holder is None:
        return age < min(seconds, WRITING_SECONDS)  # just created: the holder's name follows
    return age <= seconds and (not holder.here or _started(holder.pid) == holder.started)


def file_system_now(directory: Path) -> float:
    """Return the time of the file system's clock, which may differ from this machine's."""
    probe = directory / f".clock.{uuid.uuid4().hex}"
    probe.touch()
    try:
        return probe.stat().st_mtime
    finally:
        probe.unlink()


def _started(pid: int) -> float | None:
    """Return what tells a process from an earlier one of the same number; None when it is gone."""
    with contextlib.suppress(OSError):  # Linux: ticks since boot, where psutil's time moves with the clock
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        return None if fields[0] in "ZX" else float(fields[19])
    import psutil

    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.Error:
        return None
