"""Intervals and tests against scipy, verdicts by their rule; test_coverage.py has the coverage."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from experiments.statistics import at_an_end, difference, estimate, holm, verdict


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
    [((-1.0, -1.0), "yes"), ((-1.0, 0.0), "undecided"), ((1.0, 1.0), "no"), ((1.0, -1.0), "no")],
)
def test_yes_needs_every_comparison_and_no_a_single_one(shifts: tuple[float, float], answer: str) -> None:
    """Losses: smaller is better, so `ours` lies `shift` beside the others."""
    rng = np.random.default_rng(2)
    other = rng.normal(size=10)
    others = [other - shift + rng.normal(scale=0.05, size=10) for shift in shifts]
    found = verdict(other.tolist(), [o.tolist() for o in others], least=True)
    assert found.answer == answer
    assert found.n == 10


def test_a_refutation_is_reported_with_the_comparison_that_refutes() -> None:
    """One control is beaten by far, the other wins clearly, a third is far worse on average but uncertain."""
    rng = np.random.default_rng(4)
    ours = rng.normal(size=8)
    clear, beaten = ours - 0.1 + rng.normal(scale=0.01, size=8), ours + 5
    vague = ours - 1 + rng.normal(scale=20, size=8)
    answer = verdict(ours.tolist(), [beaten.tolist(), vague.tolist(), clear.tolist()], least=True)
    assert answer.answer == "no" and answer.high < 0 and answer.effect == pytest.approx(-0.1, abs=0.02)


def test_a_value_at_an_end_of_its_grid() -> None:
    assert [at_an_end(rate, [1e-3, 3e-3, 9e-3]) for rate in (1e-3, 3e-3, 9e-3)] == [True, False, True]
    assert not at_an_end(1e-3, [1e-3])  # nothing was chosen


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
