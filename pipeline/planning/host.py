"""What a host must have before a run starts: usable GPUs, a C compiler, no build that was left half done."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch.utils import cpp_extension

from emo.common.errors import FailureError, UserError
from emo.common.lease import Lease, joined, users, waited
from emo.pipeline.stop import HARDWARE, node_name

log = logging.getLogger(__name__)

BINDING = ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")  # of launchers that may bind ranks to cores


class Gpus(NamedTuple):
    """The facts that decide whether a run may start on the device that DeepSpeed has chosen."""

    device: str  # that DeepSpeed runs on: it takes the CPU, with a warning at most, when CUDA does not work
    chosen: str | None  # DS_ACCELERATOR: what the user wants
    build: str  # what PyTorch was built for, such as CUDA 13.0; empty: CPUs
    present: bool  # the host has a device
    visible: str | None  # CUDA_VISIBLE_DEVICES
    granted: int  # devices of this host that Slurm gave the job; 0: unknown
    usable: int  # devices that PyTorch can use
    problem: str  # what PyTorch says when it opens the device; empty when all is well


def ranks_here() -> int:
    """Return ranks of this host, as the launcher says."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or 1)


def refusal(gpus: Gpus, ranks: int) -> UserError | None:
    """Return why `ranks` ranks of a host must not start on what it has, or None when they may.

    A model of billions of parameters that trains on the CPU because a driver is old would go unnoticed for
    hours; so a host with a GPU, and a PyTorch that was built for one, train on the CPU only when told to. A
    FailureError is a host that lacks what the scheduler or launcher promised: another host may have it.
    """
    problem = gpus.problem.split(". ")[0].strip()
    if gpus.chosen == "cpu" or gpus.device not in ("cpu", "cuda"):
        return None
    if gpus.usable >= ranks and gpus.device == "cuda":
        return None
    if not gpus.usable and not gpus.build and not gpus.present and gpus.chosen is None:
        return None
    code, text = HARDWARE, f"the GPU cannot be used: {problem or 'no device'}; see whether nvidia-smi works"
    built = f"this PyTorch is built for {gpus.build or 'CPUs'}"
    if gpus.usable:
        promised = len(gpus.visible.split(",")) if gpus.visible else gpus.granted
        text = f"{ranks} ranks start here and only {gpus.usable} GPUs can be used; see nvidia-smi"
        if promised < ranks and (promised or gpus.usable == 1):
            code = "too-few-gpus"
            text += "; start one rank per GPU, and show every rank all GPUs of its host (--gpus-per-node)"
    elif not gpus.build:
        code, text = "cpu-build", f"{built}; install one for the GPU (make setup TORCH_ARGS=...)"
    elif gpus.visible is not None and gpus.visible.strip() in ("", "-1"):
        code, text = "gpus-hidden", f"CUDA_VISIBLE_DEVICES={gpus.visible!r} hides every GPU; unset it"
    elif "driver" in gpus.problem and "old" in gpus.problem:
        cure = "update it, or install a PyTorch for an older CUDA (make setup TORCH_ARGS=...)"
        code, text = "old-driver", f"{built}, and the GPU's driver is too old ({problem}); {cure}"
    elif not gpus.present and not gpus.granted:
        cure = "ask for one (docker run --gpus all, sbatch --gpus-per-node, nvidia.com/gpu)"
        code, text = "no-gpu", f"{built} and no GPU is here; {cure}"
    kind = FailureError if code == HARDWARE else UserError
    return kind(f"{text}, or set DS_ACCELERATOR=cpu to train on the CPU", code=code)


def check_gpus() -> None:
    """Raises UserError, before ranks meet, when this host's ranks must not start on what it has."""
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else ""
    if torch.version.hip:
        build = f"ROCm {torch.version.hip}"
    usable, problem = 0, ""
    if torch.cuda.is_available():
        usable = torch.cuda.device_count()
    elif build:
        try:
            torch.cuda.init()
        except (RuntimeError, AssertionError) as failure:
            problem = str(failure)
    gpus = Gpus(
        get_accelerator().device_name(),
        os.environ.get("DS_ACCELERATOR"),
        build,
        any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/kfd").exists(),
        os.environ.get("CUDA_VISIBLE_DEVICES"),
        int(os.environ.get("SLURM_GPUS_ON_NODE") or 0),
        usable,
        problem,
    )
    error = refusal(gpus, max(ranks_here(), int(os.environ.get("LOCAL_RANK", 0)) + 1))
    if error is not None:
        raise type(error)(f"on {node_name()}: {error}", code=error.code)


def compiler() -> str | None:
    """Return the C compiler that Triton would take for a kernel's launcher when the kernel first runs."""
    configured = os.environ.get("CC")
    return configured or shutil.which("gcc") or shutil.which("clang")


def check_compiler(on_gpu: bool) -> None:
    """Raises UserError when the losses' kernels are to run in Triton, and it cannot compile here."""
    if on_gpu and importlib.util.find_spec("triton") is not None and compiler() is None:
        raise UserError("Triton needs a C compiler for its kernels, and this host has none; install gcc")


def threads() -> int:
    """Return a rank's threads: CPU ranks compute on the host's cores, GPU ranks step offloaded optimizers.

    The cores that it may use are shared with the host's other ranks, unless srun or mpirun has bound each to
    its own.
    """
    cores, ranks = len(os.sched_getaffinity(0)), ranks_here()
    if any(name in os.environ for name in BINDING) and cores * ranks <= (os.cpu_count() or 1):
        return cores
    return max(1, cores // ranks)


def on_gpu() -> bool:
    """Return whether this run computes on a GPU."""
    return get_accelerator().device_name() == "cuda"


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Enclose what may compile: DeepSpeed builds an operation where and when it is first used.

    torch guards a build by a file named `lock`, which a killed process leaves behind and every later start
    would wait for in silence. A start that finds no other one under way therefore removes such files, except
    those that another program here has open.
    """
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root())
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # nothing can be built there either
            root.mkdir(parents=True, exist_ok=True)
        if int(os.environ.get("LOCAL_RANK", 0)) == 0 and os.access(root, os.W_OK):
            with waited(Lease(root, "starting"), None):
                if not users(root / "starts"):
                    left = list(root.rglob("lock"))
                    opened = set[str]()
                    for process in psutil.process_iter() if left else ():
                        with contextlib.suppress(psutil.Error):
                            opened |= {file.path for file in process.open_files()}
                    for lock in (lock for lock in left if str(lock) not in opened):
                        log.info("%s was left by a start that was killed; removed", lock)
                        lock.unlink()
                stack.enter_context(joined(root / "starts"))
        if dist.is_initialized():
            dist.barrier()
        yield
