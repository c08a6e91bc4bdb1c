"""Atomic writes, cached hashes, claimed directories, and leases."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from emo.common.errors import DiskFullError
from emo.common.io import files
from emo.common.io.lease import Lease, hold_if_free, living_users, register_user, wait_and_hold
from emo.common.io.lease_files import LeaseFiles
from tests.helpers.killing import FORK
from tests.helpers.refusals import refused


def put(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return path


def failing(code: int) -> Callable[..., None]:
    """Return a system call that always fails with `code`."""

    def fail(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    return fail


@pytest.fixture(autouse=True)
def _no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a file system without locks."""
    monkeypatch.setattr(fcntl, "flock", failing(errno.ENOLCK))
    monkeypatch.setattr(fcntl, "lockf", failing(errno.ENOLCK))


def test_a_full_disk_raises_disk_full_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.fsync", failing(errno.ENOSPC))
    for write in (files.write_text, files.write_once):
        with pytest.raises(DiskFullError, match=str(tmp_path)):
            write(tmp_path / "a.json", "text")
    with pytest.raises(DiskFullError):
        files.claim_directory(tmp_path / "new", "marker.json", "{}", "dir")
    assert [p.name for p in tmp_path.rglob("*")] == ["new"]


def test_hashes_are_cached_until_a_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An edit is noticed even with the same size and modification time."""
    file, memory = tmp_path / "a", tmp_path / "hashes.json"
    file.write_text("x")
    first = files.Hashes(memory)
    before = first.sha256(file)
    assert before == files.sha256(file)
    first.save()
    with monkeypatch.context() as patch:
        patch.setattr("emo.common.io.files.sha256", failing(errno.EIO))
        assert files.Hashes(memory).sha256(file) == before
    times = file.stat()
    file.write_text("y")
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert files.Hashes(memory).sha256(file) == files.sha256(file) != before


def test_only_matching_files_are_removed(tmp_path: Path) -> None:
    patterns = ("train/*.arrow", "plan.parquet", ".new/tokenizer/tokenizer.json")
    outside, directory = put(tmp_path / "outside" / "a.arrow"), tmp_path / "place"
    names = ("train/a.txt", "train/deep/a.arrow", "a.arrow", "plan.parquet.bak", "other/plan.npz")
    written = [put(directory / name) for name in ("train/a.arrow", *patterns[1:])]
    others = [put(directory / name) for name in names]
    (directory / "linked").symlink_to(outside.parent)
    assert set(files.find_foreign_files(directory, patterns)) == {*others, directory / "linked"}
    files.remove_matching(directory, patterns)
    assert not any(path.exists() for path in written) and not (directory / ".new").exists()
    assert all(path.exists() for path in [*others, outside, directory / "linked"])
    files.remove_matching(directory, ("linked/*.arrow",))
    assert outside.exists(), "links are not followed"


def test_a_directory_is_claimed_once_and_only_if_empty(tmp_path: Path) -> None:
    new = tmp_path / "a" / "b"
    files.claim_directory(new, "marker.json", "{}", "dir")
    put(new / "anything")
    files.claim_directory(new, "marker.json", "other", "dir")
    assert (new / "marker.json").read_text() == "{}"
    put(tmp_path / "used" / "thesis.txt")
    for directory in ("used", "used/thesis.txt/deeper"):
        with refused("not-claimed"):
            files.claim_directory(tmp_path / directory, "marker.json", "{}", "dir")
    assert [p.name for p in (tmp_path / "used").iterdir()] == ["thesis.txt"]


def until(condition: Callable[[], object]) -> float:
    """Wait at most 20 seconds until a condition holds, and return the seconds that it took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < 20
        time.sleep(0.01)
    return time.monotonic() - began


def _stay(block: Callable[[], AbstractContextManager[object]], within: Path) -> None:
    with block():
        within.touch()
        time.sleep(60)


@contextlib.contextmanager
def process_in(block: Callable[[], AbstractContextManager[object]], tmp_path: Path) -> Iterator[BaseProcess]:
    """Start another process that stays in a `with` block until it is killed."""
    within = tmp_path / "within"
    process = FORK.Process(target=_stay, args=(block, within), daemon=True)
    process.start()
    try:
        until(within.exists)
        yield process
    finally:
        process.kill()
        process.join()


@pytest.mark.parametrize(
    ("number", "seconds", "least"),
    [(signal.SIGKILL, 60.0, 0.0), (signal.SIGSTOP, 3.0, 0.6)],
    ids=["killed", "stopped"],
)
def test_a_lease_passes_on_at_once_from_a_dead_process_and_after_its_time_from_a_stopped_one(
    tmp_path: Path, number: int, seconds: float, least: float
) -> None:
    lease = Lease(tmp_path / "x", "work", seconds)
    with process_in(lambda: hold_if_free(Lease(tmp_path / "x", "work", seconds)), tmp_path) as other:
        time.sleep(1.5 * seconds if number == signal.SIGSTOP else 0.0)
        assert not lease.acquire(), "it is renewed"
        holder = lease.holder()
        assert holder is not None and (holder.pid, holder.here) == (other.pid, True)
        os.kill(other.pid or 0, number)
        assert until(lease.acquire) >= least
    lease.release()


def test_waiting_reports_the_holder_once(tmp_path: Path) -> None:
    first, holders = Lease(tmp_path, "work"), []
    assert first.acquire()

    def hear(holder: str) -> None:
        holders.append(holder)
        first.release()

    with wait_and_hold(Lease(tmp_path, "work"), hear):
        assert not Lease(tmp_path, "work").acquire()
    assert len(holders) == 1


def test_living_users_are_registered_live_processes(tmp_path: Path) -> None:
    directory = tmp_path / "x"
    assert living_users(directory) == []
    with process_in(lambda: register_user(directory), tmp_path) as other, register_user(directory):
        assert {user.pid for user in living_users(directory)} == {os.getpid(), other.pid}
        other.kill()
        other.join()
        assert [user.pid for user in living_users(directory)] == [os.getpid()]
    assert living_users(directory) == [] and list(directory.iterdir()) == []


def test_a_user_that_ends_while_users_are_listed_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LeaseFiles, "names", lambda files: ["host-1.000001"])
    assert living_users(tmp_path) == []


def test_part_files_of_dead_processes_are_removed(tmp_path: Path) -> None:
    with (
        process_in(lambda: files.part_file(tmp_path / "a"), tmp_path) as other,
        files.part_file(tmp_path / "b"),
    ):
        assert files.remove_abandoned(tmp_path) == 0
        other.kill()
        other.join()
        assert files.remove_abandoned(tmp_path) == 1
    assert (tmp_path / "b").is_file() and not (tmp_path / "a").exists()
    # Files of another machine are removed when they are old.
    old, new = (put(tmp_path / f".{name}.0.0badc0de-1-2{files.PART}") for name in "cd")
    os.utime(old, (0, 0))
    assert files.remove_abandoned(tmp_path) == 1 and new.exists()
