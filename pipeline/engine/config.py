"""The recipe keys of the optimizer and its learning rate."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field, model_validator

from emo.common.config.recipe import Section

Decay = Annotated[float, Field(ge=0, lt=1)]  # of a moving average


class OptimizerConfig(Section):
    """The keys of `train` for the optimizer and its learning rate."""

    optimizer: Literal["adamw", "muon"] = "adamw"
    """`muon` trains the matrices of the body with Muon, and embeddings, head, biases and norms with AdamW.
    The logged gradient norm is then the norm of the update."""
    learning_rate: float = Field(2e-5, gt=0, le=1e6)
    """Peak learning rate of AdamW."""
    muon_lr: float | None = Field(None, gt=0, le=1e6)
    """Peak learning rate of Muon, usually about 0.02. Its schedule is the same."""
    head_lr_ratio: float = Field(1.0, ge=0, le=1e3)
    """Learning rate of the output head over the rate of other weights. 0 freezes the head. A tied embedding
    belongs to the head."""
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
    """Largest gradient norm. 0 disables clipping."""

    @model_validator(mode="after")
    def _muon(self) -> OptimizerConfig:
        if (self.optimizer == "muon") != (self.muon_lr is not None):
            raise ValueError("set muon_lr (for example 0.02) if optimizer is muon, and only then")
        if self.optimizer == "muon" and self.max_grad_norm:
            raise ValueError("optimizer muon needs max_grad_norm 0, because its update would be clipped")
        return self


def lr_at(train: OptimizerConfig, step: int, steps: int) -> float:
    """Return the learning rate of `step` (from 0) of `steps`.

    A linear warm-up is followed by the schedule down to 0. The first step has a rate above 0: the rates are
    those of transformers' schedules, one step earlier.
    """
    warmup = math.ceil(train.warmup_ratio * steps)
    if step < warmup:
        return train.learning_rate * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    if train.lr_scheduler_type == "cosine":
        return train.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))
    if train.lr_scheduler_type == "linear":
        return train.learning_rate * (1 - progress)
    return train.learning_rate
