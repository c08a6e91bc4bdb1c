"""Rows that several ranks share: their parts, rejected settings, and the plan."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PretrainedConfig

from emo.pipeline.batches.config import solve_batch
from emo.pipeline.batches.loader import make_micro_batch
from emo.pipeline.config import load_config
from emo.pipeline.engine.device.devices import usable_attention
from emo.pipeline.engine.device.hardware import ACCELERATORS
from emo.pipeline.engine.sequence import check_sequence_parallel, cut_bounds
from emo.pipeline.loss.models.head import BOUNDS, sum_by_document
from emo.pipeline.loss.models.varlen import VARLEN
from emo.pipeline.planning import footprint
from emo.pipeline.planning.checks import check_plan
from tests.conftest import REPO
from tests.helpers.families import FAMILIES, family
from tests.helpers.refusals import refused
from tests.helpers.sequence_worker import ROWS, read_rows

BLOCK = 24
ROPE = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
GEMMA2 = {"model_type": "gemma2"} | FAMILIES["gemma2"]
ON_POLICY = 'objective={"name": "kl", "teacher": {"model": "org/model"}, "on_policy": {"share": 0.5}}'


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_the_parts_of_rows_add_up(parts: int) -> None:
    """Every input is cut by position, and all parts together count each document once."""
    rows = read_rows(0, BLOCK)
    rows["stored"] = np.random.default_rng(0).random((ROWS, BLOCK, 3))
    complete = make_micro_batch({name: array.copy() for name, array in rows.items()})
    micro = [make_micro_batch({k: v.copy() for k, v in rows.items()}, i, parts) for i in range(parts)]
    for name in ("input_ids", "position_ids", "stored"):
        assert torch.equal(torch.cat([part[name] for part in micro], 1), complete[name])
    assert sum(len(part["labels"]) for part in micro) == len(complete["labels"])
    values = torch.rand(ROWS, BLOCK)
    bounds = [cut_bounds(complete[BOUNDS], BLOCK, i, parts) for i in range(parts)]
    tokens = sum(part["labels"].per_document(cut) for part, cut in zip(micro, bounds, strict=True))
    chunks = zip(values.chunk(parts, 1), bounds, strict=True)
    sums = torch.stack([sum_by_document(chunk.flatten(), cut) for chunk, cut in chunks]).sum(0)
    assert np.array_equal(tokens, complete["labels"].per_document(complete[BOUNDS]))
    assert torch.allclose(sums, sum_by_document(values.flatten(), complete[BOUNDS]))


def settings(n: int, *overrides: str) -> Any:
    keys = [f"train.sequence_parallel={n}", "data.sequence_len=64", *overrides]
    return load_config(REPO / "launch/recipes/paper/llama-7b-wikitext103.yaml", keys)


def llama(heads: int = 8, keys: int = 2, **changes: Any) -> PretrainedConfig:
    shape = {"num_attention_heads": heads, "num_key_value_heads": keys, "hidden_size": 96}
    return family("llama", **shape, **changes).config


@pytest.mark.parametrize(
    ("block", "n", "lengths"),
    [(63, 8, {"56", "64"}), (66, 8, {"64"}), (5, 8, {"8"}), (3, 65, set()), (2**20 - 1, 2, {"1048574"})],
)
def test_named_lengths_are_valid(block: int, n: int, lengths: set[str]) -> None:
    """They have more than one token, and fit into the context of the model."""
    context = 2**20 - 1 if block > 2**19 else 64
    with refused("sequence-parallel") as error:
        check_sequence_parallel(
            settings(n, f"data.sequence_len={block}"), llama(max_position_embeddings=context)
        )
    cure = str(error.value).partition("Set ")[2]
    named = set(re.findall(r"\d+", cure.partition(" and prepare")[0])) if "prepare" in cure else set()
    assert named == lengths


@pytest.mark.parametrize(
    ("n", "overrides", "model", "message"),
    [
        (8, (), {"heads": 12, "keys": 4}, "one of 1, 2, 4, 12"),
        (3, (), {}, "data.sequence_len=63 and"),
        (2, ("model.compile=true",), {}, "model.compile"),
        (2, (ON_POLICY,), {}, "objective.on_policy"),
        (2, ("train.kl_from_base=8",), {}, "train.kl_from_base"),
        (2, (), {"rope_parameters": ROPE}, "RoPE of type dynamic"),
    ],
)
def test_settings_that_do_not_work(n: int, overrides: tuple[str, ...], model: Any, message: str) -> None:
    with refused("sequence-parallel") as error:
        check_sequence_parallel(settings(n, *overrides), llama(**model))
    assert message in str(error.value)


def test_settings_that_work() -> None:
    """Key heads are repeated if more ranks share a row. With adapters, `train.kl_from_base` is possible."""
    check_sequence_parallel(settings(4, "train.kl_from_base=8", "model.lora={}"), llama())
    check_sequence_parallel(settings(1, "model.compile=true"), llama(keys=8))


def test_ranks_form_groups() -> None:
    batch = solve_batch(6, 2, 8, 4)
    assert (batch.replicas, batch.micro, batch.accumulation, batch.slots) == (2, 2, 2, 8)
    with refused("sequence-parallel") as error:
        solve_batch(6, 2, 8, 3)
    assert "1, 2, 4, 8" in str(error.value)
    with refused("batch-ranks"):
        solve_batch(1, 1, 4, 2)


def test_shared_rows_need_an_attention_without_a_mask() -> None:
    assert usable_attention(settings(2).model, llama(), shared=True) == VARLEN
    for attention in ("sdpa", "eager"):
        with refused("sequence-parallel"):
            usable_attention(
                settings(2, f"model.attn_implementation={attention}").model, llama(), shared=True
            )
    with refused("sequence-parallel"):
        usable_attention(settings(2).model, family("gemma2").config, shared=True)


def test_an_attention_is_planned_for_other_hosts() -> None:
    """The model decides, and the GPUs of the plan do, but not this host."""
    flash = settings(2, "model.attn_implementation=flash_attention_2").model
    assert usable_attention(flash, llama(), shared=True, gpus=True) == "flash_attention_2"
    assert usable_attention(settings(1).model, llama(), gpus=False) == "auto"
    assert usable_attention(settings(1).model, llama(), gpus=True) == VARLEN
    assert usable_attention(settings(1).model, family("gemma2").config, gpus=True) == "eager"
    single = settings(2, "model.dtype=float32").model
    assert usable_attention(single, llama(), shared=True, gpus=False) == VARLEN
    with refused("sequence-parallel"):
        usable_attention(single, llama(), shared=True, gpus=True)
    with refused("sequence-parallel"):
        check_plan(settings(2, f"model.architecture={GEMMA2}"), 8, gpus=True)


def test_the_plan_divides_activations_by_the_ranks_of_a_row() -> None:
    sizes = footprint.Sizes(7 * 10**9, 7 * 10**9, 65 * 10**8, 32, 4096, 11008, 4096, True, 32000, 291)
    alone = footprint.Setup(ranks=8, stage=3, micro=1, block=65536)
    shared = dataclasses.replace(alone, sequence=8)
    memory = [footprint.memory(sizes, setup) for setup in (alone, shared)]
    assert memory[1].activations == pytest.approx(memory[0].activations / 8)
    assert memory[1].optimizer == memory[0].optimizer
    assert footprint.exchanged_bytes(sizes, alone) == 0
    # queries, keys, values and results in bfloat16, of which each rank has an eighth
    assert footprint.exchanged_bytes(sizes, shared) == 65536 / 8 * 4 * 4096 * 2 * 7 / 8
    gpu = next(iter(ACCELERATORS.values()))
    seconds = [footprint.step_time(sizes, setup, gpu) for setup in (alone, shared)]
    assert seconds[1].communication > seconds[0].communication
