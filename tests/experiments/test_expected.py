"""Fixed points: the closed form, descent by autograd, and what is known of the objectives."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from experiments.known_truth.expected import ConstantCosts, CosineCosts, Costs, expected_gradient, settle
from pipeline.loss import get_objective

V = 30


def truths(n: int = 4) -> Tensor:
    torch.manual_seed(0)
    rows = torch.distributions.Dirichlet(torch.full((V,), 0.7, dtype=torch.float64)).sample((n,))
    return (rows + 1e-4) / (rows + 1e-4).sum(-1, keepdim=True)


def geometry() -> CosineCosts:
    return CosineCosts(torch.randn(V, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1)))


def matrix(costs: Costs) -> Tensor:
    return costs.apply(torch.eye(V, dtype=torch.float64))


def entropy(q: Tensor) -> Tensor:
    return -(q * q.log()).sum(-1)


def test_costs_are_costs() -> None:
    cosine, constant = matrix(geometry()), matrix(ConstantCosts())
    assert torch.allclose(cosine, cosine.T)
    assert cosine.diagonal().abs().max() < 1e-12
    assert torch.equal(constant, 1 - torch.eye(V, dtype=torch.float64))
    permuted = matrix(geometry().permuted(torch.Generator().manual_seed(2)))
    assert not torch.allclose(permuted, cosine)
    assert torch.allclose(permuted.flatten().sort().values, cosine.flatten().sort().values)


@pytest.mark.parametrize("costs", [geometry(), ConstantCosts()], ids=["cosine", "constant"])
@pytest.mark.parametrize("name", ["mle", "emo", "emo2", "demd", "tailr", "mixce", "dft"])
def test_the_gradient_is_the_mean_over_targets(name: str, costs: Costs) -> None:
    objective, c = get_objective(name), matrix(costs)
    truth, q = truths(1)[0], truths(2)[1]
    total = torch.zeros(V, dtype=torch.float64)
    for y in range(V):
        D = (q * c[y]).sum()
        one = objective.coefficients(-q[y].log()[None], D[None], q[y][None])
        row = q * one.A + (0 if one.B is None else q * one.B * c[y])
        row[y] -= one.K[0]
        total += truth[y] * one.omega * row
    assert torch.allclose(expected_gradient(q, truth, objective, costs), total, atol=1e-14)


def test_emo_settles_where_its_closed_form_says() -> None:
    truth, costs = truths(), geometry()
    q, residual = settle(truth, get_objective("emo"), costs)
    assert residual.max() < 1e-11
    m, D = -q.log(), costs.apply(q)
    w = m / D
    shared = (truth * (1 - m)).sum(-1, keepdim=True) + costs.apply(truth * w)
    assert torch.allclose(q * shared, truth, atol=1e-10)
    assert (entropy(q) < entropy(truth)).all()


@pytest.mark.parametrize(("name", "lr"), [("emo", 20.0), ("mixce", 5.0)])
def test_plain_descent_on_the_detached_loss_gets_there(name: str, lr: float) -> None:
    truth, costs, objective = truths(2), geometry(), get_objective(name)
    c = matrix(costs)
    z = truth.log().requires_grad_()
    optimizer = torch.optim.SGD([z], lr=lr)
    for _ in range(6000):
        q = torch.softmax(z, -1)
        m, D = -torch.log_softmax(z, -1), q @ c
        found = objective.coefficients(m.detach(), D.detach(), q.detach())
        # EMO: (m + sg[w] D) / 2; MixCE: sg[weight] m
        loss = 0.5 * (m + found.B * D) if found.B is not None else found.omega * m
        optimizer.zero_grad()
        (truth * loss).sum().backward()
        optimizer.step()
    settled = settle(truth, objective, costs).q
    assert torch.allclose(torch.softmax(z.detach(), -1), settled, atol=1e-6)


def test_mle_settles_at_the_truth() -> None:
    truth = truths()
    assert torch.allclose(settle(truth, get_objective("mle"), geometry()).q, truth, atol=1e-12)


def test_tailr_collapses_and_says_so() -> None:
    settled = settle(truths(), get_objective("tailr", gamma=0.8), geometry(), steps=300)
    assert settled.residual.max() > 1e-6
    assert (entropy(settled.q) < entropy(truths()) - 0.1).all()
