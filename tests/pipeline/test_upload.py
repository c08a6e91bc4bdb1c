"""Copies of checkpoints elsewhere: beside training, resumed, verified, and bounded by progress alone."""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from emo.pipeline import upload
from emo.pipeline.checkpoint import prune
from emo.pipeline.run_dir import COMPLETE, checkpoints
from emo.pipeline.upload import Uploads, copy_checkpoint

FILES = {"state.json": b"{}", "state/rank-0.pt": b"zero" * 100, "state/rank-1.pt": b"one" * 100}


def checkpoint(run_dir: Path, step: int, files: dict[str, bytes] = FILES) -> Path:
    directory = run_dir / f"step-{step:06d}"
    listed = {}
    for name, content in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(content)
        listed[name] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (directory / COMPLETE).write_text(json.dumps({"files": listed}))
    return directory


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_what_is_there_is_not_copied_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    open_file = MemoryFileSystem.open

    def opening(self: MemoryFileSystem, path: str, mode: str = "rb", **options: object) -> object:
        if "w" in mode:
            written.append(path.rpartition("/")[2])
        return open_file(self, path, mode, **options)

    monkeypatch.setattr(MemoryFileSystem, "open", opening)
    monkeypatch.setattr(MemoryFileSystem, "store", {})
    source, system = checkpoint(tmp_path, 3), fsspec.filesystem("memory")
    root = f"/bucket/{source.name}"
    copy_checkpoint(source, "memory://bucket", lambda: None)
    assert {"rank-0.pt", "rank-1.pt", "state.json"} <= set(written) and not system.exists(f"{root}/UPLOADING")
    written.clear()
    copy_checkpoint(source, "memory://bucket", lambda: None)
    assert written == []
    # interrupted: a file is short, another one is missing
    system.rm_file(f"{root}/{COMPLETE}")
    system.pipe_file(f"{root}/UPLOADING", (source / COMPLETE).read_bytes())
    system.pipe_file(f"{root}/state/rank-0.pt", b"zero")
    system.rm_file(f"{root}/state.json")
    written.clear()
    copy_checkpoint(source, "memory://bucket", lambda: None)
    assert sorted(set(written) - {COMPLETE, "UPLOADING"}) == ["rank-0.pt", "state.json"]
    assert system.cat_file(f"{root}/state/rank-0.pt") == FILES["state/rank-0.pt"]


def test_a_launch_goes_on_with_what_is_left_and_tries_failures_again(tmp_path: Path) -> None:
    run, target = tmp_path / "run", tmp_path / "copies"
    checkpoint(run, 1)
    target.write_text("in the way")
    uploads = Uploads(run, str(target))
    until(lambda: not uploads.goes_on())
    assert uploads.unfinished() == ["step-000001"]
    target.unlink()
    checkpoint(run, 2)
    uploads.wake()
    until(lambda: not uploads.goes_on())
    assert uploads.unfinished() == [] and len(checkpoints(target)) == 2


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A store that takes no piece until the event is set."""
    go_on = threading.Event()

    def copy(directory: Path, target: str, moved: Callable[[], None]) -> None:
        go_on.wait()
        shutil.copytree(directory, Path(target) / directory.name)

    monkeypatch.setattr(upload, "copy_checkpoint", copy)
    yield go_on
    go_on.set()


def test_what_is_being_copied_is_not_pruned(tmp_path: Path, slow: threading.Event) -> None:
    run = tmp_path / "run"
    checkpoint(run, 1)
    uploads = Uploads(run, str(tmp_path / "copies"))
    until(lambda: uploads.current is not None)
    for step in (2, 3):
        checkpoint(run, step)
    prune(run, 1, 0, uploads.current)
    assert [d.name for d in checkpoints(run)] == ["step-000001", "step-000003"]
    slow.set()
    uploads.wake()
    until(lambda: not uploads.goes_on())
    assert [d.name for d in checkpoints(tmp_path / "copies")] == ["step-000001", "step-000003"]


def test_the_end_waits_as_long_as_something_moves(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, slow: threading.Event
) -> None:
    checkpoint(tmp_path / "run", 1)
    uploads = Uploads(tmp_path / "run", str(tmp_path / "copies"))
    monkeypatch.setattr(upload, "STALL", 0.3)
    for _ in range(4):  # longer than a stall
        time.sleep(0.1)
        uploads._move()
        assert uploads.goes_on()
    until(lambda: not uploads.goes_on())
    assert uploads.unfinished() == ["step-000001"]
    slow.set()
    until(lambda: uploads.unfinished() == [])
