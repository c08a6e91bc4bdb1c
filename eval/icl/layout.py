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

from emo.eval.icl.settings import BUDGET

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
    skip: Sequence[int] | None = None  # leading tokens of each tail that are not scored; none by default

    def unscored(self, k: int) -> int:
        """Leading tokens of tail k that are fed but not scored."""
        return 0 if self.skip is None else self.skip[k]

    @property
    def fed(self) -> int:
        """Tokens that pass through the model."""
        return len(self.prefix) + sum(max(len(t) - 1, 0) for t in self.tails)

    @property
    def longest(self) -> int:
        """Tokens of its longest prompt."""
        return len(self.prefix) + max(map(len, self.tails), default=0)

    def prompts(self) -> list[np.ndarray]:
        """The whole prompts, one per tail; the prefix alone when there are no tails."""
        return [np.concatenate([self.prefix, tail]) for tail in self.tails] or [self.prefix]


@dataclass
class ItemScore:
    """prefix: S; tails: s_k, float64 [k]."""

    prefix: float
    tails: np.ndarray

    @classmethod
    def of_prompts(cls, item: Item, nll: Sequence[np.ndarray]) -> ItemScore:
        """From the NLL of tokens 2..N of every whole prompt."""
        split = len(item.prefix) - 1
        tails = [losses[split + item.unscored(k) :].sum() for k, losses in enumerate(nll[: len(item.tails)])]
        return cls(float(nll[0][:split].sum()), np.array(tails, dtype=np.float64))


def common_prefix(rows: Sequence[np.ndarray]) -> int:
    """Number of leading tokens that all rows share."""
    shortest = min(len(row) for row in rows)
    stacked = np.stack([row[:shortest] for row in rows])
    different = np.nonzero((stacked != stacked[0]).any(axis=0))[0]
    return int(different[0]) if len(different) else shortest


def shared_context(items: Sequence[Item]) -> int:
    """Tokens at the beginning of all items that are worth a pass of their own, or 0.

    One less than they have in common: the last common token is fed again, to be predicted from.
    """
    length = common_prefix([item.prefix for item in items]) - 1 if len(items) > 1 else 0
    return length if length >= MIN_CONTEXT else 0


def groups(items: Sequence[Item]) -> list[list[int]]:
    """Item numbers by group; small groups and items without one go together, with little in common."""
    by_group: dict[object, list[int]] = {}
    alone: list[int] = []
    for i, item in enumerate(items):
        alone.append(i) if item.group is None else by_group.setdefault(item.group, []).append(i)
    small = [i for members in by_group.values() if len(members) < MIN_GROUP for i in members]
    shared = [members for members in by_group.values() if len(members) >= MIN_GROUP]
    remainder = sorted(alone + small)
    return shared + ([remainder] if remainder else [])


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


class TreeBatch:
    """Items as rows of one forward; the rows begin at token `context`, what is before it being cached.

    ids, positions: int64 [B, T]; allowed: bool [B, T, context + T]; source: flat positions of the hidden
    states that predict the tokens in `target`.
    """

    def __init__(self, items: Sequence[Item], context: int = 0) -> None:
        self.items = items
        shape = (len(items), max(item.fed for item in items) - context)
        self.ids = np.zeros(shape, dtype=np.int64)
        self.positions = np.zeros(shape, dtype=np.int64)
        self._segment = np.full(shape, -1, dtype=np.int32)  # 0: prefix, k + 1: tail k, -1: padding
        self._source: list[np.ndarray] = []
        self._target: list[np.ndarray] = []
        self._owner: list[np.ndarray] = []  # which sum a pair of source and target belongs to
        self._sums = 0
        self._context = context
        for row, item in enumerate(items):
            self._place(row, item)
        self.source, self.target = np.concatenate(self._source), np.concatenate(self._target)

    def _place(self, row: int, item: Item) -> None:
        prefix, base = item.prefix[self._context :], row * self.ids.shape[1]
        p, start = len(prefix), self._context
        self.ids[row, :p], self.positions[row, :p], self._segment[row, :p] = prefix, np.arange(p) + start, 0
        self._predict(base + np.arange(p - 1), prefix[1:], 0)
        position = p
        for k, tail in enumerate(item.tails):
            n = max(len(tail) - 1, 0)
            self.ids[row, position : position + n] = tail[:n]
            self.positions[row, position : position + n] = np.arange(n) + start + p
            self._segment[row, position : position + n] = k + 1
            skip = item.unscored(k)
            before = base + np.concatenate([[p - 1], np.arange(position, position + n)])
            self._predict(before[skip : len(tail)], tail[skip:], 1 + k)
            position += n
        self._sums += 1 + len(item.tails)

    def _predict(self, source: np.ndarray, target: np.ndarray, index: int) -> None:
        self._source.append(source)
        self._target.append(target)
        self._owner.append(np.full(len(target), self._sums + index))

    @property
    def causal(self) -> bool:
        """Return whether every token may attend to all before it in its row, where they stand."""
        return self._context == 0 and all(len(item.tails) <= 1 for item in self.items)

    @property
    def allowed(self) -> Tensor:
        """Causal, and a key must be of the context, the prefix or the query's own segment."""
        segments = torch.from_numpy(self._segment)
        width = segments.shape[1]
        same = segments[:, None, :] == segments[:, :, None]
        allowed = (same | (segments[:, None, :] == 0)) & torch.ones(width, width, dtype=torch.bool).tril()
        if self._context == 0:
            return allowed
        return torch.cat([torch.ones(len(segments), width, self._context, dtype=torch.bool), allowed], dim=2)

    def totals(self, nll: np.ndarray, context_nll: float) -> list[ItemScore]:
        """The items' sums, from the NLL of every target and of the cached context."""
        totals = np.bincount(np.concatenate(self._owner), weights=nll, minlength=self._sums)
        scores, begin = [], 0
        for item in self.items:
            end = begin + 1 + len(item.tails)
            scores.append(ItemScore(context_nll + totals[begin], totals[begin + 1 : end]))
            begin = end
        return scores
