"""Measure a rank's memory on rows of 32k tokens: python -m tests.helpers.long_row_worker FILE N KEY=VALUE...

N ranks share a row. Rank 0 writes the bytes in use between two steps and at the peak of a step, the planned
bytes, and the loss per token.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import sys
import warnings
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from emo.common.causal_lm import IGNORE
from emo.pipeline.batches.config import solve_batch
from emo.pipeline.batches.loader import make_micro_batch
from emo.pipeline.config import load_config
from emo.pipeline.control.world import end_world
from emo.pipeline.engine.activations import offload_checkpoints, tile_mlps
from emo.pipeline.engine.ds_config import deepspeed_config
from emo.pipeline.engine.engine import Engine
from emo.pipeline.engine.sequence import share_rows
from emo.pipeline.engine.start import start_world
from emo.pipeline.loss import fuse_model, get_objective
from emo.pipeline.loss.fused import CHUNK_MB_CPU
from emo.pipeline.loss.models.varlen import VARLEN
from emo.pipeline.planning import footprint
from emo.pipeline.planning.setup import setup_of, sizes_of
from tests.conftest import REPO
from tests.helpers.accelerator import Trace

BLOCK, DOCUMENT, VOCAB, BUCKET = 32768, 2048, 512, 1 << 16
SHAPE = {"hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 4, "num_attention_heads": 4}


def measure_memory(n: int, overrides: list[str]) -> dict[str, float]:
    world = start_world()._replace(sequence=n)
    if n > 1:
        share_rows(world)
    settings = [f"data.sequence_len={BLOCK}", "objective.name=mle", f"deepspeed={REPO}/ds_configs/zero2.json"]
    settings += ["train.global_batch_size=1", f"train.sequence_parallel={n}", "train.micro_batch_size=1"]
    settings += [f"model.attn_implementation={VARLEN}", *overrides]
    config = load_config(REPO / "launch/recipes/paper/llama-7b-wikitext103.yaml", settings)
    batch, objective = solve_batch(1, 1, world.ranks, n), get_objective("mle")
    ds_config = deepspeed_config(config, batch)
    ds_config["zero_optimization"] |= {"reduce_bucket_size": BUCKET, "allgather_bucket_size": BUCKET}
    ids = np.random.default_rng(0).integers(0, VOCAB, (1, BLOCK))
    positions = np.arange(BLOCK)[None] % DOCUMENT
    labels = np.where(np.roll(positions, -1) > 0, np.roll(ids, -1), IGNORE)
    valid = int((labels != IGNORE).sum())
    gc.collect()
    gc.freeze()
    with Trace(device="cpu") as trace:
        shape = LlamaConfig(**SHAPE, vocab_size=VOCAB, max_position_embeddings=BLOCK, use_cache=False)
        torch.manual_seed(0)
        model = LlamaForCausalLM(shape).bfloat16().train()
        model.set_attn_implementation(VARLEN)
        sizes = sizes_of(model, shape)
        fuse_model(model, objective)
        model.packing = "positions"
        if config.model.tiled_mlp:
            tile_mlps(model, shape.hidden_size)
        if config.model.activation_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            offload_checkpoints(model)
        engine = Engine(model, ds_config, world)
        rows = {"input_ids": ids, "labels": labels, "position_ids": positions}
        micro = make_micro_batch(rows, world.part, n)
        for _ in range(2):  # the first step creates the optimizer's state
            trace.peak = between = trace.held
            totals = engine.train_step([micro], valid, 1e-4, seed=0, stop=False)
    setup = setup_of(config, batch, ds_config, objective, DOCUMENT / 2)
    planned = footprint.memory(sizes, dataclasses.replace(setup, chunk_mb=CHUNK_MB_CPU[2], cost=False))
    loss = totals.loss / valid
    return {"between": between, "peak": trace.peak, "planned": planned.total, "loss": loss}


def main(file: Path, n: int, overrides: list[str]) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    results = measure_memory(n, overrides)
    if torch.distributed.get_rank() == 0:
        file.write_text(json.dumps(results), encoding="utf-8")
    torch.distributed.barrier()
    end_world()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
