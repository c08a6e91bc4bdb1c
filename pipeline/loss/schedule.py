"""Numbers that depend on the optimizer step: weights of objectives and shares of steps."""

from __future__ import annotations

import math
from typing import NamedTuple


class Ramp(NamedTuple):
    """A number that moves linearly from `first` to `last` over the first `steps` optimizer steps."""

    first: float
    last: float
    steps: int

    def at(self, step: float) -> float:
        """Return the value at an optimizer step, counted from 0, or between two steps."""
        return self.first + (self.last - self.first) * min(max(step, 0) / self.steps, 1.0)

    def due(self, step: int) -> bool:
        """Return whether `step`, counted from 0, belongs to this share of the steps, evenly spaced."""
        return math.floor(self._total(step + 1)) > math.floor(self._total(step))

    def _total(self, count: int) -> float:
        """Return the sum of the values at the first `count` steps."""
        n = min(count, self.steps)
        return self.last * count + (self.first - self.last) * (n - n * (n - 1) / (2 * self.steps))

    def __str__(self) -> str:
        return f"{self.first:g}..{self.last:g} over {self.steps}"


class Spaced(NamedTuple):
    """A weight that applies in an evenly spaced share of the optimizer steps, and is 0 in the others."""

    weight: float | Ramp
    share: Ramp

    def at(self, step: int) -> float:
        """Return the weight at an optimizer step, counted from 0."""
        return weight_at(self.weight, step) if self.share.due(step) else 0.0

    def mean(self, step: int) -> float:
        """Return the weight at an optimizer step times the share of steps that have it."""
        return weight_at(self.weight, step) * self.share.at(step)

    def __str__(self) -> str:
        first, last, _ = self.share
        weight = self.weight if isinstance(self.weight, Ramp) else f"{self.weight:g}"
        return f"{weight} in {f'{first:g}' if first == last else self.share} of the steps"


Weight = float | Ramp | Spaced


def weight_at(weight: Weight, step: int, spaced: bool = True) -> float:
    """Return a weight at an optimizer step, counted from 0. See `Objective.at`."""
    if isinstance(weight, Spaced) and not spaced:
        return weight.mean(step)
    return weight.at(step) if isinstance(weight, Ramp | Spaced) else weight
