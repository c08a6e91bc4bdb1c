"""The rows that each step consumes, which depend on no rank, restart or topology.

Without a mixture, step s consumes positions [s*B, (s+1)*B) of an endless sequence: one seeded permutation of
all rows per epoch. With a mixture every domain d has such a sequence, and

    k_d(s) = number of rows of d whose middle is due by time t(s),     sum_d k_d(s) = s B

is the number of its rows before step s. The middle of a row is its position in its domain's sequence, in
tokens. The time t(s) is chosen so that the rows of all domains are s complete batches. The tokens of a domain
therefore differ from its share by at most a row, and any step can be computed without the steps before it.

The amount of a domain that is due by a time does not depend on single rows. With shares w_d of tokens and on
average mu_d tokens in a row of domain d, a step of B rows has

    g_d = B w_d / sum_j (w_j / mu_j)

tokens of d, and the amount that is due by a time is the integral of g_d. Ramps are climbed in stairs. When a
domain has had its last epoch, the others get its share in proportion. Between such changes g is constant, so
the integral is piecewise linear. With shares of rows, mu is 1. Only basic arithmetic is used, which gives the
same bits on every host.
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
from ..model.objective.build import as_schedule
from .config import MixtureConfig

STAIRS = 1024  # largest number in a ramp

# Up to 4 epochs of the same text are almost as good as new text: Muennighoff et al., "Scaling
# Data-Constrained Language Models" (2023), section 6.
REPEATED = 4


def shuffle_rows(seed: int, epoch: int, rows: int, domain: int = 0) -> np.ndarray:
    """Return the permutation of an epoch, int64 [rows]. NumPy ignores zeros at the end of a seed."""
    return np.random.default_rng([seed, epoch, domain]).permutation(rows)


class BatchOrder:
    """The rows of each step without a mixture. Every row is used once before any is used twice."""

    def __init__(self, rows: int, batch: int, seed: int) -> None:
        self.rows = rows
        self.batch = batch
        self.seed = seed
        # int64 [rows] of an epoch. The last one is kept in memory.
        self.permutation = functools.lru_cache(maxsize=1)(lambda epoch: shuffle_rows(seed, epoch, rows))

    def step_rows(self, step: int) -> np.ndarray:
        """Return the rows of the global batch of `step`, int64 [batch]."""
        positions = np.arange(step * self.batch, (step + 1) * self.batch)
        epochs, offsets = np.divmod(positions, self.rows)
        parts = [self.permutation(epoch)[offsets[epochs == epoch]] for epoch in np.unique(epochs).tolist()]
        return np.concatenate(parts)


class MixtureStart(NamedTuple):
    """The step from which a mixture is used."""

    step: int
    mixture: MixtureConfig | None  # None: all rows in one permutation


class Domain(NamedTuple):
    """The size of a domain."""

    name: str
    rows: int
    amount: int  # tokens or rows of an epoch, depending on `mixture.by`


class Flow(NamedTuple):
    """The amount of each domain that is due by a time in steps. It is linear between knots."""

    times: list[float]  # [K] of the knots, ascending
    due: np.ndarray  # [K, D] by each knot
    rates: np.ndarray  # [K, D] per step after each knot

    def at(self, time: float) -> np.ndarray:
        """Return the amounts due by `time`, which is not before the first knot, [D]. They never fall."""
        knot = max(0, bisect_right(self.times, time) - 1)
        return self.due[knot] + (time - self.times[knot]) * self.rates[knot]


def mixture_flow(
    mixture: MixtureConfig, domains: Sequence[Domain], batch: int, start: int, done: Sequence[float]
) -> Flow:
    """Return the amounts that are due under a mixture. Epochs count from the beginning of the run.

    Args:
        mixture: The mixture.
        domains: Sizes of the domains.
        batch: Rows of a step.
        start: Step from which the mixture is used, and at which its ramps begin.
        done: Amount of each domain before that step.
    """
    ramps = domain_shares(mixture, domains)
    limits = [mixture.max_epochs.get(domain.name, math.inf) * domain.amount for domain in domains]
    times = [float(start)]
    due = [np.array(done, dtype=np.float64)]
    rates = []
    for first, last in itertools.pairwise([*_stairs(ramps), math.inf]):
        middle = first if last == math.inf else (first + last) / 2
        weights = [ramp.at(middle) for ramp in ramps]
        ran_out = True
        while ran_out:
            columns = zip(limits, due[-1], weights, strict=True)
            left = [limit - amount if weight else math.inf for limit, amount, weight in columns]
            weights = [0.0 if amount <= 0 else w for amount, w in zip(left, weights, strict=True)]
            rate = _rates(weights, domains, batch)
            lasts = [amount / r if r else math.inf for amount, r in zip(left, rate, strict=True)]  # steps
            stop = min(times[-1] + min(lasts), start + last)
            rates.append(np.array(rate))
            if stop == math.inf or not any(rate):  # the last stair, or all domains have run out
                return Flow(times, np.array(due), np.array(rates))
            reached = due[-1] + (stop - times[-1]) * rates[-1]
            ran_out = times[-1] + min(lasts) < start + last
            if ran_out:
                domain = lasts.index(min(lasts))
                reached[domain] = limits[domain]
            times.append(stop)
            due.append(reached)
    raise AssertionError("the last stair has no end")


def _rates(weights: Sequence[float], domains: Sequence[Domain], batch: int) -> list[float]:
    """Return the amount of each domain per step of `batch` rows, in proportion to `weights`: g_d above."""
    terms = [w * d.rows / d.amount for w, d in zip(weights, domains, strict=True) if w]
    rows = math.fsum(terms)  # of a step, if the weights add up to 1
    return [batch * w / rows if w else 0.0 for w in weights]


def _stairs(ramps: Sequence[Ramp]) -> list[float]:
    """Return the steps, counted from the start of the ramps, at which a stair of some ramp begins."""
    edges = {0.0}
    for ramp in ramps:
        if ramp.first != ramp.last and ramp.steps:
            count = min(ramp.steps, STAIRS)
            edges |= {ramp.steps * stair / count for stair in range(count + 1)}
    return sorted(edges)


def domain_shares(mixture: MixtureConfig, domains: Sequence[Domain]) -> list[Ramp]:
    """Return the share of each domain over the steps of the mixture. Shares need not add up to 1.

    Raises UserError if the mixture names a domain without data, or lacks a domain.
    """
    names = [domain.name for domain in domains]
    for name in (*mixture.shares, *mixture.max_epochs):
        if name not in names:
            problem = f"train.mixture names {name}, of which the data have no rows"
            raise UserError(f"{problem}; {nearest(name, names)}", code="mixture-domains")
    if mixture.temperature is not None:
        largest = max(domain.amount for domain in domains)  # without the division a power could overflow
        powers = [(domain.amount / largest) ** (1 / mixture.temperature) for domain in domains]
        total = math.fsum(powers)
        # rounded because the last bits of a power may differ between hosts
        return [Ramp(share, share, 1) for share in (round(power / total, 12) for power in powers)]
    if missing := [name for name in names if name not in mixture.shares]:
        problem = f"train.mixture.shares lacks {', '.join(missing)}; a share of 0 leaves a domain out"
        raise UserError(problem, code="mixture-domains")
    return [as_schedule(mixture.shares[name]) for name in names]


def normalized_shares(mixture: MixtureConfig, domains: Sequence[Domain]) -> list[tuple[float, float]]:
    """Return the share of each domain at the start of a mixture, and at the end of its ramps."""
    ramps = domain_shares(mixture, domains)
    first, last = ([ramp.at(step) for ramp in ramps] for step in (0, max(ramp.steps for ramp in ramps)))
    return [(a / math.fsum(first), b / math.fsum(last)) for a, b in zip(first, last, strict=True)]


class DomainStream:
    """The endless sequence of the rows of one domain, epoch after epoch.

    `rows` [n] are numbers in the data, and `sizes` [n] the positive amount of each row. `order` returns the
    order of an epoch, as indices into `rows`.
    """

    def __init__(self, rows: np.ndarray, sizes: np.ndarray, order: Callable[[int], np.ndarray]) -> None:
        self.rows = rows
        self.amount = int(sizes.sum())
        self._sizes = sizes = _shrink(sizes)

        @functools.lru_cache(maxsize=2)
        def order_and_middles(epoch: int) -> tuple[np.ndarray, np.ndarray]:
            indices = _shrink(order(epoch))
            ordered = sizes[indices].astype(np.float64)
            return indices, np.cumsum(ordered) - ordered / 2

        self._epoch = order_and_middles

    def count(self, due: float) -> int:
        """Return the number of rows whose middle lies within the amount `due`. It never falls with `due`."""
        epoch = int(due // self.amount)
        within = np.searchsorted(self._epoch(epoch)[1], due - epoch * self.amount, "right")
        return epoch * len(self.rows) + int(within)

    def amount_of(self, count: int) -> int:
        """Return the amount of the first `count` rows."""
        epoch, remainder = divmod(count, len(self.rows))
        return epoch * self.amount + int(self._sizes[self._epoch(epoch)[0][:remainder]].sum())

    def take(self, start: int, stop: int) -> np.ndarray:
        """Return the rows at positions [start, stop)."""
        epochs, positions = np.divmod(np.arange(start, stop), len(self.rows))
        parts = [self._epoch(epoch)[0][positions[epochs == epoch]] for epoch in np.unique(epochs).tolist()]
        return self.rows[np.concatenate([np.zeros(0, np.int64), *parts])]


def _shrink(numbers: np.ndarray) -> np.ndarray:
    """Return integers with as few bytes as possible, because every rank keeps some for each row."""
    return numbers.astype(np.min_scalar_type(int(numbers.max())))


class Period(NamedTuple):
    """The steps in which one mixture is used."""

    start: int  # first step
    counts: np.ndarray  # [D] rows of each domain before it
    streams: list[DomainStream]
    flow: Flow
    shares: list[tuple[float, float]]  # [D] at the start, and at the end of the ramps


class Portion(NamedTuple):
    """The part of a domain in a run."""

    name: str
    shares: tuple[float, float]  # of the last mixture: at its start, and at the end of its ramps
    rows: int
    epochs: float
    tokens: float  # supervised, estimated from the mean of the domain's rows


class MixedOrder:
    """The rows of each step with a mixture. If the mixture changes, each domain continues where it was."""

    def __init__(
        self,
        domain: np.ndarray,
        tokens: np.ndarray,
        names: Sequence[str],
        batch: int,
        seed: int,
        history: Sequence[MixtureStart],
    ) -> None:
        """Create the order of a run. Raises UserError for a mixture that does not fit the domains.

        Args:
            domain: Domain of each row, as an index into `names`, [rows].
            tokens: Supervised tokens of each row, [rows].
            names: Names of the domains.
            batch: Rows of a step.
            seed: Seed of the permutations.
            history: The mixtures of the run, the first from step 0.
        """
        rows = [np.flatnonzero(domain == index) for index in range(len(names))]
        self._indices = [index for index, domain_rows in enumerate(rows) if len(domain_rows)]
        self._rows = [rows[index] for index in self._indices]
        self.names = [names[index] for index in self._indices]
        self.batch = batch
        self.seed = seed
        self._domain = domain
        self._tokens = tokens
        self._plain = BatchOrder(len(domain), batch, seed)
        self._plain_steps = 0 if history[0].mixture is not None else history[1].step  # without a mixture
        self._last: tuple[int, np.ndarray] | None = None  # step and result of the last `count_rows`
        self._periods: list[Period] = []
        for step, mixture in history:
            if mixture is not None:
                self._periods.append(self._create_period(step, mixture))
                self._last = None

    def step_rows(self, step: int) -> np.ndarray:
        """Return the rows of the global batch of `step`, int64 [batch]. Domains alternate evenly."""
        if step < self._plain_steps:
            return self._plain.step_rows(step)
        streams = self._period_of(step).streams
        starts = self.count_rows(step).tolist()
        stops = self.count_rows(step + 1).tolist()
        parts = [stream.take(*ends) for stream, *ends in zip(streams, starts, stops, strict=True)]
        positions = [(np.arange(len(part)) + 0.5) / max(1, len(part)) for part in parts]
        return np.concatenate(parts)[np.argsort(np.concatenate(positions), kind="stable")]

    def count_rows(self, step: int) -> np.ndarray:
        """Return the number of rows of each domain before `step`, int64 [D].

        Raises UserError if all domains with a share have had their last epoch by then.
        """
        if self._last is not None and self._last[0] == step:
            return self._last[1]
        if step > self._plain_steps:
            counts = self._split_rows(self._period_of(step), step * self.batch)
        else:
            epoch, remainder = divmod(step * self.batch, len(self._domain))
            domains = self._domain[self._plain.permutation(epoch)[:remainder]]
            pairs = zip(self._indices, self._rows, strict=True)
            counts = np.array([epoch * len(rows) + int((domains == index).sum()) for index, rows in pairs])
        self._last = step, counts
        return counts

    def portions(self, steps: int) -> list[Portion]:
        """Return the part of each domain in the first `steps` steps."""
        columns = (self.names, self._periods[-1].shares, self._rows, self.count_rows(steps).tolist())
        return [
            Portion(name, shares, count, count / len(rows), count / len(rows) * int(self._tokens[rows].sum()))
            for name, shares, rows, count in zip(*columns, strict=True)
        ]

    def _create_period(self, step: int, mixture: MixtureConfig) -> Period:
        """Return the period that begins at `step`, after the existing ones."""
        sizes = np.maximum(self._tokens, 1) if mixture.by == "tokens" else np.ones_like(self._tokens)
        streams = [
            DomainStream(rows, sizes[rows], functools.partial(self._epoch_order, index))
            for index, rows in zip(self._indices, self._rows, strict=True)
        ]
        counts = self.count_rows(step)
        domains = [Domain(n, len(s.rows), s.amount) for n, s in zip(self.names, streams, strict=True)]
        done = [stream.amount_of(count) for stream, count in zip(streams, counts.tolist(), strict=True)]
        flow = mixture_flow(mixture, domains, self.batch, step, done)
        return Period(step, counts, streams, flow, normalized_shares(mixture, domains))

    def _epoch_order(self, index: int, epoch: int) -> np.ndarray:
        """Return the order of a domain's rows in an epoch. Steps without a mixture define it for theirs."""
        rows = self._rows[self._indices.index(index)]
        if epoch * len(self._domain) >= self._plain_steps * self.batch:
            return shuffle_rows(self.seed, epoch, len(rows), index)
        permutation = self._plain.permutation(epoch)
        return np.searchsorted(rows, permutation[self._domain[permutation] == index])

    def _period_of(self, step: int) -> Period:
        return next(period for period in reversed(self._periods) if period.start <= step)

    def _split_rows(self, period: Period, rows: int) -> np.ndarray:
        """Return how many of the first `rows` rows each domain has, [D]: k_d in the module's docstring.

        Searches for the time at which the domains together have that many rows.
        """
        time = float(rows / self.batch)
        low = float(period.start)
        high = math.inf
        low_counts = high_counts = period.counts
        for tries in itertools.count():
            due = zip(period.streams, period.flow.at(time).tolist(), strict=True)
            counts = np.array([stream.count(amount) for stream, amount in due])
            missing = rows - int(counts.sum())
            if missing == 0:
                return counts
            if missing > 0:
                low = time
                low_counts = counts
                if time > period.flow.times[-1] and not period.flow.rates[-1].any():
                    steps = (rows - missing) // self.batch
                    problem = f"the domains of train.mixture last for {steps:,} steps"
                    raise UserError(
                        f"{problem}. Raise max_epochs, or set train.max_steps to that", code="epochs"
                    )
            else:
                high = time
                high_counts = counts
            time += missing / self.batch  # exact if rows come evenly
            if tries >= 6 or not low < time < high:
                time = (low + high) / 2 if high < math.inf else low + 2.0**tries
            if not low < time < high:  # no float lies between: rows of several domains are due at once
                extra = np.cumsum(high_counts - low_counts)
                return low_counts + np.diff(np.minimum(extra, rows - int(low_counts.sum())), prepend=0)
        raise AssertionError("the search does not end")
