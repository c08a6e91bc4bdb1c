"""What a model's configuration does to the logits of its head."""

from __future__ import annotations

from typing import Any

SOFT_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")


def head_options(config: Any) -> dict[str, float]:
    """Return those of `logit_scale` and `softcap` that a Hugging Face `config` gives its model."""
    text = config.get_text_config()
    options: dict[str, float] = {}
    for name in ("logits_scaling", "logit_scale", "lm_head_multiplier", *SOFT_CAPS):
        value = getattr(text, name, None)
        if isinstance(value, int | float) and value:
            divides = name == "logits_scaling" and text.model_type != "hyperclovax"  # which multiplies
            option = "softcap" if name in SOFT_CAPS else "logit_scale"
            options[option] = 1.0 / value if divides else float(value)
    return options
