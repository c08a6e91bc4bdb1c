"""Hypothesis: whatever the shapes, dtypes, labels and sizes of logits, the fused loss is the reference's."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from emo.pipeline.loss.cost import CostEmbedding
from emo.pipeline.loss.fused import fused_linear_loss
from tests.helpers.loss_reference import reference, stored_for
from tests.loss.test_objectives import ONE_TARGET, SIGNED, composes, make

SETTINGS = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def batches(draw: st.DrawFn, twins: bool = True) -> dict[str, Any]:
    """Shapes from one token and a vocabulary of two up to the CPU's row loop; any pattern of labels.

    twins: two tokens may have the same embedding. Where a model doubts between those alone the expected cost
    is zero or what rounding leaves of it, and EMO's loss half of the likelihood's or all of it.
    """
    vocab = draw(st.one_of(st.integers(2, 80), st.just(4200)))
    tokens = draw(st.integers(1, 40))
    distinct = draw(st.integers(1, vocab))  # few: many duplicate labels
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


def run(batch: dict[str, Any], name: str, dtype: torch.dtype, **options: Any) -> tuple[Any, Tensor, Tensor]:
    h = (batch["h"] * batch["scale"]).to(dtype).requires_grad_()
    w = batch["w"].to(dtype).requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cost = CostEmbedding.from_weight(batch["E"], torch.promote_types(dtype, torch.float32))
    labels, memory_mb = batch["labels"], batch["memory_mb"]
    beside = {"memory_mb": memory_mb, "stored": stored_for(labels)}
    sums = fused_linear_loss(h, w, labels, make(name), cost, **beside, **options)
    sums.loss.backward()
    return sums, h, w


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
    sums, h, w = run(batch, name, torch.float64, **options)
    want = reference(h, w, batch["labels"], batch["E"], name, **options)
    for got, key in ((sums.loss, "loss"), (sums.nll, "nll"), (sums.demd, "demd")):
        torch.testing.assert_close(got.detach(), want[key], rtol=1e-9, atol=1e-9)
    for got, key in ((h.grad, "d_hidden"), (w.grad, "d_weight")):
        size = max(1.0, float(want[key].abs().max()))
        torch.testing.assert_close(got, want[key], rtol=0, atol=1e-8 * size)


@SETTINGS
@given(
    batch=batches(),
    name=st.sampled_from(ONE_TARGET),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
)
def test_half_precision_stays_finite(batch: dict[str, Any], name: str, dtype: torch.dtype) -> None:
    """No NaN, no infinity, no negative loss, from uniform to logits of +-1e4 (float16: +-100)."""
    if dtype == torch.float16:
        # beyond it the true gradient of the head leaves float16's range
        batch = batch | {"scale": min(batch["scale"], 10.0)}
    sums, h, w = run(batch, name, dtype)
    for value in (sums.loss.detach(), sums.nll, sums.demd):
        assert torch.isfinite(value)
        assert value >= 0 or name in SIGNED
    assert torch.isfinite(h.grad).all()
    assert torch.isfinite(w.grad).all()
    if int(sums.tokens) == 0:
        assert sums.loss.item() == 0
        assert w.grad.count_nonzero() == 0


@SETTINGS
@given(batch=batches(), name=st.sampled_from(ONE_TARGET), seed=st.integers(0, 1000))
def test_order_of_tokens_does_not_matter(batch: dict[str, Any], name: str, seed: int) -> None:
    """Permuting tokens permutes the hidden gradients and leaves everything else alone."""
    sums, h, w = run(batch, name, torch.float64)
    order = torch.randperm(len(batch["labels"]), generator=torch.Generator().manual_seed(seed))
    other = batch | {"h": batch["h"][order], "labels": batch["labels"][order]}
    moved, h_moved, w_moved = run(other, name, torch.float64)
    torch.testing.assert_close(moved.loss, sums.loss, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(h_moved.grad, h.grad[order], rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(w_moved.grad, w.grad, rtol=1e-8, atol=1e-8 * max(1.0, batch["scale"]))
