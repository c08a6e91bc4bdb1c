"""Snapshots of the state of a training engine: memory, files, and values that are not finite."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from emo.pipeline.engine.snapshots import Snapshots
from tests.helpers.refusals import refused


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_snapshot_reuses_the_memory_of_the_last_one(tmp_path: Path, dtype: torch.dtype) -> None:
    snapshots, weight = Snapshots(None), torch.arange(6.0).to(dtype).view(2, 3)
    pointers = []
    for step in (1, 2):
        state = {"w": weight.t() + step, "view": weight[1:], "step": step}
        snapshots.save(state, str(tmp_path / f"step-{step}" / "state.pt"))
        (copied, path), *_ = snapshots._waiting
        pointers.append([copied[name].data_ptr() for name in ("w", "view")])
        weight += 1  # training continues
        snapshots.write()
        written = torch.load(path)
        assert torch.equal(written["w"], weight.t() - 1 + step)
        assert torch.equal(written["view"], weight[1:] - 1)
    assert pointers[0] == pointers[1] and len({*pointers[0], weight.data_ptr(), weight[1:].data_ptr()}) == 4


def test_a_snapshot_that_is_written_at_once_copies_no_complete_tensor(tmp_path: Path) -> None:
    snapshots, weight = Snapshots(None), torch.arange(6.0)
    snapshots.copies = False
    snapshots.save({"w": weight, "view": weight[1:]}, str(tmp_path / "state.pt"))
    ((state, _),) = snapshots._waiting
    assert state["w"].data_ptr() == weight.data_ptr()
    snapshots.write()
    written = torch.load(tmp_path / "state.pt")
    assert torch.equal(written["w"], weight) and torch.equal(written["view"], weight[1:])
    assert written["view"].untyped_storage().nbytes() == 20


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_buffers_may_hold_infinity(tmp_path: Path, dtype: torch.dtype) -> None:
    weight, mask = torch.ones(3, dtype=dtype), torch.tensor([0.0, -torch.inf])
    state = {"module": {"w": weight, "mask": mask}, "buffer_names": ["mask"], "step": torch.tensor(3)}
    snapshots = Snapshots(None)
    snapshots.save(state, str(tmp_path / "good.pt"))
    assert snapshots.write() == [tmp_path / "good.pt"]
    weight[1] = torch.nan
    snapshots.save(state, str(tmp_path / "bad.pt"))
    with refused("not-finite"):
        snapshots.write()
    assert not (tmp_path / "bad.pt").exists()
