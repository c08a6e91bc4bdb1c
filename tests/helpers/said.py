"""What a command said on standard error."""

from __future__ import annotations


def lines(text: str) -> list[str]:
    """Its lines, without the word that it begins with while libraries are loaded."""
    return [line for line in text.splitlines() if not line.endswith(": loading libraries")]
