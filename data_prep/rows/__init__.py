"""Raw bytes or table rows -> texts, conversations or token ids, each valid or rejected with a reason.

Works on one piece of a source at a time, the same way when rows are scanned and when they are encoded.
"""

from __future__ import annotations

import hashlib
import json
import re
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

from data_prep.rows.columns import columns_read, first, missing, text_columns, wrong
from data_prep.rows.messages import clean, conversation, keys_not_read
from data_prep.rows.spec import (
    CODE,
    CONTENT,
    REASONS,
    SELECTION,
    STRUCTURE,
    UNREADABLE,
    Payload,
    Rejected,
    Row,
    RowSpec,
    TokenIds,
)
from data_prep.templates import Chat, Conversation

__all__ = [
    "CODE",
    "CONTENT",
    "REASONS",
    "SELECTION",
    "STRUCTURE",
    "UNREADABLE",
    "Payload",
    "Rejected",
    "Row",
    "RowSpec",
    "TokenIds",
    "checksum",
    "columns",
    "content_hash",
    "cuts",
    "parse",
    "plain_text",
    "raw_rows",
    "take",
]

HEAD = 64  # rows whose columns are told

_CONTROL = re.compile("[\x00-\x08\x0e-\x1f\x7f]")
_TITLE = rb"(?:\A|(?<=\n))[ \t]*\r?\n(?= ?= (?!=)[^\n]* = *\r?\n(?:%s))"
_HEADING = re.compile(_TITLE % rb"[ \t]*\r?\n")
# Of a payload, which ends where a row does: the blank line after its last title may be the next heading's.
_HEADING_OR_LAST = re.compile(_TITLE % rb"[ \t]*\r?\n|\Z")
_NEWLINE = re.compile(rb"\n")
_BLANK_LINES = re.compile(rb"\n(?:[ \t\r]*\n)+")


def parse(payload: Payload, spec: RowSpec) -> Iterator[Row | Rejected]:
    """The rows of a payload, in order. Blank stretches between rows are not rows."""
    for raw in raw_rows(payload, spec):
        row = _row(raw, spec)
        yield row if isinstance(row, Rejected) else _judge(row, spec)


def take(payload: Payload, spec: RowSpec, copies: Sequence[int]) -> list[Row]:
    """Rows that `parse` found good, each as often as `copies` says; they are not judged again."""
    rows: list[Row] = []
    for raw, times in zip(raw_rows(payload, spec), copies, strict=True):
        if times:
            row = _row(raw, spec)
            assert not isinstance(row, Rejected), "only good rows are assigned to a shard"
            rows += [row] * times
    return rows


def checksum(payload: Payload) -> int:
    """To notice that a source changed after it was scanned."""
    return zlib.crc32(payload if isinstance(payload, bytes) else repr(payload).encode("utf-8", "replace"))


def raw_rows(payload: Payload, spec: RowSpec) -> list[Any]:
    """Cut a payload into rows without looking inside them."""
    if not isinstance(payload, bytes):
        return payload
    if spec.format == "document":
        cuts = [payload]
    elif spec.format == "wikitext":
        cuts = _HEADING_OR_LAST.split(payload)
    elif spec.format == "paragraphs":
        cuts = [cut.strip(b"\r\n") for cut in _BLANK_LINES.split(payload)]
    else:
        cuts = payload.split(b"\n")
    return [cut for cut in cuts if cut.strip()]


def cuts(payload: bytes, spec: RowSpec) -> Iterator[int]:
    """Places at which a text may be cut in two without cutting a row, in order."""
    if spec.format == "wikitext":
        return (match.start() for match in _HEADING.finditer(payload) if match.start())
    if spec.format == "paragraphs":
        # Their ends: where the lines begin depends on how many of them a stretch of the file has.
        return (match.end() for match in _BLANK_LINES.finditer(payload))
    return (match.end() for match in _NEWLINE.finditer(payload))


def content_hash(row: Row) -> int:
    """Identity of a row by content, 64 bits: the same in every run and on every machine."""
    unsupervised = row.unsupervised if isinstance(row, Conversation | Chat) else ()
    if isinstance(row, Conversation):
        text = json.dumps((row.exchanges, row.system), ensure_ascii=False)
    elif isinstance(row, Chat):
        text = f"{row.messages}\n{row.tools}"
    else:
        text = plain_text(row)
    if unsupervised:
        text += f"\n{unsupervised}"
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def plain_text(row: Row) -> str:
    """All text of a row, for counting and comparing; token ids are numbers with spaces between them."""
    if isinstance(row, str):
        return row
    if isinstance(row, TokenIds):
        return " ".join(map(str, row.ids))
    if isinstance(row, Chat):
        return "\n".join(filter(None, map(_said, json.loads(row.messages))))
    parts = [row.system] if row.system else []
    for exchange in row.exchanges:
        parts += [part for part in (exchange.prompt, exchange.input, exchange.response) if part]
    return "\n".join(parts)


def flags(payload: Payload, spec: RowSpec) -> set[str]:
    """Return the columns of a payload's first rows that hold true or false: they may mark answers as bad."""
    return {str(name) for row in _first_rows(payload, spec) for name in row if isinstance(row[name], bool)}


def _first_rows(payload: Payload, spec: RowSpec) -> Iterator[dict[str, Any]]:
    """Yield the usable ones of a payload's first rows; none of plain text."""
    for raw in raw_rows(payload, spec)[:HEAD] if spec.lines or not isinstance(payload, bytes) else []:
        if not isinstance(_row(raw, spec), Rejected):
            yield _object(json.loads(raw.decode("utf-8-sig")) if isinstance(raw, bytes) else raw)


def columns(payload: Payload, spec: RowSpec) -> tuple[set[str], set[str]]:
    """Return the columns that the first rows of a payload give text from, and those that are not read.

    Keys of messages that are not read are among the latter, as `messages[].key`.
    """
    read: set[str] = set()
    there: set[str] = set()
    unread: set[str] = set()  # keys of messages
    for row in _first_rows(payload, spec):
        there |= set(map(str, row))
        read |= columns_read(row, spec)
        unread |= keys_not_read(row, spec)
    return read, (there - read) | unread


def _said(message: dict[str, Any]) -> str:
    """The text of a message, calls of tools included."""
    calls = json.dumps(message["tool_calls"], ensure_ascii=False) if message.get("tool_calls") else ""
    return "\n".join(filter(None, (message.get("reasoning_content"), message.get("content"), calls)))


def _row(raw: Any, spec: RowSpec) -> Row | Rejected:
    """A raw row as text or conversation, cleaned."""
    if isinstance(raw, Rejected):  # a table's own row that is broken
        return raw
    if isinstance(raw, bytes):
        if len(raw) > 4 * spec.max_chars:
            return Rejected("too_long", f"{len(raw):,} bytes")
        try:
            raw = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            return Rejected("bad_utf8", f"byte {error.object[error.start]:#04x}")
        if not spec.lines:
            return clean(raw.replace("\r\n", "\n").removesuffix("\r"), spec.clean)
        try:
            raw = json.loads(raw.removeprefix("\ufeff"))
        except RecursionError:
            return Rejected("broken_json", "nested too deep")
        except ValueError as error:  # without `msg`: an integer of thousands of digits
            return Rejected("broken_json", getattr(error, "msg", "a number of thousands of digits"))
    raw = _object(raw)
    if not isinstance(raw, dict):
        return Rejected("not_an_object", f"a row must be an object, not {type(raw).__name__}")
    return _text(raw, spec) if spec.kind == "text" else conversation(raw, spec)


def _object(raw: Any) -> Any:
    """A row; one in a single column, as in the recycled Evol-Instruct set, is taken out of it."""
    if isinstance(raw, dict) and len(raw) == 1 and isinstance(only := next(iter(raw.values())), dict):
        return only
    return raw


def _text(raw: dict[str, Any], spec: RowSpec) -> str | TokenIds | Rejected:
    """The text column of a row, or its tokens."""
    names = text_columns(spec)
    name = first(raw, names)
    if name is None:
        return missing(raw, names, spec)
    value = raw[name]
    if spec.format == "tokens":
        if not isinstance(value, list) or not all(type(one) is int and one >= 0 for one in value):
            return wrong(name, value, "a list of token ids")
        return TokenIds(tuple(value))
    return clean(value, spec.clean) if isinstance(value, str) else wrong(name, value)


def _judge(row: Row, spec: RowSpec) -> Row | Rejected:
    """The row, or the reason why its content is useless."""
    if isinstance(row, TokenIds):
        return row if row.ids else Rejected("empty")
    if isinstance(row, Conversation | Chat) and row.unsupervised and len(row.unsupervised) == row.answers:
        return Rejected("no_loss", "every answer is marked as carrying no loss")
    if isinstance(row, Conversation):
        if any(not (e.prompt.strip() or e.input.strip()) for e in row.exchanges):
            return Rejected("empty_instruction")
        if any(not e.response.strip() for e in row.exchanges):
            return Rejected("empty_response")
    elif isinstance(row, Chat):
        if fault := _silent(row):
            return Rejected(fault)
    elif not row.strip():
        return Rejected("empty")
    fault = _fault(plain_text(row), spec)
    return Rejected(fault) if fault else row


def _silent(row: Chat) -> str:
    """Why a chat has a message that says nothing, or ''."""
    for message in json.loads(row.messages):
        if not (message.get("content") or "").strip() and not message.get("tool_calls"):
            if message["role"] == "user":
                return "empty_instruction"
            if message["role"] == "assistant":
                return "empty_response"
    return ""


def _fault(text: str, spec: RowSpec) -> str:
    """Why a text is not prose of any kind, or ''."""
    if len(text) > spec.max_chars:
        return "too_long"
    if _CONTROL.search(text):
        return "control_characters"
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:  # half of a surrogate pair, from a JSON escape
        return "bad_utf8"
    if text.count("\ufffd") * 100 > len(text):
        return "replacement_characters"
    if spec.kind == "text":
        if not any(c.isalnum() for c in text):
            return "no_letters"
        if len(text) >= 200 and len(set(text[:200])) <= 3 and len(set(text)) <= 3:
            return "repetitive"
    return ""
