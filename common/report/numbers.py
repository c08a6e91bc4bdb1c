"""Numbers as reports write them, and the sentences that say what changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ..io.untrusted import number

DASH = "\u2013"
MINUS = "\u2212"
FEW = 4  # effects that a sentence names one by one
VERBS = {  # by direction, of one and of several
    1: ("improves", "improve"),
    -1: ("gets worse", "get worse"),
    0: ("shows no clear change", "show no clear change"),
}


class Effect(NamedTuple):
    """A number, a difference for example, with its 95 % interval, and how it looks in figures."""

    label: str  # of what differs
    series: int | None
    direction: int  # +1 better, -1 worse, 0: it cannot be told
    value: float
    low: float
    high: float


def formatted(value: Any, form: str = "{:,.0f}", scale: float = 1) -> str:
    """Return a number in a format, with a proper minus; a dash for whatever is no finite number."""
    finite = number(value)
    if finite is None:
        return DASH
    text = form.format(scale * finite)
    if not any(c in "123456789" for c in text):  # +0.0 and -0.0
        text = text.lstrip("+-")
    return text.replace("-", MINUS, 1) if text.startswith("-") else text


def percent(share: float | None) -> str:
    """Return a share in per cent."""
    return formatted(share, "{:.1f}", 100)


def format_interval(low: Any, high: Any, form: str = "{:.1f}", scale: float = 1) -> str:
    """Return an interval in words, as in `3.1 to 4.5`; empty without finite limits."""
    limits = formatted(low, form, scale), formatted(high, form, scale)
    return "" if DASH in limits else " to ".join(limits)


def p_value(p: float) -> str:
    """Return a p-value with two digits, or that it is tiny."""
    return "p < 0.001" if p < 0.001 else f"p {p:.2g}" if p < 0.1 else f"p {p:.2f}"


def join_words(parts: Sequence[str]) -> str:
    """Return `a, b and c`."""
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


def describe_changes(effects: Sequence[Effect], unit: str, form: str = "{:.1f}") -> str:
    """Return what effects come to, in words: each with its interval, or of many the counts and the best.

    As in `a improves by 9.0 points (95 % interval 6.7 to 11.3) and b improves by 7.7 points (5.4 to 10.0)`.
    """
    if len(effects) > FEW:
        counts = {kind: sum(e.direction == kind for e in effects) for kind in VERBS}
        verbs = [f"{count} {VERBS[kind][count > 1]}" for kind, count in counts.items() if count]
        best = max(effects, key=lambda e: e.value)
        return f"{join_words(verbs)}, of {len(effects)} in all. Best: {describe_changes([best], unit, form)}"
    clauses: list[str] = []
    for label, _, direction, value, low, high in effects:
        if direction:  # the verb says the sign
            low, high = sorted((direction * low, direction * high))
        signed = form if direction else form.replace("{:", "{:+")
        size, limits = formatted((direction or 1) * value, signed), format_interval(low, high, signed)
        interval = f"{'' if clauses else '95 % interval '}{limits}" if limits else "without an interval"
        detail = f"by {size} {unit} ({interval})" if direction else f"({size} {unit}, {interval})"
        clauses.append(f"{label} {VERBS[direction][0]} {detail}")
    return join_words(clauses)
