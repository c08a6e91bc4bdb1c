"""Intervals and tests against SciPy, decision rules, and repetitions."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from emo.experiments.known_truth.study import Contestant, Study
from emo.experiments.known_truth.study import answer_cell as answer_of_study
from emo.experiments.sweeps.design import read_experiment
from emo.experiments.sweeps.report import answer_question as answer_of_sweep
from emo.experiments.sweeps.statistics import (
    estimate,
    is_grid_end,
    paired_difference,
    paired_verdict,
    rank_correlation,
)
from tests.helpers.sweeping import sweep


def test_a_paired_difference_is_the_paired_t_test() -> None:
    """A single repetition has no p value. It is 1 for equal values. Equal gaps have none."""
    rng = np.random.default_rng(1)
    ours, others = rng.normal(size=8), rng.normal(size=8)
    gap, test = paired_difference(ours, others), stats.ttest_rel(ours, others)
    assert gap["p"] == pytest.approx(test.pvalue)
    interval = test.confidence_interval()
    assert (gap["low"], gap["high"]) == pytest.approx((interval.low, interval.high))
    assert math.isnan(estimate([1.0])["low"]) and math.isnan(paired_difference([1.0], [2.0])["p"])
    assert paired_difference([1.0, 2.0], [1.0, 2.0])["p"] == 1.0
    for ours, others in (([2.0, 3.0], [1.0, 2.0]), ([8 / 12, 7 / 12], [7 / 12, 6 / 12])):
        gap = paired_difference(ours, others)
        assert math.isnan(gap["p"]) and math.isnan(gap["low"]) and gap["mean"] > 0


def test_a_rank_correlation_is_that_of_the_ranks_of_finite_pairs() -> None:
    g = np.random.default_rng(0)
    x = g.normal(size=40)
    y = np.exp(x) + 0.5 * g.normal(size=40)
    ranks = [np.argsort(np.argsort(side)) for side in (x, y)]
    found = rank_correlation([*x, math.nan, 1.0], [*y, 1.0, math.inf])
    assert found["n"] == 40 and found["mean"] == pytest.approx(np.corrcoef(*ranks)[0, 1])
    assert found["low"] < found["mean"] < found["high"] < 1
    again = rank_correlation(list(-x), list(y))  # ranks turned round
    assert again["mean"] == pytest.approx(-found["mean"])
    few = rank_correlation(
        [0.29, 0.30, 0.23, 0.26, 0.18, 0.44, 1.1], [61.6, 62.1, 61.9, 60.6, 61.0, 60.6, 61.7]
    )
    assert -1 <= few["low"] < few["mean"] < few["high"] <= 1  # some samples have one value only
    constant = rank_correlation([1.0, 2.0, 3.0], [5.0, 5.0, 5.0])
    assert math.isnan(constant["mean"]) and constant["n"] == 3


def test_grid_ends() -> None:
    assert [is_grid_end(rate, [1e-3, 3e-3, 9e-3]) for rate in (1e-3, 3e-3, 9e-3)] == [True, False, True]
    assert not is_grid_end(1e-3, [1e-3]) and not is_grid_end("a", ["a", "b"])


@pytest.mark.parametrize(("shifts", "answer"), [((-1, -1), "yes"), ((-1, 0), "undecided"), ((1, -1), "no")])
def test_yes_needs_all_comparisons_and_no_needs_one(shifts: tuple[float, float], answer: str) -> None:
    """`ours` differs from each of the others by one of the shifts. Lower is better."""
    rng = np.random.default_rng(2)
    ours = rng.normal(size=10)
    others = [(ours - shift + rng.normal(scale=0.05, size=10)).tolist() for shift in shifts]
    result = paired_verdict(ours.tolist(), others, least=True)
    assert (result["answer"], result["n"]) == (answer, 10)
    assert answer != "no" or result["effect"] == pytest.approx(-max(shifts), abs=0.1)
    level = 1 - 0.05 / len(shifts)  # Bonferroni
    intervals = [stats.ttest_rel(other, ours).confidence_interval(level) for other in others]
    assert any((result["low"], result["high"]) == pytest.approx((i.low, i.high)) for i in intervals)


@pytest.mark.parametrize("order", [1, -1])
def test_a_missing_value_leaves_the_numbers_of_a_refutation(order: int) -> None:
    ours, better, missing = [1.0, 1.1, 0.9], [0.5, 0.62, 0.38], [1.0, math.nan, 1.0]
    others = [better, missing][::order]
    result = paired_verdict(ours, others, least=True)
    assert result["answer"] == "no" and result["effect"] == pytest.approx(-0.5)
    undecided = paired_verdict(ours, [[2.0, 2.12, 1.88], missing][::order], least=True)
    assert undecided["answer"] == "undecided" and math.isnan(undecided["effect"])


def assert_interval_of(result: dict[str, Any], units: np.ndarray) -> None:
    """Assert that the verdict has the interval of these independent gains."""
    interval = stats.ttest_1samp(units, 0.0).confidence_interval()
    assert (result["low"], result["high"]) == pytest.approx((interval.low, interval.high))


def a_map(cells: int, truths: int, gains: np.ndarray) -> list[dict[str, Any]]:
    """Return the verdicts on a question in the cells of a map with these gains [cells, truths]."""
    contestants = {name: Contestant(name=name) for name in ("mle", "emo")}
    axes = {"vocabularies": [2], "shares": [0.0], "draws": [1]}
    questions = {"helps": {"better": "emo", "than": ["mle"]}}
    study = Study(out="unused", contestants=contestants, questions=questions, truths=truths, **axes)
    results = [{"values": {"mle": {"js": gain.tolist()}, "emo": {"js": [0.0] * truths}}} for gain in gains]
    return [answer_of_study(study, "helps", result, cells) for result in results]


def test_the_intervals_of_a_map_are_simultaneous() -> None:
    """In 95 % of 200 maps, all 12 intervals cover the truth."""
    cells, truths, maps = 12, 20, 200
    gains = np.random.default_rng(6).normal(size=(maps * cells, truths))
    covered = [cell["low"] <= 0 <= cell["high"] for cell in a_map(cells, truths, gains)]
    assert 0.92 < np.reshape(covered, (maps, cells)).all(axis=1).mean() < 0.98


def test_the_repetitions_of_a_sweep_are_its_seeds(tmp_path: Path) -> None:
    experiment = read_experiment(sweep(tmp_path, Path("unused.yaml")), [])
    gains = np.random.default_rng(8).normal(size=(3, 5))
    rows = [
        {"labels": {"objective": name, "texts": str(i)}, "runs": [], "values": {"validation_nll": values}}
        for i, gain in enumerate(gains.tolist())
        for name, values in (("mle", gain), ("emo", [0.0] * 5))
    ]
    assert_interval_of(answer_of_sweep(experiment, "helps", rows), gains.mean(axis=0))
