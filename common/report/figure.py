"""Figures: dots with intervals in rows, and curves. page.html.jinja draws them as SVG.

Positions across are percentages and those downwards pixels, so that one drawing fits a wide screen, a phone
and paper; colours are the page's CSS variables.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from emo.common.report.numbers import formatted
from emo.common.untrusted import number

COLOURS, MARKERS = 12, 6  # of the page; the first colour, the baseline's, never comes again
DASHES = ("", "6 3", "2 3", "8 3 2 3")
MOST = 400  # points of a curve; of more, each stands for its neighbours
ROW, HEIGHT = 18, 170  # pixels of a row of dots, and of curves
Points = Sequence[tuple[float, float]]


class Style(NamedTuple):
    """How a series looks, which is never by its colour alone."""

    colour: str  # CSS
    marker: str  # id of its shape in the page
    dash: str


def style(series: int | None) -> Style:
    """Return the look of a series; None is one of many that are drawn in grey."""
    if series is None:
        return Style("var(--grey)", "m0", "")
    if series == 0:
        return Style("var(--s1)", "m0", "")
    turn, hue = divmod(series - 1, COLOURS - 1)
    shape = hue + 1 + turn
    return Style(f"var(--s{hue + 2})", f"m{shape % MARKERS}", DASHES[shape % len(DASHES)])


@dataclass
class Axis:
    """A scale from the least to the most of its values, with a little room, and its round numbers."""

    low: float
    high: float

    @classmethod
    def over(cls, values: Iterable[float], room: float = 0.04) -> Axis:
        """Return the axis of some values."""
        numbers = list(values) or [0.0]
        low, high = min(numbers), max(numbers)
        margin = room * (high - low) or abs(low) * 0.05 or 1.0
        return cls(low - margin, high + margin)

    def position(self, value: float) -> float:
        """Return where a value lies, from 0 to 1."""
        return (value - self.low) / (self.high - self.low)

    @property
    def ticks(self) -> list[tuple[float, str]]:
        """Return three to six round numbers: where each lies, and its text."""
        size = 10.0 ** math.floor(math.log10(self.high - self.low))
        step = next(s for k in (0.1, 0.2, 0.5, 1, 2) if (self.high - self.low) / (s := size * k) <= 6)
        values = [step * i for i in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]
        return [(self.position(value), compact(round(value, 12))) for value in values]


def compact(value: float) -> str:
    """Return 1500 as 1.5k and 2000000 as 2M."""
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return formatted(value / size, f"{{:g}}{letter}")
    return formatted(value, "{:g}")


class Dot(NamedTuple):
    """A value with its interval, a row of a panel."""

    label: str
    series: int | None
    value: float
    low: float
    high: float


@dataclass
class Dots:
    """A panel of rows on one scale."""

    title: str
    rows: Sequence[Dot]
    line: float | None = None  # drawn through all rows: zero, or chance

    def __bool__(self) -> bool:
        return bool(self.rows)

    @property
    def axis(self) -> Axis:
        """Return the scale, which has zero on it, and another line unless that would squeeze the rows."""
        values = [x for dot in self.rows for x in dot[2:] if math.isfinite(x)]
        low, high = min(values), max(values)
        reach = max(high - low, 0.02 * abs(high))
        if self.line is not None and (self.line == 0 or low - reach <= self.line <= high + reach):
            values.append(self.line)
        return Axis.over(values)


@dataclass
class Curve:
    """A series over training. Of many points each is the mean of neighbours, in a band of least and most."""

    series: int | None
    points: Points
    marks: Points = ()  # measurements of held-out data, drawn as circles
    band: Sequence[tuple[float, float, float]] = ()

    def __post_init__(self) -> None:
        most = MOST if self.series is not None else MOST // 4
        size = -(-len(self.points) // most)
        if size > 1 and not self.band:
            groups = [zip(*self.points[i : i + size], strict=True) for i in range(0, len(self.points), size)]
            columns = [(sum(xs) / len(xs), ys) for xs, ys in groups]
            self.points = [(x, sum(ys) / len(ys)) for x, ys in columns]
            self.band = [(x, min(ys), max(ys)) for x, ys in columns]


@dataclass
class Curves:
    """A panel of curves on one scale."""

    title: str
    curves: list[Curve]
    unit: str = "steps"  # of the horizontal axis
    axes: tuple[Axis, Axis] = field(init=False)

    def __bool__(self) -> bool:
        return bool(self.curves)

    def __post_init__(self) -> None:
        drawn = [p for c in self.curves for p in (*c.points, *c.marks)]
        edges = [y for c in self.curves for _, low, high in c.band for y in (low, high)]
        self.axes = Axis.over((x for x, _ in drawn), 0.01), Axis.over([*(y for _, y in drawn), *edges])

    def path(self, points: Points, size: float = 1000) -> str:
        """Return points as an SVG list in a square of `size`."""
        x, y = self.axes
        return " ".join(f"{size * x.position(a):.1f},{size * (1 - y.position(b)):.1f}" for a, b in points)

    def area(self, curve: Curve) -> str:
        """Return the outline of a curve's band."""
        lows = [(x, low) for x, low, _ in curve.band]
        return self.path([*lows, *((x, high) for x, _, high in reversed(curve.band))])


@dataclass
class Figure:
    """Panels side by side, or below each other where there is little room."""

    label: str  # what it shows; no two figures of a page have the same
    panels: Sequence[Dots | Curves]
    caption: str = ""
    legend: Sequence[tuple[int | None, str]] = ()
    greys: Sequence[str] = ()  # names of the series that are drawn in grey

    def __post_init__(self) -> None:
        self.panels = [panel for panel in self.panels if panel]

    def __bool__(self) -> bool:
        return bool(self.panels)


def pairs(records: Sequence[Mapping[str, object]], x: str, y: str) -> list[tuple[float, float]]:
    """Return (x, y) of the records that have a finite number for both."""
    values = [(number(r.get(x)), number(r.get(y))) for r in records]
    return [(a, b) for a, b in values if a is not None and b is not None]
