"""Formatting of numbers in reports, and sentences that describe changes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..io.untrusted import number

DASH = "\u2013"
MINUS = "\u2212"
FEW = 3  # effects that a sentence lists one by one
# Verbs by direction, singular and plural: of a change over time, and of a comparison of two models.
CHANGED = {
    1: ("improves", "improve"),
    -1: ("gets worse", "get worse"),
    0: ("shows no clear change", "show no clear change"),
}
COMPARED = {
    1: ("is better", "are better"),
    -1: ("is worse", "are worse"),
    0: ("shows no clear difference", "show no clear difference"),
}
Verbs = Mapping[int, tuple[str, str]]


class Effect(NamedTuple):
    """A number, for example a difference, with its 95 % interval and its series in figures."""

    label: str
    series: int | None
    direction: int  # +1 better, -1 worse, 0 unclear
    value: float
    low: float
    high: float


class Axis(NamedTuple):
    """The horizontal axis that effects in the rows of a table share."""

    ticks: tuple[float, ...]  # from one end to the other
    line: float | None  # reference value, for example zero or chance

    def at(self, value: float) -> float:
        """Return the position of a value in per cent of the axis."""
        low, high = self.ticks[0], self.ticks[-1]
        return 100 * min(1.0, max(0.0, (value - low) / (high - low)))


def axis_of(effects: Sequence[Effect], line: float | None = 0.0) -> Axis:
    """Return an axis for effects and the reference value."""
    from matplotlib.ticker import MaxNLocator

    values = [v for effect in effects for v in effect[3:] if number(v) is not None]
    values += [] if line is None else [line]
    ticks = MaxNLocator(4, steps=[1, 2, 5, 10]).tick_values(min(values, default=0), max(values, default=1))
    return Axis(tuple(map(float, ticks)), line)


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
    return "p\u00a0<\u00a00.001" if p < 0.001 else f"p\u00a0{p:.2g}" if p < 0.1 else f"p\u00a0{p:.2f}"


def join_words(parts: Sequence[str]) -> str:
    """Join words: `a, b and c`."""
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


def describe_effects(effects: Sequence[Effect], verbs: Verbs, unit: str, form: str = "{:.1f}") -> str:
    """Describe effects in words, one by one, or by counts and the best one if there are more than FEW.

    Example: `a improves by 9.0 points and b by 7.5, and c shows no clear change`. The intervals belong in a
    table.
    """
    known = [e for e in effects if number(e.low) is not None]
    groups = {kind: [e for e in known if e.direction == kind] for kind in verbs}
    if len(effects) > FEW:
        counts = [f"{len(group)} {verbs[kind][len(group) > 1]}" for kind, group in groups.items() if group]
        if unknown := len(effects) - len(known):
            counts.append(f"{unknown} without an interval")
        best = max(effects, key=lambda e: -math.inf if number(e.value) is None else e.value)
        return f"{join_words(counts)}. Best: {describe_effects([best], verbs, unit, form)}"
    clauses = []
    for kind, group in groups.items():
        if group and kind:
            sizes = [formatted(abs(effect.value), form) for effect in group]
            first = f"{group[0].label} {verbs[kind][0]} by {sizes[0]} {unit}"
            others = [f"{e.label} by {size}" for e, size in zip(group[1:], sizes[1:], strict=True)]
            clauses.append(join_words([first, *others]))
        elif group:
            clauses.append(f"{join_words([e.label for e in group])} {verbs[0][len(group) > 1]}")
    for e in (e for e in effects if e not in known):
        if e.value == 0:
            clauses.append(f"{e.label} {verbs[0][0]}")
            continue
        verb = verbs[1 if e.value > 0 else -1][0]
        clauses.append(f"{e.label} {verb} by {formatted(abs(e.value), form)} {unit} (no interval)")
    return ", and ".join(clauses)
