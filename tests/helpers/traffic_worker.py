"""One of two ranks: what DeepSpeed sends between ranks in a step, and the bytes of tensors that it holds.

python -m tests.helpers.traffic_worker OUT CASE [CASE ...]: OUT gets a line of JSON per case.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

from emo.pipeline.engine import start_world

WIDTH, LAYERS, PASSES = 512, 4, 2
PARAMETERS = WIDTH * WIDTH * LAYERS
# Name: DeepSpeed file of ds_configs/, dtype, what its section "zero_optimization" gets.
CASES: dict[str, tuple[str, torch.dtype, dict[str, Any]]] = {
    "zero1": ("zero1", torch.bfloat16, {}),
    "zero1-float32": ("zero1", torch.float32, {}),
    "zero2": ("zero2", torch.bfloat16, {}),
    "zero2-root": ("zero2", torch.bfloat16, {"use_multi_rank_bucket_allreduce": False}),
    "zero2-float32": ("zero2", torch.float32, {}),
}


def held() -> int:
    storages = {}
    for item in gc.get_objects():
        if isinstance(item, torch.Tensor) and not item.is_meta:
            storage = item.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


class Traffic:
    """Elements by collective, and the most bytes that were held while gradients were reduced."""

    def __init__(self) -> None:
        self.elements: dict[str, int] = {}
        self.peak = 0
        for name in ("all_reduce", "reduce", "reduce_scatter_tensor", "all_gather_into_tensor", "all_gather"):
            setattr(dist, name, self._counted(name, getattr(dist, name)))

    def _counted(self, name: str, collective: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            given = (*arguments, *options.values())
            largest = max((a.numel() for a in given if isinstance(a, torch.Tensor)), default=0)
            if largest > WIDTH:  # no norms
                self.elements[name] = self.elements.get(name, 0) + largest
                self.peak = max(self.peak, held())
            return collective(*arguments, **options)

        return call


def run(case: str, traffic: Traffic) -> dict[str, Any]:
    """Take a step of PASSES passes, after one that makes the optimizer's state."""
    file, dtype, changes = CASES[case]
    config = json.loads(Path(f"ds_configs/{file}.json").read_text(encoding="utf-8"))
    config["zero_optimization"] |= changes | {"reduce_bucket_size": WIDTH * WIDTH}
    config |= {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": PASSES}
    config |= {"bf16": {"enabled": dtype == torch.bfloat16}}
    before = held()
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    for _ in range(2):
        traffic.elements, traffic.peak = {}, 0
        for _ in range(PASSES):
            engine.backward(engine(torch.ones(1, WIDTH, dtype=dtype)).float().pow(2).sum())
            engine.step()
    return {"case": case, "elements": traffic.elements, "peak": traffic.peak - before}


if __name__ == "__main__":
    world = start_world()
    counting = Traffic()
    for name in sys.argv[2:]:
        counted = run(name, counting)
        gc.collect()
        if world.is_main:
            with Path(sys.argv[1]).open("a", encoding="utf-8") as out:
                out.write(json.dumps(counted) + "\n")
