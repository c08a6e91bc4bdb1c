"""What a run will take, before a cluster is booked: batch, steps, memory, and on given GPUs the time.

`print_plan` resolves everything that can be resolved without training. Given GPUs it adds, from `footprint`,
memory by part, the largest micro-batch that fits, step time, hours, and what to change if it does not fit.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import PretrainedConfig

from emo.common.errors import UserError
from emo.common.text import counted
from emo.data_prep.config import DataConfig
from emo.pipeline.config import Batch, RunConfig
from emo.pipeline.export import unwrap
from emo.pipeline.loss.objectives import Objective
from emo.pipeline.model import model_config
from emo.pipeline.order import REPEATED, BatchOrder, MixedOrder
from emo.pipeline.planning import footprint
from emo.pipeline.planning.checks import Ready, check, meta_model
from emo.pipeline.planning.ds_file import zero_stage
from emo.pipeline.planning.footprint import ACCELERATORS, GIB, Accelerator, Setup, Sizes
from emo.pipeline.planning.host import on_gpu

log = logging.getLogger(__name__)

FEW = 10  # steps; a run of fewer has hardly warmed up
TINY = 0.1 * GIB  # less is shown in MiB
MIB = 2**20
BYTES_PER_TOKEN = 4.0  # of English text in a vocabulary of 32,000 to 50,000
PER_MILLIONS = 100  # tokens that hours are given for where the data's size is not known
PACKED = 3.0  # bytes of text per byte of a compressed file
# Keys of configurations: experts, those that a token is routed to, and the width of the feed-forward part.
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts", "num_routed_experts")
CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts")
INNER = ("intermediate_size", "ffn_dim", "n_inner")
TRUST = (
    f"states are known, other memory is within {footprint.MEMORY_ERROR:.0%} of measured runs, time "
    f"within {footprint.TIME_ERROR:.0%} of published runs (FSDP) that it was not fitted to; what the "
    "host takes is an estimate"
)


class Cluster(NamedTuple):
    """So many GPUs of one kind."""

    gpus: int
    kind: str
    network_gb: float = 200.0  # GB/s that a node reaches others with

    @property
    def gpu(self) -> Accelerator:
        return ACCELERATORS[self.kind]

    @property
    def room(self) -> float:
        """Return bytes of each GPU that a run can use."""
        return self.gpu.memory_gib * GIB * footprint.USABLE


def parse_cluster(text: str, network_gbit: float = 1600.0) -> Cluster:
    """Return `8xA100-80G` as a Cluster. Raises UserError, naming the known kinds."""
    count, _, kind = text.partition("x")
    kinds = {name.upper(): name for name in ACCELERATORS}
    if not count.isdigit() or int(count) < 1 or kind.upper() not in kinds:
        raise UserError(
            f"--gpus {text}: give NUMBERxKIND, for example 8xA100-80G; kinds: {', '.join(ACCELERATORS)}"
        )
    return Cluster(int(count), kinds[kind.upper()], network_gbit / 8)


def model_sizes(config: RunConfig) -> Sizes:
    """Return the model in numbers, from the meta device; without network those of `model.architecture`."""
    hf_config = model_config(config.model, online=False)
    return sizes_of(meta_model(config, hf_config), hf_config)


def sizes_of(model: nn.Module, hf_config: PretrainedConfig) -> Sizes:
    """Return a model in numbers."""
    base, parameters = unwrap(model), list(model.parameters())
    head: Any = base.get_output_embeddings()
    embedding: Any = base.get_input_embeddings()
    outside = {id(weight): weight.numel() for weight in (head.weight, embedding.weight)}
    total = sum(p.numel() for p in parameters)
    text: Any = hf_config.get_text_config()

    def first(names: tuple[str, ...]) -> Any:
        return next((value for name in names if (value := getattr(text, name, None))), None)

    experts, chosen = first(EXPERTS), first(CHOSEN)
    idle = expert_width = 0
    if isinstance(experts, int) and chosen:
        # Shared experts, which every token passes through, are called otherwise than `experts` everywhere.
        routed = sum(
            parameter.numel()
            for name, parameter in model.named_parameters()
            if "experts" in name.split(".") or (parameter.dim() == 3 and parameter.shape[0] == experts)
        )
        most = max(chosen) if isinstance(chosen, list) else chosen  # a list is by layer
        active = routed * min(most, experts) // experts
        idle, expert_width = routed - active, active // (3 * text.hidden_size * text.num_hidden_layers)
    heads = getattr(text, "num_attention_heads", 1)  # a model without attention: Mamba
    key_values = getattr(text, "num_key_value_heads", None) or heads
    per_head = getattr(text, "head_dim", None) or text.hidden_size // heads
    return Sizes(
        parameters=total,
        trainable=sum(p.numel() for p in parameters if p.requires_grad),
        body=total - sum(outside.values()),
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        inner=max(expert_width, int(first(INNER) or 4 * text.hidden_size)),
        key_values=key_values * per_head,
        gated=hasattr(text, "intermediate_size"),
        vocabulary=text.vocab_size,
        tensors=len(parameters),
        idle=idle,
    )


def setup_of(config: RunConfig, batch: Batch, ds_config: dict[str, Any], objective: Objective) -> Setup:
    """Return how the recipe trains, for the footprint."""
    zero = ds_config.get("zero_optimization", {})
    half = config.model.dtype == "bfloat16"
    reduced = ds_config.get("communication_data_type")
    # With device none, which is also the default, a section does not offload.
    offloaded = [(zero.get(f"offload_{part}") or {}).get("device", "none") for part in ("optimizer", "param")]
    return Setup(
        ranks=batch.ranks,
        stage=zero_stage(ds_config),
        micro=batch.micro,
        block=config.data.sequence_len,
        accumulation=batch.accumulation,
        bf16=half,
        checkpointing=config.model.activation_checkpointing,
        offload_optimizer=offloaded[0] != "none",
        offload_parameters=offloaded[1] != "none",
        cost=objective.needs_cost,
        cache_mb=config.objective.cost_cache_mb,
        live=float(zero.get("stage3_max_live_parameters", 1e9)),
        bucket=float(zero.get("reduce_bucket_size", 5e8)),
        compiled=config.model.compile,
        # On GPUs `auto` takes an attention that knows packed rows; those compute in half precision only.
        masked=not half or config.model.attn_implementation in ("sdpa", "eager"),
        hpz=int(zero.get("zero_hpz_partition_size", 1)),
        reduced={None: 2 if half else 4, "fp32": 4}.get(reduced, 2),
        all_reduced=zero.get("use_multi_rank_bucket_allreduce", True) or not zero.get("reduce_scatter", True),
    )


def print_plan(config: RunConfig, ranks: int, cluster: Cluster | None = None) -> bool:
    """Resolve everything that can be resolved without training and print it; return whether it fits.

    Raises UserError for whatever would stop the run at its start.
    """
    ready = check(config, ranks, local=False)
    batch, objective = ready.batch, ready.objective
    sizes = sizes_of(ready.model, ready.hf_config)
    setup = setup_of(config, batch, ready.ds_config, objective)
    table = Table("what", "value", title=str(config.output_dir), show_header=False)
    table.add_row("model", config.model.path or f"new {(config.model.architecture or {})['model_type']}")
    active = f", {sizes.parameters - sizes.idle:,} active for a token" if sizes.idle else ""
    counts = f"{sizes.parameters:,} ({sizes.trainable:,} trainable{active})"
    table.add_row("parameters", f"{counts}, {config.model.dtype}")
    table.add_row("attention", ready.attention)
    table.add_row("objective", f"{config.objective.label} {config.objective.params or ''}".strip())
    table.add_row("batch", str(batch))
    table.add_row("tokens per step", f"at most {batch.batch * config.data.sequence_len:,}")
    length = run_length(config, ready)
    table.add_row("steps", length.text)
    for name, text in domain_rows(config, ready):
        table.add_row(name, text)
    offloads = {"optimizer": setup.offload_optimizer, "weights": setup.offload_parameters}
    names = [name for name, offloaded in offloads.items() if offloaded]
    note = f", {' and '.join(names)} in host memory" if names else ""
    table.add_row("ZeRO", f"stage {setup.stage}{note}")
    memory = footprint.memory(sizes, setup)
    states = {"weights": memory.parameters, "gradients": memory.gradients, "optimizer": memory.optimizer}
    table.add_row("states per rank", memory_line(states, 2))
    fits = True
    if cluster is not None:
        fits = _add_cluster(table, length, sizes, setup, cluster)
    Console().print(table)
    for warning in remarks(config, ready, on_cpu=cluster is None and not on_gpu()):
        log.warning(warning)
    return fits


def domain_rows(config: RunConfig, ready: Ready) -> list[tuple[str, str]]:
    """Return each domain's part of the run as table rows; none where there is one domain and no mixture."""

    def passes(epochs: float) -> str:
        return counted(float(f"{epochs:.2g}"), "epoch")

    mixture, data, order = config.train.mixture, ready.data, ready.order
    if mixture is None and (data is None or len(data.domains) < 2):
        return []
    if data is None or ready.steps is None or order is None:
        assert mixture is not None
        return [("mixture", mixture.label)]
    if isinstance(order, BatchOrder):
        epochs = ready.steps * ready.batch.batch / len(data)
        whole = data.manifest.valid_tokens
        counts = {f"domain {domain.name}": domain.valid_tokens for domain in data.manifest.domains}
        return [
            (name, f"{n / whole:.1%} of tokens; {n * epochs:,.0f} tokens, {passes(epochs)}")
            for name, n in counts.items()
        ]
    assert mixture is not None
    rows = [("mixture", mixture.label)]
    for portion in order.portions(ready.steps):
        first, last = (f"{share:.1%}" for share in portion.shares)
        share = first if first == last else f"{first} to {last}"
        often = f", more than {REPEATED}" if portion.epochs > REPEATED else ""
        text = f"{share} of {mixture.by}; {portion.tokens:,.0f} tokens, {passes(portion.epochs)}{often}"
        rows.append((f"domain {portion.name}", text))
    return rows


def remarks(config: RunConfig, ready: Ready, on_cpu: bool) -> list[str]:
    """Return warnings on a run that can be trained, and perhaps not as its user thinks."""
    train, data, steps = config.train, ready.data, ready.steps
    portions = ready.order.portions(steps) if isinstance(ready.order, MixedOrder) and steps else []
    warnings = [
        f"domain {portion.name} is gone through {portion.epochs:.3g} times; after {REPEATED} epochs the "
        "same text teaches less than new text: lower its share, or set train.mixture.max_epochs"
        for portion in portions
        if portion.epochs > REPEATED
    ]
    if on_cpu and config.model.dtype == "bfloat16":
        warnings.append(
            "bfloat16 on a CPU is several times slower than float32: set model.dtype=float32 in a new "
            "output_dir"
        )
    if train.num_train_epochs is not None and data is not None and steps is not None and steps < FEW:
        warnings.append(
            f"only {counted(steps, 'step')}: {counted(train.num_train_epochs, 'epoch')} of "
            f"{counted(len(data), 'packed row')} of {config.data.sequence_len:,} tokens each, "
            f"{counted(train.global_batch_size, 'row')} per step; a smaller train.global_batch_size or "
            f"more train.num_train_epochs gives more"
        )
    return warnings


class Length(NamedTuple):
    """The number of steps of a run, and the words for it."""

    steps: int | None
    estimated: bool
    text: str


def run_length(config: RunConfig, ready: Ready) -> Length:
    """Return the steps as configured, as in the prepared data, or estimated from the sizes of the sources."""
    if config.train.max_steps is not None:
        return Length(config.train.max_steps, False, f"{config.train.max_steps:,}")
    epochs = config.train.num_train_epochs or 0
    passes = counted(epochs, "epoch")
    if ready.data is not None and ready.steps is not None:
        rows = len(ready.data)
        return Length(ready.steps, False, f"{ready.steps:,} ({counted(rows, 'row')}, {passes})")
    guess = estimated_rows(config.data)
    if guess is None:
        return Length(None, False, f"{passes}; their steps are known once the data are prepared")
    steps = max(1, int(epochs * guess / config.train.global_batch_size))
    reason = f"estimated: the sources' sizes suggest {counted(guess, 'row')}, {passes}"
    return Length(steps, True, f"about {steps:,} ({reason})")


def estimated_rows(data: DataConfig) -> int | None:
    """Return the rows that the sources will probably give, by size; None where a size is not known here."""
    if data.limit_rows is not None or any(source.limit is not None for source in data.sources):
        return None
    tokens = 0.0
    for source in data.sources:
        pattern = data.root / (source.files or "")  # which may be absolute
        paths = (
            list(Path(pattern.anchor).glob(str(pattern.relative_to(pattern.anchor)))) if source.files else []
        )
        if not paths:
            return None
        for path in paths:
            packed = PACKED if path.suffix in (".gz", ".zst") else 1.0
            tokens += path.stat().st_size * packed / BYTES_PER_TOKEN * source.weight
    if data.limit_tokens is not None:
        tokens = min(tokens, data.limit_tokens)
    return max(1, int(tokens * (1 - data.validation_fraction) / data.sequence_len))


def sum_line(parts: dict[str, float], digits: int, unit: str) -> str:
    """Return a line such as `6.0 GiB = weights 2.5 + optimizer 3.5` that adds up digit by digit.

    Every part is rounded down, and the largest remainders are rounded up until the parts are the total.
    """
    scale = 10**digits
    total = round(sum(parts.values()) * scale)
    whole = {name: math.floor(value * scale) for name, value in parts.items()}
    by_remainder = sorted(parts, key=lambda name: whole[name] - parts[name] * scale)
    for name in by_remainder[: total - sum(whole.values())]:
        whole[name] += 1
    terms = [f"{name} {value / scale:.{digits}f}" for name, value in whole.items() if value]
    return f"{total / scale:.{digits}f} {unit}" + (f" = {' + '.join(terms)}" if terms else "")


def memory_line(parts: dict[str, float], digits: int) -> str:
    """Return bytes by part as a sum in GiB; in MiB where all of it is less than a tenth of one."""
    if sum(parts.values()) < TINY:
        return sum_line({name: value / MIB for name, value in parts.items()}, 1, "MiB")
    return sum_line({name: value / GIB for name, value in parts.items()}, digits, "GiB")


def _add_cluster(table: Table, length: Length, sizes: Sizes, setup: Setup, cluster: Cluster) -> bool:
    """Add rows on memory and time on these GPUs; return whether the run fits, if only just."""
    gpu, room, memory = cluster.gpu, cluster.room, footprint.memory(sizes, setup)
    table.add_section()
    table.add_row("on", f"{cluster.gpus} x {cluster.kind}, {room / GIB:.1f} GiB of each usable")
    table.add_row("memory per GPU", memory_line(memory.peak, 1))
    table.add_row("fits", fit(sizes, setup, room, cluster))
    time = footprint.step_time(sizes, setup, gpu, cluster.network_gb)
    tokens = setup.tokens * setup.accumulation * setup.ranks / time.total
    table.add_row("step", sum_line(time._asdict(), 2, "s"))
    utilised = footprint.utilisation(sizes, setup, time.total, gpu)
    table.add_row("speed", f"{tokens:,.0f} tokens/s, {tokens / setup.ranks:,.0f} per GPU, MFU {utilised:.0%}")
    if length.steps is None:
        hours = PER_MILLIONS * 1e6 / tokens / 3600 * cluster.gpus
        table.add_row("run", f"{hours:,.1f} GPU-hours per {PER_MILLIONS} million tokens, without saving")
    else:
        hours = length.steps * time.total / 3600
        about = "about " if length.estimated else ""
        note = "; the number of steps is an estimate" if length.estimated else ""
        gpu_hours = f"{hours * cluster.gpus:,.1f} GPU-hours, without saving{note}"
        table.add_row("run", f"{about}{hours:,.1f} hours, {gpu_hours}")
    table.add_row("trust", TRUST)
    return memory.total <= room


def fit(sizes: Sizes, setup: Setup, room: float, cluster: Cluster) -> str:
    """Return in words whether the run fits; `yes` only if it also does when the estimate is too low."""
    memory = footprint.memory(sizes, setup)
    if memory.surely <= room:
        micro = largest_micro(sizes, setup, room, surely=True)
        return f"yes; largest train.micro_batch_size that surely fits: {micro}"
    if memory.total > room:
        return "NO; " + "; or ".join(remedies(sizes, setup, room, cluster))
    return (
        f"tight: {memory.total / GIB:.1f} of {room / GIB:.1f} GiB, and the estimate of all but states may be "
        f"{footprint.MEMORY_ERROR:.0%} too low; to be safe "
        + "; or ".join(remedies(sizes, setup, room, cluster, surely=True))
    )


def largest_micro(sizes: Sizes, setup: Setup, room: float, surely: bool = False) -> int:
    """Return the largest micro-batch that fits into `room` bytes and divides a rank's rows; or 0."""
    rows = setup.micro * setup.accumulation
    fitting = (m for m in range(rows, 0, -1) if rows % m == 0 and _fits(sizes, setup, room, surely, micro=m))
    return next(fitting, 0)


def _fits(sizes: Sizes, setup: Setup, room: float, surely: bool, **changes: Any) -> bool:
    memory = footprint.memory(sizes, dataclasses.replace(setup, **changes))
    return (memory.surely if surely else memory.total) <= room


def remedies(sizes: Sizes, setup: Setup, room: float, cluster: Cluster, surely: bool = False) -> list[str]:
    """Return single changes after which the run fits, cheapest first."""
    micro = largest_micro(sizes, setup, room, surely)
    candidates: dict[str, dict[str, Any]] = {
        f"set train.micro_batch_size={micro}": {"micro": micro or setup.micro},
        "set model.activation_checkpointing=true": {"checkpointing": True},
        "set deepspeed=ds_configs/zero3.json" + " model.compile=false" * setup.compiled: {"stage": 3},
    }
    changes = [text for text, change in candidates.items() if _fits(sizes, setup, room, surely, **change)]
    least = {"micro": 1, "checkpointing": True, "stage": 3}
    for text, change in (
        ("set all of train.micro_batch_size=1, activation_checkpointing=true and zero3.json", {}),
        (
            "set deepspeed=ds_configs/zero3_offload.json, train.micro_batch_size=1, checkpointing on",
            {"offload_optimizer": True},
        ),
    ):
        if not changes and _fits(sizes, setup, room, surely, **least, **change):
            changes.append(text)
    doubled = (cluster.gpus * 2**i for i in range(1, 8))
    enough = next((n for n in doubled if _fits(sizes, setup, room, surely, ranks=n)), None)
    changes += [f"take {enough} GPUs"] if enough else []
    return changes or ["no single change helps: take GPUs with more memory, or model.lora"]
