"""The directory protocol: torn, altered and incomplete checkpoints are never believed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from emo.pipeline import checkpoint
from emo.pipeline.run_dir import STATE, checkpoints, describe, list_files, partial_directory, problem, step_of


def write(run_dir: Path, step: int) -> Path:
    partial = partial_directory(run_dir, step)
    (partial / "state").mkdir(parents=True)
    (partial / "state" / "rank0.pt").write_bytes(bytes(range(200)))
    (partial / "state" / "rank1.pt").write_bytes(b"abc" * step)
    (partial / STATE).write_text("{}")
    checkpoint.write_complete(partial, describe(partial, list_files(partial)))
    return checkpoint.publish(run_dir, step)


def test_complete_checkpoints_are_listed_and_pruned(tmp_path: Path) -> None:
    for step in (300, 20, 1000000):
        write(tmp_path, step)
    partial_directory(tmp_path, 400).mkdir()
    (tmp_path / "step-000500").mkdir()
    assert [step_of(d) for d in checkpoints(tmp_path)] == [20, 300, 1000000]
    assert problem(tmp_path / "step-000300") is None
    checkpoint.prune(tmp_path, keep_last=1, keep_every=100)
    assert [step_of(d) for d in checkpoints(tmp_path)] == [300, 1000000]
    assert not partial_directory(tmp_path, 400).exists()


def _flip(d: Path) -> None:
    data = bytearray((d / "state" / "rank0.pt").read_bytes())
    data[100] ^= 1
    (d / "state" / "rank0.pt").write_bytes(bytes(data))


DAMAGE: dict[str, Callable[[Path], object]] = {
    "truncated file": lambda d: (d / "state" / "rank0.pt").write_bytes(b"short"),
    "flipped bit": _flip,
    "missing rank file": lambda d: (d / "state" / "rank1.pt").unlink(),
    "stray file": lambda d: (d / "state" / "rank2.pt").write_bytes(b"x"),
    "link": lambda d: (d / "state" / "link").symlink_to(d / "COMPLETE"),
    "missing marker": lambda d: (d / "COMPLETE").unlink(),
    "empty marker": lambda d: (d / "COMPLETE").write_text(""),
    "marker without files": lambda d: (d / "COMPLETE").write_text('{"files": {}}'),
    "marker of other kind": lambda d: (d / "COMPLETE").write_text("[1]"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_detected(tmp_path: Path, name: str) -> None:
    """Also where each of several ranks hashes a part of the files."""
    directory = write(tmp_path, 7)
    DAMAGE[name](directory)
    assert any(problem(directory, part, 3) is not None for part in range(3))


def test_an_interrupted_removal_leaves_no_valid_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = write(tmp_path, 5)
    monkeypatch.setattr(checkpoint.shutil, "rmtree", lambda *a, **k: None)
    checkpoint.remove(directory)
    assert directory.is_dir() and checkpoints(tmp_path) == []
