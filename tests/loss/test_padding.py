"""Rows that are padded for the sake of vector loads: nothing of what stands between them ever counts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch

from pipeline.loss import padding
from pipeline.loss.cost import CostEmbedding
from pipeline.loss.fused import fused_linear_loss
from pipeline.loss.tensors import ALIGNMENT, padded_rows, padded_width, touchable
from tests.helpers.loss_reference import relative_error
from tests.loss.test_objectives import make

V, H = 150, 12
META = torch.device("meta")


@contextlib.contextmanager
def rows_apart() -> Iterator[None]:
    """Within the block rows lie apart as on an accelerator, and NaN stands wherever nothing was written."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(padding, "row_stride", lambda V, device: padded_width(V))
        torch.use_deterministic_algorithms(True)  # fills memory that is not initialised
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("V", [64, 150, 32000, 50257, 152064])
def test_rows_start_at_aligned_places_on_an_accelerator(V: int) -> None:
    found = padded_rows(3, V, torch.bfloat16, META)
    assert found.shape == (3, V)
    assert found.stride(0) % ALIGNMENT == 0 and found.stride(0) - V < ALIGNMENT
    assert touchable(found) == found.stride(0)
    assert padded_rows(3, V, torch.bfloat16, torch.device("cpu")).is_contiguous()


def test_only_what_all_rows_have_may_be_touched() -> None:
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
    """Products into rows that lie apart, and all that reads them, over several chunks."""
    torch.manual_seed(0)
    E, labels = torch.randn(V, H), torch.randint(V, (40,))
    results = []
    for apart in (False, True):
        with rows_apart() if apart else contextlib.nullcontext():
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


def test_what_is_not_written_is_not_a_number() -> None:
    """Otherwise the test above would pass whatever was read."""
    with rows_apart():
        found = padded_rows(2, V, torch.float32, torch.device("cpu"))
    assert found.stride(0) == 192 and bool(found.isnan().all())
