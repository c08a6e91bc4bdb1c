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
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.cost_rows import Costs, Rows
from pipeline.objectives import Objective

L2_BYTES = 512 * 1024  # rows of one pass; half of a typical L2 cache
GROUP_BYTES = 2 * 1024 * 1024  # rows that share one round of per-token scalars


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


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32 whatever the model's dtype, except float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


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
    """Tokens handled together: all of the chunk's, on a CPU only as many as stay in the cache."""
    if device.type != "cpu":
        return most
    return min(most, max(1, GROUP_BYTES // (vocab_size * statistics_dtype(dtype).itemsize)))


def process_chunk(logits: Tensor, chunk: Chunk, costs: Rows | None, terms: Terms, gradient: bool) -> Tokens:
    """Losses of a chunk of logits [n, V]; with `gradient`, overwrite the logits by G."""
    n, V = logits.shape
    dtype = statistics_dtype(logits.dtype)
    step = group_size(V, logits.dtype, logits.device, n)
    scratch = None
    if logits.dtype != dtype:
        scratch = torch.empty(step, V, dtype=dtype, device=logits.device)
    parts = []
    for start in range(0, n, step):
        stop = min(start + step, n)
        block = logits[start:stop]
        wide = block if scratch is None else scratch[: stop - start]
        group = _Group(wide, block, chunk.rows(start, stop), terms)
        rows = None if costs is None else costs.group(chunk.start + start, chunk.start + stop)
        parts.append(group.run(rows, gradient))
    return Tokens(*(torch.cat(column) for column in zip(*parts, strict=True)))


class _Group:
    """A few rows that fit in the cache: z in, G out."""

    def __init__(self, z: Tensor, logits: Tensor, chunk: Chunk, terms: Terms) -> None:
        self.z = z  # [k, V] statistics' dtype; `logits` itself where that has the same dtype
        self.logits = logits  # [k, V] model dtype: read once, written once
        self.y = chunk.labels[:, None]
        self.terms = terms
        V, on_cpu = z.shape[1], z.device.type == "cpu"
        self.step = max(1, L2_BYTES // (V * z.element_size())) if on_cpu else len(z)
        self.row_loop = on_cpu and V >= 4096  # below, Python would cost more than it saves
        self.slope: Tensor | None = None  # d capped / d uncapped logit
        self._load(chunk)

    def _load(self, chunk: Chunk) -> None:
        """Bring the logits to float32, complete them and take the target's own out."""
        target_logit, shift, bias = chunk.target_logit, chunk.shift, chunk.bias
        terms, z = self.terms, self.z
        if z is not self.logits:
            z.copy_(self.logits)
        if bias is not None:
            z.add_(bias)
        zero = torch.zeros_like(target_logit)
        self.offset = zero if shift is None else shift.to(z.dtype)  # true logit - z
        if terms.softcap is not None:
            z.add_(self.offset[:, None]).scatter_(1, self.y, target_logit[:, None])
            self.offset = zero
            z.div_(terms.softcap).tanh_()
            self.slope = 1 - z.square()
            z.mul_(terms.softcap)
            self.z_y = z.gather(1, self.y)[:, 0]
        else:
            self.z_y = target_logit - self.offset
        if terms.label_smoothing:
            z.scatter_(1, self.y, self.z_y[:, None])
            self.z_mean = z.mean(1)
        # low enough to have no weight, yet finite: a vocabulary of one token stays defined
        z.scatter_(1, self.y, torch.finfo(z.dtype).min / 2)

    def run(self, costs: Costs | None, gradient: bool) -> Tokens:
        """Softmax without the target, the token's scalars, and the gradient row."""
        peak, top = [], []
        for start in range(0, len(self.z), self.step):
            part = self.z[start : start + self.step]
            peak.append(part.amax(1))
            torch.softmax(part, 1, out=part)
            top.append(part.amax(1))
        peak_z, p_max = torch.cat(peak), torch.cat(top)
        gap = peak_z - p_max.log() - self.z_y
        d_rest = torch.zeros_like(gap) if costs is None else self._dot(costs)

        others, m = torch.sigmoid(gap), F.softplus(gap)
        D = others * d_rest
        loss, A, B, _, omega = self.terms.objective.coefficients(m, D, torch.sigmoid(-gap))
        tokens = self._complete(loss, m, D)
        if not gradient:
            return tokens
        smoothing, z_loss = self.terms.label_smoothing, self.terms.z_loss
        if not (smoothing or z_loss or self.slope is not None or self.logits.dtype == torch.float16):
            A, beta = _ratio(A, B)
            self._scale_by_cost(costs, beta)
            target = -torch.ones_like(m) if beta is None else -(1 + beta * d_rest)
            self._store(target)
            return tokens._replace(row=omega * A * others)

        omega = omega * (1 - smoothing)
        extra = smoothing + 2 * z_loss * (self.z_y + self.offset + m)  # times p, every i
        uniform = smoothing / self.z.shape[1]
        target = -omega * others * A
        if B is not None:
            target = target - omega * B * D
        target = target + extra * torch.sigmoid(-gap) - uniform
        a, beta = _ratio(omega * A + extra, None if B is None else omega * B)
        self._scale_by_cost(costs, beta)
        self.z.mul_((a * others)[:, None])
        if uniform:
            self.z.sub_(uniform)
        self._store(target)
        return tokens._replace(row=torch.ones_like(m))

    def _complete(self, loss: Tensor, m: Tensor, D: Tensor) -> Tokens:
        """The token's loss with smoothing and z-loss added."""
        terms = self.terms
        lse = self.z_y + m
        if terms.label_smoothing:
            spread = terms.label_smoothing * (lse - self.z_mean)
            loss = (1 - terms.label_smoothing) * loss + spread
        if terms.z_loss:
            loss = loss + terms.z_loss * (lse + self.offset).square()
        return Tokens(loss, m, D, loss)

    def _dot(self, costs: Costs) -> Tensor:
        """D' [k]: each row of p' with its cost row."""
        if not self.row_loop:
            return torch.linalg.vecdot(self.z, costs.rows[costs.which])
        pairs = zip(self.z.unbind(), costs.which.tolist(), strict=True)
        return torch.stack([p.dot(costs.rows[i]) for p, i in pairs])

    def _scale_by_cost(self, costs: Costs | None, beta: Tensor | None) -> None:
        """p' <- p' (1 + beta c)."""
        if costs is None or beta is None:
            return
        if not self.row_loop:
            self.z.mul_(costs.rows[costs.which].mul_(beta[:, None]).add_(1))
            return
        each = zip(self.z.unbind(), costs.which.tolist(), beta.tolist(), strict=True)
        for p, i, b in each:
            p.addcmul_(p, costs.rows[i], value=b)

    def _store(self, target: Tensor) -> None:
        """Put the target's entry in and write the block back in the model's dtype."""
        self.z.scatter_(1, self.y, target[:, None])
        if self.slope is not None:
            self.z.mul_(self.slope)
        if self.z is not self.logits:
            self.logits.copy_(self.z)


def _ratio(a: Tensor, b: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """(a, b / a) with a moved off zero by a relative rounding error of b where the two differ that far."""
    if b is None:
        return a, None
    least = b.abs() * torch.finfo(a.dtype).eps
    least = least.clamp(min=torch.finfo(a.dtype).tiny)
    a = torch.where(a.abs() < least, torch.copysign(least, a), a)
    return a, b / a
