"""Intervals and tests against scipy, verdicts by their rule, and the coverage of every printed interval."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from emo.experiments.design import Experiment
from emo.experiments.known_truth.study import Contestant, Study
from emo.experiments.known_truth.study import answer as answer_of_study
from emo.experiments.report import answer as answer_of_sweep
from emo.experiments.statistics import at_an_end, difference, estimate, verdict

EXPERIMENTS = 1000  # simulated ones


def test_a_paired_difference_is_the_paired_t_test() -> None:
    """A single repetition decides nothing; equal values and equal gaps need no test."""
    rng = np.random.default_rng(1)
    ours, others = rng.normal(size=8), rng.normal(size=8)
    gap, test = difference(ours, others), stats.ttest_rel(ours, others)
    assert gap["p"] == pytest.approx(test.pvalue)
    interval = test.confidence_interval()
    assert (gap["low"], gap["high"]) == pytest.approx((interval.low, interval.high))
    assert math.isnan(estimate([1.0])["low"]) and math.isnan(difference([1.0], [2.0])["p"])
    assert [difference([x, x + 1], [1.0, 2.0])["p"] for x in (1.0, 2.0)] == [1.0, 0.0]
    assert [at_an_end(rate, [1e-3, 3e-3, 9e-3]) for rate in (1e-3, 3e-3, 9e-3)] == [True, False, True]
    assert not at_an_end(1e-3, [1e-3]) and not at_an_end("a", ["a", "b"])


@pytest.mark.parametrize(("shifts", "answer"), [((-1, -1), "yes"), ((-1, 0), "undecided"), ((1, -1), "no")])
def test_yes_needs_every_comparison_and_no_a_single_one(shifts: tuple[float, float], answer: str) -> None:
    """`ours` lies `shift` beside the others, and less is better; the clearest refutation is shown."""
    rng = np.random.default_rng(2)
    ours = rng.normal(size=10)
    others = [(ours - shift + rng.normal(scale=0.05, size=10)).tolist() for shift in shifts]
    result = verdict(ours.tolist(), others, least=True)
    assert (result["answer"], result["n"]) == (answer, 10)
    assert answer != "no" or result["effect"] == pytest.approx(-max(shifts), abs=0.1)


def simulate(seed: int, *shape: int) -> np.ndarray:
    """Return skewed values of mean 0 and variance 1."""
    rng = np.random.default_rng(seed)
    return (rng.gamma(8.0, size=(EXPERIMENTS, *shape)) - 8.0) / 8.0**0.5


def test_means_and_paired_differences() -> None:
    estimates = [estimate(values) for values in simulate(0, 10).tolist()]
    assert 0.92 <= np.mean([e["low"] <= 0 <= e["high"] for e in estimates]) <= 0.98
    shared, values, baseline = 10 * simulate(1, 3), simulate(2, 3), simulate(3, 3)
    gaps = [difference(a, b) for a, b in zip(shared + values, shared + baseline - 0.5, strict=True)]
    assert 0.92 <= np.mean([gap["low"] <= 0.5 <= gap["high"] for gap in gaps]) <= 0.98
    nulls = map(difference, shared + values, shared + baseline)
    assert 0.02 <= np.mean([gap["p"] < 0.05 for gap in nulls]) <= 0.08


@pytest.mark.parametrize("cells", [1, 6])
def test_answers_of_a_study(cells: int) -> None:
    """Effects vary between the truths of a cell, and between cells: the units are whatever was drawn last."""
    contestants = {name: Contestant(name=name) for name in ("mle", "emo")}
    questions = {"helps": {"better": "emo", "than": ["mle"]}}
    study = Study(out="unused", contestants=contestants, questions=questions, truths=5)
    of_truths = simulate(6, cells, 5)
    of_cells = 2 * simulate(7, cells, 1) if cells > 1 else 0
    covered = []
    for gains in 0.3 + of_truths + of_cells:
        results = [{"values": {"mle": {"js": gain.tolist()}, "emo": {"js": [0.0] * 5}}} for gain in gains]
        result = answer_of_study(study, "helps", results)
        covered.append(result["low"] <= 0.3 <= result["high"])
    assert 0.92 <= np.mean(covered) <= 0.98


def test_answers_of_a_sweep() -> None:
    """Groups that share their seeds are no further repetitions: each repetition counts once."""
    experiment = Experiment(
        out="unused",
        recipe="unused",
        axes={
            "objective": {name: {"objective.name": name} for name in ("mle", "emo")},
            "texts": {"data.limit": [1, 2, 3]},
            "seed": {"train.seed": [1, 2, 3, 4, 5]},
        },
        repeat="seed",
        compare={"axis": "objective", "baseline": "mle"},
        questions={"helps": {"text": "?", "better": "emo", "than": ["mle"], "outcome": "validation_nll"}},
    )
    of_seeds, noise = simulate(8, 1, 5), 0.3 * simulate(9, 3, 5)
    covered = []
    for gains in 0.3 + of_seeds + noise:
        rows = [
            {"labels": {"objective": name, "texts": str(i)}, "runs": [], "values": {"validation_nll": values}}
            for i, gain in enumerate(gains)
            for name, values in (("mle", gain.tolist()), ("emo", [0.0] * 5))
        ]
        result = answer_of_sweep(experiment, "helps", rows)
        covered.append(result["low"] <= 0.3 <= result["high"])
    assert 0.92 <= np.mean(covered) <= 0.98
