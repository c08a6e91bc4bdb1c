"""The keys of a recipe that set the optimizer and its learning rate."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field, model_validator

from emo.common.config.recipe import Section

Decay = Annotated[float, Field(ge=0, lt=1)]  # of a moving average


class OptimizerConfig(Section):
    """The keys of `train` that set the optimizer and its learning rate."""

    optimizer: Literal["adamw", "muon"] = "adamw"
    """`muon` takes the matrices of the body and leaves embeddings, head, biases and norms to AdamW; the
    logged gradient norm is then that of the update."""
    learning_rate: float = Field(2e-5, gt=0, le=1e6)
    """Peak learning rate of AdamW."""
    muon_lr: float | None = Field(None, gt=0, le=1e6)
    """Peak learning rate of Muon, usually about 0.02; same schedule."""
    head_lr_ratio: float = Field(1.0, ge=0, le=1e3)
    """Learning rate of the output head over that of other weights; 0 leaves it as it is. A tied embedding is
    the head, too."""
    lr_scheduler_type: Literal["cosine", "linear", "constant"] = "cosine"
    """Decay of the learning rate after the warm-up."""
    warmup_ratio: float = Field(0.03, ge=0, lt=1)
    """Share of the steps over which the learning rate rises."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay."""
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """AdamW's averages of gradient and squared gradient."""
    eps: float = Field(1e-8, gt=0)
    """AdamW's epsilon."""
    max_grad_norm: float = Field(1.0, ge=0)
    """Largest gradient norm; 0 does not clip."""

    @model_validator(mode="after")
    def _muon(self) -> OptimizerConfig:
        if (self.optimizer == "muon") != (self.muon_lr is not None):
            raise ValueError("optimizer muon needs muon_lr (0.02 is usual), which adamw does not read")
        if self.optimizer == "muon" and self.max_grad_norm:
            raise ValueError("optimizer muon needs max_grad_norm 0: its update would be clipped")
        return self


def lr_at(train: OptimizerConfig, step: int, steps: int) -> float:
    """Return the learning rate of `step` (from 0) of `steps`: linear warm-up, then the schedule down to 0.

    The first step has a rate above 0, as in transformers' schedules shifted by one.
    """
    warmup = math.ceil(train.warmup_ratio * steps)
    if step < warmup:
        return train.learning_rate * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    if train.lr_scheduler_type == "cosine":
        return train.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))
    return (
        train.learning_rate * (1 - progress) if train.lr_scheduler_type == "linear" else train.learning_rate
    )
