"""Measure the memory of one of RANKS ranks under ZeRO: python -m tests.helpers.zero_worker FILE.json

The other ranks are simulated, and collectives send nothing. The accelerator is a CPU that reports streams, so
that DeepSpeed overlaps and buffers as on a GPU. Tensors are real, and their memory is counted.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import sys
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import set_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import LlamaConfig, LlamaForCausalLM

from emo.pipeline.batches.config import Batch
from emo.pipeline.config import load_config
from emo.pipeline.control.world import World
from emo.pipeline.engine.ds_config import deepspeed_config
from emo.pipeline.engine.engine import Engine
from emo.pipeline.loss import fuse_model, get_objective
from emo.pipeline.planning import footprint
from emo.pipeline.planning.setup import setup_of, sizes_of
from tests.conftest import REPO
from tests.helpers.accelerator import Trace

RANKS, PASSES, BLOCK, VOCAB, CHUNK_MB = 4, 2, 8, 256, 0.01
BUCKET = 128 * 344  # elements of the largest parameter. The model has 2.4 million
SMALL = ("reduce_bucket_size", "allgather_bucket_size", "stage3_prefetch_bucket_size")
SMALL += ("stage3_max_live_parameters", "stage3_max_reuse_distance")
CASES = [(1, "bfloat16"), (2, "bfloat16"), (3, "bfloat16"), (1, "float32")]
CASES += [(stage, "bfloat16 states") for stage in (1, 2, 3)]
SHAPE = {"hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 12, "num_attention_heads": 4}


def name(stage: int, dtype: str) -> str:
    return f"ZeRO-{stage}, {dtype}"


class Stream:
    """A stream or an event that does nothing."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


class Accelerator(CPU_Accelerator):
    """A CPU that reports the properties of a GPU."""

    Stream = Event = Stream  # type: ignore[assignment]

    def is_synchronized_device(self) -> bool:
        return False

    def use_host_timers(self) -> bool:
        return True

    def current_stream(self, device_index: Any = None) -> Stream:
        return Stream()

    default_stream = current_stream


def measure_memory(stage: int, dtype: str) -> dict[str, float]:
    """Return the measured bytes between two steps and at the peak of a step, and the planned bytes."""
    dtype, _, states = dtype.partition(" ")
    settings = [
        f"model.dtype={dtype}",
        f"train.state_dtype={dtype if states else 'float32'}",
        f"data.sequence_len={BLOCK}",
        "objective.name=mle",
    ]
    settings += [f"deepspeed={REPO}/ds_configs/zero{stage}.json", f"train.global_batch_size={RANKS * PASSES}"]
    config = load_config(REPO / "launch/recipes/paper/llama-7b-wikitext103.yaml", settings)
    batch, objective = Batch(RANKS * PASSES, 1, PASSES, RANKS), get_objective("mle")
    ds_config = deepspeed_config(config, batch)
    ds_config["optimizer"]["params"]["fused"] = True  # as on a GPU
    ds_config["zero_optimization"] |= {"overlap_comm": True, "stage3_param_persistence_threshold": 0}
    ds_config["zero_optimization"] |= dict.fromkeys(SMALL, BUCKET)
    gc.collect()
    gc.freeze()  # DeepSpeed collects garbage whenever it logs the memory in use
    with Trace(device="cpu") as trace:
        shape = LlamaConfig(**SHAPE, vocab_size=VOCAB, tie_word_embeddings=False)
        model = LlamaForCausalLM(shape).to(getattr(torch, dtype)).train()
        sizes = sizes_of(model, shape)
        fuse_model(model, objective)
        engine = Engine(model, ds_config, World(0, RANKS, torch.device("cpu")))
        ids = torch.arange(BLOCK)[None]
        micro_batches = [{"input_ids": ids, "labels": ids}] * PASSES
        for _ in range(2):  # the first step creates the optimizer's state
            trace.peak = between = trace.held
            engine.train_step(micro_batches, BLOCK * RANKS * PASSES, 1e-4, seed=0, stop=False)
    setup = setup_of(config, batch, ds_config, objective)
    setup = dataclasses.replace(setup, chunk_mb=CHUNK_MB, cost=False)  # without validation
    planned = footprint.memory(sizes, setup)
    return {"between": between, "peak": trace.peak, "planned": planned.total} | planned._asdict()


def main(path: Path) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    set_accelerator(Accelerator())
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    deepspeed.init_distributed(dist_backend="fake")
    with (
        mock.patch.object(Tensor, "record_stream", lambda tensor, stream: None),
        mock.patch("emo.pipeline.engine.engine.gather_objects", lambda value: [0]),  # the other ranks
    ):
        results = {name(*case): measure_memory(*case) for case in CASES}
    path.write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
