"""Messages in the forms that chat templates accept: forms of tool calls, content as parts, reasoning."""

from __future__ import annotations

import json
import re
from typing import Any

from .chat_templates import REASONING, TAGS, THOUGHT, Message

PROBE: list[Message] = [
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "World"},
]
CALL_PROBE: Message = {  # an answer that calls a tool
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"x": "World"}}}],
}
OPEN_TAG = re.compile(rf"(<(?:{TAGS})>|\[THINK\])\s*\Z")  # at the end of a prompt


def unchanged(messages: list[Message]) -> list[Message]:
    """Return messages unchanged."""
    return messages


def with_content(messages: list[Message]) -> list[Message]:
    """Return messages in which every tool call has a content, for templates that append to it."""
    return [
        message | {"content": message.get("content") or ""} if message.get("tool_calls") else message
        for message in messages
    ]


def calls_as_text(messages: list[Message]) -> list[Message]:
    """Return messages with tool calls as older templates expect them, with arguments as JSON text."""
    changed = []
    for message in messages:
        calls = message.get("tool_calls")
        if isinstance(calls, list):
            texts = [_with_text_arguments(call) for call in calls]
            message = message | {"content": message.get("content") or "", "tool_calls": texts}
        changed.append(message)
    return changed


def _with_text_arguments(call: Any) -> Any:
    """Return a tool call whose arguments are JSON text."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or isinstance(function.get("arguments"), str):
        return call
    arguments = json.dumps(function.get("arguments"), ensure_ascii=False)
    return call | {"function": function | {"arguments": arguments}}


CALL_FORMS = (unchanged, with_content, calls_as_text)  # forms of messages with tool calls


def as_parts(message: Message) -> Message:
    """Return a message whose content is a list of parts."""
    content = message.get("content")
    return message | {"content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def as_text(message: Message) -> Message:
    """Return a message of `as_parts` with its content as text."""
    content = message.get("content")
    return message | {"content": content[0]["text"]} if isinstance(content, list) else message


def assistant_indices(messages: list[Message]) -> list[int]:
    """Return the indices of the assistant's messages."""
    return [i for i, message in enumerate(messages) if message["role"] == "assistant"]


def reasoning_of(message: Message) -> list[str]:
    """Return the reasoning in an assistant's message, from its keys and its content."""
    thoughts = [message[key] for key in REASONING if isinstance(message.get(key), str)]
    content = message.get("content")
    match = THOUGHT.match(content) if isinstance(content, str) else None
    return [*thoughts, *([match[2]] if match else [])]


def remove_reasoning(message: Message, only_empty: bool) -> None:
    """Remove the reasoning of a message, or with `only_empty` the reasoning without text."""
    for key in REASONING:
        value = message.get(key)
        if not only_empty or (isinstance(value, str) and not value.strip()):
            message.pop(key, None)
    content = message.get("content")
    thought = THOUGHT.match(content) if isinstance(content, str) else None
    if thought and isinstance(content, str) and (not only_empty or not thought[2].strip()):
        message["content"] = content[thought.end() :]


def close_thinking(message: Message, prompt_end: str, rest: str) -> str | None:
    """Return what must be written between a prompt that ends with an open thinking tag and the answer.

    This is the reasoning and the closing tag, unless the answer begins with this tag. Returns None for any
    other prompt.

    Args:
        message: The message with the answer.
        prompt_end: The end of the prompt.
        rest: The answer as the template writes it.
    """
    tag = OPEN_TAG.search(prompt_end)
    if tag is None:
        return None
    thought = "\n".join(dict.fromkeys(thought.strip() for thought in reasoning_of(message)))
    close = tag[1].replace("<", "</").replace("[", "[/")
    return thought if rest.startswith(close) else f"{thought}\n{close}\n\n"
