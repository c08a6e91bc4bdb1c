"""A judge's replies to all pairs in both orders, from a model here or through files.

A model on this machine replies in chunks that processes share. For a judge elsewhere, the prompts are written
to a file and its replies are read back, so no API key is needed here.

    {"id": ID, "prompt": TEXT}              --write_prompts FILE; replies: {"id", "reply": TEXT, "model"}
    {"custom_id": ID, "method", "url", "body"} --write_prompts FILE --format openai; replies: its batch output

ID is DIGEST-ROW-ORDER. Replies to other pairs, or to another judge's prompts, are rejected.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from emo.common.errors import UserError, one_line
from emo.data_prep.encoding.tokenizer import chat_template, text_ids

from ..generation.decoding import Beams, Request, split_reasoning
from ..generation.engines import Reply, TextJob, Transformers
from ..results import store
from ..results.directory import Record
from ..results.rows import FileRow, read_json_rows
from .answers import chat_ids, require_unique, shorten
from .judges import Judge, messages
from .pairs import EXCHANGED, Judged, Pair, Pairs, judged_row

VERSION = 2  # of everything that affects a reply
# Reasons why a pair was not judged.
IDENTICAL = "identical"
NO_ROOM = "no_room"
FORMATS = ("jsonl", "openai")
REASONING_MODEL = re.compile(r"^(o\d|gpt-[5-9])")  # OpenAI's, which reject a temperature
# The suffixes that services add to a requested model name: the date of the version that replied.
SNAPSHOT = re.compile(r"-(\d{4}|\d{6}|\d{8}|\d{4}-\d{2}-\d{2})(-preview)?")


def judge_pairs(
    judge: Judge, by: str, pairs: Pairs, replies: Sequence[Record], facts: Mapping[str, object]
) -> Judged:
    """Return the verdicts on pairs from the replies to their prompts.

    Args:
        judge: The judge.
        by: The model that replied.
        pairs: The pairs.
        replies: For each pair {"replies": [{"text", ...}, ...], "unasked", "cut"}. The first reply is to the
            prompt with A's answer first. `unasked` is the reason if the pair was not judged. `cut` is the
            length in characters that both answers were cut to, if they were.
        facts: Stored with the judgement.
    """
    rows = []
    for pair, reply in zip(pairs.rows, replies, strict=True):
        sides = [judge.verdict(split_reasoning(r["text"])[1]) for r in reply["replies"]]
        sides[1:] = map(EXCHANGED.get, sides[1:])
        if reply["unasked"] == IDENTICAL:
            sides = ["tie"] * 2  # as in AlpacaEval's annotator
        rows.append(judged_row(pair, sides) | {key: reply[key] for key in ("replies", "unasked", "cut")})
    return Judged(judge.name, by, pairs.a, pairs.b, 2, rows, facts, pairs.questions)


class Judging(TextJob):
    """Replies of a judge to pairs, from the engine's model."""

    chunk = 32
    unit = "reply"
    per_row = 2

    def __init__(
        self, judge: Judge, pairs: Pairs, engine: Transformers, out: Path, tokens: int | None = None
    ) -> None:
        super().__init__(engine, judge.tokens if tokens is None else tokens, out)
        self.judge = judge
        self.pairs = pairs
        self.template = chat_template(self.model.path) if judge.chat else None
        if self.context is not None and self.tokens >= self.context:
            raise UserError(
                f"{self.model.source} has a context of {self.context} tokens, and replies may have "
                f"{self.tokens}. Lower --max_new_tokens.",
                code="context",
            )

    def run(self) -> list[Record]:
        """Return the replies to all pairs for `judge_pairs`, generated or read."""
        pairs = self.pairs.rows
        if all(pair.a == pair.b for pair in pairs):  # a model compared with itself needs no weights
            return [self.record(self.prepare(row)[0], []) for row in range(len(pairs))]
        chat = None if self.template is None else store.digest_json(self.template)
        identity = {"judging": VERSION, "judge": self.judge.name, "pairs": self.pairs.digest, "chat": chat}
        identity |= {"tokens": self.tokens, "context": self.context} | self.engine.identity
        label = f"{self.judge.name}: {self.pairs.b} against {self.pairs.a}"
        rows = self.complete(identity, len(pairs), label)
        if {row["unasked"] for row in rows} in ({NO_ROOM}, {NO_ROOM, IDENTICAL}):
            raise UserError(
                f"no prompt fits into the {self.context} tokens of {self.model.source} with a reply of "
                f"{self.tokens}. Lower --max_new_tokens, or use a judge with a longer context.",
                code="context",
            )
        return rows

    def prepare(self, row: int) -> tuple[Record, list[Request]]:
        """Return why a pair is not judged, or the length both answers are cut to, and its prompts."""
        pair = self.pairs.rows[row]
        if pair.a == pair.b:
            return {"unasked": IDENTICAL, "cut": None}, []
        cut = None
        ids = self._fitting_ids(pair, None)
        if ids is None:
            cut = 0
            too_long = max(len(pair.a), len(pair.b))
            ids = self._fitting_ids(pair, 0)
            if ids is None:
                return {"unasked": NO_ROOM, "cut": None}, []
            while too_long - cut > 1:
                middle = (cut + too_long) // 2
                if longer := self._fitting_ids(pair, middle):
                    cut = middle
                    ids = longer
                else:
                    too_long = middle
        return {"unasked": None, "cut": cut}, [Request(part, [row, order]) for order, part in enumerate(ids)]

    def record(self, facts: Record, replies: list[Reply]) -> Record:
        """Return a pair's replies."""
        return facts | {"replies": [reply for _, reply in replies]}

    def _fitting_ids(self, pair: Pair, characters: int | None) -> list[list[int]] | None:
        """Return the ids of the prompts in both orders, or None if they and the replies do not fit."""
        prompts = [self.judge.pair_prompt(pair, swapped, characters) for swapped in (False, True)]
        if self.template is None:
            ids = [text_ids(self.model.tokenizer, prompt) for prompt in prompts]
        else:
            ids = [chat_ids(self.model, messages(prompt)) for prompt in prompts]
        fits = self.context is None or max(map(len, ids)) + self.tokens <= self.context
        return ids if fits else None


def write_prompts(
    judge: Judge, pairs: Pairs, file: Path, form: str, model: str | None, tokens: int | None
) -> int:
    """Write the prompts of all pairs in both orders, and return their number.

    Args:
        judge: The judge.
        pairs: The pairs.
        file: The file to write.
        form: One of FORMATS.
        model: The model that `openai` requests (default: the judge's).
        tokens: The longest reply that `openai` requests (default: the judge's).
    """
    if form not in FORMATS:
        raise UserError(
            f"--format {form!r} is not known. Choose from {', '.join(FORMATS)}.", code="option-value"
        )
    if form == "openai" and isinstance(judge.decoding, Beams):
        raise UserError(
            f"--format openai: batch files do not support the beam search of {judge.name}",
            code="options-clash",
        )
    if file.is_dir():
        raise UserError(f"--write_prompts {file} is a directory. Set it to a file.", code="write-target")
    kind = "chat/completions" if judge.chat else "completions"
    lines = []
    for pair, ids in zip(pairs.rows, _prompt_ids(judge, pairs), strict=True):
        for swapped, name in enumerate(ids):
            prompt = judge.pair_prompt(pair, bool(swapped))
            line: Record = {"id": name, "prompt": prompt}
            if form == "openai":
                body: Record = {"model": model or judge.remote or judge.model}
                body |= {"messages": messages(prompt)} if judge.chat else {"prompt": prompt}
                body |= {"max_completion_tokens" if judge.chat else "max_tokens": tokens or judge.tokens}
                if not REASONING_MODEL.match(str(body["model"])):  # which accept only their default
                    body["temperature"] = 0
                line = {"custom_id": name, "method": "POST", "url": f"/v1/{kind}", "body": body}
            lines.append(json.dumps(line, ensure_ascii=False) + "\n")
    store.replace(file, "".join(lines))
    return len(lines)


def _prompt_ids(judge: Judge, pairs: Pairs) -> list[list[str]]:
    """Return the ids of each pair's prompts, A's answer first, then B's. Identical answers have none."""
    digest = store.digest_json([judge.name, pairs.digest])[:12]
    orders = [("ab", "ba") if pair.a != pair.b else () for pair in pairs.rows]
    return [[f"{digest}-{row}-{order}" for order in part] for row, part in enumerate(orders)]


def read_replies(
    judge: Judge, pairs: Pairs, files: Sequence[Path], asked: str | None
) -> tuple[list[Record], str]:
    """Return the replies to the prompts of `write_prompts` for `judge_pairs`, and the model that wrote them.

    Raises UserError for an incomplete file, for missing, duplicate or foreign replies, and if the replies
    name no model, several models, or another one than `asked`. A reply whose request failed is unreadable:
    {"text": "", "failed": why}.

    Args:
        judge: The judge.
        pairs: The pairs.
        files: The replies.
        asked: The model that must have written them (--ask_for), or None.
    """
    ids_by_pair = _prompt_ids(judge, pairs)
    expected = dict.fromkeys(name for names in ids_by_pair for name in names)
    # There are no prompts if all pairs have identical answers.
    rows = [row for file in files for row in read_json_rows(file)] if expected else []
    file = " and ".join(map(str, files))
    ids = [str(row.get("custom_id", row.get("id"))) for row in rows]
    require_unique(ids, f"{file}: replies occur")
    foreign = [name for name in ids if name not in expected]
    absent = sorted(expected.keys() - ids)
    if foreign or absent:
        raise UserError(
            f"{file}: {len(absent)} of {len(expected)} replies are missing, and {len(foreign)} belong to "
            f"other prompts: {shorten([*foreign, *absent])}. Use the --judge, answers and options of "
            "--write_prompts, and name all files of the batch, also the one with errors.",
            code="foreign" if foreign else "missing",
        )
    replies = dict(zip(ids, map(_parse_reply, rows), strict=True))
    if replies and all("failed" in reply for reply in replies.values()):
        problem = f"{file}: all {len(replies)} requests failed ({describe_failures(replies.values())})"
        raise UserError(f"{problem}. Send the prompts again.", code="all-failed")
    records: list[Record] = [
        {"unasked": None if ids else IDENTICAL, "cut": None, "replies": [replies[name] for name in ids]}
        for ids in ids_by_pair
    ]
    if not replies:
        return records, asked or judge.default_model
    return records, _find_author(file, [r for r in replies.values() if "failed" not in r], asked)


def describe_failures(replies: Iterable[Record]) -> str:
    """Return the most frequent reason why requests failed."""
    reasons = Counter(reply["failed"] for reply in replies if "failed" in reply)
    return reasons.most_common(1)[0][0]


def _find_author(file: str, replies: Sequence[Record], asked: str | None) -> str:
    """Return the model that wrote all replies: the one that they name, or else `asked`."""
    counts = Counter(reply.get("model") or "" for reply in replies)
    models = sorted(counts.keys() - {""})
    if len(counts) > 1:
        text = ", ".join(f"{name or 'no model named'} ({count})" for name, count in counts.most_common())
        raise UserError(
            f"{file} has replies of several models: {text}. Use one file per judge.", code="mixed-judges"
        )
    if not models and asked is None:
        raise UserError(
            f'{file} does not name the model that wrote the replies. Add "model" to its rows, or set '
            "--ask_for MODEL.",
            code="unnamed-judge",
        )
    if models and asked is not None:
        short, other = (name.rpartition("/")[2].lower() for name in (asked, models[0]))
        if not other.startswith(short) or (other != short and not SNAPSHOT.fullmatch(other[len(short) :])):
            raise UserError(
                f"{file} has replies of {models[0]}, but --ask_for is {asked}. Set --ask_for {models[0]}.",
                code="other-judge",
            )
    return models[0] if models else str(asked)


def _parse_reply(row: FileRow) -> Record:
    """Return {"text", "model"} of a row in either format. A null text becomes ""."""
    if isinstance(row.get("reply", 0), str | None):
        return {"text": row["reply"] or ""} | _model_of(row, row.source)
    if "response" not in row and "error" not in row:
        raise UserError(
            f'{row.source} must be {{"id", "reply": TEXT}}, or a line of a batch output', code="no-reply"
        )
    response = row.get("response")
    body: Any = response.get("body") if isinstance(response, dict) else None
    if error := row.get("error") or (isinstance(body, dict) and body.get("error")):
        message = error.get("message", error.get("code")) if isinstance(error, dict) else error
        return {"text": "", "failed": one_line(str(message), 200)}
    try:
        choice = body["choices"][0]
        text = choice["message"]["content"] if "message" in choice else choice["text"]
    except (KeyError, IndexError, TypeError):
        return {"text": "", "failed": "a response without an answer"}
    reply = {"text": text if isinstance(text, str) else "", "ended": choice.get("finish_reason") != "length"}
    return reply | _model_of(body, row.source)


def _model_of(fields: Mapping[str, object], source: str) -> Record:
    """Return {"model": NAME}, or {} if no model is named."""
    name = fields.get("model")
    if not isinstance(name, str | None):
        raise UserError(f'{source}: "model" must be the name of a model, not {name!r}', code="judge-name")
    return {"model": name} if name else {}
