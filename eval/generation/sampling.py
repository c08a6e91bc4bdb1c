"""Continuations of token sequences, in batches: rows leave when they end, and new ones take their place.

What a continuation says depends on the weights, its prompt, its seed and the decoding, and on nothing else:
not on the batch size, not on its neighbours, not on the order of the work. See `choice` for how; it holds
where the arithmetic is float32. In half precision the logits of different batch shapes differ by too much to
decide every close call anew, so there a text may change with the batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from common.errors import UserError
from eval.generation import choice
from eval.generation.decoding import Decoding
from eval.generation.kv_cache import RowCache

BATCH = 64
IDLE = 8  # rows are replaced when one of so many has ended: copying the cache costs about a step
DIFFERENT = 1e-2  # a larger difference from the plain forward, relative to the logits, is not rounding
SAFETY = 4  # times the largest difference that was seen


@dataclass(frozen=True)
class Request:
    """prompt: token ids, at least one; seed: any JSON value, one per continuation.

    limit: at most so many tokens, where the run allows more.
    """

    prompt: Sequence[int]
    seed: Any
    limit: int | None = None


@dataclass
class Continuation:
    """tokens: new ids, the end token included; ended: whether there is one."""

    tokens: list[int] = field(default_factory=list)
    ended: bool = False


@dataclass
class _Rows:
    """The running batch: one entry per row in every field."""

    requests: list[int]  # places in the list of requests
    lengths: Tensor  # tokens in the cache
    pending: Tensor  # int64 [B]: chosen, not yet fed
    random: Tensor  # float64 [B, tokens, depth]
    alive: list[bool]

    def keep(self, rows: list[int]) -> _Rows:
        index = torch.tensor(rows, dtype=torch.int64, device=self.lengths.device)
        requests, alive = [self.requests[i] for i in rows], [self.alive[i] for i in rows]
        return _Rows(requests, self.lengths[index], self.pending[index], self.random[index], alive)

    def joined(self, other: _Rows) -> _Rows:
        lengths = torch.cat([self.lengths, other.lengths])
        pending, random = torch.cat([self.pending, other.pending]), torch.cat([self.random, other.random])
        return _Rows(self.requests + other.requests, lengths, pending, random, self.alive + other.alive)


class Sampler:
    """Samples from one causal language model. ends: ids after which a text is over (may be empty).

    checked: largest difference between cached and plain logits seen so far, relative to the largest logit.
    redone: number of close decisions that were made anew.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        decoding: Decoding | None = None,
        ends: Iterable[int] = (),
        batch: int = BATCH,
    ) -> None:
        if batch < 1:
            raise UserError(f"--batch {batch} must be at least 1")
        self.model = model.eval()
        self.decoding = decoding or Decoding()
        self.ends = frozenset(ends)
        self.batch = batch
        self.checked = 0.0
        self.redone = 0
        self._device = next(model.parameters()).device
        self._dtype = next(model.parameters()).dtype
        self._exact = self._dtype in (torch.float32, torch.float64)
        accepted = inspect.signature(model.forward).parameters
        self._positions = "position_ids" in accepted
        self._last = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}

    @torch.inference_mode()
    def run(
        self,
        requests: Sequence[Request],
        tokens: int,
        progress: Callable[[int], Any] = lambda count: None,
    ) -> list[Continuation]:
        """One continuation of at most `tokens` tokens per request, in their order.

        progress: called with the number of texts that have just been finished. Raises UserError for weights
        that give no numbers, and for models whose cache does not reproduce their plain forward.
        """
        if tokens < 1:
            raise UserError(f"--tokens {tokens} must be at least 1")
        self._requests, self._tokens, self._progress = requests, tokens, progress
        self._texts = [Continuation() for _ in requests]
        waiting = list(range(len(requests)))[::-1]
        cache, rows = RowCache(), None
        step = 0
        while True:
            cache, rows = self._refill(cache, rows, waiting)
            if rows is None:
                return self._texts
            if not any(rows.alive):
                continue
            logits = self._step(cache, rows)
            step += 1
            if step & (step - 1) == 0:  # 1, 2, 4, ...: later ones have longer histories
                self._compare(rows, logits, step)
            self._decide(rows, logits)
            self._finish(rows)

    def _refill(
        self, cache: RowCache, rows: _Rows | None, waiting: list[int]
    ) -> tuple[RowCache, _Rows | None]:
        """Drop rows that ended and start waiting requests, when enough rows are idle."""
        running = [] if rows is None else [i for i, alive in enumerate(rows.alive) if alive]
        idle = (0 if rows is None else len(rows.alive)) - len(running)
        free = min(self.batch - len(running), len(waiting)) if waiting else idle
        if running and max(free, idle) * IDLE < len(running):
            return cache, rows
        if running and rows is not None:
            rows = rows.keep(running)
            cache.rearrange(torch.tensor(running, device=self._device), int(rows.lengths.max()))
        else:
            cache, rows = RowCache(), None
        while waiting and (rows is None or len(rows.alive) < self.batch):
            count = self.batch - (0 if rows is None else len(rows.alive))
            taken = [waiting.pop() for _ in range(min(count, len(waiting)))]
            cache, rows = self._start(taken, cache, rows)
        return cache, rows

    def _start(self, taken: list[int], cache: RowCache, rows: _Rows | None) -> tuple[RowCache, _Rows | None]:
        """Feed prompts, choose their first tokens, and put them beside the running rows."""
        prompts = list(dict.fromkeys(tuple(self._requests[i].prompt) for i in taken))
        row_of_prompt = {prompt: n for n, prompt in enumerate(prompts)}
        which = torch.tensor(
            [row_of_prompt[tuple(self._requests[i].prompt)] for i in taken], device=self._device
        )
        lengths = torch.tensor([len(p) for p in prompts], device=self._device)
        width = int(lengths.max())
        ids = torch.tensor([[p[0]] * (width - len(p)) + list(p) for p in prompts], device=self._device)
        new = RowCache()
        logits = self._forward(ids, lengths, new)[which]
        depth = choice.levels(logits.shape[-1])
        random = torch.stack([choice.uniforms(self._requests[i].seed, self._tokens, depth) for i in taken])
        pending = torch.zeros(len(taken), dtype=torch.int64, device=self._device)
        started = _Rows(taken, lengths[which], pending, random.to(self._device), [True] * len(taken))
        self._decide(started, logits)
        self._finish(started)
        common = max(width, cache.width if rows is not None else 0)
        new.rearrange(which, common)
        if rows is None:
            return new, started
        if cache.width < common:
            cache.rearrange(None, common)
        cache.append(new)
        return cache, rows.joined(started)

    def _forward(self, ids: Tensor, lengths: Tensor, cache: RowCache) -> Tensor:
        """Logits after the last column of ids [B, T], float32 [B, V]; rows have `lengths` tokens with it."""
        width = cache.width + ids.shape[1]
        before = (width - lengths)[:, None]  # masked slots of each row
        slots = torch.arange(width, device=self._device)
        arguments: dict[str, Any] = {}
        if bool((before != 0).any()):
            arguments["attention_mask"] = (slots >= before).long()
        if self._positions:
            arguments["position_ids"] = (slots[-ids.shape[1] :] - before).clamp_min(0)
        out = self.model(input_ids=ids, past_key_values=cache, use_cache=True, **arguments, **self._last)
        return out.logits[:, -1].float()

    def _step(self, cache: RowCache, rows: _Rows) -> Tensor:
        """Feed the pending tokens; logits of the next ones."""
        rows.lengths += 1
        return self._forward(rows.pending[:, None], rows.lengths, cache)

    def _alone(self, request: int) -> Tensor:
        """Logits [1, V] after a text as it is now, from a forward without cache, padding and neighbours."""
        ids = [*self._requests[request].prompt, *self._texts[request].tokens]
        out = self.model(input_ids=torch.tensor([ids], device=self._device), use_cache=False, **self._last)
        return out.logits[:, -1].float()

    def _rounding(self, logits: Tensor) -> Tensor:
        if not self._exact:
            return torch.full_like(logits[:, 0], -1.0)
        tolerance = choice.tolerance(logits, self._dtype)
        return tolerance * max(1.0, SAFETY * self.checked / choice.ROUNDING[self._dtype])

    def _compare(self, rows: _Rows, logits: Tensor, step: int) -> None:
        """Hold the logits of a row against the plain forward: are cache, mask and positions honoured?"""
        running = [i for i, alive in enumerate(rows.alive) if alive]
        if not running:
            return
        row = min(running, key=lambda i: int(rows.lengths[i])) if step == 1 else running[step % len(running)]
        plain = self._alone(rows.requests[row])
        finite = plain.isfinite() & logits[row : row + 1].isfinite()
        if not bool(finite.any()):
            return  # `choose` refuses it
        scale = plain[finite].abs().max().clamp_min(1.0)
        difference = float((plain - logits[row : row + 1])[finite].abs().max() / scale)
        if difference > DIFFERENT * (1 if self._exact else 10):
            hint = "; try --batch 1" if self.batch > 1 else ""
            raise UserError(
                f"{type(self.model).__name__}: with cached keys and values its logits differ by "
                f"{difference:.2g} of their size from those of a plain forward, so it cannot be sampled{hint}"
            )
        self.checked = max(self.checked, difference)

    def _decide(self, rows: _Rows, logits: Tensor) -> None:
        """Choose a token for every row; close decisions of running rows are made anew."""
        positions = torch.tensor([len(self._texts[r].tokens) for r in rows.requests], device=self._device)
        positions.clamp_max_(self._tokens - 1)  # rows that ended are carried along until they are replaced
        random = rows.random[torch.arange(len(positions), device=self._device), positions]
        try:
            tokens, close = choice.choose(logits, self.decoding, random, self._rounding(logits))
            for row in close.nonzero()[:, 0].tolist():
                if rows.alive[row]:
                    alone = self._alone(rows.requests[row])
                    again = choice.choose(alone, self.decoding, random[row : row + 1], self._rounding(alone))
                    tokens[row] = again[0][0]
                    self.redone += 1
        except FloatingPointError:
            raise UserError(
                f"{self.model.name_or_path or type(self.model).__name__}: the model's logits are not numbers "
                "(NaN or infinite weights?); nothing was written"
            ) from None
        rows.pending = tokens

    def _finish(self, rows: _Rows) -> None:
        """Note the chosen tokens, and which texts ended with them."""
        ended = 0
        for row, token in enumerate(rows.pending.tolist()):
            if not rows.alive[row]:
                continue
            text = self._texts[rows.requests[row]]
            text.tokens.append(token)
            text.ended = token in self.ends
            limit = self._requests[rows.requests[row]].limit or self._tokens
            rows.alive[row] = not text.ended and len(text.tokens) < min(limit, self._tokens)
            ended += not rows.alive[row]
        if ended:
            self._progress(ended)
