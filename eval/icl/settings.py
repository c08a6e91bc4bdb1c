"""What may be chosen about an evaluation, and how scores choose a label. Light: reports import it too."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from emo.common.errors import UserError

SCORES = ("openicl_ppl", "suffix_sum", "suffix_mean")  # from one forward
EXTRA_SCORES = ("channel", "calibrated")  # each a forward of its own
INFERENCERS = ("prefix", "ppl")
# OpenICL's own, and what decides the demonstrations besides rows: texts pass through the evaluated model's
# tokenizer before they are embedded.
RETRIEVERS = {
    "random": ("seed",),
    "bm25": (),
    "topk": ("encoder", "tokenizer"),
    "votek": ("encoder", "tokenizer", "seed"),
    "dpp": ("encoder", "tokenizer", "candidates"),
    "mdl": ("encoder", "tokenizer", "candidates", "seed", "weights", "dtype", "task"),
}
SEED = 43  # OpenICL's default for random demonstrations
CANDIDATES = 30  # nearest rows that dpp and mdl choose among
BUDGET = 8192  # tokens per batch unless a caller chooses
VERSION = 4  # of everything that decides a score, given the same prompts


@dataclass(frozen=True)
class Settings:
    """All of it is part of the result's key except `batch_size`."""

    data: str
    retriever: str = "minilm"  # a sentence model, or the name of one of OpenICL's retrievers
    encoder: str = "minilm"  # sentence model of OpenICL's dense retrievers
    inferencer: str = "prefix"  # or ppl: OpenICL's own
    faithful: bool = False  # prompts and token counts as OpenICL makes them, faults included
    shots: int | None = None  # None: the task's own number
    limit: int | None = None
    score: str = "openicl_ppl"
    extra: tuple[str, ...] = ()  # further scores
    max_tokens: int | None = None  # longest prompt; None: the model's context
    batch_size: int | None = None  # prompts of the full length; None: BUDGET tokens per batch

    def __post_init__(self) -> None:
        for option, value, options in [
            ("--inferencer", self.inferencer, INFERENCERS),
            ("--score", self.score, (*SCORES, *EXTRA_SCORES)),
            *(("--extra_scores", name, EXTRA_SCORES) for name in self.extra),
        ]:
            if value not in options:
                raise UserError(f"{option} {value!r}; known: {', '.join(options)}")
        if self.inferencer == "ppl" and (self.score != "openicl_ppl" or self.extra):
            raise UserError("--inferencer ppl gives openicl_ppl only")
        for option, number, least in [
            ("--num_fewshot", self.shots, 0),
            ("--limit", self.limit, 1),
            ("--max_tokens", self.max_tokens, 1),
        ]:
            if number is not None and number < least:
                raise UserError(f"{option} must be at least {least}")

    @property
    def extras(self) -> tuple[str, ...]:
        """Return the further scores, the deciding one included."""
        return tuple(name for name in EXTRA_SCORES if name in (*self.extra, self.score))

    @property
    def scores(self) -> tuple[str, ...]:
        """Return all scores that records hold."""
        return ("openicl_ppl",) if self.inferencer == "ppl" else (*SCORES, *self.extras)

    @property
    def sentence_model(self) -> str | None:
        """Return the model that texts are embedded with where demonstrations are chosen by their vectors."""
        if self.retriever not in RETRIEVERS:
            return self.retriever
        return self.encoder if "encoder" in RETRIEVERS[self.retriever] else None


class NotFiniteError(ValueError):
    """A score is NaN or infinite, so that no label can be chosen by it."""


def winner(values: Sequence[float]) -> int:
    """Return the index of the label that a row's scores choose: the smallest, the first of equal ones.

    Raises NotFiniteError: a comparison with NaN is always false, and would choose the first label.
    """
    if not all(map(math.isfinite, values)):
        raise NotFiniteError(f"a score is not finite: {', '.join(f'{value:g}' for value in values)}")
    return min(range(len(values)), key=values.__getitem__)
