"""Leases: mutual exclusion among processes on machines that share a file system or an object store.

    NAME.000002     a lease file with the process that holds NAME; the highest number counts

A process takes a lease by creating the file with the next number, which exactly one process can do. This
needs neither file locks nor atomic renames, which some shared file systems lack. The holder renews the file's
time. A lease that is not renewed in time, or whose process on this machine has ended, is superseded by the
next number. A released lease leaves an old file without a holder, so that numbers are never reused.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from ..errors import UserError
from .lease_files import RELEASED, LeaseFiles, lease_files

SECONDS = 60.0  # until an unrenewed lease expires; it is renewed four times as often
WRITING_SECONDS = 5.0  # until an empty lease file counts as abandoned


class Holder(NamedTuple):
    """The process in a lease file, unique by machine, process id and start time."""

    machine: str  # host name, process namespace of a container, and boot, as hosts may share the others
    pid: int
    started: float | None  # see `_start_time`
    since: float  # when it took the lease, in seconds since the epoch
    renewed: float = 0.0  # last renewal, by the file system's clock

    @staticmethod
    def current() -> Holder:
        """Return this process."""
        namespace, boot = Path("/proc/self/ns/pid"), Path("/proc/sys/kernel/random/boot_id")
        machine = f"{socket.gethostname()}:{namespace.readlink() if namespace.exists() else ''}"
        machine += f":{boot.read_text(encoding='utf-8').strip() if boot.exists() else ''}"
        return Holder(machine, os.getpid(), _start_time(os.getpid()), time.time())

    @property
    def here(self) -> bool:
        """Return whether the process runs on this machine."""
        return self.machine == Holder.current().machine

    def __str__(self) -> str:
        return f"process {self.pid} on {self.machine.partition(':')[0]}"


class Lease:
    """This process's lease on `name` in `directory`, held or not."""

    def __init__(
        self, directory: Path, name: str, seconds: float = SECONDS, every: float | None = None
    ) -> None:
        """seconds: until an unrenewed lease expires. every: seconds between renewals."""
        self.directory = directory
        self.name = name
        self.seconds = seconds
        self.every = every or seconds / 4
        self.path: Path | None = None
        self._files = lease_files(directory)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def acquire(self, renewed: Callable[[], None] | None = None) -> bool:
        """Take the lease unless a live process holds it, and return whether it was taken.

        A thread renews the lease and calls `renewed` each time.
        """
        return any(self._take(names, renewed) for names in self._files.name_lists())

    def _take(self, names: Iterable[str], renewed: Callable[[], None] | None) -> bool:
        """Try to take the lease, given the names of all lease files, which may be outdated."""
        newest = self._newest(names)
        if newest is not None and _is_alive(self._files, newest, self.seconds):
            return False
        number = 0 if newest is None else _number(newest)
        name = f"{self.name}.{number + 1:06d}"
        try:
            self._files.create(name, json.dumps(Holder.current()._asdict()))
        except FileExistsError:
            return False
        if self._newest(self._files.names()) != name:  # others have taken and removed the number before
            self._files.remove(name)
            return False
        self.path = self.directory / name
        if newest is not None:
            self._files.remove(newest)
        self._stop.clear()  # the lease may have been held before
        self._thread = threading.Thread(target=self._renew, args=(name, renewed), daemon=True)
        self._thread.start()
        return True

    def is_free(self) -> bool:
        """Return whether no live process holds the lease, without taking it."""
        newest = self._newest(self._files.names())
        return newest is None or not _is_alive(self._files, newest, self.seconds)

    def is_held(self) -> bool:
        """Return whether this process still holds the lease."""
        return self.path is not None and self._newest(self._files.names()) in (self.path.name, None)

    def holder(self) -> Holder | None:
        """Return the holder of the lease, or None if it cannot be read."""
        newest = self._newest(self._files.names())
        with contextlib.suppress(OSError):
            return None if newest is None else _read_holder(self._files, newest)
        return None

    def release(self) -> None:
        """Release the lease."""
        if self.path is None or self._thread is None:
            return
        self._stop.set()
        self._thread.join()
        with contextlib.suppress(OSError):
            self._files.clear(self.path.name)
        self.path = None

    def _newest(self, names: Iterable[str]) -> str | None:
        names = (name for name in names if name.rpartition(".")[0] == self.name)
        return max((name for name in names if _number(name) >= 0), default=None, key=_number)

    def _renew(self, name: str, renewed: Callable[[], None] | None) -> None:
        while not self._stop.wait(self.every):
            with contextlib.suppress(OSError, UserError):
                self._files.renew(name)
            if renewed is not None:
                with contextlib.suppress(OSError, UserError):
                    renewed()


@contextlib.contextmanager
def hold_if_free(lease: Lease) -> Iterator[bool]:
    """Take a lease for a block if it is free, and yield whether it was: `with ... as acquired:`."""
    acquired = lease.acquire()
    try:
        yield acquired
    finally:
        lease.release()


@contextlib.contextmanager
def wait_and_hold(lease: Lease, waiting: Callable[[str], None] | None) -> Iterator[None]:
    """Wait for a lease and hold it for a block. If it is taken, `waiting` is called once with its holder."""
    while not lease.acquire():
        if waiting is not None:
            waiting(str(lease.holder() or "a process that has just started"))
            waiting = None
        time.sleep(lease_files(lease.directory).poll)
    try:
        yield
    finally:
        lease.release()


@contextlib.contextmanager
def register_user(directory: Path, seconds: float = SECONDS) -> Iterator[None]:
    """Register this process for a block as a user of what `directory` stands for; see `living_users`.

    Callers that register, or that need exclusive use, hold a common lease meanwhile.
    """
    lease = Lease(directory, f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}", seconds)
    with hold_if_free(lease):
        path = lease.path
        yield
    if path is not None:  # no other process uses this name
        lease_files(directory).remove(path.name)


def living_users(directory: Path, seconds: float = SECONDS) -> list[Holder]:
    """Return the registered users that are alive, and remove the files of others."""
    living = []
    files = lease_files(directory)
    for name in sorted(name for name in files.names() if _number(name) >= 0):
        if _is_alive(files, name, seconds):  # a file that is being written has no holder yet
            with contextlib.suppress(FileNotFoundError):  # the user has just ended
                living.append(_read_holder(files, name) or Holder("a host", 0, None, time.time()))
        else:
            files.remove(name)
    return living


def process_mark() -> str:
    """Return a mark of this process for file names; see `marked_process_ended`."""
    process = Holder.current()
    machine = hashlib.sha256(process.machine.encode()).hexdigest()[:8]
    return f"{machine}-{process.pid}-{process.started:.0f}"


def marked_process_ended(mark: str) -> bool | None:
    """Return whether the process with a mark has ended, or None if it ran on another machine."""
    machine, pid, started = [*mark.split("-"), "", ""][:3]
    if machine != process_mark().partition("-")[0] or not pid.isdecimal():
        return None
    now = _start_time(int(pid))
    return now is None or f"{now:.0f}" != started


def _number(name: str) -> int:
    """Return the number at the end of a lease file's name, or -1."""
    number = name.rpartition(".")[2]
    return int(number) if number.isdecimal() else -1


def _read_holder(files: LeaseFiles, name: str) -> Holder | None:
    """Read a lease file. Returns None if it is released, incomplete or damaged."""
    return _parse_holder(*files.read(name))


def _parse_holder(content: str, renewed: float) -> Holder | None:
    try:
        return Holder(**json.loads(content))._replace(renewed=renewed)
    except (ValueError, TypeError):
        return None


def _is_alive(files: LeaseFiles, name: str, seconds: float) -> bool:
    """Return whether the holder of a lease file is alive and renews it."""
    try:
        content, renewed = files.read(name)
        if content == RELEASED:
            return False
        holder = _parse_holder(content, renewed)
        age = files.now() - renewed
    except OSError as error:
        if error.errno in (errno.EROFS, errno.ENOSPC, errno.EDQUOT):  # that will not pass
            raise
        return True  # the file is changing right now
    if holder is None:
        return age < min(seconds, WRITING_SECONDS)  # the holder is still writing it
    return age <= seconds and (not holder.here or _start_time(holder.pid) == holder.started)


def _start_time(pid: int) -> float | None:
    """Return a process's start time, or None if it has ended. Distinguishes reused process ids."""
    with contextlib.suppress(OSError):  # Linux: ticks since boot, which do not change with the clock
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        return None if fields[0] in "ZX" else float(fields[19])
    return None
