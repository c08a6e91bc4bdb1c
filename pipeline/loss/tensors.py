"""Tensors as the hardware wants them: padded rows, products in half precision, gathered parameters.

Padding. A row of V = 50257 numbers ends in the middle of a vector, and the next one would start there: a
kernel then reads one number at a time, and a matrix product takes its slow path. On an accelerator rows
therefore lie a multiple of ALIGNMENT numbers apart. Kernels may read and write the numbers between two rows,
so that the last vector of a row is a whole one, and must not use them.

Products. On a CPU without instructions for bfloat16 a product takes four times as long in it as in float32
(measured with AVX-512). There the factors are widened, the larger one a block of rows at a time: the same
products in float32, and more exact.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import torch
from torch import Tensor

ALIGNMENT = 64  # numbers; 128 bytes in half precision, a line of the cache
BLOCK = 1024  # rows of the large factor at a time: the product stays in the cache


def padded_width(V: int) -> int:
    """Return V rounded up to whole multiples of ALIGNMENT."""
    return -(-V // ALIGNMENT) * ALIGNMENT


def row_stride(V: int, device: torch.device) -> int:
    """Return the numbers from one row to the next; V on a CPU, whose products want whole matrices."""
    return V if device.type == "cpu" else padded_width(V)


def padded_rows(n: int, V: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return memory for n rows [n, V], uninitialised."""
    return torch.empty(n, row_stride(V, device), dtype=dtype, device=device)[:, :V]


def touchable(*rows: Tensor) -> int:
    """Return how many columns a kernel may touch in each of `rows` [n, V]: above V where all are padded."""
    V = rows[0].shape[1]
    width = padded_width(V)
    return width if all(part.stride(0) >= width for part in rows) else V


@functools.cache
def _lacks_instructions() -> bool:
    """Return True on an x86 CPU without bfloat16 products; other CPUs are left alone."""
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        return False
    return not (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def widens(factor: Tensor) -> bool:
    """Return True where products with `factor` are faster through the functions below than `torch.mm`."""
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


def against_rows(x: Tensor, rows: Tensor, out: Tensor, less: Tensor | None = None) -> None:
    """Write x rows^T - less, rounded once, to `out` [n, m] of any dtype; x [n, k], rows [m, k], less [n]."""
    wide = x.float()
    for start in range(0, len(rows), BLOCK):
        part = slice(start, start + BLOCK)
        product = torch.mm(wide, rows[part].float().t())
        out[:, part] = product if less is None else product.sub_(less[:, None])


def with_rows(x: Tensor, rows: Tensor) -> Tensor:
    """Return x rows [n, k] in float32;  x [n, m], rows [m, k]."""
    product = torch.zeros(len(x), rows.shape[1])
    for start in range(0, len(rows), BLOCK):
        part = slice(start, start + BLOCK)
        product.addmm_(x[:, part].float(), rows[part].float())
    return product


def is_partitioned(weight: Tensor) -> bool:
    """Return True where DeepSpeed ZeRO-3 partitions the parameter; only its engine's hooks gather it."""
    return hasattr(weight, "ds_id")


def is_distributed(weight: Tensor) -> bool:
    """Return True for a DTensor, as FSDP2 and tensor parallelism make them."""
    return hasattr(weight, "full_tensor")


@contextlib.contextmanager
def whole(weight: Tensor) -> Iterator[Tensor]:
    """Yield all of `weight`, detached. A collective call where ZeRO-3 or FSDP2 partitions it."""
    if is_partitioned(weight):
        import deepspeed  # has been imported already: it partitioned the parameter

        with deepspeed.zero.GatheredParameters([weight], modifier_rank=None):
            yield weight.detach()
    elif is_distributed(weight):
        yield weight.detach().full_tensor()  # type: ignore[attr-defined]
    else:
        yield weight.detach()
