"""Objectives by name: from a user's file, from a package, and weighted sums of several."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from emo.common.errors import UserError
from emo.pipeline.loss.cost import CostEmbedding
from emo.pipeline.loss.fused import fused_linear_loss
from emo.pipeline.loss.objectives import Objective, Ramp, get_objective, weighted_sum
from tests.conftest import REPO
from tests.helpers.loss_reference import relative_error
from tests.loss.test_fused import inputs
from tests.loss.test_objectives import make

GOOD = """
def focal(m, p, *, gamma=2.0):
    return (1 - p) ** gamma

def whole(m, p, D, H, *, a=0.5):
    from emo.pipeline.loss import Coefficients
    w = p.detach()
    return Coefficients(a * m + w * D - 0.1 * H, A=a - w * D + 0.1 * H, B=w, C=0.1 + 0 * H)
"""


def run(objective: Objective, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Loss, and gradients of hidden states and head, in float64."""
    h, w, labels, E = inputs(dtype=torch.float64, scale=scale)
    sums = fused_linear_loss(h, w, labels, objective, CostEmbedding.from_weight(E.double()))
    sums.loss.backward()
    assert h.grad is not None
    assert w.grad is not None
    return sums.loss.detach(), h.grad, w.grad


def test_the_example(monkeypatch: pytest.MonkeyPatch) -> None:
    """The documented example; its path is relative to the working directory."""
    monkeypatch.chdir(REPO)
    objective = get_objective("examples/my_objective.py:unsure", strength=1.0)
    assert objective.needs == {"H"}
    assert str(objective) == "examples/my_objective.py:unsure(strength=1)"
    without = run(get_objective("examples/my_objective.py:unsure", strength=0.0))
    for ours, mle in zip(without, run(make("mle")), strict=True):
        torch.testing.assert_close(ours, mle)
    assert run(objective)[0] > without[0]


def test_coefficients_from_a_file(tmp_path: Path) -> None:
    """A weight, and coefficients with every gradient term, pass the check and train."""
    file = tmp_path / "own.py"
    file.write_text(GOOD)
    assert torch.isfinite(run(get_objective(f"{file}:focal"))[0])
    assert torch.isfinite(run(get_objective(f"{file}:whole"))[1]).all()


@pytest.mark.parametrize(
    ("source", "code"),
    [
        ("def f(m, q): return m", "objective-signature"),
        ("def f(m): return m.mean()", "objective-shape"),
        ("def f(m): return 1.0", "objective-shape"),
        ("def f(p): return 1 / p.log()", "objective-finite"),
        ("def f(p): return 1 / p", "objective-finite"),
        ("def f(m): return m[:, None] @ m", "objective-fails"),
        ("def f(m, *, a): return a * m", "needs-parameter"),
        ("def g(m): return m", "objective-import"),
        ("import nowhere_at_all", "objective-import"),
        (
            "from emo.pipeline.loss import Coefficients\ndef f(m, p): return Coefficients(p * m, A=p)",
            "objective-gradient",
        ),
        (
            "from emo.pipeline.loss import Coefficients\ndef f(m): return Coefficients(m, A=m / m, C=m / m)",
            "objective-signature",
        ),
        ("def f(p): return p / p.mean()", "objective-batch"),
        ("import torch\ndef f(p): return torch.rand_like(p)", "objective-batch"),
        ("def f(m, p): p.mul_(2); return p", "objective-in-place"),
        ("def f(p): return p, p", "objective-shape"),
        ("def f(p, *, mode='a'): return p", "option-range"),
        ("raise SystemExit(3)", "objective-import"),
        (
            "from emo.pipeline.loss import Coefficients\ndef f(m): return Coefficients(None, m)",
            "objective-shape",
        ),
        (
            "import torch\nfrom emo.pipeline.loss import Coefficients\n"
            "def f(m): return Coefficients(torch.where(m > 30, 2 * m, m), A=m / m.clamp_min(1e-30))",
            "objective-gradient",
        ),
        (
            "import torch\nfrom emo.pipeline.loss import Coefficients\n"
            "def f(m): return Coefficients(torch.ones_like(m), A=m)",
            "objective-gradient",
        ),
    ],
)
def test_mistakes_in_a_file(tmp_path: Path, source: str, code: str) -> None:
    file = tmp_path / "own.py"
    file.write_text(source)
    with pytest.raises(UserError) as error:
        get_objective(f"{file}:f")
    assert error.value.code == code


def test_registered_by_a_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An installed package's entry point is an objective like any other."""
    (tmp_path / "somebodys.py").write_text(GOOD)
    info = tmp_path / "somebodys-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: somebodys\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[emo_pipeline.objectives]\nours = somebodys:focal\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert get_objective("ours", gamma=1.0).needs == {"m", "p"}
    with pytest.raises(UserError) as error:
        get_objective("our")
    assert error.value.code == "unknown-objective"


def test_a_sum_is_the_sum() -> None:
    """One pass gives the gradients of two, exactly: costs, entropy and weights together."""
    parts = [(make("emo"), 0.5), (make("mle"), 0.3), (make("neg_entropy"), 0.05), (make("focal"), 2.0)]
    together = run(weighted_sum(parts))
    apart = [[weight * x for x in run(objective)] for objective, weight in parts]
    for got, want in zip(together, zip(*apart, strict=True), strict=True):
        assert relative_error(got, sum(want)) < 1e-12


@pytest.mark.parametrize(
    ("parts", "code"),
    [
        ([("emo", 0.5)], "sum-part"),
        ([(make("emo"), math.inf)], "option-range"),
        ([(make("emo"), Ramp(0.0, math.nan, 3))], "option-range"),
        ([(make("emo"), Ramp(0.0, 1.0, 0))], "option-range"),
        ([(make("emo"), 0.0)], "empty-sum"),
        ([], "empty-sum"),
        ([(make("gem"), 1.0), (make("mle"), 1.0)], "sum-scales"),
        ([(make("mile"), 1.0), (make("mle"), 1.0)], "sum-part"),
        ([(make("demd_dense"), 1.0), (make("mle"), 1.0)], "sum-part"),
    ],
)
def test_impossible_sums(parts: list[Any], code: str) -> None:
    with pytest.raises(UserError) as error:
        weighted_sum(parts)
    assert error.value.code == code


def test_a_schedule() -> None:
    """Weights move in a straight line, then stay; the objective of a step does not depend on history."""
    moving = weighted_sum([(make("emo"), Ramp(0.0, 1.0, 10)), (make("mle"), Ramp(1.0, 0.0, 10))])
    assert "0..1 over 10" in str(moving)
    for step, share in ((0, 0.0), (5, 0.5), (10, 1.0), (1000, 1.0)):
        fixed = weighted_sum([(make("emo"), share), (make("mle"), 1 - share)])
        for got, want in zip(run(moving.at(step)), run(fixed), strict=True):
            torch.testing.assert_close(got, want)
    always = make("mle")
    assert always.at(7) is always
