"""Train a rank on shared rows: python -m tests.helpers.sequence_worker FILE BLOCK STEPS CASE...

Rank 0 writes the loss of every step by case. A case is FAMILY/OBJECTIVE/STAGE/N, such as llama/emo/3/2.
`train_plain` is the reference. It runs a plain optimizer on complete rows in one process. By default, its
attention is SDPA with a mask. The ranks compute attention within each document.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

from emo.common.causal_lm import IGNORE
from emo.common.errors import UserError
from emo.pipeline.batches.config import solve_batch
from emo.pipeline.batches.loader import make_micro_batch, rank_rows
from emo.pipeline.batches.shared_rows import check_shared_rows
from emo.pipeline.control.world import World, end_world
from emo.pipeline.engine.activations import tile_mlps
from emo.pipeline.engine.ds_config import deepspeed_config
from emo.pipeline.engine.engine import Engine
from emo.pipeline.engine.sequence import SequenceAttention, share_rows
from emo.pipeline.engine.start import start_world
from emo.pipeline.loss import CostEmbedding, Objective, fuse_model, get_objective, weighted_sum
from emo.pipeline.loss.models.frozen import FrozenCausalLM, LiveTeacher
from emo.pipeline.loss.models.varlen import VARLEN
from tests.helpers.families import VOCAB, family
from tests.helpers.sharded_worker import ADAM, load_recipe
from tests.helpers.sharded_worker import Case as Recipe

ROWS = 4
SHAPE = {"num_attention_heads": 4, "head_dim": 8}
# Key heads are repeated if there are more ranks than heads. Qwen3 tiles its MLPs if rows are shared.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": SHAPE | {"num_key_value_heads": 2},
    "qwen3": SHAPE | {"num_key_value_heads": 4},
    "gemma3_text": SHAPE | {"num_key_value_heads": 1, "sliding_window": 5},
}


class Case(NamedTuple):
    """A model, its objective and its distribution over ranks."""

    family: str
    objective: str
    stage: int = 1
    sequence: int = 1

    @classmethod
    def parse(cls, text: str) -> Case:
        name, objective, stage, sequence = text.split("/")
        return cls(name, objective, int(stage), int(sequence))

    def __str__(self) -> str:
        return "/".join(map(str, self))


def read_rows(step: int, block: int) -> dict[str, np.ndarray]:
    """Return rows [ROWS, block] of documents of many lengths. Most labels of the last row are ignored."""
    rng = np.random.default_rng(step)
    ids = rng.integers(0, VOCAB, (ROWS, block))
    positions = np.empty_like(ids)
    labels = np.full_like(ids, IGNORE)
    for row in range(ROWS):
        drawn = rng.choice(np.arange(1, block), max(4, block // 128), replace=False)
        starts = np.append(0, np.sort(drawn))
        positions[row] = np.arange(block) - np.repeat(starts, np.diff(starts, append=block))
        labels[row, :-1] = np.where(positions[row, 1:] > 0, ids[row, 1:], IGNORE)
    labels[-1, block // 5 :] = IGNORE
    return {"input_ids": ids, "labels": labels, "position_ids": positions}


def find_objective(name: str) -> Objective:
    if name == "sum":
        return weighted_sum([(get_objective("mle"), 1.0), (get_objective("demd"), 0.5)])
    return get_objective("kl" if name == "teacher" else name)


def build_model(case: Case, block: int, attention: str) -> Any:
    changes = FAMILIES[case.family] | {"max_position_embeddings": block}
    model = family(case.family, attention, **changes).train()
    objective = find_objective(case.objective)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cost = CostEmbedding.from_weight(model.lm_head.weight) if objective.needs_cost else None
        fuse_model(model, objective, cost)
    if case.family == "qwen3" and case.sequence > 1:
        tile_mlps(model, max(7, block // 10))  # ZeRO-3 gathers the weights for each tile
    if case.objective == "teacher":
        teacher = family(case.family, model.config._attn_implementation, **changes).requires_grad_(False)
        teacher.lm_head.weight.mul_(-1)
        fuse_model(teacher, get_objective("mle"), forward=FrozenCausalLM)
        model.teacher = LiveTeacher(teacher)
    return model


def train_case(case: Case, world: World, block: int, steps: int) -> list[float]:
    """Return the loss per token of every step under DeepSpeed."""
    world = world._replace(sequence=case.sequence)
    if case.sequence > 1:
        share_rows(world)
    config = load_recipe(Recipe(ADAM, f"zero{case.stage}"))
    passes = 1 if case.objective == "mile" else ROWS  # mile normalises weights per pass
    batch = solve_batch(ROWS, ROWS // passes, world.ranks, case.sequence)
    engine = Engine(build_model(case, block, VARLEN), deepspeed_config(config, batch), world)
    if case.sequence > 1:
        check_shared_rows(engine, {name: array[:1] for name, array in read_rows(0, block).items()})
    losses = []
    for step in range(steps):
        rows = read_rows(step, block)
        local, _ = rank_rows(np.arange(ROWS), world.replica, world.replicas, batch.micro)
        micro = [
            make_micro_batch({name: array[part] for name, array in rows.items()}, world.part, world.sequence)
            for part in np.split(local, batch.accumulation)
        ]
        valid = int((rows["labels"] != IGNORE).sum())
        losses.append(engine.train_step(micro, valid, lr=1e-2, seed=0, stop=False).loss / valid)
    engine.ds.destroy()
    return losses


def check_wrong_attention(world: World, block: int) -> str:
    """Return the error code of the start-up check if ranks get each other's attention results."""
    case = Case("llama", "mle", sequence=world.ranks)

    def reverse(attention: SequenceAttention, context: Tensor) -> Tensor:
        return exchange(attention, context.flip(0))

    exchange = SequenceAttention._partition_global_sequence
    with mock.patch.object(SequenceAttention, "_partition_global_sequence", reverse):
        try:
            train_case(case, world, block, 0)
        except UserError as error:
            return error.code
    return ""


def train_plain(case: Case, block: int, steps: int, attention: str = "sdpa") -> list[float]:
    model = build_model(case._replace(sequence=1), block, attention)
    train = load_recipe(Recipe(ADAM, "zero1")).train
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": train.weight_decay},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups, lr=1e-2, betas=train.betas, eps=train.eps)
    losses = []
    for step in range(steps):
        adam.zero_grad()
        sums = model(**make_micro_batch(read_rows(step, block)))
        loss = sums.loss / sums.tokens
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, train.max_grad_norm)
        adam.step()
        losses.append(float(loss.detach()))
    return losses


def main(file: Path, block: int, steps: int, cases: list[str]) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    world = start_world()
    results: dict[str, Any] = {n: train_case(Case.parse(n), world, block, steps) for n in cases}
    if world.ranks > 1:
        results["wrong"] = check_wrong_attention(world, block)
    if world.is_main:
        file.write_text(json.dumps(results), encoding="utf-8")
    torch.distributed.barrier()
    end_world()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
