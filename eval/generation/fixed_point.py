"""Decoding from the fixed point of a training objective, without training.

With unlimited data from a distribution P, training with an objective converges to a distribution q that
solves g(q, P) = 0 (`emo.pipeline.loss.expected`). For EMO, q is sharper than P and favours tokens near likely
ones. Using the model's own distribution as P in every context has this effect without training.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from emo.common.errors import UserError, nearest
from emo.pipeline.loss import OBJECTIVES, CostEmbedding, Objective, get_objective, load_cost
from emo.pipeline.loss.expected import CostOperator, expected_gradient, settle

from ..models.model import EvaluatedModel
from .decoding import Decoding

CONSTANT = "constant"  # costs of 1 between different tokens
STEPS = 1000  # EMO takes 40 to 80
TOLERANCE = 1e-9  # of every probability, far below the rounding of float32 logits


class FixedPoint:
    """The fixed point of a decoding's objective, as a function of the model's logits.

    Raises UserError for an objective without a fixed point in a single context, and for unsuitable costs.
    fingerprint: of the source of the costs, if it is not the model's own head.
    """

    def __init__(self, model: EvaluatedModel, decoding: Decoding) -> None:
        self.objective = _find_objective(decoding)
        self.fingerprint: str | None = None
        head = model.model.get_output_embeddings()
        if not self.objective.needs_cost or decoding.cost == CONSTANT:
            self.costs = CostOperator(None)
            return
        if decoding.cost:
            cost = load_cost(decoding.cost, len(head.weight))
            self.fingerprint = cost.fingerprint
        elif hasattr(head, "base_layer"):
            raise UserError(
                f"{model.source} has an adapter on its head. Merge the adapter, or set --cost.",
                code="adapter",
            )
        else:
            cost = CostEmbedding.from_weight(head.weight.detach(), torch.float32)
        self.costs = CostOperator(cost.rows.to(head.weight.device, torch.float64))

    def __call__(self, logits: Tensor) -> Tensor:
        """Return log q [n, V] float32 for logits [n, V]. Raises UserError if there is no such q."""
        if not bool(logits.amax(-1).isfinite().all()):
            return logits  # `sampling.choose` raises for them
        q, residual = settle(logits.double().softmax(-1), self._gradient, STEPS, TOLERANCE)
        if not bool((residual <= TOLERANCE).all()):
            raise UserError(
                f"--decode {self.objective.name} did not converge to a fixed point in {STEPS:,} steps. "
                "There may be none, for example if one token takes all mass or likely tokens have zero "
                "cost.",
                code="no-fixed-point",
            )
        return q.log().to(logits.dtype).masked_fill(logits == -math.inf, -math.inf)

    def _gradient(self, q: Tensor, truth: Tensor) -> Tensor:
        return expected_gradient(q, truth, self.objective, self.costs)


def _find_objective(decoding: Decoding) -> Objective:
    name = decoding.objective
    if name not in OBJECTIVES:  # no identity covers the content of other files and packages
        raise UserError(
            f"--decode {name!r} is not known. {nearest(name, OBJECTIVES)}", code="unknown-objective"
        )
    objective = get_objective(name)
    obstacles = {
        "it needs a teacher": bool(objective.divergences),
        "it needs another model's scores": "stored" in objective.needs,
        "smoothed targets need the costs between all tokens": objective.smoothing is not None,
        "its weights are divided by their mean over a batch": objective.normalised,
    }
    for reason, applies in obstacles.items():
        if applies:
            raise UserError(f"--decode {name} has no fixed point: {reason}", code="no-fixed-point")
    if decoding.cost and not objective.needs_cost:
        raise UserError(f"--decode {name} has no costs. Remove --cost.", code="cost-alone")
    return objective
