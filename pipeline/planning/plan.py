"""`emo plan`: predict what a run needs on given GPUs, and search for the fastest settings that fit.

`print_plan` resolves a recipe without training. Given GPUs it predicts memory by part, the largest
micro-batch that fits, step time and hours, and suggests changes if the run does not fit. `print_best` finds
the fastest settings that do not change what is learned: ZeRO stage, checkpointing, compiling and the
micro-batch. Its results fit even if the memory prediction is too low by its known error.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.table import Table
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from emo.common.cli.progress import make_console
from emo.common.config.recipe import apply_override, dump_recipe, parse_section
from emo.common.errors import FailureError, UserError, one_line
from emo.common.io.files import part_file
from emo.common.provenance import shipped
from emo.common.text import counted
from emo.data_prep.shards.scores import top_dtype

from ..batches.config import Batch, solve_batch
from ..batches.order import REPEATED, MixedOrder, Portion
from ..config import RunConfig, load_config
from ..engine.activations import find_mlps
from ..engine.device.devices import on_gpu, usable_attention
from ..engine.device.hardware import GB, GIB, NODE, Cluster, accelerator, describe_time_source
from ..engine.ds_config import EIGHT_BIT, DsConfig, zero_stage
from ..engine.schedule import describe_schedule
from ..engine.sequence import check_sequence_parallel
from ..loss.cost import lacks_bfloat16
from ..loss.objectives import Objective
from ..model.build import model_config
from ..model.export import unwrap
from ..model.nf4 import linear_weights
from ..model.objective.config import BASE, ends
from ..model.teacher import KEY, check_teacher, teacher_config
from . import footprint
from .checks import PlannedRun, TrainingRun, check_plan, resolve_deepspeed
from .footprint import MOMENTS_8BIT, Memory, Setup, Sizes, Time

log = logging.getLogger(__name__)

PER_MILLIONS = 100  # the plan gives hours for so many million tokens if the size of the data is unknown
# Keys of Hugging Face configurations for the number of experts, experts per token and feed-forward width.
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts", "num_routed_experts")
CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts")
INNER = ("intermediate_size", "ffn_dim", "n_inner")
TRUST = (
    f"states are exact, other memory is within {footprint.MEMORY_ERROR:.0%} of measured runs, time is within "
    f"{footprint.TIME_ERROR:.0%} of published runs (FSDP, five of ZeRO-1) that it was not fitted to. Host "
    "time is an estimate."
)
FILES = ("zero1.json", "zero2.json", "zero3.json", "zero3_hpz.json", "zero3_offload.json")  # in ds_configs/
LOST_BELOW = 0.001  # learning rate, see docs/how-to/out-of-memory.md
TEACHER = ("teacher", "copied", "teacher_width", "averaged")  # fields of a setup
EQUAL_SPEED = 0.01  # settings whose speeds differ by less are ranked by memory


def sizes_of(model: nn.Module, hf_config: PretrainedConfig, linear_dtype: str | None = None) -> Sizes:
    """Return the sizes of a model. linear_dtype: the type of frozen linear layers (nf4), if it is another."""
    parameters = list(model.parameters())
    text = hf_config.get_text_config()
    base = unwrap(model)
    outside: list[Any] = [base.get_output_embeddings(), base.get_input_embeddings()]
    total = sum(p.numel() for p in parameters)
    idle, expert_width = _count_idle(model, text)
    key_values = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    per_head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return Sizes(
        parameters=total,
        trainable=sum(p.numel() for p in parameters if p.requires_grad),
        body=total - sum({id(m.weight): m.weight.numel() for m in outside}.values()),
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        inner=max(expert_width, int(_first_value(text, INNER) or 4 * text.hidden_size)),
        key_values=key_values * per_head,
        gated=hasattr(text, "intermediate_size"),
        vocabulary=text.vocab_size,
        tensors=len(parameters),
        quantized=sum(weight.numel() for weight in linear_weights(base)) if linear_dtype else 0,
        idle=idle,
        trains_head=outside[0].weight.requires_grad,
    )


def _count_idle(model: nn.Module, text: PretrainedConfig) -> tuple[int, int]:
    """Return the parameters of experts that a token is not routed to, and the width of those it is."""
    experts = _first_value(text, EXPERTS)
    chosen = _first_value(text, CHOSEN)
    if not isinstance(experts, int) or not chosen:
        return 0, 0
    # No family calls its shared experts, which every token passes through, just `experts`.
    routed = sum(
        parameter.numel()
        for name, parameter in model.named_parameters()
        if "experts" in name.split(".") or (parameter.dim() == 3 and parameter.shape[0] == experts)
    )
    per_token = max(chosen) if isinstance(chosen, list) else chosen  # a list has a number for each layer
    active = routed * min(per_token, experts) // experts
    return routed - active, active // (3 * text.hidden_size * text.num_hidden_layers)


def _first_value(text: PretrainedConfig, names: Sequence[str]) -> Any:
    return next((value for name in names if (value := getattr(text, name, None))), None)


def setup_of(
    config: RunConfig,
    batch: Batch,
    ds_config: DsConfig,
    objective: Objective,
    attended: float | None = None,
    other: Setup | None = None,
) -> Setup:
    """Return the settings of a recipe that memory and time depend on.

    Args:
        config: The recipe.
        batch: Its batch on the planned ranks.
        ds_config: Its resolved DeepSpeed configuration.
        objective: What it minimises.
        attended: Mean tokens that a token attends to; None if one document fills each row.
        other: Settings with the same teacher, which is then not built.
    """
    zero = ds_config.get("zero_optimization", {})
    half = config.model.dtype == "bfloat16"
    reduced = ds_config.get("communication_data_type")
    on_policy = config.objective.on_policy
    share = max(ends(on_policy.share)) if on_policy else 0.0
    # Device `none`, which is also the default, means no offloading.
    offloaded = [(zero.get(f"offload_{part}") or {}).get("device", "none") for part in ("optimizer", "param")]
    state = 2 if config.train.state_dtype == "bfloat16" else 4
    setup = Setup(
        ranks=batch.ranks,
        stage=zero_stage(ds_config),
        micro=batch.micro,
        block=config.data.sequence_len,
        accumulation=batch.accumulation,
        bf16=half,
        checkpointing=bool(config.model.activation_checkpointing),
        offload_activations=config.model.activation_checkpointing == "offload",
        tiled=config.model.tiled_mlp,
        offload_optimizer=offloaded[0] != "none",
        offload_parameters=offloaded[1] != "none",
        cost=objective.needs_cost,
        cache_mb=config.objective.cost_cache_mb,
        live=float(zero.get("stage3_max_live_parameters", 1e9)),
        bucket=float(zero.get("reduce_bucket_size", 5e8)),
        compiled=config.model.compile,
        kernels=config.model.kernels is not None,
        # On GPUs `auto` chooses an attention without a mask. Those compute in half precision only.
        masked=batch.sequence == 1 and (not half or config.model.attn_implementation in ("sdpa", "eager")),
        sequence=batch.sequence,
        moments=MOMENTS_8BIT if config.train.optimizer in EIGHT_BIT else 2.0 * state,
        state=state,
        hpz=int(zero.get("zero_hpz_partition_size", 1)),
        reduced={None: 2 if half else 4, "fp32": 4}.get(reduced, 2),
        all_reduced=zero.get("use_multi_rank_bucket_allreduce", True) or not zero.get("reduce_scatter", True),
        attended=attended,
        written=share * on_policy.tokens if on_policy else 0.0,
        demonstrated=share if on_policy and on_policy.context == "demonstration" else 0.0,
    )
    if other is not None:
        return dataclasses.replace(setup, **{name: getattr(other, name) for name in TEACHER})
    return _add_teacher(setup, config) if config.objective.has_live_teacher else setup


def _add_teacher(setup: Setup, config: RunConfig) -> Setup:
    """Return the setup with the sizes of the live teacher."""
    teacher = teacher_config(config)  # None: the trained model without its adapters
    reference = config.objective.resolved_teacher
    averaged = config.objective.average_decay is not None
    chosen = config.model if teacher is None or reference == BASE or averaged else teacher
    try:
        settings = model_config(chosen, online=False, key=KEY)
    except UserError as error:
        log.warning("the plan does not include the teacher: %s", error)
        return setup
    try:
        with torch.device("meta"):
            sizes = sizes_of(AutoModelForCausalLM.from_config(settings, trust_remote_code=False), settings)
    except Exception as error:  # transformers raises anything for a model that is not a causal LM
        problem = f"{KEY}={chosen.path} describes no model that can be planned ({one_line(error, 250)})"
        raise UserError(problem, code="architecture") from None
    width = 2 if chosen.dtype == "bfloat16" else 4
    copied = teacher is not None
    return dataclasses.replace(setup, teacher=sizes, copied=copied, teacher_width=width, averaged=averaged)


class StepPrediction(NamedTuple):
    """Predictions of the footprint for a step."""

    seconds: float
    mfu: float
    memory_gib: float
    peak_share: float  # model FLOPs of a step over what the hardware could do in a second

    @property
    def recorded(self) -> dict[str, float]:
        """Return the numbers that launches.jsonl holds."""
        return {"seconds": self.seconds, "mfu": self.mfu, "memory_gib": self.memory_gib}


def predict_step(config: RunConfig, run: TrainingRun, device: str) -> StepPrediction | None:
    """Predict a step of a run on GPUs with the name `device`, or None for unknown hardware."""
    gpu = accelerator(device)
    if gpu is None:
        return None
    sizes = sizes_of(run.model, run.hf_config, config.model.linear_dtype)
    setup = setup_of(config, run.batch, run.ds_config, run.objective, run.data.mean_context())
    seconds = footprint.step_time(sizes, setup, gpu).total
    return StepPrediction(
        seconds=seconds,
        mfu=footprint.utilisation(sizes, setup, seconds, gpu),
        memory_gib=footprint.memory(sizes, setup).total / GIB,
        peak_share=footprint.utilisation(sizes, setup, 1.0, gpu),
    )


def attention_span(
    config: RunConfig, ready: PlannedRun, document_tokens: int | None
) -> tuple[float | None, str]:
    """Return how many tokens a token attends to on average, and a line that explains the number.

    `document_tokens` replaces the mean length of the documents in the prepared data.
    """
    block = config.data.sequence_len
    if document_tokens is not None:
        attended = min(document_tokens, block) / 2
        return attended, f"of {document_tokens:,} tokens: a token attends to {attended:,.0f} on average"
    if ready.data is not None:
        attended = ready.data.mean_context()
        return attended, f"as prepared: a token attends to {attended:,.0f} of {block:,} on average"
    assumed = f"assumed to fill rows of {block:,} tokens"
    return None, f"{assumed}; for shorter documents prepare the data or set --document_tokens N"


Rows = list[tuple[str, str]]  # of a printed table: a name and a value


def print_plan(
    config: RunConfig,
    ranks: int,
    cluster: Cluster | None = None,
    here: bool = False,
    document_tokens: int | None = None,
) -> bool:
    """Resolve a recipe without training, print the plan, and return whether it fits.

    Args:
        config: The recipe.
        ranks: Number of ranks.
        cluster: The GPUs, for which memory and time are predicted.
        here: Check this host as training does.
        document_tokens: Mean length of the documents, instead of that in the prepared data.
    """
    ready = check_plan(config, ranks, here=here, gpus=cluster is not None)
    sizes = sizes_of(ready.model, ready.hf_config, config.model.linear_dtype)
    attended, span = attention_span(config, ready, document_tokens)
    setup = setup_of(config, ready.batch, ready.ds_config, ready.objective, attended)
    memory = footprint.memory(sizes, setup)
    table = Table("what", "value", title=str(config.output_dir), show_header=False)
    for row in _recipe_rows(config, ready, sizes, setup, memory):
        table.add_row(*row)
    if cluster is not None:
        table.add_section()
        for row in _cluster_rows(Alternatives(config, ready, sizes, setup, cluster), span):
            table.add_row(*row)
    make_console().print(table)
    for warning in collect_warnings(config, ready, on_cpu=cluster is None and not on_gpu()):
        log.warning(warning)
    return cluster is None or memory.total <= cluster.memory


def _recipe_rows(
    config: RunConfig, ready: PlannedRun | TrainingRun, sizes: Sizes, setup: Setup, memory: Memory
) -> Rows:
    """Return the rows of a plan that do not depend on the GPUs."""
    active = f", {sizes.parameters - sizes.idle:,} active for a token" if sizes.idle else ""
    counts = f"{sizes.parameters:,} ({sizes.trainable:,} trainable{active})"
    rows = [
        ("model", config.model.path or f"new {(config.model.architecture or {})['model_type']}"),
        ("parameters", f"{counts}, {config.model.dtype}"),
        ("attention", ready.attention),
        ("objective", f"{config.objective.label} {config.objective.params or ''}".strip()),
        ("batch", str(ready.batch)),
        ("tokens per step", f"at most {ready.batch.batch * config.data.sequence_len:,}"),
        *([] if setup.sequence == 1 else [("shared rows", _describe_sharing(sizes, setup))]),
        ("steps", _describe_steps(config, ready)),
        *([] if ready.steps is None else [("learning rate", describe_schedule(config.train, ready.steps))]),
        *domain_rows(config, ready),
    ]
    offloads = {"optimizer": setup.offload_optimizer, "weights": setup.offload_parameters}
    names = [name for name, offloaded in offloads.items() if offloaded]
    note = f", {' and '.join(names)} in host memory" if names else ""
    rows.append(("ZeRO", f"stage {setup.stage}{note}"))
    if setup.teacher is not None:
        rows.append(("teacher", _describe_teacher(config, setup, sizes)))
    if config.train.kl_from_base and config.data.validation_sets and not config.holds_base:
        tokens = len(config.data.validation_sets) * config.train.eval_rows * config.data.sequence_len
        dtype = top_dtype(min(config.train.kl_from_base, sizes.vocabulary - 1), sizes.vocabulary, "<f4")
        stored = f"at most {tokens * dtype.itemsize / GB:,.2g} GB of predictions in the run directory"
        rows.append(("KL from base", stored))
    states = {"weights": memory.parameters, "gradients": memory.gradients, "optimizer": memory.optimizer}
    # the optimizer's weights, two moments, weights, and an average in float32
    staged = sizes.trainable * (setup.state + setup.moments + setup.width + (4 if setup.averaged else 0))
    rows.append(("states per rank", memory_line(states, 2)))
    if setup.checkpointing and setup.offload_activations:
        offloaded = footprint.stored_bytes(sizes, setup) / GIB
        rows.append(("checkpoints", f"{offloaded:,.2f} GiB of host memory per rank"))
    amount = f"{staged / GIB:,.2f} GiB of host memory over all ranks"
    saving = f"{amount}, kept between saves" if config.train.async_save else f"at most {amount}, then freed"
    rows.append(("saving", saving))
    return rows


def _describe_sharing(sizes: Sizes, setup: Setup) -> str:
    """Return the part of a row that a rank computes, and what the ranks of a row exchange."""
    part = f"{setup.block // setup.sequence:,} tokens of each row per rank"
    return (
        f"{part}, which sends {footprint.exchanged_bytes(sizes, setup) / 2**20:,.1f} MiB per layer and pass"
    )


def _describe_teacher(config: RunConfig, setup: Setup, sizes: Sizes) -> str:
    """Return the weights of the live teacher, and what it reads in addition to the batch."""
    assert setup.teacher is not None
    text = f"{setup.teacher.parameters:,} parameters"
    if setup.averaged:
        text = f"average of {sizes.trainable:,} parameters that train"
    elif not setup.copied:
        text = "this model" if config.objective.teaches_itself else "this model without its adapters"
    if setup.demonstrated:
        share = f"in {setup.demonstrated:.0%} of the steps"
        text += f", reads rows of {2 * setup.block:,} tokens with demonstrations {share}"
    return text


def _describe_steps(config: RunConfig, ready: PlannedRun | TrainingRun) -> str:
    """Return the number of steps, with the rows and epochs that it covers."""
    steps = ready.steps
    epochs = config.train.num_train_epochs
    passes = "" if epochs is None else counted(epochs, "epoch")
    if steps is None:
        return f"{passes}; the number of steps is known once the data are prepared"
    if epochs is None or not ready.data:
        return f"{steps:,}"
    extra = steps * ready.batch.batch - round(epochs * len(ready.data))
    if extra:
        rows = counted(abs(extra), "row")
        passes += f" and {rows} of the next" if extra > 0 else f" without {rows}"
    return f"{steps:,} ({counted(len(ready.data), 'row')}, {passes})"


def _cluster_rows(plan: Alternatives, span: str) -> Rows:
    """Return the rows of a plan that predict memory and time on a cluster."""
    config, sizes, setup, cluster = plan.config, plan.sizes, plan.setup, plan.cluster
    steps = plan.ready.steps
    time = footprint.step_time(sizes, setup, cluster.gpu, cluster.network_gb)
    tokens = setup.tokens * setup.accumulation * setup.ranks / time.total
    mfu = footprint.utilisation(sizes, setup, time.total, cluster.gpu)
    if steps is None:
        hours = PER_MILLIONS * 1e6 / tokens / 3600 * cluster.gpus
        duration = f"{hours:,.1f} GPU-hours per {PER_MILLIONS} million tokens, without saving"
    else:
        hours = steps * time.total / 3600
        duration = f"{hours:,.1f} hours, {hours * cluster.gpus:,.1f} GPU-hours, without saving"
    rows = [
        ("on", f"{cluster.gpus} x {cluster.kind}, {cluster.memory / GIB:.1f} GiB of each usable"),
        ("memory per GPU", memory_line(footprint.memory(sizes, setup).peak, 1)),
        ("fits", describe_fit(plan)),
        ("documents", span),
        ("step", sum_line(time._asdict(), 2, "s")),
        ("speed", f"{tokens:,.0f} tokens/s, {tokens / setup.ranks:,.0f} per GPU, MFU {mfu:.0%}"),
        ("run", duration),
    ]
    if config.train.save_steps:
        rows.append(("saves", _describe_saves(config, sizes, setup, time.total)))
    return [*rows, ("trust", TRUST)]


def _describe_saves(config: RunConfig, sizes: Sizes, setup: Setup, step: float) -> str:
    """Return the size and rate of checkpoints, and how long training waits for them.

    Training waits while states are copied to host memory. They are written in the background. A step takes
    `step` seconds.
    """
    state = sizes.trainable * (4 + setup.moments + setup.width)
    written = state + sizes.parameters * setup.width * config.train.export_checkpoints
    seconds = config.train.save_steps * step
    waiting = state / setup.ranks / footprint.HOST_LINK
    return (
        f"{written / GB:,.0f} GB every {seconds / 60:,.1f} minutes, {written / GB / seconds:.2g} GB/s; "
        f"training waits {waiting / (waiting + seconds):.1%} of the time"
    )


def domain_rows(config: RunConfig, ready: PlannedRun | TrainingRun) -> Rows:
    """Return the range of any loss weights, and the share, tokens and epochs of each of several domains."""
    mixture = config.train.mixture
    data = ready.data
    order = ready.order
    rows = [] if mixture is None else [("mixture", mixture.label)]
    if data is not None and data.weighted:
        rows.append(("loss weights", data.describe_weights()))
    if data is None or ready.steps is None or order is None or (mixture is None and len(data.domains) < 2):
        return rows
    if isinstance(order, MixedOrder):
        portions = order.portions(ready.steps)
    else:
        epochs = ready.steps * ready.batch.batch / len(data)
        total = data.manifest.valid_tokens
        sizes = ((domain.name, domain.valid_tokens) for domain in data.manifest.domains)
        portions = [Portion(name, (n / total, n / total), 0, epochs, n * epochs) for name, n in sizes]
    for portion in portions:
        first, last = (f"{share:.1%}" for share in portion.shares)
        share = f"{first if first == last else f'{first} to {last}'} of {mixture.by if mixture else 'tokens'}"
        repeated = f", more than {REPEATED}" if mixture and portion.epochs > REPEATED else ""
        passes = counted(float(f"{portion.epochs:.2g}"), "epoch")
        rows.append((f"domain {portion.name}", f"{share}; {portion.tokens:,.0f} tokens, {passes}{repeated}"))
    return rows


def collect_warnings(config: RunConfig, ready: PlannedRun | TrainingRun, on_cpu: bool) -> list[str]:
    """Return warnings about a valid run that may not do what its user expects."""
    train = config.train
    data = ready.data
    steps = ready.steps
    warnings = []
    if config.model.lora is not None and config.model.lora.use_dora:
        warnings.append("DoRA's activations are not planned. They can double those of LoRA.")
    template = config.data.template
    frozen = config.model.lora is not None and not config.model.lora.train_embeddings
    if frozen and config.data.by_chat_template and template != "chat_template":
        problem = f"LoRA may not teach a base model the special tokens of data.template={template}, so that"
        cure = "Set model.lora.train_embeddings=true in a new output_dir, unless the model knows the tokens."
        warnings.append(f"{problem} its answers do not end. {cure}")
    for portion in ready.order.portions(steps) if isinstance(ready.order, MixedOrder) and steps else ():
        if portion.epochs > REPEATED:
            cure = "Repeated text teaches less: lower its share, or set train.mixture.max_epochs."
            warnings.append(f"domain {portion.name} is repeated for {portion.epochs:.3g} epochs. {cure}")
    batch = ready.batch
    if batch.slots > batch.batch:
        problem = f"each step leaves {batch.slots - batch.batch} of {batch.slots} slots empty"
        cure = f"Set train.global_batch_size={batch.slots} in a new output_dir to fill them."
        unit = "ranks" if batch.sequence == 1 else "groups of ranks"
        warnings.append(f"{problem}: {batch.batch} rows do not divide over {batch.replicas} {unit}. {cure}")
    if train.state_dtype == "bfloat16" and train.learning_rate < LOST_BELOW:
        problem = f"train.state_dtype=bfloat16 loses most updates at learning rates below {LOST_BELOW:g}"
        warnings.append(f"{problem}. Set train.state_dtype=float32 in a new output_dir.")
    if on_cpu and config.model.dtype == "bfloat16" and lacks_bfloat16():
        cure = "Set model.dtype=float32 in a new output_dir."
        warnings.append(f"bfloat16 on this CPU is several times slower than float32. {cure}")
    if train.num_train_epochs is not None and data is not None and steps is not None and steps < 10:
        amount = f"{counted(len(data), 'packed row')} of {config.data.sequence_len:,} tokens"
        cure = "Set a smaller train.global_batch_size or more train.num_train_epochs in a new output_dir."
        warnings.append(f"only {counted(steps, 'step')} of {amount}. {cure}")
    return warnings


def sum_line(parts: dict[str, float], digits: int, unit: str) -> str:
    """Return a line such as `6.0 GiB = weights 2.5 + optimizer 3.5`, rounded so that the sum is exact."""
    scale = 10**digits
    total = round(sum(parts.values()) * scale)
    rounded = {name: math.floor(value * scale) for name, value in parts.items()}
    by_remainder = sorted(parts, key=lambda name: rounded[name] - parts[name] * scale)
    for name in by_remainder[: total - sum(rounded.values())]:
        rounded[name] += 1
    terms = [f"{name} {value / scale:.{digits}f}" for name, value in rounded.items() if value]
    return f"{total / scale:.{digits}f} {unit}" + (f" = {' + '.join(terms)}" if terms else "")


def memory_line(parts: dict[str, float], digits: int) -> str:
    """Return bytes by part as a sum in GiB, or in MiB if the total is below a tenth of a GiB."""
    small = sum(parts.values()) < 0.1 * GIB
    scaled = {name: value / (2**20 if small else GIB) for name, value in parts.items()}
    return sum_line(scaled, 1 if small else digits, "MiB" if small else "GiB")


Settings = dict[str, str | bool | int]  # of a recipe, by key


def _join_settings(settings: Settings) -> str:
    pairs = (
        (key, str(value).lower() if isinstance(value, bool) else value) for key, value in settings.items()
    )
    return " ".join(f"{key}={value}" for key, value in pairs)


@dataclasses.dataclass(frozen=True)
class Alternatives:
    """Other settings of a planned recipe, as far as training accepts them."""

    config: RunConfig
    ready: PlannedRun
    sizes: Sizes
    setup: Setup
    cluster: Cluster

    def change(self, settings: Settings, gpus: int | None = None) -> Setup | None:
        """Return the setup with these settings on so many GPUs, or None if training rejects it."""
        tree = self.config.model_dump(mode="json")
        try:
            for key, value in settings.items():
                apply_override(tree, f"{key}={value}")
            config = parse_section(RunConfig, tree, "")
            train = config.train
            counts = (train.global_batch_size, train.micro_batch_size, gpus or self.setup.ranks)
            batch = solve_batch(*counts, train.sequence_parallel)
            ds_config = self.ready.ds_config
            if config.deepspeed != self.config.deepspeed:
                ds_config = resolve_deepspeed(config, batch)
            if batch.sequence != self.setup.sequence:
                self._check_sharing(config)
            if config.model.tiled_mlp:
                find_mlps(self.ready.model)
        except UserError:
            return None
        return setup_of(config, batch, ds_config, self.ready.objective, self.setup.attended, self.setup)

    def _check_sharing(self, config: RunConfig) -> None:
        """Raise UserError if ranks cannot share rows as a recipe sets it."""
        check_sequence_parallel(config, self.ready.hf_config)
        usable_attention(config.model, self.ready.hf_config, shared=True, gpus=True)
        if self.setup.teacher is not None:
            check_teacher(config, self.ready.hf_config, [], local=False, gpus=True)

    def fitting(self, settings: Settings, certain: bool, gpus: int | None = None) -> Setup | None:
        """Return the setup with these settings if it fits, or with `certain` if it is certain to fit."""
        setup = self.change(settings, gpus)
        if setup is None:
            return None
        memory = footprint.memory(self.sizes, setup)
        return setup if (memory.upper_bound if certain else memory.total) <= self.cluster.memory else None

    @property
    def checkpoints(self) -> list[bool | str]:
        """Return the values of model.activation_checkpointing that need less memory than the recipe's."""
        values: list[bool | str] = [False, True, "offload"]
        return values[values.index(self.config.model.activation_checkpointing) + 1 :]

    @property
    def shares(self) -> list[int]:
        """Return the larger values of train.sequence_parallel that training accepts."""
        numbers = (n for n in range(self.setup.sequence + 1, NODE + 1) if self.setup.ranks % n == 0)
        compiled: Settings = {"model.compile": False}  # compiled layers cannot share rows
        return [n for n in numbers if self.change({"train.sequence_parallel": n, **compiled}) is not None]

    def combine(self, certain: bool) -> Settings | None:
        """Return the fastest settings that fit, of all that need less memory, without those of the recipe."""
        options: dict[str, Sequence[str | bool | int]] = {
            "train.micro_batch_size": [1],
            "deepspeed": [f"ds_configs/{name}" for name in ("zero3.json", "zero3_offload.json")],
            "model.activation_checkpointing": self.checkpoints,
            "model.tiled_mlp": [True],
            "model.compile": [False] if self.config.model.compile else [],
            "train.sequence_parallel": self.shares,
        }
        rows = itertools.product(*([None, *values] for values in options.values()))
        best: Settings | None = None
        least = (0, 0)
        for row in rows:
            settings = {key: value for key, value in zip(options, row, strict=True) if value is not None}
            if (setup := self.fitting(settings, certain)) is None:
                continue
            time = footprint.step_time(self.sizes, setup, self.cluster.gpu, self.cluster.network_gb)
            rank = round(math.log(time.total) / EQUAL_SPEED), len(settings)
            if best is None or rank < least:
                best, least = settings, rank
        return best


def describe_fit(plan: Alternatives) -> str:
    """Return whether the run fits, and changes that make it fit, cheapest first."""
    setup = plan.setup
    room = plan.cluster.memory
    memory = footprint.memory(plan.sizes, setup)
    certain = memory.total <= room
    rows = setup.micro * setup.accumulation
    micros = (m for m in range(rows, 0, -1) if rows % m == 0)
    largest = next((m for m in micros if plan.fitting({"train.micro_batch_size": m}, certain)), 0)
    if memory.upper_bound <= room:
        limit = (
            " (all rows of a GPU; for more set a larger train.global_batch_size)" if largest == rows else ""
        )
        return f"yes; largest train.micro_batch_size that is certain to fit: {largest}{limit}"
    kinds: list[list[Settings]] = [
        [{"train.micro_batch_size": largest}] if largest else [],
        [{"model.activation_checkpointing": value} for value in plan.checkpoints],
        [{"deepspeed": "ds_configs/zero3.json"}],
        [{"train.sequence_parallel": n} for n in plan.shares],
    ]
    fitting = (next((s for s in kind if plan.fitting(s, certain)), None) for kind in kinds)
    changes = [settings for settings in fitting if settings]
    if not changes and (settings := plan.combine(certain)):
        changes = [settings]
    remedies = [f"set {_join_settings(settings)}" for settings in changes]
    counts = (plan.cluster.gpus * 2**i for i in range(1, 8))
    enough = next((n for n in counts if plan.fitting({}, certain, n)), None)
    remedies += [f"take {enough} GPUs"] if enough else []
    remedy = "; or ".join(remedies or ["no other settings help: take GPUs with more memory, or model.lora"])
    if memory.total > room:
        return f"NO; {remedy}"
    predicted = f"tight: {memory.total / GIB:.1f} of {room / GIB:.1f} GiB, and all memory except states may"
    return f"{predicted} be {footprint.MEMORY_ERROR:.0%} higher; to be safe {remedy}"


class Choice(NamedTuple):
    """Settings that `--best` considers, with their predicted memory and time."""

    file: Path  # of DeepSpeed
    setup: Setup
    memory: Memory
    time: Time

    @property
    def settings(self) -> Settings:
        """Return the recipe's keys for this choice."""
        checkpoints = "offload" if self.setup.offload_activations else True
        return {
            "deepspeed": str(self.file),
            "model.activation_checkpointing": self.setup.checkpointing and checkpoints,
            "model.compile": self.setup.compiled,
            "train.micro_batch_size": self.setup.micro,
        }

    @property
    def speed(self) -> float:
        """Return the tokens/s of one GPU."""
        return self.setup.tokens * self.setup.accumulation / self.time.total

    @classmethod
    def predict(cls, file: Path, setup: Setup, sizes: Sizes, cluster: Cluster) -> Choice:
        """Predict memory and time of a DeepSpeed file and a setup on these GPUs."""
        time = footprint.step_time(sizes, setup, cluster.gpu, cluster.network_gb)
        return cls(file, setup, footprint.memory(sizes, setup), time)


def print_best(config: RunConfig, cluster: Cluster, document_tokens: int | None = None) -> Choice:
    """Print the fastest settings that are certain to fit, and return the best of them."""
    plain = _without_choice(config, Path("ds_configs/zero2.json"))
    ready = check_plan(plain, cluster.gpus, gpus=True)
    sizes = sizes_of(ready.model, ready.hf_config, config.model.linear_dtype)
    attended, span = attention_span(config, ready, document_tokens)
    candidates = list(choices(config, sizes, ready.objective, cluster, attended))
    best = _rank_choices(candidates, cluster)[:3]
    if not best:
        setup = setup_of(plain, ready.batch, ready.ds_config, ready.objective, attended)
        settings = Alternatives(plain, ready, sizes, setup, cluster).combine(certain=True) or {}
        chosen = candidates[0].settings  # by this search, except an offload
        others = {key: v for key, v in settings.items() if key not in chosen or v == "offload"}
        if others and config.model.compile:  # which excludes tiles
            others["model.compile"] = False
        raise _nothing_fits(candidates, cluster, others)
    room = f"settings that are certain to fit into {cluster.memory / GIB:.1f} GiB of each"
    error = f"even if all memory except states is {footprint.MEMORY_ERROR:.0%} higher than predicted"
    table = Table(title=f"{cluster.gpus} x {cluster.kind}: {room}, {error}", padding=(0, 0))
    for name in ("", "deepspeed", "check- points", "compile", "micro batch"):
        table.add_column(name, no_wrap=name == "deepspeed")
    for name in ("GiB", "tok/s /GPU", "MFU", "step", "host"):
        table.add_column(name, justify="right")
    for i, choice in enumerate(best, 1):
        table.add_row(str(i), *_choice_cells(choice, sizes, cluster))
    with contextlib.suppress(UserError):  # the recipe as it is may not be valid on these GPUs
        train = config.train
        counts = (train.global_batch_size, train.micro_batch_size, cluster.gpus)
        batch = solve_batch(*counts, train.sequence_parallel)
        setup = setup_of(config, batch, resolve_deepspeed(config, batch), ready.objective, attended)
        current = Choice.predict(config.deepspeed, setup, sizes, cluster)
        table.add_section()
        table.add_row("recipe", *_choice_cells(current, sizes, cluster))
    console = make_console()
    console.print(table)
    console.print(
        f"set: {', '.join(best[0].settings)}. step: seconds, host: share of a step that waits for the host. "
        "Compiling pays off in runs that are much longer than the minutes it takes."
    )
    console.print(f"the first is based on {describe_time_source(best[0].setup.stage, cluster.gpu)}")
    if any(choice.setup.offload_parameters for choice in best):
        states = 18 * sizes.parameters / GIB * min(1, NODE / cluster.gpus)
        console.print(f"zero3_offload.json takes about {states:,.0f} GiB of host memory on every host")
    console.print(f"documents: {span}")
    console.print(f"trust: {TRUST}")
    return best[0]


def _rank_choices(candidates: list[Choice], cluster: Cluster) -> list[Choice]:
    """Return the choices that are certain to fit, best first, with the best micro-batch of every kind."""
    fitting = [choice for choice in candidates if choice.memory.upper_bound <= cluster.memory]
    fitting.sort(key=lambda choice: (-round(math.log(choice.speed) / EQUAL_SPEED), choice.memory.total))
    best: dict[tuple[Path, bool, bool], Choice] = {}
    for choice in fitting:
        best.setdefault((choice.file, choice.setup.checkpointing, choice.setup.compiled), choice)
    return list(best.values())


def _nothing_fits(candidates: list[Choice], cluster: Cluster, settings: Settings) -> FailureError:
    """Return the error if no choice is certain to fit. With `settings` the recipe would be."""
    smallest = min(candidates, key=lambda choice: choice.memory.upper_bound)
    size = f"{smallest.memory.upper_bound / GIB:.1f} GiB of {cluster.memory / GIB:.1f}"
    needs = f"{smallest.file.name} may need {size}"
    problem = f"no configuration is certain to fit on {cluster.gpus} x {cluster.kind} ({needs})"
    cure = f"Set {_join_settings(settings)}" if settings else "Take more or larger GPUs, or set model.lora"
    return FailureError(f"{problem}. {cure}.", code="nothing-fits")


def _choice_cells(choice: Choice, sizes: Sizes, cluster: Cluster) -> list[str]:
    """Return the cells of a row of the table of choices, after its name."""
    setup = choice.setup
    time = choice.time
    total = choice.memory.total
    mfu = footprint.utilisation(sizes, setup, time.total, cluster.gpu)
    flags = str(setup.checkpointing).lower(), str(setup.compiled).lower()
    size = f"{total / GIB:.1f}" + (" NO" if total > cluster.memory else "")
    speed = f"{choice.speed:,.0f}", f"{mfu:.0%}", f"{time.total:.3g}", f"{time.host / time.total:.0%}"
    return [choice.file.name, *flags, str(setup.micro), size, *speed]


def choices(
    config: RunConfig,
    sizes: Sizes,
    objective: Objective,
    cluster: Cluster,
    attended: float | None = None,
) -> Iterator[Choice]:
    """Yield all candidate settings on these GPUs, whether they fit or not.

    Compiling is tried under ZeRO-1 and 2 only, since no published run shows what compiled layers gain. hpZ is
    tried if the ranks fill several nodes. DeepSpeed files that the recipe excludes are skipped. Raises
    UserError if the recipe excludes all of them.

    Args:
        config: The recipe.
        sizes: The model.
        objective: The objective of the recipe.
        cluster: The GPUs.
        attended: Mean tokens that a token attends to; None if one document fills each row.
    """
    gpus = cluster.gpus
    batch = solve_batch(config.train.global_batch_size, 1, gpus, config.train.sequence_parallel)
    rows = batch.accumulation
    errors: list[UserError] = []
    files = [name for name in FILES if name != "zero3_hpz.json" or (gpus > NODE and gpus % NODE == 0)]
    for file in (Path("ds_configs") / name for name in files):
        plain = _without_choice(config, file)
        try:
            base = setup_of(plain, batch, resolve_deepspeed(plain, batch), objective, attended)
        except UserError as error:
            errors.append(error)
            continue
        micros = [m for m in range(1, rows + 1) if rows % m == 0]
        compiles = base.stage < 3 and not (base.kernels or base.tiled) and base.sequence == 1
        compiling = (False, True) if compiles else (False,)
        for checkpointing, compiled, micro in itertools.product((False, True), compiling, micros):
            setup = dataclasses.replace(
                base, checkpointing=checkpointing, compiled=compiled, micro=micro, accumulation=rows // micro
            )
            yield Choice.predict(file, setup, sizes, cluster)
    if len(errors) == len(files):
        raise errors[-1]


def _without_choice(config: RunConfig, file: Path) -> RunConfig:
    """Return the recipe with this DeepSpeed file, one row per pass and no compiling."""
    train = config.train.model_copy(update={"micro_batch_size": 1})
    model = config.model.model_copy(update={"compile": False})
    return config.model_copy(update={"deepspeed": file, "train": train, "model": model})


def write_recipe(
    path: Path, recipe: Path, overrides: Sequence[str], choice: Choice, cluster: Cluster
) -> None:
    """Write a recipe that extends another one and sets the overrides and the choice.

    Raises UserError if a recipe cannot express the overrides.

    Args:
        path: File to write.
        recipe: File to extend.
        overrides: `key=value` settings of the command line.
        choice: The settings to use.
        cluster: The GPUs, for the comment at the top.
    """
    settings = [*overrides, *(f"{key}={value}" for key, value in choice.settings.items())]
    tree: dict[str, object] = {}
    for setting in settings:
        apply_override(tree, setting)
    base = os.path.relpath(shipped(recipe).resolve(), path.parent.resolve())
    text = (
        f"# The fastest settings of `plan --best` for {recipe.name} on {cluster.gpus} x {cluster.kind}.\n"
        f"# Predicted: {choice.speed:,.0f} tokens/s per GPU, {choice.memory.total / GIB:.1f} GiB on each.\n"
    ) + dump_recipe({"extends": base, **tree})
    with part_file(path) as file:
        file.write(text.encode())
        file.flush()
        if load_config(Path(file.name), []) != load_config(recipe, settings):
            problem = "--write: an override replaces a whole section, which an extending recipe cannot do"
            raise UserError(f"{problem}. Write it into the recipe first.", code="write-section")
