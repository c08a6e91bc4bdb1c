"""Token-level objectives inside a fused output head. Knows nothing of runs, recipes or DeepSpeed.

from pipeline.loss import CostEmbedding, fused_linear_loss, get_objective

cost = CostEmbedding.from_weight(head.weight)
sums = fused_linear_loss(hidden, head.weight, labels, get_objective("emo"), cost)
(sums.loss / sums.tokens).backward()
"""

from pipeline.loss.cost import LIVE, CostEmbedding, LiveCost, load_cost
from pipeline.loss.fused import IGNORE, FusedHead, LossSums, fuse_head, fused_linear_loss
from pipeline.loss.logits import logits_loss
from pipeline.loss.objectives import OBJECTIVES, Coefficients, Objective, get_objective

__all__ = [
    "IGNORE",
    "LIVE",
    "OBJECTIVES",
    "Coefficients",
    "CostEmbedding",
    "FusedHead",
    "LiveCost",
    "LossSums",
    "Objective",
    "fuse_head",
    "fused_linear_loss",
    "get_objective",
    "load_cost",
    "logits_loss",
]
