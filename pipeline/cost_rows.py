"""Rows of transport costs, made in the order in which the fused loss asks for them.

Tokens come sorted by target, so the distinct targets are met one after the other and a small window
of cost rows [w, V] suffices. `ExactRows` computes every window anew. `TableRows` keeps the rows of
frequent targets in float16 between calls: text repeats itself, and most rows are then only read.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from pipeline.cost import CostEmbedding
from pipeline.cost_table import CostTable

WINDOW_MB = 8.0  # of rows alive at a time on a CPU


class Costs(NamedTuple):
    """Cost rows of the distinct targets of some tokens, and which of them each token uses."""

    rows: Tensor  # [u, V]
    which: Tensor  # [n] int64


class Targets(NamedTuple):
    """The distinct targets of a batch, ascending, and where each token of the sorted batch finds its own."""

    ids: Tensor  # [U]
    which: Tensor  # [T] ascending


class Rows(Protocol):
    """Where the kernels get their cost rows from."""

    def group(self, start: int, stop: int) -> Costs:
        """Rows for tokens [start, stop) of the sorted batch; valid until the next call."""


def open_rows(cost: CostEmbedding, targets: Targets, dtype: torch.dtype, most: int, chunk: int) -> Rows:
    """The rows of `targets` in statistics' `dtype`, for requests of at most `most` tokens.

    Windows of rows are no larger than WINDOW_MB on a CPU, nor than a `chunk` of logits.
    """
    if cost.table is not None:
        return TableRows(cost, cost.table, targets, dtype, most)
    return ExactRows(cost, targets, dtype, max(most, min(chunk, _window(cost, dtype))))


def _window(cost: CostEmbedding, dtype: torch.dtype) -> int:
    """Rows that WINDOW_MB holds on a CPU; elsewhere the chunk is the only limit."""
    if cost.rows.device.type != "cpu":
        return cost.vocab_size
    return int(WINDOW_MB * 2**20) // (cost.vocab_size * dtype.itemsize)


class ExactRows:
    """Every row computed from the embedding, in its precision."""

    def __init__(self, cost: CostEmbedding, targets: Targets, dtype: torch.dtype, size: int) -> None:
        self.cost, self.targets, self.dtype, self.size = cost, targets, dtype, size
        self.first = self.last = 0
        self.rows: Tensor | None = None

    def group(self, start: int, stop: int) -> Costs:
        which = self.targets.which
        low, high = int(which[start]), int(which[stop - 1]) + 1
        if self.rows is None or low < self.first or high > self.last:
            self.rows = None  # free the old window before the new one is made
            self.first, self.last = low, min(low + self.size, len(self.targets.ids))
            self.rows = self.cost.costs(self.targets.ids[self.first : self.last]).to(self.dtype)
        rows = self.rows[low - self.first : high - self.first]
        return Costs(rows, which[start:stop] - low)


class TableRows:
    """Rows from a `CostTable`; missing ones are computed, a window of them at a time."""

    def __init__(
        self,
        cost: CostEmbedding,
        table: CostTable,
        targets: Targets,
        dtype: torch.dtype,
        most: int,
    ) -> None:
        self.cost, self.table, self.targets, self.dtype = cost, table, targets, dtype
        table.seen[targets.ids] += torch.bincount(targets.which, minlength=len(targets.ids))
        self.places = table.slot[targets.ids]
        self.scratch: Tensor | None = None
        if cost.rows.device.type == "cpu" and most <= table.window:  # widen row by row, in the cache
            self.scratch = torch.empty(most, cost.vocab_size, dtype=dtype)

    def group(self, start: int, stop: int) -> Costs:
        which = self.targets.which[start:stop]
        low, high = int(which[0]), int(which[-1]) + 1
        if self.scratch is not None:
            self._ensure(low, high)
            for i, place in enumerate(self.places[low:high].tolist()):
                self.scratch[i].copy_(self.table.rows[place])
            return Costs(self.scratch[: high - low], which - low)
        parts = []
        for first in range(low, high, self.table.window):
            last = min(first + self.table.window, high)
            self._ensure(first, last)
            parts.append(self.table.rows[self.places[first:last]].to(self.dtype))
        return Costs(torch.cat(parts), which - low)

    def _ensure(self, low: int, high: int) -> None:
        """Compute what targets [low, high) miss, and the next missing ones while at it.

        high - low is at most the table's window, so that all of them fit even if none finds a place.
        """
        if (self.places[low:high] >= 0).all():
            return
        # rows without a place of their own pass away with this window; mark them missing again
        self.places[self.places >= self.table.capacity] = -1
        ids = self.targets.ids
        missing = (self.places[low:] < 0).nonzero()[: self.table.window, 0] + low
        fresh = ids[missing]
        place = self.table.places(fresh, ids)
        self.table.rows[place] = self.cost.costs(fresh).to(torch.float16)
        self.places[missing] = place
