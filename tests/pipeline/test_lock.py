"""One launch per run directory, and a heartbeat that says what the run is doing."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import time
from pathlib import Path

import pytest

from emo.common.errors import FailureError, UserError
from emo.common.lease import Lease
from emo.pipeline import lock
from emo.pipeline.lock import COPY, RunLock
from emo.pipeline.run_dir import HEARTBEAT
from tests.helpers.launching import wait_for
from tests.helpers.refusals import refused


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same protocol with a faster heart."""
    monkeypatch.setattr(lock, "BEAT", 0.1)
    monkeypatch.setattr(lock, "LOCK_SECONDS", 1.0)
    monkeypatch.setattr(lock, "LOOK", 0.02)


def _hold(run_dir: Path) -> None:
    RunLock(run_dir, active=True).take()
    time.sleep(60)


def moved_elsewhere(run_dir: Path) -> Path:
    """Make the newest lock file look as if it was written on another host."""
    (path,) = run_dir.glob("lock.*")
    path.write_text(json.dumps({"machine": "elsewhere:1", "pid": 1, "started": 0.0, "since": time.time()}))
    return path


def test_a_second_launch_waits_for_the_end_of_the_first(tmp_path: Path) -> None:
    first = multiprocessing.get_context("fork").Process(target=_hold, args=(tmp_path,), daemon=True)
    first.start()
    second = RunLock(tmp_path, active=True)
    try:
        wait_for((tmp_path / HEARTBEAT).is_file, "heartbeat")
        with refused("run-in-use"):
            RunLock(tmp_path, active=True).take()
    finally:
        first.kill()
        first.join()
    began = time.monotonic()
    second.take()
    assert time.monotonic() - began < 0.9  # less than LOCK_SECONDS
    moved_elsewhere(tmp_path)  # it cannot be looked at, but it renews its lock
    with refused("run-in-use"):
        RunLock(tmp_path, active=True).take()


def test_a_host_that_died_is_outlasted_and_learns_of_it(tmp_path: Path) -> None:
    first = RunLock(tmp_path, active=True)
    first.take()
    assert first.problem is None
    path = moved_elsewhere(tmp_path)
    path.rename(path.with_suffix(".000004"))  # the first one's thread finds its file no more
    second = RunLock(tmp_path, active=True)
    second.take()
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
        RunLock(tmp_path / "run", active=True).take()
    assert isinstance(caught.value, FailureError) == passes


def test_the_heartbeat_says_what_the_run_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Renewed by a thread, whatever the main thread is busy with; a container gets a copy of its own."""
    run, copy = tmp_path / "run", tmp_path / "copy.json"
    run.mkdir()
    monkeypatch.setenv(COPY, str(copy))

    def beat() -> dict:
        return json.loads((run / HEARTBEAT).read_text())

    RunLock(run, active=False).take()
    assert not copy.exists()
    entry = RunLock(run, active=True)
    entry.take()
    assert (beat()["doing"], beat()["step"]) == ("loading", 0)
    entry.now("training")
    entry.reached(7)
    with entry.doing("saving"):
        assert (beat()["doing"], beat()["step"]) == ("saving", 7)
        assert copy.is_file()
    first = beat()
    time.sleep(0.5)
    assert first["doing"] == "training" and beat()["time"] > first["time"]
    assert beat()["since"] == first["since"]
    entry.release("finished")
    assert beat()["doing"] == "finished" and not copy.exists()
