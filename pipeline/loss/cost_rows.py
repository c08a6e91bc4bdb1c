"""Rows of transport costs, made in the order in which the fused loss asks for them.

Tokens come sorted by target, so the distinct targets are met one after the other and a small window
of cost rows [w, V] suffices. `ExactRows` computes every row once a batch. `CachedRows` keeps the rows of
frequent targets in float16 between calls: text repeats itself, and most rows are then only read.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from pipeline.loss.cost import CostEmbedding
from pipeline.loss.cost_cache import CostCache
from pipeline.loss.padding import padded_rows
from pipeline.loss.token_plan import OnDevice, TokenPlan

WINDOW_MB = 8.0  # of rows alive at a time on a CPU
CONVERTED = 16  # rows brought to float16 at a time


class Costs(NamedTuple):
    """Cost rows of the distinct targets of some tokens, and which of them each token uses."""

    rows: Tensor  # [u, V]; any dtype
    which: Tensor  # [n] int64
    similarity: bool = False  # the rows hold cosines s instead of costs max(0, 1 - s), the target's included


class CostRows(Protocol):
    """Where the kernels get their cost rows from."""

    def group(self, start: int, stop: int) -> Costs:
        """Rows for tokens [start, stop) of the plan; valid until the next call."""


def open_rows(
    cost: CostEmbedding,
    plan: TokenPlan,
    order: OnDevice,
    dtype: torch.dtype,
    most: int,
    chunk: int,
    as_stored: bool,
) -> CostRows:
    """The rows of a plan's targets (`order`: the plan on the device), for requests of at most `most` tokens.

    They come as costs in the statistics' `dtype`; with `as_stored` in whatever form is at hand, for
    kernels that convert while reading. Windows of rows are no larger than WINDOW_MB on a CPU, nor than a
    `chunk` of logits.
    """
    if cost.cache is not None:
        return CachedRows(cost, cost.cache, plan, order, dtype, as_stored)
    window = max(most, min(chunk, _window(cost, dtype)))
    return ExactRows(cost, plan, order, None if as_stored else dtype, min(window, len(plan.targets)))


def _window(cost: CostEmbedding, dtype: torch.dtype) -> int:
    """Rows that WINDOW_MB holds on a CPU; elsewhere a request is served alone."""
    if cost.rows.device.type != "cpu":
        return 1
    return int(WINDOW_MB * 2**20) // (cost.vocab_size * dtype.itemsize)


class ExactRows:
    """Every row computed from the embedding, in its precision, once."""

    def __init__(
        self, cost: CostEmbedding, plan: TokenPlan, order: OnDevice, dtype: torch.dtype | None, size: int
    ) -> None:
        self.cost, self.plan, self.order, self.size = cost, plan, order, size
        self.similarity = dtype is None  # leave the cosines as the product gives them
        self.first = self.last = 0
        kept = dtype or torch.promote_types(cost.rows.dtype, torch.float32)
        self.rows = padded_rows(size, cost.vocab_size, kept, cost.rows.device)

    def group(self, start: int, stop: int) -> Costs:
        low, high = int(self.plan.which[start]), int(self.plan.which[stop - 1]) + 1
        if high > self.last:
            self._move(low)
        rows = self.rows[low - self.first : high - self.first]
        return Costs(rows, self.order.which[start:stop] - low, self.similarity)

    def _move(self, low: int) -> None:
        """Let the window begin at target `low`: what it holds already is kept, the rest is computed."""
        kept = self.last - low
        if kept > 0:
            self.rows[:kept] = self.rows[low - self.first : self.last - self.first].clone()
        first, self.first = max(low, self.last), low
        self.last = min(low + self.size, len(self.plan.targets))
        targets, out = self.order.targets[first : self.last], self.rows[first - low : self.last - low]
        if self.similarity:
            self.cost.cosines(targets, out)
        else:
            self.cost.costs(targets, out)


class CachedRows:
    """Rows from a `CostCache`; missing ones are computed, a window of them at a time."""

    def __init__(
        self,
        cost: CostEmbedding,
        cache: CostCache,
        plan: TokenPlan,
        order: OnDevice,
        dtype: torch.dtype,
        as_stored: bool,
    ) -> None:
        self.cost, self.cache, self.plan, self.order = cost, cache, plan, order
        self.dtype, self.as_stored = dtype, as_stored
        cache.seen[plan.targets] += plan.counts
        self.places = cache.slot[plan.targets]
        self._placed: Tensor | None = None  # the places on the device, until they change

    def group(self, start: int, stop: int) -> Costs:
        low, high = int(self.plan.which[start]), int(self.plan.which[stop - 1]) + 1
        which = self.order.which[start:stop]
        if self.as_stored and high - low <= self.cache.window:
            self._ensure(low, high)
            return Costs(self.cache.rows, self._on_device()[which])
        shape = (high - low, self.cost.vocab_size)
        rows = torch.empty(shape, dtype=self.dtype, device=which.device)
        for first in range(low, high, self.cache.window):
            last = min(first + self.cache.window, high)
            self._ensure(first, last)
            rows[first - low : last - low] = self.cache.rows[self._on_device()[first:last]]
        return Costs(rows, which - low)

    def _on_device(self) -> Tensor:
        if self._placed is None:
            self._placed = _sent(self.places, self.cost.rows.device)
        return self._placed

    def _ensure(self, low: int, high: int) -> None:
        """Compute what targets [low, high) miss, and the next missing ones while at it.

        high - low is at most the table's window, so that all of them fit even if none finds a place.
        """
        if (self.places[low:high] >= 0).all():
            return
        # rows without a place of their own pass away with this window; mark them missing again
        self.places[self.places >= self.cache.capacity] = -1
        missing = np.flatnonzero(self.places[low:] < 0)[: self.cache.window] + low
        places = self.cache.places(self.plan.targets[missing], self.plan.targets)
        self.places[missing] = places
        self._placed = None
        device = self.cost.rows.device
        costs = self.cost.costs(self.order.targets[_sent(missing, device)])
        to = _sent(places, device)
        for start in range(0, len(missing), CONVERTED):  # no second copy of the whole window
            part = slice(start, start + CONVERTED)
            self.cache.rows[to[part]] = costs[part].to(torch.float16)


def _sent(array: np.ndarray, device: torch.device) -> Tensor:
    """A copy of an array on `device` that the host does not wait for."""
    found = torch.from_numpy(array.copy())
    return found if device.type == "cpu" else found.pin_memory().to(device, non_blocking=True)
