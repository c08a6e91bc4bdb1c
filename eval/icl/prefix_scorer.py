"""Negative log-likelihoods of prompts that share a prefix, each distinct token fed once.

Items are laid out as trees (see `layout`); those with a long common beginning (MMLU: header and shots of a
subject) share its keys and values, computed once. Sums are float64 whatever the model's dtype, and the head
runs only where something is predicted.

Three ways of scoring, the first that agrees with the model's own forward: on made-up items at the start, and
on real ones whenever prompts are longer than those compared so far (there first with one plain prompt and the
head, whose logits need no memory: the head has been compared).

    tree    shared prefixes             whole   one row per label, the head apart
    own     one prompt at a time through the model's own forward: nothing is assumed
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from emo.common.errors import UserError
from emo.eval.icl import probe
from emo.eval.icl.head import Head
from emo.eval.icl.layout import (
    DENSE_CPU,
    DENSE_GPU,
    Item,
    ItemScore,
    Limits,
    TreeBatch,
    groups,
    shared_context,
)
from emo.eval.icl.scores import NotFiniteError
from emo.eval.icl.settings import BUDGET

log = logging.getLogger(__name__)

TREE, WHOLE, OWN = "tree", "whole", "own"
WAYS = {TREE: "prompts with shared prefixes", WHOLE: "whole prompts", OWN: "one whole prompt at a time"}
LONGER = 1.25  # times as long as any that were compared: compare again

Advance = Callable[[int], None]  # told after every batch how many items it finished


@dataclass
class _Context:
    """The beginning that a group shares: its length, NLL, keys and values."""

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
    """Scores Items with a causal LM. budget: tokens per batch, padding included; say: told when the model
    cannot be scored in the fastest way.
    """

    def __init__(
        self, model: PreTrainedModel, budget: int = BUDGET, say: Callable[[str], None] = log.warning
    ) -> None:
        self.model = model.eval()
        self.work = Work()
        self._say = say
        parameter = next(model.parameters())
        self._device, self._dtype = parameter.device, parameter.dtype
        self._vocabulary = len(model.get_input_embeddings().weight)  # type: ignore[arg-type]
        on_cpu = self._device.type == "cpu"
        self._limits = Limits(budget, DENSE_CPU if on_cpu else DENSE_GPU)
        self._ignored: int | None = None
        self._compared = 0  # longest prompt on which the way of scoring was compared
        self.way = self._first_way()

    @torch.inference_mode()
    def score(
        self, items: Sequence[Item], ignored: int | None = None, advance: Advance | None = None
    ) -> list[ItemScore]:
        """Scores in the order of `items`. ignored: targets with this id cost nothing.

        Raises UserError when a token is not of the model's vocabulary, NotFiniteError when a sum is NaN or
        infinite.
        """
        if not items:
            return []
        largest = max(int(ids.max()) for item in items for ids in (item.prefix, *item.tails) if len(ids))
        if largest >= self._vocabulary:
            raise UserError(
                f"a prompt has the token id {largest}, but the model has {self._vocabulary} embeddings: "
                "its tokenizer does not belong to it"
            )
        self._compare(items)
        self._ignored = ignored
        self.work.items += len(items)
        scores = self._score(items, advance or (lambda count: None))
        if not all(np.isfinite(score.prefix) and np.isfinite(score.tails).all() for score in scores):
            raise NotFiniteError("its likelihoods are not finite (NaN or infinite)")
        return scores

    # --- which way ----------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _first_way(self) -> str:
        """The fastest way that honours masks, positions and caches as it needs them."""
        config = self.model.config.get_text_config()
        if self.model.get_output_embeddings() is None or self.model.base_model is self.model:
            return self._fall_back_to(OWN)
        self._head = Head(self.model)
        if probe.depends_on_length(config):
            return self._fall_back_to(OWN)
        self.way = TREE if probe.attends_everywhere(config) else self._fall_back_to(WHOLE)
        self._compare_on(probe.made_up_items(self._vocabulary))
        return self.way

    def _compare(self, items: Sequence[Item]) -> None:
        """Compare on real items, if they are much longer than before."""
        longest = max(item.longest for item in items)
        if longest > LONGER * self._compared and self.way != OWN:
            samples = probe.samples_of(items)
            try:
                same = self._same(samples, probe.expected(samples, self._alone))
            except Exception as error:  # the plain prompt is refused; the model's own forward decides
                log.debug("a plain prompt: %s: %s", type(error).__name__, error)
                same = False
            if not same:
                self._compare_on(samples)
            self._compared = longest

    def _compare_on(self, items: Sequence[Item]) -> None:
        """Fall back until the sums of `items` are those of the model's own forward."""
        if self.way == OWN:
            return
        expected = probe.expected(items, lambda item: probe.own_score(self.model, item))
        while self.way != OWN and not self._same(items, expected):
            self.way = self._fall_back_to(WHOLE if self.way == TREE else OWN)

    def _same(self, items: Sequence[Item], expected: list[dict[int, ItemScore]]) -> bool:
        """Return whether the present way gives the expected sums; its work is not counted."""
        work, self.work, self._ignored = self.work, Work(), None
        try:
            return probe.agree(items, self._score(items, lambda count: None), expected, self._dtype)
        except Exception as error:  # families refuse a mask, a cache or positions in many ways
            log.debug("%s: %s: %s", self.way, type(error).__name__, error)
            return False
        finally:
            self.work = work

    def _alone(self, item: Item) -> ItemScore:
        """The score of an item from whole prompts, one at a time."""
        work, self.work, self._ignored = self.work, Work(), None
        try:
            return ItemScore.of_prompts(item, [self._whole_batch([ids])[0] for ids in item.prompts()])
        finally:
            self.work = work

    def _fall_back_to(self, way: str) -> str:
        self._say(f"{type(self.model).__name__} is scored as {WAYS[way]}, which is slower and exact")
        return way

    # --- scoring ------------------------------------------------------------------------------------------

    def _score(self, items: Sequence[Item], advance: Advance) -> list[ItemScore]:
        if self.way == TREE:
            return self._score_trees(items, advance)
        return self._score_whole(items, advance) if self.way == WHOLE else self._score_own(items, advance)

    def _score_trees(self, items: Sequence[Item], advance: Advance) -> list[ItemScore]:
        result: dict[int, ItemScore] = {}
        for members in groups(items):
            context = self._context([items[i] for i in members])
            lengths = {i: items[i].fed - context.length for i in members}
            for numbers in self._limits.batches(lengths, context.length):
                batch = TreeBatch([items[i] for i in numbers], context.length)
                hidden = self._forward(batch, context)
                nll = self._head.pairs(hidden, batch.source, batch.target, self._ignored)
                result |= zip(numbers, batch.totals(nll, context.nll), strict=True)
                self._count(sum(lengths[i] for i in numbers), batch.ids.size)
                advance(len(numbers))
        return [result[i] for i in range(len(items))]

    def _context(self, items: list[Item]) -> _Context:
        """The cached common beginning of a group."""
        length = shared_context(items)
        if not length:
            return _Context()
        ids = torch.from_numpy(items[0].prefix[None, : length + 1]).to(self._device)
        out = self.model.base_model(input_ids=ids[:, :length], use_cache=True)
        rows = torch.arange(length, device=self._device)
        nll = self._head.nll(out.last_hidden_state[0], rows, ids[0, 1:], self._ignored)
        self._count(length, length, batches=0)
        return _Context(length, nll.sum().item(), out.past_key_values)

    def _forward(self, batch: TreeBatch, context: _Context) -> Tensor:
        """Hidden states [B, T, H]."""
        ids = torch.from_numpy(batch.ids).to(self._device)
        if (
            batch.causal
        ):  # what is padded on the right nobody sees; attention without a mask takes half the time
            return self.model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        allowed = batch.allowed
        mask = torch.zeros(allowed.shape, dtype=self._dtype, device=self._device)
        mask.masked_fill_(~allowed.to(self._device), torch.finfo(self._dtype).min)
        cache = None
        if context.cache is not None:
            cache = DynamicCache()
            for layer, states in enumerate(context.cache.layers):
                shape = (len(batch.ids), -1, -1, -1)
                cache.update(states.keys.expand(shape), states.values.expand(shape), layer)  # type: ignore[union-attr]
        out = self.model.base_model(
            input_ids=ids,
            position_ids=torch.from_numpy(batch.positions).to(self._device),
            attention_mask=mask[:, None],
            past_key_values=cache,
            use_cache=cache is not None,
        )
        return out.last_hidden_state

    def _score_whole(self, items: Sequence[Item], advance: Advance) -> list[ItemScore]:
        """The same sums from whole prompts, one row per label."""
        prompts = [item.prompts() for item in items]
        rows = [ids for of_item in prompts for ids in of_item]
        owners = [i for i, of_item in enumerate(prompts) for _ in of_item]
        left = [len(of_item) for of_item in prompts]
        nll: dict[int, np.ndarray] = {}
        for numbers in self._limits.batches({n: len(ids) for n, ids in enumerate(rows)}):
            nll |= zip(numbers, self._whole_batch([rows[n] for n in numbers]), strict=True)
            for n in numbers:
                left[owners[n]] -= 1
            advance(sum(left[i] == 0 for i in {owners[n] for n in numbers}))
        rows_nll = (nll[n] for n in range(len(rows)))
        return [
            ItemScore.of_prompts(item, [next(rows_nll) for _ in of_item])
            for item, of_item in zip(items, prompts, strict=True)
        ]

    def _whole_batch(self, rows: list[np.ndarray]) -> list[np.ndarray]:
        """NLL of tokens 2..N of every row, which are padded at their ends."""
        shape = (len(rows), max(map(len, rows)))
        ids, mask = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
        for r, row in enumerate(rows):
            ids[r, : len(row)], mask[r, : len(row)] = row, 1
        hidden = self.model.base_model(
            input_ids=torch.from_numpy(ids).to(self._device),
            attention_mask=torch.from_numpy(mask).to(self._device),
            use_cache=False,
        ).last_hidden_state
        self._count(int(mask.sum()), ids.size)
        return [
            self._head.pairs(hidden[r : r + 1], np.arange(len(row) - 1), row[1:], self._ignored)
            for r, row in enumerate(rows)
        ]

    def _score_own(self, items: Sequence[Item], advance: Advance) -> list[ItemScore]:
        scores = []
        for item in items:
            scores.append(probe.own_score(self.model, item, self._ignored))
            tokens = sum(map(len, item.prompts()))
            self._count(tokens, tokens, max(len(item.tails), 1))
            advance(1)
        return scores

    def _count(self, distinct: int, padded: int, batches: int = 1) -> None:
        self.work.distinct_tokens += distinct
        self.work.padded_tokens += padded
        self.work.batches += batches
