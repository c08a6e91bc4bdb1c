"""Change the rotary position embeddings (RoPE) of a pre-trained model, to extend its context.

The settings are put into the model's configuration, from which Transformers computes the frequencies. The
types are linear (arXiv 2306.15595), dynamic (theta scaled by the longest position of a batch), yarn (arXiv
2309.00071) and llama3 (the scaling of Llama 3.1).
"""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig

from emo.common.context_length import DYNAMIC, MAXIMUM, check_extension, extended_context, rope_type
from emo.common.errors import UserError

from .config import ROPE_KEYS, RopeConfig
from .readers import CONTEXT, GLOBAL, LOCAL, LOCAL_THETA

KEPT = ("rope_theta", "partial_rotary_factor")  # settings that do not depend on the type
OURS = ("type", "theta", MAXIMUM, CONTEXT)  # keys of a recipe that are not RoPE's, or have another name


def extend_rope(config: PretrainedConfig, rope: RopeConfig | None) -> PretrainedConfig:
    """Return the configuration of a model with the RoPE and the context of a recipe, if it has any.

    If the settings differ by layer type, only the layers that attend to all positions change. Raises
    UserError for a model without RoPE, and for one whose RoPE is scaled already unless the recipe names its
    original context.
    """
    if rope is None:
        return config
    text = config.get_text_config()
    settings = getattr(text, "rope_parameters", None) or {}
    before = settings.get(GLOBAL) or settings
    kind = rope_type(config)
    check_extension(config, rope.model_dump())
    if "rope_theta" not in before or not hasattr(text, MAXIMUM) or kind not in ("default", *ROPE_KEYS):
        raise _wrong(f"the RoPE of {text.model_type} models cannot be changed", "Remove model.rope")
    # `context_length` reads no factor of a layer type, so the export would lose its longer context.
    if rope.type == DYNAMIC and settings.get(GLOBAL):
        problem = f"{text.model_type} models have RoPE by layer type, which does not go with type dynamic"
        raise _wrong(problem, "Use another type")
    original = rope.original_max_position_embeddings
    after: dict[str, Any] = {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if rope.type == "llama3" else {}
    after |= {key: value for key, value in before.items() if key in KEPT or rope.type in (None, kind)}
    after["rope_theta"] = rope.theta or before["rope_theta"]
    maximum = rope.max_position_embeddings
    if rope.type is not None:
        if getattr(text, "head_dim", 0) is None:  # the formulas of yarn and dynamic expect a number
            text.head_dim = text.hidden_size // text.num_attention_heads
        original = original or getattr(text, MAXIMUM)
        # The formula of dynamic RoPE, and `context_length`, expect the original context there.
        maximum = original if rope.type == DYNAMIC else extended_context(original, rope.model_dump())
        after["rope_type"] = rope.type
        after.pop("attention_factor", None)  # it depends on the factor
        after |= {key: value for key, value in rope if value is not None and key not in OURS}
        if rope.type in ("yarn", "llama3"):  # the formulas of the others have no such key
            after[CONTEXT] = original
    if settings.get(GLOBAL):
        after = {**settings, GLOBAL: after}
        if LOCAL_THETA.get(text.model_type, "") is None:  # these families have one theta
            after[LOCAL] = after[LOCAL] | {"rope_theta": after[GLOBAL]["rope_theta"]}
    text.rope_parameters = after
    if maximum is not None:
        setattr(text, MAXIMUM, maximum)
    return config


def check_rope(model: Any, rope: RopeConfig | None) -> None:
    """Raise UserError if no layer of a model has the RoPE of a recipe."""
    if rope is None:
        return
    kinds = [getattr(module, "rope_type", None) for module in model.modules()]
    frequencies = {name.rpartition(".")[2] for name, _ in model.named_buffers()}
    used = any(f"'{rope.type}'" in repr(kind) for kind in kinds)
    if rope.type is None:
        used = not frequencies.isdisjoint(("inv_freq", f"{GLOBAL}_inv_freq"))
    if not used:
        ignored = "theta" if rope.type is None else f"the type {rope.type}"
        raise _wrong(
            f"the layers of this {model.config.model_type} model ignore {ignored}", "Remove model.rope"
        )


def _wrong(problem: str, cure: str) -> UserError:
    return UserError(f"model.rope: {problem}. {cure}", code="rope")
