"""Conversions between NumPy and Arrow arrays without pandas, whose import takes half a second."""

from __future__ import annotations

import numpy as np
import pyarrow as pa


def array_of(values: np.ndarray) -> pa.Array:
    """Return numbers as an Arrow array that shares their memory."""
    values = np.ascontiguousarray(values)
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [None, pa.py_buffer(values)])


def lists_of(offsets: np.ndarray, values: np.ndarray) -> pa.ListArray:
    """Return lists of numbers. offsets: the beginning of each list in the values, and the end of the last."""
    child = array_of(values)
    buffers = [None, pa.py_buffer(np.ascontiguousarray(offsets, np.int32))]
    return pa.Array.from_buffers(pa.list_(child.type), len(offsets) - 1, buffers, children=[child])


def bytes_of(offsets: np.ndarray, values: bytes) -> pa.Array:
    """Return byte strings. offsets: the beginning of each string in the values, and the end of the last."""
    buffers = [None, pa.py_buffer(np.ascontiguousarray(offsets, np.int64)), pa.py_buffer(values)]
    return pa.Array.from_buffers(pa.large_binary(), len(offsets) - 1, buffers)


def numbers_of(column: pa.Array | pa.ChunkedArray) -> np.ndarray:
    """Return the integers of a column without nulls."""
    chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    parts = [np.from_dlpack(chunk) for chunk in chunks if len(chunk)]
    dtype = np.dtype(str(column.type))  # Arrow and NumPy use the same names of integers
    return parts[0] if len(parts) == 1 else np.concatenate([np.zeros(0, dtype), *parts])
