"""Exit codes of errors: every class in every phase, and which node is blamed."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from safetensors import SafetensorError
from torch import AcceleratorError, OutOfMemoryError
from torch.distributed import DistBackendError, DistNetworkError, DistStoreError

from emo.common.errors import ExitCode, FailureError, UserError
from emo.common.files import DiskFullError
from emo.pipeline import cli
from emo.pipeline.ranks import broken_device, explain
from emo.pipeline.stop import HARDWARE, TRAINING, Watch, node_name

DEVICE = [
    AcceleratorError("CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors might be"),
    AcceleratorError("CUDA error: CUDA-capable device(s) is/are busy or unavailable"),
    RuntimeError("CUDA error: all CUDA-capable devices are busy or unavailable"),
    RuntimeError("CUDA error: unknown error"),
    RuntimeError("CUDA unknown error - this may be due to an incorrectly set up environment"),
    RuntimeError("CUDA error: system not yet initialized"),
    RuntimeError("CUDA error: uncorrectable NVLink error detected during the execution"),
    RuntimeError("CUDA error: hardware stack error"),
    RuntimeError("CUDA error: Invalid access of peer GPU memory over nvlink or a hardware error"),
    RuntimeError("GPU 0000:3B:00.0 has fallen off the bus (Xid 79)"),
    RuntimeError("No CUDA GPUs are available"),
    DistBackendError("ncclUnhandledCudaError: Cuda failure 'uncorrectable ECC error encountered'"),
]
NETWORK = [
    DistBackendError(
        "NCCL error in: NCCLUtils.hpp:94, unhandled system error, NCCL version 2.28\nncclSystemError: "
    ),
    RuntimeError("NCCL error: unhandled cuda error (run with NCCL_DEBUG=INFO for details)"),
    DistBackendError("ncclSystemError: Error while creating shared memory segment: No space left on device"),
    RuntimeError(
        "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting"
    ),
    DistNetworkError("The client socket has timed out"),
    DistStoreError("wait timeout after 600000ms"),
]
PASSING = [
    OSError(errno.ENOSPC, "No space left on device"),
    DiskFullError("no space left while writing runs/a; make room in runs"),
    SafetensorError("Error while serializing: I/O error (os error 28)"),
    OSError(errno.ESTALE, "Stale file handle"),
]
LASTING = [
    SafetensorError("Error while deserializing header"),
    FileNotFoundError(errno.ENOENT, "No such file", "costs.pt"),
    PermissionError(errno.EACCES, "Permission denied", "runs"),
]
MEMORY = [OutOfMemoryError("CUDA out of memory"), MemoryError()]
OTHER = [
    KeyError("x"),
    OSError("CUDA_HOME environment variable is not set"),  # no nvcc, when something compiles
    ImportError("libcudart.so.13"),
    RuntimeError("NCCL error: invalid usage (Duplicate GPU detected)"),
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("CUDA error: invalid device ordinal"),
    DistBackendError("ncclUnhandledCudaError: Call failed. Last error: Cuda failure 2 'out of memory'"),
    ValueError("the tax id of xidel; ecc errors"),
    RuntimeError("unknown error in a tokenizer"),
]
CASES = [
    *((error, ExitCode.FAILURE, ExitCode.FAILURE) for error in (*DEVICE, *NETWORK, *PASSING)),
    *((error, ExitCode.MISTAKE, ExitCode.MISTAKE) for error in LASTING),
    *((error, ExitCode.MISTAKE, ExitCode.FAILURE) for error in (*MEMORY, *OTHER)),
]


@pytest.mark.parametrize(("error", "before", "later"), CASES, ids=lambda value: str(value)[:60])
def test_every_class_in_every_phase(
    monkeypatch: pytest.MonkeyPatch, error: Exception, before: ExitCode, later: ExitCode
) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    assert (explain(error, advanced=False)[0], explain(error, advanced=True)[0]) == (before, later)
    assert broken_device(error) == (error in DEVICE)
    unexpected = error in OTHER or (error in MEMORY)
    assert unexpected or explain(error, advanced=False)[1] is not None  # others keep their traceback


@pytest.mark.parametrize(
    ("error", "advanced", "report"),
    [
        (DEVICE[0], False, "1 node-7"),
        (DEVICE[0], True, "1 node-7"),
        (FailureError("7 of 8 GPUs", code=HARDWARE), False, "1 node-7"),
        (NETWORK[0], False, "1"),
        (PASSING[0], True, "1"),
        (UserError("a mistake"), True, "2"),
        (OTHER[0], False, "2"),
    ],
)
def test_a_rank_reports_its_code_and_the_node_to_avoid(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception, advanced: bool, report: str
) -> None:
    """As train.sbatch and the supervisor read it; the node's name is Slurm's."""
    monkeypatch.setenv("SLURMD_NODENAME", "node-7")

    class Quiet(Watch):
        def __init__(self) -> None:
            self._report = os.open(tmp_path / "rank-0", os.O_RDWR | os.O_CREAT)
            self._blamed, self._phase, self.advanced = "", TRAINING, advanced

    def run() -> int:
        raise error

    monkeypatch.setattr(cli, "leave", lambda code: sys.exit(code))
    watch = Quiet()
    try:
        watch.ended(cli._reported(run, watch))
    except SystemExit as end:
        watch.ended(int(end.code or 0))
    assert (tmp_path / "rank-0").read_text(encoding="utf-8") == f"{os.getpid()} {report}\n"
    assert node_name() == "node-7"
