"""Which attention a model trains with on this host."""

from __future__ import annotations

import logging

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig

from emo.common.errors import UserError, one_line
from emo.pipeline.config import ModelConfig
from emo.pipeline.loss.head import VARLEN, by_segments
from emo.pipeline.loss.varlen import LARGEST_HEAD, kernel_is_new_enough
from emo.pipeline.planning.host import on_gpu

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
            problem = f"model.attn_implementation={requested} cannot be used: {missing}"
            raise UserError(f"{problem}; set model.attn_implementation=auto")
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
        if not on_gpu():
            if name == "flash_attention_2":
                return "no GPU"
        elif model.dtype == "float32":
            return "it computes in half precision only, and model.dtype is float32"
        elif name == "flash_attention_2":
            try:
                import flash_attn  # noqa: F401
            except ImportError as error:
                return f"flash-attn cannot be imported: {one_line(error)}"
        elif not torch.backends.cuda.is_flash_attention_available() or not kernel_is_new_enough():
            return "this build of torch lacks its kernel"
        elif torch.cuda.get_device_capability() < (8, 0):
            return "it needs a GPU of compute capability 8.0 or newer"
    if not _has(config, name):
        return f"{config.model_type} models have no {name}"
    if name != VARLEN:
        return None
    text = config.get_text_config()  # of what it asks, torch's kernel has not all
    for key, value in text.to_dict().items():
        if "att" in key and "drop" in key and value:
            return f"it has no dropout, and the model's {key} is {value}"
    if getattr(text, "attn_logit_softcapping", None):
        return "it has no soft cap, and the model's attn_logit_softcapping is set"
    size = getattr(text, "head_dim", None) or 0
    if size > LARGEST_HEAD:
        return f"its heads have at most {LARGEST_HEAD} values, the model's {size}"
    return None


def _has(config: PretrainedConfig, name: str) -> bool:
    """Return whether the family that `config` belongs to can compute attention in this way."""
    family = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if family is None:
        return name != VARLEN
    return all(getattr(family, flag) for flag in NEEDS[name])
