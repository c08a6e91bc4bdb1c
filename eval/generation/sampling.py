"""Sampling from a causal language model with transformers' `generate` and this project's random numbers.

A text depends only on the weights, its prompt, its seed and the decoding. It does not depend on the batch
size, its neighbours or the order of the work. Every (row, step) has its own random numbers, which descend a
binary tree over the vocabulary. At each node one number decides between the two halves by their probabilities
(float64 sums of float32 weights). With log2(V) comparisons instead of V boundaries, the chance of a
comparison that is closer than the rounding error does not grow with the vocabulary.

The logits of a row depend on the shape of the batch in their last digits. If that could change the token, the
token is chosen again from a forward of the row alone. This works in float32. In half precision the
differences are too large, so a text may change with the batch.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from inspect import signature
from itertools import groupby, islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

from emo.common.errors import UserError

from .decoding import Decoding, Request, until_end

MAX_DIFFERENCE = 1e-2  # between cached and plain logits, relative to the logits. More is not rounding.
SAFETY = 4  # times the largest difference that was seen
AMPLIFICATION = 4  # of logits' rounding by a fixed point. EMO makes about P^1.1 of P.
# An upper bound of the difference between two batch shapes, relative to the largest logit.
ROUNDING = {torch.float32: 2e-6, torch.float64: 1e-13}


class Continuation(NamedTuple):
    """tokens: new ids, with the end token. ended: whether there is an end token."""

    tokens: list[int]
    ended: bool


@contextlib.contextmanager
def plain_settings(model: PreTrainedModel) -> Iterator[None]:
    """Generate inside the block without the checkpoint's penalties and limits.

    transformers would take them from `generation_config` where the caller sets nothing.
    """
    settings = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = settings


class Sampler:
    """Samples from a causal language model.

    checked: largest difference between cached and plain logits seen so far, relative to the largest logit.
    steps: steps with a cache. redone: close decisions that were made again. on_tokens: receives the tokens of
    each step.

    Args:
        model: The model.
        decoding: How tokens are chosen.
        ends: Ids that end a text (may be empty).
        batch: Texts at a time.
        transform: Returns the logits [B, V] that tokens are chosen from, given the model's.
    """

    def __init__(
        self, model: PreTrainedModel, decoding: Decoding | None = None, ends: Iterable[int] = (),
        batch: int = 64, transform: Callable[[Tensor], Tensor] | None = None,
    ) -> None:  # fmt: skip
        self.model = model.eval()
        self.device = model.device
        self.dtype = model.dtype
        self.decoding = decoding or Decoding()
        self.ends = sorted(ends)
        self.batch = batch
        self._ends = torch.tensor(self.ends, dtype=torch.int64, device=self.device)
        self.transform = transform
        self.checked = 0.0
        self.steps = 0
        self.redone = 0
        self.on_tokens: Callable[[list[int]], Any] | None = None
        tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
        learned = any(table is not model.get_input_embeddings() for table in tables)
        # The logits of all positions of a long prompt may not fit into memory.
        self._last = {"logits_to_keep": 1} if "logits_to_keep" in signature(model.forward).parameters else {}
        self.bounded = learned or model.config.model_type == "mpt"  # no positions beyond the context

    @torch.inference_mode()
    def run(
        self, requests: Sequence[Request], tokens: int, progress: Callable[[int], Any] = lambda count: None
    ) -> list[Continuation]:
        """Return a continuation of at most `tokens` tokens for each request.

        progress: receives the number of texts that were just finished. Raises UserError for weights that
            produce
        NaN, and for models whose cache does not reproduce their plain forward.
        """
        texts: dict[int, Continuation] = {}

        def limit(number: int) -> int:
            """Return the longest text of a request if its batch must not exceed it, else 0.

            A batch continues until its longest text ends, but learned positions and MPT's biases end with the
            context.
            """
            return min(requests[number].limit or tokens, tokens) if self.bounded else 0

        # Prompts of similar length need little padding.
        order = sorted(range(len(requests)), key=lambda i: (limit(i), len(requests[i].prompt), i))
        with plain_settings(self.model):
            for _, numbers in groupby(order, limit):
                while part := list(islice(numbers, self.batch)):
                    texts |= zip(part, self._batch([requests[i] for i in part], tokens), strict=True)
                    progress(len(part))
        return [texts[i] for i in range(len(requests))]

    def _batch(self, requests: Sequence[Request], tokens: int) -> list[Continuation]:
        self._requests = requests
        self._random: Tensor | None = None  # created when the vocabulary is known
        limits = [min(request.limit or tokens, tokens) for request in requests]
        self._limits = torch.tensor(limits, device=self.device)
        self._lengths = [len(request.prompt) for request in requests]
        self._width = width = max(self._lengths)
        ids = [[r.prompt[0]] * (width - len(r.prompt)) + list(r.prompt) for r in requests]
        padding = torch.tensor([width - length for length in self._lengths], device=self.device)
        final_widths = self._limits + width
        out = self.model.generate(
            torch.tensor(ids, device=self.device),
            attention_mask=(torch.arange(width, device=self.device) >= padding[:, None]).long(),
            generation_config=GenerationConfig(
                do_sample=False,  # `_keep_chosen` leaves a single token
                max_new_tokens=max(limits),
                eos_token_id=self.ends or None,
                pad_token_id=min(self.ends, default=0),
            ),
            logits_processor=LogitsProcessorList([self._keep_chosen]),
            stopping_criteria=StoppingCriteriaList([lambda ids, scores, **_: ids.shape[1] >= final_widths]),
        )
        texts = []
        for row, limit in zip(out[:, width:].tolist(), limits, strict=True):
            texts.append(Continuation(*until_end(row[:limit], self.ends)))
        return texts

    def _keep_chosen(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return scores in which only the chosen next token of every row has probability."""
        if self._random is None:
            depth = levels(scores.shape[-1])
            longest = int(self._limits.max())
            draws = [uniforms(request.seed, longest, depth) for request in self._requests]
            self._random = torch.stack(draws).to(scores.device)
        step = input_ids.shape[1] - self._width
        running = self._running(input_ids)
        if step:
            self.steps += 1
            if self.steps & (self.steps - 1) == 0:  # 1, 2, 4, ...: later ones have longer histories
                self._compare(input_ids, scores, running.tolist())
        random = self._random[:, step]
        tokens = torch.zeros(len(scores), dtype=torch.int64, device=scores.device)
        tokens[running], close = self._choose(scores[running], random[running])
        for row in running[close].tolist():
            again, _ = self._choose(self._alone(input_ids, row), random[row : row + 1])
            tokens[row] = again[0]
            self.redone += 1
        if self.on_tokens is not None:
            self.on_tokens(tokens[running].tolist())
        return torch.full_like(scores, -math.inf).scatter_(1, tokens[:, None], 0.0)

    def _choose(self, logits: Tensor, random: Tensor) -> tuple[Tensor, Tensor]:
        rounding = self._rounding(logits)
        if self.transform is not None:
            logits = self.transform(logits)
            rounding = AMPLIFICATION * rounding
        return choose(logits, self.decoding, random, rounding)

    def _alone(self, input_ids: Tensor, row: int) -> Tensor:
        """Return the logits [1, V] of a row from a forward without cache, padding and neighbours."""
        ids = input_ids[row : row + 1, self._width - self._lengths[row] :]
        return self.model(input_ids=ids, use_cache=False, **self._last).logits[:, -1].float()

    def _running(self, input_ids: Tensor) -> Tensor:
        """Return the numbers [n] of the rows whose texts have not ended."""
        written = input_ids[:, self._width :]
        ended = torch.isin(written, self._ends).any(dim=1)
        return (~ended & (self._limits > written.shape[1])).nonzero()[:, 0]

    def _rounding(self, logits: Tensor) -> Tensor:
        """Return how far logits [B, V] of a row may differ between batch shapes [B], or -1 to ignore it."""
        rounding = ROUNDING.get(self.dtype)
        if rounding is None:
            return torch.full_like(logits[:, 0], -1.0)
        largest = logits.masked_fill(logits.isinf(), 0).abs().amax(dim=-1).clamp_min(1.0)
        return rounding * largest * max(1.0, SAFETY * self.checked / rounding)

    def _compare(self, input_ids: Tensor, logits: Tensor, running: list[int]) -> None:
        """Compare the logits of a running row with the plain forward, to check cache, mask and positions."""
        row = running[self.steps % len(running)]
        if self.steps == 1:  # the row with most padding
            row = min(running, key=self._lengths.__getitem__)
        plain = self._alone(input_ids, row)
        cached = logits[row : row + 1]
        finite = plain.isfinite() & cached.isfinite()
        if not bool(finite.any()):
            return  # `choose` raises for it
        difference = float((plain - cached)[finite].abs().max() / plain[finite].abs().max().clamp_min(1.0))
        if difference > MAX_DIFFERENCE * (1 if self.dtype.itemsize >= 4 else 10):
            raise UserError(
                f"{type(self.model).__name__} cannot be sampled: its logits with a cache differ by "
                f"{difference:.2g} (relative) from those of a plain forward"
                + (". Try --batch_size 1." if len(running) > 1 else "."),
                code="cache",
            )
        self.checked = max(self.checked, difference)


def levels(vocabulary: int) -> int:
    """Return the number of uniforms for a token, which is the depth of the tree."""
    return max(1, math.ceil(math.log2(vocabulary)))


def uniforms(seed: Any, tokens: int, depth: int) -> Tensor:
    """Return the random numbers of a continuation in [0, 1), float64 [tokens, depth].

    seed: any JSON value. Its digest keys a counter-based generator, so continuations are independent, and a
    longer continuation begins like a shorter one.
    """
    key = hashlib.sha256(json.dumps(seed).encode()).digest()
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(key[:16], "little")))
    return torch.from_numpy(generator.random((tokens, depth)))


def choose(logits: Tensor, decoding: Decoding, random: Tensor, rounding: Tensor) -> tuple[Tensor, Tensor]:
    """Return the chosen tokens, int64 [B], and whether each decision was close, bool [B].

    Raises UserError for a row with NaN or without a finite logit.

    Args:
        logits: float32 [B, V].
        decoding: How tokens are chosen.
        random: Uniforms, float64 [B, levels(V)].
        rounding: Possible error of the logits [B].
    """
    largest = logits.amax(dim=-1, keepdim=True)
    if not bool(largest.isfinite().all()):
        raise UserError("the model's logits are NaN or infinite. Try --dtype float32.", code="not-numbers")
    if decoding.greedy:
        best = logits.topk(min(2, logits.shape[-1]), dim=-1)
        return best.indices[:, 0], best.values[:, 0] - best.values[:, -1] <= 2 * rounding
    rounding = rounding / decoding.temperature
    scores = (logits - largest) / decoding.temperature
    close = torch.zeros(len(scores), dtype=torch.bool, device=scores.device)
    if 0 < decoding.top_k < scores.shape[-1]:
        scores, near = _keep_top_k(scores, decoding.top_k, rounding)
        close |= near
    if decoding.top_p < 1:
        scores, near = _keep_top_p(scores, decoding.top_p, rounding)
        close |= near
    tokens, near = _descend(scores.exp_(), random, rounding)
    return tokens, close | near


def _keep_top_k(scores: Tensor, k: int, rounding: Tensor) -> tuple[Tensor, Tensor]:
    """Return scores [B, V] of the k best tokens, -inf elsewhere, and whether the k-th was close [B]."""
    best = scores.topk(k + 1, dim=-1)
    close = best.values[:, -2] - best.values[:, -1] <= 2 * rounding
    mask = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, best.indices[:, :-1], True)
    return scores.masked_fill(~mask, -math.inf), close


def _keep_top_p(scores: Tensor, p: float, rounding: Tensor) -> tuple[Tensor, Tensor]:
    """Return scores [B, V] of the best tokens that reach p, -inf elsewhere, and whether it was close [B]."""
    vocabulary = scores.shape[-1]
    ordered, order = scores.sort(dim=-1, descending=True, stable=True)
    total = ordered.double().softmax(dim=-1).cumsum(dim=-1)
    last = (total < p).sum(dim=-1, keepdim=True).clamp_max(vocabulary - 1)  # the last kept token
    border = (total - p).abs().amin(dim=-1) <= rounding
    after = (last + 1).clamp_max(vocabulary - 1)
    gap = (ordered.gather(1, last) - ordered.gather(1, after))[:, 0]
    close = border | ((gap <= 2 * rounding) & (after > last)[:, 0])
    mask = torch.arange(vocabulary, device=scores.device) <= last
    return scores.masked_fill(~torch.zeros_like(mask).scatter_(1, order, mask), -math.inf), close


def _descend(weights: Tensor, random: Tensor, rounding: Tensor) -> tuple[Tensor, Tensor]:
    """Descend the tree over weights [B, V]. Return tokens [B] and whether each decision was close [B]."""
    rows, vocabulary = weights.shape
    sums = torch.zeros(rows, vocabulary + 1, dtype=torch.float64, device=weights.device)
    torch.cumsum(weights, dim=-1, dtype=torch.float64, out=sums[:, 1:])
    left = torch.zeros(rows, 1, dtype=torch.int64, device=weights.device)
    # Cumulated weight at both ends of the node.
    below = sums[:, :1]
    above = sums[:, -1:]
    margin = torch.full_like(below, math.inf)
    half = 1 << levels(vocabulary)
    for level in range(levels(vocabulary)):
        half >>= 1
        middle = left + half
        split = sums.gather(1, middle.clamp_max(vocabulary))
        # u < L / (L + R) without the quotient
        cut = random[:, level : level + 1] * (above - below) - (split - below)
        margin = torch.minimum(margin, cut.abs() / (above - below))
        right = cut >= 0
        left = torch.where(right, middle, left)
        below = torch.where(right, split, below)
        above = torch.where(right, above, split)
    return left[:, 0], margin[:, 0] <= rounding
