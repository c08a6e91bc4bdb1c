"""Differences over rows and seeds."""

from __future__ import annotations

import numpy as np
import pytest

from emo.experiments.paired import compare_seeds


@pytest.mark.parametrize(("seeds", "spread"), [(3, 0.01), (2, 0.05), (5, 0.05)])
def test_an_interval_covers_rows_and_seeds(seeds: int, spread: float) -> None:
    """Of 400 experiments with a known difference, at least 95 % of the intervals contain it.

    With the larger spread, the seeds differ by more than the choice of rows can explain.
    """
    rng = np.random.default_rng(0)
    weights = [np.full(200, 1 / 200)] * 4
    covered = 0
    for _ in range(400):
        effects = 0.02 + rng.normal(0, spread, (seeds, 1))
        drawn = [np.where(rng.random((seeds, 200)) < effects + 0.3, 1.0, 0.0) for _ in range(4)]
        found = compare_seeds([d - (rng.random((1, 200)) < 0.3) for d in drawn], weights)
        covered += abs(found.difference - 0.02) <= found.half_width
        assert found.detectable > found.half_width
    assert 0.95 <= covered / 400 <= 1


def test_groups_have_equal_weights() -> None:
    difference = np.array([[1.0, 0.0, 0.0, 0.0]])
    found = compare_seeds([difference], [np.array([1 / 2, 1 / 6, 1 / 6, 1 / 6])])
    assert found.difference == pytest.approx(0.5)
