"""How the rows of a source are parsed, and why a row is rejected."""

from __future__ import annotations

import html
import re
from collections.abc import Container, Mapping, Sequence
from typing import Any, NamedTuple

from ..encoding.templates import Chat, Conversation

LEFT_OUT = "left_out_by_template"
# Reasons to reject a row. STRUCTURE: the file does not have the expected form, which is an error if
# data.strict.
STRUCTURE = (
    *("broken_json", "not_an_object", "missing_column", "wrong_type"),
    *("refused_by_chat_template", "response_not_found", LEFT_OUT),
)
UNREADABLE = ("bad_utf8", "control_characters", "replacement_characters")  # the file may not be text in UTF-8
CONTENT = (
    *(*UNREADABLE, "empty", "no_letters", "repetitive", "too_long"),
    *("empty_instruction", "empty_response", "bad_roles", "no_loss"),
)
SELECTION = ("duplicate", "near_duplicate", "limit", "weight")  # result of comparing rows, see select.py
REASONS = ("", *STRUCTURE, *CONTENT, *SELECTION)
CODE = {reason: code for code, reason in enumerate(REASONS)}

NAMES = {  # each part of a row, as `columns` of a recipe names it, and the columns recognised for it
    "text": ("text", "content", "sentence", "document", "story"),
    "instruction": ("instruction", "prompt", "question", "query"),
    "input": ("input", "context"),
    "output": ("output", "response", "completion", "answer"),
    "system": ("system", "system_prompt"),
    "history": ("history",),  # earlier exchanges: pairs of prompt and response
    "messages": ("messages", "conversations"),
    "tools": ("tools",),  # JSON schemas of tools that the assistant may call, for a chat template
    "template_variables": ("chat_template_kwargs",),  # variables of the chat template, as in TRL
    "weight": ("weight",),  # of the loss of a row
    "role": ("role", "from"),  # of a message
    "content": ("content", "value"),
}
TOKEN_COLUMNS = ("ids", "input_ids")
TEXT_COLUMNS = NAMES["text"]
CHAT_COLUMNS = NAMES["messages"]


class RowSpec(NamedTuple):
    """How the rows of a source are parsed."""

    kind: str  # text or instruct
    format: str  # one of Source.format; auto is resolved for text files
    lines: bool  # payloads are JSON lines, not text
    column: str | None
    clean: str
    max_chars: int
    columns: tuple[tuple[str, str], ...] = ()  # see Source.columns
    chat: bool = False  # instructions become the messages of a Chat, for a tokenizer's chat_template
    group: str | None = None  # see DataConfig.validation_group
    all_columns: bool = False  # tables are read with the columns that parsing does not need

    def names(self, part: str) -> tuple[str, ...]:
        """Return the columns that may hold a part of a row: the one in the recipe, or the usual ones."""
        if self.column is not None and part in ("text", "instruction"):
            return (self.column,)
        if part == "text" and self.format == "tokens" and not self.columns:
            return TOKEN_COLUMNS
        if not self.columns:
            return NAMES[part]
        return next(((name,) for key, name in self.columns if key == part), NAMES[part])

    def find(self, row: Mapping[str, object], part: str) -> str | None:
        """Return the column of a row that holds a part, see `first_present`."""
        return first_present(row, self.names(part))

    def wanted(self, columns: Sequence[str]) -> list[str]:
        """Return the columns of a table that parsing reads, or all if none of them has a known name."""
        parts = ("text",) if self.kind == "text" else NAMES
        read = {first_present(columns, self.names(part)) for part in parts} | {self.group}
        found = [] if self.all_columns else [name for name in columns if name in read]
        return found or list(columns)


class Rejected(NamedTuple):
    """A row that is not used."""

    reason: str  # one of REASONS
    detail: str = ""


class RowError(Exception):
    """A row cannot be used. The arguments are those of Rejected."""


class TokenIds(NamedTuple):
    """A text that is already tokenized. The ids are used unchanged."""

    ids: tuple[int, ...]


Row = str | Conversation | Chat | TokenIds
Payload = bytes | list[Any]  # a range of a text file, or rows of a table


def first_present(row: Container[str], names: Sequence[str]) -> str | None:
    """Return the first of some columns that a row or a table has, even if it is empty.

    The next known column may hold a file name or the answer of another annotator.
    """
    return next((name for name in names if name in row), None)


def chat_column(row: Mapping[str, object], spec: RowSpec) -> str | None:
    """Return the column with the messages of a chat, or None if the row is not a chat."""
    if spec.format == "alpaca" or {"instruction", "output"} & dict(spec.columns).keys():
        return None
    if spec.column is not None:
        return spec.column if spec.format == "messages" or isinstance(row.get(spec.column), list) else None
    return spec.find(row, "messages")


def missing_column(row: Mapping[str, object], names: Sequence[str], spec: RowSpec) -> RowError:
    """Return the error for a row without any of the columns `names`, with advice for the recipe."""
    present = ", ".join(map(str, list(row)[:12])) or "none"
    hint = "name yours in the source's columns, as emo sniff proposes"
    if spec.kind == "text" and (first_present(row, NAMES["output"]) or first_present(row, CHAT_COLUMNS)):
        hint = "for instructions set data.kind=instruct"
    if spec.kind == "instruct" and names == spec.names("instruction") and isinstance(row.get("text"), str):
        hint = "plain text cannot be mixed into data.kind=instruct. Write it as chats, or train on it with "
        hint += "data.kind=text"
    if {"message_id", "parent_id"} <= row.keys() or "message_tree_id" in row:
        hint = "these are trees of OpenAssistant. Write each path from a prompt to a reply as messages first"
    return RowError("missing_column", f"no column {' or '.join(names)}. Present: {present}; {hint}"[:330])


def wrong_type(name: str, value: object, expected: str = "text") -> RowError:
    """Return the error for a column whose value has the wrong type."""
    kind = "null" if value is None else type(value).__name__
    return RowError("wrong_type", f"column {name} must be {expected}, not {kind}")


def clean_text(text: str, quirk: str) -> str:
    """Undo the escapes that a known data set has in its text."""
    if quirk == "writingprompts":  # line breaks are a token
        return re.sub(r" ?<newline> ?", "\n", text)
    if quirk == "ag_news":  # entities lost their ampersand, line breaks became backslashes
        text = re.sub(r"&? ?#(\d{2,4});", r"&#\1;", text)
        text = re.sub(r"(?<![&\w])(lt|gt|quot|amp);", r"&\1;", text)
        return re.sub(r"&#?\w+;", lambda match: html.unescape(match[0]), text.replace("\\", " "))
    return text
