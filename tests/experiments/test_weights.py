"""The table of docs/objectives.md: every objective is in it, with the numbers that the code gives."""

from __future__ import annotations

import re

import torch

from emo.experiments.weights import PROBABILITIES, draw, objectives, pull
from tests.conftest import REPO

ROW = re.compile(r"^\| `(\w+)` \|.*\| (-?[\d.]+) \| (-?[\d.]+) \|$", re.M)


def test_the_table_is_that_of_the_code() -> None:
    written = {
        name: (low, high) for name, low, high in ROW.findall((REPO / "docs/objectives.md").read_text())
    }
    p = torch.tensor(PROBABILITIES, dtype=torch.float64)
    expected = {o.name: tuple(f"{x:.3f}" for x in pull(o, p).tolist()) for o in objectives()}
    assert written == expected


def test_the_figure_has_a_panel_for_each() -> None:
    figure = draw()
    assert figure.count('id="axes_') == len(objectives())
    assert "<svg" in figure
