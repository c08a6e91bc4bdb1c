"""Numbers and Markdown rows as the report writes them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from common.text import markdown

DASH = "\u2013"
MINUS = "\u2212"
UNREADABLE = "unreadable"  # in the place of a number whose file is there and cannot be trusted


def percent(value: float | None) -> str:
    """A share in per cent; a dash when there is none."""
    return DASH if value is None else f"{100 * value:.1f}"


def points(value: float) -> str:
    """A difference in percentage points, with its sign."""
    return f"{100 * value:+.1f}".replace("-", MINUS)


def span(low: float, high: float, signed: bool = False) -> str:
    """An interval in per cent, or in points."""
    return f"[{points(low)}, {points(high)}]" if signed else f"{percent(low)}{DASH}{percent(high)}"


def p_value(p: float) -> str:
    """Two digits, or that it is smaller than worth telling."""
    return "< 0.001" if p < 0.001 else f"{p:.2g}" if p < 0.1 else f"{p:.2f}"


def spread(found: tuple[float, float | None] | None) -> str:
    """Mean and standard deviation over seeds, in per cent."""
    if found is None:
        return DASH
    mean, deviation = found
    return percent(mean) if deviation is None else f"{percent(mean)} ± {percent(deviation)}"


def arrow(direction: int) -> str:
    """A mark for a difference that is sure."""
    return {1: "↑", -1: "↓", 0: ""}[direction]


def shortened(row: dict[str, Any]) -> str:
    """Rows whose prompts were shortened, and in brackets those that lost text of the query."""
    cut = f" ({row['rows_cut']:,})" if row["rows_cut"] else ""
    return f"{row['rows_shortened']:,}{cut}"


def markdown_head(cells: list[str]) -> list[str]:
    """The first two lines of a Markdown table."""
    return [markdown_row(cells), "|" + " --- |" * len(cells)]


def markdown_row(cells: Iterable[str]) -> str:
    """A row of it. Cells are text from anywhere: each is escaped."""
    return "| " + " | ".join(markdown(cell) for cell in cells) + " |"
