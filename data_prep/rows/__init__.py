"""Raw bytes or table rows -> texts, conversations or token ids, each valid or rejected with a reason.

Works on one piece of a source at a time, the same way when rows are scanned and when they are encoded.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from emo.data_prep.rows.columns import (
    CODE,
    REASONS,
    STRUCTURE,
    UNREADABLE,
    Payload,
    Rejected,
    Row,
    RowError,
    RowSpec,
    TokenIds,
    columns_read,
    first,
    missing,
    names_of,
    wrong,
)
from emo.data_prep.rows.messages import clean, conversation, keys_not_read
from emo.data_prep.templates import Chat, Conversation

__all__ = ["CODE", "REASONS", "STRUCTURE", "UNREADABLE", "Payload", "Rejected", "Row", "RowSpec", "TokenIds"]

HEAD = 64  # rows whose columns are reported

_EMPTY = {"user": "empty_instruction", "assistant": "empty_response"}
_CONTROL = bytes([*range(0x09), *range(0x0E, 0x20), 0x7F])
_TITLE = rb"(?:\A|(?<=\n))[ \t]*\r?\n(?= ?= (?!=)[^\n]* = *\r?\n(?:%s))"
_HEADING = re.compile(_TITLE % rb"[ \t]*\r?\n")
# Of a payload, which ends where a row does: the blank line after its last title may be the next heading's.
_HEADING_OR_LAST = re.compile(_TITLE % rb"[ \t]*\r?\n|\Z")
_NEWLINE = re.compile(rb"\n")
_BLANK_LINES = re.compile(rb"\n(?:[ \t\r]*\n)+")


class Judged(NamedTuple):
    """A row, or why it cannot be used, and what rows are compared and counted by."""

    row: Row | Rejected
    hash: int = 0  # identity by content, 64 bits: the same in every run and on every machine
    chars: int = 0


def parse(payload: Payload, spec: RowSpec) -> Iterator[Row | Rejected]:
    """Yield the rows of a payload, in order. Blank stretches between rows are not rows."""
    for judged in judge(payload, spec):
        yield judged.row


def judge(payload: Payload, spec: RowSpec) -> Iterator[Judged]:
    """Yield the rows of a payload, in order, with what rows are compared and counted by."""
    for raw in raw_rows(payload, spec):
        try:
            judged = _judged(_row(raw, spec), spec)
        except RowError as error:
            judged = Judged(Rejected(*error.args))
        yield judged


def take(payload: Payload, spec: RowSpec, copies: Sequence[int]) -> list[Row]:
    """Return rows that `parse` found good, each as often as `copies` says; they are not judged again."""
    rows: list[Row] = []
    for raw, times in zip(raw_rows(payload, spec), copies, strict=True):
        if times:
            rows += [_row(raw, spec)] * times
    return rows


def checksum(payload: Payload) -> int:
    """Return a number that tells whether a source changed after it was scanned."""
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
    return [cut for cut in cuts if cut and not cut.isspace()]


def cuts(payload: bytes, spec: RowSpec) -> Iterator[int]:
    """Return the places at which a text may be cut in two without cutting a row, in order."""
    if spec.format == "wikitext":
        return (match.start() for match in _HEADING.finditer(payload) if match.start())
    if spec.format == "paragraphs":
        # Their ends: where the lines begin depends on how many of them a stretch of the file has.
        return (match.end() for match in _BLANK_LINES.finditer(payload))
    return (match.end() for match in _NEWLINE.finditer(payload))


def plain_text(row: Row) -> str:
    """Return all text of a row, for counting and comparing; token ids as numbers with spaces between."""
    if isinstance(row, str):
        return row
    if isinstance(row, TokenIds):
        return " ".join(map(str, row.ids))
    if isinstance(row, Conversation):
        exchanges = [(exchange.prompt, exchange.input, exchange.response) for exchange in row.exchanges]
        return "\n".join(part for part in (row.system, *sum(exchanges, ())) if part)
    parts: list[str | None] = []
    for message in json.loads(row.messages):
        calls = json.dumps(message["tool_calls"], ensure_ascii=False) if message.get("tool_calls") else ""
        parts += [message.get("reasoning_content"), message.get("content"), calls]
    return "\n".join(part for part in parts if part)


def columns(payload: Payload, spec: RowSpec) -> tuple[set[str], set[str], set[str]]:
    """Return the columns that a payload's first rows give text from, those not read, and flags among these.

    Keys of messages that are not read are among them, as `messages[].key`. Flags are true or false, and may
    mark answers as bad.
    """
    read: set[str] = set()
    present: set[str] = set()
    flags: set[str] = set()
    for raw in raw_rows(payload, spec)[:HEAD] if spec.lines or not isinstance(payload, bytes) else []:
        with contextlib.suppress(RowError):
            _row(raw, spec)
            row = _object(json.loads(raw.decode("utf-8-sig")) if isinstance(raw, bytes) else raw)
            present |= {*map(str, row), *keys_not_read(row, spec)}
            read |= columns_read(row, spec)
            flags |= {str(name) for name, value in row.items() if isinstance(value, bool)}
    unread = present - read
    return read, unread, flags & unread


def _row(raw: Any, spec: RowSpec) -> Row:
    """Return a raw row as text or conversation, cleaned. Raises RowError."""
    if isinstance(raw, Rejected):  # a table's row that is broken
        raise RowError(*raw)
    if isinstance(raw, bytes):
        if len(raw) > 4 * spec.max_chars:
            raise RowError("too_long", f"{len(raw):,} bytes")
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise RowError("bad_utf8", f"byte {error.object[error.start]:#04x}") from None
        if not spec.lines:
            if "\r" in text:
                text = text.replace("\r\n", "\n").removesuffix("\r")
            return clean(text, spec.clean)
        try:
            raw = json.loads(text.removeprefix("\ufeff"))
        except RecursionError:
            raise RowError("broken_json", "nested too deep") from None
        except ValueError as error:  # without `msg`: an integer of thousands of digits
            reason = getattr(error, "msg", "a number of thousands of digits")
            raise RowError("broken_json", reason) from None
    raw = _object(raw)
    if not isinstance(raw, dict):
        raise RowError("not_an_object", f"a row must be an object, not {type(raw).__name__}")
    if spec.kind == "instruct":
        return conversation(raw, spec)
    names = names_of("text", spec)
    name = first(raw, names)
    if name is None:
        raise missing(raw, names, spec)
    value = raw[name]
    if spec.format == "tokens":
        if not isinstance(value, list) or not all(type(token) is int and token >= 0 for token in value):
            raise wrong(name, value, "a list of token ids")
        return TokenIds(tuple(value))
    if not isinstance(value, str):
        raise wrong(name, value)
    return clean(value, spec.clean)


def _object(raw: Any) -> Any:
    """Return a row; one in a single column, as in the recycled Evol-Instruct set, is taken out of it."""
    if isinstance(raw, dict) and len(raw) == 1 and isinstance(only := next(iter(raw.values())), dict):
        return only
    return raw


def _judged(row: Row, spec: RowSpec) -> Judged:
    """Return a row with its content hash and characters. Raises RowError for content that is useless."""
    if isinstance(row, Conversation | Chat):
        if row.unsupervised and len(row.unsupervised) == row.answers:
            raise RowError("no_loss", "every answer is marked as carrying no loss")
        if isinstance(row, Conversation):
            silent = ["user"] if any(not (e.prompt.strip() or e.input.strip()) for e in row.exchanges) else []
            silent += ["assistant"] if any(not e.response.strip() for e in row.exchanges) else []
        else:
            silent = [
                message["role"]
                for message in json.loads(row.messages)
                if not (message.get("content") or "").strip() and not message.get("tool_calls")
            ]
        if (role := next((role for role in silent if role in _EMPTY), None)) is not None:
            raise RowError(_EMPTY[role])
    elif not (row.ids if isinstance(row, TokenIds) else row.strip()):
        raise RowError("empty")
    text = plain_text(row)
    try:
        content, whole = text.encode(), True
    except UnicodeEncodeError:  # half of a surrogate pair, from a JSON escape
        content, whole = text.encode("utf-8", "surrogatepass"), False
    if not isinstance(row, TokenIds):
        if len(text) > spec.max_chars:
            raise RowError("too_long")
        if len(content.translate(None, _CONTROL)) < len(content):
            raise RowError("control_characters")
        if not whole:
            raise RowError("bad_utf8")
        if len(content) > len(text) and text.count("\ufffd") * 100 > len(text):
            raise RowError("replacement_characters")
    if isinstance(row, str):
        if not any(c.isalnum() for c in text):
            raise RowError("no_letters")
        if len(text) >= 200 and len(set(text[:200])) <= 3 and len(set(text)) <= 3:
            raise RowError("repetitive")
    if isinstance(row, Conversation | Chat):
        if isinstance(row, Conversation):
            identity = json.dumps((row.exchanges, row.system), ensure_ascii=False)
        else:
            identity = f"{row.messages}\n{row.tools}"
        identity += f"\n{row.unsupervised}" if row.unsupervised else ""
        content = identity.encode("utf-8", "surrogatepass")
    digest = hashlib.blake2b(content, digest_size=8).digest()
    return Judged(row, int.from_bytes(digest, "little"), len(text))
