"""Negative log-likelihoods of prompts that share a prefix, with each distinct token computed once.

An Item is a token prefix with k alternative tails. It becomes one row  [prefix][tail_1]..[tail_k].  Every
tail attends to the prefix and to itself only, and its positions continue those of the prefix. The last token
of a tail is only a target, so it is not part of the row.

    S   = sum of -log p over prefix tokens 2..P        s_k = the same over tail k

Items with a long common beginning (in MMLU the header and shots of a subject) share its keys and values. Sums
are float64 for every dtype of the model. The head runs only at positions that predict a target.

The scorer uses the first of three methods that agrees with the model's own forward:

    tree       shared prefixes
    rows       one row per label, with the head computed separately
    forward    one prompt at a time through the model's own forward

It compares them on artificial items at the start. It compares again on real items when prompts are longer
than all those compared so far. That second check uses one plain prompt, to save the memory of full logits.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from emo.common.causal_lm import read_logit_scaling
from emo.common.errors import UserError

from .base import BUDGET, Advance, Item, ItemScore, NotFiniteError, Say

if TYPE_CHECKING:
    from transformers import DynamicCache, PreTrainedModel

log = logging.getLogger(__name__)

TREE = "tree"
ROWS = "rows"
FORWARD = "forward"
METHODS = {TREE: "prompts with shared prefixes", ROWS: "full prompts", FORWARD: "one full prompt at a time"}
LONGER = 1.25  # compare again when a prompt is longer than those compared by this factor
HEAD_BYTES = 64 << 20  # size of the logits in memory at once
# Tokens that keep the device busy. Larger batches avoid padding.
DENSE_CPU = 1024
DENSE_GPU = 16384
PADDING = 0.08  # largest share of padding in such a batch
MASK_BYTES = 128 << 20  # attention mask of one batch, 4 bytes per entry
MIN_CONTEXT = 32  # shortest common beginning that is worth a separate pass
MIN_GROUP = 4  # fewest items for which it is
# Accepted rounding error, per token and per nat of a sum.
ROUNDING = {torch.float32: 3e-5, torch.float64: 3e-5, torch.float16: 5e-3, torch.bfloat16: 2e-2}
WINDOWS = (
    "sliding_window",
    "window_size",
    "attention_window_size",
    "attention_chunk_size",
    "local_attention",
)
LENGTH_DEPENDENT = ("dynamic", "longrope")  # rotary embeddings that depend on the longest row of a batch


def common_prefix(rows: Sequence[np.ndarray]) -> int:
    """Return the number of leading tokens that all rows share."""
    shortest = min(len(row) for row in rows)
    stacked = np.stack([row[:shortest] for row in rows])
    different = np.nonzero((stacked != stacked[0]).any(axis=0))[0]
    return int(different[0]) if len(different) else shortest


def groups(items: Sequence[Item]) -> list[tuple[list[int], int]]:
    """Return the item numbers of each group, with the length of the beginning to compute separately (or 0).

    Small groups and items without a group are merged. The beginning is one token shorter than the common
    prefix, because the next token is predicted from the last common one.
    """
    sizes = Counter(item.group for item in items)
    by_group: dict[object, list[int]] = {}
    for i, item in enumerate(items):
        by_group.setdefault(item.group if sizes[item.group] >= MIN_GROUP else None, []).append(i)
    result = []
    for members in by_group.values():
        length = common_prefix([items[i].prefix for i in members]) - 1 if len(members) > 1 else 0
        result.append((members, length if length >= MIN_CONTEXT else 0))
    return result


def batches(
    lengths: Mapping[int, int], budget: int, device: torch.device, context: int = 0
) -> Iterator[list[int]]:
    """Yield the keys of `lengths` in batches, longest first.

    Args:
        lengths: Tokens of each row, by key.
        budget: Tokens per batch, with padding and cached context. A longer row becomes a separate batch.
        device: Where the batches run.
        context: Number of cached tokens that every row also attends to.
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
            batch = []
            used = 0
        batch.append(key)
        used += lengths[key]
    if batch:
        yield batch


class TreeBatch:
    """Items as rows of one forward. The rows begin at token `context`, and earlier tokens are cached.

    ids, positions: int64 [B, T]. allowed: bool [B, T, context + T]. source: flat positions of the hidden
    states that predict the tokens in `target`.
    """

    def __init__(self, items: Sequence[Item], context: int = 0) -> None:
        self.items = items
        self.context = context
        width = max(item.fed for item in items) - context
        self.ids = np.zeros((len(items), width), dtype=np.int64)
        self.positions = np.zeros_like(self.ids)
        self._segment = np.full(self.ids.shape, -1, dtype=np.int32)  # 0: prefix, k + 1: tail k, -1: padding
        sources: list[np.ndarray] = []
        targets: list[np.ndarray] = []
        for row, item in enumerate(items):
            begins = self._fill_row(row, item.prefix[context:], item.tails)
            length = len(item.prefix) - context
            base = row * width
            sources.append(base + np.arange(length - 1))
            targets.append(item.prefix[context + 1 :])
            for k, tail in enumerate(item.tails):
                before = np.concatenate([[length - 1], np.arange(begins[k + 1], begins[k + 2])])
                skip = item.unscored(k)
                sources.append(base + before[skip : len(tail)])
                targets.append(tail[skip:])
        self.source = np.concatenate(sources)
        self.target = np.concatenate(targets)
        self._lengths = [len(target) for target in targets]  # number of targets in S and in every s_k

    def _fill_row(self, row: int, prefix: np.ndarray, tails: Sequence[np.ndarray]) -> np.ndarray:
        """Write the ids, positions and segments of a row. Return where each segment begins, and the end."""
        segments = [prefix, *(tail[:-1] for tail in tails)]
        begins = np.cumsum([0, *map(len, segments)])
        positions = [np.arange(len(part)) + (len(prefix) if k else 0) for k, part in enumerate(segments)]
        self.ids[row, : begins[-1]] = np.concatenate(segments)
        self.positions[row, : begins[-1]] = np.concatenate(positions) + self.context
        self._segment[row, : begins[-1]] = np.repeat(np.arange(len(segments)), np.diff(begins))
        return begins

    @property
    def causal(self) -> bool:
        """Return whether plain causal attention over each row is correct."""
        return self.context == 0 and all(len(item.tails) <= 1 for item in self.items)

    @property
    def allowed(self) -> Tensor:
        """The mask: causal, and a key must belong to the context, the prefix or the segment of the query."""
        segments = torch.from_numpy(self._segment)
        width = segments.shape[1]
        same = segments[:, None, :] == segments[:, :, None]
        allowed = (same | (segments[:, None, :] == 0)) & torch.ones(width, width, dtype=torch.bool).tril()
        return torch.cat([torch.ones(len(segments), width, self.context, dtype=torch.bool), allowed], dim=2)

    def totals(self, nll: np.ndarray, context_nll: float) -> list[ItemScore]:
        """Return the items' scores from the NLL of every target and of the cached context."""
        sums = np.repeat(np.arange(len(self._lengths)), self._lengths)
        totals = np.bincount(sums, weights=nll, minlength=len(self._lengths))
        scores = []
        begin = 0
        for item in self.items:
            end = begin + 1 + len(item.tails)
            scores.append(ItemScore(context_nll + totals[begin], totals[begin + 1 : end]))
            begin = end
        return scores


class Head:
    """A model's output embeddings, with the scale and soft cap that its configuration sets.

    Other changes that a family makes to its logits are unknown here. The scorer notices them, because it
    compares its scores with those of the model's own forward.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.head: nn.Linear = model.get_output_embeddings()
        scale, self._softcap = read_logit_scaling(model.config)
        self._scale = None if scale == 1.0 else scale
        plain = type(self.head) is nn.Linear and self.head.bias is None
        plain = plain and self._scale is None and self._softcap is None
        self._plain = plain and self.head.weight.dtype == torch.float32
        self._buffer: Tensor | None = None

    def nll(self, hidden: Tensor, source: np.ndarray, target: np.ndarray, ignored: int | None) -> np.ndarray:
        """Return -log p(target | state at source), float64 [Q].

        Args:
            hidden: Hidden states [B, T, H].
            source: Flat positions in `hidden`, int64 [Q].
            target: Token ids, int64 [Q].
            ignored: Targets with this id cost nothing.
        """
        # The state before the tails predicts the first token of every tail. Compute its logits once.
        positions, pair_state = np.unique(source, return_inverse=True)
        order = np.argsort(pair_state, kind="stable")
        device = self.head.weight.device
        states = hidden.reshape(-1, hidden.shape[-1])[torch.from_numpy(positions).to(device)]
        rows, targets = (torch.from_numpy(ids[order]).to(device) for ids in (pair_state, target))
        step = max(1, HEAD_BYTES // (4 * self.head.weight.shape[0]))
        cuts = torch.searchsorted(rows, torch.arange(0, len(states) + step, step, device=device)).tolist()
        parts = [torch.zeros(0, dtype=torch.float64, device=device)]
        for i, (lo, hi) in enumerate(itertools.pairwise(cuts)):
            if lo < hi:
                log_p = self._log_softmax(states[i * step : (i + 1) * step], step)
                parts.append(-log_p[rows[lo:hi] - i * step, targets[lo:hi]].double())
        sorted_nll = torch.cat(parts)
        if ignored is not None:
            sorted_nll = sorted_nll.masked_fill(targets == ignored, 0.0)
        nll = np.empty(len(source))
        nll[order] = sorted_nll.cpu().numpy()
        return nll

    def _log_softmax(self, states: Tensor, rows: int) -> Tensor:
        """Return log p over the vocabulary, float32 [M, V], M <= rows. On a CPU the next call overwrites it.

        On a CPU the page faults of a large new tensor cost as much as the arithmetic. One reused buffer
        halves the time of matrix product and softmax.
        """
        if self.head.weight.device.type != "cpu":
            return self._logits(states).log_softmax(dim=-1)
        if self._buffer is None:
            self._buffer = torch.empty(rows, self.head.weight.shape[0])
        logits = self._buffer[: len(states)]
        if self._plain:
            torch.mm(states, self.head.weight.t(), out=logits)
        else:
            logits.copy_(self._logits(states))
        return torch.ops.aten._log_softmax.out(logits, -1, False, out=logits)

    def _logits(self, states: Tensor) -> Tensor:
        """Return the logits as the model would, in float32."""
        logits = self.head(states)
        if self._scale is not None:
            logits = logits * self._scale
        if self._softcap is not None:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        return logits.float()


class PrefixScorer:
    """Scores Items with a causal language model.

    budget: tokens per batch, padding included. say: receives a line when a slower method is needed.
    """

    def __init__(self, model: PreTrainedModel, budget: int = BUDGET, say: Say = log.warning) -> None:
        self.model = model.eval()
        self.budget = budget
        self._say = say
        parameter = next(model.parameters())
        self._device = parameter.device
        self._dtype = parameter.dtype
        self._vocabulary = len(model.get_input_embeddings().weight)
        self._ignored: int | None = None
        self._compared = 0  # length of the longest prompt that was compared
        self.method = TREE
        config = model.config.get_text_config()
        without_head = model.get_output_embeddings() is None or model.base_model is model
        if without_head or depends_on_length(config):
            self._fall_back_to(FORWARD)
            return
        self._head = Head(model)
        if not attends_everywhere(config):
            self._fall_back_to(ROWS)
        self._fall_back_until_equal(artificial_items(self._vocabulary))

    @torch.inference_mode()
    def score(
        self, items: Sequence[Item], ignored: int | None = None, advance: Advance = lambda count: None
    ) -> list[ItemScore]:
        """Return scores in the order of `items`. ignored: targets with this id cost nothing.

        Raises UserError when a token is outside the model's vocabulary, and NotFiniteError when a sum is NaN
        or infinite.
        """
        if not items:
            return []
        largest = max(int(ids.max()) for item in items for ids in (item.prefix, *item.tails) if len(ids))
        if largest >= self._vocabulary:
            raise UserError(
                f"a prompt has the token id {largest}, but the model has {self._vocabulary} embeddings. The "
                "tokenizer belongs to another model.",
                code="tokenizer",
            )
        by_length = sorted(range(len(items)), key=lambda i: items[i].longest)
        longest = items[by_length[-1]].longest
        if self.method != FORWARD and longest > LONGER * self._compared:
            samples = [items[i] for i in {by_length[0], by_length[-1]}]
            if not self._equal(samples, lambda item: self._score_trees([item], [([0], 0)])[0]):
                self._fall_back_until_equal(samples)
            self._compared = longest
        self._ignored = ignored
        scores = self._score(items, advance)
        if not all(np.isfinite(score.prefix) and np.isfinite(score.tails).all() for score in scores):
            raise NotFiniteError("its likelihoods are NaN or infinite")
        return scores

    @torch.inference_mode()
    def read_text(self, ids: np.ndarray) -> tuple[np.ndarray, list[int]]:
        """Return -log p of tokens 2 to N of a text [N], float64, and the most likely tokens 2 to N + 1.

        Raises NotFiniteError when a value is NaN or infinite.
        """
        row = torch.from_numpy(ids)[None].to(self._device)
        logits: Callable[[Tensor], Tensor] = Tensor.float
        if self.method == FORWARD:
            states = self.model(input_ids=row, use_cache=False).logits[0]
        else:
            states = self.model.base_model(input_ids=row, use_cache=False).last_hidden_state[0]
            logits = self._head._logits
        step = max(1, HEAD_BYTES // (4 * self._vocabulary))
        nll, best = [], list[int]()
        for part, targets in zip(states.split(step), row[0].roll(-1).split(step), strict=True):
            log_p = logits(part).log_softmax(dim=-1)
            nll.append(-log_p.gather(1, targets[:, None])[:, 0].double())
            best += log_p.argmax(dim=-1).tolist()
        losses = torch.cat(nll).cpu().numpy()
        if not np.isfinite(losses).all():
            raise NotFiniteError("its likelihoods are NaN or infinite")
        return losses[:-1], best

    def _fall_back_to(self, method: str) -> None:
        self.method = method
        self._say(f"{type(self.model).__name__} is scored as {METHODS[method]}, which is slower and exact")

    @torch.inference_mode()
    def _fall_back_until_equal(self, items: Sequence[Item]) -> None:
        """Switch to the first method, from the current one on, that agrees with the model's own forward."""
        while self.method != FORWARD and not self._equal(items, self._score_forward):
            self._fall_back_to(ROWS if self.method == TREE else FORWARD)

    def _equal(self, items: Sequence[Item], score_alone: Callable[[Item], ItemScore]) -> bool:
        """Return whether the current method agrees, up to rounding, with the scores of single prompts.

        It compares the first and the last prompt of every item. `score_alone` scores a single prompt. NaN is
        never equal.
        """
        self._ignored = None
        try:
            for item, ours in zip(items, self._score(items, lambda count: None), strict=True):
                prompts = item.split()
                for k in {0, len(prompts) - 1}:
                    reference = score_alone(prompts[k])
                    pairs = [(len(item.prefix), ours.prefix, reference.prefix)]
                    if item.tails:
                        pairs.append((len(item.tails[k]), ours.tails[k], reference.tails[0]))
                    for tokens, value, other in pairs:
                        if not abs(value - other) <= ROUNDING[self._dtype] * (tokens + abs(other)):
                            return False
            return True
        except Exception as error:  # families reject a mask, a cache or positions in many ways
            log.debug("%s: %s: %s", self.method, type(error).__name__, error)
            return False

    def _score(self, items: Sequence[Item], advance: Advance) -> list[ItemScore]:
        if self.method == TREE:
            return self._score_trees(items, groups(items), lambda numbers: advance(len(numbers)))
        prompts = [prompt for item in items for prompt in item.split()]
        ends = np.cumsum([max(len(item.tails), 1) for item in items])

        def finished(numbers: list[int]) -> None:
            advance(int(np.isin(ends - 1, numbers).sum()))

        if self.method == ROWS:
            scores = self._score_trees(prompts, [(list(range(len(prompts))), 0)], finished)
        else:
            scores = []
            for number, prompt in enumerate(prompts):
                scores.append(self._score_forward(prompt))
                finished([number])
        parts = [scores[end - max(len(item.tails), 1) : end] for item, end in zip(items, ends, strict=True)]
        return [ItemScore(part[0].prefix, np.concatenate([score.tails for score in part])) for part in parts]

    def _score_forward(self, prompt: Item) -> ItemScore:
        """Return the score of a single prompt (an item with at most one tail) by the model's own forward."""
        row = torch.from_numpy(np.concatenate([prompt.prefix, *prompt.tails]))[None].to(self._device)
        logits = self.model(input_ids=row, use_cache=False).logits[0, :-1]
        targets = row[0, 1:]
        step = max(1, HEAD_BYTES // (4 * logits.shape[-1]))
        parts = [torch.zeros(0, dtype=torch.float64, device=self._device)]
        for part, labels in zip(logits.split(step), targets.split(step), strict=True):
            parts.append(-part.float().log_softmax(dim=-1).gather(1, labels[:, None])[:, 0].double())
        nll = torch.cat(parts)
        if self._ignored is not None:
            nll = nll.masked_fill(targets == self._ignored, 0.0)
        losses = nll.cpu().numpy()  # of tokens 2..N
        split = len(prompt.prefix) - 1
        tails = [losses[split + prompt.unscored(k) :].sum() for k in range(len(prompt.tails))]
        return ItemScore(float(losses[:split].sum()), np.array(tails, dtype=np.float64))

    def _score_trees(
        self,
        items: Sequence[Item],
        parts: list[tuple[list[int], int]],
        finished: Callable[[list[int]], None] = lambda numbers: None,
    ) -> list[ItemScore]:
        """Return the scores of items. parts: item numbers and the length of their shared beginning."""
        result: dict[int, ItemScore] = {}
        for members, context in parts:
            cache = None
            context_nll = 0.0
            if context:
                ids = items[members[0]].prefix[: context + 1]
                row = torch.from_numpy(ids[None, :context]).to(self._device)
                out = self.model.base_model(input_ids=row, use_cache=True)
                cache = out.past_key_values
                hidden = out.last_hidden_state
                context_nll = self._head.nll(hidden, np.arange(context), ids[1:], self._ignored).sum()
            lengths = {i: items[i].fed - context for i in members}
            for numbers in batches(lengths, self.budget, self._device, context):
                batch = TreeBatch([items[i] for i in numbers], context)
                hidden = self._forward(batch, cache)
                nll = self._head.nll(hidden, batch.source, batch.target, self._ignored)
                result |= zip(numbers, batch.totals(nll, context_nll), strict=True)
                finished(numbers)
        return [result[i] for i in range(len(items))]

    def _forward(self, batch: TreeBatch, shared: DynamicCache | None) -> Tensor:
        """Return hidden states [B, T, H]. shared: keys and values of the shared beginning of all rows."""
        ids = torch.from_numpy(batch.ids).to(self._device)
        if (
            batch.causal
        ):  # no token sees the padding on the right. Attention without a mask takes half the time.
            return self.model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        forbidden = ~batch.allowed.to(self._device)
        mask = torch.zeros(forbidden.shape, dtype=self._dtype, device=self._device)
        mask.masked_fill_(forbidden, torch.finfo(self._dtype).min)
        cache = None
        if shared is not None:
            from transformers import DynamicCache

            cache = DynamicCache()
            for layer, states in enumerate(shared.layers):
                shape = (len(batch.ids), -1, -1, -1)
                cache.update(states.keys.expand(shape), states.values.expand(shape), layer)
        out = self.model.base_model(
            input_ids=ids,
            position_ids=torch.from_numpy(batch.positions).to(self._device),
            attention_mask=mask[:, None],
            past_key_values=cache,
            use_cache=cache is not None,
        )
        return out.last_hidden_state


def artificial_items(vocabulary: int) -> list[Item]:
    """Return small items of every shape: a shared beginning, tails of different lengths, a single tail."""
    ids = (np.arange(MIN_CONTEXT + 24) * 7919 + 13) % vocabulary
    start = ids[: MIN_CONTEXT + 4]
    shared = [
        Item(np.concatenate([start, ids[-8 - j : -4 - j]]), [ids[3:6], ids[8:9], ids[1:5]], "probe")
        for j in range(4)
    ]
    far = Item(ids[:9], [ids[4:20], ids[7:30], ids[2:22], ids[11:20]])
    alone = [Item(ids[j : 6 + 2 * j], [ids[9:12]], "alone") for j in range(4)]
    return [*shared, far, Item(ids[:9], [ids[4:6], ids[7:10]]), Item(ids[5:6], [ids[9:12]]), *alone]


def attends_everywhere(config: Any) -> bool:
    """Return whether every layer attends to all earlier tokens.

    A 4-D mask overrides the windows of a model, and windows are longer than the prompts of the comparison.
    """
    kinds = getattr(config, "layer_types", None) or getattr(config, "attention_layers", None)
    if kinds:
        return set(kinds) <= {"full_attention", "attention", "global"}
    return not any(
        getattr(config, name, None) and getattr(config, f"use_{name}", True) is not False for name in WINDOWS
    )


def depends_on_length(config: Any) -> bool:
    """Return whether a prompt's scores depend on the lengths of other prompts in its batch."""
    return any(f"'{kind}'" in str(config.to_dict()) for kind in LENGTH_DEPENDENT)


@torch.inference_mode()
def is_causal(model: Any) -> bool:
    """Return whether scores depend on earlier tokens only. Raises NotFiniteError when logits are NaN."""
    vocabulary = model.get_input_embeddings().weight.shape[0]
    ids = (torch.arange(8, device=next(model.parameters()).device) * 7919 + 13) % vocabulary
    changed = ids.clone()
    changed[-1] = (ids[-1] + 1) % vocabulary
    logits = [model(input_ids=row[None], use_cache=False).logits[0].float() for row in (ids, changed)]
    if not all(bool(scores.isfinite().all()) for scores in logits):
        raise NotFiniteError("its logits are NaN or infinite")
    # Both rows use the same arithmetic, so a causal model has hardly any rounding difference.
    tolerance = ROUNDING[model.dtype] / 10 * float(logits[0].abs().max())
    return float((logits[0] - logits[1])[:-1].abs().max()) <= tolerance
