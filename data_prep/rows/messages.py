"""Instruction rows -> conversations: Alpaca's columns, or the messages of a chat."""

from __future__ import annotations

import contextlib
import html
import json
import re
from typing import Any, NamedTuple

from emo.data_prep.rows.columns import (
    HISTORY,
    chat_column,
    first,
    missing,
    names_of,
    prompt_columns,
    wrong,
)
from emo.data_prep.rows.spec import Rejected, RowSpec
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


class Said(NamedTuple):
    """A message: who said what, and the keys that only a chat_template reads."""

    role: str  # one of ROLES, or what the row says
    content: str | None
    extra: dict[str, Any]  # tool_calls, name, reasoning_content ...
    supervised: bool = True  # False: it is marked as carrying no loss


def conversation(raw: dict[str, Any], spec: RowSpec) -> Conversation | Chat | Rejected:
    """An Alpaca row or a row of messages."""
    talk = chat_column(raw, spec)
    if talk is not None or spec.format == "messages":
        names = names_of("messages", spec) if talk is None else (talk,)
        return missing(raw, names, spec) if talk is None or talk not in raw else _messages(raw, talk, spec)
    prompts, responses = prompt_columns(spec), names_of("output", spec)
    prompt, response = first(raw, prompts), first(raw, responses)
    if prompt is None or response is None:
        return missing(raw, prompts if prompt is None else responses, spec)
    context, system = first(raw, names_of("input", spec)), first(raw, names_of("system", spec))
    values = []
    for name in (prompt, response, context, system):
        value = "" if name is None else raw[name]
        if value is None and name in (context, system):
            value = ""
        if not isinstance(value, str):
            return wrong(str(name), value)
        values.append(clean(value, spec.clean))
    earlier = _history(raw.get(names_of("history", spec)[0]) or [], spec)
    if isinstance(earlier, Rejected):
        return earlier
    read = Conversation((*earlier, Exchange(*values[:3])), values[3])
    return _as_chat(read, raw, spec) if spec.chat else read


def _history(pairs: Any, spec: RowSpec) -> list[Exchange] | Rejected:
    """Earlier exchanges of an Alpaca row: [[prompt, response], ...]."""
    if not isinstance(pairs, list):
        return wrong(HISTORY, pairs, "a list of pairs")
    for i, pair in enumerate(pairs):
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            return wrong(f"{HISTORY}[{i}]", pair, "a prompt and a response")
    return [Exchange(*(clean(text, spec.clean) for text in pair)) for pair in pairs]


def _as_chat(read: Conversation, raw: dict[str, Any], spec: RowSpec) -> Chat | Rejected:
    """An Alpaca row as messages."""
    messages = [Said("system", read.system, {})] if read.system else []
    for exchange in read.exchanges:
        prompt = f"{exchange.prompt}\n\n{exchange.input}" if exchange.input else exchange.prompt
        messages += [Said("user", prompt, {}), Said("assistant", exchange.response, {})]
    return _chat(messages, raw, spec)


def _messages(raw: dict[str, Any], column: str, spec: RowSpec) -> Conversation | Chat | Rejected:
    """Messages of a chat, with what a system column says before them."""
    messages = _said(raw[column], column, spec)
    if isinstance(messages, Rejected):
        return messages
    name = first(raw, names_of("system", spec))
    preface = raw[name] or "" if name is not None else ""
    if not isinstance(preface, str):
        return wrong(str(name), preface)
    systems, role = [clean(preface, spec.clean)] if preface else [], "system"
    if messages and messages[0].role in PREFACES:
        role = messages[0].role
        systems.append(messages.pop(0).content or "")
    system = "\n\n".join(filter(None, systems))
    if spec.chat:
        return _chat([Said(role, system, {}), *messages] if system else messages, raw, spec)
    return _exchanges(messages, system)


def _said(talk: Any, column: str, spec: RowSpec) -> list[Said] | Rejected:
    if not isinstance(talk, list):
        return wrong(column, talk, "a list of messages")
    roles, contents = names_of("role", spec), names_of("content", spec)
    messages = []
    for i, message in enumerate(talk):
        if not isinstance(message, dict):
            return wrong(f"{column}[{i}]", message, "an object")
        role, content = (message.get(first(message, names) or "") for names in (roles, contents))
        unread = (*roles, *contents, *MARKS)
        extra = {k: v for k, v in message.items() if k not in unread and v is not None}
        calls = spec.chat and bool(extra.get("tool_calls"))
        if role is None or (content is None and not calls):
            null = next((n for n in (*roles, *contents) if n in message and message[n] is None), None)
            if null is not None:
                return wrong(f"{column}[{i}].{null}", None)
            return missing(message, (f"{roles[0]} and {contents[0]}",))
        marked = _marked_part(content)
        if marked is not None:
            return Rejected(
                "wrong_type", f"{column}[{i}].{contents[0]}: {marked} of a part; mark the message"
            )
        content = _joined(content)
        if isinstance(content, list):
            parts = {
                str(part.get("type")) if isinstance(part, dict) else type(part).__name__ for part in content
            }
            odd = ", ".join(sorted(parts - {"text"})) or "text without text"
            return Rejected("wrong_type", f"column {column}[{i}].{contents[0]} must be text, not {odd}")
        if content is not None and not isinstance(content, str):
            return wrong(f"{column}.{contents[0]}", content)
        text = None if content is None else clean(content, spec.clean)
        role = ROLE_OF.get(str(role), str(role))
        supervised = _supervised(message, role, f"{column}[{i}]")
        if isinstance(supervised, Rejected):
            return supervised
        messages.append(Said(role, text, extra if spec.chat else {}, supervised))
    return messages


def _supervised(message: dict[str, Any], role: str, where: str) -> bool | Rejected:
    """Return whether the marks of a message leave it supervised, or why they cannot be followed."""
    supervised = True
    for key in (*MARKS, *OTHER_MARKS):
        value = message.get(key)
        if value is None:
            continue
        if key in OTHER_MARKS or not isinstance(value, int | float) or value not in (0, 1):
            marks = ", ".join(MARKS)
            problem = f"{where}.{key} may say what carries loss, and cannot be followed"
            return Rejected("wrong_type", f"{problem}: only {marks} are, with 0, 1, true or false; remove it")
        learned = value == MARKS[key]
        if learned and role != "assistant" and key != "weight":  # weight is of the assistant's alone
            return Rejected("wrong_type", f"{where}.{key} asks for loss on the {role}'s words; remove it")
        supervised &= learned
    return supervised


def keys_not_read(raw: dict[str, Any], spec: RowSpec) -> set[str]:
    """Return the keys of a row's messages that give no text, as `messages[].key`."""
    talk = chat_column(raw, spec) if spec.kind == "instruct" and not spec.chat else None
    if talk is None or not isinstance(raw.get(talk), list):
        return set()
    read = {*names_of("role", spec), *names_of("content", spec), *MARKS}
    keys = {str(key) for message in raw[talk] if isinstance(message, dict) for key in message}
    return {f"{talk}[].{key}" for key in keys - read}


def _marked_part(content: Any) -> str | None:
    """Return the first mark of loss on a part of a content, which cannot be followed there."""
    parts = [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []
    return next((key for part in parts for key in (*MARKS, *OTHER_MARKS) if part.get(key) is not None), None)


def _joined(content: Any) -> Any:
    """Parts of a content as one text, if all of them are text; anything else as it is."""
    if not isinstance(content, list):
        return content
    texts = [
        part["text"]
        if isinstance(part, dict) and part.get("type", "text") == "text" and "text" in part
        else None
        for part in content
    ]
    if not texts or not all(isinstance(text, str) for text in texts):
        return content
    return "".join(text for text in texts if text is not None)


def _exchanges(messages: list[Said], system: str) -> Conversation | Rejected:
    """User and assistant in turn.

    What the assistant says before any user, and what a user says last, has no counterpart: both are left out,
    and counted.
    """
    start = next((i for i, message in enumerate(messages) if message.role != "assistant"), len(messages))
    last = len(messages) - (len(messages) > start and messages[-1].role == "user")
    used = messages[start:last]
    if not used or [message.role for message in used] != ["user", "assistant"] * (len(used) // 2):
        return _bad_roles(messages)
    pairs = zip(used[::2], used[1::2], strict=True)
    exchanges = tuple(Exchange(prompt.content or "", reply.content or "") for prompt, reply in pairs)
    return Conversation(exchanges, system, len(messages) - len(used), _unsupervised(used))


def _unsupervised(messages: list[Said]) -> tuple[int, ...]:
    """Return the numbers, among the assistant's messages, of those that carry no loss."""
    answers = [message for message in messages if message.role == "assistant"]
    return tuple(i for i, answer in enumerate(answers) if not answer.supervised)


def _bad_roles(messages: list[Said]) -> Rejected:
    return Rejected("bad_roles", " ".join(message.role for message in messages) or "no messages")


def _chat(messages: list[Said], raw: dict[str, Any], spec: RowSpec) -> Chat | Rejected:
    """Messages for a chat_template, which says itself what order it allows.

    What the assistant says before anybody else, and all after what it says last, is left out, and counted.
    """
    front = next((i for i, message in enumerate(messages) if message.role not in PREFACES), len(messages))
    begin = next((i for i in range(front, len(messages)) if messages[i].role != "assistant"), len(messages))
    last = max((i for i, message in enumerate(messages) if message.role == "assistant"), default=-1)
    if last <= begin or any(message.role not in ROLES for message in messages):
        return _bad_roles(messages)
    tools = _tools(raw, spec)
    if isinstance(tools, Rejected):
        return tools
    used = [*messages[:front], *messages[begin : last + 1]]
    written = "" if tools is None else _json(tools)
    return Chat(
        _json([_message(message) for message in used]),
        written,
        len(messages) - len(used),
        _unsupervised(used),
    )


def _tools(raw: dict[str, Any], spec: RowSpec) -> list[Any] | Rejected | None:
    """The tools of a row: a list of schemas, or that as JSON."""
    name = first(raw, names_of("tools", spec))
    tools = None if name is None else raw[name] or None
    if isinstance(tools, str):
        with contextlib.suppress(ValueError, RecursionError):
            tools = json.loads(tools) or None
    if tools is None or (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        return tools
    return wrong(str(name), tools, "a list of tools")


def _message(spoken: Said) -> dict[str, Any]:
    """A message as chat templates expect it: the arguments of a call are an object, not its JSON."""
    content = {} if spoken.content is None else {"content": spoken.content}
    message = {"role": spoken.role, **content, **spoken.extra}
    calls = json.loads(_json(message.get("tool_calls")))  # a copy: the row itself stays as it was read
    if calls:
        message["tool_calls"] = calls
    for call in calls if isinstance(calls, list) else ():
        inner = call.get("function", call) if isinstance(call, dict) else None
        if isinstance(inner, dict) and isinstance(inner.get("arguments"), str):
            with contextlib.suppress(ValueError, RecursionError):
                inner["arguments"] = json.loads(inner["arguments"])
    return message


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
