"""Objectives: golden values, files and packages of users, sums, schedules and rejected input."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from emo.pipeline.loss import CostEmbedding, Objective, Ramp, fused_linear_loss, get_objective, weighted_sum
from emo.pipeline.loss.objectives import BUILT_IN
from emo.pipeline.loss.rows import largest_logits
from tests.conftest import REPO
from tests.helpers.loss_reference import fused_step, inputs
from tests.helpers.refusals import refused

GOLDEN = json.loads((Path(__file__).parent / "golden.json").read_text())
ONE_TARGET = list(BUILT_IN)
SIGNED = ("neg_entropy", "psft")  # losses that may be negative
STEPPED = ("threshold", "psft", "excess")  # weights are all or nothing


def make(name: str, **params: Any) -> Objective:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return get_objective(name, **params)


def composes(name: str, options: dict[str, Any]) -> bool:
    """Return whether an objective can be combined with these options."""
    objective = make(name)
    alone = objective.normalised or objective.logit_scale != 1.0
    return not (alone and (options.get("z_loss") or options.get("label_smoothing")))


def golden(key: str) -> torch.Tensor:
    return torch.tensor(GOLDEN[key], dtype=torch.long if key == "T" else torch.float64)


@pytest.mark.parametrize(
    ("source", "variant"), [(source, key) for source in ("released", "authors") for key in GOLDEN[source]]
)
def test_golden_values(source: str, variant: str) -> None:
    """Loss and gradient equal values recorded from the released code and from other authors' code.

    An identity head makes hidden states logits. The released code uses float32, and DEFT's adds 1e-6 to its
    divisor. GEM's loss has another value with the same gradient.
    """
    case, Z, T = GOLDEN[source][variant], golden("Z").requires_grad_(), golden("T")
    cost, smoothing = CostEmbedding.from_weight(golden("E")), case.get("label_smoothing", 0.0)
    objective = make(case["objective"], **case["params"])
    sums = fused_linear_loss(Z, torch.eye(7).double(), T, objective, cost, label_smoothing=smoothing)
    (sums.loss / sums.tokens).backward()
    tolerance = 1e-5 if variant == "deft" else 2e-7 if source == "released" else 1e-8
    assert sums.tokens == 4
    if case["loss"] is not None:
        assert sums.loss.item() / 4 == pytest.approx(case["loss"], rel=tolerance)
    want = torch.tensor(case["dlogits"], dtype=torch.float64)
    torch.testing.assert_close(Z.grad, want, rtol=0, atol=tolerance)
    for key in ("nll", "demd"):
        assert float(getattr(sums, key)) == pytest.approx(float(golden(key)[T != -100].sum()), rel=1e-6)


@pytest.mark.parametrize(
    ("name", "params", "code"),
    [
        ("emmo", {}, "unknown-objective"),
        ("emo", {"cap": 3.0}, "unknown-parameter"),
        ("tailr", {"gamma": 1.5}, "option-range"),
        ("mixce", {"gamma": None}, "option-range"),
        ("excess", {"least": math.nan}, "option-range"),
    ],
)
def test_invalid_names_and_options_raise(name: str, params: dict[str, float], code: str) -> None:
    with refused(code):
        get_objective(name, **params)


GOOD = """
def focal(m, p, *, gamma=2.0):
    return (1 - p) ** gamma

def whole(m, p, D, H, *, a=0.5):
    from emo.pipeline.loss import Coefficients
    w = p.detach()
    return Coefficients(a * m + w * D - 0.1 * H, A=a - w * D + 0.1 * H, B=w, C=0.1 + 0 * H)
"""


def run(objective: Objective) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the loss, and the gradients of hidden states and head, in float64 with float32 costs."""
    h, w, labels, E = inputs(dtype=torch.float64)
    got = fused_step(h, w, labels, objective, CostEmbedding.from_weight(E))
    return got["loss"], got["d_hidden"], got["d_weight"]


def test_objectives_of_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The documented example, coefficients with all gradient terms, and an entry point work."""
    monkeypatch.chdir(REPO)
    objective = get_objective("examples/my_objective.py:unsure", strength=1.0)
    mle, without = run(make("mle")), run(get_objective("examples/my_objective.py:unsure", strength=0.0))
    torch.testing.assert_close(without, mle)
    assert objective.needs == {"H"} and run(objective)[0] > mle[0]
    (tmp_path / "somebodys.py").write_text(GOOD)
    assert torch.isfinite(run(get_objective(f"{tmp_path / 'somebodys.py'}:whole"))[1]).all()
    info = tmp_path / "somebodys-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: somebodys\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[emo_pipeline.objectives]\nours = somebodys:focal\n")
    monkeypatch.syspath_prepend(tmp_path)
    torch.testing.assert_close(run(get_objective("ours", gamma=2.0))[0], run(make("focal"))[0])


IMPORT = "import torch\nfrom emo.pipeline.loss import Coefficients\n"


@pytest.mark.parametrize(
    ("source", "code"),
    [
        ("def f(m, q): return m", "objective-signature"),
        ("def f(m): return m.mean()", "objective-shape"),
        ("def f(p): return 1 / p", "objective-finite"),
        ("def f(m): return m[:, None] @ m", "objective-fails"),
        ("def f(m, *, a): return a * m", "needs-parameter"),
        ("def g(m): return m", "objective-import"),
        (f"{IMPORT}def f(m, p): return Coefficients(p * m, A=p)", "objective-gradient"),
        (f"{IMPORT}def f(m): return Coefficients(torch.ones_like(m), A=m)", "objective-gradient"),
        ("def f(p): return p / p.mean()", "objective-batch"),
        ("import torch\ndef f(p): return torch.rand_like(p)", "objective-batch"),
        ("def f(m, p): p.mul_(2); return p", "objective-in-place"),
    ],
)
def test_invalid_objective_files_raise(tmp_path: Path, source: str, code: str) -> None:
    (tmp_path / "own.py").write_text(source)
    with refused(code):
        get_objective(f"{tmp_path / 'own.py'}:f")


def test_a_weighted_sum_equals_the_sum_of_its_parts() -> None:
    """One pass gives exactly the gradients of several, with costs, entropy and weights together."""
    parts = [(make("emo"), 0.5), (make("mle"), 0.3), (make("neg_entropy"), 0.05), (make("focal"), 2.0)]
    apart = [[weight * x for x in run(objective)] for objective, weight in parts]
    want = tuple(map(sum, zip(*apart, strict=True)))
    torch.testing.assert_close(run(weighted_sum(parts)), want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("parts", "code"),
    [
        ([(make("emo"), Ramp(0.0, 1.0, 0))], "option-range"),
        ([], "empty-sum"),
        ([(make("gem"), 1.0), (make("mle"), 1.0)], "sum-scales"),
        ([(make("mile"), 1.0), (make("mle"), 1.0)], "sum-part"),
    ],
)
def test_invalid_sums_raise(parts: list[Any], code: str) -> None:
    with refused(code):
        weighted_sum(parts)


def test_a_schedule() -> None:
    """Weights change linearly, then stay. The objective of a step does not depend on history."""
    moving = weighted_sum([(make("emo"), Ramp(0.0, 1.0, 10)), (make("mle"), Ramp(1.0, 0.0, 10))])
    for step, share in ((0, 0.0), (5, 0.5), (1000, 1.0)):
        fixed = weighted_sum([(make("emo"), share), (make("mle"), 1 - share)])
        torch.testing.assert_close(run(moving.at(step)), run(fixed))


@pytest.mark.parametrize("width", [1, 7, 2600, 5003])
def test_the_largest_logits_are_found_in_blocks(width: int) -> None:
    z = torch.randn(5, width + 9, generator=torch.Generator().manual_seed(width))[:, :width]
    z[:, -1] = -1e30
    expected = z[:, :-1].sort(descending=True).values[:, :20]
    assert torch.equal(largest_logits(z), expected)
