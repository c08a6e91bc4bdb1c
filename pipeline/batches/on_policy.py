"""Batches that the student writes itself, for its teacher to judge: on-policy distillation.

In a share of the steps (GKD, arXiv 2306.13649) every document of the batch is cut where its supervised part
begins, a text in the middle, and the model that trains continues it by sampling. The divergence from the
teacher is taken over what it has written; other parts of a sum, whose target is the token that follows, rest
in these steps. A row stays a row: its documents follow one another anew, those that no longer fit left out.

Which steps these are, and the random numbers of each document, follow from the seed, the step and the place
in the batch: neither a resume nor another number of ranks changes them.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Callable, Container, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from emo.common.errors import UserError
from emo.common.labels import IGNORE
from emo.data_prep.encoding.tokenizer import load_tokenizer

from ..config import RunConfig
from ..control.world import gather_objects
from ..engine.engine import Engine
from ..loss import plan_tokens
from ..loss.models.head import BOUNDS, DOMAIN, LONGEST, segments
from ..model.export import unwrap
from ..model.objectives import as_schedule, judged_objective
from .loader import StepBatch, Writing


class Prompt(NamedTuple):
    """The beginning of a document."""

    row: int  # of the micro-batch
    ids: np.ndarray
    last: int  # the token that ends what the data say after it


def prompts_of(micro: dict[str, Any]) -> list[Prompt]:
    """Return the prompts of a micro-batch: of each supervised document what precedes its first such token.

    Of a document that is supervised from its beginning, its first half.
    """
    ids, bounds, plan = micro["input_ids"].numpy(), micro[BOUNDS].tolist(), micro["labels"]
    labels = np.full(ids.size, IGNORE)
    labels[plan.positions] = plan.labels  # position i predicts token i + 1
    prompts = []
    for start, end in itertools.pairwise(bounds):
        (predicts,) = (labels[start:end] != IGNORE).nonzero()
        if len(predicts):
            length = int(predicts[0]) + 1 if predicts[0] else (end - start + 1) // 2
            stretch = predicts[predicts - predicts[0] == np.arange(len(predicts))]
            row, last = start // ids.shape[1], int(labels[start + stretch[-1]])
            prompts.append(Prompt(row, ids.reshape(-1)[start : start + length], last))
    return prompts


def ends_of(prompts: Sequence[Prompt], eos: int | None, special: Container[int]) -> Tensor:
    """Return the tokens that end a text after each prompt, int64 [n, 2]; -1 for none.

    They are EOS, and the special token with which a chat template ends the turn.
    """
    first = -1 if eos is None else eos
    return torch.tensor([(first, p.last if p.last in special else -1) for p in prompts] or [(first, -1)])


def uniforms(seed: int, step: int, places: Sequence[tuple[int, int]], tokens: int) -> Tensor:
    """Return random numbers in [0, 1), float64 [n, tokens], of documents: row of the global batch, number."""
    rows = []
    for row, number in places:
        digest = hashlib.sha256(f"{seed}/{step}/{row}/{number}".encode()).digest()
        rows.append(np.random.default_rng(np.frombuffer(digest, np.uint32)).random(tokens))
    return torch.from_numpy(np.stack(rows))


def drawn(logits: Tensor, uniform: Tensor, temperature: float) -> Tensor:
    """Return a token of softmax(logits / temperature) [n, V] for each of `uniform` [n], int64 [n].

    It is the first whose cumulative probability is above the uniform number.
    """
    mass = torch.softmax(logits.double() / temperature, 1).cumsum(1)
    return torch.searchsorted(mass, uniform[:, None] * mass[:, -1:], right=True)[:, 0].clamp_(
        max=logits.shape[1] - 1
    )


@torch.no_grad()
def continued(
    run: Callable[..., Any],
    prompts: Sequence[np.ndarray],
    numbers: Tensor,
    ends: Tensor,
    temperature: float,
    block: int,
    over: Callable[[bool], bool] = bool,
    **options: Any,
) -> list[list[int]]:
    """Return what a model writes after each prompt: at most as many tokens as `numbers` [n, tokens] has.

    One of its tokens `ends` [n, e], which is kept, ends a text, and so do `block` tokens with its prompt.
    run: a causal LM's forward, with `options`. over: says from whether all texts here are ended whether to
    stop; under ZeRO-3 all ranks go on together.
    """
    device, n, widest = numbers.device, len(prompts), max(map(len, prompts))
    ids = torch.zeros(n, widest, dtype=torch.int64)
    mask = torch.zeros(n, widest, dtype=torch.int64)
    for row, prompt in enumerate(prompts):  # which end together
        ids[row, widest - len(prompt) :] = torch.from_numpy(prompt.astype(np.int64))
        mask[row, widest - len(prompt) :] = 1
    given, mask = ids.to(device), mask.to(device)
    positions = (mask.cumsum(1) - 1).clamp_(min=0)
    cache, written = None, torch.zeros(n, 0, dtype=torch.int64, device=device)
    ended = torch.zeros(n, dtype=torch.bool, device=device)
    for number in numbers.unbind(1):
        inputs = {"input_ids": given, "attention_mask": mask, "position_ids": positions}
        out = run(**inputs, past_key_values=cache, use_cache=True, **options)
        cache = getattr(out, "past_key_values", None)
        if cache is None:
            problem = "objective.on_policy needs a model that keeps keys and values of earlier tokens"
            raise UserError(f"{problem}; leave it out", code="no-cache")
        token = drawn(out.logits[:, -1], number, temperature)
        written = torch.cat((written, token[:, None]), 1)
        ended |= (token[:, None] == ends).any(1)
        given, positions = token[:, None], (positions[:, -1:] + 1).clamp_(max=block - 1)
        ended |= (mask.sum(1) + 1) >= block
        mask = torch.cat((mask, mask.new_ones(n, 1)), 1)
        if over(bool(ended.all())):
            break
    texts = [text[: block - len(prompt)] for prompt, text in zip(prompts, written.tolist(), strict=True)]
    return [_until(text, stops) for text, stops in zip(texts, ends.tolist(), strict=True)]


def _until(text: list[int], ends: Container[int]) -> list[int]:
    """Return a text up to the first of its tokens that is an end."""
    length = next((i for i, token in enumerate(text, 1) if token in ends), len(text))
    return text[:length]


def repacked(
    micro: dict[str, Any], prompts: Sequence[Prompt], texts: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """Return a micro-batch of the same shape that holds prompts and texts, the texts supervised."""
    rows, block = micro["input_ids"].shape
    ids, positions = torch.zeros(2, rows, block, dtype=torch.int64).unbind()
    labels, filled = torch.full((rows, block), IGNORE), [0] * rows
    for prompt, text in zip(prompts, texts, strict=True):
        row, first, length = prompt.row, filled[prompt.row], len(prompt.ids) + len(text)
        if first + length > block:
            continue
        filled[row] += length
        document = slice(first, first + length)
        ids[row, document] = torch.tensor([*prompt.ids.tolist(), *text])
        positions[row, document] = torch.arange(length)
        last = first + length - 1
        labels[row, last - len(text) : last] = torch.tensor(text)
    for row, first in enumerate(filled):
        positions[row, first:] = torch.arange(block - first)
    pin = micro["input_ids"].is_pinned()
    tensors = {"input_ids": ids, "position_ids": positions}
    tensors[BOUNDS], longest = segments(positions)
    if pin:
        tensors = {name: tensor.pin_memory() for name, tensor in tensors.items()}
    kept = {name: micro[name] for name in (DOMAIN,) if name in micro}
    return tensors | kept | {LONGEST: longest, "labels": plan_tokens(labels, pin)}


class OnPolicy:
    """Replaces the batches of some steps of a run."""

    def __init__(self, config: RunConfig, trainer: Engine, domains: int) -> None:
        assert config.objective.on_policy is not None
        self.settings, self.seed, self.trainer = config.objective.on_policy, config.train.seed, trainer
        self.objective, self.domains = judged_objective(config), domains
        self.block = config.data.sequence_len
        tokenizer = load_tokenizer(config.data.dir / "tokenizer")
        self.eos = tokenizer.eos_token_id
        self.special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        self.together = trainer.ds.zero_optimization_stage() == 3 and trainer.world.ranks > 1
        keeps = "logits_to_keep" in getattr(unwrap(trainer.model), "order", ())
        self.options = {"logits_to_keep": 1} if keeps else {}

    def due(self, step: int) -> bool:
        """Return whether the model writes the batch of `step`."""
        return as_schedule(self.settings.share).due(step)

    def write(self, batch: StepBatch, step: int) -> StepBatch:
        """Return the batch of `step` as the model continues it; all ranks must call."""
        began, world = time.perf_counter(), self.trainer.world
        first = world.rank * sum(len(micro["input_ids"]) for micro in batch.micro)  # in the global batch
        micros, counts, written = [], np.zeros(max(1, self.domains), np.int64), 0
        self.trainer.ds.eval()
        for micro in batch.micro:
            rows = len(micro["input_ids"])
            prompts = prompts_of(micro)
            texts = self._texts(prompts, first, step)
            written += sum(map(len, texts))
            micros.append(repacked(micro, prompts, texts))
            labels = micros[-1]["labels"]
            of_row = np.bincount(labels.positions // self.block, minlength=rows)
            domain = micro[DOMAIN].numpy() if DOMAIN in micro else np.zeros(rows, np.int64)
            np.add.at(counts, domain, of_row)
            first += rows
        parts = gather_objects((counts, written))
        valid = np.sum([part for part, _ in parts], axis=0)
        apart = valid.tolist() if batch.domains else []
        writing = Writing(sum(tokens for _, tokens in parts), time.perf_counter() - began)
        return StepBatch(batch.rows, int(valid.sum()), apart, micros, writing)

    def _texts(self, prompts: Sequence[Prompt], first: int, step: int) -> list[list[int]]:
        """Return what the model writes after each prompt; `first`: of their rows, in the global batch."""
        if not prompts and not self.together:
            return []
        ids = [prompt.ids for prompt in prompts] or [np.zeros(1, np.int64)]
        numbers: dict[int, itertools.count[int]] = {}
        places = [(first + p.row, next(numbers.setdefault(p.row, itertools.count()))) for p in prompts]
        random = uniforms(self.seed, step, places or [(-1, 0)], self.settings.tokens)
        device = self.trainer.world.device
        with torch.compiler.set_stance("force_eager"):  # another length at every pass
            texts = continued(
                self.trainer.ds, ids, random.to(device),
                ends_of(prompts, self.eos, self.special).to(device), self.settings.temperature, self.block,
                self._over if self.together else bool, **self.options,
            )  # fmt: skip
        return texts[: len(prompts)]

    def _over(self, here: bool) -> bool:
        left = torch.tensor(int(not here), device=self.trainer.world.device)
        dist.all_reduce(left)
        return not int(left)
