"""What a run will take, before a cluster is booked: batch equation, steps, and memory of the states."""

from __future__ import annotations

from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM

from data_prep.config import UserError
from data_prep.shards import TokenDataset
from pipeline.config import RunConfig, solve_batch, total_steps
from pipeline.engine import deepspeed_config, zero_stage
from pipeline.model import add_lora, attention, model_config
from pipeline.objectives import get_objective

GIB = 2**30


class States(NamedTuple):
    """Bytes of model states that one rank holds."""

    parameters: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        return sum(self)


def state_bytes(
    parameters: int, trainable: int, stage: int, ranks: int, bf16: bool, offload: bool = False
) -> States:
    """Model states per rank under ZeRO (Rajbhandari et al. 2020, section 3).

    Stage 1 divides the optimizer's states by the ranks, stage 2 the gradients too, stage 3 the parameters
    too. Gradients are accumulated in float32; the optimizer holds two float32 moments and, for bf16
    weights, a float32 copy.
    """
    share = [1 / ranks if stage >= s else 1.0 for s in (3, 2, 1)]
    width = 2 if bf16 else 4
    optimizer = trainable * (12 if bf16 else 8) * share[2]
    return States(parameters * width * share[0], trainable * 4 * share[1], 0.0 if offload else optimizer)


def count_parameters(config: RunConfig) -> tuple[int, int]:
    """All and trainable parameters of the model, built on the meta device."""
    hf_config = model_config(config.model, online=False)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf_config)
        if config.model.lora is not None:
            model = add_lora(model, config.model)
    parameters = list(model.parameters())
    return sum(p.numel() for p in parameters), sum(p.numel() for p in parameters if p.requires_grad)


def print_plan(config: RunConfig, ranks: int) -> None:
    """Resolve everything that can be resolved without training and print it.

    Raises UserError for whatever would stop the run at its start.
    """
    batch = solve_batch(config.train.batch, config.train.micro_batch, ranks)
    ds_config = deepspeed_config(config, batch)
    objective = get_objective(config.objective.name, **config.objective.params)
    total, trainable = count_parameters(config)
    stage = zero_stage(ds_config)
    offload = "offload_optimizer" in ds_config.get("zero_optimization", {})
    states = state_bytes(total, trainable, stage, ranks, config.model.dtype == "bfloat16", offload=offload)
    table = Table("what", "value", title=str(config.run_dir), show_header=False)
    table.add_row("model", config.model.path or f"new {(config.model.architecture or {})['model_type']}")
    table.add_row("parameters", f"{total:,} ({trainable:,} trainable), {config.model.dtype}")
    table.add_row("attention", attention(config.model.attn_implementation))
    table.add_row("objective", f"{objective.name} {config.objective.params or ''}".strip())
    table.add_row("batch", str(batch))
    table.add_row("tokens per step", f"at most {batch.batch * config.data.block:,}")
    table.add_row("steps", _steps(config))
    table.add_row("ZeRO", f"stage {stage}" + (", optimizer in host memory" if offload else ""))
    table.add_row(
        "states per rank",
        f"{states.total / GIB:.2f} GiB = parameters {states.parameters / GIB:.2f} + gradients "
        f"{states.gradients / GIB:.2f} + optimizer {states.optimizer / GIB:.2f}",
    )
    Console().print(table)


def _steps(config: RunConfig) -> str:
    if config.train.steps is not None:
        return f"{config.train.steps:,}"
    try:
        data = TokenDataset(config.data.dir / "train")
    except UserError:
        return f"{config.train.epochs} epochs; their steps are known once the data are prepared"
    return f"{total_steps(config.train, len(data)):,} ({len(data):,} rows, {config.train.epochs} epochs)"
