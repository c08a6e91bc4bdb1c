"""Numbers as reports write them, and the sentences that say what changed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from common.untrusted import number

DASH = "\u2013"
MINUS = "\u2212"
FEW = 4  # effects that a sentence names one by one
VERBS = {
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
    return MINUS + text[1:] if text.startswith("-") else text


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


def listed(parts: Sequence[str], last: str = "and") -> str:
    """Return `a, b and c`."""
    return f" {last} ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


def changes(effects: Sequence[Effect], unit: str, form: str = "{:.1f}") -> str:
    """Return what effects come to, in words: each with its interval, or of many the counts and the best.

    As in `mle improves by 9.0 points (95 % interval 6.7 to 11.3) and emo by 7.7 (5.4 to 10.0)`.
    """
    kinds = {kind: [e for e in effects if e.direction == kind] for kind in VERBS}
    if len(effects) > FEW:
        counts = [f"{len(group)} {VERBS[kind][len(group) > 1]}" for kind, group in kinds.items() if group]
        best = max(effects, key=lambda e: e.value)
        return f"{listed(counts)}, of {len(effects)} in all. Best: {changes([best], unit, form)}"
    clauses: list[str] = []
    for kind, group in kinds.items():
        parts: list[str] = []
        for effect in group:
            first = not (clauses or parts)
            size, limits = _size(effect, form)
            note = f"95 % interval {limits}" if limits and first else limits
            size += f" {unit}" * first
            if kind:
                verb = "by" if parts else f"{VERBS[kind][0]} by"
                parts.append(f"{effect.label} {verb} {size}{f' ({note})' if note else ''}")
            else:
                parts.append(f"{effect.label} {VERBS[kind][0]} ({size}, {note or 'without an interval'})")
        clauses += [listed(parts)] if parts else []
    return ", ".join(clauses)


def difference(effect: Effect, other: str, unit: str, form: str = "{:.1f}") -> str:
    """Return how something compares with `other`, as in `emo and mle do not differ measurably: ...`."""
    size, limits = _size(effect, form)
    interval = f"95 % interval {limits}" if limits else "without an interval"
    if not effect.direction:
        return f"{effect.label} and {other} do not differ measurably: {size} {unit} ({interval})"
    word = "better" if effect.direction > 0 else "worse"
    return f"{effect.label} is {word} than {other} by {size} {unit} ({interval})"


def sentence(text: str) -> str:
    """Return a clause as a sentence; a name that it begins with keeps its case."""
    return text if text.endswith(".") else f"{text}."


def _size(effect: Effect, form: str) -> tuple[str, str]:
    """Return size and interval: without a sign where a verb tells the direction."""
    low, high, sign = effect.low, effect.high, effect.direction
    if not sign:
        form = form.replace("{:", "{:+")
        return formatted(effect.value, form), between(low, high, form)
    low, high = sorted((sign * low, sign * high))
    return formatted(sign * effect.value, form), between(low, high, form)
