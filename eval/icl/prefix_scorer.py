"""Negative log-likelihoods of prompts that share a prefix, each distinct token fed once.

An Item is a token prefix with k alternative tails (the rest of the prompt under each label). It becomes one
row  [prefix][tail_1]..[tail_k]  in which every tail attends to the prefix and to itself only and takes the
positions that follow the prefix; the last token of a tail is a target only and is never fed. Items with a
long common beginning (MMLU: header and shots of a subject) share its keys and values, computed once.

    S   = sum of -log p over prefix tokens 2..P        s_k = the same over tail k

Sums are float64 whatever the model's dtype, and the head runs only where something is predicted.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

log = logging.getLogger(__name__)

MIN_CONTEXT = 32  # a shorter common beginning is not worth a separate pass
MIN_GROUP = 4  # nor is one for fewer items
DENSE_CPU, DENSE_GPU = 1024, 16384  # tokens that keep the processor busy; beyond, padding is avoided
PADDING = 0.08  # share of a batch
MASK_BYTES = 128 << 20  # attention mask of one batch
HEAD_BYTES = 64 << 20  # logits alive at once


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


@dataclass
class ItemScore:
    """prefix: S; tails: s_k, float64 [k]."""

    prefix: float
    tails: np.ndarray


@dataclass
class _Context:
    """The beginning that a group shares: tokens 0..length-1 are cached, token `length` is common too."""

    length: int = 0
    nll: float = 0.0
    cache: DynamicCache | None = None


@dataclass
class Work:
    """Counters of what was computed."""

    items: int = 0
    distinct_tokens: int = 0  # tokens that had to be fed: prefixes, tails, shared contexts once
    padded_tokens: int = 0  # tokens that were fed
    batches: int = 0


class PrefixScorer:
    """Scores Items with a causal LM. `budget`: tokens per batch, padding included.

    The tree layout is checked once against plain rows; a model that does not honour it is scored plainly.
    """

    def __init__(self, model: PreTrainedModel, budget: int = 8192) -> None:
        self.model = model.eval()
        self.body: nn.Module = model.base_model
        self.head: nn.Linear = model.get_output_embeddings()
        self.budget = budget
        self.work = Work()
        self._ignored: int | None = None
        self._device = next(model.parameters()).device
        self._dtype = next(model.parameters()).dtype
        text_config = model.config.get_text_config()
        self._softcap = getattr(text_config, "final_logit_softcapping", None)
        self._scale = getattr(text_config, "logit_scale", None)
        self._plain_head = (
            type(self.head) is nn.Linear
            and self.head.bias is None
            and self._dtype == torch.float32
            and self._softcap is None
            and self._scale is None
        )
        self._buffer: Tensor | None = None
        self._dense = DENSE_CPU if self._device.type == "cpu" else DENSE_GPU
        self.tree = _supports_tree(text_config) and self._tree_agrees()
        if not self.tree:
            log.warning("%s: shared-prefix layout not usable, scoring whole prompts", type(model).__name__)

    @torch.inference_mode()
    def score(self, items: Sequence[Item], ignored: int | None = None) -> list[ItemScore]:
        """Scores in the order of `items`. ignored: targets with this id cost nothing."""
        self._ignored = ignored
        self.work.items += len(items)
        if not self.tree:
            return self._score_plain(items)
        result: list[ItemScore | None] = [None] * len(items)
        for members in _groups(items):
            context = self._context([items[i] for i in members])
            lengths = {i: items[i].fed - context.length for i in members}
            for batch in self._batches(lengths, context.length):
                for i, score in zip(batch, self._tree_batch([items[j] for j in batch], context), strict=True):
                    result[i] = score
        return [score for score in result if score is not None]

    def _batches(self, lengths: dict[int, int], context: int = 0) -> Iterator[list[int]]:
        """Keys of `lengths` in batches of similar length within the token and mask budgets."""
        batch: list[int] = []
        used = 0
        for key in sorted(lengths, key=lambda key: (-lengths[key], key)):
            longest = lengths[batch[0]] if batch else lengths[key]
            count = len(batch) + 1
            too_much = count * (longest + context) > self.budget
            too_much |= count * longest * (longest + context) * 4 > MASK_BYTES
            padded = used > self._dense and 1 - (used + lengths[key]) / (count * longest) > PADDING
            if batch and (too_much or padded):
                yield batch
                batch, used = [], 0
            batch.append(key)
            used += lengths[key]
        if batch:
            yield batch

    def _context(self, items: list[Item]) -> _Context:
        """The cached common beginning of a group."""
        if len(items) < 2:
            return _Context()
        shortest = min(len(item.prefix) for item in items)
        rows = np.stack([item.prefix[:shortest] for item in items])
        different = np.nonzero((rows != rows[0]).any(axis=0))[0]
        common = int(different[0]) if len(different) else shortest
        length = common - 1  # its successor is fed again, to be predicted from and with the cache
        if length < MIN_CONTEXT:
            return _Context()
        ids = torch.from_numpy(rows[:1, :length]).to(self._device)
        out = self.body(input_ids=ids, use_cache=True)
        targets = torch.from_numpy(rows[0, 1 : length + 1]).to(self._device)
        nll = self._nll(out.last_hidden_state[0], torch.arange(length, device=self._device), targets)
        self.work.distinct_tokens += length
        self.work.padded_tokens += length
        return _Context(length, nll.sum().item(), out.past_key_values)

    def _tree_batch(self, items: list[Item], context: _Context) -> list[ItemScore]:
        """One forward over rows [prefix][tails]; the rows start at `context.length`."""
        c, b = context.length, len(items)
        width = max(item.fed for item in items) - c
        ids = np.zeros((b, width), dtype=np.int64)
        positions = np.zeros((b, width), dtype=np.int64)
        segment = np.full((b, width), -1, dtype=np.int32)  # 0: prefix, k + 1: tail k, -1: padding
        source: list[np.ndarray] = []  # flat hidden position that predicts
        target: list[np.ndarray] = []
        owner: list[np.ndarray] = []  # which sum the pair belongs to
        sums = 0
        for r, item in enumerate(items):
            own = item.prefix[c:]
            p, base = len(own), r * width
            ids[r, :p], positions[r, :p], segment[r, :p] = own, np.arange(c, c + p), 0
            source.append(base + np.arange(p - 1))
            target.append(own[1:])
            owner.append(np.full(p - 1, sums))
            at = p
            for k, tail in enumerate(item.tails):
                n = max(len(tail) - 1, 0)
                ids[r, at : at + n] = tail[:n]
                positions[r, at : at + n] = np.arange(c + p, c + p + n)
                segment[r, at : at + n] = k + 1
                skip = item.unscored(k)
                before = base + np.concatenate([[p - 1], np.arange(at, at + n)])
                source.append(before[skip : len(tail)])
                target.append(tail[skip:])
                owner.append(np.full(len(tail) - skip, sums + 1 + k))
                at += n
            sums += 1 + len(item.tails)
        hidden = self._run(ids, positions, _tree_mask(segment, c), context)
        nll = self._pairs(hidden, np.concatenate(source), np.concatenate(target))
        totals = np.bincount(np.concatenate(owner), weights=nll, minlength=sums)
        self.work.batches += 1
        self.work.distinct_tokens += sum(item.fed for item in items) - b * c
        self.work.padded_tokens += b * width
        scores, at = [], 0
        for item in items:
            k = len(item.tails)
            scores.append(ItemScore(context.nll + totals[at], totals[at + 1 : at + 1 + k]))
            at += 1 + k
        return scores

    def _run(self, ids: np.ndarray, positions: np.ndarray, allowed: Tensor, context: _Context) -> Tensor:
        """Hidden states [B, T, H]; allowed: bool [B, T, C + T]."""
        mask = torch.zeros(allowed.shape, dtype=self._dtype, device=self._device)
        mask.masked_fill_(~allowed.to(self._device), torch.finfo(self._dtype).min)
        cache = None
        if context.cache is not None:
            cache = DynamicCache()
            kept: Any
            for layer, kept in enumerate(context.cache.layers):
                shape = (len(ids), -1, -1, -1)
                cache.update(kept.keys.expand(shape), kept.values.expand(shape), layer)
        out = self.body(
            input_ids=torch.from_numpy(ids).to(self._device),
            position_ids=torch.from_numpy(positions).to(self._device),
            attention_mask=mask[:, None],
            past_key_values=cache,
            use_cache=cache is not None,
        )
        return out.last_hidden_state

    def _pairs(self, hidden: Tensor, source: np.ndarray, target: np.ndarray) -> np.ndarray:
        """-log p(target | state at source), float64 [Q]; hidden [B, T, H], source: flat positions."""
        # The state before the tails predicts one token per tail: its logits are computed once.
        states, pair_state = np.unique(source, return_inverse=True)
        flat = hidden.reshape(-1, hidden.shape[-1])[torch.from_numpy(states).to(self._device)]
        order = np.argsort(pair_state, kind="stable")
        rows = torch.from_numpy(pair_state[order]).to(self._device)
        targets = torch.from_numpy(target[order]).to(self._device)
        nll = np.empty(len(source))
        nll[order] = self._nll(flat, rows, targets).cpu().numpy()
        return nll

    def _nll(self, states: Tensor, rows: Tensor, targets: Tensor) -> Tensor:
        """-log p(targets[q] | states[rows[q]]), float64 [Q]; rows ascending, states [M, H]."""
        vocab = self.head.weight.shape[0]
        step = max(1, HEAD_BYTES // (4 * vocab))
        starts = torch.arange(0, len(states) + step, step, device=rows.device)
        cuts = torch.searchsorted(rows, starts).tolist()
        parts = []
        for i, (lo, hi) in enumerate(itertools.pairwise(cuts)):
            if lo < hi:
                log_p = self._log_softmax(states[i * step : (i + 1) * step], step)
                parts.append(-log_p[rows[lo:hi] - i * step, targets[lo:hi]].double())
        nll = torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64, device=self._device)
        return nll if self._ignored is None else nll.masked_fill(targets == self._ignored, 0.0)

    def _log_softmax(self, states: Tensor, rows: int) -> Tensor:
        """log p over the vocabulary, float32 [M, V], M <= rows. On a CPU it is overwritten by the next call.

        There every large new tensor costs as much in page faults as in arithmetic, so one buffer serves all:
        matrix product and softmax together take less than half the time.
        """
        if self._device.type != "cpu":
            return self._logits(self.head(states)).log_softmax(dim=-1)
        if self._buffer is None:
            self._buffer = torch.empty(rows, self.head.weight.shape[0])
        logits = self._buffer[: len(states)]
        if self._plain_head:
            torch.mm(states, self.head.weight.t(), out=logits)
        else:
            logits.copy_(self._logits(self.head(states)))
        return torch.ops.aten._log_softmax.out(logits, -1, False, out=logits)

    def _logits(self, scores: Tensor) -> Tensor:
        """The head's output as the model would return it, in float32."""
        if self._scale is not None:
            scores = scores * self._scale
        if self._softcap is not None:
            scores = torch.tanh(scores / self._softcap) * self._softcap
        return scores.float()

    def _score_plain(self, items: Sequence[Item]) -> list[ItemScore]:
        """The same sums from whole prompts, one row per label."""
        rows = {
            (i, k): np.concatenate([item.prefix, t]) for i, item in enumerate(items) for k, t in _tails(item)
        }
        keys = list(rows)
        lengths = {n: len(rows[key]) for n, key in enumerate(keys)}
        result = [ItemScore(0.0, np.zeros(len(item.tails))) for item in items]
        for batch in self._batches(lengths):
            width = lengths[batch[0]]
            ids = np.zeros((len(batch), width), dtype=np.int64)
            mask = np.zeros((len(batch), width), dtype=np.int64)
            for r, n in enumerate(batch):
                ids[r, : lengths[n]], mask[r, : lengths[n]] = rows[keys[n]], 1
            hidden = self.body(
                input_ids=torch.from_numpy(ids).to(self._device),
                attention_mask=torch.from_numpy(mask).to(self._device),
                use_cache=False,
            ).last_hidden_state
            self.work.batches += 1
            self.work.distinct_tokens += sum(lengths[n] for n in batch)
            self.work.padded_tokens += len(batch) * width
            for r, n in enumerate(batch):
                i, k = keys[n]
                nll = self._pairs(hidden[r : r + 1], np.arange(lengths[n] - 1), rows[keys[n]][1:])
                split = len(items[i].prefix) - 1
                result[i].prefix = float(nll[:split].sum())
                if items[i].tails:
                    result[i].tails[k] = nll[split + items[i].unscored(k) :].sum()
        return result

    @torch.inference_mode()
    def _tree_agrees(self) -> bool:
        """Whether this architecture honours masks, positions and caches as the tree needs them."""
        vocab = self.head.weight.shape[0]
        ids = (np.arange(MIN_CONTEXT + 24) * 7919 + 13) % vocab
        start = ids[: MIN_CONTEXT + 4]
        items = [
            Item(np.concatenate([start, ids[-8 - j : -4 - j]]), [ids[3:6], ids[8:9], ids[1:5]], "probe")
            for j in range(2)
        ]
        items.append(Item(ids[:9], [ids[4:6], ids[7:10]]))
        plain = self._score_plain(items)
        try:
            context = self._context(items[:2])
            trees = self._tree_batch(items[:2], context) + self._tree_batch(items[2:], _Context())
        except Exception as error:
            log.warning("shared-prefix probe failed: %s: %s", type(error).__name__, error)
            return False
        finally:
            self.work = Work()
        tolerance = 1e-4 if self._dtype == torch.float32 else 2e-2
        expected = np.concatenate([[s.prefix, *s.tails] for s in plain])
        found = np.concatenate([[s.prefix, *s.tails] for s in trees])
        return bool(np.abs(found - expected).max() <= tolerance * np.abs(expected).max())


def _tails(item: Item) -> list[tuple[int, np.ndarray]]:
    return list(enumerate(item.tails)) or [(0, np.empty(0, dtype=np.int64))]


def _groups(items: Sequence[Item]) -> list[list[int]]:
    """Item numbers by group; items without one go together, sharing nothing by construction."""
    groups: dict[object, list[int]] = {}
    alone: list[int] = []
    for i, item in enumerate(items):
        alone.append(i) if item.group is None else groups.setdefault(item.group, []).append(i)
    small = [i for members in groups.values() if len(members) < MIN_GROUP for i in members]
    shared = [members for members in groups.values() if len(members) >= MIN_GROUP]
    rest = sorted(alone + small)
    return shared + ([rest] if rest else [])


def _tree_mask(segment: np.ndarray, context: int) -> Tensor:
    """bool [B, T, C + T]: causal, and a key must be of the prefix or of the query's own segment."""
    own = torch.from_numpy(segment)
    width = own.shape[1]
    same = own[:, None, :] == own[:, :, None]
    allowed = (same | (own[:, None, :] == 0)) & torch.ones(width, width, dtype=torch.bool).tril()
    if context == 0:
        return allowed
    return torch.cat([torch.ones(len(own), width, context, dtype=torch.bool), allowed], dim=2)


def _supports_tree(config: Any) -> bool:
    """Sliding windows are built into 2-D masks, which a ready 4-D mask replaces."""
    window = getattr(config, "sliding_window", None)
    return not window or not getattr(config, "use_sliding_window", True)
