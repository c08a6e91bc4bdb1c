"""Which error a failed rank ends with: one table for every phase of a run.

| class | before the first step of a launch | later |
|---|---|---|
| the hardware or driver of this host | 1 | 1 |
| another rank was lost, or never reached | 1 | 1 |
| a disk, file server or connection that may come back | 1 | 1 |
| a file that is missing, damaged or may not be opened | 2 | 2 |
| out of memory, on a GPU or the host | 2 | 1 |
| anything else, such as a bug or a library that is missing | 2 | 1 |

Code 1 is worth another start, perhaps on another host; code 2 is not. A launch that resumes a run is no
exception: what it has not reached again may still be a mistake, and a GPU that is broken still is hardware.
"""

from __future__ import annotations

import os
import re

from safetensors import SafetensorError
from torch import OutOfMemoryError
from torch import distributed as dist

from common.errors import LASTING, ExitCode, may_pass, one_line
from pipeline.ranks import lost_a_peer
from pipeline.stop import RESUME, node_name

# What CUDA, its libraries and the driver say, in small letters, of a device that fails. A kernel that reads
# where it must not, and memory that is too small, are not among them.
DEVICE = re.compile(
    r"\becc error|nvlink error|uncorrectable (ecc|nvlink)|double.bit|hardware (stack )?error|"
    r"row remap|\bxid\b|fallen off the bus|gpu is lost|requires reset|busy or unavailable|"
    r"no (cuda-capable device|cuda gpus)|system not (yet )?initialized|cuda (error: )?unknown error|"
    r"driver/library version mismatch|(cuda error:|driver) initialization (error|failed)"
)
# NCCL's errors name no culprit: this device, a network card, or a host far away.
NETWORK = re.compile(r"ncclsystemerror|unhandled system error|ncclunhandledcudaerror|unhandled cuda error")
NEITHER = re.compile(r"out of memory|invalid usage|invalid device ordinal|illegal memory access")


def broken_device(error: BaseException) -> bool:
    """Return whether a device or driver of this host failed, here or in what led to this error."""
    return _says(error, DEVICE)


def broken_hardware(error: BaseException) -> bool:
    """Return whether hardware failed, on this host or on the way to another one."""
    return _says(error, DEVICE) or _says(error, NETWORK)


def _says(error: BaseException, signs: re.Pattern[str]) -> bool:
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, RuntimeError) and not isinstance(cause, OutOfMemoryError):
            text = str(cause).lower()
            if signs.search(text) and not NEITHER.search(text):
                return True
        cause = cause.__cause__ or cause.__context__
    return False


def explain(error: Exception, advanced: bool) -> tuple[ExitCode, str | None]:
    """Return the exit code of an error, and the line for it where no traceback is needed.

    advanced: a step was done since the start.
    """
    line = one_line(error)
    if broken_device(error):
        return ExitCode.FAILURE, f"a GPU or driver of {node_name()} failed ({line}); {RESUME} on other hosts"
    if isinstance(error, LASTING):
        return ExitCode.MISTAKE, line
    if isinstance(error, SafetensorError) and "os error" not in line:  # what it calls a failed write
        return ExitCode.MISTAKE, line
    if lost_a_peer(error):
        lost = "lost" if dist.is_initialized() else "did not reach"
        why = f"which may have said why ({one_line(error, 150)}); {RESUME} from the last checkpoint"
        return ExitCode.FAILURE, f"rank {os.environ.get('RANK', '0')} {lost} another rank, {why}"
    if broken_hardware(error):
        return ExitCode.FAILURE, f"NCCL failed on {node_name()} ({line}); {RESUME}"
    passing = "os error" in line or (isinstance(error, OSError) and may_pass(error))
    if isinstance(error, OSError | SafetensorError) and (advanced or passing):
        return ExitCode.FAILURE, f"{line}; when that is cured, {RESUME} from the last checkpoint"
    if isinstance(error, OutOfMemoryError | MemoryError) and not advanced:
        return ExitCode.MISTAKE, (
            f"out of memory before the first step was done ({one_line(error, 200)}); set a smaller "
            "train.micro_batch, model.activation_checkpointing=true, or a DeepSpeed file with a higher ZeRO "
            "stage or offload; `python -m pipeline plan` says what fits"
        )
    return ExitCode.FAILURE if advanced else ExitCode.MISTAKE, None
