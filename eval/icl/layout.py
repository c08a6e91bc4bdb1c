"""How prompts that share a beginning are laid out, each distinct token once, and batches of like length.

An Item is a token prefix with k alternative tails (the rest of the prompt under each label). It becomes one
row  [prefix][tail_1]..[tail_k]  in which every tail attends to the prefix and to itself only and takes the
positions that follow the prefix; the last token of a tail is a target only and is never fed.

    S   = sum of -log p over prefix tokens 2..P        s_k = the same over tail k
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

DENSE_CPU, DENSE_GPU = 1024, 16384  # tokens that keep the processor busy; beyond, padding is avoided
PADDING = 0.08  # share of a batch
MASK_BYTES = 128 << 20  # attention mask of one batch, 4 bytes per entry
MIN_CONTEXT = 32  # a shorter common beginning is not worth a separate pass
MIN_GROUP = 4  # nor is one for fewer items


@dataclass(frozen=True)
class Item:
    """prefix: int64 [P], P >= 1; tails: k arrays int64 [n_k]; items of one `group` may share a beginning."""

    prefix: np.ndarray
    tails: Sequence[np.ndarray]
    group: object = None
    skip: Sequence[int] = ()  # leading tokens of each tail that are fed, but not scored; none by default

    def unscored(self, k: int) -> int:
        """Return the number of leading tokens of tail k that are not scored."""
        return self.skip[k] if self.skip else 0

    @property
    def fed(self) -> int:
        """Return the number of tokens that pass through the model."""
        return len(self.prefix) + sum(max(len(t) - 1, 0) for t in self.tails)

    @property
    def longest(self) -> int:
        """Return the number of tokens of its longest prompt."""
        return len(self.prefix) + max(map(len, self.tails), default=0)

    def alone(self) -> list[Item]:
        """Return its prompts as items that share nothing, one per tail; itself when there are no tails."""
        tails = enumerate(self.tails)
        return [Item(self.prefix, [tail], None, [self.unscored(k)]) for k, tail in tails] or [self]


@dataclass
class ItemScore:
    """prefix: S; tails: s_k, float64 [k]."""

    prefix: float
    tails: np.ndarray


def common_prefix(rows: Sequence[np.ndarray]) -> int:
    """Return the number of leading tokens that all rows share."""
    shortest = min(len(row) for row in rows)
    stacked = np.stack([row[:shortest] for row in rows])
    different = np.nonzero((stacked != stacked[0]).any(axis=0))[0]
    return int(different[0]) if len(different) else shortest


def groups(items: Sequence[Item]) -> list[tuple[list[int], int]]:
    """Return item numbers by group, each with the tokens of its beginning that are worth a pass of their own.

    Small groups and items without a group go together. The beginning is a token shorter than what is common:
    the last common token is fed again, to be predicted from.
    """
    by_group: dict[object, list[int]] = {}
    for i, item in enumerate(items):
        by_group.setdefault(item.group, []).append(i)
    alone = by_group.pop(None, [])
    alone += [i for members in by_group.values() if len(members) < MIN_GROUP for i in members]
    shared = [members for members in by_group.values() if len(members) >= MIN_GROUP]
    result = []
    for members in [*shared, sorted(alone)] if alone else shared:
        length = common_prefix([items[i].prefix for i in members]) - 1 if len(members) > 1 else 0
        result.append((members, length if length >= MIN_CONTEXT else 0))
    return result


def batches(
    lengths: Mapping[int, int], budget: int, device: torch.device, context: int = 0
) -> Iterator[list[int]]:
    """Yield keys of `lengths` in batches, longest first; rows also attend to `context` cached tokens.

    budget: tokens of a batch, padding and cached context included; a row with more is a batch of its own.
    """
    dense = DENSE_CPU if device.type == "cpu" else DENSE_GPU
    batch: list[int] = []
    used = 0
    for key in sorted(lengths, key=lambda key: (-lengths[key], key)):
        longest = lengths[batch[0]] if batch else lengths[key]
        count = len(batch) + 1
        too_much = count * (longest + context) > budget
        too_much |= count * longest * (longest + context) * 4 > MASK_BYTES
        padded = used > dense and 1 - (used + lengths[key]) / (count * longest) > PADDING
        if batch and (too_much or padded):
            yield batch
            batch, used = [], 0
        batch.append(key)
        used += lengths[key]
    if batch:
        yield batch


class TreeBatch:
    """Items as rows of one forward; the rows begin at token `context`, what is before it being cached.

    ids, positions: int64 [B, T]; allowed: bool [B, T, context + T]; source: flat positions of the hidden
    states that predict the tokens in `target`.
    """

    def __init__(self, items: Sequence[Item], context: int = 0) -> None:
        self.items, self.context = items, context
        width = max(item.fed for item in items) - context
        self.ids = np.zeros((len(items), width), dtype=np.int64)
        self.positions = np.zeros_like(self.ids)
        self._segment = np.full(self.ids.shape, -1, dtype=np.int32)  # 0: prefix, k + 1: tail k, -1: padding
        source: list[np.ndarray] = []
        target: list[np.ndarray] = []
        for row, item in enumerate(items):
            prefix, base = item.prefix[context:], row * width
            p = position = len(prefix)
            self.ids[row, :p], self.positions[row, :p] = prefix, np.arange(p) + context
            self._segment[row, :p] = 0
            source.append(base + np.arange(p - 1))
            target.append(prefix[1:])
            for k, tail in enumerate(item.tails):
                n = max(len(tail) - 1, 0)
                self.ids[row, position : position + n] = tail[:n]
                self.positions[row, position : position + n] = np.arange(n) + context + p
                self._segment[row, position : position + n] = k + 1
                before = base + np.concatenate([[p - 1], np.arange(position, position + n)])
                skip = item.unscored(k)
                source.append(before[skip : len(tail)])
                target.append(tail[skip:])
                position += n
        self.source, self.target = np.concatenate(source), np.concatenate(target)
        self._lengths = [len(part) for part in target]  # of what adds up to S and every s_k

    @property
    def causal(self) -> bool:
        """Return whether every token may attend to all before it in its row, where they stand."""
        return self.context == 0 and all(len(item.tails) <= 1 for item in self.items)

    @property
    def allowed(self) -> Tensor:
        """Causal, and a key must be of the context, the prefix or the query's own segment."""
        segments = torch.from_numpy(self._segment)
        width = segments.shape[1]
        same = segments[:, None, :] == segments[:, :, None]
        allowed = (same | (segments[:, None, :] == 0)) & torch.ones(width, width, dtype=torch.bool).tril()
        return torch.cat([torch.ones(len(segments), width, self.context, dtype=torch.bool), allowed], dim=2)

    def totals(self, nll: np.ndarray, context_nll: float) -> list[ItemScore]:
        """Return the items' sums, from the NLL of every target and of the cached context."""
        sums = np.repeat(np.arange(len(self._lengths)), self._lengths)
        totals = np.bincount(sums, weights=nll, minlength=len(self._lengths))
        scores, begin = [], 0
        for item in self.items:
            end = begin + 1 + len(item.tails)
            scores.append(ItemScore(context_nll + totals[begin], totals[begin + 1 : end]))
            begin = end
        return scores
