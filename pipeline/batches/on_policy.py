"""On-policy distillation: batches that the model writes itself and its teacher judges.

In a share of the steps (GKD, arXiv 2306.13649), every document of the batch is cut where its supervised part
begins, or in the middle if it is supervised from the start. The model that trains continues it by sampling.
The loss is the divergence from the teacher over the continuation. Other parts of a sum, whose target is the
next token of the data, are off in these steps. A row drops documents that no longer fit.

With demonstrations (SDFT, arXiv 2601.19897) the teacher first reads the prompt and the answer in the data,
and then the prompt and the continuation.

The seed and the step decide which steps these are. With the slot in the batch they also decide the random
numbers of each document. Neither a resume nor another number of ranks changes them.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import logging
import time
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from emo.common.causal_lm import IGNORE
from emo.common.context_length import context_length
from emo.common.errors import UserError
from emo.data_prep.encoding.tokenizer import load_tokenizer
from emo.data_prep.shards.format import TRAIN, read_manifest

from ..config import RunConfig
from ..control.world import gather_objects
from ..engine.engine import Engine
from ..loss import plan_tokens
from ..loss.models.head import BOUNDS, DEMONSTRATION, DOMAIN, LONGEST, TEACHER_POSITIONS, MicroBatch, segments
from ..model.export import keeps_logits, unwrap
from ..model.objective.build import as_schedule, judged_objective
from .loader import StepBatch, Writing

log = logging.getLogger(__name__)


class DocumentPrompt(NamedTuple):
    """The beginning of a document."""

    row: int  # of the micro-batch
    ids: np.ndarray
    answer: np.ndarray  # the first answer in the data, or the rest of a text, as far as the row holds it
    last: int  # last token of the answer


# For a rank that has no more prompts, while other ranks have.
NO_PROMPT = DocumentPrompt(-1, np.zeros(1, np.int64), np.zeros(0, np.int64), -1)


def find_prompts(micro: MicroBatch) -> list[DocumentPrompt]:
    """Return the part of each supervised document before its first supervised token.

    A document that is supervised from the start gives its first half.
    """
    ids = micro["input_ids"].numpy()
    bounds = micro[BOUNDS].tolist()
    plan = micro["labels"]
    labels = np.full(ids.size, IGNORE)
    labels[plan.positions] = plan.labels  # position i predicts token i + 1
    prompts = []
    for start, end in itertools.pairwise(bounds):
        (supervised,) = (labels[start:end] != IGNORE).nonzero()
        if len(supervised):
            first = supervised[0]
            length = int(first) + 1 if first else (end - start + 1) // 2
            answer = supervised[supervised - first == np.arange(len(supervised))]
            row = start // ids.shape[1]
            document = ids.reshape(-1)[start:end]
            given = document[length : answer[-1] + 2]
            prompts.append(DocumentPrompt(row, document[:length], given, int(labels[start + answer[-1]])))
    return prompts


def find_end_tokens(
    prompts: Sequence[DocumentPrompt], ends: Sequence[int], special: Container[int]
) -> Tensor:
    """Return the tokens that end the text after each prompt, int64 [n, len(ends) + 1]; -1 for none.

    These are `ends` and the special token with which the answer in the data ends.
    """
    last = [p.last if p.last in special else -1 for p in prompts]
    return torch.tensor([(*ends, token) for token in last])


def group_prompts(lengths: Sequence[int], tokens: int, block: int, room: int) -> list[list[int]]:
    """Return the indices of prompts in groups of similar length, so that padding stays small.

    The prompts of a group and their texts take at most `room` tokens with padding, unless it is one prompt.

    Args:
        lengths: Tokens of each prompt.
        tokens: Largest number of tokens of a text.
        block: Largest number of tokens of a prompt and its text.
        room: Largest number of tokens of a group.
    """
    groups: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lengths.__getitem__):
        if groups and (len(groups[-1]) + 1) * min(lengths[i] + tokens, block) <= room:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


def draw_uniforms(seed: int, step: int, slots: Sequence[tuple[int, int]], tokens: int) -> Tensor:
    """Return random numbers in [0, 1) for the tokens of documents, float64 [n, tokens].

    slots: the row of each document in the global batch, and its number in this row.
    """
    rows = []
    for row, number in slots:
        digest = hashlib.sha256(f"{seed}/{step}/{row}/{number}".encode()).digest()
        rows.append(np.random.default_rng(np.frombuffer(digest, np.uint32)).random(tokens))
    return torch.from_numpy(np.stack(rows))


def sample_tokens(logits: Tensor, uniform: Tensor, temperature: float) -> Tensor:
    """Sample a token of softmax(logits / temperature) [n, V] with each of `uniform` [n], int64 [n].

    It is the first token whose cumulative probability is above the uniform number.
    """
    mass = torch.softmax(logits.double() / temperature, 1).cumsum(1)
    tokens = torch.searchsorted(mass, uniform[:, None] * mass[:, -1:], right=True)[:, 0]
    return tokens.clamp_(max=logits.shape[1] - 1)


@torch.no_grad()
def generate_texts(
    run: Callable[..., Any],
    prompts: Sequence[np.ndarray],
    uniforms: Tensor,
    ends: Tensor,
    temperature: float,
    block: int,
    should_stop: Callable[[bool], bool] = bool,
    **options: Any,
) -> list[list[int]]:
    """Return the tokens that a model writes after each prompt, up to an end token, which is kept.

    Args:
        run: Forward pass of a causal LM.
        prompts: Token ids of each prompt.
        uniforms: Random numbers, float64 [n, tokens]. A text has at most `tokens` tokens.
        ends: Tokens that end each text, int64 [n, e].
        temperature: Temperature of sampling.
        block: Largest number of tokens of a prompt and its text.
        should_stop: Returns whether to stop, given whether all texts here have ended. Under ZeRO-3 all ranks
            continue together.
        options: Further arguments of `run`.
    """
    inputs, mask = _pad_left(prompts, uniforms.device)
    positions = (mask.cumsum(1) - 1).clamp_(min=0)
    cache = None
    written = inputs[:, :0]
    ended = torch.zeros(len(prompts), dtype=torch.bool, device=inputs.device)
    for uniform in uniforms.unbind(1):
        arguments = {"input_ids": inputs, "attention_mask": mask, "position_ids": positions}
        out = run(**arguments, past_key_values=cache, use_cache=True, **options)
        cache = getattr(out, "past_key_values", None)
        if cache is None:
            problem = "objective.on_policy needs a model with a cache of keys and values"
            raise UserError(f"{problem}. Remove it, or choose another model", code="no-cache")
        inputs = sample_tokens(out.logits[:, -1], uniform, temperature)[:, None]
        written = torch.cat((written, inputs), 1)
        ended |= (inputs == ends).any(1)
        positions = (positions[:, -1:] + 1).clamp_(max=block - 1)
        ended |= (mask.sum(1) + 1) >= block
        mask = torch.cat((mask, mask.new_ones(len(mask), 1)), 1)
        if should_stop(bool(ended.all())):
            break
    texts = []
    for prompt, text, stops in zip(prompts, written.tolist(), ends.tolist(), strict=True):
        longest = text[: block - len(prompt)]
        length = next((i for i, token in enumerate(longest, 1) if token in stops), len(longest))
        texts.append(longest[:length])
    return texts


def _pad_left(prompts: Sequence[np.ndarray], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return prompts that end together, int64 [n, width], and the mask of their tokens."""
    width = max(map(len, prompts))
    ids, mask = torch.zeros(2, len(prompts), width, dtype=torch.int64).unbind()
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.from_numpy(prompt.astype(np.int64))
        mask[row, width - len(prompt) :] = 1
    return ids.to(device), mask.to(device)


class Rows:
    """Rows of tokens that are filled with documents from the left."""

    def __init__(self, rows: int, width: int) -> None:
        self.ids, self.positions = torch.zeros(2, rows, width, dtype=torch.int64).unbind()
        self.filled = [0] * rows

    def add(self, row: int, document: Sequence[int]) -> int | None:
        """Append a document to a row and return its first slot in the row, or None if it does not fit."""
        first = self.filled[row]
        last = first + len(document)
        if last > self.ids.shape[1]:
            return None
        self.ids[row, first:last] = torch.tensor(document)
        self.positions[row, first:last] = torch.arange(len(document))
        self.filled[row] = last
        return first

    def inputs(self, block: int) -> MicroBatch:
        """Return the arguments of a model. Padding has positions below `block`."""
        for row, first in enumerate(self.filled):
            self.positions[row, first:] = torch.arange(self.ids.shape[1] - first) % block
        bounds, longest = segments(self.positions)
        return {"input_ids": self.ids, "position_ids": self.positions, BOUNDS: bounds, LONGEST: longest}


def repack_rows(
    micro: MicroBatch,
    prompts: Sequence[DocumentPrompt],
    texts: Sequence[Sequence[int]],
    context: int | None = None,
) -> MicroBatch:
    """Return a micro-batch of the same shape with prompts and texts, of which the texts are supervised.

    With a `context`, the teacher gets rows of twice the length. In these, each document begins with the
    prompt and its answer, cut so that the document has at most `context` tokens. A document that has no room
    for an answer is left out.
    """
    count, block = micro["input_ids"].shape
    rows = Rows(count, block)
    seen = Rows(count, 2 * block)  # by the teacher
    labels = torch.full((count, block), IGNORE)
    positions = torch.zeros(count, block, dtype=torch.int64)  # of each token in the teacher's rows
    for prompt, text, example in zip(prompts, texts, _examples(prompts, texts, context), strict=True):
        document = [*prompt.ids.tolist(), *text]
        if example is None or (first := rows.add(prompt.row, document)) is None:
            continue
        last = first + len(document) - 1
        labels[prompt.row, last - len(text) : last] = torch.tensor(text)
        if context is not None:
            start = seen.add(prompt.row, [*example, *document])
            assert start is not None  # a prompt and its answer took no more space in the data
            start += prompt.row * 2 * block + len(example)
            positions[prompt.row, first : last + 1] = torch.arange(start, start + len(document))
    inputs = rows.inputs(block)
    if context is not None:
        inputs |= {DEMONSTRATION + name: value for name, value in seen.inputs(block).items()}
        inputs[TEACHER_POSITIONS] = positions
    pin = micro["input_ids"].is_pinned()
    if pin:
        inputs = {k: v.pin_memory() if isinstance(v, Tensor) else v for k, v in inputs.items()}
    if DOMAIN in micro:
        inputs[DOMAIN] = micro[DOMAIN]
    return inputs | {"labels": plan_tokens(labels, pin)}


def _examples(
    prompts: Sequence[DocumentPrompt], texts: Sequence[Sequence[int]], context: int | None
) -> Iterator[list[int] | None]:
    """Yield what the teacher reads before each document: nothing, or the prompt and its answer.

    None stands for an answer that has no room.
    """
    for prompt, text in zip(prompts, texts, strict=True):
        if context is None:
            yield []
        else:
            answer = prompt.answer[: max(0, context - 2 * len(prompt.ids) - len(text))].tolist()
            yield [*prompt.ids.tolist(), *answer] if answer else None


class OnPolicy:
    """Replaces the batches of some steps of a run."""

    def __init__(self, config: RunConfig, trainer: Engine, domains: int) -> None:
        assert config.objective.on_policy is not None
        self.settings = config.objective.on_policy
        self.seed = config.train.seed
        self.trainer = trainer
        self.objective = judged_objective(config)
        self.domains = domains
        self.block = config.data.sequence_len
        tokenizer = load_tokenizer(config.data.dir / "tokenizer")
        ends = {tokenizer.eos_token_id, *read_manifest(config.data.dir / TRAIN).answer_ends}
        self.ends = sorted(ends - {None})
        self.special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        self.together = trainer.ds.zero_optimization_stage() == 3 and trainer.world.ranks > 1
        self.options = {"logits_to_keep": 1} if keeps_logits(trainer.model) else {}
        self.context: int | None = None  # of the teacher, if it reads demonstrations
        if self.settings.context == "demonstration":
            longest = context_length(unwrap(trainer.model).config.get_text_config())
            self.context = 2 * self.block if longest is None else longest
        self.warned = False

    def due(self, step: int) -> bool:
        """Return whether the model writes the batch of `step`."""
        return as_schedule(self.settings.share).due(step)

    def write(self, batch: StepBatch, step: int) -> StepBatch:
        """Return the batch of `step` as the model continues it. All ranks must call."""
        start = time.perf_counter()
        world = self.trainer.world
        first_row = world.rank * sum(len(micro["input_ids"]) for micro in batch.micro)  # of the global batch
        micros = []
        counts = np.zeros(max(1, self.domains), np.int64)
        written = 0
        self.trainer.ds.eval()
        for micro in batch.micro:
            rows = len(micro["input_ids"])
            prompts = find_prompts(micro)
            texts = self._continue_prompts(prompts, first_row, step, micro["input_ids"].numel())
            written += sum(map(len, texts))
            micros.append(repack_rows(micro, prompts, texts, self.context))
            valid = np.bincount(micros[-1]["labels"].positions // self.block, minlength=rows)  # of each row
            domain = micro[DOMAIN].numpy() if DOMAIN in micro else np.zeros(rows, np.int64)
            np.add.at(counts, domain, valid)
            first_row += rows
        parts = gather_objects((counts, written))
        totals = np.sum([part for part, _ in parts], axis=0)
        writing = Writing(sum(tokens for _, tokens in parts), time.perf_counter() - start)
        if self.context is not None and 2 * totals.sum() < writing.tokens and not self.warned:
            self.warned = True
            problem = (
                "step %d trains on %d of the %d tokens that the model wrote, because prompts are too long"
            )
            cure = "for a teacher that reads them twice in a context of %d. Use shorter prompts or rows"
            log.warning(f"{problem} {cure}", step + 1, totals.sum(), writing.tokens, self.context)
        domains = totals.tolist() if batch.domains else []
        return StepBatch(batch.rows, int(totals.sum()), domains, micros, writing)

    def _continue_prompts(
        self, prompts: Sequence[DocumentPrompt], first_row: int, step: int, room: int
    ) -> list[list[int]]:
        """Return the text after each prompt.

        Args:
            prompts: The prompts of a micro-batch.
            first_row: The number of their row 0 in the global batch.
            step: The optimizer step.
            room: Largest number of tokens that are generated together, with their prompts.
        """
        tokens = self.settings.tokens
        groups = group_prompts([len(prompt.ids) for prompt in prompts], tokens, self.block, room)
        padded = [*prompts, NO_PROMPT]
        numbers: dict[int, itertools.count[int]] = {}
        slots = [(first_row + p.row, next(numbers.setdefault(p.row, itertools.count()))) for p in padded]
        uniforms = draw_uniforms(self.seed, step, slots, tokens)
        ends = find_end_tokens(padded, self.ends, self.special)
        device = self.trainer.world.device
        texts: list[list[int]] = [[] for _ in prompts]
        with torch.compiler.set_stance("force_eager"):  # the length differs at every pass
            for call in range(self._count_calls(len(groups))):
                group = groups[call] if call < len(groups) else []
                rows = group or [len(prompts)]
                written = generate_texts(
                    self.trainer.ds,
                    [padded[i].ids for i in rows],
                    uniforms[rows].to(device),
                    ends[rows].to(device),
                    self.settings.temperature,
                    self.block,
                    functools.partial(self._all_ended, idle=not group) if self.together else bool,
                    **self.options,
                )
                for i, text in zip(group, written, strict=False):
                    texts[i] = text
        return texts

    def _count_calls(self, groups: int) -> int:
        """Return how often to generate, which is equally often on all ranks under ZeRO-3."""
        if not self.together:
            return groups
        calls = torch.tensor(groups, device=self.trainer.world.device)
        dist.all_reduce(calls, dist.ReduceOp.MAX)
        return int(calls)

    def _all_ended(self, ended: bool, idle: bool) -> bool:
        """Return whether the texts of all ranks have ended.

        Args:
            ended: Those of this rank have ended.
            idle: This rank has no text, and only takes part in the forward passes of others.
        """
        running = torch.tensor(int(not (ended or idle)), device=self.trainer.world.device)
        dist.all_reduce(running)
        return not int(running)
