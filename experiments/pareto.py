"""Loss at equal gain: Pareto fronts of runs.

A front is the polyline through the Pareto-optimal runs of a group. Lower is better in both measures, for
example nats per token on a new domain (gain) and on an old one (loss).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

Point = tuple[float, float]  # gain, loss


def pareto_front(points: Iterable[Point]) -> list[Point]:
    """Return the Pareto-optimal points, sorted by gain."""
    best: list[Point] = []
    for point in sorted(p for p in points if all(map(math.isfinite, p))):
        if not best or point[1] < best[-1][1]:
            best.append(point)
    return best


def front_gap(points: Iterable[Point], baseline: Iterable[Point]) -> float:
    """Return the mean additional loss over a baseline, over the range of gains that both fronts reach.

    This is the area between the polylines divided by the width of the range. NaN without a common range.
    """
    ours = pareto_front(points)
    reference = pareto_front(baseline)
    if not ours or not reference:
        return math.nan
    low = max(ours[0][0], reference[0][0])
    high = min(ours[-1][0], reference[-1][0])
    if not low < high:
        return math.nan
    corners = {low, high, *(x for x, _ in (*ours, *reference) if low < x < high)}
    x = np.array(sorted(corners))  # the difference is linear between corners
    loss, baseline_loss = (np.interp(x, *np.transpose(points)) for points in (ours, reference))
    return float(np.trapezoid(loss - baseline_loss, x) / (high - low))
