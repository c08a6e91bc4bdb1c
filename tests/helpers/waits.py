"""Counts where the host waits for the device: on a GPU PyTorch tells, on a CPU the calls that would wait."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name

# They hand values of a device's tensor, or a shape that depends on values, to the host; the last three bring
# values of the host to the device from memory that is not pinned.
WAITING = {
    *("__bool__", "__float__", "__index__", "__int__", "allclose", "argwhere", "bincount", "cpu", "equal"),
    *("item", "masked_select", "nonzero", "repeat_interleave", "tolist", "unique", "unique_consecutive"),
    *("as_tensor", "new_tensor", "tensor"),
}


class _Calls(TorchFunctionMode):
    def __init__(self, found: list[str]) -> None:
        self.found = found

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = (resolve_name(function) or getattr(function, "__name__", "")).rpartition(".")[2]
        by_mask = name in ("__getitem__", "__setitem__") and _has_mask(args[1])
        if name in WAITING or by_mask:
            self.found.append(name)
        return function(*args, **(kwargs or {}))


def _has_mask(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, Tensor) and part.dtype == torch.bool for part in parts)


@contextlib.contextmanager
def waits() -> Iterator[list[str]]:
    """Within the block the list grows by a name for each time the host waits."""
    found: list[str] = []
    if not torch.cuda.is_available():
        with _Calls(found):
            yield found
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")
            found += [str(w.message) for w in caught if "synchroniz" in str(w.message)]
