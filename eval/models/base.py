"""The interface of an evaluated language model. Importing this module loads no numerical library."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..results.directory import Description, Say

if TYPE_CHECKING:
    import numpy as np

BUDGET = 8192  # tokens per batch by default

Advance = Callable[[int], Any]  # receives the number of items that were just finished


class NotFiniteError(ValueError):
    """A score is NaN or infinite, so it cannot choose a label."""


@dataclass(frozen=True)
class Item:
    """A prompt prefix with k alternative tails, which are the rest of the prompt under each label.

    prefix: token ids, int64 [P], P >= 1. tails: k arrays of token ids, int64 [n_k]. group: items of the same
    group may share the beginning of their prefixes. skip: number of leading tokens of each tail that the
    model reads without scoring them (none by default).
    """

    prefix: np.ndarray
    tails: Sequence[np.ndarray]
    group: object = None
    skip: Sequence[int] = ()

    def unscored(self, k: int) -> int:
        """Return the number of leading tokens of tail k that are not scored."""
        return self.skip[k] if self.skip else 0

    @property
    def fed(self) -> int:
        """Return the number of tokens that pass through the model: the last one of a tail does not."""
        return len(self.prefix) + sum(max(len(tail) - 1, 0) for tail in self.tails)

    @property
    def longest(self) -> int:
        """Return the number of tokens of the longest prompt."""
        return len(self.prefix) + max(map(len, self.tails), default=0)

    def split(self) -> list[Item]:
        """Return an item for each prompt; without tails the prefix is the only prompt."""
        tails = enumerate(self.tails)
        return [Item(self.prefix, [tail], None, [self.unscored(k)]) for k, tail in tails] or [self]


@dataclass
class ItemScore:
    """Sums of -log p in nats. prefix: over prefix tokens 2 to P. tails: over each tail, float64 [k]."""

    prefix: float
    tails: np.ndarray


class LanguageModel(ABC):
    """A language model that can be scored on the tasks.

    A subclass sets `name` and implements `digest`, `encode` and `score`. The other members have defaults.
    """

    name: str  # in results, and of the directory that holds them
    dtype: str = "float32"

    @property
    @abstractmethod
    def digest(self) -> str:
        """Return the identity of the weights: it must change whenever scores may change."""

    @abstractmethod
    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each text."""

    @abstractmethod
    def score(
        self, items: Sequence[Item], *, ignored: int | None = None, advance: Advance = lambda count: None
    ) -> list[ItemScore]:
        """Return the scores of the items, in their order.

        ignored: an id whose tokens cost nothing as targets. advance: receives the number of finished items
        after each batch. Raises NotFiniteError when a score is NaN or infinite.
        """

    def prepare(self, budget: int, say: Say) -> None:  # noqa: B027 - optional
        """Load the weights before the first score. budget: tokens per batch, padding included."""

    @property
    def source(self) -> str:
        """Return where the model comes from, as shown to users."""
        return self.name

    @property
    def tokenizer_digest(self) -> str:
        """Return the identity of the tokenizer."""
        return self.digest

    @property
    def context(self) -> int | None:
        """Return the length in tokens of the longest sequence that the model reads, or None for no limit."""
        return None

    @property
    def computed_dtype(self) -> str:
        """Return the dtype of the loaded weights."""
        return self.dtype

    @property
    def facts(self) -> Mapping[str, Any]:
        """Return the step, tokens, objective and run that the trainer recorded."""
        return {}

    def describe(self) -> Description:
        """Return the description that results keep of the model."""
        return {
            "name": self.name,
            "path": self.source,
            "weights": self.digest,
            "tokenizer": self.tokenizer_digest,
            "dtype": self.dtype,
            "facts": dict(self.facts),
        }
