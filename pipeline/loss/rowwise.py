"""Per-row mathematics of the loss: from a few numbers per token to its loss and the update of its row.

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

Reading a row of logits and writing its gradient is left to the kernels (`kernels_torch.py`,
`kernels_triton.py`); what lies between, a few numbers per token, is `solve`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.loss.objectives import Objective


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


def _ratio(a: Tensor, b: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """(a, b / a), with a zero moved just far enough that the quotient, and b / a * a, stay finite."""
    if b is None:
        return a, None
    least = (b.abs() * 1e-30).clamp(min=1e-30)
    a = torch.where(a.abs() < least, torch.copysign(least, a), a)
    return a, b / a


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


class RowPass(Protocol):
    """Some rows of logits: read once, then overwritten."""

    def statistics(self) -> Statistics: ...

    def write(self, update: RowUpdate) -> None: ...
