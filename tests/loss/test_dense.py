"""DEMD against a teacher's distribution: float64 autograd, the one-hot case, options, refusals."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from emo.pipeline.loss.cost import CostEmbedding
from emo.pipeline.loss.dense import Teacher
from emo.pipeline.loss.fused import fused_linear_loss
from tests.helpers.loss_reference import cost_matrix, reference, relative_error
from tests.helpers.refusals import refused
from tests.loss.test_objectives import make

N, V, H = 50, 37, 9
pytestmark = pytest.mark.filterwarnings("ignore:cost embedding")


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor, Teacher]:
    torch.manual_seed(0)
    labels = torch.randint(V, (N,))
    labels[::4] = -100
    h, w = torch.randn(N, H).to(dtype).requires_grad_(), torch.randn(V, H).to(dtype).requires_grad_()
    teacher = Teacher(torch.randn(N, 2 * H).to(dtype), torch.randn(V, 2 * H).to(dtype) * 0.3)
    E = torch.randn(V, 5)
    E[3] = 0
    return h, w, labels, E, teacher


def naive(
    h: Tensor, w: Tensor, labels: Tensor, E: Tensor, teacher: Teacher, z_loss: float = 0.0,
    label_smoothing: float = 0.0, softcap: float | None = None, bias: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """(loss, demd, d_hidden, d_weight) with the full cost matrix, float64."""

    def capped(z: Tensor, bias: Tensor | None, cap: float | None) -> Tensor:
        z = z if bias is None else z + bias.detach().double()
        return cap * torch.tanh(z / cap) if cap else z

    h, w = (x.detach().double().requires_grad_() for x in (h, w))
    z = capped(h @ w.T, bias, softcap)
    teacher_z = teacher.hidden.double() @ teacher.weight.double().T * teacher.logit_scale
    P, q = capped(teacher_z, teacher.bias, teacher.softcap).softmax(-1), z.softmax(-1)
    demd = ((q - P).abs() * (P @ cost_matrix(E))).sum(-1)
    loss = (1 - label_smoothing) * demd - label_smoothing * z.log_softmax(-1).mean(-1)
    loss = loss + z_loss * z.logsumexp(-1) ** 2
    valid = labels != -100
    total = loss[valid].sum()
    total.backward()
    return total.detach(), demd[valid].sum().detach(), h.grad, w.grad


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-11), (torch.float32, 1e-5)])
@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}, {"z_loss": 0.01, "label_smoothing": 0.2}])
@pytest.mark.parametrize("head_bias", [False, True])
def test_equals_reference(
    dtype: torch.dtype, bound: float, options: dict[str, float], head_bias: bool
) -> None:
    h, w, labels, E, teacher = inputs(dtype)
    bias = torch.randn(V).to(dtype) if head_bias else None
    teacher = teacher._replace(bias=bias, softcap=4.0 if head_bias else None, logit_scale=0.7)
    beside = {"teacher": teacher, "bias": bias, "memory_mb": 0.01}
    cost = CostEmbedding.from_weight(E, dtype)
    got = fused_linear_loss(h, w, labels, make("demd_dense"), cost, **beside, **options)
    got.loss.backward()
    want = naive(h, w, labels, E, teacher, bias=bias, **options)
    for value, truth in zip((got.loss.detach(), got.demd, h.grad, w.grad), want, strict=True):
        assert relative_error(value, truth) <= bound


def test_one_hot_teacher_is_plain_demd() -> None:
    """Eq. 15 at a one-hot distribution is eq. 14."""
    h, w, labels, E, _ = inputs(torch.float64)
    sure = torch.nn.functional.one_hot(labels.clamp(min=0), V).double() * 1e4
    teacher = Teacher(sure, torch.eye(V, dtype=torch.float64))
    cost = CostEmbedding.from_weight(E, torch.float64)
    got = fused_linear_loss(h, w, labels, make("demd_dense"), cost, teacher=teacher)
    got.loss.backward()
    want = reference(h, w, labels, E, "demd")
    result = {"loss": got.loss.detach(), "nll": got.nll, "d_hidden": h.grad, "d_weight": w.grad}
    assert all(relative_error(value, want[key]) <= 1e-11 for key, value in result.items())


def test_half_precision_no_tokens_and_no_teacher() -> None:
    h, w, labels, E, teacher = inputs(torch.bfloat16)
    E[3] = 1
    cost = CostEmbedding.from_weight(E.bfloat16().float())
    got = fused_linear_loss(h, w, labels, make("demd_dense"), cost, teacher=teacher)
    got.loss.backward()
    want = naive(h, w, labels, E.bfloat16(), teacher)
    assert relative_error(got.loss.detach(), want[0]) <= 5e-3
    cosine = torch.cosine_similarity(h.grad.double().flatten(), want[2].flatten(), dim=0)
    assert cosine >= 0.99  # sign(q - P) jumps where the two nearly agree: rounding decides there
    h.grad = None
    none = torch.full_like(labels, -100)
    got = fused_linear_loss(h, w, none, make("demd_dense"), cost, teacher=teacher)
    got.loss.backward()
    assert got.loss.item() == 0 and h.grad.count_nonzero() == 0
    short = teacher._replace(hidden=teacher.hidden[1:])
    for name, costs, beside, code in (
        ("emo", cost, teacher, "needs-teacher"),
        ("demd_dense", None, teacher, "needs-cost"),
        ("demd_dense", cost, short, "shapes"),
    ):
        with refused(code):
            fused_linear_loss(h, w, labels, make(name), costs, teacher=beside)
