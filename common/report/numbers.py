"""Numbers as reports write them, and the sentences that say what changed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from emo.common.untrusted import number

DASH = "\u2013"
MINUS = "\u2212"
FEW = 4  # effects that a sentence names one by one
VERBS = {  # by direction, of one and of several
    1: ("improves", "improve"),
    -1: ("gets worse", "get worse"),
    0: ("shows no clear change", "show no clear change"),
}


class Effect(NamedTuple):
    """A difference with its 95 % interval; above zero is better."""

    label: str  # of what differs
    value: float
    low: float
    high: float
    direction: int  # +1 better, -1 worse, 0: it cannot be told


def formatted(value: Any, form: str = "{:,.0f}") -> str:
    """Return a number in a format, with a proper minus; a dash for whatever is no finite number."""
    finite = number(value)
    if finite is None:
        return DASH
    text = form.format(finite)
    if not any(c in "123456789" for c in text):  # +0.0 and -0.0
        text = text.lstrip("+-")
    return text.replace("-", MINUS, 1) if text.startswith("-") else text


def percent(share: float | None) -> str:
    """Return a share in per cent."""
    return DASH if share is None else formatted(100 * share, "{:.1f}")


def points(difference: float) -> str:
    """Return a difference of shares in percentage points, with its sign."""
    return formatted(100 * difference, "{:+.1f}")


def between(low: float, high: float, form: str = "{:.1f}", scale: float = 1) -> str:
    """Return an interval in words, as in `3.1 to 4.5`; empty without finite limits."""
    if not (math.isfinite(low) and math.isfinite(high)):
        return ""
    return f"{formatted(scale * low, form)} to {formatted(scale * high, form)}"


def p_value(p: float) -> str:
    """Return a p-value with two digits, or that it is tiny."""
    return "p < 0.001" if p < 0.001 else f"p {p:.2g}" if p < 0.1 else f"p {p:.2f}"


def listed(parts: Sequence[str]) -> str:
    """Return `a, b and c`."""
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


def changes(effects: Sequence[Effect], unit: str, form: str = "{:.1f}") -> str:
    """Return what effects come to, in words: each with its interval, or of many the counts and the best.

    As in `a improves by 9.0 points (95 % interval 6.7 to 11.3) and b improves by 7.7 points (5.4 to 10.0)`.
    """
    if len(effects) > FEW:
        counts = {kind: sum(e.direction == kind for e in effects) for kind in VERBS}
        verbs = [f"{count} {VERBS[kind][count > 1]}" for kind, count in counts.items() if count]
        best = max(effects, key=lambda e: e.value)
        return f"{listed(verbs)}, of {len(effects)} in all. Best: {changes([best], unit, form)}"
    clauses: list[str] = []
    for label, value, low, high, direction in effects:
        if direction:  # the verb says the sign
            low, high = sorted((direction * low, direction * high))
            size, limits = formatted(direction * value, form), between(low, high, form)
        else:
            signed = form.replace("{:", "{:+")
            size, limits = formatted(value, signed), between(low, high, signed)
        interval = f"{'' if clauses else '95 % interval '}{limits}" if limits else "without an interval"
        detail = f"by {size} {unit} ({interval})" if direction else f"({size} {unit}, {interval})"
        clauses.append(f"{label} {VERBS[direction][0]} {detail}")
    return listed(clauses)
