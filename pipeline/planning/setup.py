"""The sizes of a model and the settings of a recipe, from which `footprint` predicts memory and time."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from emo.common.errors import UserError, one_line

from ..batches.config import Batch
from ..config import RunConfig
from ..engine.device.hardware import GIB, accelerator
from ..engine.ds_config import EIGHT_BIT, DsConfig, zero_stage
from ..loss.objectives import Objective
from ..model.build import model_config
from ..model.export import unwrap
from ..model.nf4 import linear_weights
from ..model.objective.build import measures_demd
from ..model.objective.config import BASE, ends
from ..model.teacher import KEY, teacher_config
from . import footprint
from .checks import PlannedRun, TrainingRun
from .footprint import MOMENTS_8BIT, Setup, Sizes

log = logging.getLogger(__name__)

# Keys of Hugging Face configurations for the number of experts, experts per token and feed-forward width.
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts", "num_routed_experts")
CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts")
INNER = ("intermediate_size", "ffn_dim", "n_inner")
GATES = {"gate_proj", "gate_up_proj", "w1"}  # parts of the names of parameters
TEACHER = ("teacher", "copied", "teacher_width", "averaged")  # fields of a setup


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
        # The names of experts differ between families. Nearly all experts have gates.
        gated=bool(expert_width) or any(GATES & {*name.split(".")} for name, _ in model.named_parameters()),
        vocabulary=text.vocab_size,
        tensors=len(parameters),
        quantized=sum(weight.numel() for weight in linear_weights(base)) if linear_dtype else 0,
        idle=idle,
        trains_head=outside[0].weight.requires_grad,
        heads=text.num_attention_heads,
        capped=bool(getattr(text, "attn_logit_softcapping", None)),
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
    attention: str | None = None,
    other: Setup | None = None,
) -> Setup:
    """Return the settings of a recipe that memory and time depend on.

    Args:
        config: The recipe.
        batch: Its batch on the planned ranks.
        ds_config: Its resolved DeepSpeed configuration.
        objective: What it minimises.
        attended: Mean tokens that a token attends to; None if one document fills each row.
        attention: The implementation of attention. None: the one that the recipe names.
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
    attention = attention or config.model.attn_implementation
    cost, cache_mb = _cost_memory(config, objective)
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
        cost=cost,
        cache_mb=cache_mb,
        live=float(zero.get("stage3_max_live_parameters", 1e9)),
        bucket=float(zero.get("reduce_bucket_size", 5e8)),
        compiled=config.model.compile,
        kernels=config.model.kernels is not None,
        # Attention without a mask computes in half precision only.
        masked=batch.sequence == 1 and (not half or attention in ("sdpa", "eager")),
        eager=attention == "eager",
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


def _cost_memory(config: RunConfig, objective: Objective) -> tuple[bool, float]:
    """Return whether a cost embedding [V, h] is in memory during training, and the MiB of its cache.

    Validation and the check of kernels measure DEMD for every objective, and the embedding stays in memory.
    """
    kind = config.objective.cost
    measured = config.data.validation_sets or config.model.kernels or config.model.tiled_mlp
    keeps = kind != "live" and bool(measured) and measures_demd(config, objective)
    held = objective.needs_cost or keeps
    return held and kind not in ("constant", "numbers"), config.objective.cost_cache_mb if held else 0.0


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


def checkpoint_bytes(config: RunConfig, sizes: Sizes, setup: Setup) -> float:
    """Return the bytes of a checkpoint, with its export if it has one."""
    exported = footprint.export_bytes(sizes, setup) if config.train.export_checkpoints else 0.0
    return footprint.state_bytes(sizes, setup) + exported


def disk_bytes(config: RunConfig, sizes: Sizes, setup: Setup) -> float:
    """Return the most bytes that the checkpoints and the final export of a run take."""
    checkpoints = checkpoint_bytes(config, sizes, setup) * (config.train.save_total_limit + 1)
    return checkpoints + footprint.export_bytes(sizes, setup)


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
    attended = run.data.mean_context()
    setup = setup_of(config, run.batch, run.ds_config, run.objective, attended, run.attention)
    seconds = footprint.step_time(sizes, setup, gpu).total
    return StepPrediction(
        seconds=seconds,
        mfu=footprint.utilisation(sizes, setup, seconds, gpu),
        memory_gib=footprint.memory(sizes, setup).total / GIB,
        peak_share=footprint.utilisation(sizes, setup, 1.0, gpu),
    )


def attention_span(
    config: RunConfig, run: PlannedRun, document_tokens: int | None
) -> tuple[float | None, str]:
    """Return how many tokens a token attends to on average, and a line that explains the number.

    `document_tokens` replaces the mean length of the documents in the prepared data.
    """
    block = config.data.sequence_len
    if document_tokens is not None:
        attended = min(document_tokens, block) / 2
        return attended, f"of {document_tokens:,} tokens: a token attends to {attended:,.0f} on average"
    if run.data is not None:
        attended = run.data.mean_context()
        return attended, f"as prepared: a token attends to {attended:,.0f} of {block:,} on average"
    assumed = f"assumed to fill rows of {block:,} tokens"
    return None, f"{assumed}; for shorter documents prepare the data or set --document_tokens N"
