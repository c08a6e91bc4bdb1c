"""The kinds of GPUs that `plan` knows, and clusters of them. This module imports no large library."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

from emo.common.errors import UserError

GB = 1e9
GIB = 2**30
TERA = 1e12
USABLE = 0.92  # share of a GPU's memory. The CUDA context, NCCL and fragments take the rest.
NODE = 8  # GPUs


class Accelerator(NamedTuple):
    """One kind of GPU."""

    memory_gib: float
    tflops: float  # dense bf16 peak
    tflops32: float  # float32 peak without TF32, which the trainer does not enable
    bandwidth_tb: float  # memory, TB/s
    link_gb: float  # to other GPUs in the node, GB/s in each direction
    efficiency: float  # share of the peak that very large matrix products reach
    published: bool = True  # whether predictions were compared with published runs on it


ACCELERATORS = {
    "A100-40G": Accelerator(39.4, 312, 19.5, 1.55, 300, 0.93),
    "A100-80G": Accelerator(79.2, 312, 19.5, 2.0, 300, 0.93),
    "H100-80G": Accelerator(79.1, 989, 67, 3.35, 450, 0.69),
    # Its efficiency was measured with large matrix products only: 0.79 of the peak.
    "H200-141G": Accelerator(139.8, 989, 67, 4.8, 450, 0.85),
    "A10-24G": Accelerator(22.5, 125, 31, 0.6, 12, 0.7, published=False),
    "A10G-24G": Accelerator(22.5, 70, 35, 0.6, 12, 0.7, published=False),
    "L40S-48G": Accelerator(44.4, 362, 91, 0.86, 12, 0.6, published=False),
    "RTX3090-24G": Accelerator(23.6, 71, 35, 0.94, 12, 0.9, published=False),
    "RTX4090-24G": Accelerator(23.5, 165, 82, 1.0, 12, 0.9, published=False),
}


def accelerator(name: str) -> Accelerator | None:
    """Return the GPU with a driver's device name such as "NVIDIA A100-SXM4-80GB", or None.

    If the name does not state the memory, the GPU with the largest memory of its kind is returned.
    """
    matches = {}
    for kind, gpu in ACCELERATORS.items():
        letters, memory = kind.split("-")
        letters = re.sub(r"(?<=[A-Z])(?=\d)", " ?", letters)  # "RTX 4090", "A100"
        if re.search(rf"(?<![A-Z0-9]){letters}(?![A-Z0-9])", name.upper()):
            matches[memory] = gpu
    stated = [gpu for memory, gpu in matches.items() if f"{memory}B" in name.upper()]
    known = stated or [*matches.values()]
    return known[-1] if known else None


def describe_time_source(stage: int, gpu: Accelerator) -> str:
    """Return the source of the predicted time of a ZeRO stage on a GPU."""
    if not gpu.published:
        return "the GPU's data sheet, because no published run was found"
    runs = "published runs on this GPU (FSDP, which is ZeRO-3)"
    changed = "" if stage == 3 else f", with the communication and updates of ZeRO-{stage} instead"
    return runs + changed + (" (as in InternLM's runs on A100)" if stage == 1 else "")


class Cluster(NamedTuple):
    """GPUs of one kind."""

    gpus: int
    kind: str
    network_gb: float = 200.0  # GB/s between nodes

    @property
    def gpu(self) -> Accelerator:
        return ACCELERATORS[self.kind]

    @property
    def memory(self) -> float:
        """Return the usable memory of each GPU in bytes."""
        return self.gpu.memory_gib * GIB * USABLE


def parse_cluster(text: str, network_gbit: float = 1600.0) -> Cluster:
    """Parse a cluster such as `8xA100-80G`. The memory may be omitted if the kind has only one size.

    network_gbit: bandwidth between nodes in Gbit/s.
    """
    count, _, kind = text.replace(" ", "").lower().partition("x")
    kinds = [name for name in ACCELERATORS if name.lower() == kind or name.lower().split("-")[0] == kind]
    if not count.isdecimal() or int(count) < 1 or not kinds:
        form = "is not a known cluster. Set NUMBERxKIND, for example 8xA100-80G"
        raise UserError(f"--gpus {text} {form}. Kinds: {', '.join(ACCELERATORS)}", code="gpus")
    if len(kinds) > 1:
        forms = " or ".join(f"{count}x{name}" for name in kinds)
        raise UserError(f"--gpus {text} does not specify the memory. Set {forms}", code="gpus")
    if not 0 < network_gbit < math.inf:
        raise UserError(f"--network must be a positive number, not {network_gbit}", code="option-value")
    return Cluster(int(count), kinds[0], network_gbit / 8)
