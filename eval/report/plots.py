"""Figures as inline SVG whose colours are the page's CSS variables, so that they follow light and dark."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Stand-ins that the SVG is searched for; each becomes var(--...).
INK, MUTED, RULE, PAPER = "#010203", "#040506", "#070809", "#0a0b0c"
SERIES = ["#a10001", "#a10002", "#a10003", "#a10004", "#a10005", "#a10006"]
_VARIABLES = {INK: "--ink", MUTED: "--muted", RULE: "--rule", PAPER: "--paper"} | {
    colour: f"--s{i + 1}" for i, colour in enumerate(SERIES)
}
_STYLE: Any = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 10.5,
    "text.color": INK,
    "axes.edgecolor": RULE,
    "axes.labelcolor": MUTED,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "grid.color": RULE,
    "grid.linewidth": 0.6,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "figure.facecolor": "none",
    "legend.frameon": False,
    "lines.linewidth": 1.8,
}
_MARKERS = "osD^vP"


def colour(index: int) -> str:
    """Colour of the index-th model, the same in every figure."""
    return SERIES[index % len(SERIES)]


def accuracy_figure(
    titles: Sequence[str],
    models: Sequence[str],
    rows: dict[tuple[int, int], dict[str, Any]],
    chances: Sequence[float],
) -> str:
    """Accuracy and interval per task and model. rows: (task, model) -> row of the report."""
    with plt.rc_context(_STYLE):
        height = 0.6 + len(titles) * (0.24 + 0.17 * len(models))
        figure, axes = plt.subplots(figsize=(8.6, height))
        step = 0.72 / max(len(models), 1)
        for m, model in enumerate(models):
            xs: list[float] = []
            ys: list[float] = []
            errors: tuple[list[float], list[float]] = ([], [])
            for t in range(len(titles)):
                row = rows.get((t, m))
                if row is None:
                    continue
                xs.append(100 * row["accuracy"])
                ys.append(t + (m - (len(models) - 1) / 2) * step)
                errors[0].append(max(0.0, 100 * (row["accuracy"] - row["low"])))
                errors[1].append(max(0.0, 100 * (row["high"] - row["accuracy"])))
            style: Any = {"color": colour(m), "marker": _MARKERS[m % len(_MARKERS)], "markersize": 5.5}
            axes.errorbar(xs, ys, xerr=errors, linestyle="none", elinewidth=1.4, label=model, **style)
        for t, chance in enumerate(chances):
            label = "chance" if t == 0 else None
            axes.plot(
                [100 * chance] * 2,
                [t - 0.44, t + 0.44],
                color=MUTED,
                linewidth=1.2,
                linestyle=":",
                label=label,
            )
        axes.set_yticks(range(len(titles)), titles)
        axes.tick_params(axis="y", length=0, labelcolor=INK)
        axes.set_ylim(len(titles) - 0.45, -0.55)
        axes.set_xlim(0, 101.5)  # room for a marker at 100
        axes.set_xlabel("accuracy (%), 95 % bootstrap interval")
        axes.grid(axis="y", visible=False)
        axes.spines["left"].set_visible(False)
        _legend_above(axes, len(models) + 1)
        return _svg(figure, "accuracy")


def training_figure(logs: dict[str, tuple[int, list[dict[str, float]]]]) -> str:
    """NLL and DEMD over training tokens; logs: model -> (its colour number, records of metrics.jsonl)."""
    panels = [("nll", "NLL (nats per token)"), ("demd", "DEMD (expected transport cost)")]
    with plt.rc_context(_STYLE):
        figure, axes_row = plt.subplots(1, 2, figsize=(8.6, 3.1))
        for axes, (name, title) in zip(axes_row, panels, strict=True):
            for model, (number, records) in logs.items():
                points = _points(records, name)
                if points:
                    axes.plot(*zip(*points, strict=True), color=colour(number), label=model)
                held_out = _points(records, f"validation_{name}")
                if held_out:
                    axes.plot(
                        *zip(*held_out, strict=True),
                        color=colour(number),
                        linestyle="none",
                        marker="o",
                        markersize=4.5,
                        markerfacecolor=PAPER,
                    )
            axes.set_title(title)
            axes.set_xlabel("training tokens")
            axes.margins(x=0.02)
            axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(5))
            axes.xaxis.set_major_formatter(_tokens)
        handles, labels = axes_row[0].get_legend_handles_labels()
        if handles:
            figure.legend(handles, labels, loc="upper left", ncols=6, bbox_to_anchor=(0.04, 1.09))
        figure.tight_layout()
        return _svg(figure, "training")


def scaling_figure(series: dict[str, list[tuple[float, float, float, float]]], unit: str) -> str:
    """Mean accuracy over training; series: run -> [(steps or tokens, accuracy, low, high)]."""
    with plt.rc_context(_STYLE):
        figure, axes = plt.subplots(figsize=(8.6, 3.2))
        for i, (name, points) in enumerate(series.items()):
            xs, ys, lows, highs = zip(*sorted(points), strict=True)
            axes.plot(
                xs, [100 * y for y in ys], color=colour(i), marker=_MARKERS[i % 6], markersize=4.5, label=name
            )
            axes.fill_between(
                xs, [100 * x for x in lows], [100 * x for x in highs], color=colour(i), alpha=0.12
            )
        axes.set_xlabel(f"training {unit}")
        axes.set_ylabel("mean accuracy (%)")
        axes.xaxis.set_major_formatter(_tokens)
        _legend_above(axes, len(series))
        return _svg(figure, "scaling")


def _legend_above(axes: Axes, columns: int) -> None:
    axes.legend(
        loc="lower left", bbox_to_anchor=(-0.01, 1.0), ncols=columns, borderaxespad=0.2, handletextpad=0.4
    )


def _points(records: Sequence[dict[str, float]], name: str) -> list[tuple[float, float]]:
    return [(r["tokens"], r[name]) for r in records if r.get(name) is not None]


@matplotlib.ticker.FuncFormatter
def _tokens(value: float, _: int | None = None) -> str:
    """1500 -> 1.5k, 2000000 -> 2M."""
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"


def _svg(figure: Figure, name: str) -> str:
    """The figure as an <svg> element; `name` keeps its ids apart from other figures'."""
    buffer = io.StringIO()
    with plt.rc_context({"svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", bbox_inches="tight", metadata={"Date": None, "Creator": None})
    plt.close(figure)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.S)
    # Several figures stand in one page, and matplotlib numbers its parts per figure.
    text = re.sub(r'(id="|href="#|url\(#)', rf"\1{name}-", text)
    for stand_in, variable in _VARIABLES.items():
        text = text.replace(stand_in, f"var({variable})")
    text = re.sub(r"font-family: [^;\"]*;? ?", "", text)  # the page's own
    return re.sub(
        r'<svg ([^>]*?)width="[^"]*"', rf'<svg role="img" aria-label="{name}" \1width="100%"', text, count=1
    )
