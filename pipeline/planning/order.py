"""Which rows each step consumes: an order that no rank, restart or topology changes, with or without shares

Without a mixture step s consumes positions [s*B, (s+1)*B) of an endless sequence: one seeded permutation of
the rows per epoch, one epoch after the other. With one every domain has such a sequence of its own, and

    k_d(s) = the rows of domain d whose middle is due by t(s),     sum_d k_d(s) = s B

says how far each has come: the middles of its rows, in tokens from the first, are laid against what
`mixture.py` says is due, and the clock t(s) is moved until the rows are s whole batches. The tokens of a
domain are therefore never further than a row from its share, however uneven its rows are, and any step is
found at once. Nothing of it depends on the number of ranks, the micro-batch or the accumulation.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from common.errors import UserError
from pipeline.config import MixtureConfig
from pipeline.planning.mixture import Domain, Flow, mixture_flow, normalised

NEWTON = 6  # steps towards t(s) by the number of rows that are missing, before it is enclosed by halves
KEPT = 2  # epochs of a domain that are kept at hand


def shuffled(seed: int, epoch: int, rows: int, domain: int = 0) -> np.ndarray:
    """Return an epoch's permutation, int64 [rows]. NumPy seeds alike with and without zeros in the end."""
    return np.random.default_rng([seed, epoch, domain]).permutation(rows)


class BatchOrder:
    """The rows that each step consumes, in an order that sees every row once before any twice."""

    def __init__(self, rows: int, batch: int, seed: int) -> None:
        self.rows, self.batch, self.seed = rows, batch, seed
        self._epochs: dict[int, np.ndarray] = {}

    def step_rows(self, step: int) -> np.ndarray:
        """Return rows of the global batch of `step`, int64 [batch]."""
        positions = np.arange(step * self.batch, (step + 1) * self.batch)
        epochs, offsets = np.divmod(positions, self.rows)
        self._epochs = {e: self.permutation(e) for e in np.unique(epochs).tolist()}
        return np.array([self._epochs[e][o] for e, o in zip(epochs, offsets, strict=True)])

    def permutation(self, epoch: int) -> np.ndarray:
        """Return all rows in the order of an epoch, int64 [rows]."""
        cached = self._epochs.get(epoch)
        return shuffled(self.seed, epoch, self.rows) if cached is None else cached


class Holding(NamedTuple):
    """From which step which mixture holds; None: none, all rows in one permutation."""

    step: int
    mixture: MixtureConfig | None


class Stream:
    """The rows of one domain, epoch after epoch.

    rows: int64 [n], n > 0. sizes: what each adds to what shares are of, above 0. order: of an epoch, indices
    into `rows`, int64 [n].
    """

    def __init__(self, rows: np.ndarray, sizes: np.ndarray, order: Callable[[int], np.ndarray]) -> None:
        self.rows, self.amount = rows, int(sizes.sum())
        self._sizes, self._order = _narrow(sizes), order
        self._epochs: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def count(self, due: float) -> int:
        """Return rows whose middle is due when so much is; it never falls when more is."""
        epoch = int(due // self.amount)
        middles = self._epoch(epoch)[1]
        return epoch * len(self.rows) + int(np.searchsorted(middles, due - epoch * self.amount, "right"))

    def amount_of(self, count: int) -> int:
        """Return the sum of the sizes of the first `count` rows."""
        epoch, remainder = divmod(count, len(self.rows))
        return epoch * self.amount + int(self._sizes[self._epoch(epoch)[0][:remainder]].sum())

    def take(self, start: int, stop: int) -> np.ndarray:
        """Return rows [start, stop) of the endless sequence."""
        epochs, positions = np.divmod(np.arange(start, stop), len(self.rows))
        parts = [self._epoch(epoch)[0][positions[epochs == epoch]] for epoch in np.unique(epochs).tolist()]
        return self.rows[np.concatenate([np.zeros(0, np.int64), *parts])]

    def _epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows' indices in an epoch's order, and their middles in it."""
        entry = self._epochs.pop(epoch, None)
        if entry is None:
            order = _narrow(self._order(epoch))
            sizes = self._sizes[order].astype(np.float64)
            entry = order, np.cumsum(sizes) - sizes / 2
            while len(self._epochs) >= KEPT:
                del self._epochs[next(iter(self._epochs))]
        self._epochs[epoch] = entry
        return entry


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

    def due(self, time: float) -> np.ndarray:
        """Return rows of each domain whose middle is due by `time`, [D]."""
        due = self.flow.at(time).tolist()
        return np.array([stream.count(amount) for stream, amount in zip(self.streams, due, strict=True)])


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
        if self._last is None or self._last[0] != step:
            self._last = step, self._taken(step)
        return self._last[1]

    def portions(self, steps: int) -> list[Portion]:
        """Return each domain's part of the first `steps` steps."""
        portions = []
        columns = (self.names, self._legs[-1].shares, self._rows, self.taken(steps).tolist())
        for name, shares, rows, taken in zip(*columns, strict=True):
            epochs = taken / len(rows)
            portions.append(Portion(name, shares, taken, epochs, epochs * int(self._tokens[rows].sum())))
        return portions

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

    def _taken(self, step: int) -> np.ndarray:
        if step > self._bare:
            return self._clocked(self._leg_at(step), step * self.batch)
        epoch, remainder = divmod(step * self.batch, len(self._domain))
        begun = self._domain[self._plain.permutation(epoch)[:remainder]]
        pairs = zip(self._indices, self._rows, strict=True)
        return np.array([epoch * len(rows) + int((begun == index).sum()) for index, rows in pairs])

    def _clocked(self, leg: Leg, rows: int) -> np.ndarray:
        """Return the rows of each domain when they are `rows` together, [D]: the module's k_d."""
        time, low, high = float(rows / self.batch), float(leg.start), math.inf
        below = above = leg.taken
        for tries in itertools.count():
            counts = leg.due(time)
            missing = rows - int(counts.sum())
            if missing == 0:
                return counts
            if missing > 0:
                low, below = time, counts
                if leg.flow.dry and time > leg.flow.times[-1]:
                    raise UserError(
                        "train.mixture: every domain that has a share has had its max_epochs after "
                        f"{(rows - missing) // self.batch:,} steps; raise them, or set train.steps to that"
                    )
            else:
                high, above = time, counts
            time += missing / self.batch  # as if rows came evenly
            if tries >= NEWTON or not low < time < high:
                time = (low + high) / 2 if high < math.inf else low + 2.0**tries
            if not low < time < high:  # neighbours: rows of several domains are due at once
                extra = np.cumsum(above - below)
                return below + np.diff(np.minimum(extra, rows - int(below.sum())), prepend=0)
        raise AssertionError("the search does not end")
