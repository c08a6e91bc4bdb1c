"""Signs in the fields of a chat: private-use characters that show where a template writes each field."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from .chat_templates import THINK, Message

FIRST = 0x100000  # the first sign
MAX_SIGNS = 0xFFF0  # largest number of signs
SIGN = re.compile(f"[{chr(FIRST)}-{chr(FIRST + MAX_SIGNS)}]")
TAGS = re.compile(rf"{THINK}|</?tool_response>")  # templates look for these at the ends of a content
STEERING = ("role", "type", "id", "tool_call_id", "index")  # keys whose values control a template
FIELDS = {"system": "system", "developer": "system", "tool": "tool results"}  # by role, others: content
INSIDE = "thinking in content"


class SignedChat:
    """Messages and tools with signs around each text in them."""

    def __init__(self, messages: Sequence[Message], tools: Any) -> None:
        self.fields: list[tuple[int, str]] = []  # by sign: index of the message or -1, and the field
        self.messages = [self._sign_message(owner, message) for owner, message in enumerate(messages)]
        self.tools = [self._sign_tool(tool) for tool in tools] if tools else tools

    def fields_of(self, index: int) -> tuple[str, ...]:
        """Return the field of each sign in a message."""
        return tuple(field for owner, field in self.fields if owner == index)

    def _new_sign(self, owner: int, field: str) -> str:
        self.fields.append((owner, field))
        return chr(FIRST + min(len(self.fields) - 1, MAX_SIGNS))

    def _sign_text(self, text: str, owner: int, field: str) -> str:
        """Return a text with signs around it, inside the white space at its ends, which templates strip."""
        core = text.strip()
        if not core:
            return text
        before, _, after = text.partition(core)
        return f"{before}{self._new_sign(owner, field)}{core}{self._new_sign(owner, field)}{after}"

    def _sign_content(self, text: str, owner: int, field: str) -> str:
        """Return a content with signs around each stretch between thinking tags."""
        parts = []
        done = 0
        inside = False
        for tag in TAGS.finditer(text):
            parts += [self._sign_text(text[done : tag.start()], owner, INSIDE if inside else field), tag[0]]
            done = tag.end()
            inside = re.fullmatch(THINK, tag[0]) is not None and "/" not in tag[0]
        return "".join(parts) + self._sign_text(text[done:], owner, field)

    def _sign_call(self, value: Any, owner: int, field: str = "tool_calls") -> Any:
        if isinstance(value, str):
            return self._sign_text(value, owner, field)
        if isinstance(value, list):
            return [self._sign_call(item, owner, field) for item in value]
        if not isinstance(value, dict):
            return value
        if field == "tool_calls.arguments":
            return {
                f"{key}{self._new_sign(owner, field)}": self._sign_call(item, owner, field)
                for key, item in value.items()
            }
        names = {key: f"tool_calls.{key}" if key in ("name", "arguments") else field for key in value}
        return {k: v if k in STEERING else self._sign_call(v, owner, names[k]) for k, v in value.items()}

    def _sign_message(self, owner: int, message: Message) -> Message:
        signed = dict(message)
        field = FIELDS.get(message["role"], "content")
        for key, value in message.items():
            if key == "content" and isinstance(value, list):
                signed[key] = [
                    part | {"text": self._sign_content(part["text"], owner, field)} for part in value
                ]
            elif key == "content" and isinstance(value, str):
                signed[key] = self._sign_content(value, owner, field)
            elif key == "tool_calls":
                signed[key] = self._sign_call(value, owner)
            elif key not in STEERING and isinstance(value, str):
                signed[key] = self._sign_text(value, owner, key)
        return signed

    def _sign_tool(self, tool: Any) -> Any:
        if isinstance(tool.get("function"), dict):
            return tool | {"function": self._sign_tool(tool["function"])}
        if isinstance(tool.get("name"), str):
            return tool | {"name": self._sign_text(tool["name"], -1, "tools")}
        return tool


class SignedMessage(NamedTuple):
    """The signs of one message in a rendered text."""

    start: int  # position of its first sign in the text without signs
    stop: int  # position of its last sign
    around: tuple[str, str]  # the text from the sign before it, and up to the sign after it
    fields: tuple[str, ...]  # of its signs, in order


class SignedText:
    """A rendered text, and the signs in it."""

    def __init__(self, signed: SignedChat, text: str) -> None:
        self._fields = signed.fields
        self.plain = SIGN.sub("", text)  # the text without signs
        found = [(ord(match[0]) - FIRST, match.start()) for match in SIGN.finditer(text)]
        positions = [(sign, start - number) for number, (sign, start) in enumerate(found)]
        positions = [pair for pair in positions if pair[0] < len(signed.fields)]
        self._order = [sign for sign, _ in positions]
        self._at = [0, *(start for _, start in positions), len(self.plain)]  # of occurrence i: _at[i + 1]
        self.signs = set(self._order)
        self._first: dict[int, dict[int, int]] = {}  # by message: each sign, and its first occurrence from 1
        for number, sign in enumerate(self._order, 1):
            self._first.setdefault(signed.fields[sign][0], {}).setdefault(sign, number)

    def find_message(self, index: int) -> SignedMessage | None:
        """Return where a message is written, or None if it is not written in one stretch."""
        first = self._first.get(index)
        if not first:
            return None
        low = min(first.values())
        high = max(first.values())
        if any(self._fields[sign][0] != index for sign in self._order[low - 1 : high]):
            return None  # another message is written in the middle of it
        at = self._at
        around = self.plain[at[low - 1] : at[low]], self.plain[at[high] : at[high + 1]]
        return SignedMessage(at[low], at[high], around, tuple(self._fields[sign][1] for sign in first))
