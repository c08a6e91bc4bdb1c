"""What a host must have before a run starts: usable GPUs and an attention."""

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

from ..control.stop import HARDWARE, node_name
from ..loss.models.head import VARLEN, uses_segments
from ..loss.models.varlen import LARGEST_HEAD, kernel_is_new_enough
from ..model.config import ModelConfig

log = logging.getLogger(__name__)

CORES = frozenset(os.sched_getaffinity(0))  # that the launcher gave this process, before it binds itself
BINDING = ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")  # of launchers that may bind ranks to cores
PREFERENCE = (VARLEN, "flash_attention_2", "sdpa", "eager")  # of `auto` on a GPU
NEEDS = {
    # as flash-attn, it is handed windows and documents by the family, and where a call names none it is SDPA
    VARLEN: ("_supports_attention_backend", "_supports_flash_attn", "_supports_sdpa"),
    "flash_attention_2": ("_supports_flash_attn",),
    "sdpa": ("_supports_sdpa",),
    "eager": (),
}


def on_gpu() -> bool:
    """Return whether this run computes on a GPU."""
    return get_accelerator().device_name() == "cuda"


def ranks_here() -> int:
    """Return ranks of this host, as the launcher says."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or 1)


def threads() -> int:
    """Return a rank's threads: CPU ranks compute on the host's cores, GPU ranks step offloaded optimizers.

    The cores that it may use are shared with the host's other ranks, unless srun or mpirun has bound each to
    its own.
    """
    cores, ranks = len(CORES), ranks_here()
    if any(name in os.environ for name in BINDING) and cores * ranks <= (os.cpu_count() or 1):
        return cores
    return max(1, cores // ranks)


def near_cores(address: str, devices: Path = Path("/sys/bus/pci/devices")) -> set[int]:
    """Return the cores beside a PCI device, such as 0000:1b:00.0; none where the host does not say."""
    try:
        text = (devices / address / "local_cpulist").read_text(encoding="utf-8").strip()
    except OSError:
        return set()
    ranges = [part.partition("-") for part in text.split(",") if part]
    return {core for first, _, last in ranges for core in range(int(first), int(last or first) + 1)}


def bind_near(address: str) -> None:
    """Keep this rank and its memory to the cores beside its GPU, if as many as its share are there."""
    near = CORES & near_cores(address)
    if len(near) >= threads():  # fewer: the launcher has bound it elsewhere
        os.sched_setaffinity(0, near)


def compiler() -> str | None:
    """Return the C compiler that Triton would take for a kernel's launcher when the kernel first runs."""
    return os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")


def usable_attention(model: ModelConfig, config: PretrainedConfig) -> str:
    """Return the attention that this model trains with here; `auto` takes the first that is possible."""
    requested = model.attn_implementation
    if requested != "auto":
        if missing := _lacking(requested, model, config):
            problem = f"model.attn_implementation={requested} cannot be used: {missing}"
            raise UserError(f"{problem}; set model.attn_implementation=auto")
        return requested
    passed_over = []
    for name in PREFERENCE:
        missing = _lacking(name, model, config)
        if name == VARLEN and not on_gpu():
            missing = "no GPU"
        if missing is None:
            break
        passed_over.append(f"not {name}: {missing}")
    log.info("attention: %s", "; ".join((name, *passed_over)))
    return name


def family_has(config: PretrainedConfig, name: str) -> bool:
    """Return whether the family that `config` belongs to can compute attention of this name."""
    family = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    return name != VARLEN if family is None else all(getattr(family, flag) for flag in NEEDS[name])


def _lacking(name: str, model: ModelConfig, config: PretrainedConfig) -> str | None:
    """Return what keeps this host or the family from attention of this name, or None."""
    if name == "flash_attention_2" and not on_gpu():
        return "no GPU"
    if uses_segments(name) and on_gpu():
        if model.dtype == "float32":
            return "it computes in half precision only, and model.dtype is float32"
        if name == "flash_attention_2":
            try:
                import flash_attn  # noqa: F401
            except ImportError as error:
                return f"flash-attn cannot be imported: {one_line(error)}"
        elif not torch.backends.cuda.is_flash_attention_available() or not kernel_is_new_enough():
            return "this build of torch lacks its kernel"
        elif torch.cuda.get_device_capability() < (8, 0):
            return "it needs a GPU of compute capability 8.0 or newer"
    if not family_has(config, name):
        return f"{config.model_type} models have no {name}"
    if name == VARLEN:  # of what a model asks, torch's kernel has not all
        text = config.get_text_config()
        for key, value in text.to_dict().items():
            if value and (("att" in key and "drop" in key) or key == "attn_logit_softcapping"):
                return f"it has neither dropout nor a soft cap, and the model's {key} is {value}"
        if (size := getattr(text, "head_dim", None) or 0) > LARGEST_HEAD:
            return f"its heads have at most {LARGEST_HEAD} values, the model's {size}"
    return None


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


def refusal(gpus: Gpus, ranks: int) -> UserError | None:
    """Return why `ranks` ranks of a host must not start on what it has, or None when they may.

    A model of billions of parameters that trains on the CPU because a driver is old would go unnoticed for
    hours; so a host with a GPU, and a PyTorch that was built for one, train on the CPU only when told to. A
    FailureError is a host that lacks what the scheduler or launcher promised: another host may have it.
    """
    if gpus.chosen == "cpu" or gpus.device not in ("cpu", "cuda"):
        return None
    if gpus.usable >= ranks and gpus.device == "cuda":
        return None
    if not gpus.usable and not gpus.build and not gpus.present and gpus.chosen is None:
        return None
    problem, built = gpus.problem.split(". ")[0].strip(), f"this PyTorch is for {gpus.build or 'CPUs'}"
    code, text = HARDWARE, f"the GPU cannot be used: {problem or 'no device'}; see whether nvidia-smi works"
    if gpus.usable:
        promised = len(gpus.visible.split(",")) if gpus.visible else gpus.granted
        text = f"{ranks} ranks start here and only {gpus.usable} GPUs can be used; see nvidia-smi"
        if promised < ranks and (promised or gpus.usable == 1):
            code = "too-few-gpus"
            text += ", start one rank per GPU, and show every rank all of them (--gpus-per-node)"
    elif not gpus.build:
        code, text = "cpu-build", f"{built}; install one for the GPU (make setup TORCH_ARGS=...)"
    elif gpus.visible is not None and gpus.visible.strip() in ("", "-1"):
        code, text = "gpus-hidden", f"CUDA_VISIBLE_DEVICES={gpus.visible!r} hides every GPU; unset it"
    elif "driver" in gpus.problem and "old" in gpus.problem:
        code, text = "old-driver", f"{built}, and the GPU's driver is too old for it; update the driver"
    elif not gpus.present and not gpus.granted:
        cure = "ask for one (docker run --gpus all, sbatch --gpus-per-node, nvidia.com/gpu)"
        code, text = "no-gpu", f"{built} and no GPU is here; {cure}"
    kind = FailureError if code == HARDWARE else UserError
    return kind(f"{text}, or set DS_ACCELERATOR=cpu to train on the CPU", code=code)


def check_gpus() -> None:
    """Raise UserError, before ranks meet, when this host's ranks must not start on what it has."""
    hip, cuda = torch.version.hip, torch.version.cuda
    build = f"ROCm {hip}" if hip else f"CUDA {cuda}" if cuda else ""
    usable, problem = 0, ""
    if torch.cuda.is_available():
        usable = torch.cuda.device_count()
    elif build:
        try:
            torch.cuda.init()
        except (RuntimeError, AssertionError) as failure:
            problem = str(failure)
    device, chosen = get_accelerator().device_name(), os.environ.get("DS_ACCELERATOR")
    present = any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/kfd").exists()
    visible, granted = os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("SLURM_GPUS_ON_NODE") or 0
    gpus = Gpus(device, chosen, build, present, visible, int(granted), usable, problem)
    error = refusal(gpus, max(ranks_here(), int(os.environ.get("LOCAL_RANK", 0)) + 1))
    if error is not None:
        raise type(error)(f"on {node_name()}: {error}", code=error.code)
