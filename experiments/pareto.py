"""What is lost at equal gain: fronts of runs that differ in how far they were trained.

A front is the polyline through the runs of a group of which no other gained and kept more. Both measures are
such that less is better, nats per token of a new domain and of an old one, say.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

Point = tuple[float, float]  # what was gained, what was lost


def pareto_front(points: Iterable[Point]) -> list[Point]:
    """Return the points that no other is better than in both, by their first measure."""
    best: list[Point] = []
    for point in sorted(p for p in points if all(map(math.isfinite, p))):
        if not best or point[1] < best[-1][1]:
            best.append(point)
    return best


def front_gap(points: Iterable[Point], baseline: Iterable[Point]) -> float:
    """Return how much more is lost than by a baseline, mean over the gains that both fronts reach.

    That is the area between the polylines over the width of their common range; NaN where there is none.
    """
    ours, reference = pareto_front(points), pareto_front(baseline)
    if not ours or not reference:
        return math.nan
    low, high = max(ours[0][0], reference[0][0]), min(ours[-1][0], reference[-1][0])
    if not low < high:
        return math.nan
    corners = {low, high, *(x for x, _ in (*ours, *reference) if low < x < high)}
    x = np.array(sorted(corners))  # between corners the difference is linear
    lost = [np.interp(x, *np.transpose(points)) for points in (ours, reference)]
    return float(np.trapezoid(lost[0] - lost[1], x) / (high - low))
