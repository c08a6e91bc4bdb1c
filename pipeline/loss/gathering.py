"""Reading a parameter that several ranks hold in pieces, whichever library cut it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import Tensor


def is_partitioned(weight: Tensor) -> bool:
    """Whether DeepSpeed ZeRO-3 holds the parameter in pieces; only its engine's hooks bring it together."""
    return hasattr(weight, "ds_id")


def is_distributed(weight: Tensor) -> bool:
    """Whether the parameter is a DTensor, as FSDP2 and tensor parallelism make them."""
    return hasattr(weight, "full_tensor")


@contextlib.contextmanager
def whole(weight: Tensor) -> Iterator[Tensor]:
    """Within the block: all of `weight`, detached. A collective call where ZeRO-3 or FSDP2 cut it."""
    if is_partitioned(weight):
        import deepspeed  # has been imported already: it made the pieces

        with deepspeed.zero.GatheredParameters([weight], modifier_rank=None):
            yield weight.detach()
    elif is_distributed(weight):
        yield weight.detach().full_tensor()  # type: ignore[attr-defined]
    else:
        yield weight.detach()
