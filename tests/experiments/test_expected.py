"""Fixed points: the closed form, descent by autograd, and what is known of the objectives."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from emo.experiments.known_truth.expected import Costs, expected_gradient, settle
from emo.pipeline.loss import Objective, get_objective
from emo.pipeline.loss.objectives import Rows, gradient, scalars_of

V = 30


def truths(n: int = 4) -> Tensor:
    torch.manual_seed(0)
    rows = torch.distributions.Dirichlet(torch.full((V,), 0.7, dtype=torch.float64)).sample((n,))
    return (rows + 1e-4) / (rows + 1e-4).sum(-1, keepdim=True)


def geometry() -> Costs:
    return Costs(torch.randn(V, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1)))


def matrix(costs: Costs) -> Tensor:
    return costs.apply(torch.eye(V, dtype=torch.float64))


def entropy(q: Tensor) -> Tensor:
    return -(q * q.log()).sum(-1)


def test_costs_are_costs() -> None:
    cosine, constant = matrix(geometry()), matrix(Costs(torch.eye(V, dtype=torch.float64)))
    assert torch.allclose(cosine, cosine.T)
    assert cosine.diagonal().abs().max() < 1e-12
    assert torch.equal(constant, 1 - torch.eye(V, dtype=torch.float64))
    permuted = matrix(geometry().permuted(torch.Generator().manual_seed(2)))
    assert not torch.allclose(permuted, cosine)
    assert torch.allclose(permuted.flatten().sort().values, cosine.flatten().sort().values)


@pytest.mark.parametrize(
    "costs", [geometry(), Costs(torch.eye(V, dtype=torch.float64))], ids=["cosine", "constant"]
)
@pytest.mark.parametrize(
    "name", ["mle", "emo", "emo2", "demd", "tailr", "mixce", "dft", "mile", "deft", "neg_entropy", "gem"]
)
def test_the_gradient_is_the_mean_over_targets(name: str, costs: Costs) -> None:
    objective, c = get_objective(name), matrix(costs)
    truth, q = truths(1)[0], truths(2)[1]
    assert torch.allclose(
        expected_gradient(q, truth, objective, costs), by_hand(q, truth, objective, c), atol=1e-14
    )


def by_hand(q: torch.Tensor, truth: torch.Tensor, objective: Objective, c: torch.Tensor) -> torch.Tensor:
    """The mean over targets of what the loss library's own check says is the gradient for one."""
    total = torch.zeros(V, dtype=torch.float64)
    for y in range(V):
        target = torch.tensor([y])
        rows = Rows(q.log()[None], target, c[target], torch.zeros(1, dtype=torch.float64))
        scalars = scalars_of(rows.z, rows, objective.logit_scale)
        results = objective.coefficients(scalars)
        total += truth[y] * gradient(results, scalars, rows, objective.logit_scale)[0]
    return total


def test_emo_settles_where_its_closed_form_says() -> None:
    truth, costs = truths(), geometry()
    q, residual = settle(truth, get_objective("emo"), costs)
    assert residual.max() < 1e-11
    m, D = -q.log(), costs.apply(q)
    w = m / D
    shared = (truth * (1 - m)).sum(-1, keepdim=True) + costs.apply(truth * w)
    assert torch.allclose(q * shared, truth, atol=1e-10)
    assert (entropy(q) < entropy(truth)).all()


def test_gem_settles_at_the_tempered_truth() -> None:
    """softmax(z / beta) = P, so the model is the truth at temperature 1 / beta: broader."""
    truth = truths()
    want = torch.softmax(0.7 * truth.log(), -1)
    assert torch.allclose(settle(truth, get_objective("gem", beta=0.7), geometry()).q, want, atol=1e-9)
