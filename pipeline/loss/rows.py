"""Per-row mathematics of the loss: from a row of logits to its loss and gradient, and the passes in PyTorch.

One row z [V] with target y. Everything is computed from the *other* tokens, so that nothing cancels
when the target is predicted almost surely:

    p'_i = softmax of z without y         L' = log sum_{i != y} exp z_i        g = L' - z_y
    m    = softplus(g)                    p_y = sigmoid(-g)                    r_y = 1 - p_y = sigmoid(g)
    D'   = sum_i p'_i c_i                 D   = r_y D'
    H'   = -sum_i p'_i log p'_i           H   = r_y (H' - log r_y) + p_y m
    S'   = sum_i p'_i^2                   S   = r_y^2 S' + p_y^2

The gradient row p (A + B c + C log p) - K onehot is written as r * G with r per token and, since
log p_i = log p'_i + log r_y and K = A + B D - C H,

    G_i = p'_i (1 + beta c_i + kappa log p'_i)   for i != y,      G_y = -(1 + beta D' - kappa H'),
    a   = A + C log r_y,      beta = B / a,      kappa = C / a,      r = a r_y.

Where the objective takes the logits at a scale s, all this is of softmax(s z), and r is s times as much.
The factor r then multiplies [n, H] matrices instead of [n, V] ones. Where z-loss, label smoothing or
soft-capping join in, the row is completed in place and r = 1. `TorchRows`, or `TritonRows` of
`kernels_triton.py`, reads rows and writes their gradient; `solve` stands between, with numbers per token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .cost import Costs
from .objectives import Objective, Scalars


@dataclass(frozen=True)
class Terms:
    """The parts of one token's loss."""

    objective: Objective
    softcap: float | None = None  # logits become cap * tanh(logits / cap)
    z_loss: float = 0.0  # weight of (log sum exp z)^2
    label_smoothing: float = 0.0  # share of the target's mass spread over the whole vocabulary


class Tokens(NamedTuple):
    """Per-token results of a chunk, each [n] in the statistics' dtype."""

    loss: Tensor
    nll: Tensor
    demd: Tensor
    row: Tensor  # r: the factor that the rows of the gradient G lack
    weight: Tensor  # the objective's weight on the token
    divergence: Tensor | None = None  # from a teacher


class Statistics(NamedTuple):
    """The numbers of a token that one pass over its row gives, each [n]; primed ones leave the target out."""

    rest: Tensor  # L' of the row as it is
    d_rest: Tensor  # D'; zeros without costs
    target: Tensor  # the target's logit, capped as the row is
    offset: Tensor  # by which logits of the row are below the true (capped) ones
    z_mean: Tensor | None = None  # mean of the row, for label smoothing
    entropy: Tensor | None = None  # H'; from here on only where the objective asks for them
    squares: Tensor | None = None  # S'
    top: Tensor | None = None  # the largest p'
    plain: Tensor | None = None  # L' without the objective's scale, where it has one
    plain_d: Tensor | None = None  # D' of them


class RowUpdate(NamedTuple):
    """The update of a row from p' to G, each [n] but `uniform`.

    G_i = scale p'_i (1 + beta c_i + kappa log p'_i) - uniform,  i != y;      G_y = target
    """

    beta: Tensor | None  # [n]; None: 0
    kappa: Tensor | None  # [n]; None: 0
    scale: Tensor | None  # [n]; None: 1
    uniform: float
    target: Tensor  # [n]


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return float32 whatever the model's dtype, except float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def solve(
    terms: Terms, stats: Statistics, stored: Tensor | None, vocab_size: int, in_full: bool
) -> tuple[Tokens, RowUpdate]:
    """Return the losses of n tokens, with the column `stored` [n], and the update of their rows.

    `in_full` asks for the whole gradient in G (r = 1): needed where the row is not merely scaled
    afterwards (soft cap), or where G must stay within a narrow range (float16).
    """
    smoothing, z_loss, scale = terms.label_smoothing, terms.z_loss, terms.objective.logit_scale
    z_y = stats.target - stats.offset
    gap = stats.rest - scale * z_y
    others = torch.sigmoid(gap)
    p_y, m, D = torch.sigmoid(-gap), F.softplus(gap), others * stats.d_rest
    H = S = top = log_others = None
    if stats.entropy is not None:
        log_others = F.logsigmoid(gap)
        H = others * (stats.entropy - log_others) + p_y * m
    if stats.squares is not None:
        S = others.square() * stats.squares + p_y.square()
    if stats.top is not None:
        top = torch.maximum(others * stats.top, p_y)
    loss, A, B, C, weight = terms.objective.coefficients(Scalars(m, p_y, D, H, S, top, stored))
    weight = A if weight is None else weight
    nll, demd = m, D
    if stats.plain is not None and stats.plain_d is not None:
        plain_gap = stats.plain - z_y
        nll, demd = F.softplus(plain_gap), torch.sigmoid(plain_gap) * stats.plain_d
    common = A if C is None or log_others is None else A + C * log_others  # factor of every p'_i of the row
    if not (in_full or smoothing or z_loss):
        a, beta, kappa = _ratios(common, B, C)
        target = -torch.ones_like(m)
        if beta is not None:
            target = target - beta * stats.d_rest
        if kappa is not None and stats.entropy is not None:
            target = target + kappa * stats.entropy
        return Tokens(loss, nll, demd, scale * a * others, weight), RowUpdate(beta, kappa, None, 0.0, target)

    lse = z_y + m
    if stats.z_mean is not None:
        loss = (1 - smoothing) * loss + smoothing * (lse - stats.z_mean)
    lse = lse + stats.offset
    loss = loss + z_loss * lse.square()
    keep = 1 - smoothing
    extra = smoothing + 2 * z_loss * lse  # times p_i, for every i
    uniform = smoothing / vocab_size
    target = extra * p_y - keep * others * A - uniform
    if B is not None:
        target = target - keep * B * D
    if C is not None and stats.entropy is not None and log_others is not None:
        target = target + keep * C * others * (stats.entropy - log_others)
    a = keep * common + extra
    a, beta, kappa = _ratios(a, None if B is None else keep * B, None if C is None else keep * C)
    update = RowUpdate(beta, kappa, scale * a * others, uniform, scale * target)
    return Tokens(loss, nll, demd, torch.ones_like(m), weight), update


def _ratios(a: Tensor, b: Tensor | None, c: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return (a, b / a, c / a), a zero moved so far that the quotients, times a again, stay finite."""
    if b is None and c is None:
        return a, None, None
    size = torch.stack([x.abs() for x in (b, c) if x is not None]).amax(0)
    least = (size * 1e-30).clamp(min=1e-30)
    a = torch.where(a.abs() < least, torch.copysign(least, a), a)
    return a, None if b is None else b / a, None if c is None else c / a


class Chunk(NamedTuple):
    """A chunk of n tokens besides its logits; all on one device."""

    start: int  # index of its first token in the sorted batch
    labels: Tensor  # [n]
    target_logit: Tensor  # [n] true logit of the target, bias included, statistics' dtype
    offset: Tensor  # [n] already subtracted from the row's logits, statistics' dtype
    bias: Tensor | None  # [V] not yet added to the logits
    stored: Tensor | None = None  # [n] a column beside the tokens, statistics' dtype

    def rows(self, start: int, stop: int) -> Chunk:
        """Return tokens [start, stop) of it."""
        part = slice(start, stop)
        stored = None if self.stored is None else self.stored[part]
        columns = (self.labels[part], self.target_logit[part], self.offset[part])
        return Chunk(self.start + start, *columns, self.bias, stored)


class TorchRows:
    """A group of rows in PyTorch, on a CPU few enough for the cache: z in, p' in between, G out."""

    def __init__(
        self, z: Tensor, logits: Tensor, chunk: Chunk, costs: Costs | None, terms: Terms, spare: Tensor | None
    ) -> None:
        self.z = z  # [k, V] statistics' dtype; `logits` itself where that has the same dtype
        self.logits = logits  # [k, V] model dtype: read once, written once
        self.chunk, self.costs, self.terms = chunk, costs, terms
        self.y = chunk.labels[:, None]
        V, on_cpu = z.shape[1], z.device.type == "cpu"
        l2_bytes = 512 * 1024  # rows of one pass; half of a typical L2 cache
        self.step = max(1, l2_bytes // (V * z.element_size())) if on_cpu else len(z)
        self.row_loop = on_cpu and V >= 4096  # below, Python would cost more than it saves
        self.slope: Tensor | None = None  # d capped / d uncapped logit
        self.p_log_p = spare  # [k, V] becomes p' log p', where the objective asks for the entropy

    def statistics(self) -> Statistics:
        """Return the statistics of the rows, and turn these into p', the softmax without the target."""
        # bring the logits to float32, complete them and take the target out
        target_logit, offset, bias = self.chunk.target_logit, self.chunk.offset, self.chunk.bias
        z, cap = self.z, self.terms.softcap
        if z is not self.logits:
            z.copy_(self.logits)
        if bias is not None:
            z.add_(bias)
        if cap is not None:
            z.add_(offset[:, None]).scatter_(1, self.y, target_logit[:, None])
            z.div_(cap).tanh_()
            self.slope = 1 - z.square()
            z.mul_(cap)
            target_logit, offset = z.gather(1, self.y)[:, 0], torch.zeros_like(offset)
        z_mean = None
        if self.terms.label_smoothing:
            z_mean = z.scatter_(1, self.y, (target_logit - offset)[:, None]).mean(1)
        # low enough to have no weight, yet finite: a vocabulary of one token stays defined
        z.scatter_(1, self.y, torch.finfo(z.dtype).min / 2)
        objective = self.terms.objective
        scale = objective.logit_scale
        lse, top, plain, plain_d, entropy = [], [], [], [], []
        for start in range(0, len(z), self.step):
            part = z[start : start + self.step]
            if scale != 1.0:
                plain.append(torch.logsumexp(part, 1))
                plain_d.append(self._dot(torch.softmax(part, 1), start))
                part.mul_(scale)
            peak = part.amax(1)
            spare = None if self.p_log_p is None else self.p_log_p[start : start + self.step].copy_(part)
            torch.softmax(part, 1, out=part)
            largest = part.amax(1)
            # the largest p' is exp(0) over the sum of exponentials
            lse.append(peak - largest.log())
            top.append(largest)
            if spare is not None:
                spare.sub_(lse[-1][:, None]).mul_(part)
                entropy.append(-spare.sum(1))
        return Statistics(
            torch.cat(lse),
            self._dot(z, 0),
            target_logit,
            offset,
            z_mean,
            entropy=torch.cat(entropy) if entropy else None,
            squares=torch.linalg.vecdot(z, z) if "S" in objective.needs else None,
            top=torch.cat(top) if "top" in objective.needs else None,
            plain=torch.cat(plain) if plain else None,
            plain_d=torch.cat(plain_d) if plain_d else None,
        )

    def _dot(self, p: Tensor, start: int) -> Tensor:
        """Return sum_i p_i c_i of rows of probabilities [n, V], the `start`-th and following, [n]."""
        if self.costs is None:
            return p.new_zeros(len(p))
        which = self.costs.which[start : start + len(p)]
        if not self.row_loop:
            return torch.linalg.vecdot(p, self.costs.rows[which])
        pairs = zip(p.unbind(), which.tolist(), strict=True)
        return torch.stack([row.dot(self.costs.rows[i]) for row, i in pairs])

    def write(self, update: RowUpdate) -> None:
        """Overwrite p' by G, in the model's dtype."""
        z, costs, beta = self.z, self.costs, update.beta
        if costs is not None and beta is not None and not self.row_loop:
            z.mul_(costs.rows[costs.which].mul_(beta[:, None]).add_(1))
        elif costs is not None and beta is not None:
            for p, i, b in zip(z.unbind(), costs.which.tolist(), beta.tolist(), strict=True):
                p.addcmul_(p, costs.rows[i], value=b)
        if update.kappa is not None and self.p_log_p is not None:
            z.addcmul_(self.p_log_p, update.kappa[:, None])
        if update.scale is not None:
            z.mul_(update.scale[:, None])
        if update.uniform:
            z.sub_(update.uniform)
        z.scatter_(1, self.y, update.target[:, None])
        if self.slope is not None:
            z.mul_(self.slope)
        if z is not self.logits:
            self.logits.copy_(z)
