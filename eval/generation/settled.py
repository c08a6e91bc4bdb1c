"""A decoding that does to a model's distributions what training with an objective does to a truth.

With unlimited data from a distribution P, training with an objective settles at a distribution q that solves
g(q, P) = 0 (`emo.pipeline.loss.expected`): for EMO a sharper one, bent towards tokens near those that are
likely. Taking the model's own distribution for P, context by context, has the effect without training.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from emo.common.errors import UserError, nearest
from emo.pipeline.loss import OBJECTIVES, CostEmbedding, get_objective, load_cost
from emo.pipeline.loss.expected import CostOperator, expected_gradient, settle

from ..model import EvaluatedModel
from .decoding import Decoding

CONSTANT = "constant"  # costs of 1 between different tokens
STEPS = 1000  # EMO takes 40 to 80
TOLERANCE = 1e-9  # of every probability; far below what float32 logits are rounded by


class Settled:
    """The fixed point of a decoding's objective where logits are those of the truth.

    Raises UserError for an objective that has none in one context, and for costs that do not suit.
    fingerprint: of the costs' source where it is not the model's own head, for identities.
    """

    def __init__(self, model: EvaluatedModel, decoding: Decoding) -> None:
        name = decoding.objective
        if name not in OBJECTIVES:  # others are files and packages, whose content no identity covers
            raise UserError(f"--decode {name!r}: {nearest(name, OBJECTIVES)}", code="unknown-objective")
        objective = get_objective(name)
        unsuited = {
            "it needs a teacher": bool(objective.divergences),
            "it needs another model's scores": "stored" in objective.needs,
            "its weights are divided by their mean over a batch": objective.normalised,
        }
        for reason, applies in unsuited.items():
            if applies:
                raise UserError(f"--decode {name} has no fixed point: {reason}", code="no-fixed-point")
        if decoding.cost and not objective.needs_cost:
            raise UserError(f"--decode {name} has no costs; leave out --cost", code="cost-alone")
        self.objective, self.fingerprint = objective, None
        head = model.model.get_output_embeddings()
        if not objective.needs_cost or decoding.cost == CONSTANT:
            self.costs = CostOperator(None)
            return
        if decoding.cost:
            cost = load_cost(decoding.cost, len(head.weight))
            self.fingerprint = cost.fingerprint
        elif hasattr(head, "base_layer"):
            raise UserError(
                f"{model.given} has an adapter on its head: merge it, or give --cost", code="adapter"
            )
        else:
            cost = CostEmbedding.from_weight(head.weight.detach(), torch.float32)
        self.costs = CostOperator(cost.rows.to(head.weight.device, torch.float64))

    def __call__(self, logits: Tensor) -> Tensor:
        """Return log q [n, V] float32 for logits [n, V]. UserError where there is no such q."""
        if not bool(logits.amax(-1).isfinite().all()):
            return logits  # which are refused where a token is chosen
        q, residual = settle(logits.double().softmax(-1), self._gradient, STEPS, TOLERANCE)
        if not bool((residual <= TOLERANCE).all()):
            problem = (
                f"after {STEPS:,} steps its fixed point is not reached; there may be none, as where one "
                "token takes all, or where likely tokens cost nothing to exchange"
            )
            raise UserError(f"--decode {self.objective.name}: {problem}", code="no-fixed-point")
        return q.log().to(logits.dtype).masked_fill(logits == -math.inf, -math.inf)

    def _gradient(self, q: Tensor, truth: Tensor) -> Tensor:
        return expected_gradient(q, truth, self.objective, self.costs)
