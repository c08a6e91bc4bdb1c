"""Instruction rows -> conversations: Alpaca's columns, or the messages of a chat."""

from __future__ import annotations

import contextlib
import html
import json
import re
from typing import Any, NamedTuple

from emo.data_prep.rows.columns import (
    HISTORY,
    RowError,
    RowSpec,
    chat_column,
    first,
    missing,
    names_of,
    wrong,
)
from emo.data_prep.templates import Chat, Conversation, Exchange

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


def keys_not_read(raw: dict[str, Any], spec: RowSpec) -> set[str]:
    """Return the keys of a row's messages that give no text, as `messages[].key`."""
    talk = chat_column(raw, spec) if spec.kind == "instruct" and not spec.chat else None
    if talk is None or not isinstance(raw.get(talk), list):
        return set()
    read = {*names_of("role", spec), *names_of("content", spec), *MARKS}
    keys = {str(key) for message in raw[talk] if isinstance(message, dict) for key in message}
    return {f"{talk}[].{key}" for key in keys - read}


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
