"""Prompts for a judge elsewhere, as a file, and its replies read back. No key of any service is needed here.

    {"id": ID, "prompt": TEXT}                     --export FILE; replies: {"id": ID, "reply": TEXT}
    {"custom_id": ID, "method", "url", "body"}     --export FILE --format openai; replies: its batch output

ID is DIGEST-ROW-ORDER: replies to other pairs, or to another judge's prompts, are refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.files import write_text
from eval import store
from eval.judging import prompts
from eval.judging.engines import Beams
from eval.judging.judged import IDENTICAL
from eval.judging.judges import Judge
from eval.judging.judging import shown
from eval.judging.pairs import Pairs
from eval.judging.rows import Row, named, read_rows, repeated, whole_characters

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
            line = _request(judge, name, prompt, model, tokens)
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


def _request(judge: Judge, name: str, prompt: str, model: str | None, tokens: int | None) -> Row:
    body: Row = {"model": model or judge.remote or judge.model}
    kind = "chat/completions" if judge.chat else "completions"
    body |= {"messages": prompts.messages(prompt)} if judge.chat else {"prompt": prompt}
    body |= {"max_tokens": tokens or judge.tokens, "temperature": 0}
    return {"custom_id": name, "method": "POST", "url": f"/v1/{kind}", "body": body}


def read_replies(judge: Judge, pairs: Pairs, file: Path) -> list[Row]:
    """The replies to `write_prompts`, for `judged.of_replies`.

    UserError for a half-written file, and for replies that are missing, given twice, or to other prompts. A
    reply whose request failed is empty, hence unreadable, and says so: {"text": "", "failed": true}.
    """
    expected = {name: (row, swapped) for name, row, swapped in _asked(judge, pairs)}
    rows = (
        read_rows(file) if expected else []
    )  # nothing was asked where the answers of every pair are the same
    positions = [f"{file} row {i}" for i in range(1, len(rows) + 1)]
    ids = [_id(row, where) for row, where in zip(rows, positions, strict=True)]
    if twice := repeated(ids):
        raise UserError(f"{file}: replies that come more than once: {named(twice)}")
    if foreign := [row_id for row_id in ids if row_id not in expected]:
        raise UserError(
            f"{file}: {len(foreign)} replies are not to these prompts: {named(foreign)}; give the --judge, "
            "answers and options that the prompts were exported with"
        )
    replies = dict(zip(ids, map(_reply, rows, positions), strict=True))
    if absent := [name for name in expected if name not in replies]:
        raise UserError(f"{file}: {len(absent)} of {len(expected)} replies are missing: {named(absent)}")
    answered: list[Row] = [
        {"row": i, "unasked": IDENTICAL if pair.a == pair.b else None, "cut": None, "replies": []}
        for i, pair in enumerate(pairs.rows)
    ]
    for name, (row, _) in expected.items():  # in order: A's answer first, then B's
        answered[row]["replies"].append(replies[name])
    return answered


def _id(row: Row, where: str) -> str:
    name = row.get("custom_id", row.get("id"))
    if not isinstance(name, str):
        raise UserError(f"{where}: no id; {FORMS}")
    return name


def _reply(row: Row, where: str) -> Row:
    """The reply in a row of either form; its text is "" where the judge said nothing (null)."""
    if "reply" in row:
        if not isinstance(row["reply"], str | None):
            raise UserError(f"{where}: reply is {str(row['reply'])[:40]!r}, and no text")
        return {"text": whole_characters(row["reply"] or "")}
    if "response" not in row and "error" not in row:
        raise UserError(f"{where}: no reply; {FORMS}")
    choice = _choice(row)
    if choice is None:
        return {"text": "", "failed": True}
    message = choice.get("message")
    text = message.get("content") if isinstance(message, dict) else choice.get("text")
    return {
        "text": whole_characters(text) if isinstance(text, str) else "",
        "ended": choice.get("finish_reason") != "length",
    }


def _choice(row: Row) -> dict[str, Any] | None:
    """The first choice in a line of a batch's output; None where its request failed."""
    try:
        choice: Any = row["response"]["body"]["choices"][0]
    except (KeyError, IndexError, TypeError):
        return None
    return choice if isinstance(choice, dict) and not row.get("error") else None
