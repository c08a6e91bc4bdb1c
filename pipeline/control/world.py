"""The ranks of a run: collectives on Python objects, timeouts, and the exit code of a failed rank.

| kind of error | exit code before the first step of a launch | later |
|---|---|---|
| the hardware or driver of this host | 1 | 1 |
| another rank was lost, or never reached | 1 | 1 |
| a disk, file server or connection that may come back | 1 | 1 |
| a file that is missing, damaged or not accessible | 2 | 2 |
| out of memory, on a GPU or the host | 2 | 1 |
| anything else, such as a bug or a missing library | 2 | 1 |

Code 1 means that another start may succeed, perhaps on another host. Code 2 means that it will not. The same
holds for a launch that resumes a run.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import re
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import OutOfMemoryError
from torch.distributed import distributed_c10d

from emo.common.errors import PERMANENT, ExitCode, UserError, iterate_causes, may_pass, one_line

from .heartbeat import find_late_rank, is_accounted_for
from .run_dir import RANKS, TRACE
from .stop import HARDWARE, RESUME, node_name

T = TypeVar("T")

TRACE_SECONDS = 5.0  # in which all ranks that waited have left their traces
LONG_TIMEOUT = 60.0  # minutes: for loading, saving and exporting, while which one rank may work alone


class World(NamedTuple):
    """This process among the ranks."""

    rank: int
    ranks: int
    device: torch.device
    sequence: int = 1  # consecutive ranks that share every row

    @property
    def replica(self) -> int:
        """Return the number of this rank's group among the groups that read different rows."""
        return self.rank // self.sequence

    @property
    def replicas(self) -> int:
        """Return the number of groups that read different rows."""
        return self.ranks // self.sequence

    @property
    def part(self) -> int:
        """Return the number of this rank's part of every row."""
        return self.rank % self.sequence

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def gather_objects(value: Any, group: Any = None) -> list[Any]:
    """Return `value` of every rank, in rank order, on every rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group=group)
    return values


def first_reason(reason: str | None) -> str | None:
    """Return the reason of the first rank that has one, on every rank; all must call."""
    return next((text for text in gather_objects(reason) if text is not None), None)


def raise_on_all_ranks(work: Callable[[], T]) -> T:
    """Return the result of `work` on this rank, and raise a UserError of any rank on all; all must call."""
    result = None
    error = None
    try:
        result = work()
    except UserError as mistake:
        error = mistake
    errors = gather_objects((socket.gethostname(), error))
    for host, first in errors:
        if first is not None:
            text = str(first) if all(e is not None for _, e in errors) else f"on {host}: {first}"
            shared = type(first)(text, code=first.code)
            shared.local = False
            raise shared
    return cast("T", result)


@contextlib.contextmanager
def local_errors() -> Iterator[None]:
    """Mark UserErrors of the block as local, because the files of another host may be in order."""
    try:
        yield
    except UserError as error:
        error.local = error.local is not False
        raise


def run_on_main(world: World, work: Callable[[], None]) -> None:
    """Run `work` on rank 0. Raises its UserError on all ranks; all must call."""
    raise_on_all_ranks(work if world.is_main else lambda: None)


def set_timeout(minutes: float, spare: Any = None) -> None:
    """Set the timeout of collectives in minutes, for every process group except `spare`."""
    for group in list(distributed_c10d._world.pg_map):
        if group is not spare:
            distributed_c10d._set_pg_timeout(datetime.timedelta(minutes=minutes), group)


@contextlib.contextmanager
def longer_timeout(minutes: float, spare: Any = None) -> Iterator[None]:
    """Set the timeout to LONG_TIMEOUT within the block, and to `minutes` after it."""
    set_timeout(LONG_TIMEOUT, spare)
    yield
    set_timeout(minutes, spare)


def record_collectives(run_dir: Path) -> None:
    """Make NCCL record its collectives and leave a trace in the run directory when one times out.

    Variables that the user has set are kept.
    """
    settings = {
        "TORCH_FR_BUFFER_SIZE": "2000",  # collectives
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": str(run_dir.absolute() / RANKS / TRACE),
    }
    for name, value in settings.items():
        os.environ.setdefault(name, value)


def diagnose_hang(run_dir: Path, world: World) -> str | None:
    """Describe the rank that this rank waited for when a collective failed, None if no trace shows it.

    The other ranks notice the failure at about the same time, so this waits a little for their traces.
    """
    if dist.is_initialized() and dist.get_backend() == "gloo":
        trace = torch._C._distributed_c10d._dump_fr_trace()  # type: ignore[attr-defined]
        with contextlib.suppress(OSError):
            (run_dir / RANKS / f"{TRACE}{world.rank}").write_bytes(trace)
    end = time.monotonic() + TRACE_SECONDS
    while not is_accounted_for(run_dir) and time.monotonic() < end:
        time.sleep(0.2)
    return find_late_rank(run_dir)


def end_world() -> None:
    """Leave the process group."""
    if dist.is_initialized():
        dist.destroy_process_group()


# Errors of gloo and NCCL, in lower case, about a rank that is gone or was never reached. Their other errors
# are about this host, such as two ranks on one GPU or too little shared memory.
LOST = re.compile(
    r"connection closed by peer|connection reset by peer|broken pipe|timed out|wait timeout|socket timeout|"
    r"connection refused|no route to host|network is unreachable|failed to recv, got 0 bytes|"
    r"connection was likely closed|possible application crash on rank|ncclremoteerror|"
    r"exit of a remote peer|communicator was aborted|watchdog caught"
)
# Errors of CUDA, its libraries and the driver, in lower case, about a device that fails. Illegal accesses of
# a kernel and too little memory are not among them.
DEVICE = re.compile(
    r"\becc error|nvlink error|uncorrectable (ecc|nvlink)|double.bit|hardware (stack )?error|"
    r"row remap|\bxid\b|fallen off the bus|gpu is lost|requires reset|busy or unavailable|"
    r"no (cuda-capable device|cuda gpus)|system not (yet )?initialized|cuda (error: )?unknown error|"
    r"driver/library version mismatch|(cuda error:|driver) initialization (error|failed)"
)
# Errors of NCCL that may come from this device, a network card or another host.
NETWORK = re.compile(r"ncclsystemerror|unhandled system error|ncclunhandledcudaerror|unhandled cuda error")
NEITHER = re.compile(r"out of memory|invalid usage|invalid device ordinal|illegal memory access")


def lost_a_peer(error: Exception) -> bool:
    """Return whether the error means that another rank was not reached, has died or hangs."""
    if isinstance(error, dist.DistNetworkError | dist.DistStoreError):
        return True
    several = dist.is_initialized() and dist.get_world_size() > 1
    return isinstance(error, RuntimeError) and several and LOST.search(str(error).lower()) is not None


def broken_device(error: BaseException, signs: re.Pattern[str] = DEVICE) -> bool:
    """Return whether a device or driver of this host caused the error, directly or through its causes."""
    for cause in iterate_causes(error):
        if isinstance(cause, RuntimeError) and not isinstance(cause, OutOfMemoryError):
            text = str(cause).lower()
            if signs.search(text) and not NEITHER.search(text):
                return True
    return False


def explain(error: Exception, advanced: bool) -> tuple[ExitCode, str | None]:
    """Return the exit code of an error, and its message if no traceback is needed.

    advanced: whether this launch has taken a step.
    """
    line = one_line(error)
    if broken_device(error):
        problem = f"a GPU or driver of {node_name()} failed ({line}); {RESUME} on other hosts"
        return ExitCode.FAILURE, f"{problem} [{HARDWARE}]"
    # "os error" is what safetensors calls a failed write
    if isinstance(error, PERMANENT) or (isinstance(error, SafetensorError) and "os error" not in line):
        return ExitCode.MISTAKE, f"{line} [system]"
    if lost_a_peer(error):
        lost = "lost" if dist.is_initialized() else "did not reach"
        known = "".join(f"; {note}" for note in getattr(error, "__notes__", ()))  # of `diagnose_hang`
        why = f"which may have said why ({one_line(error, 150)}){known}; {RESUME} from the last checkpoint"
        return ExitCode.FAILURE, f"rank {os.environ.get('RANK', '0')} {lost} another rank, {why} [lost-rank]"
    if broken_device(error, NETWORK):
        return ExitCode.FAILURE, f"NCCL failed on {node_name()} ({line}); {RESUME} [nccl]"
    may_recover = "os error" in line or (isinstance(error, OSError) and may_pass(error))
    if isinstance(error, OSError | SafetensorError) and (advanced or may_recover):
        return ExitCode.FAILURE, f"{line}; when that is fixed, {RESUME} from the last checkpoint [system]"
    if isinstance(error, OutOfMemoryError | MemoryError) and not advanced:
        problem = f"out of memory before the first step ({one_line(error, 200)})"
        cure = (
            "set a smaller train.micro_batch_size, model.activation_checkpointing=true, or a DeepSpeed file"
        )
        return (
            ExitCode.MISTAKE,
            f"{problem}; {cure} with a higher ZeRO stage; `emo plan` says what fits [out-of-memory]",
        )
    return ExitCode.FAILURE if advanced else ExitCode.MISTAKE, None
