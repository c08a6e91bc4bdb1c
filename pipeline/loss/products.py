"""Matrix products of half-precision factors: in float32, or on a CPU that has no instructions for them.

There a product in bfloat16 takes four times as long as one in float32 (measured with AVX-512). So the factors
are widened, the larger one a block of rows at a time: the same products in float32, and more exact.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

BLOCK = 1024  # rows of the large factor at a time: the product stays in the cache


@functools.cache
def _lacks_instructions() -> bool:
    """Whether this is an x86 CPU without bfloat16 products; other CPUs are left alone."""
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        return False
    return not (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def widens(factor: Tensor) -> bool:
    """Whether products with `factor` are better done here than by `torch.mm`."""
    return factor.device.type == "cpu" and factor.element_size() == 2 and _lacks_instructions()


def half_dtype(device: torch.device) -> torch.dtype:
    """Return the half precision with most digits for numbers up to 1 whose products are fast on `device`."""
    return torch.bfloat16 if device.type == "cpu" and not _lacks_instructions() else torch.float16


def in_float32(x: Tensor, rows: Tensor, out: Tensor | None = None) -> Tensor:
    """Return x rows^T for half-precision x [n, k] and rows [m, k] in float32, or in a float32 `out`."""
    out = x.new_empty(len(x), len(rows), dtype=torch.float32) if out is None else out
    if x.is_cuda:
        return torch.mm(x, rows.t(), out_dtype=torch.float32, out=out)
    against_rows(x, rows, out)
    return out


def _blocks(matrix: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Rows of a matrix in float32, some at a time."""
    for start in range(0, len(matrix), BLOCK):
        part = slice(start, start + BLOCK)
        yield part, matrix[part].float()


def against_rows(x: Tensor, rows: Tensor, out: Tensor, less: Tensor | None = None) -> None:
    """out = x rows^T - less;  x [n, k], rows [m, k], out [n, m] of any dtype, less [n]. Rounded once."""
    wide = x.float()
    for part, block in _blocks(rows):
        found = torch.mm(wide, block.t())
        out[:, part] = found if less is None else found.sub_(less[:, None])


def with_rows(x: Tensor, rows: Tensor) -> Tensor:
    """x rows, in float32;  x [n, m], rows [m, k]."""
    found = torch.zeros(len(x), rows.shape[1])
    for part, block in _blocks(rows):
        found.addmm_(x[:, part].float(), block)
    return found
