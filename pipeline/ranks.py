"""The ranks of a run as torch.distributed knows them: who waits for whom, and for how long."""

from __future__ import annotations

import contextlib
import datetime
import socket
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from common.errors import UserError

T = TypeVar("T")

PATIENCE = 60.0  # minutes: loading, saving and exporting, where one rank may work while the others wait


class World(NamedTuple):
    """This process among the ranks."""

    rank: int
    ranks: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def barrier() -> None:
    """Wait for all ranks."""
    dist.barrier()


def gather_objects(value: Any, group: Any = None) -> list[Any]:
    """Return `value` of every rank, in rank order, on every rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group=group)
    return values


def first_reason(reason: str | None) -> str | None:
    """Return the reason of the first rank that has one, on every rank; all must call."""
    return next((text for text in gather_objects(reason) if text is not None), None)


def agreed(work: Callable[[], T]) -> T:
    """Return what `work` returns on this rank; a UserError of any rank is raised on all of them.

    All ranks must call. So a mistake that only one host can see ends the run with one line, not with ranks
    that wait for the one that has left.
    """
    result, error = None, None
    try:
        result = work()
    except UserError as mistake:
        error = mistake
    errors = gather_objects((socket.gethostname(), error))
    host, first = next(((h, e) for h, e in errors if e is not None), ("", None))
    if first is not None:
        text = str(first) if all(e is not None for _, e in errors) else f"on {host}: {first}"
        raise type(first)(text, code=first.code)
    return cast("T", result)


def on_main(world: World, work: Callable[[], None]) -> None:
    """Run `work` on rank 0 while the others wait; its UserError is raised on all ranks. All must call."""
    error = None
    if world.is_main:
        try:
            work()
        except UserError as mistake:
            error = mistake
    error = gather_objects(error)[0]
    if error is not None:
        raise error


def host_group() -> Any:
    """Return a process group of all ranks through host memory, for a thread that works beside training."""
    return dist.new_group(backend="gloo", timeout=datetime.timedelta(minutes=PATIENCE))


def wait_at_most(minutes: float, spare: Any = None) -> None:
    """Set how long a collective may take before it counts as failed, in every group except `spare`."""
    for group in list(distributed_c10d._world.pg_map):
        if group is not spare:
            distributed_c10d._set_pg_timeout(datetime.timedelta(minutes=minutes), group)


@contextlib.contextmanager
def patience(minutes: float, spare: Any = None) -> Iterator[None]:
    """Let ranks wait for PATIENCE minutes within the block, afterwards for `minutes`."""
    wait_at_most(PATIENCE, spare)
    yield
    wait_at_most(minutes, spare)


# What gloo and NCCL say, in small letters, of a rank that is gone or was never reached. Their other errors
# are about this host: two ranks on one GPU, too little shared memory.
LOST = (
    *("connection closed by peer", "connection reset by peer", "broken pipe", "timed out", "wait timeout"),
    *("socket timeout", "connection refused", "no route to host", "network is unreachable"),
    *("failed to recv, got 0 bytes", "connection was likely closed", "possible application crash on rank"),
    *("ncclremoteerror", "exit of a remote peer", "communicator was aborted", "watchdog caught"),
)


def lost_a_peer(error: Exception) -> bool:
    """Return whether a rank could not be reached, or a collective failed because it has died or hangs."""
    if isinstance(error, dist.DistNetworkError | dist.DistStoreError):
        return True
    several = dist.is_initialized() and dist.get_world_size() > 1
    text = str(error).lower()
    return isinstance(error, RuntimeError) and several and any(sign in text for sign in LOST)


def end_world() -> None:
    """Leave the process group."""
    if dist.is_initialized():
        dist.destroy_process_group()
