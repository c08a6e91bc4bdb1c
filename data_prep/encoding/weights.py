"""Loss weights of an answer: of its characters, and of its tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import NamedTuple


class Part(NamedTuple):
    """A stretch of an answer's content, in characters."""

    start: int
    stop: int
    weight: float


class AnswerWeights(NamedTuple):
    """The loss weights of an answer."""

    weight: float = 1.0  # of the answer
    parts: tuple[Part, ...] | None = None  # factors in its content, in order. Other content has no loss

    def by_character(self, length: int, start: int = 0, stop: int = 0, stripped: int = 0) -> list[float]:
        """Return the weight of each character of an answer, and of the token after it.

        With parts, the text before the content has no loss, and the text after it, such as the end of the
        turn, has the weight of the answer.

        Args:
            length: Characters of the answer.
            start: Where the content begins in the answer.
            stop: Where it ends there.
            stripped: Characters at the beginning of the content that the answer does not have.
        """
        weights = [self.weight] * (length + 1)
        if self.parts is not None:
            weights[:stop] = [0.0] * stop
            for part in self.parts:
                offsets = (max(offset - stripped, 0) for offset in (part.start, part.stop))
                begin, end = (min(start + offset, stop) for offset in offsets)
                weights[begin:end] = [self.weight * part.weight] * (end - begin)
        return weights


def weighted_runs(begin: int, weights: Iterable[float]) -> list[tuple[int, int, float]]:
    """Return start, stop and weight of each run of equal weights, without those of weight 0.

    begin: the number of the first token. weights: the weight of each token.
    """
    runs = []
    for weight, group in groupby(weights):
        stop = begin + sum(1 for _ in group)
        if weight:
            runs.append((begin, stop, weight))
        begin = stop
    return runs


def weighted_answer(
    begin: int, stop: int, starts: Sequence[int], weights: Sequence[float] | None
) -> list[tuple[int, int, float]]:
    """Return the supervised spans of an answer.

    Args:
        begin: Its first token.
        stop: The token after its last one. Tokens without a start, such as EOS, follow its text.
        starts: The first character of each token. A token has the weight of that character.
        weights: As `AnswerWeights.by_character` returns them. None: 1.
    """
    if weights is None or weights.count(weights[0]) == len(weights):
        weight = 1.0 if weights is None else weights[0]
        return [(begin, stop, weight)] if weight else []
    of_tokens = [weights[start] for start in starts]
    return weighted_runs(begin, of_tokens + [weights[-1]] * (stop - begin - len(of_tokens)))
