"""Per-row mathematics of the loss: from a row of logits to its loss and gradient, and the passes in PyTorch.

Notation for one row z [V] with target y. Everything is computed from the other tokens, so that nothing
cancels if the target is predicted almost with certainty:

    p'_i = softmax of z without y         L' = log sum_{i != y} exp z_i        g = L' - z_y
    m    = softplus(g)                    p_y = sigmoid(-g)                    r_y = 1 - p_y = sigmoid(g)
    D'   = sum_i p'_i c_i                 D   = r_y D'
    H'   = -sum_i p'_i log p'_i           H   = r_y (H' - log r_y) + p_y m
    S'   = sum_i p'_i^2                   S   = r_y^2 S' + p_y^2

The gradient row p (A + B c + C log p) - K onehot is written as r * G with r per token and, since
log p_i = log p'_i + log r_y and K = A + B D - C H,

    G_i = p'_i (1 + beta c_i + kappa log p'_i)   for i != y,      G_y = -(1 + beta D' - kappa H'),
    a   = A + C log r_y,      beta = B / a,      kappa = C / a,      r = a r_y.

If the objective has a logit scale s, all this applies to softmax(s z), and r is multiplied by s. The factor r
multiplies [n, H] matrices instead of [n, V] ones. With z-loss, label smoothing or a soft cap, the row is
completed in place and r = 1. `TorchRows`, or `TritonRows` of `kernels/objectives.py`, reads rows and writes
their gradient. `solve` computes the numbers per token in between.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .cost import CostRows
from .objectives import LIKELIEST, Objective, Scalars, top_entropy

LEAST_LOG_P = -200.0  # below, p is 0 in float32. log p of a logit of -inf would make p log p NaN


@dataclass(frozen=True)
class Terms:
    """The parts of one token's loss."""

    objective: Objective
    softcap: float | None = None  # logits become cap * tanh(logits / cap)
    z_loss: float = 0.0  # weight of (log sum exp z)^2
    label_smoothing: float = 0.0  # share of the target's mass spread over the full vocabulary


class Tokens(NamedTuple):
    """Per-token results of a chunk, each [n] in the statistics' dtype."""

    loss: Tensor
    nll: Tensor
    demd: Tensor
    row: Tensor  # r: the factor that the rows of the gradient G lack
    weight: Tensor  # the objective's weight on the token
    divergence: Tensor | None = None  # from a teacher
    times: Tensor | None = None  # how many tokens each counts as; None: 1

    def repeated(self, times: Tensor) -> Tokens:
        """Return the results of tokens that count as `times` [n] tokens each."""
        sums = {name: getattr(self, name) * times for name in ("loss", "nll", "demd", "row")}
        divergence = None if self.divergence is None else self.divergence * times
        return self._replace(**sums, divergence=divergence, times=times)


class Statistics(NamedTuple):
    """The numbers of a token that one pass over its row gives, each [n]. Primed ones leave the target out."""

    lse: Tensor  # L' of the row as it is
    D: Tensor  # D'; zeros without costs
    target: Tensor  # the target's logit, capped if the row is
    offset: Tensor  # subtracted from the row's logits
    z_mean: Tensor | None = None  # mean of the row, for label smoothing
    H: Tensor | None = None  # H', if the objective needs it
    S: Tensor | None = None  # S', if the objective needs it
    top: Tensor | None = None  # the largest p', if the objective needs it
    likeliest: Tensor | None = (
        None  # [n, 20] largest logits, capped if the row is, if the objective needs them
    )
    kernel_sum: Tensor | None = None  # sum of the kernel of smoothed targets, if the objective smooths them
    kernel_z: Tensor | None = None  # sum of kernel times logit
    unscaled_lse: Tensor | None = None  # L' without the objective's logit scale, if it has one
    unscaled_d: Tensor | None = None  # D' without it


class RowUpdate(NamedTuple):
    """The update of a row from p' to G; tensors are [n].

    G_i = scale p'_i (1 + beta c_i + kappa log p'_i) - uniform - share k_i,  i != y;      G_y = target

    k is the kernel of smoothed targets.
    """

    beta: Tensor | None  # None: 0
    kappa: Tensor | None  # None: 0
    scale: Tensor | None  # None: 1
    uniform: float
    target: Tensor
    share: Tensor | None = None  # None: 0


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return float32 for every model dtype, except float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


class _Solution(NamedTuple):
    """The numbers of a token that its loss and its gradient share, each [n]."""

    scalars: Scalars
    others: Tensor  # r_y
    log_others: Tensor | None  # log r_y, if H is known
    z_y: Tensor


def solve(
    terms: Terms, stats: Statistics, stored: Tensor | None, vocab_size: int, in_full: bool
) -> tuple[Tokens, RowUpdate]:
    """Compute the losses of n tokens, with `stored` [n], and the update of their rows from their statistics.

    `in_full` puts the full gradient into G (r = 1). This is needed if the row is transformed afterwards (soft
    cap), or if G must stay within a narrow range (float16).
    """
    scale = terms.objective.logit_scale
    solution = _solve_scalars(stats, stored, terms.objective, vocab_size)
    m = solution.scalars.m
    D = solution.scalars.D
    others = solution.others
    assert D is not None  # `_solve_scalars` always sets it
    loss, A, B, C, weight = terms.objective.coefficients(solution.scalars)
    weight = A if weight is None else weight
    nll = m
    demd = D
    if stats.unscaled_lse is not None and stats.unscaled_d is not None:
        unscaled_gap = stats.unscaled_lse - solution.z_y
        nll = F.softplus(unscaled_gap)
        demd = torch.sigmoid(unscaled_gap) * stats.unscaled_d
    # the common factor of every p'_i in the row
    common = A if C is None or solution.log_others is None else A + C * solution.log_others
    if in_full or terms.label_smoothing or terms.z_loss or terms.objective.smoothing:
        loss, update = _complete(terms, stats, solution, (loss, A, B, C), common, vocab_size)
        return Tokens(loss, nll, demd, torch.ones_like(m), weight), update
    a, beta, kappa = _ratios(common, B, C)
    target = -torch.ones_like(m)
    if beta is not None:
        target = target - beta * stats.D
    if kappa is not None and stats.H is not None:
        target = target + kappa * stats.H
    return Tokens(loss, nll, demd, scale * a * others, weight), RowUpdate(beta, kappa, None, 0.0, target)


def _solve_scalars(
    stats: Statistics, stored: Tensor | None, objective: Objective, vocab_size: int
) -> _Solution:
    """Add the target to the statistics of the other tokens."""
    scale = objective.logit_scale
    z_y = stats.target - stats.offset
    gap = stats.lse - scale * z_y
    others = torch.sigmoid(gap)
    p_y = torch.sigmoid(-gap)
    m = F.softplus(gap)
    D = others * stats.D
    H = S = top = H_top = H_max = log_others = None
    if stats.H is not None:
        log_others = F.logsigmoid(gap)
        H = others * (stats.H - log_others) + p_y * m
    if stats.S is not None:
        S = others.square() * stats.S + p_y.square()
    if stats.top is not None:
        top = torch.maximum(others * stats.top, p_y)
    if stats.likeliest is not None:
        H_top = top_entropy(torch.cat([stats.likeliest, scale * z_y[:, None]], 1))
    if "H_max" in objective.needs:
        H_max = torch.full_like(m, math.log(vocab_size))
    scalars = Scalars(m, p_y, D, H, S, top, H_top, H_max, stored)
    return _Solution(scalars, others, log_others, z_y)


def _complete(
    terms: Terms,
    stats: Statistics,
    solution: _Solution,
    coefficients: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
    common: Tensor,
    vocab_size: int,
) -> tuple[Tensor, RowUpdate]:
    """Return losses and updates with label smoothing, z-loss and the row factors included."""
    scalars, others, log_others, z_y = solution
    m, p_y, D = scalars[:3]
    assert D is not None  # `_solve_scalars` always sets it
    loss, A, B, C = coefficients
    smoothing = terms.label_smoothing
    scale = terms.objective.logit_scale
    share = None
    if terms.objective.smoothing is not None and stats.kernel_sum is not None and stats.kernel_z is not None:
        total = 1 + stats.kernel_sum  # the target's kernel is 1
        weight = terms.objective.smoothing.weight
        loss = loss + weight * (z_y * stats.kernel_sum - stats.kernel_z) / total
        share = (1 - smoothing) * weight / total  # smoothed targets have a logit scale of 1
    lse = z_y + m
    if stats.z_mean is not None:
        loss = (1 - smoothing) * loss + smoothing * (lse - stats.z_mean)
    lse = lse + stats.offset
    loss = loss + terms.z_loss * lse.square()
    keep = 1 - smoothing
    extra = smoothing + 2 * terms.z_loss * lse  # times p_i, for every i
    uniform = smoothing / vocab_size
    target = extra * p_y - keep * others * A - uniform
    if B is not None:
        target = target - keep * B * D
    if C is not None and stats.H is not None and log_others is not None:
        target = target + keep * C * others * (stats.H - log_others)
    if share is not None and stats.kernel_sum is not None:
        target = target + share * stats.kernel_sum
    a, beta, kappa = _ratios(
        keep * common + extra, None if B is None else keep * B, None if C is None else keep * C
    )
    return loss, RowUpdate(beta, kappa, scale * a * others, uniform, scale * target, share)


def _ratios(a: Tensor, b: Tensor | None, c: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return (a, b / a, c / a). A zero in a is moved so far that the quotients, times a, stay finite."""
    if b is None and c is None:
        return a, None, None
    size = torch.stack([x.abs() for x in (b, c) if x is not None]).amax(0)
    smallest = (size * 1e-30).clamp(min=1e-30)
    a = torch.where(a.abs() < smallest, torch.copysign(smallest, a), a)
    return a, None if b is None else b / a, None if c is None else c / a


def largest_logits(z: Tensor) -> Tensor:
    """Return the 20 largest logits of each row of z [n, V], whose target has the lowest logit, [n, 20].

    There are V - 1 if V is smaller. They lie in the 20 blocks with the largest maxima, and only these blocks
    are sorted.
    """
    n, V = z.shape
    k = min(LIKELIEST, V - 1)
    block = 64
    if 2 * block * k > V:
        return z.topk(k).values
    blocks = z[:, : V - V % block].unflatten(1, (-1, block))
    best = blocks.amax(2).topk(k).indices
    found = blocks.gather(1, best[:, :, None].expand(n, k, block)).flatten(1)
    return torch.cat([found, z[:, V - V % block :]], 1).topk(k).values


class Chunk(NamedTuple):
    """A chunk of n tokens without its logits, on one device; numbers have the statistics' dtype."""

    start: int  # index of its first token in the sorted batch
    labels: Tensor  # [n]
    target_logit: Tensor  # [n] true logit of the target, bias included
    offset: Tensor  # [n] already subtracted from the row's logits
    bias: Tensor | None  # [V] not yet added to the logits
    stored: Tensor | None = None  # [n] log-probabilities of the labels

    def rows(self, start: int, stop: int) -> Chunk:
        """Return tokens [start, stop)."""
        part = slice(start, stop)
        stored = None if self.stored is None else self.stored[part]
        columns = (self.labels[part], self.target_logit[part], self.offset[part])
        return Chunk(self.start + start, *columns, self.bias, stored)


class TorchRows:
    """A group of rows in PyTorch, small enough for the cache of a CPU. z becomes p', and then G."""

    def __init__(
        self, z: Tensor, logits: Tensor, chunk: Chunk, costs: CostRows | None, terms: Terms,
        p_log_p: Tensor | None,
    ) -> None:  # fmt: skip
        self.z = z  # [k, V] statistics' dtype; `logits` itself if that has the same dtype
        self.logits = logits  # [k, V] model dtype: read once, written once
        self.chunk = chunk
        self.costs = costs
        self.terms = terms
        self.y = chunk.labels[:, None]
        V = z.shape[1]
        on_cpu = z.device.type == "cpu"
        l2_bytes = 512 * 1024  # rows of one pass: half of a typical L2 cache
        self.step = max(1, l2_bytes // (V * z.element_size())) if on_cpu else len(z)
        self.row_loop = on_cpu and V >= 4096  # for smaller V, Python would cost more than it saves
        self.slope: Tensor | None = None  # d capped / d uncapped logit
        self.kernel: Tensor | None = None  # [w, V] of smoothed targets, 0 at the target, by cost row
        self.p_log_p = p_log_p  # [k, V] becomes p' log p', if the objective needs the entropy

    def statistics(self) -> Statistics:
        """Return the statistics of the rows, and turn these into p', the softmax without the target."""
        z = self.z
        scale = self.terms.objective.logit_scale
        needs = self.terms.objective.needs
        target_logit, offset, z_mean = self._complete_logits()
        kernel_sum, kernel_z = self._apply_kernel()
        lse = []
        top = []
        unscaled = []
        unscaled_D = []
        entropy = []
        likeliest = []
        for start in range(0, len(z), self.step):
            part = z[start : start + self.step]
            if scale != 1.0:
                unscaled.append(torch.logsumexp(part, 1))
                unscaled_D.append(self._dot_costs(torch.softmax(part, 1), start))
                part.mul_(scale)
            if "H_top" in needs:
                likeliest.append(largest_logits(part))
            peak = part.amax(1)
            p_log_p = None if self.p_log_p is None else self.p_log_p[start : start + self.step].copy_(part)
            torch.softmax(part, 1, out=part)
            largest = part.amax(1)
            # the largest p' is exp(0) over the sum of exponentials
            lse.append(peak - largest.log())
            top.append(largest)
            if p_log_p is not None:
                p_log_p.sub_(lse[-1][:, None]).clamp_(min=LEAST_LOG_P).mul_(part)  # 0, not -inf * 0
                entropy.append(-p_log_p.sum(1))
        return Statistics(
            torch.cat(lse),
            self._dot_costs(z, 0),
            target_logit,
            offset,
            z_mean,
            H=torch.cat(entropy) if entropy else None,
            S=torch.linalg.vecdot(z, z) if "S" in needs else None,
            top=torch.cat(top) if "top" in needs else None,
            likeliest=torch.cat(likeliest) if likeliest else None,
            kernel_sum=kernel_sum,
            kernel_z=kernel_z,
            unscaled_lse=torch.cat(unscaled) if unscaled else None,
            unscaled_d=torch.cat(unscaled_D) if unscaled_D else None,
        )

    def _complete_logits(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Convert and complete the logits in z without the target; return its logit, the offset, the mean."""
        target_logit = self.chunk.target_logit
        offset = self.chunk.offset
        bias = self.chunk.bias
        z = self.z
        cap = self.terms.softcap
        if z is not self.logits:
            z.copy_(self.logits)
        if bias is not None:
            z.add_(bias)
        if cap is not None:
            z.add_(offset[:, None]).scatter_(1, self.y, target_logit[:, None])
            z.div_(cap).tanh_()
            self.slope = 1 - z.square()
            z.mul_(cap)
            target_logit = z.gather(1, self.y)[:, 0]
            offset = torch.zeros_like(offset)
        z_mean = None
        if self.terms.label_smoothing:
            z_mean = z.scatter_(1, self.y, (target_logit - offset)[:, None]).mean(1)
        # low enough to have no weight, yet finite: a vocabulary of one token stays defined
        z.scatter_(1, self.y, torch.finfo(z.dtype).min / 2)
        return target_logit, offset, z_mean

    def _apply_kernel(self) -> tuple[Tensor | None, Tensor | None]:
        """Set the kernel of smoothed targets. Return its sum and its sum times the logits, each [k]."""
        smoothing = self.terms.objective.smoothing
        if smoothing is None or self.costs is None:
            return None, None
        index = self.costs.row_index
        self.kernel = smoothing.kernel(self.costs.rows)
        self.kernel[index, self.chunk.labels] = 0
        return self.kernel.sum(1)[index], self._dot_rows(self.z, self.kernel, index)

    def _dot_costs(self, p: Tensor, start: int) -> Tensor:
        """Return sum_i p_i c_i for probabilities p [n, V] of the rows from `start`, [n]."""
        if self.costs is None:
            return p.new_zeros(len(p))
        return self._dot_rows(p, self.costs.rows, self.costs.row_index[start : start + len(p)])

    def _dot_rows(self, p: Tensor, rows: Tensor, index: Tensor) -> Tensor:
        """Return the products [n] of p [n, V] with the rows [w, V] at `index` [n]."""
        if not self.row_loop:
            return torch.linalg.vecdot(p, rows[index])
        pairs = zip(p.unbind(), index.tolist(), strict=True)
        return torch.stack([row.dot(rows[i]) for row, i in pairs])

    def _subtract_kernel(self, kernel: Tensor, index: Tensor, share: Tensor) -> None:
        """Subtract `share` [k] times the kernel of smoothed targets from the rows."""
        if not self.row_loop:
            self.z.sub_(kernel[index].mul_(share[:, None]))
            return
        for p, i, factor in zip(self.z.unbind(), index.tolist(), share.tolist(), strict=True):
            p.sub_(kernel[i], alpha=factor)

    def write(self, update: RowUpdate) -> None:
        """Overwrite p' by G, in the model's dtype."""
        z = self.z
        costs = self.costs
        beta = update.beta
        if costs is not None and beta is not None and not self.row_loop:
            z.mul_(costs.rows[costs.row_index].mul_(beta[:, None]).add_(1))
        elif costs is not None and beta is not None:
            for p, i, b in zip(z.unbind(), costs.row_index.tolist(), beta.tolist(), strict=True):
                p.addcmul_(p, costs.rows[i], value=b)
        if update.kappa is not None and self.p_log_p is not None:
            z.addcmul_(self.p_log_p, update.kappa[:, None])
        if update.scale is not None:
            z.mul_(update.scale[:, None])
        if update.uniform:
            z.sub_(update.uniform)
        if costs is not None and update.share is not None and self.kernel is not None:
            self._subtract_kernel(self.kernel, costs.row_index, update.share)
        z.scatter_(1, self.y, update.target[:, None])
        if self.slope is not None:
            z.mul_(self.slope)
        if z is not self.logits:
            self.logits.copy_(z)
