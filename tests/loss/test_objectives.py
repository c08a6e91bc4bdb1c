"""The mathematics of every objective: golden values, the gradient family, and refusals."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from emo.common.errors import UserError
from emo.pipeline.loss.cost import CostEmbedding
from emo.pipeline.loss.fused import fused_linear_loss
from emo.pipeline.loss.objectives import OBJECTIVES, Objective, Rows, get_objective, gradient, scalars_of
from tests.helpers.loss_reference import cost_matrix, losses_from_logits, stored_for

GOLDEN = json.loads((Path(__file__).parent / "golden.json").read_text())
LIBRARY = json.loads((Path(__file__).parent / "golden_library.json").read_text())
ONE_TARGET = [name for name in OBJECTIVES if name != "demd_dense"]
SIGNED = ("neg_entropy", "psft")  # losses that are negative
STEPPED = ("threshold", "psft", "excess")  # all or nothing


def make(name: str, **params: Any) -> Objective:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return get_objective(name, **params)


def composes(name: str, options: dict[str, Any]) -> bool:
    """Return True where an objective can be combined with these options."""
    objective = make(name)
    alone = objective.normalised or objective.logit_scale != 1.0
    return not (alone and (options.get("z_loss") or options.get("label_smoothing")))


def golden(key: str) -> torch.Tensor:
    return torch.tensor(GOLDEN[key], dtype=torch.long if key == "T" else torch.float64)


@pytest.mark.parametrize("variant", GOLDEN["variants"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_golden_values(variant: str, dtype: torch.dtype) -> None:
    """Loss and logit gradient equal those recorded from the released code.

    An identity head makes hidden states logits. The released language-model script works in float32
    and records to about 1e-7.
    """
    case = GOLDEN["variants"][variant]
    Z, T, E = golden("Z").to(dtype).requires_grad_(), golden("T"), golden("E")
    objective = make(case["objective"], **case["params"])
    sums = fused_linear_loss(
        Z,
        torch.eye(7, dtype=dtype),
        T,
        objective,
        CostEmbedding.from_weight(E, dtype),
        label_smoothing=case["label_smoothing"],
    )
    (sums.loss / sums.tokens).backward()
    assert sums.tokens == 4
    assert sums.loss.item() / 4 == pytest.approx(case["loss"], rel=1e-7 if dtype == torch.float64 else 5e-7)
    want = torch.tensor(case["dlogits"], dtype=torch.float64)
    assert Z.grad is not None
    torch.testing.assert_close(Z.grad.double(), want, rtol=0, atol=2e-7)
    valid = T != -100
    assert float(sums.nll) == pytest.approx(float(golden("nll")[valid].sum()), rel=1e-6)
    assert float(sums.demd) == pytest.approx(float(golden("demd")[valid].sum()), rel=1e-6)


@pytest.mark.parametrize("variant", LIBRARY)
def test_values_of_the_authors_code(variant: str) -> None:
    """Loss and logit gradient equal what the named files gave on the same input, run in float64.

    DEFT's adds 1e-6 to its divisor; GEM's loss value is another one with the same gradient.
    """
    case = LIBRARY[variant]
    Z, T = golden("Z").requires_grad_(), golden("T")
    sums = fused_linear_loss(Z, torch.eye(7).double(), T, make(case["objective"], **case["params"]))
    (sums.loss / sums.tokens).backward()
    tolerance = 1e-5 if variant == "deft" else 1e-8
    if case["loss"] is not None:
        assert sums.loss.item() / 4 == pytest.approx(case["loss"], rel=tolerance)
    want = torch.tensor(case["dlogits"], dtype=torch.float64)
    torch.testing.assert_close(Z.grad, want, rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("name", "params"),
    [
        *((name, {}) for name in ONE_TARGET),
        ("emo", {"ratio_cap": 1.5}),
        ("tailr", {"gamma": 0.3, "w_min": 0.4}),
        ("mixce", {"gamma": 0.3}),
    ],
)
def test_coefficients_are_the_gradient(name: str, params: dict[str, float]) -> None:
    """p (A + B c + C log p) - K onehot equals autograd's gradient of the naive loss."""
    torch.manual_seed(0)
    V, n = 11, 40
    C = cost_matrix(torch.randn(V, 5))
    z = (torch.randn(n, V, dtype=torch.float64) * 3).requires_grad_()
    y = torch.randint(V, (n,))
    loss, *_ = losses_from_logits(z, y, C, name, **params)
    (want,) = torch.autograd.grad(loss.sum(), z)
    objective = make(name, **params)
    rows = Rows(z.detach(), y, C[y], stored_for(y))
    with torch.no_grad():
        scalars = scalars_of(rows.z, rows, objective.logit_scale)
        result = objective.coefficients(scalars)
        factor = len(y) / result.weight.sum() if objective.normalised and result.weight is not None else 1.0
        got = gradient(result, scalars, rows, objective.logit_scale) * factor
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(result.loss * factor, loss.detach(), rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("name", "params", "code"),
    [
        ("emmo", {}, "unknown-objective"),
        ("emo", {"cap": 3.0}, "unknown-parameter"),
        ("mle", {"gamma": 0.1}, "unknown-parameter"),
        ("tailr", {"gamma": 1.5}, "option-range"),
        ("mixce", {"gamma": -0.5}, "option-range"),
        ("emo", {"ratio_cap": 0.0}, "option-range"),
        ("gem", {"beta": 0.0}, "option-range"),
        ("mixce", {"gamma": None}, "option-range"),
        ("excess", {"least": math.nan}, "option-range"),
    ],
)
def test_bad_requests(name: str, params: dict[str, float], code: str) -> None:
    with pytest.raises(UserError) as error:
        get_objective(name, **params)
    assert error.value.code == code
