"""What a run will take, before a cluster is booked: batch, steps, memory, and on given GPUs the time.

`print_plan` resolves everything that can be resolved without training. Given GPUs it adds, from `footprint`,
memory by part, the largest micro-batch that fits, step time, hours, and what to change if it does not fit.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, PretrainedConfig

from common.errors import UserError
from data_prep.shards import is_prepared, open_prepared
from pipeline.config import Batch, RunConfig, solve_batch, total_steps
from pipeline.engine import deepspeed_config, zero_stage
from pipeline.loss.objectives import Objective, get_objective
from pipeline.model import add_lora, attention, model_config
from pipeline.planning import footprint
from pipeline.planning.footprint import ACCELERATORS, GIB, Accelerator, Setup, Sizes


class Cluster(NamedTuple):
    """So many GPUs of one kind."""

    gpus: int
    kind: str
    network_gb: float = 200.0  # GB/s that a node reaches others with

    @property
    def gpu(self) -> Accelerator:
        return ACCELERATORS[self.kind]


def parse_cluster(text: str, network_gbit: float = 1600.0) -> Cluster:
    """`8xA100-80G` as a Cluster. Raises UserError, naming the known kinds."""
    count, _, kind = text.partition("x")
    known = {name.upper(): name for name in ACCELERATORS}
    if not count.isdigit() or int(count) < 1 or kind.upper() not in known:
        raise UserError(
            f"--gpus {text}: give NUMBERxKIND, for example 8xA100-80G; kinds: {', '.join(ACCELERATORS)}"
        )
    return Cluster(int(count), known[kind.upper()], network_gbit / 8)


def model_sizes(config: RunConfig) -> Sizes:
    """The model in numbers, counted on the meta device."""
    hf_config = model_config(config.model, online=False)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf_config)
        head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
        if config.model.lora is not None:
            model = add_lora(model, config.model)
    parameters = list(model.parameters())
    outside = {id(head.weight): head.weight, id(embedding.weight): embedding.weight}
    total = sum(p.numel() for p in parameters)
    text: Any = hf_config.get_text_config()
    heads = text.num_attention_heads
    key_values = getattr(text, "num_key_value_heads", None) or heads
    per_head = getattr(text, "head_dim", None) or text.hidden_size // heads
    return Sizes(
        parameters=total,
        trainable=sum(p.numel() for p in parameters if p.requires_grad),
        body=total - sum(w.numel() for w in outside.values()),
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        inner=_inner(text),
        key_values=key_values * per_head,
        gated=hasattr(text, "intermediate_size"),
        vocabulary=text.vocab_size,
    )


def _inner(config: PretrainedConfig) -> int:
    for name in ("intermediate_size", "ffn_dim", "n_inner"):
        if getattr(config, name, None):
            return int(getattr(config, name))
    return 4 * config.hidden_size


def setup_of(config: RunConfig, batch: Batch, ds_config: dict[str, Any], objective: Objective) -> Setup:
    """How the recipe trains, for the footprint."""
    zero = ds_config.get("zero_optimization", {})
    return Setup(
        ranks=batch.ranks,
        stage=zero_stage(ds_config),
        micro=batch.micro,
        block=config.data.block,
        accumulation=batch.accumulation,
        bf16=config.model.dtype == "bfloat16",
        checkpointing=config.model.activation_checkpointing,
        offload_optimizer="offload_optimizer" in zero,
        offload_parameters="offload_param" in zero,
        cost=objective.needs_cost,
        cache_mb=config.objective.cost_cache_mb,
        live=float(zero.get("stage3_max_live_parameters", 1e9)),
        bucket=float(zero.get("reduce_bucket_size", 5e8)),
    )


def print_plan(config: RunConfig, ranks: int, cluster: Cluster | None = None) -> bool:
    """Resolve everything that can be resolved without training and print it; whether it fits.

    Raises UserError for whatever would stop the run at its start.
    """
    batch = solve_batch(config.train.batch, config.train.micro_batch, ranks)
    ds_config = deepspeed_config(config, batch)
    objective = get_objective(config.objective.name, **config.objective.params)
    sizes = model_sizes(config)
    setup = setup_of(config, batch, ds_config, objective)
    table = Table("what", "value", title=str(config.run_dir), show_header=False)
    table.add_row("model", config.model.path or f"new {(config.model.architecture or {})['model_type']}")
    table.add_row("parameters", f"{sizes.parameters:,} ({sizes.trainable:,} trainable), {config.model.dtype}")
    table.add_row("attention", attention(config.model.attn_implementation))
    table.add_row("objective", f"{objective.name} {config.objective.params or ''}".strip())
    table.add_row("batch", str(batch))
    table.add_row("tokens per step", f"at most {batch.batch * config.data.block:,}")
    table.add_row("steps", _steps(config))
    table.add_row("ZeRO", f"stage {setup.stage}" + _offloads(setup))
    found = footprint.memory(sizes, setup)
    table.add_row(
        "states per rank",
        f"{found.states / GIB:.2f} GiB = weights {found.parameters / GIB:.2f} + gradients "
        f"{found.gradients / GIB:.2f} + optimizer {found.optimizer / GIB:.2f}",
    )
    fits = True
    if cluster is not None:
        fits = _add_cluster(table, config, sizes, setup, cluster)
    Console().print(table)
    return fits


def _offloads(setup: Setup) -> str:
    parts = [("optimizer", setup.offload_optimizer), ("weights", setup.offload_parameters)]
    names = [name for name, yes in parts if yes]
    return f", {' and '.join(names)} in host memory" if names else ""


def _add_cluster(table: Table, config: RunConfig, sizes: Sizes, setup: Setup, cluster: Cluster) -> bool:
    """Rows on memory and time on given GPUs; whether the run fits."""
    gpu = cluster.gpu
    room = gpu.memory_gib * GIB * footprint.USABLE
    found = footprint.memory(sizes, setup)
    parts = [f"{name} {value / GIB:.1f}" for name, value in found._asdict().items() if value]
    table.add_section()
    table.add_row("on", f"{cluster.gpus} x {cluster.kind}, {room / GIB:.0f} GiB of each usable")
    table.add_row("memory per GPU", f"{found.total / GIB:.1f} GiB = {' + '.join(parts)}")
    largest = largest_micro(sizes, setup, room)
    fits = found.total <= room
    if fits:
        table.add_row("fits", f"yes; largest train.micro_batch that fits: {largest}")
    else:
        table.add_row("fits", "NO; " + "; or ".join(remedies(sizes, setup, room, cluster)))
    time = footprint.step_time(sizes, setup, gpu, cluster.network_gb)
    tokens = setup.tokens * setup.accumulation * setup.ranks / time.total
    table.add_row("step", f"{time.total:.2f} s = " + " + ".join(f"{n} {s:.2f}" for n, s in _shown(time)))
    utilised = footprint.utilisation(sizes, setup, time.total, gpu)
    table.add_row("speed", f"{tokens:,.0f} tokens/s, {tokens / setup.ranks:,.0f} per GPU, MFU {utilised:.0%}")
    steps = _step_count(config)
    if steps is not None:
        hours = steps * time.total / 3600
        table.add_row("run", f"{hours:.1f} hours, {hours * cluster.gpus:.1f} GPU-hours, without saving")
    table.add_row(
        "trust",
        f"memory within {footprint.MEMORY_ERROR:.0%}, time within {footprint.TIME_ERROR:.0%} of the runs "
        "that this was checked against",
    )
    return fits


def _shown(time: footprint.Time) -> list[tuple[str, float]]:
    return [(name, seconds) for name, seconds in time._asdict().items() if seconds >= 0.005]


def largest_micro(sizes: Sizes, setup: Setup, room: float) -> int:
    """The largest micro-batch whose memory fits into `room` bytes and that divides a rank's rows; or 0."""
    rows = setup.micro * setup.accumulation
    fitting = (m for m in range(rows, 0, -1) if rows % m == 0 and _fits(sizes, setup, room, micro=m))
    return next(fitting, 0)


def _fits(sizes: Sizes, setup: Setup, room: float, **changes: Any) -> bool:
    return footprint.memory(sizes, dataclasses.replace(setup, **changes)).total <= room


def remedies(sizes: Sizes, setup: Setup, room: float, cluster: Cluster) -> list[str]:
    """Single changes after which the run fits, cheapest first."""
    found = []
    if micro := largest_micro(sizes, setup, room):
        found.append(f"set train.micro_batch={micro}")
    if not setup.checkpointing and _fits(sizes, setup, room, checkpointing=True):
        found.append("set model.activation_checkpointing=true")
    if setup.stage < 3 and _fits(sizes, setup, room, stage=3):
        found.append("set deepspeed=ds_configs/zero3.json")
    least = dataclasses.replace(setup, micro=1, checkpointing=True, stage=3)
    if not found and _fits(sizes, least, room):
        found.append("set all of train.micro_batch=1, activation_checkpointing=true and zero3.json")
    if not found and _fits(sizes, least, room, offload_optimizer=True):
        found.append("set deepspeed=ds_configs/zero3_offload.json, train.micro_batch=1, checkpointing on")
    doubled = (cluster.gpus * 2**i for i in range(1, 8))
    enough = next((n for n in doubled if _fits(sizes, setup, room, ranks=n)), None)
    if enough:
        found.append(f"take {enough} GPUs")
    return found or ["no single change helps: take GPUs with more memory, or model.lora"]


def _step_count(config: RunConfig) -> int | None:
    """Steps of the run; None when they depend on data that are not prepared yet."""
    if config.train.steps is None and not is_prepared(config.data):
        return None
    return total_steps(config.train, _rows(config) if is_prepared(config.data) else 0)


def _rows(config: RunConfig) -> int:
    """Training rows. Raises UserError when the data are not those that the recipe describes."""
    return len(open_prepared(config.data)[0])


def _steps(config: RunConfig) -> str:
    count = _step_count(config)
    if count is None:
        return f"{config.train.epochs} epochs; their steps are known once the data are prepared"
    if config.train.steps is not None:
        return f"{count:,}"
    return f"{count:,} ({_rows(config):,} rows, {config.train.epochs} epochs)"
