"""The section `model` of a recipe: the model to train and its form."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from emo.common.config.recipe import FREE, Section, mark
from emo.common.context_length import LARGEST_FACTOR


class LoraConfig(Section):
    """Low-rank adapters on linear layers."""

    r: int = Field(32, gt=0)
    """Rank of the adapters."""
    alpha: float = Field(default_factory=lambda fields: 2.0 * fields.get("r", 32), gt=0)
    """The output of the adapters is scaled by alpha / r. The default is 2 r."""
    dropout: float = Field(0.05, ge=0, lt=1)
    """Dropout on the input of the adapters."""
    targets: str | list[str] = "all-linear"
    """Names of the modules to adapt, or `all-linear` for every linear layer except the output head, and
    except experts and layers with the names of theirs, such as shared experts."""
    use_rslora: bool = False
    """Scale by alpha / sqrt(r) instead of alpha / r, which suits large ranks."""
    use_dora: bool = False
    """Also train the magnitude of each row of the adapted weights (DoRA), which is slower."""
    train_embeddings: bool = False
    """Also train the embeddings and the output head in full, for example for new tokens. In PEFT, this is
    `modules_to_save: [embed_tokens, lm_head]`."""
    loraplus_lr_ratio: float = Field(1.0, gt=0, le=1e3)
    """Learning rate of the B matrices and of DoRA's magnitudes, divided by that of the A matrices. LoRA+
    usually uses 16."""
    base_dtype: Literal["nf4"] | None = None
    """`nf4` stores the frozen linear layers in 4 bits (QLoRA), with ZeRO-1 or 2. The default is
    model.dtype."""
    path: str | None = None
    """Directory or hub id of an adapter to train further, with the same settings."""
    export: Literal["merged", "adapter", "both"] = mark(FREE, "merged")
    """What an export contains: the merged model, the adapter in PEFT's format, or both, with the adapter in
    `adapter/`."""


class RopeConfig(Section):
    """RoPE of a pre-trained model for a longer context, with the names and formulas of Transformers."""

    type: Literal["linear", "dynamic", "yarn", "llama3"] | None = None
    """How the frequencies are scaled. The default is the model's scaling."""
    theta: float | None = Field(None, gt=1)
    """Base of the frequencies (`rope_theta`), by default the model's."""
    factor: float | None = Field(None, ge=1, lt=LARGEST_FACTOR)
    """Length of the new context divided by the original length. Required with `type`."""
    original_max_position_embeddings: int | None = Field(None, gt=0)
    """Length of the context before scaling, by default the model's."""
    max_position_embeddings: int | None = Field(None, gt=0)
    """Length of the new context, if only `theta` is set or with llama3. The default is the model's length
    times `factor`."""
    attention_factor: float | None = Field(None, gt=0)
    """For yarn: factor for cosines and sines. The default is 0.1 ln(factor) + 1."""
    beta_fast: float | None = Field(None, gt=0)
    """For yarn: frequencies with more rotations than this in the original context are kept. The default is
    32."""
    beta_slow: float | None = Field(None, gt=0)
    """For yarn: frequencies with fewer rotations than this are divided by factor. The default is 1."""
    low_freq_factor: float | None = Field(None, gt=0)
    """For llama3: frequencies with fewer rotations than this are divided by factor. The default is 1."""
    high_freq_factor: float | None = Field(None, gt=0)
    """For llama3: frequencies with more rotations than this are kept. The default is 4."""

    @model_validator(mode="after")
    def _is_consistent(self) -> RopeConfig:
        if (self.type is None) != (self.factor is None) or (self.type is None and self.theta is None):
            raise ValueError("set type with factor, or theta")
        keys = {key for key, value in self if value is not None} - {"type", "theta"}
        if wrong := sorted(keys - ROPE_KEYS[self.type]):
            raise ValueError(f"{wrong[0]} does not go with {self.type or 'theta alone'}")
        low, high = self.low_freq_factor or 1.0, self.high_freq_factor or 4.0
        if low >= high or (self.beta_slow or 1.0) >= (self.beta_fast or 32.0):
            raise ValueError("low_freq_factor must be below high_freq_factor, and beta_slow below beta_fast")
        return self


SCALING = {"factor", "original_max_position_embeddings"}
# Keys that go with each type of RoPE, besides theta. None: the model's own scaling.
ROPE_KEYS = {None: {"max_position_embeddings"}, "linear": SCALING, "dynamic": SCALING}
ROPE_KEYS["yarn"] = SCALING | {"attention_factor", "beta_fast", "beta_slow"}
ROPE_KEYS["llama3"] = SCALING | {"max_position_embeddings", "low_freq_factor", "high_freq_factor"}


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
    """Hugging Face configuration of a new model, including model_type."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Type of weights and activations."""
    attn_implementation: Literal["auto", "varlen", "flash_attention_2", "sdpa", "eager"] = mark(FREE, "auto")
    """`varlen` is PyTorch's variable-length attention, which separates packed documents without a mask.
    `auto` is the first of the other values that the host and the model support."""
    activation_checkpointing: bool | Literal["offload"] = mark(FREE, False)
    """Recompute activations in the backward pass, which saves memory but takes about a third more time.
    `offload` also moves the inputs of the layers to host memory."""
    tiled_mlp: bool = mark(FREE, False)
    """For long rows: compute the MLPs in tiles of about hidden_size tokens (DeepSpeed's TiledMLP), and
    recompute them in the backward pass."""
    compile: bool = False
    """Use torch.compile on GPUs: on the complete model under ZeRO-1 and 2, on each layer under ZeRO-3."""
    kernels: Literal["liger"] | None = mark(FREE, None)
    """Use Liger's kernels for RMSNorm, rotary embedding and gated product, on GPUs."""
    rope: RopeConfig | None = None
    """Change the rotary position embeddings of a pre-trained model, to extend its context."""
    neftune_noise_alpha: float = Field(0.0, ge=0)
    """Strength of the uniform noise that training adds to the input embeddings (NEFTune), usually 5 to 15."""
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
        if self.rope is not None and self.path is None:
            raise ValueError("rope changes a model in path. For a new one set architecture.rope_parameters")
        if self.rope is not None and self.exported != "merged":
            raise ValueError("rope needs lora.export=merged: an adapter is read with its base model's RoPE")
        return self
