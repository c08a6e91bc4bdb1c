"""Which rows each step consumes: an order that no rank, restart or topology changes, with or without shares.

Without a mixture step s consumes positions [s*B, (s+1)*B) of an endless sequence: one seeded permutation of
the rows per epoch. With one every domain has such a sequence of its own, and

    k_d(s) = the rows of domain d whose middle is due by t(s),     sum_d k_d(s) = s B

says how far each has come: the middles of its rows, in tokens from the first, are laid against what is due,
and the clock t(s) is moved until the rows are s whole batches. The tokens of a domain are therefore never
further than a row from its share, and any step is computed at once.

What is due is known before any row is looked at. With shares w_d of tokens and a mean of mu_d tokens in a row
of domain d, a step of B rows holds

    g_d = B w_d / sum_j (w_j / mu_j)

tokens of d, and what is due of d by a time is the integral of g_d. A ramp is climbed in stairs, a domain
that has had all its epochs gives its share to the others in proportion, and between two such moments g is
constant. So the integral is linear piece by piece, and known for any step at once. With shares of rows the
same holds with mu = 1. Only additions and the like are used here, which give the same bits on every host.
"""

from __future__ import annotations

import functools
import itertools
import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from emo.common.errors import UserError, nearest

from ..loss.schedule import Ramp
from ..model.objectives import as_schedule
from .config import MixtureConfig

STAIRS = 1024  # of a ramp at most

# Up to so many epochs of the same text are almost as good as new text: Muennighoff et al., "Scaling
# Data-Constrained Language Models" (2023), section 6.
REPEATED = 4


def shuffled(seed: int, epoch: int, rows: int, domain: int = 0) -> np.ndarray:
    """Return an epoch's permutation, int64 [rows]. NumPy seeds alike with and without zeros in the end."""
    return np.random.default_rng([seed, epoch, domain]).permutation(rows)


class BatchOrder:
    """The rows that each step consumes, in an order that sees every row once before any twice."""

    def __init__(self, rows: int, batch: int, seed: int) -> None:
        self.rows, self.batch, self.seed = rows, batch, seed
        # all rows in the order of an epoch, int64 [rows]; the last one is kept
        self.permutation = functools.lru_cache(maxsize=1)(lambda epoch: shuffled(seed, epoch, rows))

    def step_rows(self, step: int) -> np.ndarray:
        """Return rows of the global batch of `step`, int64 [batch]."""
        positions = np.arange(step * self.batch, (step + 1) * self.batch)
        epochs, offsets = np.divmod(positions, self.rows)
        parts = [self.permutation(epoch)[offsets[epochs == epoch]] for epoch in np.unique(epochs).tolist()]
        return np.concatenate(parts)


class Holding(NamedTuple):
    """From which step which mixture holds; None: none, all rows in one permutation."""

    step: int
    mixture: MixtureConfig | None


class Domain(NamedTuple):
    """A domain with its rows, and what these amount to in an epoch, in tokens or rows as shares are."""

    name: str
    rows: int
    amount: int


class Flow(NamedTuple):
    """The amount of each domain that is due by a time, which is in steps: linear between knots."""

    times: list[float]  # [K] of the knots, ascending
    due: np.ndarray  # [K, D] by each knot
    rates: np.ndarray  # [K, D] per step from each knot on

    def at(self, time: float) -> np.ndarray:
        """Return the amounts due by `time`, not before the first knot, [D]; they never fall."""
        knot = max(0, bisect_right(self.times, time) - 1)
        return self.due[knot] + (time - self.times[knot]) * self.rates[knot]


def mixture_flow(
    mixture: MixtureConfig, domains: Sequence[Domain], batch: int, start: int, done: Sequence[float]
) -> Flow:
    """Return the flow of `mixture` from step `start` on, by when so much of each domain is `done`.

    Ramps begin at `start`; epochs count from the beginning of the run.
    """
    weights = shares(mixture, domains)
    most = [mixture.max_epochs.get(domain.name, math.inf) * domain.amount for domain in domains]
    edges = {0.0}  # of the stairs of all ramps, in steps from their beginning
    for weight in weights:
        count = min(weight.steps, STAIRS) if weight.first != weight.last else 0
        edges |= {weight.steps * stair / count for stair in range(count + 1)} if count else set()
    stairs = sorted(edges)
    times, due, rates = [float(start)], [np.array(done, dtype=np.float64)], []
    for begin, end in zip(stairs, [*stairs[1:], math.inf], strict=True):
        middle = begin if end == math.inf else (begin + end) / 2
        current = [weight.at(middle) for weight in weights]
        while True:
            left = [m - d if w else math.inf for m, d, w in zip(most, due[-1], current, strict=True)]
            current = [0.0 if have <= 0 else w for have, w in zip(left, current, strict=True)]
            terms = [w * d.rows / d.amount for w, d in zip(current, domains, strict=True) if w]
            rows = math.fsum(terms)  # for shares that add up to 1
            rate = [batch * w / rows if w else 0.0 for w in current]
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


def shares(mixture: MixtureConfig, domains: Sequence[Domain]) -> list[Ramp]:
    """Return each domain's share over the steps since the mixture holds; they need not add up to 1.

    Raises UserError for a domain that the data lack, or that the mixture forgets.
    """
    names = [domain.name for domain in domains]
    for name in (*mixture.shares, *mixture.max_epochs):
        if name not in names:
            problem = f"train.mixture names {name}, of which the data hold no rows"
            raise UserError(f"{problem}; {nearest(name, names)}", code="mixture-domains")
    if mixture.temperature is not None:
        most = max(domain.amount for domain in domains)  # divided by it: a power of it alone may overflow
        raised = [(domain.amount / most) ** (1 / mixture.temperature) for domain in domains]
        total = math.fsum(raised)
        # the last bits of a power may differ from host to host
        return [Ramp(part, part, 1) for part in (round(power / total, 12) for power in raised)]
    if forgotten := [name for name in names if name not in mixture.shares]:
        problem = f"train.mixture.shares lacks {', '.join(forgotten)}; a share of 0 leaves a domain out"
        raise UserError(problem, code="mixture-domains")
    return [as_schedule(mixture.shares[name]) for name in names]


def normalised(mixture: MixtureConfig, domains: Sequence[Domain]) -> list[tuple[float, float]]:
    """Return the share of each domain when the mixture begins to hold, and when its ramps have ended."""
    ramps = shares(mixture, domains)
    first, last = ([ramp.at(step) for ramp in ramps] for step in (0, max(ramp.steps for ramp in ramps)))
    return [(a / math.fsum(first), b / math.fsum(last)) for a, b in zip(first, last, strict=True)]


class Stream:
    """The rows of one domain, epoch after epoch.

    rows: int64 [n], n > 0. sizes: what each adds to what shares are of, above 0. order: of an epoch, indices
    into `rows`, int64 [n].
    """

    def __init__(self, rows: np.ndarray, sizes: np.ndarray, order: Callable[[int], np.ndarray]) -> None:
        self.rows, self.amount = rows, int(sizes.sum())
        narrow = _narrow(sizes)

        @functools.lru_cache(maxsize=2)
        def epoch_of(epoch: int) -> tuple[np.ndarray, np.ndarray]:
            """Return the rows' indices in an epoch's order, and their middles in it."""
            indices = _narrow(order(epoch))
            ordered = narrow[indices].astype(np.float64)
            return indices, np.cumsum(ordered) - ordered / 2

        self._sizes, self._epoch = narrow, epoch_of

    def count(self, due: float) -> int:
        """Return rows whose middle is due when so much is; it never falls when more is."""
        epoch = int(due // self.amount)
        within = np.searchsorted(self._epoch(epoch)[1], due - epoch * self.amount, "right")
        return epoch * len(self.rows) + int(within)

    def amount_of(self, count: int) -> int:
        """Return the sum of the sizes of the first `count` rows."""
        epoch, remainder = divmod(count, len(self.rows))
        return epoch * self.amount + int(self._sizes[self._epoch(epoch)[0][:remainder]].sum())

    def take(self, start: int, stop: int) -> np.ndarray:
        """Return rows [start, stop) of the endless sequence."""
        epochs, positions = np.divmod(np.arange(start, stop), len(self.rows))
        parts = [self._epoch(epoch)[0][positions[epochs == epoch]] for epoch in np.unique(epochs).tolist()]
        return self.rows[np.concatenate([np.zeros(0, np.int64), *parts])]


def _narrow(numbers: np.ndarray) -> np.ndarray:
    """Return the same whole numbers in as few bytes as hold them: every rank keeps some for each row."""
    return numbers.astype(np.min_scalar_type(int(numbers.max())))


class Leg(NamedTuple):
    """The steps in which one mixture holds."""

    start: int  # step
    taken: np.ndarray  # [D] rows of each domain by then
    streams: list[Stream]
    flow: Flow
    shares: list[tuple[float, float]]  # [D] at its beginning, and when its ramps have ended


class Portion(NamedTuple):
    """A domain's part of a run: its share, rows, epochs and supervised tokens."""

    name: str
    shares: tuple[float, float]  # of the last mixture: when it begins to hold, and when its ramps have ended
    rows: int
    epochs: float
    tokens: float  # supervised; so many as the mean of its rows has


class MixedOrder:
    """The rows that each step consumes, where domains have shares.

    domain: of each row, an index into `names`. tokens: supervised tokens of each row. history: which mixture
    holds from which step on, the first from 0; a domain goes on where it was when the mixture changes.
    Raises UserError for a mixture that does not fit the domains.
    """

    def __init__(
        self,
        domain: np.ndarray,
        tokens: np.ndarray,
        names: Sequence[str],
        batch: int,
        seed: int,
        history: Sequence[Holding],
    ) -> None:
        rows = [np.flatnonzero(domain == index) for index in range(len(names))]
        self._indices = [index for index, domain_rows in enumerate(rows) if len(domain_rows)]
        self._rows = [rows[index] for index in self._indices]
        self.names = [names[index] for index in self._indices]
        self.batch, self.seed = batch, seed
        self._domain, self._tokens = domain, tokens
        self._plain = BatchOrder(len(domain), batch, seed)
        self._bare = 0 if history[0].mixture is not None else history[1].step  # steps without a mixture
        self._last: tuple[int, np.ndarray] | None = None
        self._legs: list[Leg] = []
        for step, mixture in history:
            if mixture is not None:
                self._legs.append(self._leg(step, mixture))
                self._last = None

    def step_rows(self, step: int) -> np.ndarray:
        """Return the global batch of `step`, int64 rows [batch]: domains alternate as evenly as they can."""
        if step < self._bare:
            return self._plain.step_rows(step)
        streams = self._leg_at(step).streams
        before, after = self.taken(step), self.taken(step + 1)
        parts = [s.take(*ends) for s, *ends in zip(streams, before.tolist(), after.tolist(), strict=True)]
        positions = [(np.arange(len(part)) + 0.5) / max(1, len(part)) for part in parts]
        return np.concatenate(parts)[np.argsort(np.concatenate(positions), kind="stable")]

    def taken(self, step: int) -> np.ndarray:
        """Return rows of each domain before `step`, int64 [D].

        Raises UserError where all that have a share have run out of epochs by then.
        """
        if self._last is not None and self._last[0] == step:
            return self._last[1]
        if step > self._bare:
            counts = self._clocked(self._leg_at(step), step * self.batch)
        else:
            epoch, remainder = divmod(step * self.batch, len(self._domain))
            begun = self._domain[self._plain.permutation(epoch)[:remainder]]
            pairs = zip(self._indices, self._rows, strict=True)
            counts = np.array([epoch * len(rows) + int((begun == index).sum()) for index, rows in pairs])
        self._last = step, counts
        return counts

    def portions(self, steps: int) -> list[Portion]:
        """Return each domain's part of the first `steps` steps."""
        columns = (self.names, self._legs[-1].shares, self._rows, self.taken(steps).tolist())
        return [
            Portion(name, shares, taken, taken / len(rows), taken / len(rows) * int(self._tokens[rows].sum()))
            for name, shares, rows, taken in zip(*columns, strict=True)
        ]

    def _leg(self, step: int, mixture: MixtureConfig) -> Leg:
        """Return the leg that begins at `step`, after those before it."""
        sizes = np.maximum(self._tokens, 1) if mixture.by == "tokens" else np.ones_like(self._tokens)
        streams = [
            Stream(rows, sizes[rows], functools.partial(self._order, index))
            for index, rows in zip(self._indices, self._rows, strict=True)
        ]
        taken = self.taken(step)
        domains = [Domain(n, len(s.rows), s.amount) for n, s in zip(self.names, streams, strict=True)]
        done = [stream.amount_of(count) for stream, count in zip(streams, taken.tolist(), strict=True)]
        flow = mixture_flow(mixture, domains, self.batch, step, done)
        return Leg(step, taken, streams, flow, normalised(mixture, domains))

    def _order(self, index: int, epoch: int) -> np.ndarray:
        """Return the order of a domain's rows in an epoch; while there was no mixture, that without one."""
        rows = self._rows[self._indices.index(index)]
        if epoch * len(self._domain) >= self._bare * self.batch:
            return shuffled(self.seed, epoch, len(rows), index)
        every = self._plain.permutation(epoch)
        return np.searchsorted(rows, every[self._domain[every] == index])

    def _leg_at(self, step: int) -> Leg:
        return next(leg for leg in reversed(self._legs) if leg.start <= step)

    def _clocked(self, leg: Leg, rows: int) -> np.ndarray:
        """Return the rows of each domain when they are `rows` together, [D]: the module's k_d."""
        time, low, high = float(rows / self.batch), float(leg.start), math.inf
        below = above = leg.taken
        for tries in itertools.count():
            due = zip(leg.streams, leg.flow.at(time).tolist(), strict=True)
            counts = np.array([stream.count(amount) for stream, amount in due])
            missing = rows - int(counts.sum())
            if missing == 0:
                return counts
            if missing > 0:
                low, below = time, counts
                if time > leg.flow.times[-1] and not leg.flow.rates[-1].any():
                    problem = (
                        f"the domains of train.mixture last for {(rows - missing) // self.batch:,} steps"
                    )
                    raise UserError(f"{problem}; raise max_epochs, or set train.max_steps to that")
            else:
                high, above = time, counts
            time += missing / self.batch  # as if rows came evenly
            if tries >= 6 or not low < time < high:
                time = (low + high) / 2 if high < math.inf else low + 2.0**tries
            if not low < time < high:  # neighbours: rows of several domains are due at once
                extra = np.cumsum(above - below)
                return below + np.diff(np.minimum(extra, rows - int(below.sum())), prepend=0)
        raise AssertionError("the search does not end")
