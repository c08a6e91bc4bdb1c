"""Two real ranks are one process: losses, weights, optimizers and every wrapper."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from deepspeed.runtime.zero.muon.original_muon import ns_compute_dtype

from tests.conftest import REPO
from tests.helpers.doors_worker import CASES as WRAPPERS
from tests.helpers.doors_worker import alone
from tests.helpers.launching import run_module
from tests.helpers.loss_reference import relative_error
from tests.helpers.zero_worker import CASES, STEPS, build, plain


@pytest.mark.slow
def test_wrapped_models_learn_what_one_process_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss of the global batch, and every parameter after a step."""
    monkeypatch.chdir(REPO)
    run_module(2, "tests.helpers.doors_worker", str(tmp_path))
    sharded = torch.load(tmp_path / "found.pt")
    for case in WRAPPERS:
        bound = 2e-2 if case == "autocast" else 1e-5  # halves of a batch are rounded apart in bfloat16
        for name, value in alone(case).items():
            assert relative_error(sharded[case][name], value) < bound, (case, name)


# Adam on partitions rounds like Adam; Muon's iteration may run in half precision.
EXACT = 1e-5
MUON = EXACT if ns_compute_dtype() == torch.float32 else 5e-3


@pytest.mark.slow
def test_every_stage_moves_parameters_as_one_process(tmp_path: Path) -> None:
    """Losses, and how every parameter moved: groups, weight decay, clipping, both rates, schedule.

    A run that resumes has momentum, steps and rates back. In the form for other numbers of ranks one count of
    steps must not be counted up by every group.
    """
    run_module(2, "tests.helpers.zero_worker", str(tmp_path / "results.pt"))
    sharded = torch.load(tmp_path / "results.pt")
    assert sharded.keys() == CASES.keys()
    for name, case in CASES.items():
        result, want = sharded[name], plain(case)
        bound = MUON if name.startswith("muon") else EXACT
        if name.endswith("bf16"):
            bound = 0.25  # of a movement of a few steps, in weights and gradients of eight bits
        assert result["losses"] == pytest.approx(want["losses"], rel=bound / 5), name
        for key, parameter in build(case).named_parameters():
            moved, expected = (tensors[key] - parameter.detach() for tensors in (result, want))
            assert relative_error(moved, expected) < bound, (name, key)
        if case.objective == "mle":
            # matrices of two layers; embedding and head; gains of five norms: a part of a checkpoint's layout
            assert result["groups"] == ([14, 2, 5] if name.startswith("muon") else [16, 5])
        second_half = result["losses"][STEPS // 2 :].tolist()
        assert result.get("resumed", result["losses"][STEPS // 2 :]).tolist() == second_half, name
    converted = sharded["adamw-3"]["converted"].tolist()
    assert converted == pytest.approx(sharded["adamw-3"]["losses"][STEPS // 2 :].tolist(), rel=1e-6)


@pytest.mark.slow
def test_the_probe_works_on_partitioned_weights(tmp_path: Path) -> None:
    """Two ranks under ZeRO-3 decide as one process does, and train afterwards."""
    path = tmp_path / "results"
    run_module(2, "tests.helpers.zero_worker", str(path), "probe")
    verdicts = ["positions", "mask", "refused", "head-differs", "positions"]
    assert list(torch.load(path).values()) == verdicts
