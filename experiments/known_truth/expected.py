"""An objective's gradient when the truth is known: the expectation over targets instead of one target.

For a truth P over V tokens and a model q = softmax(z), the expected gradient of an objective is

    g_i = sum_y P_y dL_y / dz_i = q_i sum_y P_y (A_y + B_y c_yi + C_y log q_i) - P_i K_i

with (A, B, C) as `emo.loss` gives them for target y and K = A + B D - C H. Weights inside an objective
are detached, so g is the gradient of no function, and training settles where g = 0, not where the expected
loss is least.
"""

from __future__ import annotations

import torch
from torch import Tensor

from emo.pipeline.loss import Objective, Scalars


class Costs:
    """Transport costs c_ij = 1 - cos(e_i, e_j) of an embedding [..., V, H], as they act on a vector.

    Products take V H steps instead of V V. An identity matrix as the embedding makes c_ij = 1 for i != j: no
    geometry, so that what is left of an objective is its reweighting.
    """

    def __init__(self, embedding: Tensor) -> None:
        self.rows = torch.nn.functional.normalize(embedding, dim=-1)

    def apply(self, weights: Tensor) -> Tensor:
        """Return sum_j weights_j c_ji [..., V] for weights [..., V]."""
        return weights.sum(-1, keepdim=True) - (weights @ self.rows) @ self.rows.mT

    def permuted(self, generator: torch.Generator) -> Costs:
        """Return the same costs between other tokens: geometry of the right size in the wrong places."""
        return Costs(self.rows[..., torch.randperm(self.rows.shape[-2], generator=generator), :])


def expected_gradient(q: Tensor, truth: Tensor, objective: Objective, costs: Costs) -> Tensor:
    """Return g [..., V] at the model q [..., V] for targets drawn from truth [..., V], all probabilities."""
    scale = objective.logit_scale
    if scale != 1.0:
        q = torch.softmax(scale * q.clamp_min(torch.finfo(q.dtype).tiny).log(), -1)
    m = -q.clamp_min(torch.finfo(q.dtype).tiny).log()
    D, H = costs.apply(q).clamp_min(0), (q * m).sum(-1, keepdim=True).expand_as(q)
    S, top = q.square().sum(-1, keepdim=True).expand_as(q), q.amax(-1, keepdim=True).expand_as(q)
    weights = objective.coefficients(Scalars(m, q, D, H, S, top))
    shared = (truth * weights.A).sum(-1, keepdim=True)
    K = weights.A
    if weights.B is not None:
        shared = shared + costs.apply(truth * weights.B)
        K = K + weights.B * D
    if weights.C is not None:
        shared = shared - m * (truth * weights.C).sum(-1, keepdim=True)
        K = K - weights.C * H
    return scale * (q * shared - truth * K)


def settle(
    truth: Tensor, objective: Objective, costs: Costs, steps: int = 5000, tolerance: float = 1e-12
) -> tuple[Tensor, Tensor]:
    """Return q [n, V], where training on truths [n, V], float64, settles with unlimited data; residuals [n].

    It is found by preconditioned descent from the truths; a residual is the largest entry of the expected
    gradient that is left. An objective that has no fixed point inside the simplex collapses towards a corner:
    its residual then stays above the tolerance, and q is where it was after `steps`.
    """
    z = truth.clamp_min(1e-30).log()
    rate = torch.full_like(z[:, :1], 0.5)
    least = torch.full_like(rate, torch.inf)
    for _ in range(steps):
        q = torch.softmax(z, -1)
        g = expected_gradient(q, truth, objective, costs)
        residual = g.abs().amax(-1, keepdim=True)
        if residual.max() < tolerance:
            break
        rate = torch.where(residual > 1.2 * least, 0.7 * rate, (1.02 * rate).clamp(max=1.0))
        least = torch.minimum(least, residual)
        # g / q is the step of a Newton iteration whose Hessian is its diagonal
        z = torch.log_softmax(z - rate * (g / q.clamp_min(1e-12)).clamp(-1, 1), -1)
    return q, residual[:, 0]
