"""A new objective in ten lines: cross-entropy that counts more where the model is unsure.

Set objective.name=examples/my_objective.py:unsure in a training command, or pass this name wherever an
objective is expected. The names of the function's parameters choose its inputs per token
(docs/how-to/add-an-objective.md). Keyword-only parameters are options. The function returns a
weight [n]. The loss is weight * m, and the weight is not differentiated.
"""

from torch import Tensor


def unsure(H: Tensor, *, strength: float = 0.5) -> Tensor:
    """Return w = 1 + strength H / (1 + H), with H the entropy of the model's distribution."""
    return 1 + strength * H / (1 + H)
