"""Expected gradients for known truths, and objectives whose gradients vanish."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from emo.pipeline.loss import CostEmbedding, get_objective
from emo.pipeline.loss.expected import CostOperator, Gradient, expected_gradient, settle
from emo.pipeline.loss.objectives import LogitRows, claimed_gradient, compute_scalars

V = 30


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def truths(n: int = 4) -> Tensor:
    return torch.softmax(2 * torch.randn(n, V, dtype=torch.float64, generator=generator()), -1)


def geometry() -> CostOperator:
    return CostOperator(torch.randn(V, 6, dtype=torch.float64, generator=generator(1)))


@pytest.mark.parametrize(
    "name",
    [
        *("mle", "emo", "emo2", "demd", "tailr", "mixce", "dft", "mile", "deft", "neg_entropy", "gem"),
        *("eaft", "eaft_full", "smoothed"),
    ],
)
def test_the_gradient_is_the_mean_over_targets(name: str) -> None:
    """The gradient of each target is the one that the library uses to check objectives."""
    objective, costs, (truth, q) = get_objective(name), geometry(), truths(2)
    cost, zero = costs.apply(torch.eye(V, dtype=torch.float64)), torch.zeros(1, dtype=torch.float64)
    expected = torch.zeros_like(q)
    for y in range(V):
        target = torch.tensor([y])
        rows = LogitRows(q.log()[None], target, cost[target], zero)
        scalars = compute_scalars(rows.z, rows, objective.logit_scale)
        weights = objective.coefficients(scalars)
        options = (objective.logit_scale, objective.smoothing)
        expected += truth[y] * claimed_gradient(weights, scalars, rows, *options)[0]
    assert torch.allclose(expected_gradient(q, truth, objective, costs), expected, atol=1e-14)


def gradient_of(name: str, costs: CostOperator) -> Gradient:
    return lambda q, truth: expected_gradient(q, truth, get_objective(name), costs)


def test_emo_settles_where_its_closed_form_says() -> None:
    truth, costs = truths(), geometry()
    q, residual = settle(truth, gradient_of("emo", costs))
    assert residual.max() < 1e-11
    m = -q.log()
    shared = (truth * (1 - m)).sum(-1, keepdim=True) + costs.apply(truth * m / costs.apply(q))
    assert torch.allclose(q * shared, truth, atol=1e-10)
    entropies = [-(p * p.log()).sum(-1) for p in (q, truth)]
    assert (entropies[0] < entropies[1]).all()


@pytest.mark.parametrize("name", ["tailr", "dft", "demd"])
@pytest.mark.parametrize("sharpness", [0.1, 1.0, 5.0])
def test_collapsing_objectives_keep_a_residual(name: str, sharpness: float) -> None:
    """There is no fixed point, although the gradient vanishes near a corner of the simplex."""
    truth = torch.softmax(sharpness * truths().log(), -1)
    q, residual = settle(truth, gradient_of(name, geometry()), 300, 1e-6)
    assert (residual > 1e-3).all() and q.isfinite().all()


def test_costs_are_those_of_the_loss() -> None:
    """Rows of zero length have equal costs, too."""
    embedding = torch.randn(V, 6, dtype=torch.float64, generator=generator(1))
    embedding[[3, 7]] = 0
    weights = torch.rand(2, V, dtype=torch.float64, generator=generator(2))
    with pytest.warns(UserWarning):
        rows = CostEmbedding.from_weight(embedding).costs(torch.arange(V))
    assert torch.allclose(CostOperator(embedding).apply(weights), weights @ rows, atol=1e-12)
