"""The recipe keys of the optimizer."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from .schedule import ScheduleConfig

Decay = Annotated[float, Field(ge=0, lt=1)]  # of a moving average


class OptimizerConfig(ScheduleConfig):
    """The keys of `train` for the optimizer."""

    optimizer: Literal["adamw", "adamw_8bit", "paged_adamw_8bit", "muon"] = "adamw"
    """`adamw_8bit` stores AdamW's averages in 8 bits, and `paged_adamw_8bit` also moves them to host memory
    if the GPU is full. `muon` trains the matrices of the layers with Muon, and all other weights with
    AdamW."""
    state_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the optimizer's weights, accumulated gradients and AdamW's averages. With `bfloat16` a
    parameter takes 10 instead of 18 bytes, but updates of less than 0.2 % of a weight are lost. It needs
    model.dtype bfloat16, optimizer adamw, and no offloading."""
    muon_lr: float | None = Field(None, gt=0, le=1e6)
    """Peak learning rate of Muon, usually about 0.02, with the same schedule."""
    head_lr_ratio: float = Field(1.0, ge=0, le=1e3)
    """Learning rate of the output head (and a tied embedding), divided by that of the other weights. 0
    freezes the head."""
    only: Literal["embeddings"] | None = None
    """`embeddings` trains only the token embeddings and the output head, for example after `emo
    extend-vocabulary`."""
    only_steps: int | None = Field(None, gt=0)
    """Number of steps, from the first, in which `only` applies. The default is all steps."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay of matrices and embeddings, not of norms and biases."""
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """AdamW's decay rates for the averages of the gradient and the squared gradient."""
    eps: float = Field(1e-8, gt=0)
    """AdamW's epsilon."""
    max_grad_norm: float = Field(1.0, ge=0)
    """Gradients with a larger norm are clipped. 0 disables clipping."""

    @model_validator(mode="after")
    def _check_optimizer(self) -> OptimizerConfig:
        if (self.optimizer == "muon") != (self.muon_lr is not None):
            raise ValueError("set muon_lr (for example 0.02) if optimizer is muon, and only then")
        if self.optimizer == "muon" and self.max_grad_norm:
            raise ValueError("optimizer muon needs max_grad_norm 0, because its update would be clipped")
        if self.state_dtype != "float32" and self.optimizer != "adamw":
            raise ValueError("state_dtype bfloat16 needs optimizer adamw")
        if self.only is not None and self.optimizer == "muon":
            raise ValueError("only needs optimizer adamw")
        if self.only is not None and self.head_lr_ratio == 0:
            raise ValueError("only trains the head, which head_lr_ratio=0 freezes. Set one of them")
        if self.only is None and self.only_steps is not None:
            raise ValueError("only_steps needs only, for example only=embeddings")
        return self
