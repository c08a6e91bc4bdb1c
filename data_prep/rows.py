"""Raw bytes or table rows -> texts or conversations, each valid or rejected with a reason.

Works on one piece of a source at a time, the same way in the planning pass and in the encoding pass.
"""

from __future__ import annotations

import hashlib
import json
import re
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from data_prep.templates import Conversation, Exchange

# Reasons. Those of STRUCTURE mean that a file is not what it was taken for: errors when data.strict.
STRUCTURE = ("broken_json", "not_an_object", "missing_column", "wrong_type")
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
)
CHOICE = ("duplicate", "near_duplicate", "limit", "weight")  # found by comparing rows, see plan.py
REASONS = ("", *STRUCTURE, *CONTENT, *CHOICE)

TEXT_COLUMNS = ("text", "content", "sentence", "document", "story")
PROMPT_COLUMNS, RESPONSE_COLUMNS = ("instruction", "prompt"), ("output", "response", "completion")
ROLES = {"system": "system", "user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant"}

_CONTROL = re.compile("[\x00-\x08\x0e-\x1f\x7f]")
_HEADING = re.compile(rb"(?:\A|(?<=\n))[ \t]*\n(?= = (?!=)[^\n]* = *\r?\n[ \t]*\r?\n)")
_NEWLINE = re.compile(rb"\n")
_BLANK_LINES = re.compile(rb"\n(?:[ \t\r]*\n)+")


class RowSpec(NamedTuple):
    """How the rows of a source read."""

    kind: str  # text or instruct
    format: str  # one of Source.format; auto is settled for text files
    lines: bool  # payloads are JSON lines, not text
    column: str | None
    clean: str
    max_chars: int


class Rejected(NamedTuple):
    """A row that is not used."""

    reason: str  # one of REASONS
    detail: str = ""


Row = str | Conversation
Payload = bytes | list[Any]  # a stretch of a text file, or rows of a table


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
            assert not isinstance(row, Rejected), "the plan takes good rows only"
            rows += [row] * times
    return rows


def checksum(payload: Payload) -> int:
    """To notice that a source changed between the planning pass and the encoding pass."""
    return zlib.crc32(payload if isinstance(payload, bytes) else repr(payload).encode("utf-8", "replace"))


def raw_rows(payload: Payload, spec: RowSpec) -> list[Any]:
    """Cut a payload into rows without looking inside them."""
    if not isinstance(payload, bytes):
        return payload
    if spec.format == "document":
        cuts = [payload]
    elif spec.format == "wikitext":
        cuts = _HEADING.split(payload)
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
        return (match.start() for match in _BLANK_LINES.finditer(payload) if match.start())
    return (match.end() for match in _NEWLINE.finditer(payload))


def content_hash(row: Row) -> int:
    """Identity of a row by content, 64 bits: the same in every run and on every machine."""
    text = row if isinstance(row, str) else json.dumps(row, ensure_ascii=False)
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def plain_text(row: Row) -> str:
    """All text of a row, for counting and comparing."""
    if isinstance(row, str):
        return row
    parts = [row.system] if row.system else []
    for exchange in row.exchanges:
        parts += [part for part in (exchange.prompt, exchange.input, exchange.response) if part]
    return "\n".join(parts)


def _row(raw: Any, spec: RowSpec) -> Row | Rejected:
    """A raw row as text or conversation, cleaned."""
    if isinstance(raw, bytes):
        if len(raw) > 4 * spec.max_chars:
            return Rejected("too_long", f"{len(raw):,} bytes")
        try:
            raw = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            return Rejected("bad_utf8", f"byte {error.object[error.start]:#04x}")
        raw = raw.removeprefix("\ufeff")
        if not spec.lines:
            return _clean(raw.removesuffix("\r"), spec.clean)
        try:
            raw = json.loads(raw)
        except (json.JSONDecodeError, RecursionError) as error:
            return Rejected("broken_json", getattr(error, "msg", "nested too deep"))
    if not isinstance(raw, dict):
        return Rejected("not_an_object", f"a row must be an object, not {type(raw).__name__}")
    if len(raw) == 1 and isinstance(only := next(iter(raw.values())), dict):
        raw = only  # a row in one column, as in the recycled Evol-Instruct set
    return _text(raw, spec) if spec.kind == "text" else _conversation(raw, spec)


def _text(raw: dict[str, Any], spec: RowSpec) -> str | Rejected:
    """The text column of a row."""
    names = (spec.column,) if spec.column else TEXT_COLUMNS
    name = next((n for n in names if n in raw), None)
    if name is None:
        return Rejected("missing_column", _lacks(raw, " or ".join(names)))
    value = raw[name]
    return _clean(value, spec.clean) if isinstance(value, str) else _wrong(name, value)


def _conversation(raw: dict[str, Any], spec: RowSpec) -> Conversation | Rejected:
    """An Alpaca row or a row of messages."""
    talk = next((n for n in ("messages", "conversations") if n in raw), None)
    if spec.format == "messages" and talk is None:
        return Rejected("missing_column", _lacks(raw, "messages"))
    if talk is not None and spec.format != "alpaca":
        return _messages(raw[talk], talk, spec)
    found = [next((n for n in c if n in raw), None) for c in (PROMPT_COLUMNS, RESPONSE_COLUMNS)]
    if found[0] is None or found[1] is None:
        missing = PROMPT_COLUMNS[0] if found[0] is None else RESPONSE_COLUMNS[0]
        return Rejected("missing_column", _lacks(raw, missing))
    values = [raw[found[0]], raw[found[1]], raw.get("input") or ""]
    for name, value in zip((*found, "input"), values, strict=True):
        if not isinstance(value, str):
            return _wrong(str(name), value)
    return Conversation((Exchange(*(_clean(value, spec.clean) for value in values)),))


def _messages(talk: Any, column: str, spec: RowSpec) -> Conversation | Rejected:
    """Turns of a chat: an optional system message, then user and assistant by turns."""
    if not isinstance(talk, list):
        return _wrong(column, talk)
    said: list[tuple[str, str]] = []
    for message in talk:
        if not isinstance(message, dict):
            return _wrong(column, message)
        role = message.get("role", message.get("from"))
        content = message.get("content", message.get("value"))
        if role is None or content is None:
            return Rejected("missing_column", _lacks(message, "role and content"))
        if not isinstance(content, str):
            return _wrong(f"{column}.content", content)
        said.append((ROLES.get(str(role), str(role)), _clean(content, spec.clean)))
    system = said.pop(0)[1] if said and said[0][0] == "system" else ""
    roles = [role for role, _ in said]
    if not said or roles != ["user", "assistant"] * (len(said) // 2):
        return Rejected("bad_roles", " ".join(roles) or "no messages")
    pairs = zip(said[::2], said[1::2], strict=True)
    return Conversation(tuple(Exchange(u[1], a[1]) for u, a in pairs), system)


def _judge(row: Row, spec: RowSpec) -> Row | Rejected:
    """The row, or the reason why its content is useless."""
    if isinstance(row, Conversation):
        if any(not (e.prompt.strip() or e.input.strip()) for e in row.exchanges):
            return Rejected("empty_instruction")
        if any(not e.response.strip() for e in row.exchanges):
            return Rejected("empty_response")
    elif not row.strip():
        return Rejected("empty")
    fault = _fault(plain_text(row), spec)
    return Rejected(fault) if fault else row


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


def _clean(text: str, quirk: str) -> str:
    """Undo what a data set's distribution did to its text."""
    if quirk == "writingprompts":  # line breaks are a token
        return re.sub(r" ?<newline> ?", "\n", text)
    if quirk == "ag_news":  # entities lost their ampersand, line breaks became backslashes
        text = re.sub(r"&? ?#(\d{2,4});", lambda m: chr(int(m[1])), text)
        return text.replace("\\", " ")
    return text


def _lacks(raw: dict[str, Any], wanted: str) -> str:
    return f"no column {wanted}; there are: {', '.join(map(str, list(raw)[:12])) or 'none'}"


def _wrong(name: str, value: Any) -> Rejected:
    return Rejected("wrong_type", f"column {name} must be text, not {type(value).__name__}")
