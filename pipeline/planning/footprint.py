"""Memory and time of a training step, from sizes alone: what `plan` predicts.

The memory of one GPU, by part (bf16; P parameters, n ranks, T tokens per pass, h hidden, f inner width):

    states       weights 2 P, accumulated gradients 4 P, optimizer 12 P bytes, divided by n as ZeRO says
    gathered     weights that ZeRO-3 brings together around the layer at work, and its communication buckets
    activations  what a layer keeps for its backward pass, times layers; with checkpointing h per token and
                 layer, and one layer whole
    loss         a chunk of logits, the head's float32 gradient [V, h], the cost embedding [V, h]
    update       a copy of the gradient while the optimizer steps, when the last three are free again

The time of a step adds matrix products, attention, element-wise traffic, communication that computing does
not hide, and the optimizer. Its constants come from published runs (tests/pipeline/test_footprint.py).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from pipeline.loss.chunks import CHUNK_MB

GB, GIB, TERA = 1e9, 2**30, 1e12
TIME_ERROR = 0.15  # largest relative error over the published runs that the tests hold it against
MEMORY_ERROR = 0.25  # likewise over runs measured here
USABLE = 0.92  # of a GPU's memory; the rest goes to the CUDA context, NCCL and fragments
HIDDEN_BY_COMPUTE = 0.9  # share of the computing time under which ZeRO-3's communication can hide
BUS_EFFICIENCY = 0.75  # of a link's bandwidth that a large collective reaches
MEMORY_EFFICIENCY = 0.75  # of the memory bandwidth that element-wise kernels reach
PASSES = 4.0  # times that kept activations cross the memory bus, forward and backward
HOST_LINK = 20 * GB  # bytes/s between a GPU and its host, for offloading
NODE = 8  # GPUs
GROUP = 1e9  # parameters that ZeRO updates together


class Accelerator(NamedTuple):
    """One kind of GPU."""

    memory_gib: float
    tflops: float  # dense bf16 peak
    bandwidth_tb: float  # memory, TB/s
    link_gb: float  # to its neighbours in the node, GB/s each way
    efficiency: float  # share of the peak that a model's large matrix products reach


ACCELERATORS = {
    "A100-40G": Accelerator(39.4, 312, 1.55, 300, 0.65),
    "A100-80G": Accelerator(79.2, 312, 2.0, 300, 0.65),
    "H100-80G": Accelerator(79.1, 989, 3.35, 450, 0.49),
    "H200-141G": Accelerator(139.8, 989, 4.8, 450, 0.49),
    "A10-24G": Accelerator(22.5, 125, 0.6, 12, 0.6),
    "L40S-48G": Accelerator(44.4, 362, 0.86, 12, 0.5),
    "RTX3090-24G": Accelerator(23.6, 71, 0.94, 12, 0.8),
    "RTX4090-24G": Accelerator(23.5, 165, 1.0, 12, 0.8),
}


def accelerator(name: str) -> Accelerator | None:
    """The kind that a driver's device name means ("NVIDIA A100-SXM4-80GB"), or None."""
    found = None
    for kind, gpu in ACCELERATORS.items():
        letters = re.sub(r"(?<=[A-Z])(?=\d)", " ?", kind.split("-")[0])  # "RTX 4090", "A100"
        if re.search(rf"{letters}(?!\d)", name.upper()):
            found = gpu
    return found


@dataclass(frozen=True)
class Sizes:
    """A model in numbers."""

    parameters: int
    trainable: int
    body: int  # parameters of the layers, which is where matrix products are
    layers: int
    hidden: int
    inner: int  # width of the feed-forward part
    key_values: int  # width of keys, and of values
    gated: bool  # gate, up and down (LLaMA) or up and down (GPT-2, OPT)
    vocabulary: int


@dataclass(frozen=True)
class Setup:
    """How it is trained."""

    ranks: int
    stage: int  # of ZeRO
    micro: int  # rows per pass and rank
    block: int  # tokens per row
    accumulation: int = 1  # passes per step
    bf16: bool = True
    checkpointing: bool = False
    offload_optimizer: bool = False
    offload_parameters: bool = False
    cost: bool = True  # the objective has transport costs
    cache_mb: float = 0.0  # of cost rows
    chunk_mb: float = CHUNK_MB  # of logits
    live: float = 1e9  # parameters that ZeRO-3 keeps gathered (stage3_max_live_parameters)
    bucket: float = 5e7  # elements of a communication bucket
    fused_adam: bool = True  # as on a GPU; else the update makes copies of its own

    @property
    def tokens(self) -> int:
        """Tokens per pass and rank."""
        return self.micro * self.block

    @property
    def width(self) -> int:
        """Bytes of a weight or activation."""
        return 2 if self.bf16 else 4


class Memory(NamedTuple):
    """Bytes on one GPU, by part."""

    parameters: float
    gradients: float
    optimizer: float
    gathered: float
    activations: float
    loss: float
    update: float  # while the optimizer steps, when the three before are free again

    @property
    def total(self) -> float:
        """What is held at the worst moment."""
        return sum(self.peak.values())

    @property
    def peak(self) -> dict[str, float]:
        """The parts that are held at the worst moment: in a pass, or while the optimizer steps."""
        found = self._asdict()
        in_pass = self.gathered + self.activations + self.loss
        absent = ["update"] if in_pass >= self.update else ["gathered", "activations", "loss"]
        return {name: size for name, size in found.items() if name not in absent}

    @property
    def states(self) -> float:
        """What stays between steps."""
        return self.parameters + self.gradients + self.optimizer


class Time(NamedTuple):
    """Seconds of one optimizer step, by part."""

    matrices: float
    attention: float
    elementwise: float
    head: float
    communication: float  # not hidden
    optimizer: float

    @property
    def total(self) -> float:
        return sum(self)


def memory(sizes: Sizes, setup: Setup) -> Memory:
    """Largest memory that one GPU holds during a step."""
    share = [1 / setup.ranks if setup.stage >= stage else 1.0 for stage in (3, 2, 1)]
    parameters = sizes.parameters * setup.width * share[0]
    gradients = sizes.trainable * 4 * share[1]
    # DeepSpeed's ZeRO keeps float32 weights and two moments, also beside float32 weights. It updates them a
    # group of at most 1e9 parameters at a time, with a copy of the group's gradient.
    update = min(sizes.trainable * share[2], GROUP) * (4 if setup.fused_adam else 12)
    optimizer = sizes.trainable * 12 * share[2]
    if setup.stage == 0:
        optimizer = sizes.trainable * (12 if setup.bf16 else 8)
    head = sizes.vocabulary * sizes.hidden
    trains_head = sizes.trainable == sizes.parameters
    gathered = 2 * setup.bucket * (4 if trains_head else setup.width) if setup.ranks > 1 else 0.0
    gathered = min(gathered, 2.0 * sizes.trainable * 4)
    if setup.stage == 3 and setup.ranks > 1:
        gathered += min(sizes.parameters, setup.live + setup.bucket) * setup.width
    if setup.offload_optimizer:
        optimizer = gradients = update = 0.0
    if setup.offload_parameters:
        parameters = 0.0
    loss = setup.chunk_mb * 2**20 + 2 * setup.tokens * sizes.hidden * 4
    loss += head * (4 + setup.width) if trains_head else 0.0
    if setup.cost:
        loss += head * setup.width + setup.cache_mb * 2**20
    return Memory(parameters, gradients, optimizer, gathered, _activations(sizes, setup), loss, update)


def _layer_bytes(sizes: Sizes, setup: Setup) -> float:
    """What one layer keeps per token: inputs of norms in float32, and every factor of a product."""
    width, h, f = setup.width, sizes.hidden, sizes.inner
    norms = 2 * h * (4 + 2 * width)
    attention = width * (2 * h + 2 * sizes.key_values)
    return norms + attention + width * f * (4 if sizes.gated else 2)


def _activations(sizes: Sizes, setup: Setup) -> float:
    layer = _layer_bytes(sizes, setup)
    kept = layer * sizes.layers
    if setup.checkpointing:
        kept = setup.width * sizes.hidden * sizes.layers + layer
    return setup.tokens * (kept + layer / 2)  # half a layer's worth of gradients on their way back


def step_time(sizes: Sizes, setup: Setup, gpu: Accelerator, network_gb: float = 200.0) -> Time:
    """Seconds of one optimizer step; `network_gb`: GB/s that a node reaches others with."""
    peak, T, k = gpu.tflops * TERA, setup.tokens, setup.accumulation
    if not setup.bf16:
        peak /= 8  # TF32 products, float32 elsewhere
    passes = 4 if setup.checkpointing else 3
    backward_of_weights = sizes.trainable / sizes.parameters  # frozen weights need no gradient of their own
    products = 2 * sizes.body * T * (passes - 1 + backward_of_weights)
    # causal: every token sees half a block on average; q k and the weighted sum of v
    attention = 4 * T * setup.block / 2 * sizes.hidden * sizes.layers * (passes + 0.5)
    head = 2 * sizes.vocabulary * sizes.hidden * T * (2 + backward_of_weights)
    matrices_s = k * products / (peak * gpu.efficiency)
    attention_s = k * attention / (peak * gpu.efficiency * 0.6)
    head_s = k * head / (peak * gpu.efficiency)
    traffic = PASSES * T * _layer_bytes(sizes, setup) * sizes.layers * (1.25 if setup.checkpointing else 1.0)
    elementwise_s = k * traffic / (gpu.bandwidth_tb * TERA * MEMORY_EFFICIENCY)
    bus = gpu.link_gb if setup.ranks <= NODE else min(gpu.link_gb, network_gb)
    moved = _moved(sizes, setup) * (setup.ranks - 1) / setup.ranks
    communication_s = moved / (bus * GB * BUS_EFFICIENCY)
    computing = matrices_s + attention_s + head_s + elementwise_s
    exposed = max(0.05 * communication_s, communication_s - HIDDEN_BY_COMPUTE * computing)
    own = sizes.trainable / (setup.ranks if setup.stage >= 1 else 1)
    optimizer_s = 28 * own / (gpu.bandwidth_tb * TERA * MEMORY_EFFICIENCY)
    if setup.offload_optimizer:
        optimizer_s = 6 * own / HOST_LINK + 28 * own / HOST_LINK
    if setup.offload_parameters:
        exposed += k * 2 * sizes.parameters * setup.width / setup.ranks / HOST_LINK
    return Time(matrices_s, attention_s, elementwise_s, head_s, exposed, optimizer_s)


def _moved(sizes: Sizes, setup: Setup) -> float:
    """Bytes that a rank sends and receives in one step."""
    width = setup.width
    if setup.ranks == 1:
        return 0.0
    if setup.stage == 3:  # gather for forward, gather for backward, reduce-scatter gradients: every pass
        return setup.accumulation * width * (2 * sizes.parameters + sizes.trainable)
    if setup.stage == 2:  # reduce gradients every pass, gather weights once
        return width * sizes.trainable * (setup.accumulation + 1)
    return 2 * width * sizes.trainable  # once a step


def utilisation(sizes: Sizes, setup: Setup, seconds: float, gpu: Accelerator) -> float:
    """MFU: share of the peak spent on the 6 P + attention operations per token that training needs.

    Recomputed activations do not count (Chowdhery et al. 2022, appendix B); attention counts causal.
    """
    per_token = 6 * (sizes.body + sizes.vocabulary * sizes.hidden)
    per_token += 6 * setup.block * sizes.hidden * sizes.layers
    return per_token * setup.tokens * setup.accumulation / seconds / (gpu.tflops * TERA)
