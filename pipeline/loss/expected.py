"""An objective's gradient when the truth is known: the expectation over targets instead of one target.

For a truth P over V tokens and a model q = softmax(z), the expected gradient of an objective is

    g_i = sum_y P_y dL_y / dz_i = q_i sum_y P_y (A_y + B_y c_yi + C_y log q_i) - P_i K_i

with (A, B, C) as an objective gives them for target y and K = A + B D - C H. Weights inside an objective
are detached, so g is the gradient of no function, and training settles where g = 0, not where the expected
loss is least.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .objectives import Objective, Scalars

# The expected gradient [..., V] of models q [..., V] for targets drawn from distributions [..., V].
Gradient = Callable[[Tensor, Tensor], Tensor]


class Costs:
    """Transport costs c_ij = 1 - cos(e_i, e_j) of an embedding [..., V, H], as they act on a vector.

    Products take V H steps instead of V V. Without an embedding c_ij = 1 for i != j: no geometry, so that
    what is left of an objective is its reweighting.
    """

    def __init__(self, embedding: Tensor | None) -> None:
        self.rows = None if embedding is None else torch.nn.functional.normalize(embedding, dim=-1)
        # rows of zero length, whose cost to themselves is 0 and to all others 1
        lone = None if self.rows is None else (self.rows == 0).all(-1)
        self.lone = lone if lone is not None and lone.any() else None

    def apply(self, weights: Tensor) -> Tensor:
        """Return sum_j weights_j c_ji [..., V] for weights [..., V]."""
        similar = weights if self.rows is None else (weights @ self.rows) @ self.rows.mT
        if self.lone is not None:
            similar = similar + weights * self.lone
        return weights.sum(-1, keepdim=True) - similar

    def permuted(self, generator: torch.Generator) -> Costs:
        """Return the same costs between other tokens: geometry of the right size in the wrong places."""
        if self.rows is None:
            return self
        return Costs(self.rows[..., torch.randperm(self.rows.shape[-2], generator=generator), :])


def expected_gradient(q: Tensor, truth: Tensor, objective: Objective, costs: Costs) -> Tensor:
    """Return g [..., V] at the model q [..., V] for targets drawn from truth [..., V], all probabilities."""
    scale = objective.logit_scale
    if scale != 1.0:
        q = torch.softmax(scale * q.clamp_min(torch.finfo(q.dtype).tiny).log(), -1)
    m = -q.clamp_min(torch.finfo(q.dtype).tiny).log()
    compute = {
        "D": lambda: costs.apply(q).clamp_min(0),
        "H": lambda: (q * m).sum(-1, keepdim=True).expand_as(q),
        "S": lambda: q.square().sum(-1, keepdim=True).expand_as(q),
        "top": lambda: q.amax(-1, keepdim=True).expand_as(q),
    }
    scalars = Scalars(m, q, **{name: value() for name, value in compute.items() if name in objective.needs})
    weights = objective.coefficients(scalars)
    shared = (truth * weights.A).sum(-1, keepdim=True)
    K = weights.A
    if weights.B is not None:
        shared = shared + costs.apply(truth * weights.B)
        assert scalars.D is not None  # no objective has a transport part without it
        K = K + weights.B * scalars.D
    if weights.C is not None:
        shared = shared - m * (truth * weights.C).sum(-1, keepdim=True)
        assert scalars.H is not None
        K = K - weights.C * scalars.H
    return scale * (q * shared - truth * K)


def settle(
    truth: Tensor, gradient: Gradient, steps: int = 5000, tolerance: float = 1e-12
) -> tuple[Tensor, Tensor]:
    """Return q [..., n, V], where training on truths settles with unlimited data, and residuals [..., n].

    All float64. It is found by preconditioned descent from the truths, of which no entry counts for less than
    1e-30; a residual is the largest |g_i / q_i| that is left. An objective without a fixed point inside the
    simplex collapses towards a corner, where g vanishes with q and g / q does not: its residual stays above
    the tolerance, and q is where it was after `steps`.
    """
    truth = truth.clamp_min(1e-30)
    z = truth.log()
    rate = torch.full_like(z[..., :1], 0.5)
    least = torch.full_like(rate, torch.inf)
    for _ in range(steps):
        q = torch.softmax(z, -1)
        # of a Newton iteration whose Hessian is its diagonal
        step = gradient(q, truth) / q.clamp_min(torch.finfo(q.dtype).tiny)
        residual = step.abs().amax(-1, keepdim=True)
        if residual.max() < tolerance:
            break
        rate = torch.where(residual > 1.2 * least, 0.7 * rate, (1.02 * rate).clamp(max=1.0))
        least = torch.minimum(least, residual)
        z = torch.log_softmax(z - rate * step.clamp(-1, 1), -1)
    return q, residual[..., 0]
