"""The cores and GPUs of this host, and the attention implementation that a model can use here."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from typing import NamedTuple

import torch
from deepspeed.accelerator import get_accelerator
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig

from emo.common.errors import FailureError, UserError, one_line

from ...control.stop import HARDWARE, node_name
from ...loss.models.head import VARLEN, uses_segments
from ...loss.models.varlen import LARGEST_HEAD
from ...model.config import ModelConfig

log = logging.getLogger(__name__)

CORES = frozenset(os.sched_getaffinity(0))  # allowed by the launcher, before this process binds itself
BINDING = (
    "SLURM_PROCID",
    "OMPI_COMM_WORLD_RANK",
    "PMI_RANK",
)  # set by launchers that may bind ranks to cores
PREFERENCE = (VARLEN, "flash_attention_2", "sdpa", "eager")  # order in which attn_implementation=auto tries
# Attributes by which a model family declares that it supports an implementation.
SUPPORT_FLAGS = {
    # The family passes it windows and documents as it does to flash-attn. Calls without them use SDPA.
    VARLEN: ("_supports_attention_backend", "_supports_flash_attn", "_supports_sdpa"),
    "flash_attention_2": ("_supports_flash_attn",),
    "sdpa": ("_supports_sdpa",),
    "eager": (),
}


def on_gpu() -> bool:
    """Return whether this run computes on a GPU."""
    return get_accelerator().device_name() == "cuda"


def device_name() -> str:
    """Return the name of this rank's GPU, or CPU."""
    return torch.cuda.get_device_name() if on_gpu() else "CPU"


def local_ranks() -> int:
    """Return the number of ranks on this host, which the launcher sets."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or 1)


def threads_per_rank() -> int:
    """Return the number of threads of a rank: its share of the host's cores.

    If srun or mpirun has bound each rank to cores, these are its share. GPU ranks need threads too, to step
    offloaded optimizers.
    """
    cores = len(CORES)
    ranks = local_ranks()
    if any(name in os.environ for name in BINDING) and cores * ranks <= (os.cpu_count() or 1):
        return cores
    return max(1, cores // ranks)


def read_near_cores(address: str, devices: Path = Path("/sys/bus/pci/devices")) -> set[int]:
    """Return the cores close to a PCI device such as 0000:1b:00.0, empty if the host does not list them."""
    try:
        text = (devices / address / "local_cpulist").read_text(encoding="utf-8").strip()
    except OSError:
        return set()
    ranges = [part.partition("-") for part in text.split(",") if part]
    return {core for first, _, last in ranges for core in range(int(first), int(last or first) + 1)}


def bind_to_near_cores(address: str) -> None:
    """Bind this rank and its memory to the cores close to its GPU, if they are enough for its threads."""
    near = CORES & read_near_cores(address)
    if len(near) >= threads_per_rank():  # fewer if the launcher has bound the rank elsewhere
        os.sched_setaffinity(0, near)


def find_c_compiler() -> str | None:
    """Return the C compiler that Triton uses when a kernel first runs."""
    return os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")


def usable_attention(
    model: ModelConfig, config: PretrainedConfig, shared: bool = False, gpus: bool | None = None
) -> str:
    """Return the attention implementation of a model. For `auto`, the first that works on this host.

    Args:
        model: The section of the recipe.
        config: The model.
        shared: Several ranks share each row, which needs an attention that takes the bounds of documents.
        gpus: For a run on other hosts, whether they have GPUs. `auto` is then resolved only with GPUs, for
            hosts without flash-attn. None if the run is on this host.
    """
    requested = model.attn_implementation
    if shared and not uses_segments(requested):
        if requested == "auto" and (obstacle := _attention_obstacle(VARLEN, model, config, gpus)) is None:
            return VARLEN
        reason = obstacle if requested == "auto" else f"model.attn_implementation={requested} needs a mask"
        problem = f"train.sequence_parallel needs model.attn_implementation={VARLEN} or flash_attention_2"
        raise UserError(f"{problem}, but {reason}", code="sequence-parallel")
    if requested != "auto":
        if obstacle := _attention_obstacle(requested, model, config, gpus):
            problem = f"model.attn_implementation={requested} cannot be used: {obstacle}"
            raise UserError(f"{problem}. Set model.attn_implementation=auto", code="attention")
        return requested
    if gpus is False:
        return requested
    skipped = []
    for name in PREFERENCE:
        obstacle = _attention_obstacle(name, model, config, gpus)
        if name == VARLEN and gpus is None and not on_gpu():
            obstacle = "no GPU"
        elif name == "flash_attention_2" and gpus is not None:
            obstacle = "its hosts may lack flash-attn"
        if obstacle is None:
            break
        skipped.append(f"not {name}: {obstacle}")
    if gpus is None:
        log.info("attention: %s", "; ".join((name, *skipped)))
    return name


def family_supports(config: PretrainedConfig, attention: str) -> bool:
    """Return whether the model family of `config` supports an attention implementation."""
    family = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if family is None:
        return attention != VARLEN
    return all(getattr(family, flag) for flag in SUPPORT_FLAGS[attention])


def _attention_obstacle(
    name: str, model: ModelConfig, config: PretrainedConfig, gpus: bool | None = None
) -> str | None:
    """Return why the model, or this host unless `gpus` is set, cannot use an attention implementation."""
    if uses_segments(name) and (on_gpu() if gpus is None else gpus) and model.dtype == "float32":
        return "it needs half precision, but model.dtype is float32"
    if gpus is None and (obstacle := _host_obstacle(name)):
        return obstacle
    if not family_supports(config, name):
        return f"{config.model_type} models do not support it"
    if name == VARLEN:
        text = config.get_text_config()
        for key, value in text.to_dict().items():
            if value and (("att" in key and "drop" in key) or key == "attn_logit_softcapping"):
                return f"it supports neither dropout nor a soft cap, and the model has {key}={value}"
        if (size := getattr(text, "head_dim", None) or 0) > LARGEST_HEAD:
            return f"it supports heads of at most {LARGEST_HEAD} values, and the model's have {size}"
    return None


def _host_obstacle(name: str) -> str | None:
    """Return why this host cannot use an attention implementation, or None."""
    if not on_gpu():
        return "no GPU" if name == "flash_attention_2" else None
    if name == "flash_attention_2":
        try:
            import flash_attn  # noqa: F401
        except ImportError as error:
            return f"flash-attn cannot be imported ({one_line(error)})"
    if name == VARLEN:
        if not torch.backends.cuda.is_flash_attention_available():
            return "this build of PyTorch lacks its kernel"
        if torch.cuda.get_device_capability() < (8, 0):
            return "it needs a GPU of compute capability 8.0 or newer"
    return None


class GpuFacts(NamedTuple):
    """Facts that decide whether a run may start on the device that DeepSpeed has chosen."""

    device: str  # of DeepSpeed, which uses the CPU with a warning at most if CUDA does not work
    requested: str | None  # DS_ACCELERATOR, set by the user
    build: str  # platform of this PyTorch, such as CUDA 13.0; empty for CPUs
    present: bool  # whether the host has a device
    visible: str | None  # CUDA_VISIBLE_DEVICES
    granted: int  # devices of this host that Slurm gave the job, 0 if not known
    usable: int  # devices that PyTorch can use
    problem: str  # PyTorch's error when it initialises CUDA, empty without one


def find_gpu_error(gpus: GpuFacts, ranks: int) -> UserError | None:
    """Return why `ranks` ranks must not start on this host, or None if they may.

    Training a large model on the CPU by mistake could go unnoticed for hours. So a host with a GPU, or with
    a PyTorch that was built for one, trains on the CPU only if the user asks for it. If the host lacks
    something that the scheduler or launcher promised, the error is a FailureError: another host may have it.
    """
    if gpus.requested == "cpu" or gpus.device not in ("cpu", "cuda"):
        return None
    if gpus.usable >= ranks and gpus.device == "cuda":
        return None
    if not gpus.usable and not gpus.build and not gpus.present and gpus.requested is None:
        return None
    reason = gpus.problem.split(". ")[0].strip() or "no device"
    build = f"this PyTorch is for {gpus.build or 'CPUs'}"
    code = HARDWARE
    text = f"the GPU cannot be used ({reason}). Check nvidia-smi"
    if gpus.usable:
        promised = len(gpus.visible.split(",")) if gpus.visible else gpus.granted
        text = f"{ranks} ranks start on this host, but only {gpus.usable} GPUs can be used. Check nvidia-smi"
        if promised < ranks and (promised or gpus.usable == 1):
            code = "too-few-gpus"
            text += ", start one rank per GPU, and make all GPUs visible to every rank (--gpus-per-node)"
    elif not gpus.build:
        code = "cpu-build"
        text = f"{build}. Install one for the GPU (make setup TORCH_ARGS=...)"
    elif gpus.visible is not None and gpus.visible.strip() in ("", "-1"):
        code = "gpus-hidden"
        text = f"CUDA_VISIBLE_DEVICES={gpus.visible!r} hides every GPU. Unset it"
    elif "driver" in gpus.problem and "old" in gpus.problem:
        code = "old-driver"
        text = f"{build}, but the GPU's driver is too old for it. Update the driver"
    elif not gpus.present and not gpus.granted:
        cure = "Request one (docker run --gpus all, sbatch --gpus-per-node, nvidia.com/gpu)"
        code = "no-gpu"
        text = f"{build}, but this host has no GPU. {cure}"
    kind = FailureError if code == HARDWARE else UserError
    return kind(f"{text}, or set DS_ACCELERATOR=cpu to train on the CPU", code=code)


def check_gpus() -> None:
    """Raise UserError if the ranks of this host must not start on its GPUs. Needs no process group."""
    problem = ""
    hip = torch.version.hip
    cuda = torch.version.cuda
    build = f"ROCm {hip}" if hip else f"CUDA {cuda}" if cuda else ""
    available = torch.cuda.is_available()
    if build and not available:
        try:
            torch.cuda.init()
        except (RuntimeError, AssertionError) as failure:
            problem = str(failure)
    facts = GpuFacts(
        device=get_accelerator().device_name(),
        requested=os.environ.get("DS_ACCELERATOR"),
        build=build,
        present=any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/kfd").exists(),
        visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
        granted=int(os.environ.get("SLURM_GPUS_ON_NODE") or 0),
        usable=torch.cuda.device_count() if available else 0,
        problem=problem,
    )
    error = find_gpu_error(facts, max(local_ranks(), int(os.environ.get("LOCAL_RANK", 0)) + 1))
    if error is not None:
        raise type(error)(f"on {node_name()}: {error}", code=error.code)
