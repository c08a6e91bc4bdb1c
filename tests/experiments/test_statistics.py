"""Intervals and tests against scipy and by coverage; verdicts by their rule."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from experiments.statistics import difference, estimate, holm, verdict


def test_an_interval_covers_the_mean_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    samples = rng.normal(3.0, 2.0, size=(4000, 5))
    inside = [found.low <= 3.0 <= found.high for found in map(estimate, samples.tolist())]
    assert abs(np.mean(inside) - 0.95) < 0.012


def test_a_paired_difference_is_the_paired_t_test() -> None:
    rng = np.random.default_rng(1)
    ours, theirs = rng.normal(size=8), rng.normal(size=8)
    found, known = difference(ours, theirs), stats.ttest_rel(ours, theirs)
    assert found.p == pytest.approx(known.pvalue)
    interval = known.confidence_interval()
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high))


def test_a_single_repetition_has_no_interval() -> None:
    assert math.isnan(estimate([1.0]).low)
    assert math.isnan(difference([1.0], [2.0]).p)


def test_equal_values_do_not_differ() -> None:
    assert difference([1.0, 2.0], [1.0, 2.0]).p == 1.0
    assert difference([2.0, 3.0], [1.0, 2.0]).p == 0.0


def test_holm_is_holm() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, math.nan, 0.6])[0] == pytest.approx(1.0)
    assert math.isnan(holm([0.5, math.nan])[1])


@pytest.mark.parametrize(
    ("shifts", "answer"),
    [((-1.0, -1.0), "yes"), ((-1.0, 0.0), "undecided"), ((1.0, 1.0), "no"), ((1.0, -1.0), "undecided")],
)
def test_a_verdict_needs_every_comparison(shifts: tuple[float, float], answer: str) -> None:
    """Losses: smaller is better, so `ours` lies `shift` beside the others."""
    rng = np.random.default_rng(2)
    other = rng.normal(size=10)
    others = [other - shift + rng.normal(scale=0.05, size=10) for shift in shifts]
    found = verdict(other.tolist(), [o.tolist() for o in others], least=True)
    assert found.answer == answer
    assert found.n == 10


def test_a_tie_decides_nothing() -> None:
    same = [1.0, 2.0, 4.0]
    assert verdict(same, [same], least=True).answer == "undecided"
    assert verdict(same, [same, [2.0, 3.0, 5.0]], least=True).answer == "undecided"


def test_a_negligible_gain_is_no_gain() -> None:
    rng = np.random.default_rng(3)
    other = rng.normal(size=20)
    ours = other - 0.01 + rng.normal(scale=0.001, size=20)
    assert verdict(ours.tolist(), [other.tolist()], least=True).answer == "yes"
    assert verdict(ours.tolist(), [other.tolist()], least=True, negligible=0.1).answer == "no"
