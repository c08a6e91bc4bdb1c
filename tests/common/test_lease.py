"""Leases: one holder at a time, killed and stopped ones are followed, and no locks of the file system."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from emo.common.files import PART, part_file, remove_abandoned
from emo.common.lease import Lease, joined, users, waited

FORK = multiprocessing.get_context("fork")


@pytest.fixture(autouse=True)
def _no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without locks."""

    def refused(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refused)
    monkeypatch.setattr(fcntl, "lockf", refused)


def until(condition: object, seconds: float = 20.0) -> float:
    """Wait until a condition holds; return how long it took."""
    began = time.monotonic()
    while not condition():  # type: ignore[operator]
        assert time.monotonic() - began < seconds
        time.sleep(0.01)
    return time.monotonic() - began


def _hold(directory: Path, seconds: float) -> None:
    assert Lease(directory, "work", seconds).acquire()
    (directory / "held").touch()
    time.sleep(60)


def _join(directory: Path) -> None:
    with joined(directory):
        (directory.parent / "held").touch()
        time.sleep(60)


@contextlib.contextmanager
def process(target: object, directory: Path, *arguments: object) -> Iterator[BaseProcess]:
    other = FORK.Process(target=target, args=(directory, *arguments), daemon=True)  # type: ignore[arg-type]
    other.start()
    try:
        until(lambda: any(directory.parent.rglob("held")))
        yield other
    finally:
        other.kill()
        other.join()


def test_a_killed_holder_is_followed_at_once(tmp_path: Path) -> None:
    lease = Lease(tmp_path / "x", "work", 60.0)
    with process(_hold, tmp_path / "x", 60.0) as other:
        holder = lease.holder()
        assert not lease.acquire() and holder is not None
        assert (holder.host, holder.pid, holder.here) == (socket.gethostname(), other.pid, True)
        os.kill(other.pid or 0, signal.SIGKILL)
        other.join()
        assert until(lease.acquire) < 2
    lease.release()


def test_a_stopped_holder_is_followed_after_the_leases_time(tmp_path: Path) -> None:
    lease = Lease(tmp_path / "x", "work", 1.0)
    with process(_hold, tmp_path / "x", 1.0) as other:
        time.sleep(1.5)
        assert not lease.acquire(), "it is renewed"
        os.kill(other.pid or 0, signal.SIGSTOP)
        assert 0.4 < until(lease.acquire) < 10
        os.kill(other.pid or 0, signal.SIGCONT)
        time.sleep(0.6)
        assert lease.held()
    lease.release()


def test_who_waits_is_told_for_whom(tmp_path: Path) -> None:
    first, output = Lease(tmp_path, "work"), []
    assert first.acquire()

    def tell(holder: str) -> None:
        output.append(holder)
        first.release()

    with waited(Lease(tmp_path, "work"), tell):
        assert not Lease(tmp_path, "work").acquire()
    with waited(Lease(tmp_path, "work"), tell):
        pass
    assert output == [f"process {os.getpid()} on {socket.gethostname()}"]


def test_users_are_those_who_joined_and_live(tmp_path: Path) -> None:
    directory = tmp_path / "x"
    assert users(directory) == []
    with process(_join, directory) as other, joined(directory):
        assert sorted(user.pid for user in users(directory)) == sorted((os.getpid(), other.pid))
        os.kill(other.pid or 0, signal.SIGKILL)
        other.join()
        assert [user.pid for user in users(directory)] == [os.getpid()]
    assert users(directory) == [] and list(directory.iterdir()) == []


def _write(path: Path) -> None:
    with part_file(path):
        (path.parent / "held").touch()
        time.sleep(60)


def test_parts_of_the_dead_are_removed_and_those_of_the_living_stay(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with process(_write, path) as other, part_file(tmp_path / "b"):
        assert remove_abandoned(tmp_path) == 0
        os.kill(other.pid or 0, signal.SIGKILL)
        other.join()
        assert remove_abandoned(tmp_path) == 1
    assert (tmp_path / "b").is_file() and not path.exists()
    old, new = (tmp_path / f".{name}.0.0badc0de-1-2{PART}" for name in ("c", "d"))  # of another machine
    old.touch()
    new.touch()
    os.utime(old, (0, 0))
    assert remove_abandoned(tmp_path) == 1 and new.exists()


@pytest.mark.parametrize("content", [b"\xff\xfe", b"[" * 3000, b'{"machine": "x", "pid": {}}'])
def test_a_damaged_lease_ends(tmp_path: Path, content: bytes) -> None:
    """It keeps others out for no longer than one that holds nothing."""
    (tmp_path / "a.000001").write_bytes(content)
    os.utime(tmp_path / "a.000001", (1, 1))
    lease = Lease(tmp_path, "a", 60.0)
    assert lease.holder() is None and lease.acquire()
    lease.release()
