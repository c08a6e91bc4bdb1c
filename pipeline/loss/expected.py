"""An objective's expected gradient over targets that are drawn from a known distribution.

For a true distribution P over V tokens and a model q = softmax(z), the expected gradient of an objective is

    g_i = sum_y P_y dL_y / dz_i = q_i sum_y P_y (A_y + B_y c_yi + C_y log q_i) - P_i K_i

with the objective's (A, B, C) for target y and K = A + B D - C H. Weights inside an objective are detached,
so g is not the gradient of a function. Training settles at g = 0, which need not minimise the expected loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from .objectives import Objective, Scalars, top_entropy

# The expected gradient [..., V] of models q [..., V] for targets drawn from distributions [..., V].
Gradient = Callable[[Tensor, Tensor], Tensor]


class CostOperator:
    """The product of transport costs c_ij = 1 - cos(e_i, e_j) of an embedding [..., V, H] with vectors.

    A product takes V H steps instead of V V. Without an embedding c_ij = 1 for i != j: there is no geometry,
    and only the reweighting of an objective remains.
    """

    def __init__(self, embedding: Tensor | None) -> None:
        self.rows = None if embedding is None else torch.nn.functional.normalize(embedding, dim=-1)
        # rows of zero length, whose cost to themselves is 0 and to all others 1
        zero = None if self.rows is None else (self.rows == 0).all(-1)
        self.zero_rows = zero if zero is not None and zero.any() else None

    def apply(self, weights: Tensor) -> Tensor:
        """Return sum_j weights_j c_ji [..., V] for weights [..., V]."""
        similar = weights if self.rows is None else (weights @ self.rows) @ self.rows.mT
        if self.zero_rows is not None:
            similar = similar + weights * self.zero_rows
        return weights.sum(-1, keepdim=True) - similar

    def permuted(self, generator: torch.Generator) -> CostOperator:
        """Return the same costs between other tokens: a control for the geometry."""
        if self.rows is None:
            return self
        return CostOperator(self.rows[..., torch.randperm(self.rows.shape[-2], generator=generator), :])


def expected_gradient(q: Tensor, truth: Tensor, objective: Objective, costs: CostOperator) -> Tensor:
    """Return the expected gradient g [..., V] with respect to the logits z.

    Args:
        q: The model's probabilities [..., V].
        truth: The distribution of the targets [..., V].
        objective: Any objective without a teacher.
        costs: Transport costs between the V tokens. Smoothed targets need all V V of them.
    """
    if objective.smoothing is not None:
        between = costs.apply(torch.eye(q.shape[-1], dtype=q.dtype, device=q.device))
        k = objective.smoothing.kernel(between)
        smooth = truth @ (k / k.sum(-1, keepdim=True))
        truth = truth + objective.smoothing.weight * (smooth - truth)
    scale = objective.logit_scale
    tiny = torch.finfo(q.dtype).tiny
    if scale != 1.0:
        q = torch.softmax(scale * q.clamp_min(tiny).log(), -1)
    m = -q.clamp_min(tiny).log()
    compute = {
        "D": lambda: costs.apply(q).clamp_min(0),
        "H": lambda: (q * m).sum(-1, keepdim=True).expand_as(q),
        "S": lambda: q.square().sum(-1, keepdim=True).expand_as(q),
        "top": lambda: q.amax(-1, keepdim=True).expand_as(q),
        "H_top": lambda: top_entropy(-m)[..., None].expand_as(q),
        "H_max": lambda: torch.full_like(q, math.log(q.shape[-1])),
    }
    scalars = Scalars(m, q, **{name: value() for name, value in compute.items() if name in objective.needs})
    weights = objective.coefficients(scalars)
    shared = (truth * weights.A).sum(-1, keepdim=True)
    K = weights.A
    if weights.B is not None:
        shared = shared + costs.apply(truth * weights.B)
        assert scalars.D is not None  # every objective with a transport part needs it
        K = K + weights.B * scalars.D
    if weights.C is not None:
        shared = shared - m * (truth * weights.C).sum(-1, keepdim=True)
        assert scalars.H is not None
        K = K - weights.C * scalars.H
    return scale * (q * shared - truth * K)


def settle(
    truth: Tensor, gradient: Gradient, steps: int = 5000, tolerance: float = 1e-12
) -> tuple[Tensor, Tensor]:
    """Find where training settles with unlimited data; return q [..., n, V] and residuals [..., n], float64.

    The search is a preconditioned descent. A residual is the largest |g_i / q_i| at q. An objective without
    a fixed point inside the simplex collapses towards a corner, where g vanishes but g / q does not. Its
    residual stays above the tolerance, and q is the last iterate.

    Args:
        truth: Distributions of the targets [..., n, V], where the search starts; entries are at least 1e-30.
        gradient: Returns the expected gradient at q.
        steps: Largest number of iterations.
        tolerance: Residual at which the search ends.
    """
    truth = truth.clamp_min(1e-30)
    z = truth.log()
    rate = torch.full_like(z[..., :1], 0.5)
    smallest = torch.full_like(rate, torch.inf)
    for _ in range(steps):
        q = torch.softmax(z, -1)
        # a Newton step with the Hessian's diagonal
        step = gradient(q, truth) / q.clamp_min(torch.finfo(q.dtype).tiny)
        residual = step.abs().amax(-1, keepdim=True)
        if residual.max() < tolerance:
            break
        rate = torch.where(residual > 1.2 * smallest, 0.7 * rate, (1.02 * rate).clamp(max=1.0))
        smallest = torch.minimum(smallest, residual)
        z = torch.log_softmax(z - rate * step.clamp(-1, 1), -1)
    return q, residual[..., 0]
