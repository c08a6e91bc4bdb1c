"""A judge's replies to all pairs in both orders, by a model on this machine, in chunks that are shared."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import UserError
from eval import store
from eval.generation.tokens import context_of
from eval.judging import prompts, templates
from eval.judging.engines import Transformers, Vllm
from eval.judging.judged import IDENTICAL, NO_ROOM
from eval.judging.judges import Judge
from eval.judging.pairs import Pair, Pairs
from eval.judging.rows import Row

if TYPE_CHECKING:
    from eval.model import EvaluatedModel

CHUNK = 32  # pairs; what a killed process loses at most
VERSION = 1  # of everything that decides what a reply is

Say = Callable[[str], None]


def shown(judge: Judge, pair: Pair, swapped: bool, characters: int | None = None) -> str:
    """The prompt of a pair; swapped: B's answer first; characters: as many of either answer at most."""
    first, second = (pair.b, pair.a) if swapped else (pair.a, pair.b)
    question = pair.question
    return judge.prompt(question.instruction, question.input, first[:characters], second[:characters])


class Judging:
    """Asks a judge about pairs; `computed` counts the pairs that this process asked about."""

    def __init__(
        self, judge: Judge, pairs: Pairs, engine: Transformers | Vllm, out: Path, tokens: int | None = None
    ) -> None:
        self.judge, self.pairs, self.engine, self.out = judge, pairs, engine, out
        self.model: EvaluatedModel = engine.model
        self.tokens = judge.tokens if tokens is None else tokens
        self.context = context_of(self.model)
        self.computed = 0
        if self.tokens < 1:
            raise UserError(f"--tokens {self.tokens} must be at least 1")
        if self.context is not None and self.tokens >= self.context:
            raise UserError(
                f"{self.model.given} has a context of {self.context} tokens, and replies may take "
                f"{self.tokens}; set --tokens lower"
            )

    @cached_property
    def chat(self) -> bool:
        """Return whether prompts go through the judge's own chat template."""
        return self.judge.chat and templates.chat_template(self.model) is not None

    def run(self) -> list[Row]:
        """Return the rows that `judged.of_replies` takes: replies of all pairs, made or found."""
        from tqdm import tqdm

        pairs = self.pairs.rows
        if all(pair.a == pair.b for pair in pairs):  # a model beside itself: no weights are loaded
            return [{"row": i, "unasked": IDENTICAL, "cut": None, "replies": []} for i in range(len(pairs))]
        entry = store.Entry(self.out / store.STORE, self.identity)
        label = f"{self.judge.name}: {self.pairs.b} against {self.pairs.a}"
        with tqdm(total=2 * len(pairs), desc=label, unit="reply", disable=None) as bar:
            judged_rows = store.complete(
                entry, len(pairs), CHUNK, lambda rows: self._ask(rows, bar), lambda n: bar.update(2 * n)
            )
        if not any(row["replies"] for row in judged_rows) and any(
            row["unasked"] == NO_ROOM for row in judged_rows
        ):
            raise UserError(
                f"no prompt fits into the {self.context} tokens of {self.model.given} beside a reply of "
                f"{self.tokens}; set --tokens lower, or take a judge with a longer context"
            )
        return judged_rows

    @property
    def identity(self) -> dict[str, Any]:
        """All that decides the replies."""
        return {
            "judging": VERSION,
            "judge": self.judge.name,
            **self.engine.identity,
            "pairs": self.pairs.digest,
            "tokens": self.tokens,
            "context": self.context,
            "chat": store.digest(templates.chat_template(self.model)) if self.chat else None,
        }

    def _ask(self, rows: range, bar: Any) -> list[Row]:
        from eval.generation.sampling import Request

        reply_rows: dict[int, Row] = {}
        requests = []
        for row in rows:
            unasked, cut, ids = self._prepared(self.pairs.rows[row])
            reply_rows[row] = {"row": row, "unasked": unasked, "cut": cut, "replies": []}
            requests += [(row, Request(prompt, [row, order])) for order, prompt in enumerate(ids)]
            bar.update(0 if ids else 2)
        replies = self.engine.reply([r for _, r in requests], self.tokens, bar.update) if requests else []
        for (row, _), reply in zip(requests, replies, strict=True):
            reply_rows[row]["replies"].append(reply._asdict())
        self.computed += len(rows)
        return list(reply_rows.values())

    def _prepared(self, pair: Pair) -> tuple[str | None, int | None, list[list[int]]]:
        """(why it is not asked, characters that both answers are cut to, token ids in both orders)."""
        if pair.a == pair.b:
            return IDENTICAL, None, []
        ids = self._both(pair, None)
        if self._fit(ids):
            return None, None, ids
        low, high = 0, max(len(pair.a), len(pair.b))
        if not self._fit(self._both(pair, low)):
            return NO_ROOM, None, []
        while high - low > 1:  # `low` fits, `high` does not
            middle = (low + high) // 2
            low, high = (middle, high) if self._fit(self._both(pair, middle)) else (low, middle)
        return None, low, self._both(pair, low)

    def _fit(self, ids: list[list[int]]) -> bool:
        return self.context is None or max(map(len, ids)) + self.tokens <= self.context

    def _both(self, pair: Pair, characters: int | None) -> list[list[int]]:
        return [self._ids(shown(self.judge, pair, swapped, characters)) for swapped in (False, True)]

    def _ids(self, prompt: str) -> list[int]:
        if self.chat:
            return templates.chat_ids(self.model, prompts.messages(prompt))
        return templates.plain_ids(self.model, prompt)
