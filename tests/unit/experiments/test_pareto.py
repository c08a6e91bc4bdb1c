"""Pareto fronts against dense numeric integration, and fronts without a common range."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emo.experiments.pareto import front_gap, pareto_front

COORDINATE = st.floats(-10, 10).map(lambda x: round(x, 3))
POINTS = st.lists(st.tuples(COORDINATE, COORDINATE), min_size=1, max_size=8)


@given(POINTS)
def test_a_front_has_the_pareto_optimal_points(points: list[tuple[float, float]]) -> None:
    corners = pareto_front(points)
    for x, y in points:
        better = [p for p in points if p[0] <= x and p[1] <= y and p != (x, y)]
        assert ((x, y) in corners) == (not better)


@given(POINTS, POINTS)
def test_a_gap_is_the_mean_difference_and_changes_sign(a: list[tuple], b: list[tuple]) -> None:
    value, (ours, reference) = front_gap(a, b), (pareto_front(a), pareto_front(b))
    low, high = max(ours[0][0], reference[0][0]), min(ours[-1][0], reference[-1][0])
    if low >= high:
        assert math.isnan(value)
        return
    middle = low + (np.arange(20_000) + 0.5) / 20_000 * (high - low)
    curves = [np.interp(middle, *zip(*points, strict=True)) for points in (ours, reference)]
    assert value == pytest.approx(float((curves[0] - curves[1]).mean()), abs=1e-2)
    assert front_gap(b, a) == pytest.approx(-value, abs=1e-9)


def test_fronts_ignore_points_that_are_not_finite() -> None:
    assert pareto_front([(1.0, math.nan), (2.0, 1.0), (3.0, 0.0)]) == [(2.0, 1.0), (3.0, 0.0)]
    assert math.isnan(front_gap([(1.0, math.inf)], [(1.0, 2.0), (2.0, 1.0)]))
