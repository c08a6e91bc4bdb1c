"""Record where the host waits for the device, and the shapes of tensors.

On a GPU, PyTorch reports where the host waits. On a CPU, the calls that would wait are recorded.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode

# Operations that return a value to the host, or whose result has a size that depends on values.
READING = {
    *("_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "bincount"),
    *("unique_consecutive", "unique_dim", "_unique2", "repeat_interleave"),
}
# Calls that are not dispatched as operations on a CPU. They copy to the host, or from unpinned memory.
MOVING = {"tolist", "cpu", "tensor", "as_tensor", "new_tensor"}


@contextlib.contextmanager
def shapes() -> Iterator[set[torch.Size]]:
    """Yield a set that collects the shapes of all tensors that operations return within the block."""
    results: set[torch.Size] = set()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            tensors = out if isinstance(out, (tuple, list)) else (out,)
            results.update(tensor.shape for tensor in tensors if isinstance(tensor, Tensor))
            return out

    with Watch():
        yield results


@contextlib.contextmanager
def waits() -> Iterator[list[str]]:
    """Yield a list that gets a name whenever the host waits within the block."""
    names: list[str] = []

    class Operations(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = func.overloadpacket.__name__
            by_mask = name in ("index", "index_put_") and any(
                isinstance(index, Tensor) and index.dtype == torch.bool for index in args[1]
            )
            if name in READING or by_mask:
                names.append(name)
            return func(*args, **(kwargs or {}))

    class Calls(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = (resolve_name(function) or getattr(function, "__name__", "")).rpartition(".")[2]
            if name in MOVING:
                names.append(name)
            return function(*args, **(kwargs or {}))

    if not torch.cuda.is_available():
        with Calls(), Operations():
            yield names
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield names
        finally:
            torch.cuda.set_sync_debug_mode(mode)
            names += [str(w.message) for w in caught if "synchroniz" in str(w.message)]
