"""Token-level objectives inside a fused output head, as a library that is independent of the pipeline.

from emo.loss import CostEmbedding, fused_linear_loss, get_objective

cost = CostEmbedding.from_weight(head.weight)
sums = fused_linear_loss(hidden, head.weight, labels, get_objective("emo"), cost)
(sums.loss / sums.tokens).backward()
"""

from emo.common.causal_lm import IGNORE

from .cost import LIVE, CostEmbedding, LiveCost, NumberCost, TokenPlan, plan_tokens
from .cost_files import load_cost, number_cost
from .fused import LossSums, fused_linear_loss, logits_loss
from .models.head import (
    FusedCausalLM,
    FusedHead,
    fuse_head,
    fuse_model,
    head_options,
    shift_left,
)
from .models.probe import probe_model
from .objectives import (
    OBJECTIVES,
    Coefficients,
    Objective,
    Ramp,
    Scalars,
    Spaced,
    get_objective,
    traits,
    weighted_sum,
)
from .teacher import Teacher, TopK

__all__ = [
    "IGNORE",
    "LIVE",
    "OBJECTIVES",
    "Coefficients",
    "CostEmbedding",
    "FusedCausalLM",
    "FusedHead",
    "LiveCost",
    "LossSums",
    "NumberCost",
    "Objective",
    "Ramp",
    "Scalars",
    "Spaced",
    "Teacher",
    "TokenPlan",
    "TopK",
    "fuse_head",
    "fuse_model",
    "fused_linear_loss",
    "get_objective",
    "head_options",
    "load_cost",
    "logits_loss",
    "number_cost",
    "plan_tokens",
    "probe_model",
    "shift_left",
    "traits",
    "weighted_sum",
]
