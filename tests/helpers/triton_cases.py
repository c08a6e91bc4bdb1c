"""Test the Triton kernels against float64 with Triton's interpreter.

Only `tests/unit/loss/test_triton.py` collects these tests, in a separate process. Triton chooses between its
interpreter and its compiler (TRITON_INTERPRET=1) when it is first imported.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import Tensor

from emo.pipeline.loss.cost import CostEmbedding
from emo.pipeline.loss.fused import fused_linear_loss
from emo.pipeline.loss.objectives import get_objective, weighted_sum
from emo.pipeline.loss.rows import Chunk, Terms
from emo.pipeline.loss.teacher import Teacher, TeacherRows
from tests.helpers.loss_reference import assert_agree, fused_step, reference, relative_error, stored_for, top
from tests.helpers.loss_reference import inputs as reference_inputs
from tests.helpers.refusals import refused
from tests.unit.loss import test_divergences as against
from tests.unit.loss.test_cost import padded_everywhere
from tests.unit.loss.test_objectives import ONE_TARGET, make

V, H = 150, 12


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    from emo.pipeline.loss.kernels import objectives as kernels_triton
    from emo.pipeline.loss.kernels import teacher as kernels_teacher

    monkeypatch.setattr(kernels_triton, "BLOCK", 64)
    monkeypatch.setattr(kernels_teacher, "BLOCK", 16)  # smaller than the vocabulary of 47


def inputs(dtype: torch.dtype, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    labels = torch.randint(V, (9,))
    labels[::6] = -100
    h = (torch.randn(9, H) * scale).to(dtype).requires_grad_()
    return h, torch.randn(V, H).to(dtype).requires_grad_(), labels, torch.randn(V, H + 4)


# Kernels depend only on the scalars that an objective needs and on its scale. One of each kind is tested.
KINDS = {(objective.needs, objective.logit_scale): objective.name for objective in map(make, ONE_TARGET)}


@pytest.mark.parametrize("name", KINDS.values())
@pytest.mark.parametrize(("scale", "cache_mb"), [(0.05, 0.0), (2.0, 0.05)])
def test_equals_reference(name: str, scale: float, cache_mb: float) -> None:
    h, w, labels, E = inputs(torch.float32, scale)
    cost = CostEmbedding.from_weight(E, cache_mb=cache_mb)
    beside = {"stored": stored_for(labels), "kernels": "triton", "memory_mb": 1e-4}
    got = fused_step(h, w, labels, make(name), cost, **beside)
    bound = 2e-3 if cache_mb else 1e-4 if name == "neg_entropy" else 1e-5  # log p + H cancels
    assert_agree(got, reference(h, w, labels, E, name), bound)


EVERY_OPTION = {"z_loss": 1e-2, "label_smoothing": 0.2, "softcap": 3.0, "logit_scale": 2.0}


@pytest.mark.parametrize(
    ("dtype", "name", "options"),
    [
        (torch.float32, "emo", {"label_smoothing": 0.1}),
        (torch.float32, "gem", {"softcap": 5.0}),
        (torch.float32, "neg_entropy", EVERY_OPTION),
        (torch.float32, "eaft", EVERY_OPTION),
        (torch.float32, "smoothed", {"softcap": 5.0}),
        (torch.bfloat16, "emo", EVERY_OPTION),
        (torch.bfloat16, "neg_entropy", {"softcap": 5.0}),
    ],
)
def test_agrees_with_pytorch_path(dtype: torch.dtype, name: str, options: dict[str, float]) -> None:
    """With options and a bias, the two paths differ only by rounding."""
    results = []
    for kernels in ("triton", "torch"):
        h, w, labels, E = inputs(dtype)
        bias = torch.linspace(-1, 1, V).to(dtype).requires_grad_()
        cost = CostEmbedding.from_weight(E)
        results.append(fused_step(h, w, labels, make(name), cost, bias=bias, kernels=kernels, **options))
    assert_agree(*results, 1e-5 if dtype == torch.float32 else 6e-3)


@pytest.mark.parametrize(
    ("name", "options", "cache_mb"),
    [("gem", {}, 0.05), ("neg_entropy", {"softcap": 5.0}, 0.0), ("deft", {"label_smoothing": 0.1}, 0.05)],
)
def test_values_between_padded_rows_never_count(
    name: str, options: dict[str, float], cache_mb: float
) -> None:
    """NaN between rows does not change the results. Rows are 192 numbers apart, of which 150 are used."""
    h, w, labels, E = inputs(torch.float32)
    results = []
    for rows in (contextlib.nullcontext(), padded_everywhere()):
        with rows:
            bias = torch.linspace(-1, 1, V).requires_grad_()
            costs = CostEmbedding.from_weight(E, cache_mb=cache_mb)
            beside = {"bias": bias, "kernels": "triton"}
            results.append(fused_step(h, w, labels, make(name), costs, **beside, **options))
    assert_agree(results[1], results[0], 1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_confident_and_extreme_rows(dtype: torch.dtype) -> None:
    h = torch.tensor([[30.0, 0.0], [-30.0, 0.0], [1e3, 1e3]], dtype=dtype).requires_grad_()
    w = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.5, 0.5]], dtype=dtype).requires_grad_()
    labels, E = torch.tensor([0, 0, 3]), torch.randn(4, 3)
    got = fused_step(h, w, labels, make("emo"), CostEmbedding.from_weight(E), kernels="triton")
    want = reference(h, w, labels, E, "emo")
    assert relative_error(got["loss"], want["loss"]) <= 1e-3
    assert relative_error(got["d_hidden"], want["d_hidden"]) <= 1e-2


@pytest.mark.parametrize(("name", "params"), against.CASES)
def test_divergences_equal_autograd(name: str, params: dict[str, float]) -> None:
    against.compare(name, params, torch.float32, 1e-5, "capped", valid=6, kernels="triton")


SUM = [("mle", 1.0), ("jsd", 0.3), ("reverse_kl", 0.2)]  # kernels process the divergences one by one


@pytest.mark.parametrize(
    ("dtype", "k", "options"),
    [
        (torch.float32, 0, {"softcap": 3.0, "label_smoothing": 0.1}),
        (torch.float32, 1, {}),
        (torch.float32, 7, {"softcap": 3.0, "label_smoothing": 0.1}),
        (torch.float32, against.V - 1, {}),
        (torch.bfloat16, 0, {"softcap": 3.0}),
        (torch.float16, 7, {"softcap": 3.0}),
    ],
)
def test_a_sum_agrees_with_pytorch_path(dtype: torch.dtype, k: int, options: dict[str, float]) -> None:
    """A sum of MLE and two divergences agrees, with a live teacher and with `k` stored tokens."""
    results = []
    for kernels in ("triton", "torch"):
        torch.manual_seed(0)
        h, w, labels, _ = reference_inputs(against.N, against.V, against.H, dtype, scale=0.4)
        labels[4:] = -100
        bias = torch.linspace(-1, 1, against.V).to(dtype).requires_grad_()
        live = against.teacher(dtype)
        side = top(against.log_p_of(live), k) if k else live
        objective = weighted_sum([(make(name), weight) for name, weight in SUM])
        beside = {"bias": bias, "teacher": side, "kernels": kernels, **options}
        results.append(fused_step(h, w, labels, objective, None, **beside))
        del results[-1]["demd"]  # NaN without costs
    # the interpreter truncates where a GPU rounds, in each of the three parts
    bounds = {torch.float32: 1e-5, torch.bfloat16: 3 * 6e-3, torch.float16: 2e-3}
    assert_agree(*results, bounds[dtype])


@pytest.mark.parametrize(
    ("name", "k", "temperature"),
    [("kl", 0, 1.0), ("emo_dense", 0, 2.0), ("kl", 7, 2.0), ("tv", 7, 1.0)],
)
def test_one_divergence_overwrites_the_logits(name: str, k: int, temperature: float) -> None:
    """NaN between rows does not change the results. The sums are the same without gradients."""
    h, w, labels, E = reference_inputs(against.N, against.V, against.H, torch.float32, scale=0.4)
    labels[4:] = -100
    objective, cost = get_objective(name, temperature=temperature), CostEmbedding.from_weight(E)
    cost = cost if name in against.COSTLY else None
    torch.manual_seed(0)
    live = against.teacher(torch.float32)
    side = top(against.log_p_of(live), k) if k else live
    want = fused_step(h, w, labels, objective, cost, teacher=side, kernels="torch")
    with padded_everywhere():
        got = fused_step(h, w, labels, objective, cost, teacher=side, kernels="triton")
    assert_agree(got, {key: value for key, value in want.items() if key != "demd" or cost}, 1e-5)
    with torch.no_grad():
        sums = fused_linear_loss(h, w, labels, objective, cost, teacher=side, kernels="triton")
    assert sums.loss == got["loss"] and sums.nll == got["nll"]


def test_rows_beyond_32_bit_offsets() -> None:
    """A row that begins 2^31 numbers after the first is correct. Untouched memory is never allocated."""
    from emo.pipeline.loss.kernels.teacher import write_divergences

    V, apart = against.V, 2**30
    z, t = torch.randn(3, V).bfloat16(), torch.randn(3, V).log_softmax(1)
    labels, zero = torch.tensor([3, 4, 5]), torch.zeros(3)
    chunk, terms = Chunk(0, labels, z.gather(1, labels[:, None])[:, 0].float(), zero, None), Terms(make("kl"))
    memory = torch.empty(2 * apart + V, dtype=torch.bfloat16)
    far = memory.as_strided((3, V), (apart, 1)).copy_(z)
    for side in (TeacherRows(t, Teacher(z, None)), top(t, 5)):
        near = z.clone()
        far.copy_(z)
        numbers = [write_divergences(x, x, chunk, side, None, terms, True, False) for x in (near, far)]
        assert all(map(torch.equal, *numbers)) and torch.equal(near, far)


def test_unavailable_kernels_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")
    h, w, labels, _ = inputs(torch.float32)
    for kernels, code in (("triton", "no-triton"), ("cuda", "option-range")):
        with refused(code):
            fused_linear_loss(h, w, labels, make("mle"), kernels=kernels)
