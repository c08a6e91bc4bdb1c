"""Which attention a model trains with on this host."""

from __future__ import annotations

import logging

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig

from common.errors import UserError, one_line
from pipeline.config import ModelConfig
from pipeline.loss.head import VARLEN, by_segments
from pipeline.loss.varlen import LARGEST_HEAD, kernel_is_new_enough
from pipeline.planning.host import on_gpu

log = logging.getLogger(__name__)

PREFERENCE = (VARLEN, "flash_attention_2", "sdpa", "eager")  # of `auto` on a GPU
NEEDS = {
    # as flash-attn, it is handed windows and documents by the family, and where a call names none it is SDPA
    VARLEN: ("_supports_attention_backend", "_supports_flash_attn", "_supports_sdpa"),
    "flash_attention_2": ("_supports_flash_attn",),
    "sdpa": ("_supports_sdpa",),
    "eager": (),
}


def usable_attention(model: ModelConfig, config: PretrainedConfig) -> str:
    """Return the attention that this model trains with on this host; `auto` takes the first that both have.

    Raises UserError when `model.attn_implementation` names one that the host or the family lacks.
    """
    requested = model.attn_implementation
    if requested != "auto":
        missing = _lacking(requested, model, config)
        if missing is not None:
            raise UserError(
                f"model.attn_implementation={requested} cannot be used: {missing}; "
                "set model.attn_implementation=auto"
            )
        return requested
    passed_over = []
    for name in PREFERENCE:
        missing = _lacking(name, model, config)
        if missing is None and name == VARLEN and not on_gpu():
            missing = "no GPU"
        if missing is None:
            break
        passed_over.append(f"not {name}: {missing}")
    log.info("attention: %s", "; ".join((name, *passed_over)))
    return name


def without_segments(config: PretrainedConfig) -> str:
    """Return the attention of a family that is not told where documents begin."""
    return "sdpa" if _has(config, "sdpa") else "eager"


def _lacking(name: str, model: ModelConfig, config: PretrainedConfig) -> str | None:
    """Return what keeps this host or the family from attention of this name, or None."""
    if by_segments(name):
        missing = _host_lacks(name, model)
        if missing is not None:
            return missing
    if not _has(config, name):
        return f"{config.model_type} models have no {name}"
    return _unknown_to_varlen(config) if name == VARLEN else None


def _host_lacks(name: str, model: ModelConfig) -> str | None:
    """Return what this host, with weights of this kind, lacks for attention by segments, or None."""
    if not on_gpu():
        return "no GPU" if name == "flash_attention_2" else None
    if model.dtype == "float32":
        return "it computes in half precision only, and model.dtype is float32"
    if name == "flash_attention_2":
        try:
            import flash_attn  # noqa: F401
        except ImportError as error:
            return f"flash-attn cannot be imported: {one_line(error)}"
    elif not torch.backends.cuda.is_flash_attention_available() or not kernel_is_new_enough():
        return "this build of torch lacks its kernel"
    elif torch.cuda.get_device_capability() < (8, 0):
        return "it needs a GPU of compute capability 8.0 or newer"
    return None


def _has(config: PretrainedConfig, name: str) -> bool:
    """Return whether the family that `config` belongs to can compute attention in this way."""
    family = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if family is None:
        return name != VARLEN
    return all(getattr(family, flag) for flag in NEEDS[name])


def _unknown_to_varlen(config: PretrainedConfig) -> str | None:
    """Return what the model that `config` describes asks of attention and torch's kernel has not, or None."""
    text = config.get_text_config()
    for key, value in text.to_dict().items():
        if "att" in key and "drop" in key and value:
            return f"it has no dropout, and the model's {key} is {value}"
    if getattr(text, "attn_logit_softcapping", None):
        return "it has no soft cap, and the model's attn_logit_softcapping is set"
    size = getattr(text, "head_dim", None) or 0
    return (
        None if size <= LARGEST_HEAD else f"its heads have at most {LARGEST_HEAD} values, the model's {size}"
    )
