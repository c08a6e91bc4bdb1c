"""Files that are whole or absent, remembered hashes, directories of a tool, and leases."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from emo.common.errors import DiskFullError, UserError
from emo.common.files import (
    PART,
    Hashes,
    claim,
    foreign,
    part_file,
    remove_abandoned,
    remove_made,
    sha256,
    write_once,
    write_text,
)
from emo.common.lease import Lease, joined, users, waited

MADE = ("train/*.arrow", "plan.parquet", ".new/tokenizer/tokenizer.json")


def put(path: Path, text: str = "x") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def refusing(code: int) -> Callable[..., None]:
    """Return a call of the system that always fails with `code`."""

    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    return refuse


def test_a_full_disk_is_no_mistake_of_the_user_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.fsync", refusing(errno.ENOSPC))
    for write in (write_text, write_once):
        with pytest.raises(DiskFullError, match=str(tmp_path)):
            write(tmp_path / "a.json", "text")
    with pytest.raises(DiskFullError):
        claim(tmp_path / "new", "marker.json", "{}", "dir")
    assert [p.name for p in tmp_path.rglob("*")] == ["new"]


def test_hashes_are_remembered_until_a_file_is_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An edit shows, also one of equal size whose time of modification was set back."""
    file, memory = put(tmp_path / "a"), tmp_path / "hashes.json"
    first = Hashes(memory)
    before = first.sha256(file)
    assert before == sha256(file)
    first.save()
    with monkeypatch.context() as patch:
        patch.setattr("emo.common.files.sha256", refusing(errno.EIO))
        assert Hashes(memory).sha256(file) == before
    times = file.stat()
    with file.open("r+b") as stream:
        stream.write(b"y")
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert file.stat().st_mtime_ns == times.st_mtime_ns
    assert Hashes(memory).sha256(file) == sha256(file) != before


def test_only_what_was_made_is_removed(tmp_path: Path) -> None:
    outside, directory = put(tmp_path / "outside" / "a.arrow"), tmp_path / "place"
    names = ("train/a.txt", "train/deep/a.arrow", "a.arrow", "plan.parquet.bak", "other/plan.npz")
    made = [put(directory / name) for name in ("train/a.arrow", *MADE[1:])]
    others = [put(directory / name) for name in names]
    (directory / "linked").symlink_to(outside.parent)
    assert set(foreign(directory, MADE)) == {*others, directory / "linked"}
    remove_made(directory, MADE)
    assert not any(path.exists() for path in made) and not (directory / ".new").exists()
    assert all(path.exists() for path in [*others, outside, directory / "linked"])
    remove_made(directory, ("linked/*.arrow",))
    assert outside.exists(), "links are not followed"


def test_a_directory_is_claimed_once_and_only_if_empty(tmp_path: Path) -> None:
    new = tmp_path / "a" / "b"
    claim(new, "marker.json", "{}", "dir")
    put(new / "anything")
    claim(new, "marker.json", "other", "dir")
    assert (new / "marker.json").read_text() == "{}"
    put(tmp_path / "used" / "thesis.txt")
    for directory in ("used", "used/thesis.txt/deeper"):
        with pytest.raises(UserError) as error:
            claim(tmp_path / directory, "marker.json", "{}", "dir")
        assert error.value.code == "not-claimed" and "\n" not in str(error.value)
    assert [p.name for p in (tmp_path / "used").iterdir()] == ["thesis.txt"]


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
        assert (holder.pid, holder.here) == (other.pid, True) and socket.gethostname() in str(holder)
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
    lease.release()


def test_who_waits_is_told_once_and_then_holds(tmp_path: Path) -> None:
    first, told = Lease(tmp_path, "work"), []
    assert first.acquire()

    def tell(holder: str) -> None:
        told.append(holder)
        first.release()

    with waited(Lease(tmp_path, "work"), tell):
        assert not Lease(tmp_path, "work").acquire()
    assert len(told) == 1


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
