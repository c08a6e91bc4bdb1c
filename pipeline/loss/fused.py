"""Output head and loss in one: hidden states and labels in, summed loss and gradients out.

The logits of all tokens never exist together. Tokens are taken in chunks; each chunk's logits become
the chunk's gradient in place (`chunks.py`) and are used up by two matrix products at once, in the
forward pass, so that nothing is computed twice. Between forward and backward only the gradients
[N, H] and [V, H] are held.

Tokens are sorted by label first (`token_plan.py`): a row of transport costs then serves all tokens with
that target.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from common.errors import UserError
from pipeline.loss.chunks import process_chunk, walk_over
from pipeline.loss.cost import CostEmbedding, LiveCost, unit_rows
from pipeline.loss.dense import Teacher, process_dense_chunk
from pipeline.loss.gradients import Accumulator, Gradients, Needs, scaled
from pipeline.loss.padding import padded_rows
from pipeline.loss.products import against_rows, widens
from pipeline.loss.registry import Objective
from pipeline.loss.rowwise import Chunk, Tokens, statistics_dtype
from pipeline.loss.spec import LossSums, Spec, Totals, check_inputs, make_spec
from pipeline.loss.token_plan import Labels, label_count


def _logits(
    h: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor, out: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(h W^T - shift, target logit with bias [n], shift [n] or None) for a chunk.

    In half precision the product is rounded to 8 bits, coarse for a logit of 30 and fine near 0. So the
    target's logit, computed in float32, is subtracted inside the product, before the rounding: logits
    that compete with the target keep their digits.
    """
    stats = statistics_dtype(h.dtype)
    z = out[: len(h)]
    if h.dtype == stats:
        torch.mm(h, weight.t(), out=z)
        target = z.gather(1, y[:, None])[:, 0]
        shift = None
    else:
        target = torch.linalg.vecdot(h.to(stats), weight[y].to(stats))
        shift = target.to(h.dtype)
        if widens(h):
            against_rows(h, weight, z, less=shift)
        else:
            z.copy_((-shift)[:, None].expand_as(z))
            z.addmm_(h, weight.t())
    if bias is not None:
        target = target + bias[y]
    return z, target, shift


class Pass(NamedTuple):
    """A chunk of tokens that has gone through the head."""

    places: Tensor  # [n] in the flat batch
    z: Tensor  # [n, V] the gradient rows G, or the logits as the kernels leave them
    tokens: Tokens


def _passes(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Labels,
    spec: Spec,
    gradient: bool,
    teacher: Teacher | None,
    stored: Tensor | None,
) -> Iterator[Pass]:
    """The chunks of a batch, one after the other in the same buffer."""
    V, device = len(weight), hidden.device
    stats = statistics_dtype(hidden.dtype)
    cost = spec.cost
    if isinstance(cost, LiveCost):
        cost = CostEmbedding(unit_rows(weight.detach(), checked=False))
    total, order, n, triton, rows = walk_over(spec, cost, labels, V, hidden)
    buffer = padded_rows(n if total else 0, V, hidden.dtype, device)
    wide_bias = None if bias is None else bias.to(stats)
    for start in range(0, total, n):
        stop = min(start + n, total)
        places, y = order.places[start:stop], order.labels[start:stop]
        h = hidden[places]
        if spec.logit_scale != 1.0:
            h.mul_(spec.logit_scale)
        z, target, shift = _logits(h, weight, wide_bias, y, buffer)
        beside = None if stored is None else stored[places].to(stats)
        chunk = Chunk(start, y, target, shift, wide_bias, beside)
        if teacher is not None and cost is not None:
            P = teacher.probabilities(places)
            tokens = process_dense_chunk(z, chunk, P, cost.placed(device, hidden.dtype), spec.terms, gradient)
        else:
            tokens = process_chunk(z, chunk, rows, spec.terms, gradient, triton)
        yield Pass(places, z, tokens)


def _compute(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Labels,
    spec: Spec,
    needs: Needs,
    teacher: Teacher | None,
    stored: Tensor | None,
) -> tuple[LossSums, Gradients, Tensor | None]:
    """The sums, the gradients of the loss sum that `needs` asks for, and what they lack of it as a factor."""
    gradients, totals = Accumulator(hidden, weight, needs), Totals(spec, label_count(labels), hidden)
    for places, z, tokens in _passes(hidden, weight, bias, labels, spec, any(needs), teacher, stored):
        totals.add(tokens, places)
        if any(needs):
            gradients.add(z, tokens.row, places, spec.logit_scale)
    normaliser = totals.normaliser(training=any(needs))
    return totals.finish(normaliser), gradients.finish(), normaliser


class _FusedLoss(torch.autograd.Function):
    """Gradients are made in forward and handed out, scaled, in backward: once."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Labels,
        spec: Spec,
        needs: Needs,
        teacher: Teacher | None,
        stored: Tensor | None,
    ) -> tuple[Tensor, ...]:
        sums, ctx.gradients, ctx.factor = _compute(hidden, weight, bias, labels, spec, needs, teacher, stored)
        ctx.dtypes = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        ctx.mark_non_differentiable(*sums[1:])
        return tuple(sums)

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError("the fused loss was differentiated twice; run its forward pass again")
        gradients, ctx.gradients = ctx.gradients, None  # free them as soon as autograd is done
        factor = d_loss if ctx.factor is None else d_loss * ctx.factor
        handed = (scaled(*pair, factor) for pair in zip(gradients, ctx.dtypes, strict=True))
        return (*handed, None, None, None, None, None)


def _check(hidden: Tensor, weight: Tensor, labels: Labels, spec: Spec, teacher: Teacher | None) -> None:
    V, N = len(weight), label_count(labels)
    if weight.dim() != 2 or weight.numel() == 0:
        raise UserError(
            f"fused loss: the head's weight has shape {list(weight.shape)}; under ZeRO-3 call the head "
            "module itself (fuse_head) or gather the weight around loss and backward"
        )
    if hidden.shape != (N, weight.shape[1]):
        raise UserError(
            f"fused loss: hidden {list(hidden.shape)}, labels [{N}] and head "
            f"{list(weight.shape)} do not fit; expected [N, H], [N], [V, H]"
        )
    if hidden.dtype != weight.dtype:
        raise UserError(f"fused loss: hidden is {hidden.dtype} but the head is {weight.dtype}")
    if spec.terms.objective.dense != (teacher is not None):
        raise UserError("objective demd_dense needs a teacher, and no other objective takes one")
    if teacher is not None and teacher.hidden.shape[:-1].numel() * len(teacher.weight) != N * V:
        raise UserError(
            f"teacher: hidden {list(teacher.hidden.shape)} and head {list(teacher.weight.shape)} do not "
            f"fit {N} tokens and {V} vocabulary entries"
        )


@torch.compiler.disable
def apply_fused(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Labels,
    spec: Spec,
    teacher: Teacher | None,
    stored: Tensor | None,
) -> LossSums:
    """The loss through a head of any module; hidden [..., H], labels and what is stored beside them [...].

    Labels may be anywhere, and may be planned already.
    """
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    hidden = hidden.reshape(-1, hidden.shape[-1])
    stored = None if stored is None else stored.reshape(-1)
    _check(hidden, weight, labels, spec, teacher)
    check_inputs(spec, label_count(labels), stored, len(weight))
    inputs = (hidden, weight, bias)
    recording = torch.is_grad_enabled()
    needs = tuple(recording and x is not None and x.requires_grad for x in inputs)
    with torch.autocast(hidden.device.type, enabled=False):  # it would round the costs' products
        return LossSums(*_FusedLoss.apply(hidden, weight, bias, labels, spec, needs, teacher, stored))


@torch.no_grad()
def token_nll(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, spec: Spec) -> Tensor:
    """-log p of every label, nats, like `labels` [...] in float32 (float64); 0 where a label is ignored."""
    flat = hidden.reshape(-1, hidden.shape[-1])
    _check(flat, weight, labels, spec, None)
    out = torch.zeros(labels.numel(), dtype=statistics_dtype(hidden.dtype), device=hidden.device)
    for places, _, tokens in _passes(flat, weight, bias, labels, spec, False, None, None):
        out[places] = tokens.nll
    return out.view(labels.shape)


def fused_linear_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Labels,
    objective: Objective,
    cost: CostEmbedding | LiveCost | None = None,
    *,
    bias: Tensor | None = None,
    teacher: Teacher | None = None,
    stored: Tensor | None = None,
    **options: Any,
) -> LossSums:
    """Loss of `hidden` [..., H] against `labels` [...] through the head `weight` [V, H] (+ `bias` [V]).

    labels[i] is the token that hidden[i] predicts (nothing is shifted); -100 leaves a token out. A plan made
    of them beforehand (`plan_tokens`) spares the device a wait.
    With a cost embedding DEMD is reported for every objective. `demd_dense` compares with the
    distribution of a `teacher` at the same positions; `psft` and `excess` read a log-probability of every
    label, `stored` [...]. Options, see `make_spec`:
        softcap          logits become cap * tanh(logits / cap)
        logit_scale      factor on h W^T, before the soft cap
        z_loss           weight of (log sum exp z)^2 per token
        label_smoothing  share e: (1 - e) * loss + e * mean_i(-log p_i), for every objective
        kernels          auto (Triton on a GPU that has it, else PyTorch) | torch | triton
        memory_mb        budget of a chunk's logits; by default 32 or 48 on a CPU, 512 elsewhere
    """
    spec = make_spec(objective.fixed(), cost, **options)
    return apply_fused(hidden, weight, bias, labels, spec, teacher, stored)
