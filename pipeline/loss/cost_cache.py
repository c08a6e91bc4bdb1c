"""A bounded store of cost rows of frequent targets."""

from __future__ import annotations

import torch
from torch import Tensor

from pipeline.loss.padding import padded_rows

# Rows computed together; on an accelerator one request of the kernels must fit.
WINDOW_CPU, WINDOW = 64, 1024


class CostCache:
    """Cost rows of frequent targets in float16, within a memory budget, kept between calls.

    Rounding to float16 changes a cost by less than 5e-4 of itself, and the gradients of a batch by less
    than 2e-3 (relative norm; 1e-4 to 7e-4 seen). A row is rounded whether it was in the table or not, so
    results do not depend on what was seen before. When the table is full, a target that
    has become more frequent replaces the least frequent one.
    """

    def __init__(self, vocab_size: int, memory_mb: float, device: torch.device) -> None:
        row_bytes = vocab_size * torch.float16.itemsize
        self.window = min(vocab_size, WINDOW_CPU if device.type == "cpu" else WINDOW)
        self.capacity = min(vocab_size, max(0, int(memory_mb * 2**20) // row_bytes - self.window))
        rows = self.capacity + self.window  # the last `window` rows: targets that found no place
        self.rows = padded_rows(rows, vocab_size, torch.float16, device)
        self.slot = torch.full((vocab_size,), -1, dtype=torch.int64, device=device)
        self.owner = torch.full((self.capacity,), -1, dtype=torch.int64, device=device)
        self.seen = torch.zeros(vocab_size, dtype=torch.int64, device=device)
        self.used = 0

    def places(self, fresh: Tensor, current: Tensor) -> Tensor:
        """A place in the table for each of the missing targets `fresh` [k], k <= window.

        Targets of the batch under way (`current`) keep theirs. Those in `fresh` that are less frequent
        than everything in the table get a passing place behind it.
        """
        place = torch.arange(len(fresh), device=fresh.device) + self.capacity
        free = min(self.capacity - self.used, len(fresh))
        place[:free] = torch.arange(self.used, self.used + free, device=fresh.device)
        self._assign(fresh[:free], place[:free])
        self.used += free
        rest = len(fresh) - free
        if rest and self.capacity:
            count = self.seen[self.owner].clone()
            held = self.slot[current]  # those just assigned among them
            count[held[held >= 0]] = torch.iinfo(torch.int64).max
            victims = count.topk(min(rest, self.capacity), largest=False, sorted=True)
            eager = self.seen[fresh[free:]].sort(descending=True)
            wins = eager.values[: len(victims.values)] > victims.values
            chosen = eager.indices[: len(wins)][wins] + free
            place[chosen] = victims.indices[wins]
            self.slot[self.owner[victims.indices[wins]]] = -1
            self._assign(fresh[chosen], place[chosen])
        return place

    def _assign(self, targets: Tensor, place: Tensor) -> None:
        self.slot[targets] = place
        self.owner[place] = targets
