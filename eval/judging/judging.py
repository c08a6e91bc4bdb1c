"""A judge's replies to all pairs in both orders: by a model here, or elsewhere, by files.

A model on this machine replies in chunks that processes share. For a judge elsewhere, prompts are written to
a file, and its replies read back; no key of any service is needed here.

    {"id": ID, "prompt": TEXT}                     --export FILE; replies: {"id": ID, "reply": TEXT}
    {"custom_id": ID, "method", "url", "body"}     --export FILE --format openai; replies: its batch output

ID is DIGEST-ROW-ORDER: replies to other pairs, or to another judge's prompts, are refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from emo.common.errors import UserError
from emo.common.files import write_text
from emo.eval import store
from emo.eval.generation.decoding import context_of
from emo.eval.judging.answers import (
    Row,
    chat_ids,
    chat_template,
    named,
    plain_ids,
    read_rows,
    repeated,
    whole_characters,
)  # fmt: skip
from emo.eval.judging.engines import Beams, Transformers, Vllm
from emo.eval.judging.judges import Judge, messages
from emo.eval.judging.pairs import IDENTICAL, NO_ROOM, Pair, Pairs

if TYPE_CHECKING:
    from emo.eval.model import EvaluatedModel

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
            raise UserError(f"--max_new_tokens {self.tokens} must be at least 1")
        if self.context is not None and self.tokens >= self.context:
            raise UserError(
                f"{self.model.given} has a context of {self.context} tokens, and replies may take "
                f"{self.tokens}; set --max_new_tokens lower"
            )

    @cached_property
    def chat(self) -> bool:
        """Return whether prompts go through the judge's own chat template."""
        return self.judge.chat and chat_template(self.model) is not None

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
        unasked = {row["unasked"] for row in judged_rows}
        if None not in unasked and NO_ROOM in unasked:
            raise UserError(
                f"no prompt fits into the {self.context} tokens of {self.model.given} beside a reply of "
                f"{self.tokens}; set --max_new_tokens lower, or take a judge with a longer context"
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
            "chat": store.digest(chat_template(self.model)) if self.chat else None,
        }

    def _ask(self, rows: range, bar: Any) -> list[Row]:
        from emo.eval.generation.sampling import Request

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
        prompts = [shown(self.judge, pair, swapped, characters) for swapped in (False, True)]
        if self.chat:
            return [chat_ids(self.model, messages(prompt)) for prompt in prompts]
        return [plain_ids(self.model, prompt) for prompt in prompts]


FORMATS = ("jsonl", "openai")
ORDERS = ("ab", "ba")
FORMS = 'a reply is {"id", "reply"}, or a line of a batch\'s output'


def write_prompts(
    judge: Judge, pairs: Pairs, file: Path, form: str, model: str | None, tokens: int | None
) -> int:
    """Write the prompts of all pairs in both orders; how many. model, tokens: what `openai` asks for."""
    if form not in FORMATS:
        raise UserError(f"--format {form!r} is not known; known: {', '.join(FORMATS)}")
    if form == "openai" and isinstance(judge.decoding, Beams):
        raise UserError(f"--format openai: {judge.name} decodes with beams, which batch files cannot ask for")
    if file.is_dir():
        raise UserError(f"--export {file} is a directory; give a file")
    lines = []
    for name, row, swapped in _asked(judge, pairs):
        prompt = shown(judge, pairs.rows[row], swapped)
        line: Row = {"id": name, "prompt": prompt}
        if form == "openai":
            body: Row = {"model": model or judge.remote or judge.model}
            body |= {"messages": messages(prompt)} if judge.chat else {"prompt": prompt}
            body |= {"max_tokens": tokens or judge.tokens, "temperature": 0}
            kind = "chat/completions" if judge.chat else "completions"
            line = {"custom_id": name, "method": "POST", "url": f"/v1/{kind}", "body": body}
        lines.append(json.dumps(line, ensure_ascii=False))
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, "".join(f"{line}\n" for line in lines))
    return len(lines)


def _asked(judge: Judge, pairs: Pairs) -> Iterator[tuple[str, int, bool]]:
    """(id, row, swapped) of every prompt."""
    digest = store.digest([judge.name, pairs.digest])[:12]
    for row, pair in enumerate(pairs.rows):
        for swapped in (False, True) if pair.a != pair.b else ():
            yield f"{digest}-{row}-{ORDERS[swapped]}", row, swapped


def read_replies(judge: Judge, pairs: Pairs, file: Path) -> list[Row]:
    """The replies to `write_prompts`, for `judged.of_replies`.

    UserError for a half-written file, and for replies that are missing, given twice, or to other prompts. A
    reply whose request failed is empty, hence unreadable, and says so: {"text": "", "failed": true}.
    """
    expected = {name: (row, swapped) for name, row, swapped in _asked(judge, pairs)}
    rows = read_rows(file) if expected else []  # nothing was asked where all pairs have the same answer twice
    ids: list[str] = []
    for i, row in enumerate(rows, start=1):
        name = row.get("custom_id", row.get("id"))
        if not isinstance(name, str):
            raise UserError(f"{file} row {i}: no id; {FORMS}", code="no-id")
        ids.append(name)
    if twice := repeated(ids):
        raise UserError(f"{file}: replies that come more than once: {named(twice)}", code="twice")
    if foreign := [row_id for row_id in ids if row_id not in expected]:
        raise UserError(
            f"{file}: {len(foreign)} replies are not to these prompts: {named(foreign)}; give the --judge, "
            "answers and options that the prompts were exported with",
            code="foreign",
        )
    replies = {
        name: _reply(row, f"{file} row {i}") for i, (name, row) in enumerate(zip(ids, rows, strict=True), 1)
    }
    if absent := [name for name in expected if name not in replies]:
        raise UserError(
            f"{file}: {len(absent)} of {len(expected)} replies are missing: {named(absent)}", code="missing"
        )
    answered: list[Row] = [
        {"row": i, "unasked": IDENTICAL if pair.a == pair.b else None, "cut": None, "replies": []}
        for i, pair in enumerate(pairs.rows)
    ]
    for name, (number, _) in expected.items():  # in order: A's answer first, then B's
        answered[number]["replies"].append(replies[name])
    return answered


def _reply(row: Row, where: str) -> Row:
    """The reply in a row of either form; its text is "" where the judge said nothing (null)."""
    if "reply" in row:
        if not isinstance(row["reply"], str | None):
            raise UserError(f"{where}: reply is {str(row['reply'])[:40]!r}, and no text", code="no-text")
        return {"text": whole_characters(row["reply"] or "")}
    if "response" not in row and "error" not in row:
        raise UserError(f"{where}: no reply; {FORMS}", code="no-reply")
    try:
        choice: Any = row["response"]["body"]["choices"][0]
    except (KeyError, IndexError, TypeError):
        choice = None
    if not isinstance(choice, dict) or row.get("error"):
        return {"text": "", "failed": True}
    message = choice.get("message")
    text = message.get("content") if isinstance(message, dict) else choice.get("text")
    return {
        "text": whole_characters(text) if isinstance(text, str) else "",
        "ended": choice.get("finish_reason") != "length",
    }
