"""What a row may be, how the rows of a source read, and why one is not used."""

from __future__ import annotations

from typing import Any, NamedTuple

from emo.data_prep.templates import Chat, Conversation

# Why rows are not used. STRUCTURE: a file is not what it was taken for, an error when data.strict.
STRUCTURE = (
    "broken_json",
    "not_an_object",
    "missing_column",
    "wrong_type",
    "refused_by_chat_template",
    "response_not_found",
)
CONTENT = (
    "bad_utf8",
    "control_characters",
    "replacement_characters",
    "empty",
    "no_letters",
    "repetitive",
    "too_long",
    "empty_instruction",
    "empty_response",
    "bad_roles",
    "no_loss",
)
UNREADABLE = ("bad_utf8", "control_characters", "replacement_characters")  # of a file that is not UTF-8
SELECTION = ("duplicate", "near_duplicate", "limit", "weight")  # found by comparing rows, see selection.py
REASONS = ("", *STRUCTURE, *CONTENT, *SELECTION)
CODE = {reason: code for code, reason in enumerate(REASONS)}


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
        """The column that the recipe names for a part of a row."""
        return dict(self.columns).get(part)


class Rejected(NamedTuple):
    """A row that is not used."""

    reason: str  # one of REASONS
    detail: str = ""


class TokenIds(NamedTuple):
    """A text that is tokens already: they are used as they are."""

    ids: tuple[int, ...]


Row = str | Conversation | Chat | TokenIds
Payload = bytes | list[Any]  # a stretch of a text file, or rows of a table
