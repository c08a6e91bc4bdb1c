"""An objective of one's own, in ten lines: likelihood that counts more where the model is unsure.

Give a training command objective.name=examples/my_objective.py:unsure, or name it wherever an objective is.
The names of the function's parameters say what it is given, per token: m, p, D, H, S, top, stored
(docs/objectives.md); keyword-only ones are its options. Here it returns a weight: the loss is weight * m, the
weight held fixed.
"""

from torch import Tensor


def unsure(H: Tensor, *, strength: float = 0.5) -> Tensor:
    """w = 1 + strength H / (1 + H), with H the entropy of the model's distribution."""
    return 1 + strength * H / (1 + H)
