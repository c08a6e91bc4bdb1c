"""Text from data where it must not act: on a terminal and in Markdown."""

from __future__ import annotations

import re

_MARKDOWN = re.compile(r"[\\`*\[\]|~$#]|(?<![^\W_])_|_(?![^\W_])")
# Control characters, line and paragraph separators, what changes the direction of writing, half characters.
_ACTING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """The text with everything that could move a cursor, colour or reorder a line written as an escape.

    Newlines and tabs stay.
    """
    return _ACTING.sub(lambda match: _escape(match.group()), text)


def markdown(text: str) -> str:
    """The text as it is in a Markdown table cell: on one line, without tags, links or emphasis."""
    line = printable(" ".join(text.split()))
    line = line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _MARKDOWN.sub(lambda match: "\\" + match.group(), line)


def _escape(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")
