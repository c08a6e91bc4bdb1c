"""Padded rows, whose gaps never count, and half-precision products through float32."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch

from emo.pipeline.loss import cost as tensors
from emo.pipeline.loss.cost import ALIGNMENT, CostEmbedding, padded_rows, padded_width, touchable
from emo.pipeline.loss.fused import fused_linear_loss
from tests.helpers.loss_reference import relative_error
from tests.loss.test_objectives import make

V, H = 150, 12
DTYPES = [torch.bfloat16, torch.float16]
META = torch.device("meta")


@contextlib.contextmanager
def padded_everywhere() -> Iterator[None]:
    """Pad rows as on an accelerator within the block, with NaN in uninitialised memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensors, "row_stride", lambda V, device: padded_width(V))
        torch.use_deterministic_algorithms(True)  # fills memory that is not initialised
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("V", [64, 150, 32000, 50257, 152064])
def test_rows_are_aligned_on_an_accelerator(V: int) -> None:
    rows = padded_rows(3, V, torch.bfloat16, META)
    assert rows.shape == (3, V)
    assert rows.stride(0) % ALIGNMENT == 0 and rows.stride(0) - V < ALIGNMENT
    assert touchable(rows) == rows.stride(0)
    assert padded_rows(3, V, torch.bfloat16, torch.device("cpu")).is_contiguous()


def test_kernels_touch_columns_that_all_rows_have() -> None:
    padded = padded_rows(3, 150, torch.float32, META)
    whole = torch.empty(3, 150, device=META)
    assert touchable(whole) == touchable(padded, whole) == 150
    assert touchable(padded[1:2], padded[:0]) == 192


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("cache_mb", [0.0, 0.05])
@pytest.mark.parametrize(
    ("name", "options"), [("mle", {}), ("emo", {}), ("gem", {}), ("mile", {"softcap": 5.0})]
)
def test_padded_rows_change_nothing(
    name: str, options: dict[str, float], cache_mb: float, dtype: torch.dtype
) -> None:
    """Losses and gradients over several chunks are those of contiguous rows."""
    torch.manual_seed(0)
    E, labels = torch.randn(V, H), torch.randint(V, (40,))
    results = []
    for padded in (False, True):
        with padded_everywhere() if padded else contextlib.nullcontext():
            torch.manual_seed(1)
            h = torch.randn(40, H).to(dtype).requires_grad_()
            w = torch.randn(V, H).to(dtype).requires_grad_()
            costs = CostEmbedding.from_weight(E, cache_mb=cache_mb)
            got = fused_linear_loss(h, w, labels, make(name), costs, memory_mb=0.005, **options)
            got.loss.backward()
        results.append((got.loss.detach(), got.nll, got.demd, h.grad, w.grad))
    bound = 1e-2 if dtype == torch.bfloat16 else 1e-6
    for plain, other in zip(*results, strict=True):
        assert relative_error(other, plain) <= bound


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 1024, 2500])
def test_products_are_rounded_once(dtype: torch.dtype, rows: int) -> None:
    """At most half a unit in the last place from the product of the same factors in float64."""
    torch.manual_seed(0)
    x, matrix, less = torch.randn(5, 33).to(dtype), torch.randn(rows, 33).to(dtype), torch.randn(5).to(dtype)
    exact = x.double() @ matrix.double().T - less.double()[:, None]
    out = torch.empty(5, rows, dtype=dtype)
    tensors.against_rows(x, matrix, out, less)
    digits = torch.finfo(dtype).eps
    assert ((out.double() - exact).abs() <= digits / 2 * exact.abs() * 1.01 + 1e-6).all()
    y = torch.randn(5, rows).to(dtype)
    product = tensors.with_rows(y, matrix)
    assert product.dtype == torch.float32
    torch.testing.assert_close(product.double(), y.double() @ matrix.double(), rtol=1e-5, atol=1e-4)
