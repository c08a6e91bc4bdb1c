"""The section `model` of a recipe: which model trains, and in which form."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from emo.common.config.recipe import FREE, Section, mark


class LoraConfig(Section):
    """Low-rank adapters on the linear layers of the body; the head stays frozen."""

    r: int = Field(32, gt=0)
    """Rank of the adapters."""
    alpha: float = Field(default_factory=lambda given: 2.0 * given.get("r", 32), gt=0)
    """The adapters' output is scaled by alpha / r. The default is 2 r, as usual in TRL and LLaMA-Factory."""
    dropout: float = Field(0.05, ge=0, lt=1)
    """Dropout on the adapters' input."""
    targets: str | list[str] = "all-linear"
    """Names of the modules to adapt, or all-linear: every linear layer except the head."""


class ModelConfig(Section):
    """The model, and the form in which it trains.

    `path` alone: a pre-trained model. `architecture` alone: a new model. Both: a pre-trained model that must
    have this architecture, which also lets a dry run plan without network.
    """

    path: str | None = None
    """Hub id or directory of a pre-trained causal LM."""
    revision: str | None = None
    """Commit of the hub model."""
    architecture: dict[str, Any] | None = None
    """Keys of a Hugging Face configuration, with model_type: a new model, or what the pre-trained one must
    be."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Type of weights and activations; the optimizer keeps float32."""
    attn_implementation: Literal["auto", "varlen", "flash_attention_2", "sdpa", "eager"] = mark(FREE, "auto")
    """`varlen` is PyTorch's own variable-length attention, without a mask; `auto` takes the first of these
    that host and model family support."""
    activation_checkpointing: bool = mark(FREE, False)
    """Recompute activations in the backward pass: less memory, about a third more time."""
    compile: bool = False
    """Use torch.compile, on GPUs: on the whole model under ZeRO-1 or 2, on each layer under ZeRO-3; the first
    step then takes a minute."""
    kernels: Literal["liger"] | None = mark(FREE, None)
    """Compute RMSNorm, rotary embedding and the gated product of each layer by Liger's kernels, on GPUs, for
    the families that it knows; they are compared with the model's own at every start."""
    lora: LoraConfig | None = None
    """Train low-rank adapters instead of all weights."""

    @model_validator(mode="after")
    def _some_origin(self) -> ModelConfig:
        if self.path is None and self.architecture is None:
            raise ValueError("give path (pre-trained), architecture (a new model), or both")
        if "model_type" not in (self.architecture or {"model_type": ""}):
            raise ValueError("architecture needs model_type, for example llama")
        if self.kernels is not None and self.compile:
            raise ValueError("give kernels or compile, which fuse the same work")
        return self
