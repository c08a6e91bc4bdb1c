"""Payloads -> rows: texts, conversations or token ids, each valid or rejected with a reason.

A payload is one piece of a source: raw bytes, or rows of a table. Scanning and encoding parse it in the same
way. spec.py has the names of columns, conversations.py the forms of instructions.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from ..encoding.chat_templates import REASONING
from ..encoding.templates import Chat, Conversation
from .conversations import ALL_LOSS_KEYS, parse_instruction, parse_json, to_json
from .spec import (
    Payload,
    Rejected,
    Row,
    RowError,
    RowSpec,
    TokenIds,
    chat_column,
    clean_text,
    missing_column,
    wrong_type,
)

HEAD = 64  # first rows of a payload, whose columns are reported
_EMPTY = {"user": "empty_instruction", "assistant": "empty_response"}
_CONTROL = bytes([*range(0x09), *range(0x0E, 0x20), 0x7F])
_TITLE = rb"(?:\A|(?<=\n))[ \t]*\r?\n(?= ?= (?!=)[^\n]* = *\r?\n(?:%s))"
_HEADING = re.compile(_TITLE % rb"[ \t]*\r?\n")
# For a payload, which ends where a row ends: the blank line after its last title may be missing.
_HEADING_OR_LAST = re.compile(_TITLE % rb"[ \t]*\r?\n|\Z")
_NEWLINE = re.compile(rb"\n")
_BLANK_LINES = re.compile(rb"\n(?:[ \t\r]*\n)+")


class JudgedRow(NamedTuple):
    """A row, or why it is rejected, with the values by which rows are compared and counted."""

    row: Row | Rejected
    hash: int = 0  # identity by content, 64 bits: the same in every run and on every machine
    chars: int = 0
    group: int = 0  # hash of the value of data.validation_group
    left_out: tuple[str, ...] = ()  # fields of a chat that the template does not write completely


# --- cutting ----------------------------------------------------------------------------------------------


def raw_rows(payload: Payload, spec: RowSpec) -> list[Any]:
    """Cut a payload into rows without parsing them."""
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


def cut_positions(payload: bytes, spec: RowSpec) -> Iterator[int]:
    """Return the positions at which a text may be cut without cutting a row, in order."""
    if spec.format == "wikitext":
        return (match.start() for match in _HEADING.finditer(payload) if match.start())
    if spec.format == "paragraphs":
        # The end of blank lines: where they begin depends on how many of them the range of the file has.
        return (match.end() for match in _BLANK_LINES.finditer(payload))
    return (match.end() for match in _NEWLINE.finditer(payload))


def checksum(payload: Payload) -> int:
    """Return a number that changes if the source changed after the scan."""
    return zlib.crc32(payload if isinstance(payload, bytes) else repr(payload).encode("utf-8", "replace"))


# --- parsing ----------------------------------------------------------------------------------------------


def parse(payload: Payload, spec: RowSpec) -> Iterator[Row | Rejected]:
    """Yield the rows of a payload in order, without the blank stretches between them."""
    return (judged.row for judged in judge_rows(payload, spec))


def take(payload: Payload, spec: RowSpec, copies: Sequence[int]) -> list[Row]:
    """Return rows that `parse` accepted, each as often as `copies` says. They are not checked again."""
    rows: list[Row] = []
    for raw, times in zip(raw_rows(payload, spec), copies, strict=True):
        if times:
            rows += [_parse_row(raw, spec)] * times
    return rows


def _parse_row(raw: Any, spec: RowSpec) -> Row:
    """Return a raw row as cleaned text, conversation or token ids. Raises RowError."""
    if isinstance(raw, Rejected):  # a broken row of a table
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
            return clean_text(text, spec.clean)
        try:
            raw = STRICT_JSON.decode(text.removeprefix("\ufeff"))
        except (ValueError, RecursionError) as error:  # without `msg`: too long numbers, too deep nesting
            raise RowError("broken_json", getattr(error, "msg", str(error))) from None
    row = _unwrap(raw)
    if not isinstance(row, dict):
        raise RowError("not_an_object", f"a row must be an object, not {type(row).__name__}")
    if spec.kind == "instruct":
        return parse_instruction(row, spec)
    name = spec.find(row, "text")
    if name is None:
        raise missing_column(row, spec.names("text"), spec)
    value = row[name]
    if spec.format == "tokens":
        if not isinstance(value, list) or not all(type(token) is int and token >= 0 for token in value):
            raise wrong_type(name, value, "a list of token ids")
        return TokenIds(tuple(value))
    if not isinstance(value, str):
        raise wrong_type(name, value)
    return clean_text(value, spec.clean)


def _reject_repeated_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Return a JSON object. Raises ValueError for an object with a repeated key."""
    tree = dict(pairs)
    if len(tree) < len(pairs):
        repeated = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"the key {repeated!r} is repeated in an object")
    return tree


STRICT_JSON = json.JSONDecoder(object_pairs_hook=_reject_repeated_keys)


def _unwrap(raw: Any) -> Any:
    """Return a row, or the row inside a single column, as in the recycled Evol-Instruct set."""
    if isinstance(raw, dict) and len(raw) == 1 and isinstance(only := next(iter(raw.values())), dict):
        return only
    return raw


def _as_object(raw: Any) -> Any:
    """Return a raw row, which may be JSON text, as an object."""
    return _unwrap(json.loads(raw.decode("utf-8-sig")) if isinstance(raw, bytes) else raw)


# --- checking ---------------------------------------------------------------------------------------------


def judge_rows(payload: Payload, spec: RowSpec) -> Iterator[JudgedRow]:
    """Yield the rows of a payload in order, with the values by which rows are compared and counted."""
    for raw in raw_rows(payload, spec):
        try:
            judged = _judge(_parse_row(raw, spec), spec)
            if spec.group is not None:
                judged = judged._replace(group=_group_hash(raw, spec.group))
        except RowError as error:
            judged = JudgedRow(Rejected(*error.args))
        yield judged


def _judge(row: Row, spec: RowSpec) -> JudgedRow:
    """Return a row with its content hash and number of characters. Raises RowError for useless content."""
    if isinstance(row, Conversation | Chat):
        _check_speakers(row)
    elif not (row.ids if isinstance(row, TokenIds) else row.strip()):
        raise RowError("empty")
    text = plain_text(row)
    whole = _identity(row) if isinstance(row, Conversation | Chat) else text
    try:
        identity = whole.encode()
        valid = True
    except UnicodeEncodeError:  # half of a surrogate pair, from a JSON escape
        identity = whole.encode("utf-8", "surrogatepass")
        valid = False
    content = identity if whole is text else text.encode("utf-8", "surrogatepass")
    if not isinstance(row, TokenIds):
        if len(text) > spec.max_chars:
            raise RowError("too_long")
        if len(content.translate(None, _CONTROL)) < len(content):
            found = next(byte for byte in content if byte in _CONTROL)
            raise RowError("control_characters", f"U+{found:04X}. Remove the control characters")
        if not valid:
            raise RowError("bad_utf8")
        if len(content) > len(text) and text.count("\ufffd") * 100 > len(text):
            raise RowError("replacement_characters")
    if isinstance(row, str):
        if not any(c.isalnum() for c in text):
            raise RowError("no_letters")
        if len(text) >= 200 and len(set(text[:200])) <= 3 and len(set(text)) <= 3:
            raise RowError("repetitive")
    return JudgedRow(row, _hash_bytes(identity), len(text))


def _check_speakers(row: Conversation | Chat) -> None:
    """Raise RowError for an instruction row with an empty message, or without any loss."""
    if isinstance(row, Conversation):
        messages = [("user", exchange.prompt + exchange.input) for exchange in row.exchanges]
        messages += [("assistant", exchange.response) for exchange in row.exchanges]
    else:
        messages = [
            (message["role"], "calls" if message.get("tool_calls") else message.get("content") or "")
            for message in json.loads(row.messages)
        ]
    if row.unsupervised and len(row.unsupervised) == sum(role == "assistant" for role, _ in messages):
        raise RowError("no_loss", "every answer is marked as carrying no loss")
    for role, content in messages:
        if role in _EMPTY and not content.strip():
            raise RowError(_EMPTY[role])


def _identity(row: Conversation | Chat) -> str:
    """Return the text by which an instruction row is compared."""
    if isinstance(row, Conversation):
        identity = to_json((row.exchanges, row.system))
    else:
        identity = f"{row.messages}\n{row.tools}" + (f"\n{row.variables}" if row.variables else "")
    return identity + (f"\n{row.unsupervised}" if row.unsupervised else "")


def _group_hash(raw: Any, column: str) -> int:
    """Return the hash of a row's validation group. Raises RowError for a row without it."""
    row = _as_object(raw)
    if not isinstance(row, dict) or row.get(column) is None:
        problem = "null in column" if isinstance(row, dict) and column in row else "no column"
        raise RowError("missing_column", f"{problem} {column}, which data.validation_group names")
    return content_hash(to_json(row[column]))


def content_hash(text: str) -> int:
    """Return a 64-bit hash by which texts are compared."""
    return _hash_bytes(text.encode("utf-8", "surrogatepass"))


def _hash_bytes(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


# --- describing -------------------------------------------------------------------------------------------


def plain_text(row: Row) -> str:
    """Return all text of a row, for counting and comparing. Token ids become numbers with spaces between."""
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
        thoughts = [thought for key in REASONING if isinstance(thought := message.get(key), str)]
        parts += [*thoughts, message.get("content"), calls]
    return "\n".join(part for part in parts if part)


def find_columns(payload: Payload, spec: RowSpec) -> tuple[set[str], set[str]]:
    """Return the read and the unread columns of a payload's first rows.

    Keys of messages that are not read are included as `messages[].key`.
    """
    read: set[str] = set()
    present: set[str] = set()
    for raw in raw_rows(payload, spec)[:HEAD] if spec.lines or not isinstance(payload, bytes) else []:
        with contextlib.suppress(RowError):
            _parse_row(raw, spec)
            row = _as_object(raw)
            present |= set(map(str, row))
            parts = ["text"] if spec.kind == "text" else ["system"]
            if spec.kind == "instruct" and (column := chat_column(row, spec)) is not None:
                read.add(column)
                if not spec.chat:
                    keys = {str(key) for message in parse_json(row[column]) for key in message}
                    keys -= {*spec.names("role"), *spec.names("content"), *ALL_LOSS_KEYS}
                    present |= {f"{column}[].{key}" for key in keys}
            elif spec.kind == "instruct":
                parts += ["history", "instruction", "input", "output"]
            parts += ["weight"] if spec.kind == "instruct" else []
            parts += ["tools", "template_variables"] if spec.chat else []
            read |= {name for part in parts if (name := spec.find(row, part)) is not None}
    return read, present - read
