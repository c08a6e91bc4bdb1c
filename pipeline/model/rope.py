"""Change the rotary position embeddings (RoPE) of a pre-trained model, to extend its context.

    linear    positions divided by the factor (Chen et al. 2023, arXiv 2306.15595)
    dynamic   NTK-aware scaling of theta by the longest position of a batch
    yarn      low frequencies divided, high ones kept (Peng et al. 2023, arXiv 2309.00071)
    llama3    the same with other bounds, as in Llama 3.1

Transformers computes the frequencies. Here the settings are put into a model's configuration, so that
training, checks, plans and exports all read them from there.
"""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig, PreTrainedModel

from emo.common.errors import UserError
from emo.common.io.weights import DYNAMIC, context_length, extended_context

from .config import ROPE_KEYS, RopeConfig
from .readers import CONTEXT, GLOBAL, LOCAL, LOCAL_THETA

TYPES = [kind for kind in ROPE_KEYS if kind]
KEPT = ("rope_theta", "partial_rotary_factor")  # settings that do not depend on the type
DEFAULTS = {"llama3": {"low_freq_factor": 1.0, "high_freq_factor": 4.0}}
MAXIMUM = "max_position_embeddings"


def extend_rope(config: PretrainedConfig, rope: RopeConfig) -> PretrainedConfig:
    """Return the configuration of a model with the RoPE and the context of a recipe.

    If the settings differ by layer type, only the layers that attend to all positions change. Raises
    UserError for a model without RoPE, and for one whose RoPE is scaled already unless the recipe names its
    original context.
    """
    text = config.get_text_config()
    settings = getattr(text, "rope_parameters", None) or {}
    before = settings.get(GLOBAL) or settings
    kind = before.get("rope_type", "default")
    known = "rope_theta" in before and hasattr(text, MAXIMUM) and kind in ("default", *TYPES)
    # transformers 4 reads only longrope for Phi-3, and Falcon may have ALiBi instead of RoPE.
    if not known or hasattr(text, CONTEXT) or getattr(text, "alibi", False):
        raise _wrong(f"the RoPE of {text.model_type} models cannot be changed", "Remove model.rope")
    original = rope.original_max_position_embeddings
    if rope.type is not None and original is None and kind != "default":
        cure = f"Set model.rope.{CONTEXT}, or remove model.rope to keep that context"
        raise _wrong(f"the model has RoPE of type {kind} already", cure)
    after: dict[str, Any] = {k: v for k, v in before.items() if k in KEPT or rope.type in (None, kind)}
    if rope.theta is not None:
        after["rope_theta"] = rope.theta
    maximum = rope.max_position_embeddings
    if rope.type is not None:
        original = original or context_length(text) or getattr(text, MAXIMUM)
        values = {key: value for key, value in rope if value is not None and key not in ("theta", MAXIMUM)}
        after |= {"rope_type": values.pop("type")} | DEFAULTS.get(rope.type, {}) | values
        after |= {CONTEXT: original}
        if rope.type in ("linear", DYNAMIC):  # their formulas have no such key
            del after[CONTEXT]
        # The formula of dynamic RoPE, and `context_length`, expect the original context there.
        scaled = extended_context(original, {"factor": rope.factor})
        maximum = maximum or (original if rope.type == DYNAMIC else scaled)
    if settings.get(GLOBAL):
        after = {**settings, GLOBAL: after}
        if LOCAL_THETA.get(text.model_type, "") is None:  # these families have one theta
            after[LOCAL] = after[LOCAL] | {"rope_theta": after[GLOBAL]["rope_theta"]}
    text.rope_parameters = after
    if maximum is not None:
        setattr(text, MAXIMUM, maximum)
    return config


def check_rope(model: PreTrainedModel) -> None:
    """Raise UserError if no layer of a built model has the RoPE of its configuration."""
    expected = model.config.get_text_config().rope_parameters
    expected = (expected.get(GLOBAL) or expected)["rope_type"]
    found: set[str] = set()
    for kinds in (getattr(module, "rope_type", None) for module in model.modules()):
        found |= {*kinds.values()} if isinstance(kinds, dict) else {str(kinds)}
    if expected not in found:
        raise _wrong(f"{model.config.model_type} models ignore the type {expected}", "Remove model.rope")


def _wrong(problem: str, cure: str) -> UserError:
    return UserError(f"model.rope: {problem}. {cure}", code="rope")
