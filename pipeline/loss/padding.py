"""Rows that start where vector loads and aligned matrix products want them to, whatever the vocabulary.

A row of V = 50257 numbers ends in the middle of a vector, and the next one would start there: a kernel then
reads one number at a time, and a matrix product takes its slow road. On an accelerator rows therefore lie
ALIGNMENT numbers apart, or a multiple of that. What stands between them is nobody's: kernels may read and
write it, so that the last vector of a row is a whole one, and must not use it.
"""

from __future__ import annotations

import torch
from torch import Tensor

ALIGNMENT = 64  # numbers; 128 bytes in half precision, a line of the cache


def padded_width(V: int) -> int:
    """V rounded up to whole multiples of ALIGNMENT."""
    return -(-V // ALIGNMENT) * ALIGNMENT


def row_stride(V: int, device: torch.device) -> int:
    """Numbers from one row to the next. On a CPU none are left out: what runs there wants whole matrices."""
    return V if device.type == "cpu" else padded_width(V)


def padded_rows(n: int, V: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Room for n rows [n, V]."""
    return torch.empty(n, row_stride(V, device), dtype=dtype, device=device)[:, :V]


def touchable(*rows: Tensor) -> int:
    """Columns that a kernel may touch in each of `rows` [n, V]: past V where all of them are padded."""
    V = rows[0].shape[1]
    width = padded_width(V)
    return width if all(part.stride(0) >= width for part in rows) else V
