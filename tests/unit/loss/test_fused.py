"""The fused loss against a naive float64 reference: options, dtypes, edge cases and many shapes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from emo.pipeline.loss import Teacher, weighted_sum
from emo.pipeline.loss.cost import CostEmbedding, plan_tokens
from emo.pipeline.loss.fused import fused_linear_loss, quantile
from emo.pipeline.loss.models.head import FusedHead, fuse_head
from tests.helpers.loss_reference import (
    assert_agree,
    cost_matrix,
    fused_step,
    inputs,
    reference,
    relative_error,
    stored_for,
)
from tests.helpers.refusals import refused
from tests.helpers.waits import shapes
from tests.unit.loss.test_objectives import ONE_TARGET, SIGNED, STEPPED, composes, make

N, V, H = 70, 53, 12
SETTINGS = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
pytestmark = pytest.mark.filterwarnings("ignore:cost embedding")
TINY_MB = 16 * V * 4 / 2**20  # 16 tokens per chunk, so that there are several


def compare(h: Tensor, w: Tensor, labels: Tensor, E: Tensor, name: str, bound: float, **options: Any) -> None:
    """Assert that sums and every gradient equal the reference, in relative norm."""
    cost = CostEmbedding.from_weight(E, torch.promote_types(h.dtype, torch.float32))
    beside = {"memory_mb": TINY_MB, "stored": stored_for(labels)}
    got = fused_step(h, w, labels, make(name), cost, **beside, **options)
    assert int(got["tokens"]) == int((labels != -100).sum())
    assert_agree(got, reference(h, w, labels, E, name, **options), bound)


@pytest.mark.parametrize("name", ONE_TARGET)
@pytest.mark.parametrize("scale", [0.01, 1.0, 10.0])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_equals_reference(name: str, scale: float, dtype: torch.dtype, bound: float) -> None:
    """Predictions range from uniform to very confident."""
    almost_uniform = name == "neg_entropy" and scale < 1  # cancellation in log p + H
    compare(*inputs(dtype=dtype, scale=scale), name, 10 * bound if almost_uniform else bound)


@pytest.mark.parametrize("name", ONE_TARGET)
def test_options_compose(name: str) -> None:
    beside = {"z_loss": 1e-2, "label_smoothing": 0.2}
    beside = beside if composes(name, beside) else {}
    bias = torch.randn(V, dtype=torch.float64).requires_grad_()
    compare(*inputs(dtype=torch.float64), name, 1e-10, bias=bias, softcap=3.0, logit_scale=2.0, **beside)


@pytest.mark.parametrize("name", ONE_TARGET)
@pytest.mark.parametrize("confident", [False, True])
def test_bfloat16(name: str, confident: bool) -> None:
    """The reference is float64 with the same rounded inputs. Most losses are never negative."""
    h, w, labels, E = inputs(n=200, vocab=300, hidden=32, scale=0.3)
    with torch.no_grad():
        if confident:  # logits of about 30 for the target, 0 +- 5 for the others
            h.copy_(w[labels.clamp(min=0)] + h)
    h, w = (x.detach().bfloat16().requires_grad_() for x in (h, w))
    E = E.bfloat16().float()
    cost = CostEmbedding.from_weight(E, torch.bfloat16)
    got = fused_step(h, w, labels, make(name), cost, stored=stored_for(labels))
    want = reference(h, w, labels, E, name)
    assert got["loss"].dtype == torch.float32 and (got["loss"].item() >= 0 or name in SIGNED)
    # rounding moves tokens across a threshold
    assert relative_error(got["loss"], want["loss"]) <= (2e-2 if name in STEPPED else 1e-3)
    for key in ("d_hidden", "d_weight"):
        g, truth = got[key].double().flatten(), want[key].flatten()
        cosine = torch.cosine_similarity(g, truth, dim=0)
        assert cosine >= (0.98 if name in STEPPED else 0.999) or not (truth.any() or g.any()), key


@pytest.mark.parametrize("name", ONE_TARGET)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_extreme_logits(name: str, dtype: torch.dtype) -> None:
    """Results are finite with logits of +-1e4, and agree with float64."""
    h = torch.tensor([[1e4, 0.0], [-1e4, 0.0], [1e4, 1e4], [0.0, 0.0]], dtype=dtype).requires_grad_()
    w = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.5, 0.5]], dtype=dtype).requires_grad_()
    labels, E = torch.tensor([0, 0, 3, 2]), torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    got = fused_step(h, w, labels, make(name), CostEmbedding.from_weight(E), stored=stored_for(labels))
    want = reference(h, w, labels, E, name)
    assert relative_error(got["loss"], want["loss"]) <= 2e-3  # costs are bfloat16
    for key in ("d_hidden", "d_weight"):
        error, size = (got[key].double() - want[key]).norm(), want[key].norm()
        # Hidden states of 1e4 multiply the head's gradient. Logits of 1e4 have three decimals in float32,
        # which are too few for log p + H near zero.
        slack = 1e-6 if key == "d_hidden" else 1.0 if name == "neg_entropy" else 1e-2
        assert error <= 2e-2 * size + slack, key


@pytest.mark.parametrize("vocab", [60, 4200])
def test_wrong_tokens_without_cost_stay_finite(vocab: int) -> None:
    """Wrong tokens in the direction of the target cost nothing, so D is almost 0 and m / D is huge."""
    h, w, labels, _ = inputs(n=40, vocab=vocab)
    E = torch.where(torch.rand(vocab, 1) < 0.5, 1.0, -1.0) * torch.tensor([[1.0, 0.0]])
    with torch.no_grad():
        h[:, 0], w[:, 0] = 40.0, E[:, 0]  # all mass on one half of the vocabulary
    labels[:] = E[:, 0].argmax()  # a token of this half
    compare(h, w, labels, E, "emo", 1e-5)


def test_only_one_chunk_of_logits_exists() -> None:
    """No tensor with V columns is larger than one chunk, except those of the head."""
    h, w, labels, E = inputs(n=500, vocab=1000)
    with shapes() as tensors:
        cost, chunk_mb = CostEmbedding.from_weight(E), 32 * 1000 * 4 / 2**20
        fused_linear_loss(h, w, labels, make("emo"), cost, memory_mb=chunk_mb).loss.backward()
    assert 0 < max(shape[0] for shape in tensors if len(shape) == 2 and shape[1] == 1000) <= 32


def test_backward_runs_once_scaled_and_for_trained_inputs() -> None:
    """The incoming gradient scales all others. Costs and a frozen head, as with LoRA, have none."""
    h, w, labels, E = inputs()
    E.requires_grad_()
    w.requires_grad_(False)
    loss = fused_linear_loss(h, w, labels, make("emo"), CostEmbedding.from_weight(E)).loss
    (loss * 0.25).backward(retain_graph=True)
    assert w.grad is None and E.grad is None
    assert relative_error(4 * h.grad, reference(h, w, labels, E.detach(), "emo")["d_hidden"]) <= 1e-5
    with pytest.raises(RuntimeError):
        loss.backward()


def test_fused_head_stays_a_linear() -> None:
    """Names, values and calls without labels are those of the Linear. Batches keep their shape."""
    head, x, y = nn.Linear(H, V), torch.randn(2, 7, H), torch.randint(V, (2, 7))
    names, want = list(head.state_dict()), head(x)
    fuse_head(head, make("emo"), CostEmbedding.from_weight(head.weight))
    assert isinstance(head, FusedHead) and list(head.state_dict()) == names
    assert torch.equal(head(x), want)
    naive = nn.functional.cross_entropy(want.flatten(0, 1), y.flatten(), reduction="sum")
    sums = head(x, y)
    torch.testing.assert_close(sums.nll, naive.detach())
    sums.loss.backward()
    assert head.weight.grad is not None and head.bias.grad is not None
    fuse_head(head, make("mle"))
    torch.testing.assert_close(head(x, y).loss, naive)


def test_autocast() -> None:
    """Under autocast the head runs in bfloat16, and its gradients are float32."""
    h, w, labels, E = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        got = fused_step(h, w, labels, make("emo"), CostEmbedding.from_weight(E))
    assert got["d_weight"].dtype == torch.float32
    assert_agree(got, reference(h, w, labels, E, "emo"), 3e-2)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"labels": torch.tensor([1, V, 0])}, "label-range"),
        ({"labels": torch.tensor([1, -1, 0])}, "label-range"),
        ({"labels": torch.tensor([1.0, 2.0, 0.0])}, "dtypes"),
        ({"labels": torch.tensor([1, 2])}, "shapes"),
        ({"labels": plan_tokens(torch.tensor([1, 2]))}, "shapes"),
        ({"weights": torch.ones(2)}, "shapes"),
        ({"weight": torch.empty(0)}, "sharded-head"),
        ({"weight": torch.zeros(V, H, dtype=torch.bfloat16)}, "dtypes"),
        ({"cost": None}, "needs-cost"),
        ({"cost": CostEmbedding(torch.ones(V + 1, 2))}, "cost-vocabulary"),
        ({"softcap": -1.0}, "option-range"),
        ({"label_smoothing": 1.0}, "option-range"),
        ({"objective": make("psft")}, "needs-stored"),
        ({"objective": make("gem"), "z_loss": 1.0}, "options-clash"),
    ],
)
def test_invalid_inputs_raise(change: dict[str, Any], code: str) -> None:
    arguments = {
        "hidden": torch.zeros(3, H),
        "weight": torch.zeros(V, H),
        "labels": torch.tensor([1, 2, 0]),
        "objective": make("emo"),
        "cost": CostEmbedding(torch.ones(V, 2)),
    }
    with refused(code):
        fused_linear_loss(**arguments | change)


@pytest.mark.parametrize("name", ["emo", "mile"])
def test_losses_by_token(name: str) -> None:
    """Losses by token are empty unless requested. Then they add up to the sums, also in training."""
    h, w, labels, E = inputs()
    head = nn.Linear(H, V, bias=False)
    head.weight.data = w.detach().clone()
    fuse_head(head, make(name), CostEmbedding.from_weight(E), memory_mb=TINY_MB)
    assert head(h, labels).by_token.shape == (2, 0)
    head.spec = dataclasses.replace(head.spec, by_token=True)
    sums = head(h, labels)
    assert not sums.by_token[:, labels == -100].any() and bool(sums.by_token[1, labels != -100].all())
    torch.testing.assert_close(sums.by_token.sum(1), torch.stack((sums.loss.detach(), sums.nll)))


def test_histogram_of_the_fused_loss() -> None:
    """Median and share at the cap are those of m / D. MiLe's weights are divided by their mean."""
    h, w, labels, E = inputs(dtype=torch.float64)
    cost = CostEmbedding.from_weight(E.double())
    valid = labels != -100
    log_p = (h @ w.T).log_softmax(-1)[valid].detach()
    m = -log_p.gather(1, labels[valid][:, None])[:, 0]
    ratio = m / (log_p.exp() * cost.costs(labels[valid])).sum(1)
    sums = fused_linear_loss(h, w, labels, make("emo", ratio_cap=3.0), cost, memory_mb=2 * TINY_MB)
    assert int(sums.weights[:-1].sum()) == int(valid.sum())
    assert int(sums.weights[-1]) == int((ratio >= 3.0).sum()) > 0
    median = ratio.clamp(max=3.0).median().item()
    assert quantile(sums.weights.tolist(), 0.5) == pytest.approx(median, rel=0.1)
    weight = 1 - (log_p.exp() * log_p).sum(-1)
    sums = fused_linear_loss(h, w, labels, make("mile"))
    for share in (0.1, 0.5, 1.0):
        want = (weight / weight.mean()).quantile(share).item()
        assert quantile(sums.weights.tolist(), share) == pytest.approx(want, rel=0.2)


FRACTIONS = torch.tensor([0.25, 1.0, 0.0, 3.0, 1.7], dtype=torch.float64).repeat(N // 5)


@pytest.mark.parametrize("name", ["mle", "emo", "sum", "teacher"])
def test_weights_equal_a_float64_loop_on_dense_logits(name: str) -> None:
    """Sums and gradients in float32 agree to 1e-6."""
    h, w, labels, E = inputs(dtype=torch.float64)
    h32, w32 = (x.detach().float().requires_grad_() for x in (h, w))
    C = cost_matrix(E)
    side = Teacher(torch.randn(N, H).double(), torch.randn(V, H).double())
    objectives = {"sum": weighted_sum([(make("mle"), 0.7), (make("demd"), 0.5)])}
    objectives["teacher"] = weighted_sum([(make("mle"), 1.0), (make("kl"), 0.5)])
    total = {"loss": torch.zeros(()).double(), "nll": 0.0, "demd": 0.0, "divergence": 0.0}
    for i in (labels != -100).nonzero()[:, 0].tolist():
        log_p = (w @ h[i]).log_softmax(0)
        m, D = -log_p[labels[i]], log_p.exp() @ C[labels[i]]
        log_q = (side.weight @ side.hidden[i]).log_softmax(0)
        kl = (log_q.exp() * (log_q - log_p)).sum()
        emo = 0.5 * (m + (m / D).detach() * D)
        loss = {"mle": m, "emo": emo, "sum": 0.7 * m + 0.5 * D, "teacher": m + 0.5 * kl}[name]
        for key, value in (("loss", loss), ("nll", m), ("demd", D), ("divergence", kl)):
            total[key] = total[key] + FRACTIONS[i] * value
    total["loss"].backward()
    want = {key: value.detach() for key, value in total.items()} | {"d_hidden": h.grad, "d_weight": w.grad}
    if name != "teacher":
        del want["divergence"]
    objective = objectives[name] if name in objectives else make(name)
    for dtype, leaves, bound in ((torch.float64, (h, w), 1e-9), (torch.float32, (h32, w32), 1e-6)):
        teacher = Teacher(*(x.to(dtype) for x in side[:2])) if name == "teacher" else None
        costs = CostEmbedding.from_weight(E.to(dtype))
        options = {"memory_mb": TINY_MB, "weights": FRACTIONS.to(dtype), "teacher": teacher}
        assert_agree(fused_step(*leaves, labels, objective, costs, **options), want, bound)


@pytest.mark.parametrize("name", [*ONE_TARGET, "teacher"])
def test_a_token_of_weight_n_counts_as_n_tokens(name: str) -> None:
    """Sums, the histogram and gradients equal those of repeated tokens. Weight 0 is a mask."""
    h, w, labels, E = inputs(dtype=torch.float64)
    bias = torch.randn(V, dtype=torch.float64).requires_grad_()
    times = torch.arange(N) % 4
    cost, options = CostEmbedding.from_weight(E.double()), {"z_loss": 1e-2, "label_smoothing": 0.1}
    objective = weighted_sum([(make("emo"), 1.0), (make("jsd"), 0.5)]) if name == "teacher" else make(name)
    options = options if name == "teacher" or composes(name, options) else {}
    results = []
    for repeated in (False, True):

        def rows(x: Tensor, repeated: bool = repeated) -> Tensor:
            return x.repeat_interleave(times, 0) if repeated else x

        side = Teacher(rows(h.detach().flip(0)), w.detach() * 0.5) if name == "teacher" else None
        for leaf in (h, w, bias):
            leaf.grad = None
        sums = fused_linear_loss(
            rows(h), w, rows(labels), objective, cost, bias=bias, teacher=side, memory_mb=TINY_MB,
            stored=stored_for(rows(labels)), weights=None if repeated else times.double(), **options,
        )  # fmt: skip
        sums.loss.backward()
        kept = [sums.loss.detach(), sums.nll, sums.demd, sums.weights, sums.divergence.nan_to_num()]
        results.append([*kept, *(leaf.grad for leaf in (h, w, bias))])
    for got, want in zip(*results, strict=True):
        assert relative_error(got, want) <= 1e-9
    assert not results[0][-3][times == 0].any()


@st.composite
def batches(draw: st.DrawFn, twins: bool = True) -> dict[str, Any]:
    """Draw sizes from one token and two vocabulary entries up to the CPU's row loop, with any labels.

    twins: two tokens may have the same embedding. If a model hesitates only between them, the expected cost
    is zero or a rounding error, and EMO's loss is half of MLE's or all of it.
    """
    vocab = draw(st.one_of(st.integers(2, 80), st.just(4200)))
    tokens = draw(st.integers(1, 40))
    distinct = draw(st.integers(1, vocab))  # a small number gives many duplicates
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    labels = torch.randint(distinct, (tokens,), generator=generator)
    ignored = draw(st.sampled_from(["none", "some", "all but one", "all"]))
    if ignored == "some":
        labels[torch.rand(tokens, generator=generator) < 0.5] = -100
    elif ignored == "all but one":
        labels[1:] = -100
    elif ignored == "all":
        labels[:] = -100
    hidden = draw(st.integers(1, 12))
    width = draw(st.integers(1, 12))
    E = torch.randn(vocab, width, generator=generator)
    E[: draw(st.integers(0, 2))] = 0  # zero-norm rows
    if twins and draw(st.booleans()):
        E[-1] = E[0]  # duplicate rows
    return {
        "h": torch.randn(tokens, hidden, generator=generator),
        "w": torch.randn(vocab, hidden, generator=generator),
        "labels": labels,
        "E": E,
        "scale": draw(st.sampled_from([1e-3, 0.1, 1.0, 10.0, 1e3, 1e4])),
        "memory_mb": draw(st.sampled_from([1e-3, 1.0, None])),
    }


def fused(batch: dict[str, Any], name: str, dtype: torch.dtype, **options: Any) -> dict[str, Tensor]:
    h = (batch["h"] * batch["scale"]).to(dtype).requires_grad_()
    w = batch["w"].to(dtype).requires_grad_()
    cost = CostEmbedding.from_weight(batch["E"], torch.promote_types(dtype, torch.float32))
    beside = {"memory_mb": batch["memory_mb"], "stored": stored_for(batch["labels"])}
    return fused_step(h, w, batch["labels"], make(name), cost, **beside, **options)


@pytest.mark.slow
@SETTINGS
@given(
    batch=batches(twins=False),
    name=st.sampled_from(ONE_TARGET),
    options=st.fixed_dictionaries(
        {},
        optional={
            "z_loss": st.sampled_from([1e-4, 1e-2]),
            "label_smoothing": st.sampled_from([0.05, 0.5]),
            "softcap": st.sampled_from([2.0, 30.0]),
            "logit_scale": st.sampled_from([0.0625, 3.0]),
        },
    ),
)
def test_float64_equals_reference(batch: dict[str, Any], name: str, options: dict[str, float]) -> None:
    assume(composes(name, options))
    got, h = fused(batch, name, torch.float64, **options), batch["h"] * batch["scale"]
    want = reference(h, batch["w"], batch["labels"], batch["E"], name, **options)
    for key in ("loss", "nll", "demd"):
        torch.testing.assert_close(got[key], want[key], rtol=1e-9, atol=1e-9)
    for key in ("d_hidden", "d_weight"):
        size = max(1.0, float(want[key].abs().max()))
        torch.testing.assert_close(got[key], want[key], rtol=0, atol=1e-8 * size)


@SETTINGS
@given(
    batch=batches(),
    name=st.sampled_from(ONE_TARGET),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
)
def test_half_precision_stays_finite(batch: dict[str, Any], name: str, dtype: torch.dtype) -> None:
    """All results are finite, and most losses never negative, with logits up to +-1e4 (float16: +-100)."""
    if dtype == torch.float16:
        # beyond it, the true gradient of the head exceeds the range of float16
        batch = batch | {"scale": min(batch["scale"], 10.0)}
    got = fused(batch, name, dtype)
    assert all(torch.isfinite(value).all() for value in got.values())
    assert all(got[key] >= 0 for key in ("loss", "nll", "demd")) or name in SIGNED
    if int(got["tokens"]) == 0:
        assert got["loss"].item() == 0 and got["d_weight"].count_nonzero() == 0
