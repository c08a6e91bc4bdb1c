"""The section `model` of a recipe: the model to train and its form."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from emo.common.config.recipe import FREE, Section, mark


class LoraConfig(Section):
    """Low-rank adapters on linear layers. The head stays frozen."""

    r: int = Field(32, gt=0)
    """Rank of the adapters."""
    alpha: float = Field(default_factory=lambda fields: 2.0 * fields.get("r", 32), gt=0)
    """The output of the adapters is scaled by alpha / r. The default is 2 r, as in TRL and LLaMA-Factory."""
    dropout: float = Field(0.05, ge=0, lt=1)
    """Dropout on the input of the adapters."""
    targets: str | list[str] = "all-linear"
    """Names of the modules to adapt, or all-linear: every linear layer except the head."""
    use_rslora: bool = False
    """Scale the output by alpha / sqrt(r) instead, which suits large ranks."""
    use_dora: bool = False
    """Also train the length of each row of the adapted weights (DoRA). Each step takes longer."""
    loraplus_lr_ratio: float = Field(1.0, gt=0, le=1e3)
    """Learning rate of the adapters' B and of DoRA's lengths divided by the rate of A (LoRA+). A usual value
    is 16."""
    base_dtype: Literal["nf4"] | None = None
    """Store the frozen linear layers in 4 bits (QLoRA), for ZeRO-1 and 2. The default is model.dtype."""
    path: str | None = None
    """Directory or hub id of an adapter to continue, with the same settings as here. The default is a new
    adapter."""
    export: Literal["merged", "adapter", "both"] = mark(FREE, "merged")
    """What an export contains: the model with merged adapters, the adapter in PEFT's format, or the merged
    model with the adapter in its directory `adapter/`."""


class ModelConfig(Section):
    """The model to train.

    Set `path` for a pre-trained model, or `architecture` for a new one. With both, the pre-trained model must
    have this architecture, and a dry run can plan without network.
    """

    path: str | None = None
    """Hub id or directory of a pre-trained causal LM."""
    revision: str | None = None
    """Commit of the hub model."""
    architecture: dict[str, Any] | None = None
    """Keys of a Hugging Face configuration, including model_type."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Type of weights and activations. The optimizer always uses float32."""
    attn_implementation: Literal["auto", "varlen", "flash_attention_2", "sdpa", "eager"] = mark(FREE, "auto")
    """`varlen` is PyTorch's variable-length attention, which needs no mask. `auto` is the first of the others
    that the host and the model family support."""
    activation_checkpointing: bool | Literal["offload"] = mark(FREE, False)
    """Recompute activations in the backward pass. Saves memory and takes about a third more time. `offload`
    also keeps the inputs of the layers in host memory until then."""
    tiled_mlp: bool = mark(FREE, False)
    """Compute the MLP of each layer in tiles of about hidden_size tokens (DeepSpeed's TiledMLP), and again in
    the backward pass. Saves memory for long rows. Every start compares them with the plain MLPs."""
    compile: bool = False
    """Use torch.compile on GPUs: for the complete model under ZeRO-1 and 2, for each layer under ZeRO-3. The
    first step then takes a minute."""
    kernels: Literal["liger"] | None = mark(FREE, None)
    """Compute RMSNorm, rotary embedding and the gated product of each layer with Liger's kernels, on GPUs and
    for supported families. Every start compares them with the model's own layers."""
    neftune_noise_alpha: float = Field(0.0, ge=0)
    """Add uniform noise to the input embeddings while training (NEFTune). Usual values are 5 to 15."""
    lora: LoraConfig | None = None
    """Train low-rank adapters instead of all weights."""

    @property
    def linear_dtype(self) -> str | None:
        """Return the type of the frozen linear layers if it differs from `dtype`: nf4."""
        return None if self.lora is None else self.lora.base_dtype

    @property
    def exported(self) -> str:
        """Return what an export contains: merged, adapter or both."""
        return "merged" if self.lora is None else self.lora.export

    @model_validator(mode="after")
    def _is_consistent(self) -> ModelConfig:
        if self.path is None and self.architecture is None:
            raise ValueError("set path (pre-trained model), architecture (new model), or both")
        if "model_type" not in (self.architecture or {"model_type": ""}):
            raise ValueError("architecture needs model_type, for example llama")
        if self.tiled_mlp and self.compile:
            raise ValueError("set tiled_mlp or compile, not both")
        if self.kernels is not None and self.compile:
            raise ValueError("set kernels or compile, not both: they fuse the same work")
        return self
