"""The settings of an evaluation, and how scores choose a label. This module imports no library."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from emo.common.errors import UserError

from ..models.base import NotFiniteError

SCORES = ("openicl_ppl", "suffix_sum", "suffix_mean")  # from one forward
EXTRA_SCORES = ("channel", "calibrated")  # with a separate forward each
INFERENCERS = ("prefix", "ppl")
# OpenICL's retrievers, and the facts besides the rows that their choice depends on. The tokenizer is one,
# because OpenICL passes texts through the evaluated model's tokenizer before it embeds them.
RETRIEVERS = {
    "random": ("seed",),
    "bm25": (),
    "topk": ("encoder", "tokenizer"),
}
SEED = 43  # OpenICL's default for random demonstrations
VERSION = 4  # of everything that affects a score, given the same prompts


@dataclass(frozen=True)
class Settings:
    """How tasks are evaluated. All fields except `batch_size` are part of the key of a result."""

    data: str
    retriever: str = "minilm"  # a sentence model, or the name of an OpenICL retriever
    encoder: str = "minilm"  # sentence model of OpenICL's dense retrievers
    inferencer: str = "prefix"  # or ppl, OpenICL's inferencer
    faithful: bool = False  # prompts and token counts as OpenICL makes them, with its faults
    shots: int | None = None  # None: the task's default
    limit: int | None = None
    score: str = "openicl_ppl"
    max_tokens: int | None = None  # longest prompt. None: the model's context.
    batch_size: int | None = None  # prompts of the full length. None: BUDGET tokens per batch.

    def __post_init__(self) -> None:
        for option, value, choices in [
            ("--inferencer", self.inferencer, INFERENCERS),
            ("--score", self.score, (*SCORES, *EXTRA_SCORES)),
        ]:
            if value not in choices:
                raise UserError(
                    f"{option} {value!r} is not known. Choose from {', '.join(choices)}.", code="option-value"
                )
        if self.inferencer == "ppl" and self.score != "openicl_ppl":
            raise UserError(
                "--inferencer ppl computes openicl_ppl only. Remove --score.",
                code="options-clash",
            )
        for option, number, minimum in [
            ("--num_fewshot", self.shots, 0),
            ("--limit", self.limit, 1),
            ("--max_tokens", self.max_tokens, 1),
        ]:
            if number is not None and number < minimum:
                raise UserError(f"{option} must be at least {minimum}", code="option-value")

    @property
    def extras(self) -> tuple[str, ...]:
        """The extra scores to compute: `score`, if it is one."""
        return tuple(name for name in EXTRA_SCORES if name == self.score)

    @property
    def scores(self) -> tuple[str, ...]:
        """All scores that records contain."""
        return ("openicl_ppl",) if self.inferencer == "ppl" else (*SCORES, *self.extras)

    @property
    def sentence_model(self) -> str | None:
        """The sentence model whose embeddings choose the demonstrations, if there is one."""
        if self.retriever not in RETRIEVERS:
            return self.retriever
        return self.encoder if "encoder" in RETRIEVERS[self.retriever] else None

    @property
    def needs_hugging_face(self) -> bool:
        """Whether these settings use parts of a Hugging Face model beyond the LanguageModel interface."""
        needs_weights = self.retriever in RETRIEVERS and "tokenizer" in RETRIEVERS[self.retriever]
        return self.faithful or self.inferencer == "ppl" or "channel" in self.extras or needs_weights


def best_label(values: Sequence[float]) -> int:
    """Return the index of the label with the smallest score, the first one at a tie.

    Raises NotFiniteError for NaN and infinite scores. A comparison with NaN would choose the first label.
    """
    if not all(map(math.isfinite, values)):
        raise NotFiniteError(f"a score is not finite: {', '.join(f'{value:g}' for value in values)}")
    return min(range(len(values)), key=values.__getitem__)
