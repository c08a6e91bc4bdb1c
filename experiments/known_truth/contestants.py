"""Contestants of a study: an objective, its costs, its targets, and its learner's head."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from emo.common.config.recipe import Section
from emo.pipeline.loss import get_objective
from emo.pipeline.loss.expected import CostOperator, Gradient, expected_gradient, settle

from . import bigram

PERMUTATION = 5  # seed of permuted costs
KERNEL = "kernel"  # the proper score, which is not one of the built-in objectives
COMPILED = 200  # smallest vocabulary for which compiling a gradient pays off


def kernel_gradient(q: Tensor, truth: Tensor, costs: CostOperator, weight: float) -> Tensor:
    """Return the expected gradient [..., V] of the proper score m + weight / 2 |E'q - e_y|^2.

    With unit rows in E the second term is the kernel score of k_ij = e_i . e_j = 1 - c_ij. It equals EMO's D
    minus a term of the model only: D_y - q . C q / 2. Its gradient is not a reweighting,

        g_i = q_i - P_i + weight q_i (u_i - q . u),    u = K (q - P) = -C (q - P),

    and vanishes at q = P for all costs.
    """
    u = -costs.apply(q - truth)
    return q - truth + weight * q * (u - (q * u).sum(-1, keepdim=True))


@functools.cache
def _gradient(
    name: str, params: tuple[tuple[str, float], ...]
) -> Callable[[Tensor, Tensor, CostOperator], Tensor]:
    """Return the expected gradient of an objective, compiled for large vocabularies."""
    objective = None if name == KERNEL else get_objective(name, **dict(params))

    def plain(q: Tensor, rows: Tensor, costs: CostOperator) -> Tensor:
        if objective is None:
            return kernel_gradient(q, rows, costs, dict(params)["weight"])
        return expected_gradient(q, rows, objective, costs)

    # isolate_recompiles: all objectives share this code, and torch stops after eight variants
    compiled = torch.compile(plain, fullgraph=True, isolate_recompiles=True)  # type: ignore[call-overload]
    return lambda q, rows, costs: (compiled if q.shape[-1] >= COMPILED else plain)(q, rows, costs)


class Prior(Section):
    """Label smoothing, uniform or by the costs. `weight` is the share that is taken from the target.

    uniform: equal for all tokens. gaussian: exp(-c^2 / 2 width^2) of the cost c from the target. d2gpo:
    the data-dependent Gaussian prior objective (Li et al., ICLR 2020) as released by its authors,
    softmax(N(r; 0, 1) / 2) of the rank r by cost, where the target has rank 0.
    """

    kind: Literal["uniform", "gaussian", "d2gpo"]
    weight: float = Field(gt=0, lt=1)
    width: float = Field(0.3, gt=0)

    def rows(self, costs: Tensor) -> Tensor:
        """Return the prior distribution of each target, [..., V, V], from costs [..., V, V]."""
        if self.kind == "uniform":
            return torch.full_like(costs, 1 / costs.shape[-1])
        if self.kind == "gaussian":
            return torch.softmax(-costs.square() / (2 * self.width**2), -1)
        ranks = costs.argsort(-1).argsort(-1).to(costs.dtype)
        density = torch.exp(-ranks.square() / 2) / math.sqrt(2 * math.pi)
        return torch.softmax(density / 2, -1)


class Contestant(Section):
    """An objective with its parameters, its costs, and its learner's head."""

    name: str  # an objective, or KERNEL with its `weight`
    params: dict[str, float] = {}
    cost: Literal["true", "constant", "permuted"] = "true"
    prior: Prior | None = None
    # embedding: the output matrix starts as the truth's embedding, and learns at `head_rate` times the
    # learning rate; at 0 it is frozen.
    head: Literal["free", "embedding"] = "free"
    head_rate: float = Field(0.0, ge=0)
    against: str | None = None  # contestant that gaps refer to, tempered; None: the study's baseline

    def gradient(self, embedding: Tensor) -> Gradient:
        """Return the expected gradient, with costs from the truth's embedding."""
        costs = self._costs(embedding)
        gradient = _gradient(self.name, tuple(self.params.items()))
        return lambda q, rows: gradient(q, rows, costs)

    def targets(self, rows: Tensor, embedding: Tensor) -> Tensor:
        """Return the target distributions [..., n, V]: `rows` with the prior mixed in."""
        if self.prior is None:
            return rows
        V = rows.shape[-1]
        every = torch.eye(V, dtype=rows.dtype).expand(*embedding.shape[:-2], V, V)
        between = self._costs(embedding).apply(every)  # costs [..., V, V]
        return (1 - self.prior.weight) * rows + self.prior.weight * rows @ self.prior.rows(between)

    def fit(
        self,
        sample: bigram.BigramSample,
        lr: float,
        steps: int,
        look: bigram.Look | None = None,
        patient: bool = True,
    ) -> bigram.Fitted:
        """Fit learners to a sample; see `bigram.fit_learners`."""
        fits = []
        for part in sample.parts():
            rows = (part.train / part.train.sum(-1, keepdim=True).clamp_min(1)).float()
            rows = self.targets(rows, part.embedding)
            head = part.embedding if self.head == "embedding" else None
            gradient = self.gradient(part.embedding)
            fits.append(
                bigram.fit_learners(part, rows, gradient, lr, steps, head, self.head_rate, look, patient)
            )
        return bigram.Fitted(*map(torch.cat, zip(*fits, strict=True)))

    def settled(self, sample: bigram.BigramSample, truth: Tensor) -> Tensor:
        """Return the fixed points [S, V, V], float64, for unlimited data from `truth`.

        Rows that have not converged to 1e-7 stop after 1,000 steps.
        """
        parts = list(sample.parts())
        rows = truth.split([len(part.seeds) for part in parts])
        gradients = (self.gradient(part.embedding.double()) for part in parts)
        pairs = zip(rows, gradients, strict=True)
        return torch.cat([settle(p, gradient, 1000, 1e-7)[0] for p, gradient in pairs])

    def _costs(self, embedding: Tensor) -> CostOperator:
        if self.cost == "constant":
            return CostOperator(None)
        costs = CostOperator(embedding)
        generator = torch.Generator().manual_seed(PERMUTATION)
        return costs.permuted(generator) if self.cost == "permuted" else costs
