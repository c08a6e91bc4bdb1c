"""A simulated GPU, which counts the launches and the memory of GPU code on tensors without data.

Tensors on the meta device have shapes but no numbers. Within `traced` they report that they are on CUDA, so
that code takes the GPU path. An operation that needs a value on the host raises.
"""

from __future__ import annotations

import collections
import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

# Operations that launch no kernel. They create views, allocate memory or wrap a Python number.
FREE = {
    *("view", "_unsafe_view", "as_strided", "alias", "detach", "t", "transpose", "permute", "expand"),
    *("slice", "select", "split", "split_with_sizes", "unbind", "unsqueeze", "squeeze", "reshape"),
    *("empty", "empty_like", "new_empty", "empty_strided", "lift_fresh", "promote_types"),
}


class Trace(TorchDispatchMode):
    """A dispatch mode that counts operations on a device by name, and the bytes that their results hold."""

    def __init__(
        self,
        *inputs: Tensor,
        counts: Callable[[Tensor], bool] = lambda tensor: True,
        device: str = "meta",
    ) -> None:
        """inputs: tensors whose memory is not counted. counts: whether to count another tensor's memory."""
        super().__init__()
        self.counts, self.device = counts, device
        self.launches: collections.Counter[str] = collections.Counter()
        self.held = self.peak = 0
        self._seen = {tensor.untyped_storage()._cdata for tensor in inputs}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [
            x for x in pytree.tree_leaves(out) if isinstance(x, Tensor) and x.device.type == self.device
        ]
        name = func.overloadpacket.__name__
        if tensors and name not in FREE:
            self.launches[name] += 1
        for tensor in filter(self.counts, tensors):
            self.hold(tensor)
        return out

    def hold(self, tensor: Tensor) -> None:
        """Count the memory of `tensor` until it is freed."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._seen:
            return
        self._seen.add(key)
        self.held += size
        self.peak = max(self.peak, self.held)
        weakref.finalize(storage, self._release, key, size)

    def _release(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.held -= size


@contextlib.contextmanager
def traced(*inputs: Tensor, **options: Any) -> Iterator[Trace]:
    """Trace operations on the meta device within the block, and let its tensors report that they are on CUDA.

    The arguments are passed to `Trace`.
    """
    with (
        mock.patch.object(Tensor, "is_cuda", property(lambda tensor: tensor.is_meta), create=True),
        mock.patch.object(Tensor, "pin_memory", lambda tensor: tensor),
        Trace(*inputs, **options) as trace,
    ):
        yield trace
