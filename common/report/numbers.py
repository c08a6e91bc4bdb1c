"""Formatting of numbers in reports, and sentences that describe changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ..io.untrusted import number

DASH = "\u2013"
MINUS = "\u2212"
FEW = 4  # effects that a sentence lists one by one
VERBS = {  # by direction: singular and plural
    1: ("improves", "improve"),
    -1: ("gets worse", "get worse"),
    0: ("shows no clear change", "show no clear change"),
}


class Effect(NamedTuple):
    """A number, for example a difference, with its 95 % interval and its series in figures."""

    label: str
    series: int | None
    direction: int  # +1 better, -1 worse, 0 unclear
    value: float
    low: float
    high: float


def formatted(value: Any, form: str = "{:,.0f}", scale: float = 1) -> str:
    """Format a number with a typographic minus. Returns a dash unless it is finite."""
    finite = number(value)
    if finite is None:
        return DASH
    text = form.format(scale * finite)
    if not any(c in "123456789" for c in text):  # +0.0 and -0.0
        text = text.lstrip("+-")
    return text.replace("-", MINUS, 1) if text.startswith("-") else text


def percent(share: float | None) -> str:
    """Format a share in per cent."""
    return formatted(share, "{:.1f}", 100)


def format_interval(low: Any, high: Any, form: str = "{:.1f}", scale: float = 1) -> str:
    """Format an interval, for example `3.1 to 4.5`. Returns an empty string without finite limits."""
    limits = formatted(low, form, scale), formatted(high, form, scale)
    return "" if DASH in limits else " to ".join(limits)


def p_value(p: float) -> str:
    """Format a p-value with two digits."""
    return "p < 0.001" if p < 0.001 else f"p {p:.2g}" if p < 0.1 else f"p {p:.2f}"


def join_words(parts: Sequence[str]) -> str:
    """Join words: `a, b and c`."""
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


def describe_changes(effects: Sequence[Effect], unit: str, form: str = "{:.1f}") -> str:
    """Describe effects in words, one by one, or by counts and the best one if there are more than FEW.

    Example: `a improves by 9.0 points (95 % interval 6.7 to 11.3) and b gets worse by 2 points (1 to 3)`.
    """
    if len(effects) > FEW:
        counts = {kind: sum(e.direction == kind for e in effects) for kind in VERBS}
        verbs = [f"{count} {VERBS[kind][count > 1]}" for kind, count in counts.items() if count]
        best = max(effects, key=lambda e: e.value)
        return f"{join_words(verbs)}, of {len(effects)} in all. Best: {describe_changes([best], unit, form)}"
    return join_words([_describe_effect(effect, unit, form, i == 0) for i, effect in enumerate(effects)])


def _describe_effect(effect: Effect, unit: str, form: str, is_first: bool) -> str:
    label, _, direction, value, low, high = effect
    if direction:  # the verb expresses the sign
        low, high = sorted((direction * low, direction * high))
    signed = form if direction else form.replace("{:", "{:+")
    size = formatted((direction or 1) * value, signed)
    limits = format_interval(low, high, signed)
    interval = f"{'95 % interval ' if is_first else ''}{limits}" if limits else "without an interval"
    detail = f"by {size} {unit} ({interval})" if direction else f"({size} {unit}, {interval})"
    return f"{label} {VERBS[direction][0]} {detail}"
