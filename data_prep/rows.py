"""Raw bytes or table rows -> texts, conversations or token ids, each valid or rejected with a reason.

Works on one piece of a source at a time, the same way when rows are scanned and when they are encoded.
"""

from __future__ import annotations

import hashlib
import json
import re
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from data_prep.templates import Conversation, Exchange

# Why rows are not used. STRUCTURE: a file is not what it was taken for, an error when data.strict.
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
UNREADABLE = ("bad_utf8", "control_characters", "replacement_characters")  # of a file that is not UTF-8
SELECTION = ("duplicate", "near_duplicate", "limit", "weight")  # found by comparing rows, see selection.py
REASONS = ("", *STRUCTURE, *CONTENT, *SELECTION)

TOKEN_COLUMNS = ("ids", "input_ids")
TEXT_COLUMNS = ("text", "content", "sentence", "document", "story")
PROMPT_COLUMNS = ("instruction", "prompt", "question", "query")
INPUT_COLUMNS = ("input", "context")
RESPONSE_COLUMNS = ("output", "response", "completion", "answer")
SYSTEM_COLUMNS = ("system", "system_prompt")
HISTORY = "history"  # earlier exchanges: pairs of prompt and response
CHAT_COLUMNS = ("messages", "conversations")
MESSAGE = ("role", "from", "content", "value")  # keys of a message
ROLES = {
    "system": ("system", "developer"),
    "user": ("user", "human"),
    "assistant": ("assistant", "gpt", "chatgpt", "bot", "model"),
}
ROLE_OF = {name: role for role, names in ROLES.items() for name in names}

HEAD = 64  # rows whose columns are told

_CONTROL = re.compile("[\x00-\x08\x0e-\x1f\x7f]")
_HEADING = re.compile(rb"(?:\A|(?<=\n))[ \t]*\r?\n(?= ?= (?!=)[^\n]* = *\r?\n[ \t]*\r?\n)")
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


class TokenIds(NamedTuple):
    """A text that is tokens already: they are used as they are."""

    ids: tuple[int, ...]


Row = str | Conversation | TokenIds
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
    if isinstance(row, Conversation):
        text = json.dumps((row.exchanges, row.system), ensure_ascii=False)
    else:
        text = plain_text(row)
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def plain_text(row: Row) -> str:
    """All text of a row, for counting and comparing; token ids are numbers with spaces between them."""
    if isinstance(row, str):
        return row
    if isinstance(row, TokenIds):
        return " ".join(map(str, row.ids))
    parts = [row.system] if row.system else []
    for exchange in row.exchanges:
        parts += [part for part in (exchange.prompt, exchange.input, exchange.response) if part]
    return "\n".join(parts)


def columns(payload: Payload, spec: RowSpec) -> tuple[set[str], set[str]]:
    """The columns that the first rows of a payload give text from, and those that are not read."""
    read: set[str] = set()
    there: set[str] = set()
    for raw in raw_rows(payload, spec)[:HEAD] if spec.lines or not isinstance(payload, bytes) else []:
        if isinstance(_row(raw, spec), Rejected):
            continue
        row = _object(json.loads(raw.decode("utf-8-sig")) if isinstance(raw, bytes) else raw)
        there |= set(map(str, row))
        read |= _read_columns(row, spec)
    return read, there - read


def _read_columns(raw: dict[str, Any], spec: RowSpec) -> set[str]:
    if spec.kind == "text":
        found = [_first(raw, _text_columns(spec))]
    elif talk := _chat_column(raw, spec):
        found = [_first(raw, SYSTEM_COLUMNS), talk]
    else:
        prompts = (spec.column,) if spec.column else PROMPT_COLUMNS
        parts = (SYSTEM_COLUMNS, (HISTORY,), prompts, INPUT_COLUMNS, RESPONSE_COLUMNS)
        found = [_first(raw, names) for names in parts]
    return {name for name in found if name is not None}


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
            return _clean(raw.replace("\r\n", "\n").removesuffix("\r"), spec.clean)
        try:
            raw = json.loads(raw)
        except (ValueError, RecursionError) as error:  # ValueError: also an integer of thousands of digits
            return Rejected("broken_json", getattr(error, "msg", "nested too deep"))
    raw = _object(raw)
    if not isinstance(raw, dict):
        return Rejected("not_an_object", f"a row must be an object, not {type(raw).__name__}")
    return _text(raw, spec) if spec.kind == "text" else _conversation(raw, spec)


def _object(raw: Any) -> Any:
    """A row; one in a single column, as in the recycled Evol-Instruct set, is taken out of it."""
    if isinstance(raw, dict) and len(raw) == 1 and isinstance(only := next(iter(raw.values())), dict):
        return only
    return raw


def _first(raw: dict[str, Any], names: Sequence[str]) -> str | None:
    """The first of some columns that a row has, one with a value if there is any."""
    there = [name for name in names if name in raw]
    return next((name for name in there if raw[name] not in (None, "")), there[0] if there else None)


def _text_columns(spec: RowSpec) -> tuple[str, ...]:
    """Where a row's text may be, or its tokens."""
    if spec.column is not None:
        return (spec.column,)
    return TOKEN_COLUMNS if spec.format == "tokens" else TEXT_COLUMNS


def _text(raw: dict[str, Any], spec: RowSpec) -> str | TokenIds | Rejected:
    """The text column of a row, or its tokens."""
    names = _text_columns(spec)
    name = _first(raw, names)
    if name is None:
        return _missing(raw, names)
    value = raw[name]
    if spec.format == "tokens":
        if not isinstance(value, list) or not all(type(one) is int and one >= 0 for one in value):
            return _wrong(name, value, "a list of token ids")
        return TokenIds(tuple(value))
    return _clean(value, spec.clean) if isinstance(value, str) else _wrong(name, value)


def _chat_column(raw: dict[str, Any], spec: RowSpec) -> str | None:
    """The column of a chat's messages, if the row is one."""
    if spec.format == "alpaca":
        return None
    if spec.column is not None:
        return spec.column if spec.format == "messages" or isinstance(raw.get(spec.column), list) else None
    return _first(raw, CHAT_COLUMNS)


def _conversation(raw: dict[str, Any], spec: RowSpec) -> Conversation | Rejected:
    """An Alpaca row or a row of messages."""
    talk = _chat_column(raw, spec)
    if talk is not None or spec.format == "messages":
        if talk is None or talk not in raw:
            return _missing(raw, CHAT_COLUMNS if talk is None else (talk,))
        return _messages(raw, talk, spec)
    prompts = (spec.column,) if spec.column else PROMPT_COLUMNS
    prompt, response = _first(raw, prompts), _first(raw, RESPONSE_COLUMNS)
    if prompt is None:
        return _missing(raw, prompts)
    if response is None:
        return _missing(raw, RESPONSE_COLUMNS)
    context, system = _first(raw, INPUT_COLUMNS), _first(raw, SYSTEM_COLUMNS)
    values = []
    for name in (prompt, response, context, system):
        value = "" if name is None else raw[name]
        if value is None and name in (context, system):
            value = ""
        if not isinstance(value, str):
            return _wrong(str(name), value)
        values.append(_clean(value, spec.clean))
    earlier = _history(raw.get(HISTORY) or [], spec)
    if isinstance(earlier, Rejected):
        return earlier
    return Conversation((*earlier, Exchange(*values[:3])), values[3])


def _history(pairs: Any, spec: RowSpec) -> list[Exchange] | Rejected:
    """Earlier exchanges of an Alpaca row: [[prompt, response], ...]."""
    if not isinstance(pairs, list):
        return _wrong(HISTORY, pairs, "a list of pairs")
    for i, pair in enumerate(pairs):
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(said, str) for said in pair):
            return _wrong(f"{HISTORY}[{i}]", pair, "a prompt and a response")
    return [Exchange(*(_clean(said, spec.clean) for said in pair)) for pair in pairs]


def _messages(raw: dict[str, Any], column: str, spec: RowSpec) -> Conversation | Rejected:
    """Turns of a chat: an optional system message, then user and assistant in turn.

    What the assistant says before any user, and what a user says last, has no counterpart: both are left out,
    and counted.
    """
    talk = raw[column]
    if not isinstance(talk, list):
        return _wrong(column, talk, "a list of messages")
    said: list[tuple[str, str]] = []
    for i, message in enumerate(talk):
        if not isinstance(message, dict):
            return _wrong(f"{column}[{i}]", message, "an object")
        role = message.get("role", message.get("from"))
        content = message.get("content", message.get("value"))
        if role is None or content is None:
            null = next((name for name in MESSAGE if name in message and message[name] is None), None)
            if null is not None:
                return _wrong(f"{column}[{i}].{null}", None)
            return _missing(message, ("role and content",))
        if not isinstance(content, str):
            return _wrong(f"{column}.content", content)
        said.append((ROLE_OF.get(str(role), str(role)), _clean(content, spec.clean)))
    name = _first(raw, SYSTEM_COLUMNS)
    preface = raw[name] or "" if name is not None else ""
    if not isinstance(preface, str):
        return _wrong(str(name), preface)
    systems = [_clean(preface, spec.clean)] if preface else []
    if said and said[0][0] == "system":
        systems.append(said.pop(0)[1])
    first = next((i for i, (role, _) in enumerate(said) if role != "assistant"), len(said))
    last = len(said) - (len(said) > first and said[-1][0] == "user")
    used = said[first:last]
    roles = [role for role, _ in used]
    if not used or roles != ["user", "assistant"] * (len(used) // 2):
        return Rejected("bad_roles", " ".join(role for role, _ in said) or "no messages")
    exchanges = tuple(Exchange(u[1], a[1]) for u, a in zip(used[::2], used[1::2], strict=True))
    return Conversation(exchanges, "\n\n".join(filter(None, systems)), len(said) - len(used))


def _judge(row: Row, spec: RowSpec) -> Row | Rejected:
    """The row, or the reason why its content is useless."""
    if isinstance(row, TokenIds):
        return row if row.ids else Rejected("empty")
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


def _missing(raw: dict[str, Any], names: Sequence[str]) -> Rejected:
    wanted = ", ".join(names[:-1]) + " or " + names[-1] if len(names) > 1 else names[0]
    there = ", ".join(map(str, list(raw)[:12])) or "none"
    return Rejected("missing_column", f"no column {wanted}; there are: {there}")


def _wrong(name: str, value: Any, wanted: str = "text") -> Rejected:
    found = "null" if value is None else type(value).__name__
    return Rejected("wrong_type", f"column {name} must be {wanted}, not {found}")
