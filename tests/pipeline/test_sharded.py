"""Two real ranks are one process: losses, weights, optimizers, every wrapper; and what they send and hold."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero.muon.original_muon import ns_compute_dtype

from emo.pipeline.config import Batch, load_config
from emo.pipeline.loss.objectives import get_objective
from emo.pipeline.planning import footprint
from emo.pipeline.planning.footprint import ACCELERATORS, Setup, Sizes
from emo.pipeline.planning.plan import setup_of
from tests.conftest import REPO
from tests.helpers import traffic_worker
from tests.helpers.doors_worker import CASES as WRAPPERS
from tests.helpers.doors_worker import alone
from tests.helpers.launching import run_module
from tests.helpers.loss_reference import relative_error
from tests.helpers.published import LLAMA_7B
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


@pytest.fixture(scope="module")
def traffic(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What two ranks of the installed DeepSpeed send and hold, by case."""
    out = tmp_path_factory.mktemp("traffic") / "cases.jsonl"
    run_module(2, "tests.helpers.traffic_worker", str(out), *traffic_worker.CASES)
    lines = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    return {line["case"]: line for line in lines}


def test_zero2_reduces_as_the_plan_says(traffic: dict[str, dict[str, Any]]) -> None:
    """All of the gradient in every pass: to all ranks, which moves it twice, or to its owner alone."""
    sent, passes = traffic_worker.PARAMETERS, traffic_worker.PASSES
    assert traffic["zero2"]["elements"] == {"all_reduce": passes * sent}
    assert traffic["zero2-float32"]["elements"] == {"all_reduce": passes * sent}
    assert traffic["zero2-root"]["elements"] == {"reduce": passes * sent}
    assert traffic["zero1"]["elements"] == {"all_reduce": sent}  # once a step
    config = load_config(REPO / "launch/recipes/llama-7b-wikitext103.yaml", [])
    batch, seconds = Batch(16, 1, 1, 16), []
    objective = get_objective("mle")
    for flag in (True, False):
        ds_config = {"zero_optimization": {"stage": 2, "use_multi_rank_bucket_allreduce": flag}}
        setup = dataclasses.replace(setup_of(config, batch, ds_config, objective), accumulation=64)
        seconds.append(footprint.step_time(LLAMA_7B, setup, ACCELERATORS["A100-80G"], 5.0).communication)
    assert seconds[0] / seconds[1] == pytest.approx(2 * 15 / 16, rel=0.1)


@pytest.mark.parametrize("case", ["zero1", "zero1-float32", "zero2", "zero2-float32"])
def test_the_plan_holds_what_deepspeed_holds_while_gradients_are_reduced(
    traffic: dict[str, dict[str, Any]], case: str
) -> None:
    n, width = traffic_worker.PARAMETERS, traffic_worker.WIDTH
    sizes = Sizes(n, n, n, traffic_worker.LAYERS, width, width, width, False, 0, traffic_worker.LAYERS)
    bf16, stage = "float32" not in case, int(case[4])
    setup = Setup(2, stage, 1, 1, 2, bf16=bf16, cost=False, chunk_mb=0, bucket=width * width)
    predicted = footprint.memory(sizes, setup)
    measured = traffic[case]["peak"]
    assert sum(predicted[:3]) <= measured * 1.001 and measured <= predicted.total * 1.001
    if stage == 1:
        assert predicted.total == pytest.approx(measured, rel=0.01 if bf16 else 0.3)
