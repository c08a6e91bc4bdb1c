"""The kinds of GPUs that `plan` knows, and a cluster of them. This imports no large library."""

from __future__ import annotations

import re
from typing import NamedTuple

from emo.common.errors import UserError

GB, GIB, TERA = 1e9, 2**30, 1e12
USABLE = 0.92  # of a GPU's memory; the rest goes to the CUDA context, NCCL and fragments
NODE = 8  # GPUs


class Accelerator(NamedTuple):
    """One kind of GPU."""

    memory_gib: float
    tflops: float  # dense bf16 peak
    tflops32: float  # float32 peak without TF32, which the trainer does not turn on
    bandwidth_tb: float  # memory, TB/s
    link_gb: float  # to its neighbours in the node, GB/s each way
    efficiency: float  # share of the peak that products over very many elements reach
    published: bool = True  # whether runs on it are among those that predictions were compared with


ACCELERATORS = {
    "A100-40G": Accelerator(39.4, 312, 19.5, 1.55, 300, 0.93),
    "A100-80G": Accelerator(79.2, 312, 19.5, 2.0, 300, 0.93),
    "H100-80G": Accelerator(79.1, 989, 67, 3.35, 450, 0.69),
    # Its efficiency is that of large products alone, as measured on one: 0.79 of the peak.
    "H200-141G": Accelerator(139.8, 989, 67, 4.8, 450, 0.85),
    "A10-24G": Accelerator(22.5, 125, 31, 0.6, 12, 0.7, published=False),
    "L40S-48G": Accelerator(44.4, 362, 91, 0.86, 12, 0.6, published=False),
    "RTX3090-24G": Accelerator(23.6, 71, 35, 0.94, 12, 0.9, published=False),
    "RTX4090-24G": Accelerator(23.5, 165, 82, 1.0, 12, 0.9, published=False),
}


def accelerator(name: str) -> Accelerator | None:
    """Return the kind that a driver's device name means ("NVIDIA A100-SXM4-80GB"), or None."""
    match = None
    for kind, gpu in ACCELERATORS.items():
        letters = re.sub(r"(?<=[A-Z])(?=\d)", " ?", kind.split("-")[0])  # "RTX 4090", "A100"
        if re.search(rf"{letters}(?!\d)", name.upper()):
            match = gpu
    return match


def basis(stage: int, gpu: Accelerator) -> str:
    """Return what the predicted time of a ZeRO stage on a GPU rests on."""
    if not gpu.published:
        return "its data sheet: no published run on this GPU was found"
    runs = "published runs on this GPU (FSDP, which is ZeRO-3)"
    counted = "" if stage == 3 else f"; what ZeRO-{stage} sends and updates in their place is counted"
    return runs + counted + (" (as in InternLM's runs on A100)" if stage == 1 else "")


class Cluster(NamedTuple):
    """GPUs of one kind."""

    gpus: int
    kind: str
    network_gb: float = 200.0  # GB/s that a node reaches others with

    @property
    def gpu(self) -> Accelerator:
        return ACCELERATORS[self.kind]

    @property
    def room(self) -> float:
        """Return bytes of each GPU that a run can use."""
        return self.gpu.memory_gib * GIB * USABLE


def parse_cluster(text: str, network_gbit: float = 1600.0) -> Cluster:
    """Return `8xA100-80G` as a Cluster; the memory may be left out where a kind has one size only.

    Raises UserError, naming the known kinds.
    """
    count, _, kind = text.replace(" ", "").lower().partition("x")
    kinds = [name for name in ACCELERATORS if name.lower() == kind or name.lower().split("-")[0] == kind]
    if not count.isdigit() or int(count) < 1 or not kinds:
        form = "give NUMBERxKIND, for example 8xA100-80G"
        raise UserError(f"--gpus {text}: {form}; kinds: {', '.join(ACCELERATORS)}", code="gpus")
    if len(kinds) > 1:
        forms = " or ".join(f"{count}x{name}" for name in kinds)
        raise UserError(f"--gpus {text} leaves the memory open: give {forms}", code="gpus")
    return Cluster(int(count), kinds[0], network_gbit / 8)
