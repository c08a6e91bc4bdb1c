"""What a row may be, which of its columns is which, and why a row is not used."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from emo.data_prep.templates import Chat, Conversation

# Why rows are not used. STRUCTURE: a file is not what it was taken for, an error when data.strict.
STRUCTURE = (
    *("broken_json", "not_an_object", "missing_column", "wrong_type"),
    *("refused_by_chat_template", "response_not_found"),
)
UNREADABLE = ("bad_utf8", "control_characters", "replacement_characters")  # of a file that is not UTF-8
CONTENT = (
    *(*UNREADABLE, "empty", "no_letters", "repetitive", "too_long"),
    *("empty_instruction", "empty_response", "bad_roles", "no_loss"),
)
SELECTION = ("duplicate", "near_duplicate", "limit", "weight")  # found by comparing rows, see selection.py
REASONS = ("", *STRUCTURE, *CONTENT, *SELECTION)
CODE = {reason: code for code, reason in enumerate(REASONS)}

HISTORY = "history"  # earlier exchanges: pairs of prompt and response
NAMES = {  # a part of a row, as `columns` of a recipe calls it: the columns that are taken for it
    "text": ("text", "content", "sentence", "document", "story"),
    "instruction": ("instruction", "prompt", "question", "query"),
    "input": ("input", "context"),
    "output": ("output", "response", "completion", "answer"),
    "system": ("system", "system_prompt"),
    "history": (HISTORY,),
    "messages": ("messages", "conversations"),
    "tools": ("tools",),  # what the assistant may call, as JSON schemas: for a tokenizer's chat_template
    "role": ("role", "from"),  # of a message
    "content": ("content", "value"),
}
TOKEN_COLUMNS = ("ids", "input_ids")
TEXT_COLUMNS, CHAT_COLUMNS = NAMES["text"], NAMES["messages"]
# Words in the names of columns that are prompts or responses, for guesses.
_ASKING = re.compile("question|prompt|instruct|query|ask|user|human|problem|request|source|title", re.I)
_ANSWERING = re.compile(
    "chosen|prefer|(?<![a-z])w(in|ins|inner|inning|on)(?![a-z])|answer|respon|output|complet|reply|assistant|target|"
    "solution|gpt|bot|label",
    re.I,
)
_REJECTED = re.compile(
    "reject|wrong|incorrect|negative|worse|dispref|(?<![a-z])(bad|los(e|es|er|ing|t))(?![a-z])", re.I
)
_NUMBERED = re.compile("(.*?)[ _-]?([0-9]|[a-z])", re.I)  # output_1, response_b
_SPEAKING = re.compile("role|from|speaker|author|sender|name|who", re.I)


class RowSpec(NamedTuple):
    """The way to read the rows of a source."""

    kind: str  # text or instruct
    format: str  # one of Source.format; auto is settled for text files
    lines: bool  # payloads are JSON lines, not text
    column: str | None
    clean: str
    max_chars: int
    columns: tuple[tuple[str, str], ...] = ()  # see Source.columns
    chat: bool = False  # instructions become the messages of a Chat, for a tokenizer's chat_template

    def named(self, part: str) -> str | None:
        """Return the column that the recipe names for a part of a row."""
        return dict(self.columns).get(part)


class Rejected(NamedTuple):
    """A row that is not used."""

    reason: str  # one of REASONS
    detail: str = ""


class RowError(Exception):
    """A row cannot be used; its arguments are those of Rejected."""


class TokenIds(NamedTuple):
    """A text that is tokens already: they are used as they are."""

    ids: tuple[int, ...]


Row = str | Conversation | Chat | TokenIds
Payload = bytes | list[Any]  # a stretch of a text file, or rows of a table


def names_of(part: str, spec: RowSpec) -> tuple[str, ...]:
    """Return the columns that may be a part of a row: the one that the recipe names, or the known ones."""
    if spec.column is not None and part in ("text", "instruction"):
        return (spec.column,)
    if part == "text" and spec.format == "tokens" and not spec.columns:
        return TOKEN_COLUMNS
    mapped = spec.named(part)
    return NAMES[part] if mapped is None else (mapped,)


def first(raw: dict[str, Any], names: Sequence[str]) -> str | None:
    """Return the first of some columns that a row has, whatever it holds.

    An empty one is not passed over: the next known column may be a file name or another annotator's answer.
    """
    return next((name for name in names if name in raw), None)


def chat_column(raw: dict[str, Any], spec: RowSpec) -> str | None:
    """Return the column of a chat's messages, if the row is one."""
    if spec.format == "alpaca" or spec.named("instruction") or spec.named("output"):
        return None
    if spec.column is not None:
        return spec.column if spec.format == "messages" or isinstance(raw.get(spec.column), list) else None
    return first(raw, names_of("messages", spec))


def columns_read(raw: dict[str, Any], spec: RowSpec) -> set[str]:
    """Return the columns that a good row gives text from."""
    talk, parts = None, ["text"]
    if spec.kind == "instruct":
        talk = chat_column(raw, spec)
        parts = ["system", *(["tools"] if spec.chat else [])]
        parts += [] if talk else ["history", "instruction", "input", "output"]
    names = {talk, *(first(raw, names_of(part, spec)) for part in parts)}
    return {name for name in names if name is not None}


def guess(raw: dict[str, Any], kind: str) -> dict[str, str]:
    """Return a proposal for `columns`, by the names and values of one row; {}: none can be made.

    Parts whose columns are known anyway are left out, and so are columns of answers that were rejected, and
    of several answers of which another column may say which is better.
    """
    raw = {name: value for name, value in raw.items() if not _REJECTED.search(str(name))}
    texts = [str(name) for name, value in raw.items() if isinstance(value, str)]
    stems = Counter(match[1] for match in map(_NUMBERED.fullmatch, texts) if match)
    several = {name for name in texts if (match := _NUMBERED.fullmatch(name)) and stems[match[1]] > 1}
    if any(_ANSWERING.search(name) for name in several):
        return {}
    talks = (name for name, talk in raw.items() if isinstance(talk, list) and talk and _speaks(talk[0]))
    parts: dict[str, str | None]
    if kind == "text":
        longest = max(texts, key=lambda name: len(raw[name]), default=None)
        parts = {"text": first(raw, TEXT_COLUMNS) or longest}
    elif (column := next(talks, None)) is not None:
        message = raw[column][0]
        keys = [name for name, value in message.items() if isinstance(value, str)]
        role = first(message, NAMES["role"]) or next(filter(_SPEAKING.search, keys), None)
        content = first(message, NAMES["content"]) or next((key for key in keys if key != role), None)
        parts = {"messages": str(column), "role": role, "content": content}
    else:
        prompt = first(raw, NAMES["instruction"]) or next(filter(_ASKING.search, texts), None)
        others = [name for name in texts if name not in (prompt, *NAMES["input"], *NAMES["system"])]
        response = first(raw, NAMES["output"]) or next(filter(_ANSWERING.search, others), None)
        prompt = prompt or next((name for name in others if name != response), None)
        response = response or next((name for name in reversed(others) if name != prompt), None)
        parts = {"instruction": prompt, "output": response}
    if None in parts.values():
        return {}
    return {part: name for part, name in parts.items() if name is not None and name not in NAMES[part]}


def _speaks(message: Any) -> bool:
    return isinstance(message, dict) and len(message) > 1


def missing(raw: dict[str, Any], names: Sequence[str], spec: RowSpec | None = None) -> RowError:
    """Return the error of a row that has none of some columns, and with a spec what to write instead."""
    choices = ", ".join(names[:-1]) + " or " + names[-1] if len(names) > 1 else names[0]
    present = ", ".join(map(str, list(raw)[:12])) or "none"
    hint = ""
    if spec is not None:
        instruction = first(raw, NAMES["instruction"]) and first(raw, NAMES["output"])
        if spec.kind == "text" and (instruction or first(raw, CHAT_COLUMNS)):
            hint = "; for instructions set data.kind=instruct"
        elif spec.kind == "instruct" and not instruction and first(raw, TEXT_COLUMNS):
            hint = "; for plain text set data.kind=text"
        elif spec.column is None and not spec.columns and guess(raw, spec.kind):
            hint = "; name yours in the source's columns, as sniff proposes"
    return RowError("missing_column", f"no column {choices}; there are: {present}{hint}"[:330])


def wrong(name: str, value: Any, expected: str = "text") -> RowError:
    """Return the error of a row whose column holds something else."""
    kind = "null" if value is None else type(value).__name__
    return RowError("wrong_type", f"column {name} must be {expected}, not {kind}")
