"""What is compared where the truth is known: an objective, its costs, its targets, and its learner's head."""

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

PERMUTATION = 5  # seed of the costs between other tokens
KERNEL = "kernel"  # the proper score, which is no objective of the product
COMPILED = 200  # tokens of vocabulary from which a gradient is worth the seconds that compiling it takes


def kernel_gradient(q: Tensor, truth: Tensor, costs: CostOperator, weight: float) -> Tensor:
    """Return the expected gradient [..., V] of the proper score m + weight / 2 |E'q - e_y|^2.

    With unit rows in E the second term is the kernel score of k_ij = e_i . e_j = 1 - c_ij, which is EMO's D
    less what depends on the model alone: D_y - q . C q / 2. Its gradient is that of no reweighting,

        g_i = q_i - P_i + weight q_i (u_i - q . u),    u = K (q - P) = -C (q - P),

    and vanishes at q = P, whatever the costs.
    """
    u = -costs.apply(q - truth)
    return q - truth + weight * q * (u - (q * u).sum(-1, keepdim=True))


@functools.cache
def _gradient(
    name: str, params: tuple[tuple[str, float], ...]
) -> Callable[[Tensor, Tensor, CostOperator], Tensor]:
    """Return the expected gradient of an objective, for models, truths and costs; compiled if large."""
    objective = None if name == KERNEL else get_objective(name, **dict(params))

    def plain(q: Tensor, rows: Tensor, costs: CostOperator) -> Tensor:
        if objective is None:
            return kernel_gradient(q, rows, costs, dict(params)["weight"])
        return expected_gradient(q, rows, objective, costs)

    # isolated: every objective has this very code, and after eight variants torch would give up
    compiled = torch.compile(plain, fullgraph=True, isolate_recompiles=True)  # type: ignore[call-overload]
    return lambda q, rows, costs: (compiled if q.shape[-1] >= COMPILED else plain)(q, rows, costs)


class Prior(Section):
    """Tokens that take a share of each target: label smoothing, plain and by the costs.

    uniform: all tokens alike. gaussian: exp(-c^2 / 2 width^2) of the cost c from the target. d2gpo:
    the data-dependent Gaussian prior objective (Li et al., ICLR 2020) as its authors released it,
    softmax(N(r; 0, 1) / 2) of the rank r by cost, where the target's is 0.
    """

    kind: Literal["uniform", "gaussian", "d2gpo"]
    weight: float = Field(gt=0, lt=1)
    width: float = Field(0.3, gt=0)

    def rows(self, costs: Tensor) -> Tensor:
        """Return the prior of each target, rows [..., V, V] that sum to one, from costs [..., V, V]."""
        if self.kind == "uniform":
            return torch.full_like(costs, 1 / costs.shape[-1])
        if self.kind == "gaussian":
            return torch.softmax(-costs.square() / (2 * self.width**2), -1)
        ranks = costs.argsort(-1).argsort(-1).to(costs.dtype)
        density = torch.exp(-ranks.square() / 2) / math.sqrt(2 * math.pi)
        return torch.softmax(density / 2, -1)


class Contestant(Section):
    """An objective with its parameters, its costs, and what its learner's head knows."""

    name: str  # of the product, or KERNEL with its `weight`
    params: dict[str, float] = {}
    cost: Literal["true", "constant", "permuted"] = "true"
    prior: Prior | None = None
    # embedding: the learner's output matrix begins at the embedding that the truth was made with, and learns
    # at `head_rate` times the learning rate; at 0 it is that embedding.
    head: Literal["free", "embedding"] = "free"
    head_rate: float = Field(0.0, ge=0)
    against: str | None = None  # tempered, what the gaps are from; None: the study's baseline

    def gradient(self, embedding: Tensor) -> Gradient:
        """Return the expected gradient, with costs from the embedding that the truth was made with."""
        costs, gradient = self._costs(embedding), _gradient(self.name, tuple(self.params.items()))
        return lambda q, rows: gradient(q, rows, costs)

    def targets(self, rows: Tensor, embedding: Tensor) -> Tensor:
        """Return the distributions that are fitted instead of rows [..., n, V]."""
        if self.prior is None:
            return rows
        V = rows.shape[-1]
        every = torch.eye(V, dtype=rows.dtype).expand(*embedding.shape[:-2], V, V)
        between = self._costs(embedding).apply(every)  # costs [..., V, V]
        return (1 - self.prior.weight) * rows + self.prior.weight * rows @ self.prior.rows(between)

    def fit(
        self,
        sample: bigram.Sample,
        lr: float,
        steps: int,
        look: bigram.Look | None = None,
        patient: bool = True,
    ) -> bigram.Fitted:
        """Return the learners of a sample; see `bigram.fit`."""
        fits = []
        for part in sample.parts():
            rows = (part.train / part.train.sum(-1, keepdim=True).clamp_min(1)).float()
            rows = self.targets(rows, part.embedding)
            head = part.embedding if self.head == "embedding" else None
            gradient = self.gradient(part.embedding)
            fits.append(bigram.fit(part, rows, gradient, lr, steps, head, self.head_rate, look, patient))
        return bigram.Fitted(*map(torch.cat, zip(*fits, strict=True)))

    def settled(self, sample: bigram.Sample, truth: Tensor) -> Tensor:
        """Return the distributions [S, V, V], float64, that unlimited data from `truth` would lead to.

        A row that is not settled to 1e-7 after 1,000 steps is where it is then.
        """
        parts = list(sample.parts())
        rows = truth.split([len(part.seeds) for part in parts])
        gradients = (self.gradient(part.embedding.double()) for part in parts)
        pairs = zip(rows, gradients, strict=True)
        return torch.cat([settle(p, gradient, 1000, 1e-7)[0] for p, gradient in pairs])

    def _costs(self, embedding: Tensor) -> CostOperator:
        if self.cost == "constant":
            return CostOperator(None)
        costs, generator = CostOperator(embedding), torch.Generator().manual_seed(PERMUTATION)
        return costs.permuted(generator) if self.cost == "permuted" else costs
