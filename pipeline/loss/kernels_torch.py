"""Element-wise part of the fused loss: a chunk of logits becomes losses and its own gradient, in place.

One row z [V] with target y. Everything is computed from the *other* tokens, so that nothing cancels
when the target is predicted almost surely:

    p'_i = softmax of z without y         L' = log sum_{i != y} exp z_i        g = L' - z_y
    m    = softplus(g)                    p_y = sigmoid(-g)                    1 - p_y = sigmoid(g)
    D'   = sum_i p'_i c_i                 D   = (1 - p_y) D'

and the gradient row omega (p (A + B c) - K onehot) is written as r * G with r per token and

    G_i = p'_i (1 + beta c_i)   for i != y,      G_y = -(1 + beta D'),      beta = B / A,
    r   = omega A (1 - p_y),

because K = A + B D. The factor r then multiplies [n, H] matrices instead of [n, V] ones. Where z-loss,
label smoothing or soft-capping join in, the row is completed in place and r = 1.

Reading the row and writing it are device-specific (`_Group` here in PyTorch, `triton_kernels.py`); what
lies between, a few numbers per token, is `solve`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.loss.cost_rows import Costs, Rows
from pipeline.loss.objectives import Objective

L2_BYTES = 512 * 1024  # rows of one pass; half of a typical L2 cache
GROUP_BYTES = 2 * 1024 * 1024  # rows that share one round of per-token scalars
GROUP_TOKENS = 1024  # the same on an accelerator; bounds how many cost rows are alive


@dataclass(frozen=True)
class Terms:
    """What the loss of one token consists of."""

    objective: Objective
    softcap: float | None = None  # logits become cap * tanh(logits / cap)
    z_loss: float = 0.0  # weight of (log sum exp z)^2
    label_smoothing: float = 0.0  # share of the target's mass spread over the whole vocabulary


class Tokens(NamedTuple):
    """Per-token results of a chunk, each [n] in the statistics' dtype."""

    loss: Tensor
    nll: Tensor
    demd: Tensor
    row: Tensor  # r: what the rows of the gradient G still have to be multiplied with


class Statistics(NamedTuple):
    """What one pass over its row says about a token, each [n]."""

    gap: Tensor  # g = L' - z_y
    d_rest: Tensor  # D'; zeros without costs
    z_y: Tensor  # the target's logit, shifted and capped as the row is
    offset: Tensor  # true (capped) logit less z
    z_mean: Tensor | None  # mean of the row, for label smoothing


class RowUpdate(NamedTuple):
    """How p' becomes G:  G_i = scale p'_i (1 + beta c_i) - uniform  for i != y, and G_y = target."""

    beta: Tensor | None  # [n]; None: 0
    scale: Tensor | None  # [n]; None: 1
    uniform: float
    target: Tensor  # [n]


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32 whatever the model's dtype, except float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def solve(terms: Terms, stats: Statistics, vocab_size: int, in_full: bool) -> tuple[Tokens, RowUpdate]:
    """Losses of n tokens and the update of their rows.

    `in_full` asks for the whole gradient in G (r = 1): needed where the row is not merely scaled
    afterwards (soft cap), or where G must stay within a narrow range (float16).
    """
    gap, smoothing, z_loss = stats.gap, terms.label_smoothing, terms.z_loss
    others, p_y, m = torch.sigmoid(gap), torch.sigmoid(-gap), F.softplus(gap)
    D = others * stats.d_rest
    loss, A, B, _, omega = terms.objective.coefficients(m, D, p_y)
    if not (in_full or smoothing or z_loss):
        A, beta = _ratio(A, B)
        target = -torch.ones_like(m) if beta is None else -(1 + beta * stats.d_rest)
        return Tokens(loss, m, D, omega * A * others), RowUpdate(beta, None, 0.0, target)

    lse = stats.z_y + m
    if stats.z_mean is not None:
        loss = (1 - smoothing) * loss + smoothing * (lse - stats.z_mean)
    lse = lse + stats.offset
    loss = loss + z_loss * lse.square()
    omega = omega * (1 - smoothing)
    extra = smoothing + 2 * z_loss * lse  # times p_i, for every i
    uniform = smoothing / vocab_size
    target = extra * p_y - omega * others * A - uniform
    if B is not None:
        target = target - omega * B * D
    a, beta = _ratio(omega * A + extra, None if B is None else omega * B)
    update = RowUpdate(beta, a * others, uniform, target)
    return Tokens(loss, m, D, torch.ones_like(m)), update


class Chunk(NamedTuple):
    """What is known of a chunk of n tokens besides its logits; all on one device."""

    start: int  # place of its first token in the sorted batch
    labels: Tensor  # [n]
    target_logit: Tensor  # [n] true logit of the target, bias included, statistics' dtype
    shift: Tensor | None  # [n] what was subtracted from the row's logits; None: nothing
    bias: Tensor | None  # [V] not yet added to the logits

    def rows(self, start: int, stop: int) -> Chunk:
        """Tokens [start, stop) of it."""
        part = slice(start, stop)
        shift = None if self.shift is None else self.shift[part]
        target = self.target_logit[part]
        return Chunk(self.start + start, self.labels[part], target, shift, self.bias)


def group_size(vocab_size: int, dtype: torch.dtype, device: torch.device, most: int) -> int:
    """Tokens handled together: on a CPU as many as stay in the cache."""
    if device.type != "cpu":
        return min(most, GROUP_TOKENS)
    return min(most, max(1, GROUP_BYTES // (vocab_size * statistics_dtype(dtype).itemsize)))


def process_chunk(
    logits: Tensor, chunk: Chunk, costs: Rows | None, terms: Terms, gradient: bool, triton: bool
) -> Tokens:
    """Losses of a chunk of logits [n, V]; with `gradient`, overwrite the logits by G."""
    n, V = logits.shape
    dtype = statistics_dtype(logits.dtype)
    step = group_size(V, logits.dtype, logits.device, n)
    in_full = terms.softcap is not None or logits.dtype == torch.float16
    scratch = None
    if logits.dtype != dtype and not triton:
        scratch = torch.empty(step, V, dtype=dtype, device=logits.device)
    parts = []
    for start in range(0, n, step):
        stop = min(start + step, n)
        block, part = logits[start:stop], chunk.rows(start, stop)
        rows = None if costs is None else costs.group(chunk.start + start, chunk.start + stop)
        group: RowPass
        if triton:
            from pipeline.loss.kernels_triton import TritonGroup

            group = TritonGroup(block, part, rows, terms)
        else:
            wide = block if scratch is None else scratch[: stop - start]
            group = _Group(wide, block, part, rows, terms)
        tokens, update = solve(terms, group.statistics(), V, in_full)
        if gradient:
            group.write(update)
        parts.append(tokens)
    return Tokens(*(torch.cat(column) for column in zip(*parts, strict=True)))


class RowPass(Protocol):
    """Some rows of logits: read once, then overwritten."""

    def statistics(self) -> Statistics: ...

    def write(self, update: RowUpdate) -> None: ...


class _Group:
    """Rows in PyTorch; on a CPU a few that fit in the cache: z in, p' in between, G out."""

    def __init__(self, z: Tensor, logits: Tensor, chunk: Chunk, costs: Costs | None, terms: Terms) -> None:
        self.z = z  # [k, V] statistics' dtype; `logits` itself where that has the same dtype
        self.logits = logits  # [k, V] model dtype: read once, written once
        self.chunk, self.costs, self.terms = chunk, costs, terms
        self.y = chunk.labels[:, None]
        V, on_cpu = z.shape[1], z.device.type == "cpu"
        self.step = max(1, L2_BYTES // (V * z.element_size())) if on_cpu else len(z)
        self.row_loop = on_cpu and V >= 4096  # below, Python would cost more than it saves
        self.slope: Tensor | None = None  # d capped / d uncapped logit

    def _load(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Bring the logits to float32, complete them and take the target's own out."""
        target_logit, shift, bias = self.chunk.target_logit, self.chunk.shift, self.chunk.bias
        z, cap = self.z, self.terms.softcap
        if z is not self.logits:
            z.copy_(self.logits)
        if bias is not None:
            z.add_(bias)
        offset = torch.zeros_like(target_logit) if shift is None else shift.to(z.dtype)
        z_y = target_logit - offset
        if cap is not None:
            z.add_(offset[:, None]).scatter_(1, self.y, target_logit[:, None])
            z.div_(cap).tanh_()
            self.slope = 1 - z.square()
            z.mul_(cap)
            offset, z_y = torch.zeros_like(offset), z.gather(1, self.y)[:, 0]
        z_mean = None
        if self.terms.label_smoothing:
            z_mean = z.scatter_(1, self.y, z_y[:, None]).mean(1)
        # low enough to have no weight, yet finite: a vocabulary of one token stays defined
        z.scatter_(1, self.y, torch.finfo(z.dtype).min / 2)
        return z_y, offset, z_mean

    def statistics(self) -> Statistics:
        """Turn the rows into p', softmax without the target."""
        z_y, offset, z_mean = self._load()
        peak, top = [], []
        for start in range(0, len(self.z), self.step):
            part = self.z[start : start + self.step]
            peak.append(part.amax(1))
            torch.softmax(part, 1, out=part)
            top.append(part.amax(1))
        # the largest p' is exp(0) over the sum of exponentials
        gap = torch.cat(peak) - torch.cat(top).log() - z_y
        d_rest = torch.zeros_like(gap) if self.costs is None else self._dot(self.costs)
        return Statistics(gap, d_rest, z_y, offset, z_mean)

    def _dot(self, costs: Costs) -> Tensor:
        """D' [k]: each row of p' with its cost row."""
        if not self.row_loop:
            return torch.linalg.vecdot(self.z, costs.rows[costs.which])
        pairs = zip(self.z.unbind(), costs.which.tolist(), strict=True)
        return torch.stack([p.dot(costs.rows[i]) for p, i in pairs])

    def write(self, update: RowUpdate) -> None:
        """p' becomes G, in the model's dtype."""
        z = self.z
        if self.costs is not None and update.beta is not None:
            self._scale_by_cost(self.costs, update.beta)
        if update.scale is not None:
            z.mul_(update.scale[:, None])
        if update.uniform:
            z.sub_(update.uniform)
        z.scatter_(1, self.y, update.target[:, None])
        if self.slope is not None:
            z.mul_(self.slope)
        if z is not self.logits:
            self.logits.copy_(z)

    def _scale_by_cost(self, costs: Costs, beta: Tensor) -> None:
        """p' <- p' (1 + beta c)."""
        if not self.row_loop:
            self.z.mul_(costs.rows[costs.which].mul_(beta[:, None]).add_(1))
            return
        each = zip(self.z.unbind(), costs.which.tolist(), beta.tolist(), strict=True)
        for p, i, b in each:
            p.addcmul_(p, costs.rows[i], value=b)


def _ratio(a: Tensor, b: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """(a, b / a), with a zero moved just far enough that the quotient, and b / a * a, stay finite."""
    if b is None:
        return a, None
    least = (b.abs() * 1e-30).clamp(min=1e-30)
    a = torch.where(a.abs() < least, torch.copysign(least, a), a)
    return a, b / a
