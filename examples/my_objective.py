"""A new objective in ten lines: likelihood that counts more where the model is unsure.

Give a training command objective.name=examples/my_objective.py:unsure, or use this name wherever an objective
has one. The names of the function's parameters choose its inputs, per token: m, p, D, H, S, top, stored
(docs/objectives.md); keyword-only ones are its options. It returns a weight [n]: the loss is weight * m, and
the weight is not differentiated.
"""

from torch import Tensor


def unsure(H: Tensor, *, strength: float = 0.5) -> Tensor:
    """Return w = 1 + strength H / (1 + H), with H the entropy of the model's distribution."""
    return 1 + strength * H / (1 + H)
