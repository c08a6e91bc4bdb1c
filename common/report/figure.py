"""Figures of curves and maps, drawn as SVG by Matplotlib.

Colours are CSS variables of the page, so that one drawing works in light mode, in dark mode and in print.
"""

from __future__ import annotations

import io
import itertools
import logging
import re
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup, escape

from ..io.untrusted import number
from ..text import on_one_line
from .numbers import Effect, formatted

COLOURS = 12  # of the page; the first is reserved for the baseline
MARKERS = {
    "o": "●",
    "s": "■",
    "D": "◆",
    "^": "▲",
    "v": "▼",
    "P": "✚",
}  # Matplotlib's markers, and their characters
# Matplotlib's dashes, and those of SVG for a line of 2 pixels.
DASHES = {"-": "none", "--": "7.4 3.2", "-.": "12.8 3.2 2 3.2", ":": "2 3.3"}
# Objectives with a fixed series, so that an objective looks the same on all pages. "" is an untrained base.
SERIES = {"": 0, "mle": 1, "emo": 2, "tailr": 3, "mixce": 4}
# While Matplotlib draws, #0000XX stands for the CSS variable with index XX. Black is the first.
VARIABLES = ("muted", "rule", "grey", *(f"s{i + 1}" for i in range(COLOURS)))
# Colours of figures in separate files: the light mode of the page, with a darker grey.
LIGHT = dict(zip(VARIABLES, (
    *("#67635b", "#dedad1", "#a8a29e", "#1d1c1a", "#2f6ca8", "#c0711a", "#2f8558", "#b5413a"),
    *("#7558b0", "#12898c", "#b8488f", "#857a14", "#7b4f2e", "#6d9bd1", "#8a8578"),
), strict=True))  # fmt: skip
MAX_POINTS = 400  # of a curve; more points are averaged in groups
Points = Sequence[tuple[float, float]]
Band = Sequence[tuple[float, float, float]]  # (x, low, high)


def style(series: int | None) -> tuple[str, str, str]:
    """Return the CSS variable, marker and dashes of a series. Series never differ by colour alone.

    None is one of many series that are drawn in grey.
    """
    if not series:
        return "grey" if series is None else "s1", "o", "-"
    turn, hue = divmod(series - 1, COLOURS - 1)
    shape = hue + 1 + turn
    return f"s{hue + 2}", [*MARKERS][shape % len(MARKERS)], [*DASHES][(shape - 1) % len(DASHES)]


def choose_series(objectives: Sequence[str]) -> list[int]:
    """Return a distinct series for each model by its objective. "" is a base model."""
    chosen: dict[int, int] = {}
    for i in sorted(range(len(objectives)), key=lambda i: objectives[i] in objectives[:i]):
        name = objectives[i]
        first = SERIES.get(name, len(SERIES) + zlib.crc32(name.encode()) % (COLOURS - len(SERIES)))
        free = itertools.chain([first], itertools.count(len(SERIES)))
        chosen[i] = next(series for series in free if series not in chosen.values())
    return [chosen[i] for i in range(len(objectives))]


def colour(variable: str) -> str:
    """Return the placeholder colour of a CSS variable."""
    return f"#0000{VARIABLES.index(variable):02x}"


@dataclass
class Curve:
    """A series over training."""

    series: int | None
    points: Points
    marks: Points = ()  # measurements of held-out data, drawn as circles
    band: Band = ()


@dataclass
class Curves:
    """A panel of curves on one scale."""

    title: str
    rows: Sequence[Curve]
    unit: str = "steps"  # of the horizontal axis
    inches = 2.2

    def draw(self, axes: Any) -> None:
        """Draw the curves. Many points are averaged in groups, with a band from minimum to maximum."""
        from matplotlib.ticker import EngFormatter

        for curve in self.rows:
            variable, marker, dash = style(curve.series)
            paint = colour(variable)
            size = -(-len(curve.points) // (MAX_POINTS if curve.series is not None else MAX_POINTS // 4))
            points = curve.points
            band = curve.band
            if size > 1 and not band:
                points, band = _average(points, size)
            if points:
                marker = "" if curve.series is None else marker
                options = {"linestyle": dash, "marker": marker, "markevery": [-1]}
                axes.plot(*zip(*points, strict=True), color=paint, **options)
            if band and curve.series is not None:
                axes.fill_between(*zip(*band, strict=True), color=paint, alpha=0.22, linewidth=0)
            if curve.marks:
                options = {"linestyle": "", "marker": "o", "fillstyle": "none"}
                axes.plot(*zip(*curve.marks, strict=True), color=paint, **options)
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.set_xlabel(f"training {self.unit}")


def _average(points: Points, size: int) -> tuple[Points, Band]:
    """Return the means of groups of `size` points, and the band from their minimum to their maximum."""
    groups = [zip(*points[i : i + size], strict=True) for i in range(0, len(points), size)]
    means = [(sum(xs) / len(xs), sum(ys) / len(ys), min(ys), max(ys)) for xs, ys in groups]
    return [mean[:2] for mean in means], [(x, low, high) for x, _, low, high in means]


@dataclass
class Cells:
    """A panel of effects in a grid. The colour shows better or worse, and its strength the size.

    Unclear effects are numbers without a colour. On narrow screens the panel scrolls.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[tuple[str, Sequence[Effect | None]]]  # names, and an effect for each column
    unit: str  # of the horizontal axis

    @property
    def inches(self) -> float:
        """Return the panel's height."""
        return 0.7 + 0.24 * len(self.rows)

    def draw(self, axes: Any) -> None:
        """Draw the panel on Matplotlib's axes."""
        effects = [effect for _, row in self.rows for effect in row if effect is not None]
        largest = max((abs(effect.value) for effect in effects if effect.direction), default=1.0)
        for y, (_, row) in enumerate(self.rows):
            for x, effect in enumerate(row):
                if effect is None:
                    continue
                if effect.direction:
                    paint = colour("s2" if effect.direction > 0 else "s3")
                    strength = 0.2 + 0.6 * abs(effect.value) / largest
                    axes.fill([x - 0.5, x + 0.5, x + 0.5, x - 0.5], [y - 0.5, y - 0.5, y + 0.5, y + 0.5],
                              color=paint, alpha=strength, linewidth=0)  # fmt: skip
                axes.text(x, y, formatted(effect.value, "{:+.3f}"), ha="center", va="center", fontsize=7.5)
        axes.set_xticks(range(len(self.columns)), self.columns)
        axes.set_yticks(range(len(self.rows)), [name for name, _ in self.rows])
        axes.tick_params(length=0)
        axes.grid(visible=False)
        axes.set_xlim(-0.5, len(self.columns) - 0.5)
        axes.set_ylim(len(self.rows) - 0.5, -0.5)
        axes.set_xlabel(self.unit)


@dataclass
class Figure:
    """Panels side by side, or below each other on narrow screens."""

    label: str
    panels: Sequence[Curves | Cells]
    caption: str = ""
    legend: Sequence[tuple[int | None, str]] = ()
    greys: Sequence[str] = ()  # names of the series that are drawn in grey

    def __post_init__(self) -> None:
        self.panels = [panel for panel in self.panels if panel.rows]

    def __bool__(self) -> bool:
        return bool(self.panels)


def svg(panel: Curves | Cells, label: str, alone: bool) -> Markup:
    """Draw a panel as an image with a `label` that is unique on the page.

    Sizes are such that text has at least 10 pixels on a phone. alone: the figure has no other panel.
    """
    scrolls = isinstance(panel, Cells)
    look: dict[Any, Any] = {
        **{"font.size": 10.5 if alone and not scrolls else 9, "axes.linewidth": 0.6},
        **{"axes.grid": True, "grid.color": colour("rule"), "grid.linewidth": 0.6},
        **{"axes.formatter.useoffset": False, "text.parse_math": False, "lines.markersize": 4.5},
    }
    width = 7 if scrolls else 4.6 if alone else 3.5
    nothing = dict.fromkeys(["Date", "Creator", "Format", "Type"])
    size = (width, panel.inches)
    drawing = _render(
        label, look, size, lambda canvas: panel.draw(canvas.subplots()), transparent=True, metadata=nothing
    )
    text = re.sub(r".*?(?=<svg)|<style.*?</style>", "", drawing, count=2, flags=re.DOTALL)

    def tag(match: re.Match[str]) -> str:
        bare = re.sub(r'(?<=^<g) id="[^"]*"|font-family:[^;]*;|\n', "", match[0])
        return re.sub("#0000(..)", lambda index: f"var(--{VARIABLES[int(index[1], 16)]})", bare)

    text = re.sub("<[^>]+>", tag, text)
    return Markup(text.replace("<svg", f'<svg role="img" aria-label="{escape(on_one_line(label))}"', 1))


def svg_file(name: str, size: tuple[float, float], draw: Callable[[Any], None]) -> str:
    """Return a figure as a separate file. `draw` gets Matplotlib's figure of `size` inches."""
    look = {"font.size": 8, "axes.titlesize": 8.5, "axes.titlelocation": "left"}
    text = _render(name, look, size, draw, metadata={"Date": None, "Creator": None})
    for variable, value in LIGHT.items():
        text = text.replace(colour(variable), value)
    return text


def _render(
    name: str,
    look: dict[Any, Any],
    size: tuple[float, float],
    draw: Callable[[Any], None],
    **options: Any,
) -> str:
    """Return what `draw` draws as SVG, the same bytes each time.

    Args:
        name: Unique among the figures of a page.
        look: Matplotlib's settings besides those that all figures share.
        size: Width and height in inches.
        draw: Gets Matplotlib's figure.
        options: Options of Matplotlib's `savefig`.
    """
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # no warning about a read-only home
    import matplotlib
    from matplotlib.figure import Figure as Canvas

    shared: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": name}
    shared |= {"axes.spines.top": False, "axes.spines.right": False}
    file = io.StringIO()
    with matplotlib.rc_context(shared | look), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about characters that the font lacks
        canvas = Canvas(size, layout="constrained")
        draw(canvas)
        canvas.savefig(file, format="svg", **options)
    return file.getvalue()


def mean_points(records: Sequence[Mapping[str, object]], x: str, y: str) -> list[tuple[float, float]]:
    """Return `finite_points` of means since the previous record.

    The last record often covers fewer steps. Its mean is joined with the one before, so that the curve does
    not end in a noisy jump.
    """
    points = finite_points(records, x, y)
    if len(points) > 2:
        (start, _), (middle, before), (end, last) = points[-3:]
        full, short = middle - start, end - middle
        if 0 < short < 0.75 * full:
            points[-2:] = [(end, (before * full + last * short) / (full + short))]
    return points


def finite_points(records: Sequence[Mapping[str, object]], x: str, y: str) -> list[tuple[float, float]]:
    """Return (x, y) of the records in which both are finite numbers."""
    values = [(number(r.get(x)), number(r.get(y))) for r in records]
    return [(a, b) for a, b in values if a is not None and b is not None]
