"""Output head and loss in one: hidden states and labels in, summed loss and gradients out.

The logits of all tokens never exist together. Tokens are taken in chunks; each chunk's logits become
the chunk's gradient in place (`kernels.py`) and are used up by two matrix products at once, in the
forward pass, so that nothing is computed twice. Between forward and backward only the gradients
[N, H] and [V, H] are held.

Tokens are sorted by label first: a row of transport costs then serves all tokens with that target.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from common.errors import UserError
from pipeline.loss.cost import CostEmbedding, LiveCost, unit_rows
from pipeline.loss.cost_rows import Rows, Targets, open_rows
from pipeline.loss.dense import Teacher, process_dense_chunk
from pipeline.loss.gradients import Accumulator, Gradients, Needs, scaled
from pipeline.loss.kernels_torch import Chunk, Terms, group_size, process_chunk, statistics_dtype
from pipeline.loss.objectives import Objective

IGNORE = -100
CHUNK_MB = 512  # of logits alive at a time, unless asked otherwise
CHUNK_MB_CPU = {2: 32, 4: 48, 8: 48}  # on a CPU, by the bytes of a logit


class LossSums(NamedTuple):
    """Sums over the valid tokens; divide by the global batch's token count for means."""

    loss: Tensor  # scalar float32, the only differentiable one
    nll: Tensor  # negative log-likelihood, nats; detached
    demd: Tensor  # earth mover distance; detached, NaN where no cost embedding was given
    tokens: Tensor  # int64 count


@dataclass(frozen=True)
class Spec:
    """Everything about the loss that is no tensor of the model."""

    terms: Terms
    cost: CostEmbedding | LiveCost | None
    logit_scale: float = 1.0
    memory_mb: float | None = None
    kernels: str = "auto"


def use_triton(spec: Spec, hidden: Tensor) -> bool:
    """Whether the element-wise part runs in Triton. Raises UserError where it was asked for in vain."""
    if spec.kernels == "torch" or hidden.dtype == torch.float64:
        return False
    installed = importlib.util.find_spec("triton") is not None
    if spec.kernels == "auto":
        return hidden.is_cuda and installed
    if not installed:
        raise UserError("kernels=triton, but triton is not installed; install it or set kernels=torch")
    if not (hidden.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"):
        raise UserError("kernels=triton needs a GPU (or TRITON_INTERPRET=1, for tests); set kernels=auto")
    return True


class Plan(NamedTuple):
    """The valid tokens, sorted by label where a cost embedding is used."""

    order: Tensor  # [T] positions in the flat batch
    labels: Tensor  # [T]
    targets: Targets | None


def plan_tokens(labels: Tensor, vocab_size: int, by_label: bool) -> Plan:
    order = (labels != IGNORE).nonzero()[:, 0]
    chosen = labels[order]
    if len(chosen):
        low, high = torch.stack(chosen.aminmax()).tolist()
        if low < 0 or high >= vocab_size:
            bad = low if low < 0 else high
            raise UserError(f"label {bad} lies outside the vocabulary of {vocab_size} tokens")
    if not by_label:
        return Plan(order, chosen, None)
    chosen, by = torch.sort(chosen, stable=True)
    ids, which = torch.unique_consecutive(chosen, return_inverse=True)
    return Plan(order[by], chosen, Targets(ids, which))


def chunk_rows(spec: Spec, logits: torch.dtype, vocab_size: int, device: torch.device) -> int:
    """Tokens per chunk that keep its logits within the memory budget."""
    budget = spec.memory_mb or (CHUNK_MB_CPU[logits.itemsize] if device.type == "cpu" else CHUNK_MB)
    matrices = 4 if spec.terms.objective.dense else 1  # the teacher's distribution and two temporaries
    return max(16, int(budget * 2**20) // (vocab_size * logits.itemsize * matrices))


class Walk(NamedTuple):
    """How a batch is gone through, whether its logits exist already or not."""

    plan: Plan
    size: int  # tokens per chunk
    triton: bool
    rows: Rows | None  # where a cost embedding is used with one target per token


def plan_walk(spec: Spec, cost: CostEmbedding | None, labels: Tensor, vocab_size: int, like: Tensor) -> Walk:
    """The walk over `labels`, whose logits will have the dtype and device of `like`."""
    dtype, device = like.dtype, like.device
    plan = plan_tokens(labels, vocab_size, by_label=cost is not None and not spec.terms.objective.dense)
    total = len(plan.order)
    size = min(chunk_rows(spec, dtype, vocab_size, device), max(total, 1))
    triton = use_triton(spec, like)
    rows: Rows | None = None
    if cost is not None and plan.targets is not None and total:
        group = group_size(vocab_size, dtype, device, size)
        placed = cost.placed(device, dtype)
        rows = open_rows(placed, plan.targets, statistics_dtype(dtype), group, size, as_stored=triton)
    return Walk(plan, size, triton, rows)


def as_sums(sums: Tensor, dtype: torch.dtype, measured: bool, tokens: int) -> LossSums:
    """[loss, nll, demd] as LossSums; demd is NaN unless `measured`."""
    loss, nll, demd = sums.to(dtype).unbind()
    if not measured:
        demd = torch.full_like(nll, torch.nan)
    return LossSums(loss, nll, demd, torch.tensor(tokens, dtype=torch.int64, device=sums.device))


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
        z.copy_((-shift)[:, None].expand_as(z))
        z.addmm_(h, weight.t())
    if bias is not None:
        target = target + bias[y]
    return z, target, shift


def _compute(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    spec: Spec,
    needs: Needs,
    teacher: Teacher | None,
) -> tuple[LossSums, Gradients]:
    """The sums, and the gradients of the loss sum that `needs` asks for."""
    V, device = len(weight), hidden.device
    stats = statistics_dtype(hidden.dtype)
    cost = spec.cost
    if isinstance(cost, LiveCost):
        cost = CostEmbedding(unit_rows(weight.detach()))
    plan, n, triton, rows = plan_walk(spec, cost, labels, V, hidden)
    total = len(plan.order)
    gradients = Accumulator(hidden, weight, needs)
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    buffer = torch.empty(n if total else 0, V, dtype=hidden.dtype, device=device)
    wide_bias = None if bias is None else bias.to(stats)
    for start in range(0, total, n):
        stop = min(start + n, total)
        order, y = plan.order[start:stop], plan.labels[start:stop]
        h = hidden[order]
        if spec.logit_scale != 1.0:
            h.mul_(spec.logit_scale)
        z, target, shift = _logits(h, weight, wide_bias, y, buffer)
        chunk = Chunk(start, y, target, shift, wide_bias)
        if teacher is not None and cost is not None:
            P = teacher.probabilities(order)
            placed = cost.placed(device, hidden.dtype)
            tokens = process_dense_chunk(z, chunk, P, placed, spec.terms, any(needs))
        else:
            tokens = process_chunk(z, chunk, rows, spec.terms, any(needs), triton)
        sums += torch.stack((tokens.loss.sum(), tokens.nll.sum(), tokens.demd.sum()))
        if any(needs):
            gradients.add(z, tokens.row, order, spec.logit_scale)
    return as_sums(sums, stats, cost is not None, total), gradients.finish()


class _FusedLoss(torch.autograd.Function):
    """Gradients are made in forward and handed out, scaled, in backward: once."""

    @staticmethod
    def forward(ctx: Any, hidden, weight, bias, labels, spec, needs, teacher):
        sums, ctx.gradients = _compute(hidden, weight, bias, labels, spec, needs, teacher)
        ctx.dtypes = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        ctx.mark_non_differentiable(*sums[1:])
        return tuple(sums)

    @staticmethod
    def backward(ctx: Any, d_loss, *_):
        if ctx.gradients is None:
            raise RuntimeError("the fused loss was differentiated twice; run its forward pass again")
        gradients, ctx.gradients = ctx.gradients, None  # free them as soon as autograd is done
        handed = (scaled(*pair, d_loss) for pair in zip(gradients, ctx.dtypes, strict=True))
        return (*handed, None, None, None, None)


def _check(hidden: Tensor, weight: Tensor, labels: Tensor, spec: Spec, teacher: Teacher | None) -> None:
    V = len(weight)
    if weight.dim() != 2 or weight.numel() == 0:
        raise UserError(
            f"fused loss: the head's weight has shape {list(weight.shape)}; under ZeRO-3 call the head "
            "module itself (fuse_head) or gather the weight around loss and backward"
        )
    if hidden.shape != (len(labels), weight.shape[1]):
        raise UserError(
            f"fused loss: hidden {list(hidden.shape)}, labels {list(labels.shape)} and head "
            f"{list(weight.shape)} do not fit; expected [N, H], [N], [V, H]"
        )
    if hidden.dtype != weight.dtype:
        raise UserError(f"fused loss: hidden is {hidden.dtype} but the head is {weight.dtype}")
    if spec.terms.objective.dense != (teacher is not None):
        raise UserError("objective demd_dense needs a teacher, and no other objective takes one")
    if teacher is not None and teacher.hidden.shape[:-1].numel() * len(teacher.weight) != len(labels) * V:
        raise UserError(
            f"teacher: hidden {list(teacher.hidden.shape)} and head {list(teacher.weight.shape)} do not "
            f"fit {len(labels)} tokens and {V} vocabulary entries"
        )
    if spec.cost is None and spec.terms.objective.needs_cost:
        raise UserError(f"objective {spec.terms.objective.name} needs a cost embedding")
    if isinstance(spec.cost, CostEmbedding) and spec.cost.vocab_size != V:
        raise UserError(
            f"the cost embedding has {spec.cost.vocab_size} rows but the head has {V}; "
            "both must share one vocabulary"
        )


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


@torch.compiler.disable
def _apply(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    spec: Spec,
    teacher: Teacher | None,
) -> LossSums:
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    hidden = hidden.reshape(-1, hidden.shape[-1])
    labels = labels.reshape(-1)
    _check(hidden, weight, labels, spec, teacher)
    inputs = (hidden, weight, bias)
    recording = torch.is_grad_enabled()
    needs = tuple(recording and x is not None and x.requires_grad for x in inputs)
    return LossSums(*_FusedLoss.apply(hidden, weight, bias, labels, spec, needs, teacher))


def fused_linear_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    objective: Objective,
    cost: CostEmbedding | LiveCost | None = None,
    *,
    bias: Tensor | None = None,
    teacher: Teacher | None = None,
    **options: Any,
) -> LossSums:
    """Loss of `hidden` [..., H] against `labels` [...] through the head `weight` [V, H] (+ `bias` [V]).

    labels[i] is the token that hidden[i] predicts (nothing is shifted); -100 leaves a token out.
    With a cost embedding DEMD is reported for every objective. `demd_dense` compares with the
    distribution of a `teacher` at the same positions. Options, see `make_spec`:
        softcap          logits become cap * tanh(logits / cap)
        logit_scale      factor on h W^T, before the soft cap
        z_loss           weight of (log sum exp z)^2 per token
        label_smoothing  share e: (1 - e) * loss + e * mean_i(-log p_i), for every objective
        kernels          auto (Triton on a GPU that has it, else PyTorch) | torch | triton
        memory_mb        budget of a chunk's logits; by default 32 or 48 on a CPU, 512 elsewhere
    """
    spec = make_spec(objective, cost, **options)
    return _apply(hidden, weight, bias, labels, spec, teacher)


class FusedHead(nn.Linear):
    """An output head that computes the loss itself when it is given labels.

    Made from an existing Linear by `fuse_head`. The weight is used inside the module's own forward, so
    everything that gathers parameters around modules (ZeRO-3, FSDP) treats it like any other.
    """

    spec: Spec

    def forward(  # type: ignore[override]
        self, hidden: Tensor, labels: Tensor | None = None, teacher: Teacher | None = None
    ) -> Tensor | LossSums:
        """Logits [..., V] of `hidden` [..., H], or the LossSums against `labels` [...]."""
        if labels is None:
            return super().forward(hidden)
        return _apply(hidden, self.weight, self.bias, labels, self.spec, teacher)


def fuse_head(
    head: nn.Linear, objective: Objective, cost: CostEmbedding | LiveCost | None = None, **options: Any
) -> None:
    """Turn `head` into a FusedHead in place; parameters and their names stay.

    `options` as in `fused_linear_loss`. Calling it again changes the objective.
    """
    if type(head) not in (nn.Linear, FusedHead):
        raise UserError(f"fuse_head needs a torch.nn.Linear (got {type(head).__name__})")
    head.__class__ = FusedHead
    head.spec = make_spec(objective, cost, **options)  # type: ignore[assignment]
