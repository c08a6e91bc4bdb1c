"""Half-precision products through float32: right wherever they are made, and made where they pay."""

from __future__ import annotations

import pytest
import torch

from pipeline.loss import products
from pipeline.loss.cost import CostEmbedding
from pipeline.loss.fused import fused_linear_loss
from tests.helpers.loss_reference import relative_error
from tests.loss.test_objectives import make

DTYPES = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 1024, 2500])
def test_products_are_rounded_once(dtype: torch.dtype, rows: int) -> None:
    """At most half a unit in the last place from the product of the same factors in float64."""
    torch.manual_seed(0)
    x, matrix, less = torch.randn(5, 33).to(dtype), torch.randn(rows, 33).to(dtype), torch.randn(5).to(dtype)
    exact = x.double() @ matrix.double().T - less.double()[:, None]
    out = torch.empty(5, rows, dtype=dtype)
    products.against_rows(x, matrix, out, less)
    digits = torch.finfo(dtype).eps
    assert ((out.double() - exact).abs() <= digits / 2 * exact.abs() * 1.01 + 1e-6).all()
    y = torch.randn(5, rows).to(dtype)
    found = products.with_rows(y, matrix)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), y.double() @ matrix.double(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_both_roads_lead_to_the_same_loss(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for lacks in (False, True):
        monkeypatch.setattr(products, "_lacks_instructions", lambda lacks=lacks: lacks)
        torch.manual_seed(0)
        h, w = (
            torch.randn(60, 16).to(dtype).requires_grad_(),
            torch.randn(1500, 16).to(dtype).requires_grad_(),
        )
        cost = CostEmbedding.from_weight(w.detach())
        sums = fused_linear_loss(h, w, torch.arange(60) * 20, make("emo"), cost, memory_mb=0.1)
        sums.loss.backward()
        results.append((sums.loss.detach(), h.grad, w.grad))
    for plain, widened in zip(*results, strict=True):
        assert relative_error(widened, plain) <= 2e-2


def test_where_they_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """On an x86 CPU without bfloat16 instructions, for half precision; nowhere else."""
    asked = products._lacks_instructions.__wrapped__
    for capability, has_bf16, has_amx, lacks in (
        ("AVX512", False, False, True),
        ("AVX2", False, False, True),
        ("AVX512", True, False, False),
        ("AVX512", True, True, False),
        ("DEFAULT", False, False, False),
    ):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda it=capability: it)
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda it=has_bf16: it)
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda it=has_amx: it)
        assert asked() == lacks
    monkeypatch.setattr(products, "_lacks_instructions", lambda: True)
    assert products.widens(torch.empty(1, dtype=torch.bfloat16))
    assert not products.widens(torch.empty(1))
    assert not products.widens(torch.empty(1, dtype=torch.bfloat16, device="meta"))
