"""The longest input of a causal language model, and the RoPE that can extend it, from its config.json."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from .errors import UserError

# Names of the longest sequence in most configurations, those of GPT-2, of MPT and DBRX, and others.
CONTEXT_KEYS = ["max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length"]
CONTEXT_KEYS += ["model_max_length"]
DYNAMIC = "dynamic"  # RoPE whose theta depends on the longest position
SCALED = (DYNAMIC, "linear", "yarn", "llama3")  # types of RoPE that a recipe can replace
LARGEST_FACTOR = 1e6  # of RoPE
MAXIMUM = "max_position_embeddings"
ORIGINAL = "original_max_position_embeddings"


def context_length(config: Any) -> int | None:
    """Return the longest input of a model in tokens, or None if its configuration has no limit.

    Dynamic RoPE multiplies the context that its configuration names by its factor.

    config: config.json as read, or the object that `load_config` returns.
    """
    tree = _text_settings(config)
    lengths = (tree.get(key) for key in CONTEXT_KEYS)
    length = next((length for length in lengths if type(length) is int and length > 1), None)
    rope = tree.get("rope_parameters") or tree.get("rope_scaling")
    if length and isinstance(rope, dict) and DYNAMIC in (rope.get("rope_type"), rope.get("type")):
        return extended_context(length, {"factor": rope.get("factor")})
    return length


def _text_settings(config: Any) -> dict[str, Any]:
    """Return the settings of the text model in config.json as read, or in what `load_config` returns."""
    tree: dict[str, Any] = config if isinstance(config, dict) else config.get_text_config().to_dict()
    return text if isinstance(text := tree.get("text_config"), dict) else tree


def extended_context(context: int | None, rope: Mapping[str, Any]) -> int | None:
    """Return the context of a model after its RoPE changes. rope: keys of `model.rope`, also as written."""
    maximum, factor, original = (_as_number(rope.get(key)) for key in (MAXIMUM, "factor", ORIGINAL))
    original = original or _as_number(context)
    if maximum is not None and maximum.is_integer():
        return int(maximum)
    if factor is not None and original is not None and 1 <= factor < LARGEST_FACTOR:
        return round(factor * original)
    return context


def _as_number(value: Any) -> float | None:
    """Return a number of a recipe, where it may be a text, or None for other values."""
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        number = None if isinstance(value, bool) else float(value)
        return number if number is not None and abs(number) < 2**53 else None
    return None


def rope_type(config: Any) -> str:
    """Return the type of a model's RoPE, or of that of its full attention. config: as in `context_length`."""
    tree = _text_settings(config)
    settings = tree.get("rope_parameters") or tree.get("rope_scaling")
    settings = settings if isinstance(settings, dict) else {}
    settings = full if isinstance(full := settings.get("full_attention"), dict) else settings
    return str(settings.get("rope_type") or settings.get("type") or "default")


def check_extension(config: Any, rope: Mapping[str, Any]) -> None:
    """Raise UserError if the RoPE of a model cannot be changed so, as far as its config.json tells.

    Args:
        config: As in `context_length`.
        rope: Keys of `model.rope`.
    """
    tree, kind = _text_settings(config), rope_type(config)
    problem = ""
    # transformers reads only longrope for Phi-3 and Phi-MoE, and Falcon may have ALiBi instead of RoPE.
    if ORIGINAL in tree or tree.get("model_type") == "phimoe" or tree.get("alibi"):
        problem = f"the RoPE of {tree.get('model_type')} models cannot be changed. Remove model.rope"
    elif kind not in SCALED:
        return
    elif rope.get("type") is not None and rope.get(ORIGINAL) is None:
        problem = f"the model has RoPE of type {kind} already. Remove it, or set model.rope.{ORIGINAL}"
    elif rope.get("type") is None and rope.get(MAXIMUM):
        problem = f"the model has RoPE of type {kind}, whose factor sets its context. "
        problem += f"Replace model.rope.{MAXIMUM} by type, factor and {ORIGINAL}"
    if problem:
        raise UserError(f"model.rope: {problem}", code="rope")
