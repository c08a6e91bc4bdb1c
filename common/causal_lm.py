"""Conventions of Hugging Face causal language models: the ignored label, logit scale and soft cap."""

from __future__ import annotations

from typing import Any, NamedTuple

IGNORE = -100  # label of a position that predicts nothing

_SCALES = ("logits_scaling", "logit_scale", "lm_head_multiplier")
_SOFT_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")


class LogitScaling(NamedTuple):
    """A model's logits are softcap * tanh(scale * h W^T / softcap), or scale * h W^T without a soft cap."""

    scale: float = 1.0
    softcap: float | None = None


def read_logit_scaling(config: Any) -> LogitScaling:
    """Read logit scale and soft cap from the `config` of a causal LM, or from its text configuration."""
    text = config.get_text_config()

    def read(key: str) -> float | None:
        value = getattr(text, key, None)
        return float(value) if isinstance(value, int | float) and value else None

    scaling = LogitScaling()
    for key in _SCALES:
        if (value := read(key)) is not None:
            # Granite divides by logits_scaling, HyperCLOVA X multiplies by it
            divides = key == "logits_scaling" and text.model_type != "hyperclovax"
            scaling = scaling._replace(scale=1.0 / value if divides else value)
    for key in _SOFT_CAPS:
        if (value := read(key)) is not None:
            scaling = scaling._replace(softcap=value)
    return scaling
