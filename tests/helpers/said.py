"""The output of commands on standard error."""

from __future__ import annotations


def lines(text: str) -> list[str]:
    """Return the lines of a text, without the messages about loading."""
    loading = (": loading libraries", ": loading weights")
    return [line for line in text.splitlines() if not line.endswith(loading)]
