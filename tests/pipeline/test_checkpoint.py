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


def test_complete_checkpoints_are_listed_oldest_first(tmp_path: Path) -> None:
    for step in (300, 20, 1000000):
        write(tmp_path, step)
    partial_directory(tmp_path, 400).mkdir()
    (tmp_path / "step-000500").mkdir()
    assert [step_of(d) for d in checkpoints(tmp_path)] == [20, 300, 1000000]
    assert problem(tmp_path / "step-000300") is None


def _truncate(d: Path) -> None:
    (d / "state" / "rank0.pt").write_bytes(b"short")


def _flip(d: Path) -> None:
    data = bytearray((d / "state" / "rank0.pt").read_bytes())
    data[100] ^= 1
    (d / "state" / "rank0.pt").write_bytes(bytes(data))


DAMAGE: dict[str, Callable[[Path], object]] = {
    "truncated file": _truncate,
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
def test_damage_is_found(tmp_path: Path, name: str) -> None:
    directory = write(tmp_path, 7)
    DAMAGE[name](directory)
    assert problem(directory) is not None


def test_the_parts_of_a_check_together_find_a_flip(tmp_path: Path) -> None:
    directory = write(tmp_path, 7)
    _flip(directory)
    result = [problem(directory, part, 3) for part in range(3)]
    assert sum(f is not None for f in result) == 1


def test_prune_keeps_the_newest_and_clears_partial_ones(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        write(tmp_path, step)
    partial_directory(tmp_path, 4).mkdir()
    checkpoint.prune(tmp_path, keep_last=2)
    assert sorted(d.name for d in tmp_path.iterdir()) == ["step-000002", "step-000003"]


def test_an_interrupted_removal_leaves_no_valid_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = write(tmp_path, 5)
    monkeypatch.setattr(checkpoint.shutil, "rmtree", lambda *a, **k: None)
    checkpoint.remove(directory)
    assert directory.is_dir()
    assert checkpoints(tmp_path) == []
