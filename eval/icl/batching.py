"""Batches of like length within a budget of tokens. The budget's only owner; standard library only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

BUDGET = 8192  # tokens per batch unless a caller chooses
DENSE_CPU, DENSE_GPU = 1024, 16384  # tokens that keep the processor busy; beyond, padding is avoided
PADDING = 0.08  # share of a batch
MASK_BYTES = 128 << 20  # attention mask of one batch, 4 bytes per entry


@dataclass(frozen=True)
class Limits:
    """The bounds of a batch. tokens: padding and cached context included."""

    tokens: int = BUDGET
    dense: int = DENSE_CPU

    def batches(self, lengths: Mapping[int, int], context: int = 0) -> Iterator[list[int]]:
        """Keys of `lengths` in batches, longest first; every row also attends to `context` cached tokens.

        A row that exceeds the limits by itself is a batch of its own.
        """
        batch: list[int] = []
        used = 0
        for key in sorted(lengths, key=lambda key: (-lengths[key], key)):
            longest = lengths[batch[0]] if batch else lengths[key]
            count = len(batch) + 1
            too_much = count * (longest + context) > self.tokens
            too_much |= count * longest * (longest + context) * 4 > MASK_BYTES
            padded = used > self.dense and 1 - (used + lengths[key]) / (count * longest) > PADDING
            if batch and (too_much or padded):
                yield batch
                batch, used = [], 0
            batch.append(key)
            used += lengths[key]
        if batch:
            yield batch
