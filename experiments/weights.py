"""The gradient of each objective at the target's logit, by the target's probability.

    python -m emo.experiments.weights docs/reference/objectives.svg   # numbers and figure of objectives.md

The remaining probability is spread evenly over OTHERS tokens with a cost of 1. A second model gives the
target the probability STORED.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from emo.common.errors import ExitCode, exit_code_of
from emo.common.io.files import write_text
from emo.common.report.figure import svg_file
from emo.pipeline.loss import Objective, get_objective
from emo.pipeline.loss.objectives import BUILT_IN, LogitRows, claimed_gradient, compute_scalars

OTHERS = 9
STORED = 0.5
COLUMNS = 5  # panels in a row
PROBABILITIES = (0.001, 0.99)  # of the target, in the table


def default_objectives() -> list[Objective]:
    """Return the built-in objectives with default options. Divergences have no target."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the choice of an objective
        return [get_objective(name) for name in BUILT_IN]


def compute_pull(objective: Objective, p: Tensor) -> Tensor:
    """Return -dL/dz_y [n] at target probabilities p [n]. Positive values raise the probability."""
    others = ((1 - p) / OTHERS)[:, None].expand(-1, OTHERS)
    z = torch.cat([p[:, None], others], 1).log()
    costs = torch.ones_like(z)
    costs[:, 0] = 0
    rows = LogitRows(z, torch.zeros(len(p), dtype=torch.long), costs, torch.full_like(p, STORED).log())
    scalars = compute_scalars(z, rows, objective.logit_scale)
    # 0 - x instead of -x avoids negative zeros in the table
    coefficients = objective.coefficients(scalars)
    arguments = (rows, objective.logit_scale, objective.smoothing)
    return 0 - claimed_gradient(coefficients, scalars, *arguments)[:, 0]


def draw_pulls() -> str:
    """Return an SVG with a panel for each objective, and MLE in grey."""
    panels = default_objectives()
    rows = -(-len(panels) // COLUMNS)
    p = torch.linspace(0.002, 0.998, 64, dtype=torch.float64)
    mle = compute_pull(get_objective("mle"), p)

    def draw(figure: Any) -> None:
        grid = figure.subplots(rows, COLUMNS, sharex=True, sharey=True)
        for axes, objective in itertools.zip_longest(grid.flat, panels):
            if objective is None:
                axes.set_visible(False)
                continue
            axes.plot(p, mle, color="0.75", linewidth=1)
            axes.plot(p, compute_pull(objective, p), color="#1f6feb", linewidth=1.5)
            axes.set_title(str(objective))
            axes.axhline(0, color="0.85", linewidth=0.6, zorder=0)
        grid[0, 0].set_ylim(-0.6, 1.9)
        figure.supxlabel("probability of the target")
        figure.supylabel("pull at its logit")

    return svg_file("objectives", (9, 1.7 * rows), draw)


def main() -> int:
    """Print the table's numbers, and write the figure if a path is given."""
    parser = argparse.ArgumentParser(prog="python -m emo.experiments.weights", description=__doc__)
    parser.add_argument("figure", nargs="?", type=Path, help="an .svg file")
    args = parser.parse_args()
    for objective in default_objectives():
        low, high = compute_pull(objective, torch.tensor(PROBABILITIES, dtype=torch.float64)).tolist()
        print(f"{objective.name:<12} {low:8.3f} {high:8.3f}")
    if args.figure:
        write_text(args.figure, draw_pulls())
    return ExitCode.DONE


if __name__ == "__main__":
    sys.exit(exit_code_of(main))
