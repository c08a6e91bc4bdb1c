"""The scores by name, and which label they choose. Standard library only: reports import it too."""

from __future__ import annotations

import math
from collections.abc import Sequence

SCORES = ("openicl_ppl", "suffix_sum", "suffix_mean")  # from one forward
EXTRA_SCORES = ("channel", "calibrated")  # each a forward of its own


class NotFiniteError(ValueError):
    """A score is NaN or infinite, so that no label can be chosen by it."""


def winner(values: Sequence[float]) -> int:
    """Place of the label that a row's scores choose: the smallest one, the first of equal ones.

    Raises NotFiniteError: a comparison with NaN is always false, and would choose the first label.
    """
    if not all(map(math.isfinite, values)):
        raise NotFiniteError(f"a score is not finite: {', '.join(f'{value:g}' for value in values)}")
    return min(range(len(values)), key=values.__getitem__)
