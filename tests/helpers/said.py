"""What a command said on standard error."""

from __future__ import annotations


def lines(text: str) -> list[str]:
    """Its lines, without those that say what is being loaded."""
    loading = (": loading libraries", ": loading weights")
    return [line for line in text.splitlines() if not line.endswith(loading)]
