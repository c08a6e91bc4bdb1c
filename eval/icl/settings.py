"""What may be chosen about an evaluation. Light: mistakes in it are told before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass

from emo.common.errors import UserError
from emo.eval.icl.scores import EXTRA_SCORES, SCORES

INFERENCERS = ("prefix", "ppl")
RETRIEVERS = ("random", "bm25", "topk", "votek", "dpp", "mdl")  # OpenICL's own
DENSE = ("topk", "votek", "dpp", "mdl")  # those of them that embed texts
SEED = 43  # OpenICL's default for random demonstrations
CANDIDATES = 30  # nearest rows that dpp and mdl choose among
BUDGET = 8192  # tokens per batch unless a caller chooses
VERSION = 3  # of everything that decides a score, given the same prompts


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
        _known("--inferencer", self.inferencer, INFERENCERS)
        _known("--score", self.score, (*SCORES, *EXTRA_SCORES))
        for name in self.extra:
            _known("--extra_scores", name, EXTRA_SCORES)
        if self.inferencer == "ppl" and (self.score != "openicl_ppl" or self.extra):
            raise UserError("--inferencer ppl gives openicl_ppl only")
        if self.shots is not None and self.shots < 0:
            raise UserError("--num_fewshot must not be negative")
        for name in ("limit", "max_tokens"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise UserError(f"--{name} must be at least 1")

    @property
    def extras(self) -> tuple[str, ...]:
        """Further scores, the deciding one included."""
        return tuple(name for name in EXTRA_SCORES if name in (*self.extra, self.score))

    @property
    def scores(self) -> tuple[str, ...]:
        """All scores that records hold."""
        return ("openicl_ppl",) if self.inferencer == "ppl" else (*SCORES, *self.extras)


def _known(option: str, value: str, options: tuple[str, ...]) -> None:
    if value not in options:
        raise UserError(f"{option} {value!r}; known: {', '.join(options)}")
