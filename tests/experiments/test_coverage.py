"""Every interval that an experiment prints holds the truth as often as it says: simulated experiments."""

from __future__ import annotations

import numpy as np
import pytest

from experiments.known_truth.study import Contestant, Study, _answer
from experiments.statistics import difference, estimate, verdict

EXPERIMENTS = 2000


def simulate(seed: int, *shape: int) -> np.ndarray:
    """Return skewed values of mean 0 and variance 1."""
    rng = np.random.default_rng(seed)
    return (rng.gamma(8.0, size=(EXPERIMENTS, *shape)) - 8.0) / 8.0**0.5


@pytest.mark.parametrize("n", [3, 5, 10])
def test_means(n: int) -> None:
    estimates = [estimate(values) for values in simulate(0, n).tolist()]
    assert 0.92 <= np.mean([e.low <= 0 <= e.high for e in estimates]) <= 0.98


@pytest.mark.parametrize("n", [3, 5, 10])
def test_paired_differences(n: int) -> None:
    shared, ours, theirs = 10 * simulate(1, n), simulate(2, n), simulate(3, n)
    gaps = [difference(a, b) for a, b in zip(shared + ours, shared + theirs - 0.5, strict=True)]
    assert 0.92 <= np.mean([g.low <= 0.5 <= g.high for g in gaps]) <= 0.98
    assert 0.02 <= np.mean([g.p < 0.05 for g in map(difference, shared + ours, shared + theirs)]) <= 0.08


def test_several_comparisons_hold_together() -> None:
    """Where all others are equally good, a verdict is wrong in at most 5 % of experiments."""
    ours, others = simulate(4, 5), simulate(5, 2, 5)
    wrong = [verdict(a, list(b), least=True).answer != "undecided" for a, b in zip(ours, others, strict=True)]
    assert np.mean(wrong) <= 0.08


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
        done = [{"values": {"mle": {"js": gain.tolist()}, "emo": {"js": [0.0] * 5}}} for gain in gains]
        answer = _answer(study, "helps", done)
        covered.append(answer["low"] <= 0.3 <= answer["high"])
    assert 0.92 <= np.mean(covered) <= 0.98


def test_answers_of_a_sweep() -> None:
    """Groups that share their seeds are no further repetitions: each repetition counts once."""
    from experiments.design import Experiment
    from experiments.table import _answer as answer_of_sweep

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
        answer = answer_of_sweep(experiment, "helps", rows)
        covered.append(answer["low"] <= 0.3 <= answer["high"])
    assert 0.92 <= np.mean(covered) <= 0.98
