"""Signs in the fields of a chat: characters of private use that show where a template writes each field."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from .chat_templates import THINK

FIRST, MOST = 0x100000, 0xFFF0  # the first sign, and how many there are at most
SIGN = re.compile(f"[{chr(FIRST)}-{chr(FIRST + MOST)}]")
TAGS = re.compile(rf"{THINK}|</?tool_response>")  # templates look for these at the ends of what is said
STEERING = ("role", "type", "id", "tool_call_id", "index")  # keys whose values steer a template
FIELDS = {"system": "system", "developer": "system", "tool": "tool results"}  # by role; others: content
INSIDE = "thinking in content"


class Signed:
    """Messages and tools with signs around each text in them."""

    def __init__(self, messages: Sequence[Mapping[str, Any]], tools: Any) -> None:
        self.fields: list[tuple[int, str]] = []  # of each sign: number of the message, or -1, and the field
        self.messages = [self._message(owner, message) for owner, message in enumerate(messages)]
        self.tools = [self._tool(tool) for tool in tools] if tools else tools

    def read(self, text: str) -> tuple[str, list[tuple[int, int]]]:
        """Return a text without its signs, and each sign with its place there, in order."""
        found = [(ord(match[0]) - FIRST, match.start()) for match in SIGN.finditer(text)]
        signs = [(sign, start - number) for number, (sign, start) in enumerate(found)]
        return SIGN.sub("", text), [pair for pair in signs if pair[0] < len(self.fields)]

    def _sign(self, owner: int, field: str) -> str:
        self.fields.append((owner, field))
        return chr(FIRST + min(len(self.fields) - 1, MOST))

    def _around(self, text: str, owner: int, field: str) -> str:
        """Return a text with signs around it, inside the white space at its ends, which templates strip."""
        core = text.strip()
        before, _, after = text.partition(core) if core else (text, "", "")
        return f"{before}{self._sign(owner, field)}{core}{self._sign(owner, field)}{after}" if core else text

    def _said(self, text: str, owner: int, field: str) -> str:
        """Return a content with signs around each stretch between tags of thinking."""
        parts, done, inside = [], 0, False
        for tag in TAGS.finditer(text):
            parts += [self._around(text[done : tag.start()], owner, INSIDE if inside else field), tag[0]]
            done, inside = tag.end(), re.fullmatch(THINK, tag[0]) is not None and "/" not in tag[0]
        return "".join(parts) + self._around(text[done:], owner, field)

    def _call(self, value: Any, owner: int, field: str = "tool_calls") -> Any:
        if isinstance(value, str):
            return self._around(value, owner, field)
        if isinstance(value, list):
            return [self._call(item, owner, field) for item in value]
        if not isinstance(value, dict):
            return value
        if field == "tool_calls.arguments":
            return {
                f"{k}{self._sign(owner, field)}": self._call(item, owner, field) for k, item in value.items()
            }
        names = {key: f"tool_calls.{key}" if key in ("name", "arguments") else field for key in value}
        return {k: v if k in STEERING else self._call(v, owner, names[k]) for k, v in value.items()}

    def _message(self, owner: int, message: Mapping[str, Any]) -> dict[str, Any]:
        signed = dict(message)
        field = FIELDS.get(message["role"], "content")
        for key, value in message.items():
            if key == "content" and isinstance(value, list):
                signed[key] = [part | {"text": self._said(part["text"], owner, field)} for part in value]
            elif key == "content" and isinstance(value, str):
                signed[key] = self._said(value, owner, field)
            elif key == "tool_calls":
                signed[key] = self._call(value, owner)
            elif key not in STEERING and isinstance(value, str):
                signed[key] = self._around(value, owner, key)
        return signed

    def _tool(self, tool: dict[str, Any]) -> dict[str, Any]:
        if isinstance(tool.get("function"), dict):
            return tool | {"function": self._tool(tool["function"])}
        return tool | (
            {"name": self._around(tool["name"], -1, "tools")} if isinstance(tool.get("name"), str) else {}
        )
