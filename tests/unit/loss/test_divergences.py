"""Divergences from a teacher, live or stored, against float64 autograd of dense logits."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from emo.pipeline.loss import (
    CostEmbedding,
    NumberCost,
    Objective,
    Ramp,
    Spaced,
    Teacher,
    TopK,
    get_objective,
    weighted_sum,
)
from emo.pipeline.loss.divergences import DIVERGENCES
from tests.helpers.loss_reference import (
    assert_agree,
    cost_matrix,
    divergence_reference,
    fused_step,
    inputs,
    logits_of,
    relative_error,
    top,
)
from tests.helpers.refusals import refused

N, V, H = 60, 47, 12
COSTLY = ("demd_dense", "emo_dense")
# every divergence with its defaults, and some other options
CASES: list[tuple[str, dict[str, float]]] = [(name, {}) for name in DIVERGENCES]
CASES += [("jsd", {"beta": 0.9}), ("skew_kl", {"alpha": 0.6}), ("skew_kl", {"alpha": 0.0})]


def teacher(dtype: torch.dtype = torch.float64, **fields: Any) -> Teacher:
    """Return a teacher that is wider than the student and has three padding tokens."""
    return Teacher(torch.randn(N, 2 * H).to(dtype), torch.randn(V + 3, 2 * H).to(dtype) * 0.3, **fields)


def test_a_teacher_computes_in_the_type_of_its_head() -> None:
    """Autocast may return float32 hidden states for a head in half precision, and the reverse."""
    side, positions = teacher(torch.float32), torch.arange(N)
    for hidden, weight in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)):
        mixed = side._replace(hidden=side.hidden.to(hidden), weight=side.weight.to(weight))
        same = mixed._replace(hidden=mixed.hidden.to(weight))
        torch.testing.assert_close(
            mixed.at_positions(positions, V, torch.float32).normalised().z,
            same.at_positions(positions, V, torch.float32).normalised().z,
        )


def transport(E: Tensor) -> Callable[[Tensor], Tensor]:
    C = cost_matrix(E)
    return lambda p: p @ C


def log_p_of(side: Teacher) -> Tensor:
    assert side.weight is not None
    bias = None if side.bias is None else side.bias[:V]
    z = logits_of(side.hidden, side.weight[:V], bias, side.softcap, side.logit_scale)
    return (z / side.temperature).log_softmax(-1)


def compare(
    name: str, params: dict[str, float], dtype: torch.dtype, bound: float, where: str,
    valid: int = N, kernels: str = "torch",
) -> None:  # fmt: skip
    """Assert that a divergence of the first `valid` tokens equals autograd, in chunks of 16."""
    torch.manual_seed(0)
    h, w, labels, E = inputs(N, V, H, dtype, scale=0.4)
    labels[valid:] = -100
    bias, options, settings, extra = None, {"memory_mb": 1e-3}, dict(params), {}
    side = teacher(dtype)
    if where == "capped":
        bias, options = torch.randn(V).to(dtype).requires_grad_(), {"softcap": 3.0, "logit_scale": 0.5}
        side = teacher(dtype, bias=torch.randn(V + 3).to(dtype), softcap=4.0, temperature=2.0)
    if where == "sure":  # the teacher has nearly all mass on the label
        sure = 80 * torch.nn.functional.one_hot(labels.clamp(min=0), V).to(dtype)
        side = Teacher(sure, torch.eye(V, dtype=dtype))
    if where == "smoothed":
        options, extra = {"label_smoothing": 0.2}, {"smoothing": 0.2}
    if where == "warm":
        settings, extra = params | {"temperature": 2.5}, {"temperature": 2.5}
    objective = get_objective(name, **settings)
    if where == "sum":
        objective = weighted_sum([(get_objective("mle"), 1.0), (objective, 0.3)])
        extra = {"mle": 1.0, "weight": 0.3}
    cost = CostEmbedding.from_weight(E.to(dtype)) if name in COSTLY else None
    got = fused_step(h, w, labels, objective, cost, teacher=side, bias=bias, kernels=kernels, **options)
    shared = {key: value for key, value in options.items() if key in ("softcap", "logit_scale")}
    assert_agree(
        got,
        divergence_reference(
            h, w, labels, log_p_of(side), transport(E), name, params, bias=bias, **shared, **extra
        ),
        bound,
    )


@pytest.mark.parametrize(("name", "params"), CASES)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-9), (torch.float32, 1e-6)])
@pytest.mark.parametrize("where", ["plain", "capped", "smoothed", "warm", "sum"])
def test_equals_autograd(
    name: str, params: dict[str, float], dtype: torch.dtype, bound: float, where: str
) -> None:
    compare(name, params, dtype, bound, where)


@pytest.mark.parametrize("name", ["jsd", "skew_kl"])
def test_a_nearly_certain_teacher_equals_autograd(name: str) -> None:
    compare(name, {}, torch.float64, 1e-9, "sure")


@pytest.mark.parametrize(
    ("name", "other"), [("kl", "mle"), ("tv", "power"), ("demd_dense", "demd"), ("emo_dense", "emo")]
)
def test_a_one_hot_teacher_equals_a_label(name: str, other: str) -> None:
    """A teacher with all mass on the target gives the objectives of one target."""
    torch.manual_seed(0)
    h, w, labels, E = inputs(N, V, H, dtype=torch.float64)
    sure = 1e4 * torch.nn.functional.one_hot(labels.clamp(min=0), V).double()
    side, cost = Teacher(sure, torch.eye(V, dtype=torch.float64)), CostEmbedding.from_weight(E.double())
    got = fused_step(h, w, labels, get_objective(name), cost, teacher=side)
    params = {"alpha": 1.0} if other == "power" else {}  # the loss 1 - p_y
    want = fused_step(h, w, labels, get_objective(other, **params), cost)
    assert_agree(got, {key: want[key] for key in ("loss", "nll", "demd", "d_hidden", "d_weight")}, 1e-8)


@pytest.mark.parametrize("name", list(DIVERGENCES))
def test_a_teacher_equal_to_the_student_gives_zero_gradient(name: str) -> None:
    torch.manual_seed(0)
    h, w, labels, E = inputs(N, V, H, dtype=torch.float32)
    cost = CostEmbedding.from_weight(E)
    got = fused_step(h, w, labels, get_objective(name), cost, teacher=Teacher(h.detach(), w.detach()))
    assert abs(got["loss"].item()) <= 1e-4 and got["d_hidden"].abs().max().item() <= 1e-5


@st.composite
def entries(draw: st.DrawFn) -> tuple[int, str, int]:
    names = sorted(set(DIVERGENCES) - set(COSTLY))
    return draw(st.integers(1, V - 1)), draw(st.sampled_from(names)), draw(st.integers(0, 99))


@given(entries())
@settings(max_examples=40, deadline=None)
def test_stored_entries_equal_autograd(case: tuple[int, str, int]) -> None:
    """The divergence of k + 1 masses equals autograd, and never exceeds that of all entries."""
    k, name, seed = case
    torch.manual_seed(seed)
    h, w, labels, E = inputs(N, V, H, dtype=torch.float64)
    side = teacher()
    log_p = log_p_of(side)
    got = fused_step(h, w, labels, get_objective(name), teacher=top(log_p, k))
    assert_agree(got, divergence_reference(h, w, labels, log_p, transport(E), name, {}, k=k), 1e-9)
    whole = fused_step(h, w, labels, get_objective(name), teacher=side)["loss"]
    assert got["loss"] <= whole * (1 + 1e-9)


def test_a_schedule_changes_the_weight() -> None:
    torch.manual_seed(0)
    h, w, labels, _ = inputs(N, V, H, dtype=torch.float64)
    side = teacher()
    ramp = weighted_sum([(get_objective("mle"), 1.0), (get_objective("kl"), Ramp(1.0, 0.0, 4))])
    losses = [fused_step(h, w, labels, ramp.at(step), teacher=side)["loss"] for step in (0, 2, 4)]
    likelihood = fused_step(h, w, labels, get_objective("mle"))["loss"]
    assert losses[2] == pytest.approx(likelihood.item(), rel=1e-12)
    assert losses[0] + losses[2] == pytest.approx(2 * losses[1].item(), rel=1e-12)


def test_spaced_parts_apply_in_their_share_of_the_steps() -> None:
    for share in (0.1, 0.3, 0.5, 1.0):
        steps = [step for step in range(1000) if Ramp(share, share, 1).due(step)]
        assert len(steps) == round(1000 * share)
        assert {later - first for first, later in pairwise(steps)} <= {int(1 / share), -int(-1 // share)}
    falling = Ramp(1.0, 0.0, 100)
    for start in range(0, 120, 20):
        count = sum(map(falling.due, range(start, start + 20)))
        assert abs(count - 20 * falling.at(start + 9.5)) <= 1
    mle, kl = get_objective("mle"), get_objective("kl")
    anchored = weighted_sum([(mle, 1.0), (kl, Spaced(0.5, Ramp(0.5, 0.5, 1)))])
    assert [anchored.at(step).divergences[0][0] for step in range(4)] == [0.0, 0.5, 0.0, 0.5]
    assert {anchored.at(step, spaced=False).divergences[0][0] for step in range(4)} == {0.25}
    with refused("option-range"):
        weighted_sum([(mle, 1.0), (kl, Spaced(0.5, Ramp(0.0, 2.0, 1)))])


def test_number_costs_do_not_move_mass_of_words() -> None:
    """In equation 15 with costs between numbers, words neither send nor receive mass."""
    torch.manual_seed(0)
    values = torch.full((V,), torch.nan)
    values[:12] = torch.arange(12.0)
    cost = NumberCost(values.double())
    P = torch.rand(5, V, dtype=torch.float64).softmax(-1)
    C = torch.zeros(V, V, dtype=torch.float64)
    C[:12, :12] = cost.costs(torch.arange(12))[:, :12]
    torch.testing.assert_close(cost.transport(P), P @ C)


def test_half_precision() -> None:
    torch.manual_seed(0)
    h, w, labels, E = inputs(N, V, H, dtype=torch.bfloat16)
    side = teacher(torch.bfloat16)
    for name in ("kl", "jsd"):
        got = fused_step(h, w, labels, get_objective(name), teacher=side)
        want = divergence_reference(h, w, labels, log_p_of(side), transport(E), name, {})
        assert relative_error(got["loss"], want["loss"]) <= 5e-3
        assert relative_error(got["d_hidden"], want["d_hidden"]) <= 3e-2
    nothing = torch.full_like(labels, -100)
    got = fused_step(h, w, nothing, get_objective("kl"), teacher=side)
    assert got["loss"].item() == 0 and got["d_hidden"].count_nonzero() == 0


@pytest.mark.parametrize(
    ("objective", "side", "code"),
    [
        (get_objective("kl"), None, "needs-teacher"),
        (get_objective("mle"), teacher(), "needs-teacher"),
        (get_objective("demd_dense"), TopK(torch.zeros(N, 1).long(), torch.zeros(N, 2)), "needs-teacher"),
        (get_objective("demd_dense"), teacher(), "needs-cost"),
        (get_objective("kl"), Teacher(torch.zeros(2, 5), torch.zeros(V, 5)), "shapes"),
        (get_objective("kl"), Teacher(torch.zeros(N, 5), torch.zeros(V - 1, 5)), "shapes"),
        (get_objective("kl"), TopK(torch.zeros(N, 3).long(), torch.zeros(N, 3)), "shapes"),
    ],
)
def test_mismatched_teachers_raise(objective: Objective, side: Any, code: str) -> None:
    h, w, labels, E = inputs(N, V, H, dtype=torch.float64)
    cost = None if code == "needs-cost" else CostEmbedding.from_weight(E)
    with refused(code):
        fused_step(h, w, labels, objective, cost, teacher=side)


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("jsd", {"beta": 0.0}),
        ("jsd", {"beta": 1.0}),
        ("skew_kl", {"alpha": 1.0}),
        ("kl", {"temperature": 0.0}),
    ],
)
def test_options_out_of_range_raise(name: str, params: dict[str, float]) -> None:
    with refused("option-range"):
        get_objective(name, **params)
