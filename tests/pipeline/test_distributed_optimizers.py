"""AdamW and Muon on two real ranks are what they are on one: ZeRO stages, offload, copies in a host."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from deepspeed.runtime.zero.muon.original_muon import ns_compute_dtype

from tests.helpers.launching import run_module
from tests.helpers.loss_reference import relative_error
from tests.helpers.optimizer_worker import CASES, STEPS, build, plain, recipe

# Adam on partitions rounds like Adam; Muon's iteration may run in half precision.
EXACT = 1e-5
MUON = EXACT if ns_compute_dtype() == torch.float32 else 5e-3


@pytest.mark.slow
def test_two_ranks_are_one_process(tmp_path: Path) -> None:
    """Losses, and how every parameter moved: groups, weight decay, clipping, both rates, schedule.

    A run that resumes has momentum, steps and rates back. In the form for other numbers of ranks one count of
    steps must not be counted up by every group.
    """
    run_module(2, "tests.helpers.optimizer_worker", str(tmp_path))
    sharded = torch.load(tmp_path / "results.pt")
    assert sharded.keys() == CASES.keys()
    truth = {kind: plain(recipe(CASES[f"{kind}-3"][:-1])) for kind in ("adamw", "muon")}
    first = dict(build().named_parameters())
    for case, result in sharded.items():
        kind = case.partition("-")[0]
        want, bound = truth[kind], EXACT if kind == "adamw" else MUON
        if case.endswith("bf16"):
            bound = 0.25  # of a movement of a few steps, in weights and gradients of eight bits
        assert result["losses"] == pytest.approx(want["losses"], rel=bound / 5), case
        for name, parameter in first.items():
            moved, expected = (tensors[name] - parameter.detach() for tensors in (result, want))
            assert relative_error(moved, expected) < bound, (case, name)
        # matrices of two layers; embedding and head; gains of five norms: a part of a checkpoint's layout
        assert result["groups"] == ([14, 2, 5] if kind == "muon" else [16, 5])
        second_half = result["losses"][STEPS // 2 :].tolist()
        assert result.get("resumed", result["losses"][STEPS // 2 :]).tolist() == second_half, case
    converted = sharded["adamw-3"]["converted"].tolist()
    assert converted == pytest.approx(sharded["adamw-3"]["losses"][STEPS // 2 :].tolist(), rel=1e-6)
