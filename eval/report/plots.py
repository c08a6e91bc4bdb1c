"""The report's figures, each for one width of the page. Text comes from data: figures show it as it is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from common.page.figures import (
    INK,
    MUTED,
    NARROW,
    PAPER,
    Curve,
    Panel,
    colour,
    compact,
    css_colour,
    curves_figure,
    marker,
    shortened,
    style,
    svg,
)
from common.untrusted import number
from eval.stats import Interval

COLUMNS = 3  # of panels where the page is wide
ROW, HEAD = 0.19, 0.62  # inches per model, and per panel for title and scale
Point = tuple[float, float, float]  # accuracy with its interval, as shares
JUDGED = (1, 11, 2)  # colours of win, tie and loss
JUDGED_COLOURS = [css_colour(index) for index in JUDGED]
Bar = tuple[str, str, Sequence[tuple[float, Interval]]]  # names, and the shares of win, tie and loss
Stage = tuple[float, float, float, float]  # steps or tokens, and the Point there


def accuracy_figure(
    panels: Sequence[tuple[str, Sequence[Point | None], float]], models: Sequence[str], width: float
) -> str:
    """A panel per task: accuracy and interval of each model in its row.

    panels: (title, a point per model, chance). The first model is the baseline: its accuracy is drawn
    through all rows. Of a single model the tasks are the rows of one panel.
    """
    if len(models) == 1:
        return _one_model(panels, width)
    columns = min(COLUMNS if width > NARROW else 1, len(panels))
    lines = math.ceil(len(panels) / columns)
    name_width = 0.075 * max(len(shortened(m)) for m in models) + 0.15
    panel_width = min(3.4, (width - name_width) / columns)
    size = (name_width + panel_width * columns, lines * (HEAD + ROW * len(models)))
    with style():
        figure, grid = plt.subplots(lines, columns, figsize=size, squeeze=False)
        for i, axes in enumerate(grid.flat):
            if i >= len(panels):
                axes.set_visible(False)
                continue
            _panel(axes, *panels[i])
            axes.set_yticks(range(len(models)), [shortened(m) for m in models] if i % columns == 0 else [])
        bottom = 0.3 / size[1]
        figure.subplots_adjust(
            left=name_width / size[0],
            right=0.985,
            top=1 - 0.26 / size[1],
            bottom=bottom,
            wspace=0.16,
            hspace=HEAD / (ROW * len(models)),
        )
        return svg(figure, f"accuracy-{_slug(width)}", "Accuracy of each model on each task")


def _one_model(panels: Sequence[tuple[str, Sequence[Point | None], float]], width: float) -> str:
    """Accuracy, interval and chance of each task on one scale."""
    with style():
        figure, axes = plt.subplots(figsize=(width, 0.45 + 0.25 * len(panels)))
        for i, (_, (point, *_), chance) in enumerate(panels):
            axes.plot([100 * chance] * 2, [i - 0.32, i + 0.32], color=MUTED, linewidth=1.2, linestyle=":")
            if point is not None:
                _point(axes, i, point, 0)
        axes.set_yticks(range(len(panels)), [shortened(title) for title, _, _ in panels])
        axes.set_ylim(len(panels) - 0.45, -0.55)
        axes.set_xlim(0, 100)
        _plain(axes)
        return svg(figure, f"accuracy-{_slug(width)}", "Accuracy on each task")


def _point(axes: Axes, place: int, point: Point, series: int) -> None:
    value, least, most = (100 * x for x in point)
    axes.plot([least, most], [place] * 2, color=colour(series), linewidth=1.6, clip_on=False)
    style: Any = {"marker": marker(series), "markersize": 5.5, "clip_on": False, "zorder": 3}
    axes.plot([value], [place], color=colour(series), **style)


def _plain(axes: Axes) -> None:
    """Rows with names, without lines of their own."""
    axes.tick_params(axis="both", length=0)
    axes.tick_params(axis="y", labelcolor=INK)
    axes.grid(axis="y", visible=False)
    axes.spines["left"].set_visible(False)


def _panel(axes: Axes, title: str, points: Sequence[Point | None], chance: float) -> None:
    shown = [100 * value for point in points if point is not None for value in point]
    low, high = min(shown), max(shown)
    reach = max(high - low, 2.0)
    if low - reach <= 100 * chance <= high + reach:  # far away it would squeeze the models together
        low, high = min(low, 100 * chance), max(high, 100 * chance)
        axes.axvline(100 * chance, color=MUTED, linewidth=1.1, linestyle=":", zorder=1)
    margin = 0.05 * max(high - low, 2.0)
    axes.set_xlim(low - margin, high + margin)
    axes.set_ylim(len(points) - 0.45, -0.55)
    if points[0] is not None and len(points) > 1:
        axes.axvline(100 * points[0][0], color=INK, linewidth=0.8, alpha=0.45, zorder=1)
    for i, point in enumerate(points):
        if point is not None:
            _point(axes, i, point, i)
    axes.set_title(shortened(title, 30))
    axes.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10], prune=None))
    ticks = [t for t in axes.get_xticks() if 0 <= t <= 100 and low - margin <= t <= high + margin]
    axes.set_xticks(ticks)
    _plain(axes)


def training_figure(logs: Sequence[tuple[int, list[dict[str, float]]]], width: float) -> str:
    """NLL and DEMD over training tokens; logs: (colour number, records of metrics.jsonl) of each model."""
    panels = [("nll", "NLL (nats per token)"), ("demd", "DEMD (expected transport cost)")]
    panels = [p for p in panels if any(_points(r, x) for _, r in logs for x in (p[0], f"validation_{p[0]}"))]
    drawn = [
        Panel(title, [Curve(i, _points(r, name), _points(r, f"validation_{name}")) for i, r in logs])
        for name, title in panels
    ]
    label = "Loss and transport cost over training"
    return curves_figure(drawn, len(drawn), "tokens", width, f"training-{_slug(width)}", label)


def scaling_figure(series: Sequence[list[Stage]], unit: str, width: float) -> str:
    """Mean accuracy over training; series: for each run [(steps or tokens, accuracy, low, high)]."""
    with style():
        figure, axes = plt.subplots(figsize=(width, 3.1))
        for i, points in enumerate(series):
            xs, ys, lows, highs = (list(x) for x in zip(*sorted(points), strict=True))
            shares = [[100 * x for x in values] for values in (ys, lows, highs)]
            axes.plot(xs, shares[0], color=colour(i), marker=marker(i), markersize=4.5)
            axes.fill_between(xs, shares[1], shares[2], color=colour(i), alpha=0.1, linewidth=0)
        axes.set_xlabel(f"training {unit}")
        axes.set_ylabel("mean accuracy (%)")
        axes.tick_params(length=0)
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.xaxis.set_major_formatter(compact)
        return svg(figure, f"scaling-{_slug(width)}", "Mean accuracy over training")


def judged_figure(bars: Sequence[Bar], width: float) -> str:
    """A stacked bar per comparison: win, tie, loss; lines on its edges: intervals of the win and the loss."""
    names = [shortened(f"{title} ({by})", 110 if width > NARROW else 44) for title, by, _ in bars]
    with style():
        figure, axes = plt.subplots(figsize=(width, 0.5 + 0.5 * len(bars)))
        for place, (_, _, shares) in enumerate(bars):
            left = 0.0
            for index, (value, _) in zip(JUDGED, shares, strict=True):
                axes.barh(place, 100 * value, left=left, height=0.4, color=colour(index), linewidth=0)
                if value > (0.07 if width > NARROW else 0.14):
                    where: Any = {"ha": "center", "va": "center", "color": PAPER, "fontsize": 9}
                    axes.text(left + 50 * value, place, f"{100 * value:.0f}", **where)
                left += 100 * value
            (_, win), _, (_, loss) = shares
            for low, high in ((win.low, win.high), (1 - loss.high, 1 - loss.low)):
                axes.plot([100 * low, 100 * high], [place + 0.27] * 2, color=INK, linewidth=1.4)
            axes.text(0, place - 0.24, names[place], ha="left", va="bottom", color=INK, fontsize=9)
        axes.set_yticks([])
        axes.set_ylim(len(bars) - 0.5, -0.75)
        axes.set_xlim(0, 100)
        axes.axvline(50, color=MUTED, linewidth=1.0, linestyle=":", zorder=3)
        _plain(axes)
        figure.subplots_adjust(left=0.01, right=0.99)
        return svg(figure, f"judged-{_slug(width)}", "Wins, ties and losses of each comparison")


def _points(records: Sequence[dict[str, float]], name: str) -> list[tuple[float, float]]:
    """(tokens, value) of the records that have a finite number there."""
    points = [(number(r.get("tokens")), number(r.get(name))) for r in records]
    return [(x, y) for x, y in points if x is not None and y is not None]


def _slug(width: float) -> str:
    return "narrow" if width == NARROW else "wide"
