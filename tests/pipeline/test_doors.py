"""The fused loss on two real ranks: DDP, FSDP2, checkpointing, autocast, a compiled body, a Trainer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.helpers.doors_worker import CASES, alone
from tests.helpers.launching import run_module
from tests.helpers.loss_reference import relative_error


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, torch.Tensor]]:
    """Return the results of two ranks."""
    directory = tmp_path_factory.mktemp("doors")
    run_module(2, "tests.helpers.doors_worker", str(directory))
    return torch.load(directory / "found.pt")


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_two_ranks_are_one_process(
    sharded: dict[str, dict[str, torch.Tensor]], case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loss of the global batch, and every parameter after a step."""
    monkeypatch.chdir(Path(__file__).parents[2])
    want = alone(case)
    bound = 2e-2 if case == "autocast" else 1e-5  # halves of a batch are rounded apart in bfloat16
    assert sharded[case]["loss"].item() == pytest.approx(want["loss"].item(), rel=bound)
    for name, value in want.items():
        assert relative_error(sharded[case][name], value) < bound, name
