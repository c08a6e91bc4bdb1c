"""Run directories: checkpoints that are never believed torn, their copies elsewhere, one launch at a time."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from emo.common.errors import FailureError, UserError
from emo.common.io.lease import Lease
from emo.pipeline.checkpoint import copies
from emo.pipeline.checkpoint import saver as checkpoint
from emo.pipeline.checkpoint.copies import Uploads, copy_checkpoint
from emo.pipeline.control import lock
from emo.pipeline.control.heartbeat import COPY
from emo.pipeline.control.lock import RunLock
from emo.pipeline.control.run_dir import (
    COMPLETE,
    HEARTBEAT,
    STATE,
    checkpoint_problem,
    checkpoints,
    hash_files,
    list_files,
    partial_directory,
    step_of,
)
from tests.helpers.killing import wait_for
from tests.helpers.refusals import refused

FILES = {STATE: b"{}", "state/rank0.pt": b"zero" * 100, "state/rank1.pt": b"one" * 100}


def write(run_dir: Path, step: int) -> Path:
    partial = partial_directory(run_dir, step)
    (partial / "state").mkdir(parents=True)
    for name, content in FILES.items():
        (partial / name).write_bytes(content)
    checkpoint.write_complete(partial, hash_files(partial, list_files(partial)))
    return checkpoint.publish(run_dir, step)


def test_complete_checkpoints_are_listed_and_pruned(tmp_path: Path) -> None:
    for step in (300, 20, 1000000):
        write(tmp_path, step)
    partial_directory(tmp_path, 400).mkdir()
    (tmp_path / "step-000500").mkdir()
    assert [step_of(d) for d in checkpoints(tmp_path)] == [20, 300, 1000000]
    assert checkpoint_problem(tmp_path / "step-000300") is None
    checkpoint.prune(tmp_path, keep_last=1, keep_every=100)
    assert [step_of(d) for d in checkpoints(tmp_path)] == [300, 1000000]
    assert not partial_directory(tmp_path, 400).exists()


DAMAGE: dict[str, Callable[[Path], object]] = {
    "truncated file": lambda d: (d / "state/rank0.pt").write_bytes(b"short"),
    "other content": lambda d: (d / "state/rank0.pt").write_bytes(b"zerp" * 100),
    "missing rank file": lambda d: (d / "state/rank1.pt").unlink(),
    "stray file": lambda d: (d / "state/rank2.pt").write_bytes(b"x"),
    "empty marker": lambda d: (d / COMPLETE).write_text(""),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_detected(tmp_path: Path, name: str) -> None:
    """Also where each of several ranks hashes a part of the files."""
    directory = write(tmp_path, 7)
    DAMAGE[name](directory)
    assert any(checkpoint_problem(directory, part, 3) is not None for part in range(3))


def test_an_interrupted_removal_leaves_no_valid_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = write(tmp_path, 5)
    monkeypatch.setattr(checkpoint.shutil, "rmtree", lambda *_, **__: None)
    checkpoint.remove(directory)
    assert directory.is_dir() and checkpoints(tmp_path) == []


def finish(uploads: Uploads) -> None:
    wait_for(lambda: not uploads.goes_on(), "end of the uploads", 20)


def test_what_is_there_is_not_copied_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryFileSystem, "store", {})
    source, system, pieces = write(tmp_path, 3), fsspec.filesystem("memory"), []
    root = f"/bucket/{source.name}"

    def copied() -> int:
        pieces.clear()
        copy_checkpoint(source, "memory://bucket", lambda: pieces.append(1))
        return len(pieces)

    assert copied() == len(FILES) and not system.glob(f"{root}/UPLOADING*")
    assert copied() == 0
    # interrupted: a file is short, another one is missing
    system.rm_file(f"{root}/{COMPLETE}")
    system.pipe_file(f"{root}/UPLOADING-0-of-1", (source / COMPLETE).read_bytes())
    system.pipe_file(f"{root}/state/rank0.pt", b"zero")
    system.rm_file(f"{root}/state.json")
    assert copied() == 2
    assert system.cat_file(f"{root}/state/rank0.pt") == FILES["state/rank0.pt"]


def test_the_last_part_completes_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three hosts copy; two of an earlier launch had begun with another checkpoint of that name."""
    monkeypatch.setattr(MemoryFileSystem, "store", {})
    source, system = write(tmp_path, 3), fsspec.filesystem("memory")
    root = f"/bucket/{source.name}"
    system.pipe_file(f"{root}/{COMPLETE}", b"of another one")
    system.pipe_file(f"{root}/UPLOADING-1-of-2", b"of another one")
    system.pipe_file(f"{root}/state/rank0.pt", b"none" * 100)
    for part in (2, 0, 1):
        assert part == 2 or not copies.Store("memory://bucket").checkpoints()
        copy_checkpoint(source, "memory://bucket", lambda: None, part, 3)
    assert copies.Store("memory://bucket").checkpoints() == [source.name]
    content = {path.removeprefix(f"{root}/"): system.cat_file(path) for path in system.find(root)}
    assert content == FILES | {COMPLETE: (source / COMPLETE).read_bytes()}


def test_a_file_that_has_changed_is_in_no_copy(tmp_path: Path) -> None:
    """However often it is tried: it has the right size."""
    source = write(tmp_path / "run", 3)
    (source / "state/rank0.pt").write_bytes(b"zerp" * 100)
    for _ in range(2):
        with pytest.raises(OSError, match=r"rank0\.pt"):
            copy_checkpoint(source, str(tmp_path / "copies"), lambda: None)
    assert not checkpoints(tmp_path / "copies")


def test_a_launch_goes_on_with_what_is_left_and_tries_failures_again(tmp_path: Path) -> None:
    run, target = tmp_path / "run", tmp_path / "copies"
    write(run, 1)
    target.write_text("in the way")
    uploads = Uploads(run, str(target))
    finish(uploads)
    assert uploads.unfinished() == ["step-000001"]
    target.unlink()
    write(run, 2)
    uploads.wake()
    finish(uploads)
    assert uploads.unfinished() == [] and len(checkpoints(target)) == 2


def test_hosts_copy_parts_of_the_same_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second host turns to what the first has begun; one that was pruned meanwhile holds nobody up."""
    monkeypatch.setattr(copies, "LOOK", 0.01)
    run, target = tmp_path / "run", str(tmp_path / "copies")
    write(run, 1)
    hosts = [Uploads(run, target, 0, 2)]
    wait_for(lambda: hosts[0].current, "upload", 20)
    for step in (2, 3):
        write(run, step)
    checkpoint.prune(run, 1, 0, hosts[0].current)
    assert [step_of(d) for d in checkpoints(run)] == [1, 3]
    hosts.append(Uploads(run, target, 1, 2))
    for host in hosts:
        host.wake()
        wait_for(host._last.done, "end of the uploads", 20)
    assert [step_of(d) for d in checkpoints(Path(target))] == [1, 3] and hosts[0].unfinished() == []
    assert all(checkpoint_problem(directory) is None for directory in checkpoints(Path(target)))


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A store that takes no piece until the event is set."""
    go_on = threading.Event()

    def copy(directory: Path, target: str, *_: object) -> None:
        go_on.wait()
        shutil.copytree(directory, Path(target) / directory.name)

    monkeypatch.setattr(copies, "copy_checkpoint", copy)
    yield go_on
    go_on.set()


def test_what_is_being_copied_is_not_pruned(tmp_path: Path, slow: threading.Event) -> None:
    run = tmp_path / "run"
    write(run, 1)
    uploads = Uploads(run, str(tmp_path / "copies"))
    wait_for(lambda: uploads.current, "upload", 20)
    for step in (2, 3):
        write(run, step)
    checkpoint.prune(run, 1, 0, uploads.current)
    assert [d.name for d in checkpoints(run)] == ["step-000001", "step-000003"]
    slow.set()
    uploads.wake()
    finish(uploads)
    assert [d.name for d in checkpoints(tmp_path / "copies")] == ["step-000001", "step-000003"]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same protocol with a faster heart."""
    monkeypatch.setattr(lock, "BEAT", 0.1)
    monkeypatch.setattr(lock, "LOCK_SECONDS", 1.0)
    monkeypatch.setattr(lock, "POLL", 0.02)


def hold(run_dir: Path) -> None:
    RunLock(run_dir, active=True).acquire()
    time.sleep(60)


def moved_elsewhere(run_dir: Path) -> Path:
    """Make the newest lock file look as if it was written on another host."""
    (path,) = run_dir.glob("lock.*")
    path.write_text(json.dumps({"machine": "elsewhere:1", "pid": 1, "started": 0.0, "since": time.time()}))
    return path


def test_a_second_launch_waits_for_the_end_of_the_first(tmp_path: Path) -> None:
    first = multiprocessing.get_context("fork").Process(target=hold, args=(tmp_path,), daemon=True)
    first.start()
    second = RunLock(tmp_path, active=True)
    try:
        wait_for((tmp_path / HEARTBEAT).is_file, "heartbeat")
        with refused("run-in-use"):
            RunLock(tmp_path, active=True).acquire()
    finally:
        first.kill()
        first.join()
    began = time.monotonic()
    second.acquire()
    assert time.monotonic() - began < 0.9  # less than LOCK_SECONDS
    moved_elsewhere(tmp_path)  # it cannot be looked at, but it renews its lock
    with refused("run-in-use"):
        RunLock(tmp_path, active=True).acquire()


def test_a_host_that_died_is_outlasted_and_learns_of_it(tmp_path: Path) -> None:
    first = RunLock(tmp_path, active=True)
    first.acquire()
    assert first.problem is None
    path = moved_elsewhere(tmp_path)
    path.rename(path.with_suffix(".000004"))  # the first one's thread finds its file no more
    second = RunLock(tmp_path, active=True)
    second.acquire()
    assert [p.name for p in tmp_path.glob("lock.*")] == ["lock.000005"]
    wait_for(lambda: first.lost, "the first one's notice", 10)  # the loop looks at this flag only
    second.release("stopped")


@pytest.mark.parametrize(("number", "passes"), [(errno.ENOSPC, True), (errno.EROFS, False)])
def test_a_disk_that_is_full_for_now_is_no_mistake(
    number: int, passes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> bool:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Lease, "acquire", refuse)
    with pytest.raises(UserError) as caught:
        RunLock(tmp_path / "run", active=True).acquire()
    assert isinstance(caught.value, FailureError) == passes


def test_the_heartbeat_says_what_the_run_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Renewed by a thread, whatever the main thread is busy with; a container gets a copy of its own."""
    run, copy = tmp_path / "run", tmp_path / "copy.json"
    run.mkdir()
    monkeypatch.setenv(COPY, str(copy))

    def beat() -> dict:
        return json.loads((run / HEARTBEAT).read_text())

    RunLock(run, active=False).acquire()
    assert not copy.exists()
    entry = RunLock(run, active=True)
    entry.acquire()
    assert (beat()["doing"], beat()["step"]) == ("loading", 0)
    entry.set_activity("training")
    entry.record_step(7)
    with entry.activity("saving"):
        assert (beat()["doing"], beat()["step"]) == ("saving", 7)
        assert copy.is_file()
    first = beat()
    time.sleep(0.5)
    assert first["doing"] == "training" and beat()["time"] > first["time"]
    assert beat()["since"] == first["since"]
    entry.release("finished")
    assert beat()["doing"] == "finished" and not copy.exists()
