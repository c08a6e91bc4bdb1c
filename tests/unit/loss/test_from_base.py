"""KL(base, model) per token, against float64 sums over dense logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from emo.pipeline.loss import IGNORE, Teacher, get_objective, plan_tokens
from emo.pipeline.loss.from_base import kl_from_base, most_likely
from emo.pipeline.loss.fused import make_spec
from tests.helpers.loss_reference import logits_of

N, V, H = 70, 301, 16
SPEC = make_spec(get_objective("mle"), None, memory_mb=0.001)  # 16 tokens per chunk


def model(dtype: torch.dtype, change: float, **fields: Any) -> Teacher:
    """Return a model whose hidden states differ from those of the base by noise of size `change`."""
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(V, H, generator=generator), torch.randn(V, generator=generator)
    hidden, noise = torch.randn(2, N, H, generator=generator)
    if fields.pop("biased", False):
        fields["bias"] = bias.to(dtype)
    return Teacher((hidden + change * noise).to(dtype), weight.to(dtype), **fields)


def dense_log_p(side: Teacher) -> Tensor:
    hidden, weight = side.hidden.double(), side.weight.double()  # type: ignore[union-attr]
    bias = None if side.bias is None else side.bias.double()
    return logits_of(hidden, weight, bias, side.softcap, side.logit_scale).log_softmax(-1)


def labels() -> Tensor:
    generator = torch.Generator().manual_seed(7)
    labels = torch.randint(V, (N,), generator=generator)
    return labels.masked_fill(torch.rand(N, generator=generator) < 0.3, IGNORE)


def divide(log_p: Tensor, ids: Tensor) -> Tensor:
    """Return log p of the tokens `ids`, and of all other tokens together."""
    p = log_p.exp()
    return torch.cat((p.gather(1, ids), 1 - p.gather(1, ids).sum(1, keepdim=True)), 1).log()


@pytest.mark.parametrize("fields", [{}, {"biased": True, "softcap": 5.0, "logit_scale": 0.5}])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_kl_is_exact_or_that_of_the_stored_entries(dtype: torch.dtype, fields: dict[str, Any]) -> None:
    """Stored entries give at most the exact value, and exactly that if only one token is missing."""
    base, now = (model(dtype, change, **fields) for change in (0.0, 0.3))
    y = labels()
    used = y != IGNORE
    log_p, log_q = (dense_log_p(side) for side in (base, now))
    exact = (log_p.exp() * (log_p - log_q)).sum(1) * used
    precision: dict[str, Any] = {"rtol": 1e-6 if dtype == torch.float64 else 1e-5, "atol": 1e-6}
    live = kl_from_base(now, base, plan_tokens(y), SPEC)
    torch.testing.assert_close(live.double(), exact, **precision)
    assert float(live.double().sum() - exact.sum()) / int(used.sum()) == pytest.approx(0, abs=1e-6)
    for k in (5, V - 1):
        stored = most_likely(base, plan_tokens(y), k, SPEC)
        assert stored.ids.shape == (int(used.sum()), k)
        listed = torch.zeros(N, k, dtype=torch.int64)
        listed[used] = stored.ids
        p, q = (divide(side, listed) for side in (log_p, log_q))
        expected = (p.exp() * (p - q)).sum(1) * used if k == 5 else exact
        value = kl_from_base(now, stored, y, SPEC)
        torch.testing.assert_close(value.double(), expected, **precision)
        assert bool((expected <= exact + 1e-12).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_base_has_no_divergence_from_itself(dtype: torch.dtype) -> None:
    side, y = model(dtype, 0), labels()
    for base in (side, most_likely(side, y, 8, SPEC)):
        assert not kl_from_base(side, base, y, SPEC).any()


def test_a_batch_without_supervised_tokens_has_no_divergence() -> None:
    side, y = model(torch.float32, 0), torch.full((N,), IGNORE)
    stored = most_likely(side, y, 8, SPEC)
    assert stored.ids.shape == (0, 8) and stored.log_p.shape == (0, 9)
    for base in (side, stored):
        assert not kl_from_base(model(torch.float32, 0.3), base, y, SPEC).any()
