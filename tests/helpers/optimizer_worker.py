"""One rank of the optimizers' parity test: a tiny LLaMA in the engine under every ZeRO stage.

Run by two processes, and imported for the plain optimizers on one that they are compared with.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn

from emo.pipeline.config import Batch, RunConfig, load_config, lr_at
from emo.pipeline.engine import Engine, start_world, to_universal
from emo.pipeline.loss import fuse_model, get_objective
from emo.pipeline.planning.ds_file import deepspeed_config
from emo.pipeline.ranks import World, end_world, on_main
from tests.conftest import REPO
from tests.helpers.families import tiny_llama

VOCAB, BLOCK, ROWS, STEPS = 96, 16, 8, 4
ADAM = ["train.learning_rate=1e-2", "train.eps=1e-3"]  # a tiny eps would amplify rounding
MUON = [*ADAM, "train.optimizer=muon", "train.muon_lr=0.03", "train.max_grad_norm=0"]
CASES = {
    **{f"adamw-{stage}": [*ADAM, f"deepspeed=ds_configs/zero{stage}.json"] for stage in (1, 2, 3)},
    "adamw-offload": [*ADAM, "deepspeed=ds_configs/zero3_offload.json"],
    **{f"muon-{stage}": [*MUON, f"deepspeed=ds_configs/zero{stage}.json"] for stage in (1, 2, 3)},
    "muon-2-bf16": [*MUON, "deepspeed=ds_configs/zero2.json", "model.dtype=bfloat16"],
    "adamw-hpz": [*ADAM, "deepspeed=HPZ"],  # last: its groups of ranks stay for the life of the process
}
RESUMED = ("adamw-3", "adamw-offload", "muon-1", "muon-2-bf16", "muon-3")


def recipe(overrides: list[str]) -> RunConfig:
    given = ["train.num_train_epochs=null", f"train.max_steps={STEPS}", f"train.global_batch_size={ROWS}"]
    given += ["train.lr_scheduler_type=linear", "train.warmup_ratio=0", "train.weight_decay=0.1"]
    recipe = REPO / "launch/recipes/llama-7b-wikitext103.yaml"
    return load_config(recipe, [*given, "model.dtype=float32", *overrides])


def build() -> nn.Module:
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "initializer_range": 0.2}
    model = tiny_llama(VOCAB, **shape)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fuse_model(model, get_objective("mle"))
    return model.train()


def batch(step: int) -> dict[str, Tensor]:
    """The global batch [ROWS, BLOCK] of a step; rows differ in how many tokens they supervise."""
    ids = torch.randint(VOCAB, (ROWS, BLOCK), generator=torch.Generator().manual_seed(100 + step))
    labels = ids.clone()
    for row in range(ROWS):
        labels[row, :row] = -100
    return {"input_ids": ids, "labels": labels}


def start(config: RunConfig, world: World, universal: bool = False) -> Engine:
    """The engine of a recipe, each rank taking its rows in two micro-batches."""
    ds_config = deepspeed_config(config, Batch(ROWS, ROWS // world.ranks // 2, 2, world.ranks))
    model = build()
    if config.model.dtype == "bfloat16":
        model.bfloat16()
    return Engine(model, ds_config | {"checkpoint": {"load_universal": universal}}, world)


def train(engine: Engine, config: RunConfig, steps: range) -> Tensor:
    rank, share, losses = engine.world.rank, ROWS // engine.world.ranks, []
    for step in steps:
        whole = batch(step)
        mine = {name: tensor[rank * share :][:share] for name, tensor in whole.items()}
        micro = [{name: tensor[i : i + share // 2] for name, tensor in mine.items()} for i in (0, share // 2)]
        valid = int((whole["labels"] != -100).sum())
        sums = engine.train_step(micro, valid, lr_at(config.train, step, STEPS), seed=0, stop=False)
        losses.append(sums.loss / valid)
    return torch.tensor(losses)


def trained(config: RunConfig, world: World, saved: Path | None) -> dict[str, Any]:
    """Losses and final weights under DeepSpeed; also losses of runs that resume from `saved`, half way."""
    engine = start(config, world)
    first = train(engine, config, range(STEPS // 2))
    if saved is not None:
        engine.snapshot(saved)
        engine.files.write()
    results = {"losses": torch.cat((first, train(engine, config, range(STEPS // 2, STEPS))))}
    results["groups"] = engine.groups
    for name, parameter in engine.model.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=None):
            results[name] = parameter.detach().float().clone()
    engine.ds.destroy()
    if saved is not None:
        results["resumed"] = resumed(config, world, saved)
    if saved is not None and saved.name == "adamw-3":
        copy = saved.with_name("converted")
        on_main(world, lambda: to_universal(saved / "state", copy / "state"))
        results["converted"] = resumed(config, world, copy, universal=True)
    return results


def resumed(config: RunConfig, world: World, saved: Path, universal: bool = False) -> Tensor:
    engine = start(config, world, universal)
    engine.load(saved)
    losses = train(engine, config, range(STEPS // 2, STEPS))
    engine.ds.destroy()
    return losses


def plain(config: RunConfig) -> dict[str, Any]:
    """The truth: one process, whole batches, Muon as its author wrote it and PyTorch's AdamW.

    https://kellerjordan.github.io/posts/muon
    """
    model, train = build(), config.train
    named = dict(model.named_parameters())
    tables = ("embed_tokens.weight", "lm_head.weight")
    matrices = [name for name, p in named.items() if p.dim() == 2 and not name.endswith(tables)]
    body = {name: torch.zeros_like(named[name]) for name in matrices if train.optimizer == "muon"}
    rest = [p for name, p in named.items() if name not in body]
    groups = [
        {"params": [p for p in rest if p.dim() > 1], "weight_decay": train.weight_decay},
        {"params": [p for p in rest if p.dim() == 1], "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups, betas=train.betas, eps=train.eps)
    losses = []
    for step in range(STEPS):
        lr = lr_at(train, step, STEPS)
        model.zero_grad()
        sums = model(**batch(step))
        loss = sums.loss / sums.tokens
        loss.backward()
        if train.max_grad_norm:
            nn.utils.clip_grad_norm_(model.parameters(), train.max_grad_norm)
        for group in adam.param_groups:
            group["lr"] = lr
        adam.step()
        with torch.no_grad():
            for name, momentum in body.items():
                weight, gradient = named[name], named[name].grad
                momentum.lerp_(gradient, 1 - 0.95)
                update = orthogonal(gradient.lerp(momentum, 0.95))
                rate = lr * train.muon_lr / train.learning_rate
                weight.mul_(1 - rate * train.weight_decay)
                weight.add_(update, alpha=-rate * max(1.0, weight.shape[0] / weight.shape[1]) ** 0.5)
        losses.append(loss.detach())
    state = {name: p.detach().clone() for name, p in named.items()}
    return {"losses": torch.stack(losses), **state}


def orthogonal(matrix: Tensor) -> Tensor:
    """Five Newton-Schulz steps towards the orthogonal factor of `matrix`."""
    x = matrix / (matrix.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x


def main() -> None:
    torch.set_num_threads(1)
    world = start_world()
    directory = Path(sys.argv[1])
    hpz = json.loads((REPO / "ds_configs/zero3_hpz.json").read_text())
    hpz["zero_optimization"] |= {"zero_hpz_partition_size": 2, "stage3_param_persistence_threshold": 0}
    (directory / f"hpz-{world.rank}.json").write_text(json.dumps(hpz))
    results = {}
    for name, overrides in CASES.items():
        given = [o.replace("HPZ", f"{directory}/hpz-{world.rank}.json") for o in overrides]
        results[name] = trained(recipe(given), world, directory / name if name in RESUMED else None)
    if world.is_main:
        torch.save(results, directory / "results.pt")
    dist.barrier()
    end_world()


if __name__ == "__main__":
    main()
