"""A bounded store of cost rows of frequent targets."""

from __future__ import annotations

import numpy as np
import torch

from pipeline.loss.padding import padded_rows, row_stride

# Rows computed together; on an accelerator one request of the kernels must fit.
WINDOW_CPU, WINDOW = 64, 1024


class CostCache:
    """Cost rows of frequent targets in float16, within a memory budget, kept between calls.

    Rounding to float16 changes a cost by less than 5e-4 of itself, or 3e-8, and the gradients of a batch by
    less than 2e-3 (relative norm; 1e-4 to 7e-4 seen). A row is rounded whether it was in the table or not, so
    results do not depend on what was seen before. When the table is full, a target that
    has become more frequent replaces the least frequent one.
    """

    def __init__(self, vocab_size: int, memory_mb: float, device: torch.device) -> None:
        row_bytes = row_stride(vocab_size, device) * torch.float16.itemsize
        self.window = min(vocab_size, WINDOW_CPU if device.type == "cpu" else WINDOW)
        self.capacity = min(vocab_size, max(0, int(memory_mb * 2**20) // row_bytes - self.window))
        rows = self.capacity + self.window  # the last `window` rows: targets that found no place
        self.rows = padded_rows(rows, vocab_size, torch.float16, device)
        # which row is whose is known on the host, so that nothing has to be asked of the device
        self.slot = np.full(vocab_size, -1)
        self.owner = np.full(self.capacity, -1)
        self.seen = np.zeros(vocab_size, np.int64)
        self.used = 0

    def places(self, fresh: np.ndarray, current: np.ndarray) -> np.ndarray:
        """A place in the table for each of the missing targets `fresh` [k], k <= window.

        Targets of the batch under way (`current`) keep theirs. Those in `fresh` that are less frequent
        than everything in the table get a passing place behind it.
        """
        place = np.arange(len(fresh)) + self.capacity
        free = min(self.capacity - self.used, len(fresh))
        place[:free] = np.arange(self.used, self.used + free)
        self._assign(fresh[:free], place[:free])
        self.used += free
        rest = len(fresh) - free
        if rest and self.capacity:
            count = self.seen[self.owner]
            held = self.slot[current]  # those just assigned among them
            count[held[held >= 0]] = np.iinfo(np.int64).max
            victims = np.argsort(count, kind="stable")[:rest]
            eager = np.argsort(-self.seen[fresh[free:]], kind="stable")[: len(victims)]
            wins = self.seen[fresh[free:]][eager] > count[victims]
            chosen, taken = eager[wins] + free, victims[wins]
            place[chosen] = taken
            self.slot[self.owner[taken]] = -1
            self._assign(fresh[chosen], place[chosen])
        return place

    def _assign(self, targets: np.ndarray, place: np.ndarray) -> None:
        self.slot[targets] = place
        self.owner[place] = targets
