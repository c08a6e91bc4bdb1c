"""What `plan` predicts, held against published runs and against what DeepSpeed sends and holds here."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from emo.pipeline.config import Batch, load_config
from emo.pipeline.loss.objectives import get_objective
from emo.pipeline.planning import footprint
from emo.pipeline.planning.checks import check
from emo.pipeline.planning.footprint import ACCELERATORS, GIB, Setup, Sizes
from emo.pipeline.planning.plan import Cluster, fit, memory_line, setup_of, sizes_of, sum_line
from tests.conftest import REPO
from tests.helpers import launching, published, traffic_worker

LLAMA_7B = Sizes(6_738_415_616, 6_738_415_616, 6_476_271_616, 32, 4096, 11008, 4096, True, 32000, 291)
A100, H100 = ACCELERATORS["A100-80G"], ACCELERATORS["H100-80G"]
RUNS = published.runs()


def test_the_error_that_is_printed_is_that_of_held_out_runs() -> None:
    """Of runs to which nothing was fitted, many more than those to which something was."""
    errors = {mark: [abs(run.ratio() - 1) for run in RUNS if run.mark == mark] for mark in published.MARKS}
    calibrates, held_out, outside = (max(errors[mark]) for mark in errors)
    assert footprint.TIME_ERROR - 0.02 < held_out <= footprint.TIME_ERROR
    assert calibrates < held_out < outside and sum(error > 0.1 for error in errors["held_out"]) <= 2
    assert len(errors["held_out"]) > 2 * len(errors["calibrates"])


def test_selective_checkpointing_lies_between_all_and_none() -> None:
    """Another trainer, other cards; and what torch.compile gained there is what the counted traffic gives."""
    sizes, fastest = published.sizes_of("LLaMA3-8B", 8192), []
    for compiled, speed in ((False, published.EAGER), (True, published.COMPILED)):
        plain = Setup(8, 3, 2, 8192, compiled=compiled, cost=False, reduced=4)
        whole = dataclasses.replace(plain, checkpointing=True)
        slow, fast = (published.predicted(sizes, s, published.H100_HBM2E, 400.0) for s in (whole, plain))
        assert slow < speed < fast
        fastest.append(fast)
    assert fastest[1] / fastest[0] == pytest.approx(published.COMPILED / published.EAGER, rel=0.05)


@pytest.mark.parametrize("case", published.MEMORY)
def test_peaks_published_for_gpus(case: tuple[int, bool, int, int, float]) -> None:
    """What is called sure does suffice, and is no multiple of what was used."""
    stage, checkpointing, micro, passes, peak = case
    logits = 16 * micro * 4096 * LLAMA_7B.vocabulary / 2**20  # whole, in two precisions, with gradients
    setup = Setup(8, stage, micro, 4096, passes, checkpointing=checkpointing, cost=False, chunk_mb=logits)
    found = footprint.memory(LLAMA_7B, setup)
    without_head = 6 * LLAMA_7B.vocabulary * LLAMA_7B.hidden  # the gradient that our loss holds
    assert peak < (found.surely - without_head) / GIB < 1.6 * peak


def test_published_memory() -> None:
    """Rajbhandari et al. 2020: 16 bytes of states for a parameter; ours holds gradients in float32: 18.

    ZeRO-1 keeps what ZeRO-2 frees: gradients in bf16 for a whole step, beside those in float32 that all ranks
    hold whole, and a copy while they are reduced, unless that is in float32.
    """
    shared = footprint.memory(LLAMA_7B, Setup(8, 3, 1, 256, cost=False))
    assert sum(shared[:3]) == pytest.approx(18 * LLAMA_7B.parameters / 8)
    assert shared.total < shared.surely < shared.total * (1 + footprint.MEMORY_ERROR)
    first, second = (footprint.memory(LLAMA_7B, Setup(8, stage, 8, 2048)) for stage in (1, 2))
    assert first.total - second.total == pytest.approx((4 * 7 / 8 + 2) * LLAMA_7B.parameters, rel=0.01)
    mistral = dataclasses.replace(LLAMA_7B, parameters=7_241_732_096, trainable=7_241_732_096)
    setup = Setup(8, 1, 1, 256, cost=False)  # on 8xA100-80G 77.6 GiB of DeepSpeed's tensors alone
    assert footprint.memory(mistral, setup).total / GIB == pytest.approx(77.6, abs=0.1)


@pytest.fixture(scope="module")
def traffic(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What two ranks of the installed DeepSpeed send and hold, by case."""
    out = tmp_path_factory.mktemp("traffic") / "cases.jsonl"
    launching.run_module(2, "tests.helpers.traffic_worker", str(out), *traffic_worker.CASES)
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
        seconds.append(footprint.step_time(LLAMA_7B, setup, A100, 5.0).communication)
    assert seconds[0] / seconds[1] == pytest.approx(2 * 15 / 16, rel=0.1)


@pytest.mark.parametrize("case", ["zero1", "zero1-float32", "zero2", "zero2-float32"])
def test_the_plan_holds_what_deepspeed_holds_while_gradients_are_reduced(
    traffic: dict[str, dict[str, Any]], case: str
) -> None:
    n, width = traffic_worker.PARAMETERS, traffic_worker.WIDTH
    sizes = Sizes(n, n, n, traffic_worker.LAYERS, width, width, width, False, 0, traffic_worker.LAYERS)
    bf16, stage = "float32" not in case, int(case[4])
    setup = Setup(2, stage, 1, 1, 2, bf16=bf16, cost=False, chunk_mb=0, bucket=width * width)
    found = footprint.memory(sizes, setup)
    measured = traffic[case]["peak"]
    assert sum(found[:3]) <= measured * 1.001 and measured <= found.total * 1.001
    if stage == 1:
        assert found.total == pytest.approx(measured, rel=0.01 if bf16 else 0.3)


def test_a_token_passes_through_some_experts_only() -> None:
    """Mixtral-8x7B: the published total, active ones by hand."""
    shape = {"num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 32000, "num_key_value_heads": 8}
    hf_config = CONFIG_MAPPING["mixtral"](**shape)
    with torch.device("meta"):
        sizes = sizes_of(AutoModelForCausalLM.from_config(hf_config), hf_config)
    # embedding and head; attention, two of eight experts of 14336, their router, norms
    layer = 2 * 4096**2 + 2 * 4096 * 1024 + 2 * 3 * 4096 * 14336 + 8 * 4096 + 2 * 4096
    assert sizes.parameters == 46_702_792_704
    assert sizes.parameters - sizes.idle == 2 * 32000 * 4096 + 4096 + 32 * layer
    dense, setup = dataclasses.replace(sizes, idle=0), Setup(8, 3, 1, 2048)
    times = [footprint.step_time(given, setup, A100).matrices for given in (sizes, dense)]
    assert times[0] / times[1] == pytest.approx(sizes.active / sizes.body)
    shares = [footprint.utilisation(given, setup, 1.0, A100) for given in (sizes, dense)]
    assert shares[0] < 0.5 * shares[1]


def test_a_mask_for_packed_rows_takes_memory_and_time() -> None:
    """2 GiB at two rows of 4,096 tokens: every layer keeps its own until the backward pass."""
    for checkpointing, layers in ((False, 32), (True, 1)):
        plain = Setup(8, 3, 2, 4096, checkpointing=checkpointing)
        masked = dataclasses.replace(plain, masked=True)
        added = footprint.memory(LLAMA_7B, masked).total - footprint.memory(LLAMA_7B, plain).total
        assert added == 2 * 4096**2 * (1 + 2 * layers)
        times = [footprint.step_time(LLAMA_7B, setup, A100) for setup in (plain, masked)]
        assert times[1].attention == pytest.approx(2 * times[0].attention)


def test_stages_communicate_what_they_need() -> None:
    """ZeRO-3 gathers in every pass, ZeRO-2 reduces in every pass, ZeRO-1 once a step and unhidden."""

    def seconds(stage: int, passes: int, network: float = 25.0, **changes: Any) -> float:
        setup = Setup(16, stage, 1, 256, passes, **changes)
        return footprint.step_time(LLAMA_7B, setup, A100, network).communication

    assert seconds(1, 8) == pytest.approx(seconds(1, 1))
    assert seconds(3, 8) - seconds(3, 4) > 1.4 * (seconds(2, 8) - seconds(2, 4)) > 0
    assert seconds(1, 1) > seconds(2, 1, all_reduced=False)
    assert seconds(3, 4, hpz=8) < 0.5 * seconds(3, 4)
    assert seconds(3, 4, network=400.0, hpz=8) > 0.9 * seconds(3, 4, network=400.0)
    held = [footprint.memory(LLAMA_7B, Setup(16, 3, 1, 256, hpz=hpz)).parameters for hpz in (1, 8)]
    assert held[1] - held[0] == 2 * LLAMA_7B.parameters / 8


def test_names_and_sizes() -> None:
    assert footprint.accelerator("NVIDIA A100-SXM4-80GB") == ACCELERATORS["A100-80G"]
    assert footprint.accelerator("NVIDIA GeForce RTX 4090") == ACCELERATORS["RTX4090-24G"]
    assert footprint.accelerator("TPU v5") is None
    ready = check(load_config(REPO / "launch/recipes/gpt2-wikitext2.yaml", []), 1, local=False)
    gpt2 = sizes_of(ready.model, ready.hf_config)
    assert (gpt2.inner, gpt2.gated, gpt2.key_values) == (3072, False, 768)
    assert gpt2.parameters - gpt2.body == 50257 * 768  # the tied head counts once


def test_printed_parts_sum_to_the_printed_total() -> None:
    for micro in (1, 2, 8, 64):
        result = footprint.memory(LLAMA_7B, Setup(8, 3, micro, 256))
        total, parts = sum_line({k: v / GIB for k, v in result.peak.items()}, 1, "GiB").split(" GiB = ")
        assert sum(float(p.split()[-1]) for p in parts.split(" + ")) == pytest.approx(float(total), abs=1e-9)
    assert memory_line({"weights": 2.0 * 2**20, "optimizer": 0.0}, 2) == "2.0 MiB = weights 2.0"


def test_what_does_not_fit_is_told_what_to_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """`tight` is what fits only if the estimate is exact."""
    setup = Setup(4, 3, 16, 2048)
    needed = footprint.memory(LLAMA_7B, setup).total
    for room, answer in ((needed * 1.5, "yes; "), (needed * 1.02, "tight: "), (needed * 0.9, "NO; ")):
        monkeypatch.setattr(Cluster, "room", room)
        text = fit(LLAMA_7B, setup, Cluster(4, "A100-80G"))
        assert text.startswith(answer) and ("activation_checkpointing" in text) == (answer != "yes; ")
        micro = int(re.search(r"train.micro_batch_size(?:=|.*: )(\d+)", text)[1])  # type: ignore[index]
        assert footprint.memory(LLAMA_7B, dataclasses.replace(setup, micro=micro)).total <= room
