"""What a fused loss computes, and what it gives back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from common.errors import UserError
from pipeline.loss.cost import CostEmbedding, LiveCost
from pipeline.loss.objectives import Objective
from pipeline.loss.rowwise import Terms


class LossSums(NamedTuple):
    """Sums over the valid tokens; divide by the global batch's token count for means."""

    loss: Tensor  # scalar float32, the only differentiable one
    nll: Tensor  # negative log-likelihood, nats; detached
    demd: Tensor  # earth mover distance; detached, NaN where no cost embedding was given
    tokens: Tensor  # int64 count


@dataclass(frozen=True)
class Spec:
    """Everything about the loss that is not a tensor of the model."""

    terms: Terms
    cost: CostEmbedding | LiveCost | None
    logit_scale: float = 1.0
    memory_mb: float | None = None
    kernels: str = "auto"


def make_spec(
    objective: Objective,
    cost: CostEmbedding | LiveCost | None,
    *,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    memory_mb: float | None = None,
    kernels: str = "auto",
) -> Spec:
    """Check the options and bundle them. Raises UserError naming the option that is off."""
    if softcap is not None and softcap <= 0:
        raise UserError(f"softcap must be above 0 (given: {softcap:g})")
    if z_loss < 0:
        raise UserError(f"z_loss must not be negative (given: {z_loss:g})")
    if not 0 <= label_smoothing < 1:
        raise UserError(f"label_smoothing must lie in [0, 1) (given: {label_smoothing:g})")
    if memory_mb is not None and memory_mb <= 0:
        raise UserError(f"memory_mb must be above 0 (given: {memory_mb:g})")
    if kernels not in ("auto", "torch", "triton"):
        raise UserError(f"kernels must be auto, torch or triton (given: {kernels})")
    terms = Terms(objective, softcap, z_loss, label_smoothing)
    return Spec(terms, cost, logit_scale, memory_mb, kernels)


def as_sums(sums: Tensor, dtype: torch.dtype, measured: bool, tokens: int) -> LossSums:
    """[loss, nll, demd] as LossSums; demd is NaN unless `measured`."""
    loss, nll, demd = sums.to(dtype).unbind()
    if not measured:
        demd = torch.full_like(nll, torch.nan)
    return LossSums(loss, nll, demd, torch.tensor(tokens, dtype=torch.int64, device=sums.device))
