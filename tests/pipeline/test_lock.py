"""One launch per run directory, and a heartbeat that says what the run is doing."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

from emo.common.errors import FailureError, UserError
from emo.common.lease import Lease
from emo.pipeline import lock
from emo.pipeline.lock import COPY, RunLock
from emo.pipeline.run_dir import HEARTBEAT


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same protocol with a faster heart."""
    monkeypatch.setattr(lock, "BEAT", 0.1)
    monkeypatch.setattr(lock, "LOCK_SECONDS", 1.0)
    monkeypatch.setattr(lock, "LOOK", 0.02)


def _hold(run_dir: Path) -> None:
    RunLock(run_dir, active=True).take()
    time.sleep(60)


def holder(run_dir: Path) -> multiprocessing.process.BaseProcess:
    """Another process that holds the lock of `run_dir`."""
    process = multiprocessing.get_context("fork").Process(target=_hold, args=(run_dir,), daemon=True)
    process.start()
    deadline = time.monotonic() + 20
    while not (run_dir / HEARTBEAT).is_file():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return process


def moved_elsewhere(run_dir: Path) -> Path:
    """Make the newest lock file look as if it was written on another host."""
    (path,) = run_dir.glob("lock.*")
    path.write_text(json.dumps({"machine": "elsewhere:1", "pid": 1, "started": 0.0, "time": time.time()}))
    return path


def test_a_second_launch_is_refused_while_the_first_lives(tmp_path: Path) -> None:
    first = holder(tmp_path)
    try:
        with pytest.raises(UserError, match=f"is in use by process {first.pid} on "):
            RunLock(tmp_path, active=True).take()
        moved_elsewhere(tmp_path)  # it cannot be looked at, but it renews its lock
        with pytest.raises(UserError, match="is in use by process 1 on elsewhere"):
            RunLock(tmp_path, active=True).take()
    finally:
        first.kill()


def test_the_lock_of_a_killed_launch_is_free_at_once(tmp_path: Path) -> None:
    first = holder(tmp_path)
    os.kill(first.pid or 0, signal.SIGKILL)
    began = time.monotonic()
    second = RunLock(tmp_path, active=True)
    second.take()
    assert time.monotonic() - began < 0.9  # less than LOCK_SECONDS
    assert second.problem is None
    second.release("finished")


def test_a_host_that_died_is_outlasted(tmp_path: Path) -> None:
    RunLock(tmp_path, active=True).take()
    first = moved_elsewhere(tmp_path)
    first.rename(first.with_suffix(".000004"))  # the first one's thread finds its file no more
    second = RunLock(tmp_path, active=True)
    second.take()
    assert [p.name for p in tmp_path.glob("lock.*")] == ["lock.000005"]
    second.release("stopped")


def test_who_was_superseded_learns_of_it(tmp_path: Path) -> None:
    first = RunLock(tmp_path, active=True)
    first.take()
    assert first.problem is None
    (tmp_path / "lock.000002").write_text("{}")
    deadline = time.monotonic() + 10
    while not first.lost:  # the loop looks at this flag only
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert "another launch took over" in (first.problem or "")


@pytest.mark.parametrize(("number", "kind"), [(errno.ENOSPC, FailureError), (errno.EROFS, UserError)])
def test_a_disk_that_is_full_for_now_is_no_mistake(
    number: int, kind: type[UserError], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> bool:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Lease, "acquire", refuse)
    with pytest.raises(UserError) as caught:
        RunLock(tmp_path / "run", active=True).take()
    assert type(caught.value) is kind


def test_the_heartbeat_says_what_the_run_does(tmp_path: Path) -> None:
    """Renewed by a thread, whatever the main thread is busy with."""

    def beat() -> dict:
        return json.loads((tmp_path / HEARTBEAT).read_text())

    entry = RunLock(tmp_path, active=True)
    entry.take()
    assert (beat()["doing"], beat()["step"]) == ("loading", 0)
    entry.now("training")
    entry.reached(7)
    with entry.doing("saving"):
        assert (beat()["doing"], beat()["step"]) == ("saving", 7)
    first = beat()
    time.sleep(0.5)
    assert first["doing"] == "training" and beat()["time"] > first["time"]
    assert beat()["since"] == first["since"]
    entry.release("finished")
    assert beat()["doing"] == "finished"


def test_a_container_gets_its_own_copy_of_the_heartbeat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy, run = tmp_path / "heartbeat.json", tmp_path / "run"
    run.mkdir()
    monkeypatch.setenv(COPY, str(copy))
    other = RunLock(run, active=False)
    other.take()
    assert not copy.exists()
    entry = RunLock(run, active=True)
    entry.take()
    entry.now("training")
    assert copy.read_text() == (run / HEARTBEAT).read_text()
    entry.release("finished")
    assert not copy.exists()  # what comes after the run has no heartbeat
    assert (run / HEARTBEAT).exists()
