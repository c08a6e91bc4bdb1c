"""Run directories: valid checkpoints, their copies in stores, and the lock."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import MagicMock, Mock, patch

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from emo.common.errors import FailureError, UserError
from emo.common.io.lease import Lease
from emo.common.io.store import Store
from emo.pipeline.checkpoint import copies
from emo.pipeline.checkpoint import saver as checkpoint
from emo.pipeline.checkpoint.copies import RunCopy, Uploads, copy_checkpoint, open_store, part_marker
from emo.pipeline.checkpoint.saver import Saver
from emo.pipeline.control import lock
from emo.pipeline.control.heartbeat import COPY
from emo.pipeline.control.lock import RunLock
from emo.pipeline.control.run_dir import (
    COMPLETE,
    CONFIG,
    HEARTBEAT,
    STATE,
    checkpoint_files,
    checkpoint_problem,
    checkpoints,
    hash_files,
    partial_directory,
    step_of,
)
from emo.pipeline.trainer import Trainer
from tests.helpers.examples import load_example
from tests.helpers.killing import wait_for
from tests.helpers.refusals import refused

FILES = {STATE: b"{}", "state/rank0.pt": b"zero" * 100, "state/rank1.pt": b"one" * 100}


def write(run_dir: Path, step: int) -> Path:
    partial = partial_directory(run_dir, step)
    (partial / "state").mkdir(parents=True)
    for name, content in FILES.items():
        (partial / name).write_bytes(content)
    checkpoint.write_complete(partial, hash_files(partial, checkpoint_files(partial)))
    return checkpoint.publish(run_dir, step)


def steps_in(run_dir: Path) -> list[int]:
    return [step_of(directory) for directory in checkpoints(run_dir)]


def test_complete_checkpoints_are_listed_and_pruned(tmp_path: Path) -> None:
    for step in (300, 20, 1000000):
        write(tmp_path, step)
    partial_directory(tmp_path, 400).mkdir()
    (tmp_path / "step-000500").mkdir()
    assert steps_in(tmp_path) == [20, 300, 1000000]
    assert checkpoint_problem(tmp_path / "step-000300") is None
    checkpoint.prune(tmp_path, 1000000, keep_last=1, keep_every=100)
    assert steps_in(tmp_path) == [300, 1000000]
    assert not partial_directory(tmp_path, 400).exists()
    for step in (350, 400):  # of a run that continues from an earlier step, because 1000000 is damaged
        write(tmp_path, step)
        checkpoint.prune(tmp_path, step, keep_last=1)
    assert steps_in(tmp_path) == [400, 1000000]


DAMAGE: dict[str, Callable[[Path], object]] = {
    "truncated file": lambda d: (d / "state/rank0.pt").write_bytes(b"short"),
    "other content": lambda d: (d / "state/rank0.pt").write_bytes(b"zerp" * 100),
    "missing rank file": lambda d: (d / "state/rank1.pt").unlink(),
    "stray file": lambda d: (d / "state/rank2.pt").write_bytes(b"x"),
    "empty marker": lambda d: (d / COMPLETE).write_text(""),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_one_of_the_ranks_detects_damage(tmp_path: Path, name: str) -> None:
    directory = write(tmp_path, 7)
    DAMAGE[name](directory)
    assert any(checkpoint_problem(directory, part, 3) is not None for part in range(3))


def test_an_interrupted_removal_leaves_no_valid_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = write(tmp_path, 5)
    monkeypatch.setattr(checkpoint.shutil, "rmtree", lambda *_, **__: None)
    checkpoint.remove(directory)
    assert directory.is_dir() and not steps_in(tmp_path)


class DictStore(Store):
    """A custom store that keeps files in memory. Writes wait while `may_write` is cleared."""

    files: ClassVar[dict[str, bytes]] = {}
    may_write = threading.Event()

    def __init__(self, target: str) -> None:
        self.root = f"{target}/"

    def list_files(self, directory: str) -> dict[str, int]:
        names = (name.removeprefix(self.root) for name in self.files if name.startswith(self.root))
        return {name: len(self.files[self.root + name]) for name in names if name.startswith(directory)}

    def read(self, name: str) -> bytes | None:
        return self.files.get(self.root + name)

    def write(self, name: str, pieces: Iterable[bytes]) -> None:
        self.may_write.wait()
        self.files[self.root + name] = b"".join(pieces)

    def delete(self, name: str) -> None:
        self.files.pop(self.root + name, None)


@pytest.fixture(params=["directory", "memory://bucket", "dict://runs", "sqlite"])
def target(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return an address for each kind of store."""
    monkeypatch.setattr(MemoryFileSystem, "store", {})
    monkeypatch.setattr(MemoryFileSystem, "pseudo_dirs", [""])
    monkeypatch.setitem(copies.STORES, "dict", DictStore)
    monkeypatch.setitem(copies.STORES, "sqlite", load_example("my_store.py").SqliteStore)
    monkeypatch.setattr(copies, "POLL", 0.01)
    DictStore.files.clear()
    DictStore.may_write.set()
    addresses = {"directory": f"{tmp_path}/copies", "sqlite": f"sqlite://{tmp_path}/runs.db"}
    return addresses.get(request.param, request.param)


def wait_for_uploads(uploads: Uploads) -> None:
    wait_for(lambda: not uploads.is_progressing(), "end of the uploads", 20)


def wait_for_start(uploads: Uploads) -> None:
    wait_for(lambda: uploads.current, "upload", 20)


def test_finished_files_are_not_copied_again(tmp_path: Path, target: str) -> None:
    source, store, pieces = write(tmp_path, 3), open_store(target), []
    name, marker = source.name, (source / COMPLETE).read_bytes()

    def copy() -> int:
        pieces.clear()
        copy_checkpoint(source, store, lambda: pieces.append(1))
        return len(pieces)

    complete = {f"{name}/{file}": len(content) for file, content in (FILES | {COMPLETE: marker}).items()}
    assert copy() == len(FILES) and store.list_files(name) == complete
    assert copy() == 0
    # In an interrupted copy, one file is short and others are missing.
    for file in (COMPLETE, STATE):
        store.delete(f"{name}/{file}")
    store.write(f"{name}/{part_marker(0, 1)}", [marker])
    store.write(f"{name}/state/rank0.pt", [b"zero"])
    assert copy() == 2
    assert store.read(f"{name}/state/rank0.pt") == FILES["state/rank0.pt"]


def test_the_last_part_completes_a_copy(tmp_path: Path, target: str) -> None:
    """Three hosts copy, after an earlier launch with two copied parts of another checkpoint of that name."""
    source, store, copy = write(tmp_path, 3), open_store(target), RunCopy(target)
    for file in (COMPLETE, part_marker(1, 2), "state/rank0.pt"):
        store.write(f"{source.name}/{file}", [b"none" * 100])
    for part in (2, 0, 1):
        assert part == 2 or not copy.checkpoints()
        copy_checkpoint(source, store, lambda: None, part, 3)
    assert copy.checkpoints() == [source.name]
    copy.fetch(source.name, tmp_path / "fetched", [*FILES, COMPLETE, "missing"])
    assert (
        checkpoint_files(tmp_path / "fetched") == sorted(FILES)
        and checkpoint_problem(tmp_path / "fetched") is None
    )
    assert len(store.list_files("")) == len(FILES) + 1


def test_a_changed_file_is_never_copied(tmp_path: Path, target: str) -> None:
    """The second try does not trust the file of the first, although its size is right."""
    source = write(tmp_path / "run", 3)
    (source / "state/rank0.pt").write_bytes(b"zerp" * 100)
    for _ in range(2):
        with pytest.raises(OSError, match=r"rank0\.pt"):
            copy_checkpoint(source, open_store(target), lambda: None)
    assert not RunCopy(target).checkpoints()


def test_a_launch_continues_the_copies_of_the_previous_one(tmp_path: Path) -> None:
    """Failed copies are tried again."""
    run, target = tmp_path / "run", tmp_path / "copies"
    write(run, 1)
    target.write_text("in the way")
    uploads = Uploads(run, str(target))
    wait_for_uploads(uploads)
    assert uploads.find_missing(60) == ["step-000001"]
    target.unlink()
    write(run, 2)
    uploads.wake()
    wait_for_uploads(uploads)
    assert uploads.find_missing(60) == [] and steps_in(target) == [1, 2]


def test_hosts_copy_parts_of_the_same_checkpoints(tmp_path: Path, target: str) -> None:
    """The second host follows the first. A checkpoint that was pruned meanwhile stops neither."""
    run = tmp_path / "run"
    write(run, 1)
    hosts = [Uploads(run, target, 0, 2)]
    wait_for_start(hosts[0])
    for step in (2, 3):
        write(run, step)
    checkpoint.prune(run, 3, 1, 0, hosts[0].current)
    assert steps_in(run) == [1, 3]
    hosts.append(Uploads(run, target, 1, 2))
    for host in hosts:
        host.wake()
        wait_for(host._last.done, "end of the uploads", 20)
    assert RunCopy(target).checkpoints() == ["step-000003", "step-000001"] and not hosts[0].find_missing(60)


@pytest.mark.parametrize("target", ["dict://runs"], indirect=True)
def test_a_checkpoint_is_not_pruned_while_it_is_copied(tmp_path: Path, target: str) -> None:
    run = tmp_path / "run"
    write(run, 1)
    DictStore.may_write.clear()
    uploads = Uploads(run, target)
    wait_for_start(uploads)
    for step in (2, 3):
        write(run, step)
    checkpoint.prune(run, 3, 1, 0, uploads.current)
    assert steps_in(run) == [1, 3]
    DictStore.may_write.set()
    uploads.wake()
    wait_for_uploads(uploads)
    assert RunCopy(target).checkpoints() == ["step-000003", "step-000001"]


@pytest.mark.parametrize("target", ["dict://runs"], indirect=True)
def test_a_run_that_ends_during_a_copy_names_only_what_is_missing(tmp_path: Path, target: str) -> None:
    run = tmp_path / "run"
    write(run, 1)
    uploads = Uploads(run, target)
    wait_for_uploads(uploads)
    DictStore.may_write.clear()
    write(run, 2)
    uploads.wake()
    wait_for_start(uploads)
    assert uploads.find_missing(0.01) == ["step-000002"]
    DictStore.may_write.set()


@pytest.mark.parametrize(("finished", "signal"), [(True, None), (False, None), (False, "SIGTERM")])
def test_only_a_signal_ends_a_stopped_run_before_its_copies(finished: bool, signal: str | None) -> None:
    trainer = MagicMock()
    trainer.stop.reason, trainer.watch.reason = None if finished else "STOP", signal
    with patch.multiple("emo.pipeline.trainer", gather_objects=Mock(), longer_timeout=MagicMock()):
        Trainer.finish(trainer, finished)
    (stopped,) = trainer.saver.finish_copies.call_args.args
    assert stopped() == (signal is not None)


def test_records_are_copied_without_an_unfinished_line(tmp_path: Path, target: str) -> None:
    """Predictions of the base model are large and do not change, so they are copied once."""
    base = "validation/home/base-000000-000001.npy"
    files = {CONFIG: "a: 1", "metrics.jsonl": '{"step": 1}\n{"st', "validation/home/step-000001.npz": "x"}
    files[base] = "first"
    for name, text in files.items():
        (tmp_path / "run" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "run" / name).write_text(text)
    copies.copy_records(tmp_path / "run", open_store(target))
    (tmp_path / "run" / base).write_text("other")
    copies.copy_records(tmp_path / "run", open_store(target))
    RunCopy(target).fetch_records(tmp_path / "new")
    fetched = {name: (tmp_path / "new" / name).read_text() for name in files}
    assert fetched == files | {"metrics.jsonl": '{"step": 1}\n'}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the intervals of the lock."""
    monkeypatch.setattr(lock, "BEAT", 0.1)
    monkeypatch.setattr(lock, "LOCK_SECONDS", 1.0)
    monkeypatch.setattr(lock, "POLL", 0.02)


def hold(run_dir: Path) -> None:
    RunLock(run_dir, active=True).acquire()
    time.sleep(60)


def move_elsewhere(run_dir: Path) -> Path:
    """Make the newest lock file look as if it was written on another host."""
    (path,) = run_dir.glob("lock.*")
    path.write_text(json.dumps({"machine": "elsewhere:1", "pid": 1, "started": 0.0, "since": time.time()}))
    return path


def take_over(run_dir: Path) -> RunLock:
    """Let a second launch take the lock of a first one whose host seems dead."""
    path = move_elsewhere(run_dir)
    path.rename(path.with_suffix(".000004"))  # the thread of the first lock cannot find its file
    second = RunLock(run_dir, active=True)
    second.acquire()
    return second


def test_a_second_launch_waits_for_the_end_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "LOCK_SECONDS", 60.0)
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
    assert time.monotonic() - began < 5  # less than LOCK_SECONDS
    move_elsewhere(tmp_path)  # its process cannot be checked, but the lock is renewed
    with refused("run-in-use"):
        RunLock(tmp_path, active=True).acquire()


def test_a_lock_of_a_dead_host_expires_and_its_holder_notices(tmp_path: Path) -> None:
    first = RunLock(tmp_path, active=True)
    first.acquire()
    assert first.problem is None
    second = take_over(tmp_path)
    assert [p.name for p in tmp_path.glob("lock.*")] == ["lock.000005"]
    wait_for(lambda: first.lost, "the first one's notice", 10)  # the training loop checks only this flag
    second.release("stopped")


def test_a_launch_that_lost_its_lock_publishes_and_prunes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = RunLock(tmp_path, active=True)
    first.acquire()
    train = SimpleNamespace(save_total_limit=1, keep_every=0)
    config = SimpleNamespace(output_dir=tmp_path, train=train)
    state = {"problem": None, "_thread": None, "_best": None, "_waiting": (), "_uploads": None}
    saver: Any = SimpleNamespace(lock=first, config=config, **state)

    def complete(step: int) -> FailureError | None:
        directory = partial_directory(tmp_path, step)
        directory.mkdir()
        saved: Any = SimpleNamespace(directory=directory, step=step)
        return Saver._complete(saver, saved, {})

    write(tmp_path, 1)
    assert complete(2) is None and steps_in(tmp_path) == [2]
    write(tmp_path, 1)
    second = take_over(tmp_path)
    error = complete(3)
    assert error is not None and error.code == "lock-lost"
    assert steps_in(tmp_path) == [1, 2] and not (tmp_path / "step-000003").exists()
    monkeypatch.setattr(checkpoint, "gather_objects", lambda value: [value])
    with refused("lock-lost"):
        Saver.finish(saver)
    second.release("stopped")


@pytest.mark.parametrize(("number", "passes"), [(errno.ENOSPC, True), (errno.EROFS, False)])
def test_a_full_disk_is_a_failure_and_a_read_only_one_a_mistake(
    number: int, passes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> bool:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Lease, "acquire", refuse)
    with pytest.raises(UserError) as caught:
        RunLock(tmp_path / "run", active=True).acquire()
    assert isinstance(caught.value, FailureError) == passes


def test_the_heartbeat_shows_activity_and_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread renews the heartbeat. A container has a copy of it."""
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
    wait_for(lambda: beat()["time"] > first["time"], "newer heartbeat")
    assert first["doing"] == "training"
    assert beat()["since"] == first["since"]
    entry.release("finished")
    assert beat()["doing"] == "finished" and not copy.exists()
