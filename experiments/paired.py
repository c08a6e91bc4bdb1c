"""Compare two objectives over test rows and training seeds.

    python -m emo.experiments.paired RESULTS --a emo-1,emo-2,emo-3 --b mle-1,mle-2,mle-3

RESULTS is the output of `emo eval`. The i-th models of both lists have the same seed. Prints the difference
A - B of the accuracy of each task and of their mean, in points with 95 % intervals.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy.stats import t

from emo.common.errors import UserError, exit_code_of
from emo.eval.report.compare import require_same_rows
from emo.eval.results.directory import Model, find_model, is_right, read_models

NORMAL = 1.96  # quantile of a 95 % interval
POWER = 0.84  # standard errors between the quantiles of 50 % and of 80 %


class Estimate(NamedTuple):
    """A difference and its standard error, as shares of 1."""

    difference: float
    error: float
    quantile: float  # standard errors in half of the 95 % interval

    @property
    def half_width(self) -> float:
        """Return half of the 95 % interval."""
        return self.error * self.quantile

    @property
    def detectable(self) -> float:
        """Return the effect that is found four times out of five."""
        return self.half_width + POWER * self.error

    def __str__(self) -> str:
        low, high = (100 * (self.difference + sign * self.half_width) for sign in (-1, 1))
        return f"{100 * self.difference:+.1f} ({low:+.1f} to {high:+.1f})"


def row_weights(model: Model, task: str) -> np.ndarray:
    """Return the weight of each row in a task's accuracy, which is the mean over its groups if it has any."""
    grouped = model.results[task]["groups"]
    groups = [str(record["group"]) if grouped else "" for record in model.read_records(task)]
    names, inverse, counts = np.unique(groups, return_inverse=True, return_counts=True)
    return 1 / (len(names) * counts[inverse])


def compare_seeds(differences: Sequence[np.ndarray], weights: Sequence[np.ndarray]) -> Estimate:
    """Estimate the mean over tasks of paired differences.

    The variance is that over rows of the mean over seeds, plus that over seeds of the mean over rows. It is
    rather too large, because the second contains a part of the first. The quantile is
    the mean of the normal one for rows and Student's for seeds, weighted by the two variances (Cochran 1964).

    Args:
        differences: Of each task, [seeds, rows]: right (1) or wrong (0) of A minus that of B.
        weights: Of each task, [rows]: weights of the rows, which sum to 1.
    """
    by_seed = np.mean([d @ w for d, w in zip(differences, weights, strict=True)], axis=0)
    rows = 0.0
    for difference, weight in zip(differences, weights, strict=True):
        mean = difference.mean(0)
        rows += float(weight**2 @ (mean - weight @ mean) ** 2)
    rows /= len(differences) ** 2
    count = len(by_seed)
    seeds = float(by_seed.var(ddof=1)) / count if count > 1 else 0.0
    variance = rows + seeds
    quantile = NORMAL
    if seeds:
        quantile = (rows * NORMAL + seeds * float(t.ppf(0.975, count - 1))) / variance
    return Estimate(float(by_seed.mean()), math.sqrt(variance), quantile)


def report(results: Path, a: Sequence[str], b: Sequence[str]) -> None:
    """Print the comparison. Raises UserError for unknown models."""
    if len(a) != len(b):
        raise UserError(
            f"--a has {len(a)} models and --b {len(b)}; give one of each per seed", code="option-value"
        )
    models = read_models([results])
    pairs = [(find_model(models, x), find_model(models, y)) for x, y in zip(a, b, strict=True)]
    tasks = sorted(set[str].intersection(*({*model.results} for pair in pairs for model in pair)))
    if not tasks:
        raise UserError(
            "the models have no task in common; evaluate them on the same tasks", code="not-comparable"
        )
    for task in tasks:
        for model in itertools.chain(*pairs):
            first = pairs[0][0]
            require_same_rows(first, model, task, first.results[task], model.results[task])
    weights = [row_weights(pairs[0][0], task) for task in tasks]
    differences = []
    for task in tasks:
        right = [[[is_right(r) for r in model.read_records(task)] for model in pair] for pair in pairs]
        differences.append(np.array([np.subtract(x, y, dtype=float) for x, y in right]))
    for task, difference, weight in zip(tasks, differences, weights, strict=True):
        print(f"{task}: {compare_seeds([difference], [weight])}")
    mean = compare_seeds(differences, weights)
    print(f"mean: {mean}; half-width {100 * mean.half_width:.2f}, detectable {100 * mean.detectable:.1f}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m emo.experiments.paired", description=__doc__)
    parser.add_argument("results", type=Path)
    for name in ("--a", "--b"):
        parser.add_argument(name, required=True, type=lambda text: text.split(","), help="models, by seed")
    args = parser.parse_args()

    def run() -> int:
        report(args.results, args.a, args.b)
        return 0

    return exit_code_of(run)


if __name__ == "__main__":
    sys.exit(main())
