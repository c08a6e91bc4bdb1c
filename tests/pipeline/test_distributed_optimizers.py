"""AdamW and Muon on two real ranks are what they are on one: ZeRO stages, offload, copies in a host."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from deepspeed.runtime.zero.muon.original_muon import ns_compute_dtype

from tests.helpers.launching import run_module
from tests.helpers.loss_reference import relative_error
from tests.helpers.optimizer_worker import CASES, RESUMED, STEPS, build, plain, recipe

# Adam on partitions rounds like Adam; Muon's iteration may run in half precision.
EXACT = 1e-5
MUON = EXACT if ns_compute_dtype() == torch.float32 else 5e-3


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Return the results of two ranks."""
    directory = tmp_path_factory.mktemp("optimizers")
    run_module(2, "tests.helpers.optimizer_worker", str(directory))
    return torch.load(directory / "found.pt")


@pytest.fixture(scope="module")
def truth() -> dict[str, dict[str, Any]]:
    """Return the results of a plain loop on one process."""
    return {name: plain(recipe(CASES[name][:-1])) for name in ("adamw-1", "muon-1")}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_two_ranks_are_one_process(
    sharded: dict[str, dict[str, Any]], truth: dict[str, dict[str, Any]], case: str
) -> None:
    """Losses, and how every parameter moved: groups, weight decay, clipping, both rates, schedule."""
    adamw = case.startswith("adamw")
    want, bound = truth["adamw-1" if adamw else "muon-1"], EXACT if adamw else MUON
    if case.endswith("bf16"):
        bound = 0.25  # of a movement of a few steps, in weights and gradients of eight bits
    assert sharded[case]["losses"] == pytest.approx(want["losses"], rel=bound / 5)
    first = dict(build().named_parameters())
    for name, parameter in first.items():
        moved, expected = (result[name] - parameter.detach() for result in (sharded[case], want))
        assert relative_error(moved, expected) < bound, name


@pytest.mark.slow
@pytest.mark.parametrize("case", RESUMED)
def test_a_resumed_run_is_the_undisturbed_one(sharded: dict[str, dict[str, Any]], case: str) -> None:
    """Momentum, steps and rates come back."""
    assert sharded[case]["resumed"].tolist() == sharded[case]["losses"][STEPS // 2 :].tolist()


@pytest.mark.slow
def test_a_converted_checkpoint_goes_on_alike(sharded: dict[str, dict[str, Any]]) -> None:
    """The form for other numbers of ranks; its one count of steps must not be counted up by every group."""
    expected = sharded["adamw-3"]["losses"][STEPS // 2 :]
    assert sharded["adamw-3"]["converted"] == pytest.approx(expected, rel=1e-6)


def test_groups_of_muon_are_part_of_a_checkpoints_layout(sharded: dict[str, dict[str, Any]]) -> None:
    """Matrices of two layers; embedding and head; gains of five norms."""
    assert {tuple(sharded[f"muon-{stage}"]["groups"]) for stage in (1, 2, 3)} == {(14, 2, 5)}
    assert {tuple(sharded[f"adamw-{stage}"]["groups"]) for stage in (1, 2, 3)} == {(16, 5)}
