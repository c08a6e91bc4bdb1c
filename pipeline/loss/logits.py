"""The objectives from logits that exist already: for code that cannot hand over hidden states.

The gradient is made in forward, chunk by chunk, by the same kernels; it is the only other tensor of
the logits' size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from emo.common.errors import UserError
from emo.pipeline.loss.cost import CostEmbedding, LiveCost
from emo.pipeline.loss.fused import LossSums, Spec, Totals, check_inputs, make_spec, process_chunk, walk_over
from emo.pipeline.loss.objectives import Objective
from emo.pipeline.loss.rows import Chunk, statistics_dtype


def logits_loss(
    logits: Tensor,
    labels: Tensor,
    objective: Objective,
    cost: CostEmbedding | LiveCost | None = None,
    *,
    stored: Tensor | None = None,
    **options: Any,
) -> LossSums:
    """Return the loss of `logits` [..., V] against `labels` [...], as sums over the valid tokens.

    Args:
        logits: [..., V], soft cap and scale applied; differentiable, once.
        labels: [...], int64: logits[i] predicts labels[i]; -100 leaves a token out.
        objective: from `get_objective` or `weighted_sum`.
        cost: transport costs of V tokens, for objectives that read D.
        stored: [...], a log-probability of every label in nats, for `psft` and `excess`.
        options: label_smoothing, z_loss, memory_mb and kernels, as in `fused_linear_loss`.

    Raises:
        UserError: for shapes or options that do not fit; for `demd_dense` and `LIVE`, which need the
            fused head.
    """
    for name in ("softcap", "logit_scale"):
        if name in options:
            raise UserError(f"{name} is part of the logits already; leave it out", code="options-clash")
    spec = make_spec(objective.fixed(), cost, **options)
    V = logits.shape[-1]
    if logits.shape[:-1] != labels.shape:
        raise UserError(
            f"logits {list(logits.shape)} and labels {list(labels.shape)} do not fit", code="shapes"
        )
    if isinstance(cost, LiveCost) or objective.dense:
        raise UserError("the live head and demd_dense need the fused head (fuse_head)", code="needs-head")
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
    """The loss with a gradient that is computed in forward and returned, scaled, in backward: once."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, spec: Spec, gradient: bool, stored: Tensor | None
    ) -> tuple[Tensor, ...]:
        V, stats = logits.shape[1], statistics_dtype(logits.dtype)
        assert not isinstance(spec.cost, LiveCost)
        total, order, size, triton, rows = walk_over(spec, spec.cost, labels, V, logits)
        ctx.d_logits = torch.zeros_like(logits) if gradient else None
        totals = Totals(spec, len(labels), logits)
        for start in range(0, total, size):
            stop = min(start + size, total)
            positions, y = order.positions[start:stop], order.labels[start:stop]
            z = logits[positions]
            target = z.gather(1, y[:, None])[:, 0].to(stats)
            column = None if stored is None else stored[positions].to(stats)
            tokens = process_chunk(
                z, Chunk(start, y, target, None, None, column), rows, spec.terms, gradient, triton
            )
            totals.add(tokens, positions)
            if gradient:
                ctx.d_logits[positions] = z.mul_(tokens.row[:, None].to(z.dtype))
        sums, ctx.factor = totals.finish(training=gradient)
        ctx.mark_non_differentiable(*sums[1:])
        return tuple(sums)

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        if ctx.d_logits is None:
            raise RuntimeError("the loss was differentiated twice; run its forward pass again")
        d_logits, ctx.d_logits = ctx.d_logits, None
        factor = d_loss if ctx.factor is None else d_loss * ctx.factor
        return d_logits.mul_(factor), None, None, None, None
