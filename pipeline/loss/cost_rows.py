"""Rows of transport costs, made in the order in which the fused loss asks for them.

Tokens come sorted by target, so the distinct targets are met one after the other and a small window
of cost rows [w, V] suffices. `ExactRows` computes every window anew. `CachedRows` keeps the rows of
frequent targets in float16 between calls: text repeats itself, and most rows are then only read.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from pipeline.loss.cost import CostEmbedding
from pipeline.loss.cost_cache import CostCache

WINDOW_MB = 8.0  # of rows alive at a time on a CPU
CONVERTED = 16  # rows brought to float16 at a time


class Costs(NamedTuple):
    """Cost rows of the distinct targets of some tokens, and which of them each token uses."""

    rows: Tensor  # [u, V]; any dtype
    which: Tensor  # [n] int64
    similarity: bool = False  # the rows hold cosines s instead of costs max(0, 1 - s), the target's included


class Targets(NamedTuple):
    """The distinct targets of a batch, ascending, and where each token of the sorted batch finds its own."""

    ids: Tensor  # [U]
    which: Tensor  # [T] ascending


class CostRows(Protocol):
    """Where the kernels get their cost rows from."""

    def group(self, start: int, stop: int) -> Costs:
        """Rows for tokens [start, stop) of the sorted batch; valid until the next call."""


def open_rows(
    cost: CostEmbedding, targets: Targets, dtype: torch.dtype, most: int, chunk: int, as_stored: bool
) -> CostRows:
    """The rows of `targets`, for requests of at most `most` tokens.

    They come as costs in the statistics' `dtype`; with `as_stored` in whatever form is at hand, for
    kernels that convert while reading. Windows of rows are no larger than WINDOW_MB on a CPU, nor than a
    `chunk` of logits.
    """
    if cost.cache is not None:
        return CachedRows(cost, cost.cache, targets, dtype, as_stored)
    window = max(most, min(chunk, _window(cost, dtype)))
    return ExactRows(cost, targets, None if as_stored else dtype, window)


def _window(cost: CostEmbedding, dtype: torch.dtype) -> int:
    """Rows that WINDOW_MB holds on a CPU; elsewhere a request is served alone."""
    if cost.rows.device.type != "cpu":
        return 1
    return int(WINDOW_MB * 2**20) // (cost.vocab_size * dtype.itemsize)


class ExactRows:
    """Every row computed from the embedding, in its precision."""

    def __init__(self, cost: CostEmbedding, targets: Targets, dtype: torch.dtype | None, size: int) -> None:
        self.cost, self.targets, self.size = cost, targets, size
        self.dtype = dtype  # of the costs; None: leave the cosines as the product gives them
        self.first = self.last = 0
        self.rows: Tensor | None = None

    def group(self, start: int, stop: int) -> Costs:
        which = self.targets.which
        low, high = int(which[start]), int(which[stop - 1]) + 1
        if self.rows is None or low < self.first or high > self.last:
            self.rows = None  # free the old window before the new one is made
            self.first, self.last = low, min(low + self.size, len(self.targets.ids))
            ids = self.targets.ids[self.first : self.last]
            if self.dtype is None:
                self.rows = self.cost.cosines(ids)
            else:
                self.rows = self.cost.costs(ids).to(self.dtype)
        rows = self.rows[low - self.first : high - self.first]
        return Costs(rows, which[start:stop] - low, similarity=self.dtype is None)


class CachedRows:
    """Rows from a `CostCache`; missing ones are computed, a window of them at a time."""

    def __init__(
        self,
        cost: CostEmbedding,
        cache: CostCache,
        targets: Targets,
        dtype: torch.dtype,
        as_stored: bool,
    ) -> None:
        self.cost, self.cache, self.targets = cost, cache, targets
        self.dtype, self.as_stored = dtype, as_stored
        cache.seen[targets.ids] += torch.bincount(targets.which, minlength=len(targets.ids))
        self.places = cache.slot[targets.ids]

    def group(self, start: int, stop: int) -> Costs:
        which = self.targets.which[start:stop]
        low, high = int(which[0]), int(which[-1]) + 1
        if self.as_stored and high - low <= self.cache.window:
            self._ensure(low, high)
            return Costs(self.cache.rows, self.places[which])
        shape = (high - low, self.cost.vocab_size)
        rows = torch.empty(shape, dtype=self.dtype, device=which.device)
        for first in range(low, high, self.cache.window):
            last = min(first + self.cache.window, high)
            self._ensure(first, last)
            rows[first - low : last - low] = self.cache.rows[self.places[first:last]]
        return Costs(rows, which - low)

    def _ensure(self, low: int, high: int) -> None:
        """Compute what targets [low, high) miss, and the next missing ones while at it.

        high - low is at most the table's window, so that all of them fit even if none finds a place.
        """
        if (self.places[low:high] >= 0).all():
            return
        # rows without a place of their own pass away with this window; mark them missing again
        self.places[self.places >= self.cache.capacity] = -1
        ids = self.targets.ids
        missing = (self.places[low:] < 0).nonzero()[: self.cache.window, 0] + low
        fresh = ids[missing]
        place = self.cache.places(fresh, ids)
        costs = self.cost.costs(fresh)
        for start in range(0, len(fresh), CONVERTED):  # no second copy of the whole window
            part = slice(start, start + CONVERTED)
            self.cache.rows[place[part]] = costs[part].to(torch.float16)
        self.places[missing] = place
