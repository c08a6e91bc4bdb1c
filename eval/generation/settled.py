"""A decoding that does to a model's distributions what training with an objective does to a truth.

With unlimited data from a distribution P, training with an objective settles at a distribution q that solves
g(q, P) = 0 (`emo.pipeline.loss.expected`): for EMO a sharper one, bent towards tokens near those that are
likely. Taking the model's own distribution for P, context by context, has the effect without training.
"""

from __future__ import annotations

import torch
from torch import Tensor

from emo.common.errors import UserError
from emo.eval.generation.decoding import Decoding
from emo.eval.model import EvaluatedModel
from emo.pipeline.loss import CostEmbedding, get_objective, load_cost
from emo.pipeline.loss.expected import Costs, expected_gradient, settle

CONSTANT = "constant"
STEPS = 2000
TOLERANCE = 1e-10  # far below what float32 logits are rounded by


class Settled:
    """The fixed point of a decoding's objective where logits are those of the truth.

    fingerprint: of the costs' source where it is not the model's own head, for identities.
    """

    def __init__(self, model: EvaluatedModel, decoding: Decoding) -> None:
        objective = get_objective(decoding.objective)
        unsettled = {
            "it needs a teacher": bool(objective.against),
            "it needs a second model's scores": "stored" in objective.needs,
            "its weights are relative to a batch's": objective.normalised,
        }
        for reason in (reason for reason, applies in unsettled.items() if applies):
            problem = f"--decode {decoding.objective} has no fixed point: {reason}"
            raise UserError(problem, code="no-fixed-point")
        self.objective, self.fingerprint = objective, None
        head = model.model.get_output_embeddings().weight
        if not objective.needs_cost or decoding.cost == CONSTANT:
            self.costs = Costs(None)
            return
        if decoding.cost:
            cost = load_cost(decoding.cost, len(head))
            self.fingerprint = cost.fingerprint
        else:
            cost = CostEmbedding.from_weight(head.detach(), torch.float32)
        self.costs = Costs(cost.rows.to(head.device, torch.float64))

    def __call__(self, logits: Tensor) -> Tensor:
        """Return log q [n, V] float32 for logits [n, V]. UserError where there is no such q."""
        if not bool(logits.amax(-1).isfinite().all()):
            return logits  # which are refused where a token is chosen
        truth = logits.double().softmax(-1)
        q, residual = settle(truth, self._gradient, STEPS, TOLERANCE)
        if not bool((residual <= TOLERANCE).all()):
            problem = f"its fixed point is not reached in {STEPS:,} steps, or there is none"
            raise UserError(f"--decode {self.objective.name}: {problem}", code="no-fixed-point")
        return q.log().to(logits.dtype)

    def _gradient(self, q: Tensor, truth: Tensor) -> Tensor:
        return expected_gradient(q, truth, self.objective, self.costs)
