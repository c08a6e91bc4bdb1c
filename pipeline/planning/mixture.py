"""What a mixture asks for: how much of each domain is due by each step, before any row is looked at.

With shares w_d of tokens, B rows a step and a mean of mu_d tokens in a row of domain d, a step holds

    g_d = B w_d / sum_j (w_j / mu_j)

tokens of d, and what is due of d by a time is the integral of g_d. A ramp is climbed in stairs, a domain
that has had all its epochs gives its share to the others in proportion, and between two such moments g is
constant. So the integral is linear piece by piece, and known for any step at once. With shares of rows the
same holds with mu = 1. Only additions and the like are used here, which give the same bits on every host.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from common.errors import UserError, nearest
from pipeline.config import MixtureConfig, RampConfig
from pipeline.loss.objectives import Ramp

STAIRS = 1024  # of a ramp at most
DIGITS = 12  # of a share by temperature: a power may differ in its last bit from host to host

# Up to so many epochs of the same text are almost as good as new text: Muennighoff et al., "Scaling
# Data-Constrained Language Models" (2023), section 6.
REPEATED = 4


class Domain(NamedTuple):
    """The rows of a domain, and their amount in rows or tokens."""

    name: str
    rows: int
    amount: int  # of one epoch, in what shares are of: tokens, or rows


class Flow(NamedTuple):
    """The amount of each domain that is due by a time, which is in steps: linear between knots."""

    times: list[float]  # [K] of the knots, ascending
    due: np.ndarray  # [K, D] by each knot
    rates: np.ndarray  # [K, D] per step from each knot on

    def at(self, time: float) -> np.ndarray:
        """Return the amounts due by `time`, not before the first knot, [D]; they never fall."""
        knot = max(0, bisect_right(self.times, time) - 1)
        return self.due[knot] + (time - self.times[knot]) * self.rates[knot]

    @property
    def dry(self) -> bool:
        """Return whether nothing comes any more after the last knot."""
        return not self.rates[-1].any()


def mixture_flow(
    mixture: MixtureConfig, domains: Sequence[Domain], batch: int, start: int, done: Sequence[float]
) -> Flow:
    """Return the flow of `mixture` from step `start` on, by when so much of each domain is `done`.

    Ramps begin at `start`; epochs count from the beginning of the run. Raises UserError for domains that do
    not fit.
    """
    weights = shares(mixture, domains)
    most = [mixture.max_epochs.get(domain.name, math.inf) * domain.amount for domain in domains]
    edges = sorted({edge for weight in weights for edge in _stairs(weight)} | {0.0})
    times, due, rates = [float(start)], [np.array(done, dtype=np.float64)], []
    for begin, end in zip(edges, [*edges[1:], math.inf], strict=True):
        middle = begin if end == math.inf else (begin + end) / 2
        current = [weight.at(middle) for weight in weights]
        while True:
            left = [m - d if w else math.inf for m, d, w in zip(most, due[-1], current, strict=True)]
            current = [0.0 if have <= 0 else w for have, w in zip(left, current, strict=True)]
            rate = _rates(current, domains, batch)
            ends = [h / r if r else math.inf for h, r in zip(left, rate, strict=True)]
            stop = min(times[-1] + min(ends), start + end)
            rates.append(np.array(rate))
            if stop == math.inf or not any(rate):  # who would have a share has run out
                return Flow(times, np.array(due), np.array(rates))
            reached = due[-1] + (stop - times[-1]) * rates[-1]
            if ran_out := times[-1] + min(ends) < start + end:
                last = ends.index(min(ends))
                reached[last] = most[last]
            times.append(stop)
            due.append(reached)
            if not ran_out:
                break
    raise AssertionError("the last stair has no end")


def _stairs(weight: Ramp) -> list[float]:
    """Return the edges of a ramp's stairs, in steps from its beginning."""
    if weight.first == weight.last:
        return []
    count = min(weight.steps, STAIRS)
    return [weight.steps * stair / count for stair in range(count + 1)]


def _rates(weights: Sequence[float], domains: Sequence[Domain], batch: int) -> list[float]:
    """Return the module's g [D] for shares that need not add up; zeros where all are."""
    rows = math.fsum(w * domain.rows / domain.amount for w, domain in zip(weights, domains, strict=True) if w)
    return [batch * w / rows if w else 0.0 for w in weights]


def shares(mixture: MixtureConfig, domains: Sequence[Domain]) -> list[Ramp]:
    """Return each domain's share over the steps since the mixture holds; they need not add up to 1.

    Raises UserError for a domain that the data lack, or that the mixture forgets.
    """
    names = [domain.name for domain in domains]
    for key, section in (("shares", mixture.shares), ("max_epochs", mixture.max_epochs)):
        for name in section:
            if name not in names:
                hint = nearest(name, names)
                raise UserError(f"train.mixture.{key} names {name}, of which the data hold no rows; {hint}")
    if mixture.temperature is not None:
        most = max(domain.amount for domain in domains)  # divided by it: a power of it alone may overflow
        raised = [(domain.amount / most) ** (1 / mixture.temperature) for domain in domains]
        total = math.fsum(raised)
        return [_ramp(round(power / total, DIGITS)) for power in raised]
    forgotten = [name for name in names if name not in mixture.shares]
    if forgotten:
        raise UserError(
            f"train.mixture.shares says nothing of {', '.join(forgotten)}; give every domain of the data a "
            "share, 0 leaves it out"
        )
    return [_ramp(mixture.shares[name]) for name in names]


def _ramp(share: float | RampConfig) -> Ramp:
    if isinstance(share, RampConfig):
        return Ramp(getattr(share, "from"), share.to, share.steps)
    return Ramp(share, share, 1)


def normalised(mixture: MixtureConfig, domains: Sequence[Domain]) -> list[tuple[float, float]]:
    """Return the share of each domain when the mixture begins to hold, and when its ramps have ended.

    They add up to 1. Epochs that run out are not looked at.
    """
    ramps = shares(mixture, domains)
    first, last = ([ramp.at(step) for ramp in ramps] for step in (0, max(ramp.steps for ramp in ramps)))
    return [(a / math.fsum(first), b / math.fsum(last)) for a, b in zip(first, last, strict=True)]
