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

from emo.data_prep.templates import Chat, Conversation, Exchange

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
SELECTION = ("duplicate", "near_duplicate", "limit", "weight")  # found by comparing rows, see plan.py
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
    lists = ((name, value) for name, value in raw.items() if isinstance(value, list) and value)
    talks = (name for name, talk in lists if isinstance(talk[0], dict) and len(talk[0]) > 1)
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
            present |= set(map(str, row))
            flags |= {str(name) for name, value in row.items() if isinstance(value, bool)}
            talk = chat_column(row, spec) if spec.kind == "instruct" else None
            if talk is not None:
                parts = ["system"]
                read.add(talk)
                known = {*names_of("role", spec), *names_of("content", spec), *MARKS}
                keys = {str(key) for message in row[talk] for key in message} if not spec.chat else set()
                present |= {f"{talk}[].{key}" for key in keys - known}
            else:
                alpaca = ["system", "history", "instruction", "input", "output"]
                parts = alpaca if spec.kind == "instruct" else ["text"]
            parts += ["tools"] if spec.chat else []
            read |= {name for part in parts if (name := first(row, names_of(part, spec))) is not None}
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


ROLES = {
    "system": ("system",),
    "developer": ("developer",),  # what OpenAI's newer models call the system role
    "user": ("user", "human"),
    "assistant": ("assistant", "gpt", "chatgpt", "bot", "model"),
    "tool": ("tool", "function"),
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


def conversation(raw: dict[str, Any], spec: RowSpec) -> Conversation | Chat:
    """Return what an Alpaca row or a row of messages holds. Raises RowError."""
    talk = chat_column(raw, spec)
    if talk is not None or spec.format == "messages":
        if talk is None or talk not in raw:
            raise missing(raw, names_of("messages", spec) if talk is None else (talk,), spec)
        messages, system, role = _messages(raw, talk, spec)
        if spec.chat:
            return _chat([Message(role, system, {}), *messages] if system else messages, raw, spec)
        return _exchanges(messages, system)
    names = [first(raw, names_of(part, spec)) for part in ("instruction", "output", "input", "system")]
    if None in names[:2]:
        raise missing(raw, names_of("output" if names[0] else "instruction", spec), spec)
    values = []
    for i, name in enumerate(names):
        value = "" if name is None or (raw[name] is None and i > 1) else raw[name]
        if not isinstance(value, str):
            raise wrong(str(name), value)
        values.append(clean(value, spec.clean))
    pairs = raw.get(names_of("history", spec)[0]) or []
    if not isinstance(pairs, list):
        raise wrong(HISTORY, pairs, "a list of pairs")
    for i, pair in enumerate(pairs):
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise wrong(f"{HISTORY}[{i}]", pair, "a prompt and a response")
    earlier = [Exchange(*(clean(text, spec.clean) for text in pair)) for pair in pairs]
    exchanges, system = (*earlier, Exchange(*values[:3])), values[3]
    if not spec.chat:
        return Conversation(exchanges, system)
    messages = [Message("system", system, {})] if system else []
    for exchange in exchanges:
        prompt = f"{exchange.prompt}\n\n{exchange.input}" if exchange.input else exchange.prompt
        messages += [Message("user", prompt, {}), Message("assistant", exchange.response, {})]
    return _chat(messages, raw, spec)


def _messages(raw: dict[str, Any], column: str, spec: RowSpec) -> tuple[list[Message], str, str]:
    """Return the messages of a chat without its preface; the preface, and the role that speaks it.

    The preface is what a system column says, and the first message if it is of a role of PREFACES.
    """
    if not isinstance(raw[column], list):
        raise wrong(column, raw[column], "a list of messages")
    messages = [_message(item, f"{column}[{i}]", spec) for i, item in enumerate(raw[column])]
    name = first(raw, names_of("system", spec))
    preface = raw[name] or "" if name is not None else ""
    if not isinstance(preface, str):
        raise wrong(str(name), preface)
    systems, role = [clean(preface, spec.clean)] if preface else [], "system"
    if messages and messages[0].role in PREFACES:
        role = messages[0].role
        systems.append(messages.pop(0).content or "")
    return messages, "\n\n".join(filter(None, systems)), role


def _message(message: Any, where: str, spec: RowSpec) -> Message:
    """Return a message; where: its place in the row, for an error."""
    if not isinstance(message, dict):
        raise wrong(where, message, "an object")
    roles, contents = names_of("role", spec), names_of("content", spec)
    role, content = (message.get(first(message, names) or "") for names in (roles, contents))
    keys = (*roles, *contents, *MARKS)
    extra = {k: v for k, v in message.items() if k not in keys and v is not None} if spec.chat else {}
    if role is None or (content is None and not extra.get("tool_calls")):
        null = next((n for n in (*roles, *contents) if n in message and message[n] is None), None)
        if null is not None:
            raise wrong(f"{where}.{null}", None)
        raise missing(message, (f"{roles[0]} and {contents[0]}",))
    if content is not None:
        content = clean(_text(content, f"{where}.{contents[0]}"), spec.clean)
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
    return Message(role, content, extra, supervised)


def _text(content: Any, where: str) -> str:
    """Return the content of a message, whose parts may be listed, as one text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise wrong(where, content)
    parts = [part if isinstance(part, dict) else {"type": type(part).__name__} for part in content]
    for key in (*MARKS, *OTHER_MARKS):
        if any(part.get(key) is not None for part in parts):
            raise RowError("wrong_type", f"{where}: {key} of a part; mark the message")
    texts = [part.get("text") for part in parts if part.get("type", "text") == "text"]
    if not parts or len(texts) < len(parts) or not all(isinstance(text, str) for text in texts):
        odd = ", ".join(sorted({str(part.get("type")) for part in parts} - {"text"})) or "text without text"
        raise RowError("wrong_type", f"column {where} must be text, not {odd}")
    return "".join(map(str, texts))


def _exchanges(messages: list[Message], system: str) -> Conversation:
    """Return user and assistant in turn.

    What the assistant says before any user, and what a user says last, has no counterpart: both are left out,
    and counted.
    """
    start = next((i for i, message in enumerate(messages) if message.role != "assistant"), len(messages))
    last = len(messages) - (len(messages) > start and messages[-1].role == "user")
    used = messages[start:last]
    if not used or [message.role for message in used] != ["user", "assistant"] * (len(used) // 2):
        raise _bad_roles(messages)
    pairs = zip(used[::2], used[1::2], strict=True)
    exchanges = tuple(Exchange(prompt.content or "", reply.content or "") for prompt, reply in pairs)
    return Conversation(exchanges, system, len(messages) - len(used), _unsupervised(used))


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
    name = first(raw, names_of("tools", spec))
    tools = None if name is None else raw[name] or None  # a list of schemas, or that as JSON
    if isinstance(tools, str):
        with contextlib.suppress(ValueError, RecursionError):
            tools = json.loads(tools) or None
    if tools is not None and not (isinstance(tools, list) and all(isinstance(t, dict) for t in tools)):
        raise wrong(str(name), tools, "a list of tools")
    used = [*messages[:front], *messages[begin : last + 1]]
    return Chat(
        _json([_for_template(message) for message in used]),
        "" if tools is None else _json(tools),
        len(messages) - len(used),
        _unsupervised(used),
    )


def _for_template(message: Message) -> dict[str, Any]:
    """Return a message as chat templates expect it: the arguments of a call are an object, not its JSON."""
    content = {} if message.content is None else {"content": message.content}
    tree = {"role": message.role, **content, **message.extra}
    calls = json.loads(_json(tree.get("tool_calls")))  # a copy: the row itself stays as it was read
    if calls:
        tree["tool_calls"] = calls
    for call in calls if isinstance(calls, list) else ():
        inner = call.get("function", call) if isinstance(call, dict) else None
        if isinstance(inner, dict) and isinstance(inner.get("arguments"), str):
            with contextlib.suppress(ValueError, RecursionError):
                inner["arguments"] = json.loads(inner["arguments"])
    return tree


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
