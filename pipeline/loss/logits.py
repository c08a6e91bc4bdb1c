"""The objectives from logits that exist already: for code that cannot hand over hidden states.

The gradient is made in forward, chunk by chunk, by the same kernels; it is the only other tensor of
the logits' size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from common.errors import UserError
from pipeline.loss.chunks import process_chunk, walk_over
from pipeline.loss.cost import CostEmbedding, LiveCost
from pipeline.loss.registry import Objective
from pipeline.loss.rowwise import Chunk, statistics_dtype
from pipeline.loss.spec import LossSums, Spec, Totals, check_inputs, make_spec


def logits_loss(
    logits: Tensor,
    labels: Tensor,
    objective: Objective,
    cost: CostEmbedding | LiveCost | None = None,
    *,
    stored: Tensor | None = None,
    **options: Any,
) -> LossSums:
    """Loss of `logits` [..., V] against `labels` [...]: logits[i] predicts labels[i], -100 leaves out.

    Options: label_smoothing, z_loss, memory_mb, kernels (see `fused.fused_linear_loss`). Soft cap and logit
    scale are part of the logits already.
    """
    for name in ("softcap", "logit_scale"):
        if name in options:
            raise UserError(f"{name} is part of the logits already; leave it out")
    spec = make_spec(objective.fixed(), cost, **options)
    V = logits.shape[-1]
    if logits.shape[:-1] != labels.shape:
        raise UserError(f"logits {list(logits.shape)} and labels {list(labels.shape)} do not fit")
    if isinstance(cost, LiveCost) or objective.dense:
        raise UserError("the live head and demd_dense need the fused head (fuse_head)")
    check_inputs(spec, labels.numel(), stored, V)
    gradient = torch.is_grad_enabled() and logits.requires_grad
    stored = None if stored is None else stored.reshape(-1)
    return LossSums(*_apply(logits.reshape(-1, V), labels.reshape(-1), spec, gradient, stored))


@torch.compiler.disable
def _apply(
    logits: Tensor, labels: Tensor, spec: Spec, gradient: bool, stored: Tensor | None
) -> tuple[Tensor, ...]:
    with torch.autocast(logits.device.type, enabled=False):  # it would round the costs' products
        return _LogitsLoss.apply(logits, labels, spec, gradient, stored)


class _LogitsLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, spec: Spec, gradient: bool, stored: Tensor | None
    ) -> tuple[Tensor, ...]:
        sums, ctx.d_logits, ctx.factor = _compute(logits, labels, spec, gradient, stored)
        ctx.mark_non_differentiable(*sums[1:])
        return tuple(sums)

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        if ctx.d_logits is None:
            raise RuntimeError("the loss was differentiated twice; run its forward pass again")
        d_logits, ctx.d_logits = ctx.d_logits, None
        factor = d_loss if ctx.factor is None else d_loss * ctx.factor
        return d_logits.mul_(factor), None, None, None, None


def _compute(
    logits: Tensor, labels: Tensor, spec: Spec, gradient: bool, stored: Tensor | None
) -> tuple[LossSums, Tensor | None, Tensor | None]:
    """The sums, d loss / d logits if `gradient`, and what that lacks as a factor."""
    V, stats = logits.shape[1], statistics_dtype(logits.dtype)
    assert not isinstance(spec.cost, LiveCost)
    total, order, n, triton, rows = walk_over(spec, spec.cost, labels, V, logits)
    d_logits = torch.zeros_like(logits) if gradient else None
    totals = Totals(spec, len(labels), logits)
    for start in range(0, total, n):
        stop = min(start + n, total)
        places, y = order.places[start:stop], order.labels[start:stop]
        z = logits[places]
        target = z.gather(1, y[:, None])[:, 0].to(stats)
        beside = None if stored is None else stored[places].to(stats)
        chunk = Chunk(start, y, target, None, None, beside)
        tokens = process_chunk(z, chunk, rows, spec.terms, gradient, triton)
        totals.add(tokens, places)
        if d_logits is not None:
            d_logits[places] = z.mul_(tokens.row[:, None].to(z.dtype))
    normaliser = totals.normaliser(training=gradient)
    return totals.finish(normaliser), d_logits, normaliser
