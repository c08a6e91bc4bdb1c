"""Raw bytes or table rows -> texts, conversations or token ids, each valid or rejected with a reason.

Works on one piece of a source at a time, the same way when rows are scanned and when they are encoded.
Columns go by known names or by those of a recipe; instructions are Alpaca's columns or messages of a chat.
"""

from __future__ import annotations

import contextlib
import hashlib
import html
import json
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from ..encoding.templates import Chat, Conversation, Exchange

LEFT_OUT = "left_out_by_template"
# Why rows are not used. STRUCTURE: a file is not what it was taken for, an error when data.strict.
STRUCTURE = (
    *("broken_json", "not_an_object", "missing_column", "wrong_type"),
    *("refused_by_chat_template", "response_not_found", LEFT_OUT),
)
UNREADABLE = ("bad_utf8", "control_characters", "replacement_characters")  # of a file that is not UTF-8
CONTENT = (
    *(*UNREADABLE, "empty", "no_letters", "repetitive", "too_long"),
    *("empty_instruction", "empty_response", "bad_roles", "no_loss"),
)
SELECTION = ("duplicate", "near_duplicate", "limit", "weight")  # found by comparing rows, see plan.py
REASONS = ("", *STRUCTURE, *CONTENT, *SELECTION)
CODE = {reason: code for code, reason in enumerate(REASONS)}

NAMES = {  # a part of a row, as `columns` of a recipe calls it: the columns that are taken for it
    "text": ("text", "content", "sentence", "document", "story"),
    "instruction": ("instruction", "prompt", "question", "query"),
    "input": ("input", "context"),
    "output": ("output", "response", "completion", "answer"),
    "system": ("system", "system_prompt"),
    "history": ("history",),  # earlier exchanges: pairs of prompt and response
    "messages": ("messages", "conversations"),
    "tools": ("tools",),  # what the assistant may call, as JSON schemas: for a tokenizer's chat_template
    "role": ("role", "from"),  # of a message
    "content": ("content", "value"),
}
TOKEN_COLUMNS = ("ids", "input_ids")
TEXT_COLUMNS, CHAT_COLUMNS = NAMES["text"], NAMES["messages"]


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
    group: str | None = None  # see DataConfig.validation_group

    def names(self, part: str) -> tuple[str, ...]:
        """Return the columns that may be a part of a row: one that the recipe names, or the usual ones."""
        if self.column is not None and part in ("text", "instruction"):
            return (self.column,)
        if part == "text" and self.format == "tokens" and not self.columns:
            return TOKEN_COLUMNS
        if not self.columns:
            return NAMES[part]
        return next(((name,) for key, name in self.columns if key == part), NAMES[part])

    def find(self, raw: dict[str, Any], part: str) -> str | None:
        """Return the column that is a part of a row, if the row has it; see `first`."""
        return first(raw, self.names(part))


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


def first(raw: dict[str, Any], names: Sequence[str]) -> str | None:
    """Return the first of some columns that a row has, whatever it holds.

    An empty one is not passed over: the next known column may be a file name or another annotator's answer.
    """
    return next((name for name in names if name in raw), None)


def chat_column(raw: dict[str, Any], spec: RowSpec) -> str | None:
    """Return the column of a chat's messages, if the row is one."""
    if spec.format == "alpaca" or {"instruction", "output"} & dict(spec.columns).keys():
        return None
    if spec.column is not None:
        return spec.column if spec.format == "messages" or isinstance(raw.get(spec.column), list) else None
    return spec.find(raw, "messages")


def missing(raw: dict[str, Any], names: Sequence[str], spec: RowSpec) -> RowError:
    """Return the error of a row that has none of some columns, with what to write in the recipe instead."""
    present = ", ".join(map(str, list(raw)[:12])) or "none"
    hint = "name yours in the source's columns, as emo sniff proposes"
    if spec.kind == "text" and (first(raw, NAMES["output"]) or first(raw, CHAT_COLUMNS)):
        hint = "for instructions set data.kind=instruct"
    if {"message_id", "parent_id"} <= raw.keys() or "message_tree_id" in raw:
        hint = "these are trees of OpenAssistant. Write each path from a prompt to a reply as messages first"
    return RowError("missing_column", f"no column {' or '.join(names)}; there are: {present}; {hint}"[:330])


def wrong(name: str, value: Any, expected: str = "text") -> RowError:
    """Return the error of a row whose column holds something else."""
    kind = "null" if value is None else type(value).__name__
    return RowError("wrong_type", f"column {name} must be {expected}, not {kind}")


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON. Raises ValueError for one that has a key twice."""
    tree = dict(pairs)
    if len(tree) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"the key {twice!r} comes twice in an object")
    return tree


STRICT_JSON = json.JSONDecoder(object_pairs_hook=unique)
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
    group: int = 0  # hash of the value of data.validation_group
    left_out: tuple[str, ...] = ()  # fields of a chat of which something is not written


def parse(payload: Payload, spec: RowSpec) -> Iterator[Row | Rejected]:
    """Yield the rows of a payload, in order. Blank stretches between rows are not rows."""
    return (judged.row for judged in judge(payload, spec))


def judge(payload: Payload, spec: RowSpec) -> Iterator[Judged]:
    """Yield the rows of a payload, in order, with what rows are compared and counted by."""
    for raw in raw_rows(payload, spec):
        try:
            judged = _judged(_row(raw, spec), spec)
            if spec.group is not None:
                judged = judged._replace(group=_group(raw, spec.group))
        except RowError as error:
            judged = Judged(Rejected(*error.args))
        yield judged


def _group(raw: Any, column: str) -> int:
    """Return what stands for a row's group. Raises RowError for a row without it."""
    row = _object(json.loads(raw.decode("utf-8-sig")) if isinstance(raw, bytes) else raw)
    if not isinstance(row, dict) or row.get(column) is None:
        lacks = "null in column" if isinstance(row, dict) and column in row else "no column"
        raise RowError("missing_column", f"{lacks} {column}, which data.validation_group names")
    return content_hash(_json(row[column]))


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


def columns(payload: Payload, spec: RowSpec) -> tuple[set[str], set[str]]:
    """Return the columns that a payload's first rows give text from, and those that are not read.

    Keys of messages that are not read are among these, as `messages[].key`.
    """
    read: set[str] = set()
    present: set[str] = set()
    for raw in raw_rows(payload, spec)[:HEAD] if spec.lines or not isinstance(payload, bytes) else []:
        with contextlib.suppress(RowError):
            _row(raw, spec)
            row = _object(json.loads(raw.decode("utf-8-sig")) if isinstance(raw, bytes) else raw)
            present |= set(map(str, row))
            parts = ["text"] if spec.kind == "text" else ["system"]
            if spec.kind == "instruct" and (column := chat_column(row, spec)) is not None:
                read.add(column)
                if not spec.chat:
                    keys = {str(key) for message in row[column] for key in message}
                    keys -= {*spec.names("role"), *spec.names("content"), *MARKS}
                    present |= {f"{column}[].{key}" for key in keys}
            elif spec.kind == "instruct":
                parts += ["history", "instruction", "input", "output"]
            parts += ["tools"] if spec.chat else []
            read |= {name for part in parts if (name := spec.find(row, part)) is not None}
    return read, present - read


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
            raw = STRICT_JSON.decode(text.removeprefix("\ufeff"))
        except (ValueError, RecursionError) as error:  # without `msg`: numbers too long, nested too deep
            raise RowError("broken_json", getattr(error, "msg", str(error))) from None
    raw = _object(raw)
    if not isinstance(raw, dict):
        raise RowError("not_an_object", f"a row must be an object, not {type(raw).__name__}")
    if spec.kind == "instruct":
        return _conversation(raw, spec)
    name = spec.find(raw, "text")
    if name is None:
        raise missing(raw, spec.names("text"), spec)
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
        if isinstance(row, Conversation):
            speeches = [("user", exchange.prompt + exchange.input) for exchange in row.exchanges]
            speeches += [("assistant", exchange.response) for exchange in row.exchanges]
        else:
            messages = json.loads(row.messages)
            speeches = [
                (m["role"], "calls" if m.get("tool_calls") else m.get("content") or "") for m in messages
            ]
        if row.unsupervised and len(row.unsupervised) == sum(role == "assistant" for role, _ in speeches):
            raise RowError("no_loss", "every answer is marked as carrying no loss")
        for role, words in speeches:
            if role in _EMPTY and not words.strip():
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
            identity = _json((row.exchanges, row.system))
        else:
            identity = f"{row.messages}\n{row.tools}"
        identity += f"\n{row.unsupervised}" if row.unsupervised else ""
        content = identity.encode("utf-8", "surrogatepass")
    return Judged(row, _hash(content), len(text))


def content_hash(text: str) -> int:
    """Return what stands for a text when rows are compared: 64 bits."""
    return _hash(text.encode("utf-8", "surrogatepass"))


def _hash(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


ROLES = {
    "system": ("system",),
    "developer": ("developer",),  # what OpenAI's newer models call the system role
    "user": ("user", "human"),
    "assistant": ("assistant", "gpt", "chatgpt", "bot", "model", "function_call"),
    "tool": ("tool", "function", "observation"),
}
ROLE_OF = {name: role for role, names in ROLES.items() for name in names}
PREFACES = ("system", "developer")
# Keys of a message that say whether it carries loss, and what they are when it does: OpenAI's weight,
# axolotl's train and training, ms-swift's loss, torchtune's masked.
MARKS = {"weight": 1, "train": 1, "training": 1, "trainable": 1, "loss": 1, "masked": 0}
# Keys that may say so in ways that are not understood here: of parts of a message, or with other meanings.
OTHER_MARKS = ("mask", "loss_mask", "loss_weight", "loss_scale", "train_detail", "training_detail")


class Message(NamedTuple):
    """A message of a chat."""

    role: str  # one of ROLES, or what the row says
    content: str | None
    extra: dict[str, Any]  # what only a chat_template reads: tool_calls, name, reasoning_content ...
    supervised: bool = True  # False: it is marked as carrying no loss


def _conversation(raw: dict[str, Any], spec: RowSpec) -> Conversation | Chat:
    """Return what an Alpaca row or a row of messages holds. Raises RowError.

    The preface of a chat is what a system column says, and its first message where that is of a role of
    PREFACES. What the assistant says before any user, and what a user says last, has no counterpart: both are
    left out, and counted.
    """
    column = chat_column(raw, spec)
    if column is None and (pair := _message_lists(raw, spec)) is not None:
        given = [(f"{name}[{i}]", item, name) for name in pair for i, item in enumerate(raw[name])]
        # What the assistant says in the prompt is context.
        messages = [
            message if name == pair[1] else message._replace(supervised=message.role != "assistant")
            for message, name in ((_message(item, where, spec), name) for where, item, name in given)
        ]
    elif column is None and spec.format != "messages":
        return _alpaca(raw, spec)
    elif column is None or column not in raw:
        raise missing(raw, spec.names("messages") if column is None else (column,), spec)
    elif not isinstance(raw[column], list):
        raise wrong(column, raw[column], "a list of messages")
    else:
        messages = [_message(item, f"{column}[{i}]", spec) for i, item in enumerate(raw[column])]
    name, role = spec.find(raw, "system"), "system"
    preface = raw[name] or "" if name is not None else ""
    if not isinstance(preface, str):
        raise wrong(str(name), preface)
    system = clean(preface, spec.clean)
    if messages and messages[0].role in PREFACES:
        role = messages[0].role
        system = "\n\n".join(filter(None, (system, messages.pop(0).content)))
    if spec.chat:
        return _chat([Message(role, system, {}), *messages] if system else messages, raw, spec)
    start = next((i for i, message in enumerate(messages) if message.role != "assistant"), len(messages))
    last = len(messages) - (len(messages) > start and messages[-1].role == "user")
    used = messages[start:last]
    if not used or [message.role for message in used] != ["user", "assistant"] * (len(used) // 2):
        raise _bad_roles(messages)
    pairs = zip(used[::2], used[1::2], strict=True)
    exchanges = tuple(Exchange(prompt.content or "", reply.content or "") for prompt, reply in pairs)
    return Conversation(exchanges, system, len(messages) - len(used), _unsupervised(used))


def _message_lists(raw: dict[str, Any], spec: RowSpec) -> tuple[str, str] | None:
    """Return the columns of a prompt and its completion, where both are lists of messages, as in TRL."""
    names = spec.find(raw, "instruction"), spec.find(raw, "output")
    if names[0] is None or names[1] is None or not all(isinstance(raw[name], list) for name in names if name):
        return None
    return names[0], names[1]


def _alpaca(raw: dict[str, Any], spec: RowSpec) -> Conversation | Chat:
    """Return what a row in Alpaca's columns holds. Raises RowError."""
    names = [spec.find(raw, part) for part in ("instruction", "output", "input", "system")]
    if None in names[:2]:
        raise missing(raw, spec.names("output" if names[0] else "instruction"), spec)
    values = []
    for i, name in enumerate(names):
        value = "" if name is None or (raw[name] is None and i > 1) else raw[name]
        if not isinstance(value, str):
            raise wrong(str(name), value)
        values.append(clean(value, spec.clean))
    exchanges = []
    earlier = raw.get(spec.names("history")[0]) or []
    for pair in earlier if isinstance(earlier, list) else [None]:
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise wrong("history", pair, "a list of pairs, of a prompt and a response")
        exchanges.append(Exchange(*(clean(text, spec.clean) for text in pair)))
    exchanges.append(Exchange(*values[:3]))
    if not spec.chat:
        return Conversation(tuple(exchanges), values[3])
    messages = [Message("system", values[3], {})] if values[3] else []
    for exchange in exchanges:
        prompt = f"{exchange.prompt}\n\n{exchange.input}" if exchange.input else exchange.prompt
        messages += [Message("user", prompt, {}), Message("assistant", exchange.response, {})]
    return _chat(messages, raw, spec)


def _message(message: Any, where: str, spec: RowSpec) -> Message:
    """Return a message; where: its place in the row, for an error."""
    if not isinstance(message, dict):
        raise wrong(where, message, "an object")
    roles, contents = spec.names("role"), spec.names("content")
    role, content = (message.get(first(message, names) or "") for names in (roles, contents))
    keys = (*roles, *contents, *MARKS)
    extra = {k: v for k, v in message.items() if k not in keys and v is not None} if spec.chat else {}
    call = extra.pop("function_call", None)  # OpenAI's older form, and ShareGPT's as a role
    if role == "function_call" and spec.chat:
        call, content = _parsed(content), None
    if call is not None:
        if not isinstance(call, dict) or not isinstance(call.get("name"), str) or "arguments" not in call:
            raise wrong(f"{where} (function_call)", call, "an object with name and arguments")
        extra["tool_calls"] = [{"type": "function", "function": call}]
    elif not spec.chat and content is None and (message.get("function_call") or message.get("tool_calls")):
        raise RowError("wrong_type", f"{where} is a call of a tool, which only a chat template writes")
    if role is None or (content is None and not extra.get("tool_calls")):
        null = next((n for n in (*roles, *contents) if n in message and message[n] is None), None)
        raise (
            missing(message, (f"{roles[0]} and {contents[0]}",), spec) if null is None else wrong(null, None)
        )
    if isinstance(content, list):  # its parts
        parts = [part if isinstance(part, dict) else {} for part in content]
        texts = [part.get("text") if part.get("type", "text") == "text" else None for part in parts]
        if not texts or not all(isinstance(text, str) for text in texts):
            raise wrong(f"{where}.{contents[0]}", content, "text, or a list of its parts")
        if any(part.get(key) is not None for part in parts for key in (*MARKS, *OTHER_MARKS)):
            raise RowError("wrong_type", f"{where}: a part says what carries loss; mark the message")
        content = "".join(map(str, texts))
    if not isinstance(content, str | None):
        raise wrong(f"{where}.{contents[0]}", content)
    role, supervised = ROLE_OF.get(str(role), str(role)), True
    for key in (*MARKS, *OTHER_MARKS):
        value = message.get(key)
        if value is None:
            continue
        if key in OTHER_MARKS or not isinstance(value, int | float) or value not in (0, 1):
            problem = f"{where}.{key} may say what carries loss, and cannot be followed"
            raise RowError(
                "wrong_type", f"{problem}: only {', '.join(MARKS)} are, with 0, 1, true or false; remove it"
            )
        learned = value == MARKS[key]
        if learned and role != "assistant" and key != "weight":  # weight is of the assistant's alone
            raise RowError("wrong_type", f"{where}.{key} asks for loss on the {role}'s words; remove it")
        supervised &= learned
    return Message(role, None if content is None else clean(content, spec.clean), extra, supervised)


def _unsupervised(messages: list[Message]) -> tuple[int, ...]:
    """Return the numbers, among the assistant's messages, of those that carry no loss."""
    answers = [message for message in messages if message.role == "assistant"]
    return tuple(i for i, answer in enumerate(answers) if not answer.supervised)


def _bad_roles(messages: list[Message]) -> RowError:
    return RowError("bad_roles", " ".join(message.role for message in messages) or "no messages")


def _chat(messages: list[Message], raw: dict[str, Any], spec: RowSpec) -> Chat:
    """Return messages for a chat_template, which says itself what order it allows.

    What the assistant says before anybody else, and all after what it says last, is left out, and counted.
    """
    front = next((i for i, message in enumerate(messages) if message.role not in PREFACES), len(messages))
    begin = next((i for i in range(front, len(messages)) if messages[i].role != "assistant"), len(messages))
    last = max((i for i, message in enumerate(messages) if message.role == "assistant"), default=-1)
    if last <= begin or any(message.role not in ROLES for message in messages):
        raise _bad_roles(messages)
    name = spec.find(raw, "tools")
    tools = None if name is None else _parsed(raw[name]) or None  # a list of schemas, or that as JSON
    if tools is not None and not (isinstance(tools, list) and all(isinstance(t, dict) for t in tools)):
        raise wrong(str(name), tools, "a list of tools")
    used = [*messages[:front], *messages[begin : last + 1]]
    trees = []
    for message in used:
        content = {} if message.content is None else {"content": message.content}
        trees.append({"role": message.role, **content, **message.extra})
        # Templates expect the arguments of a call as an object, not as its JSON.
        # A copy: the row itself stays as it was.
        calls = without_nulls(json.loads(_json(message.extra.get("tool_calls"))))
        if calls:
            trees[-1]["tool_calls"] = calls
        for call in calls if isinstance(calls, list) else ():
            inner = call.get("function", call) if isinstance(call, dict) else None
            if isinstance(inner, dict) and "arguments" in inner:
                inner["arguments"] = _parsed(inner["arguments"])
            if isinstance(call, dict) and inner is not call:
                call.setdefault("type", "function")
    written = (
        "" if tools is None else _json(tools if isinstance(raw[str(name)], str) else without_nulls(tools))
    )
    return Chat(_json(trees), written, len(messages) - len(used), _unsupervised(used))


def without_nulls(value: Any) -> Any:
    """Return a value without the keys of objects that are null.

    A table has one type for all rows: what one row has is null in the others. A null that a row has itself
    cannot be told from these, so it goes too, in JSON lines as well, which then give the same tokens.
    """
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def _parsed(value: Any) -> Any:
    """Return the value of JSON text; anything else as it is."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(value)
    return value


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def clean(text: str, quirk: str) -> str:
    """Undo what a data set's distribution did to its text."""
    if quirk == "writingprompts":  # line breaks are a token
        return re.sub(r" ?<newline> ?", "\n", text)
    if quirk == "ag_news":  # entities lost their ampersand, line breaks became backslashes
        text = re.sub(r"&? ?#(\d{2,4});", r"&#\1;", text)
        text = re.sub(r"(?<![&\w])(lt|gt|quot|amp);", r"&\1;", text)
        return re.sub(r"&#?\w+;", lambda m: html.unescape(m[0]), text.replace("\\", " "))
    return text
