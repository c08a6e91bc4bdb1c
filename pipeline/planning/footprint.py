"""Predict the memory and time of a training step from the sizes of the model and the settings.

The memory of one GPU has these parts (bf16; P parameters, n ranks, T tokens per pass, h hidden, f inner
width):

    states       weights 2 P, accumulated gradients 4 P, optimizer 12 P bytes, divided by n as ZeRO defines
    gathered     weights that ZeRO-3 gathers around the current layer, communication buckets, and the
                 gradients in the model's precision that ZeRO-1 keeps during the whole step
    activations  what a layer keeps for its backward pass, times layers. With checkpointing it is h per token
                 and layer, and one complete layer. With a mask for packed rows, the mask is added. With eager
                 attention, the scores [heads, L, L] of each layer are added.
    loss         a chunk of logits, the head's float32 gradient [V, h], the cost embedding [V, h]
    update       needed while the optimizer steps, when the last three are free again: a copy of the gradient
                 under ZeRO-3; gradients 2 P and as much for the reduction under ZeRO-1

Ranks that share rows have 1 / N of their tokens T, and exchange them for heads in every layer.

The time of a step is the sum of matrix products, attention, element-wise kernels, communication and the
optimizer. A pass takes at least as long as the host needs to launch it. Five constants are fitted to
published runs (tests/helpers/published.py): the efficiencies of two GPUs, ATTENTION, SHORT and EXPOSED. The
others are counted.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple

from ..engine.device.hardware import GB, NODE, TERA, Accelerator
from ..loss.fused import CHUNK_MB

TIME_ERROR = 0.15  # largest error over published runs that no constant was fitted to
MEMORY_ERROR = 0.25  # error over published runs of all memory except states, which are exact
ATTENTION = 0.29  # efficiency of attention relative to matrix products
SHORT = 660  # start-up cost of a matrix product: h elements take as long as h + SHORT would without it
EXPOSED = 0.46  # share of the time of overlapped communication by which it slows down computation
HIDDEN_BY_COMPUTE = 0.9  # share of the computing time that communication can overlap with
BUS_EFFICIENCY = 0.75  # share of a link's bandwidth that a large collective reaches
MEMORY_EFFICIENCY = 0.85  # share of the memory bandwidth that element-wise kernels reach
# Bytes per parameter that ZeRO-1 moves once a step for gradients that are not sharded: they are copied to
# half precision and back for the reduction, measured, scaled, clipped and set to zero.
UNSHARDED = 40
# Bytes per weight: 4 bits, 8 bits of statistics per 64 weights, and 32 bits per 256 of these statistics.
NF4 = 1 / 2 + 1 / 64 + 4 / (64 * 256)
MOMENTS_8BIT = 2 * (1 + 4 / 256)  # bytes per parameter: 8 bits per value, and 32 bits per 256 values
HOST_LINK = 20 * GB  # bytes/s between a GPU and its host, for offloading
HOST_ADAM = 4e9  # parameters/s that a host updates over all its ranks (Ren et al. 2021: 10e9 in 2.6 s)
GROUP = 1e9  # parameters that ZeRO-3 updates together
# Seconds of host time per parameter tensor and pass: Python, kernel launches, ZeRO's hooks. It is an
# estimate: a pass of a tiny model of 32 layers with 9 tensors each took 179 ms under ZeRO-2 and 402 ms under
# ZeRO-3 on a slow core. A core of a GPU host is assumed to be twice as fast.
HOST_TENSOR = 0.179 / (32 * 9) / 2
HOST_TENSOR_ZERO3 = 0.402 / (32 * 9) / 2
COMPILED_HOST = 0.5  # share of that with torch.compile, which launches fewer kernels (an estimate)


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model."""

    parameters: int
    trainable: int
    body: int  # parameters of the layers, without embedding and head
    layers: int
    hidden: int
    inner: int  # width of the feed-forward block
    key_values: int  # width of keys, and of values
    gated: bool  # the feed-forward block has gate, up and down (LLaMA), not only up and down (GPT-2, OPT)
    vocabulary: int
    tensors: int  # number of parameter tensors
    quantized: int = 0  # frozen parameters stored in NF4
    idle: int = 0  # parameters of experts that a token is not routed to
    trains_head: bool = True
    heads: int = 0  # of attention
    capped: bool = False  # attention scores have a soft cap

    @property
    def active(self) -> int:
        """Return the number of parameters in the layers that a token passes through."""
        return self.body - self.idle


@dataclass(frozen=True)
class Setup:
    """The training settings that determine memory and time."""

    ranks: int
    stage: int  # of ZeRO
    micro: int  # rows per pass and rank, or group of ranks that share rows
    block: int  # tokens per row
    accumulation: int = 1  # passes per step
    bf16: bool = True
    checkpointing: bool = False
    offload_activations: bool = False  # checkpoints are in host memory
    tiled: bool = False  # MLPs compute tiles of as many tokens as the model is wide
    offload_optimizer: bool = False
    offload_parameters: bool = False
    cost: bool = True  # a cost embedding [V, h] is in memory
    cache_mb: float = 0.0  # cache of cost rows
    chunk_mb: float = CHUNK_MB  # chunk of logits
    live: float = 1e9  # parameters that ZeRO-3 keeps gathered (stage3_max_live_parameters)
    bucket: float = 5e7  # elements of a communication bucket
    compiled: bool = False  # torch.compile, which fuses the element-wise kernels of a layer
    kernels: bool = False  # Liger's kernels, which fuse the same, and keep less for the backward pass
    masked: bool = False  # SDPA separates the documents of packed rows by a mask [b, 1, L, L]
    eager: bool = False  # attention keeps the scores of all heads [b, heads, L, L]
    hpz: int = 1  # GPUs that share a second copy of the weights to gather from (hpZ), or 1
    reduced: int = 2  # bytes of a gradient element in a reduction
    all_reduced: bool = True  # ZeRO-2 sends gradients to all ranks, not only to their owner
    teacher: Sizes | None = None  # a frozen model that computes a forward pass for every batch
    copied: bool = True  # the teacher has its own weights, held as this model's are
    teacher_width: int = 2  # bytes of a weight or activation of the teacher
    moments: float = 8.0  # bytes of the optimizer's averages per parameter
    state: int = 4  # bytes of an accumulated gradient, and of the optimizer's copy of a weight
    averaged: bool = False  # the teacher is the average of the weights that train
    demonstrated: float = 0.0  # share of passes in which the teacher reads rows of twice the length
    attended: float | None = None  # mean tokens that a token attends to, or None for complete rows
    sequence: int = 1  # ranks that share every row
    written: float = 0.0  # mean tokens that the model generates one after the other in a pass

    @property
    def tokens(self) -> int:
        """Return the tokens per pass and rank."""
        return self.micro * self.block // self.sequence

    @property
    def width(self) -> int:
        """Return the bytes of a weight or activation."""
        return 2 if self.bf16 else 4

    @property
    def context(self) -> float:
        """Return the mean number of tokens that a token attends to."""
        return self.block / 2 if self.attended is None else self.attended


class Memory(NamedTuple):
    """Bytes on one GPU, by part."""

    parameters: float
    gradients: float
    optimizer: float
    gathered: float
    activations: float
    loss: float
    teacher: float
    update: float  # while the optimizer steps, without gathered, activations and loss

    @property
    def peak(self) -> dict[str, float]:
        """Return the parts in use at the peak, which is in a pass or while the optimizer steps."""
        in_pass = self.gathered + self.activations + self.loss
        absent = ["update"] if in_pass >= self.update else ["gathered", "activations", "loss"]
        return {name: size for name, size in self._asdict().items() if name not in absent}

    @property
    def total(self) -> float:
        """Return the bytes in use at the peak."""
        return sum(self.peak.values())

    @property
    def upper_bound(self) -> float:
        """Return the peak if everything except states takes MEMORY_ERROR more than predicted."""
        states = self.parameters + self.gradients + self.optimizer
        return states + (self.total - states) * (1 + MEMORY_ERROR)


class Time(NamedTuple):
    """Seconds of one optimizer step, by part."""

    matrices: float
    attention: float
    elementwise: float
    head: float
    teacher: float
    writing: float  # generation of on-policy batches
    communication: float  # that does not overlap with computation
    optimizer: float
    host: float  # by which launching a pass takes longer than computing it

    @property
    def total(self) -> float:
        return sum(self)


def memory(sizes: Sizes, setup: Setup) -> Memory:
    """Return the peak memory of one GPU during a step."""
    weight_share, gradient_share, optimizer_share = (
        1 / setup.ranks if setup.stage >= stage else 1.0 for stage in (3, 2, 1)
    )
    parameters = (sizes.parameters - sizes.quantized) * setup.width * weight_share + sizes.quantized * NF4
    gradients = sizes.trainable * setup.state * gradient_share
    shard = sizes.trainable * optimizer_share
    optimizer = shard * (setup.state + setup.moments)  # DeepSpeed copies weights, even of float32 models
    update = _update_bytes(sizes, setup, shard, gradients)
    if setup.hpz > 1:
        parameters += sizes.parameters * setup.width / setup.hpz
    if setup.offload_optimizer:
        optimizer = gradients = update = 0.0
    if setup.offload_parameters:
        parameters = 0.0
    gathered = _gathered_bytes(sizes, setup, shard)
    activations = max(_activation_bytes(sizes, setup), _writing_bytes(sizes, setup))
    loss = _loss_bytes(sizes, setup)
    teacher = _teacher_bytes(setup) + _average_bytes(sizes, setup)
    return Memory(parameters, gradients, optimizer, gathered, activations, loss, teacher, update)


def _update_bytes(sizes: Sizes, setup: Setup, shard: float, gradients: float) -> float:
    """Return the temporary memory of the optimizer step, for `shard` parameters and bytes of gradients."""
    if setup.stage == 3:  # one group at a time, with a copy of its gradient
        return min(shard, GROUP) * setup.state
    if setup.state < 4:  # the gradient of the last pass, next to the sum
        last = shard * setup.state if setup.stage == 2 and setup.accumulation > 1 else 0.0
        return last + _bucket_bytes(sizes, setup)
    if setup.bf16 and setup.stage == 1:
        reduction = sizes.trainable * setup.reduced if setup.reduced < 4 else 0  # also with one rank
        return sizes.trainable * setup.width + reduction
    # With float32 weights there are two copies of the shard's gradient, once the other shards' are freed.
    return 0.0 if setup.bf16 else max(0.0, shard * 8 - gradients)


def _gathered_bytes(sizes: Sizes, setup: Setup, shard: float) -> float:
    """Return the memory of communication buckets, gathered weights and gradients outside the states."""
    gathered = _bucket_bytes(sizes, setup)
    if setup.stage == 3 and (setup.ranks > 1 or setup.offload_parameters):
        gathered += min(sizes.parameters, setup.live + setup.bucket) * setup.width
    if setup.stage == 2 and not setup.bf16 and setup.accumulation > 1:
        gathered += shard * 4  # the gradient of one pass, next to the sum
    if setup.stage == 1 and setup.bf16 and setup.state == 4:
        gathered += sizes.trainable * setup.width
    if sizes.quantized:  # a layer's weight, restored from NF4
        gathered += sizes.hidden * sizes.inner * setup.width
    return gathered


def _bucket_bytes(sizes: Sizes, setup: Setup) -> float:
    """Return the memory of communication buckets."""
    buckets = (4 if sizes.trains_head else 2) * setup.bucket * setup.width if setup.ranks > 1 else 0.0
    return min(buckets, 2.0 * sizes.trainable * 4)


def _loss_bytes(sizes: Sizes, setup: Setup) -> float:
    head = sizes.vocabulary * sizes.hidden
    logits = setup.tokens * sizes.vocabulary * setup.width
    loss = min(setup.chunk_mb * 2**20, logits) + 2 * setup.tokens * sizes.hidden * 4
    loss += head * (4 + setup.width) if sizes.trains_head else 0.0
    if setup.cost:
        loss += head * setup.width
    return loss + setup.cache_mb * 2**20


def state_bytes(sizes: Sizes, setup: Setup) -> float:
    """Return the bytes that all ranks save: weights, moments and weights of the optimizer, and an average."""
    return sizes.trainable * (setup.state + setup.moments + setup.width + (4 if setup.averaged else 0))


def export_bytes(sizes: Sizes, setup: Setup) -> float:
    """Return the bytes of an export."""
    return sizes.parameters * setup.width


def stored_bytes(sizes: Sizes, setup: Setup) -> float:
    """Return the memory of the inputs of all layers, which checkpointing keeps."""
    return setup.tokens * sizes.hidden * sizes.layers * setup.width


def _activation_bytes(sizes: Sizes, setup: Setup) -> float:
    width = setup.width
    h = sizes.hidden
    f = sizes.inner
    # Bytes per token of a layer: inputs of norms, also in float32, and every factor of a product. Liger's
    # norms keep no float32 copy, and its MLP computes silu(gate) again.
    liger_mlp = setup.kernels and sizes.gated
    norms = 2 * h * (2 * width + (0 if setup.kernels else 4))
    attention = width * (2 * h + 2 * sizes.key_values)
    inner = width * f * ((3 if liger_mlp else 4) if sizes.gated else 2)
    layer = norms + attention + (0 if setup.tiled else inner)
    layers = 1 if setup.checkpointing else sizes.layers
    # Gradients in flight take half a layer. Without MLPs it is all of it. Liger's MLP overwrites its inputs.
    in_flight: float = layer if setup.tiled else width * (f + h) if liger_mlp else layer / 2
    activations = setup.tokens * (layer * layers + in_flight)
    if setup.checkpointing and not setup.offload_activations:
        activations += stored_bytes(sizes, setup)
    if setup.tiled:
        activations += min(setup.tokens, h) * inner * 1.5
    if setup.masked:  # a boolean mask, and a copy in the model's precision that each layer keeps
        copies = 1 if setup.checkpointing else sizes.layers
        activations = setup.tokens * setup.block * (1 + width * copies) + activations
    if setup.eager:  # the softmax in float32 and in the model's precision, and the scores before a soft cap
        kept = 4 + (width if setup.bf16 else 0) + (width if sizes.capped else 0)
        activations += setup.tokens * setup.block * sizes.heads * kept * (layers + 0.5)
    return activations


def _writing_bytes(sizes: Sizes, setup: Setup) -> float:
    """Return the memory of generation: the cache of keys and values, and a layer's activations."""
    per_token = 2 * sizes.key_values * sizes.layers + 6 * sizes.hidden + 4 * sizes.inner
    return setup.tokens * setup.width * per_token if setup.written else 0.0


def _teacher_bytes(setup: Setup) -> float:
    """Return the memory of a teacher on one GPU: its weights, a layer's activations and hidden states."""
    teacher = setup.teacher
    width = setup.teacher_width
    if teacher is None:
        return 0.0
    length = 2 if setup.demonstrated else 1
    layer = length * setup.tokens * width * (6 * teacher.hidden + 4 * teacher.inner)
    if not setup.copied:
        return layer
    weights = teacher.parameters * width
    if setup.stage < 3:
        return weights + layer
    gathered = min(teacher.parameters, setup.live + setup.bucket) * width if setup.ranks > 1 else 0.0
    return gathered + layer + (0.0 if setup.offload_parameters else weights / setup.ranks)


def _average_bytes(sizes: Sizes, setup: Setup) -> float:
    """Return the memory of averaged weights on one GPU, except the copy of a model in `_teacher_bytes`."""
    if not setup.averaged or setup.offload_parameters:
        return 0.0
    # The average is float32. Adapters also have a copy in the type of the model.
    width = (4 if setup.teacher_width < 4 else 0) + (0 if setup.copied else setup.teacher_width)
    return sizes.trainable * width / (setup.ranks if setup.stage == 3 else 1)


def _average_seconds(sizes: Sizes, setup: Setup, gpu: Accelerator) -> float:
    """Return the time of updating averaged weights, which reads or writes 12 bytes per weight."""
    shard = sizes.trainable / (setup.ranks if setup.stage == 3 else 1)
    if setup.offload_parameters:  # Adam reads and writes 28 bytes
        return 12 / 28 * shard * min(setup.ranks, NODE) / HOST_ADAM
    return 12 * shard / (gpu.bandwidth_tb * TERA * MEMORY_EFFICIENCY)


def step_time(sizes: Sizes, setup: Setup, gpu: Accelerator, network_gb: float = 200.0) -> Time:
    """Return the time of one optimizer step.

    Args:
        sizes: The model.
        setup: The training settings.
        gpu: The accelerator of every rank.
        network_gb: GB/s between nodes, of each node.
    """
    passes = setup.accumulation
    matrices, attention, head = _product_seconds(sizes, setup, gpu)
    elementwise = _elementwise_seconds(sizes, setup, gpu)
    teacher = 0.0
    if setup.teacher is not None:
        student = dataclasses.replace(setup, teacher=None)
        width = setup.teacher_width if setup.copied else 0
        teacher = _forward_seconds(setup.teacher, student, gpu, network_gb, width)
        if setup.demonstrated:
            twice = dataclasses.replace(student, block=2 * setup.block)
            longer = _forward_seconds(setup.teacher, twice, gpu, network_gb, width)
            teacher += setup.demonstrated * (longer - teacher)
    computing = matrices + attention + head + elementwise + teacher
    communication = _communication_seconds(sizes, setup, gpu.link_gb, network_gb, computing)
    communication += _exchange_seconds(sizes, setup, gpu.link_gb, network_gb)
    if setup.checkpointing and setup.offload_activations:  # to the host and back
        communication += passes * 2 * stored_bytes(sizes, setup) / HOST_LINK
    if setup.offload_parameters:
        communication += passes * 2 * sizes.parameters * setup.width / setup.ranks / HOST_LINK
    optimizer = _optimizer_seconds(sizes, setup, gpu)
    if setup.averaged:
        optimizer += _average_seconds(sizes, setup, gpu)
    per_tensor = HOST_TENSOR_ZERO3 if setup.stage == 3 else HOST_TENSOR
    recomputation = 4 / 3 if setup.checkpointing else 1.0
    host = passes * (sizes.tensors * per_tensor * recomputation * (COMPILED_HOST if setup.compiled else 1.0))
    device = computing + communication
    # The larger of host and device time counts, with a smooth transition where they are equal.
    waiting = (device**4 + host**4) ** 0.25 - device
    writing = passes * setup.written * _token_seconds(sizes, setup, gpu, network_gb)
    return Time(matrices, attention, elementwise, head, teacher, writing, communication, optimizer, waiting)


def _product_seconds(sizes: Sizes, setup: Setup, gpu: Accelerator) -> tuple[float, float, float]:
    """Return the time of the layers' matrix products, of attention, and of the head in a step."""
    T = setup.tokens
    rate = (gpu.tflops if setup.bf16 else gpu.tflops32) * TERA * gpu.efficiency
    passes = 4 if setup.checkpointing else 3
    weight_gradients = sizes.trainable / sizes.parameters  # frozen weights need none
    products = 2 * sizes.active * T * (passes - 1 + weight_gradients)
    if setup.tiled:  # a forward pass of the MLPs again
        products += 2 * T * sizes.layers * sizes.hidden * sizes.inner * (3 if sizes.gated else 2)
    context = setup.block if setup.masked else setup.context  # masked scores are computed and discarded
    attention = 4 * T * context * sizes.hidden * sizes.layers * (passes + 0.5)  # q k, the weighted sum of v
    head = 2 * sizes.vocabulary * sizes.hidden * T * (2 + weight_gradients)
    start_up = 1 + SHORT / sizes.hidden
    k = setup.accumulation
    return k * products / rate * start_up, k * attention / (rate * ATTENTION), k * head / rate * start_up


def _elementwise_seconds(sizes: Sizes, setup: Setup, gpu: Accelerator) -> float:
    """Return the time of element-wise kernels in a step, which memory bandwidth limits."""
    # Bytes that a pass moves to copy gradients into a bucket and to add them up in float32.
    adding = 10 / (setup.ranks if setup.stage >= 2 else 1)
    gradient_traffic = sizes.trainable * (adding + (2 * setup.width if setup.stage >= 2 else 0))
    # Bytes per token and layer, forward and backward. LLaMA's RMSNorm and rotary embedding are half a dozen
    # kernels each in transformers; LayerNorm is one.
    h = sizes.hidden
    f = sizes.inner
    rotated = sizes.hidden + sizes.key_values
    if sizes.gated:
        # Liger: q and k in place 8, gate and up to their product and back 16, two norms 20, residuals 24.
        fused = setup.compiled or setup.kernels
        volume = 55 * h + 8 * rotated + 18 * f if fused else 240 * h + 55 * rotated + 26 * f
    else:
        volume = (55 if setup.compiled else 110) * h + 10 * f
    passes = 4 if setup.checkpointing else 3
    traffic = setup.tokens * (volume * setup.width / 2) * sizes.layers * passes / 3 + gradient_traffic
    return setup.accumulation * traffic / (gpu.bandwidth_tb * TERA * MEMORY_EFFICIENCY)


def _optimizer_seconds(sizes: Sizes, setup: Setup, gpu: Accelerator) -> float:
    bandwidth = gpu.bandwidth_tb * TERA * MEMORY_EFFICIENCY
    shard = sizes.trainable / setup.ranks
    if setup.offload_optimizer:  # every pass sends gradients to the host, weights return once
        moved = (4 * setup.accumulation + setup.width) * shard
        return moved / HOST_LINK + shard * min(setup.ranks, NODE) / HOST_ADAM
    seconds = (12 + 2 * setup.moments) * shard / bandwidth
    if setup.stage == 1 and setup.bf16 and setup.ranks > 1:
        seconds += UNSHARDED * sizes.trainable / bandwidth
    return seconds


def _forward_seconds(
    sizes: Sizes, setup: Setup, gpu: Accelerator, network_gb: float, gathered_width: int
) -> float:
    """Return the time of a frozen model's forward passes in a step.

    ZeRO-3 gathers `gathered_width` bytes per weight in every pass.
    """
    # A training step has three passes with equal element-wise work, and three products of the head.
    frozen = dataclasses.replace(setup, checkpointing=False, tiled=False, ranks=1, offload_optimizer=False)
    step = step_time(sizes, dataclasses.replace(frozen, offload_parameters=False), gpu, network_gb)
    seconds = (step.matrices + step.attention + step.elementwise + step.head) / 3
    moved = setup.accumulation * gathered_width * sizes.parameters
    return max(seconds, _gather_seconds(moved, setup, gpu, network_gb))


def _token_seconds(sizes: Sizes, setup: Setup, gpu: Accelerator, network_gb: float) -> float:
    """Return the time in which a pass generates one token of each of its texts.

    It reads all weights, which ZeRO-3 gathers first, and launches the kernels of a forward pass.
    """
    weights = setup.width * sizes.parameters
    host = sizes.tensors * (HOST_TENSOR_ZERO3 if setup.stage == 3 else HOST_TENSOR) / 3
    gathering = _gather_seconds(weights, setup, gpu, network_gb)
    return max(weights / (gpu.bandwidth_tb * TERA * MEMORY_EFFICIENCY), host, gathering)


def _gather_seconds(moved: float, setup: Setup, gpu: Accelerator, network_gb: float) -> float:
    """Return the time in which ZeRO-3 gathers `moved` bytes of weights."""
    if setup.stage < 3 or setup.ranks == 1:
        return 0.0
    link = gpu.link_gb if setup.ranks <= NODE else min(gpu.link_gb, network_gb)
    return moved / (link * GB * BUS_EFFICIENCY)


def _communication_seconds(
    sizes: Sizes, setup: Setup, link_gb: float, network_gb: float, computing: float
) -> float:
    """Return the time by which communication lengthens a step.

    Overlapped communication slows computation for every byte that it moves through the GPU, however slow the
    network is. It takes extra time if there are not enough seconds of `computing` to overlap with.
    """
    n = setup.ranks
    k = setup.accumulation
    width = setup.width
    if n == 1:
        return 0.0
    gradients = setup.reduced * sizes.trainable
    weights = width * sizes.trainable
    inside = link_gb * GB * BUS_EFFICIENCY / ((n - 1) / n)  # bandwidth within a node
    bus = inside if n <= NODE else inside * min(1.0, network_gb / link_gb)
    overlapped = exposed = 0.0  # bytes moved during computation, and after it
    local_bytes = 0.0  # overlapped bytes that stay within a node
    if setup.stage == 3:  # gather for forward, gather for backward, reduce-scatter gradients: every pass
        gathers = 2 * k * width * sizes.parameters
        overlapped = gathers + k * gradients
        if setup.hpz > 1:  # only the first gather after an update leaves the node
            local_bytes = gathers * (1 - 1 / (2 * k))
    elif setup.stage == 2:  # reduce gradients every pass, gather weights once they are updated
        overlapped = k * gradients * (2 if setup.all_reduced else n / (n - 1))
        exposed = weights
    else:  # all-reduce gradients after the last pass, gather weights once they are updated
        exposed = 2 * gradients + weights
    seconds = (overlapped - local_bytes) / bus + local_bytes / inside
    # The first gather of a pass and its last reduction (a layer; embedding and head) overlap with nothing.
    ends = seconds * 2 / 3 * (1 / sizes.layers + 1 - sizes.body / sizes.parameters)
    return exposed / bus + ends + max(EXPOSED * overlapped / inside, seconds - HIDDEN_BY_COMPUTE * computing)


def exchanged_bytes(sizes: Sizes, setup: Setup) -> float:
    """Return the bytes that a rank sends in the all-to-alls of one layer's forward pass over shared rows.

    There is one each for queries, keys, values and results. The backward pass sends as much.
    """
    width = 2 * sizes.hidden + 2 * sizes.key_values
    return setup.tokens * width * setup.width * (1 - 1 / setup.sequence)


def _exchange_seconds(sizes: Sizes, setup: Setup, link_gb: float, network_gb: float) -> float:
    """Return the time of the all-to-alls of a step, during which ranks that share rows compute nothing."""
    link = link_gb if setup.sequence <= NODE else min(link_gb, network_gb)
    passes = 3 if setup.checkpointing else 2  # forward, backward, and forward again
    moved = setup.accumulation * passes * sizes.layers * exchanged_bytes(sizes, setup)
    return moved / (link * GB * BUS_EFFICIENCY)


def utilisation(sizes: Sizes, setup: Setup, seconds: float, gpu: Accelerator) -> float:
    """Return the model FLOPs utilisation (MFU) of a step: 6 P + attention per token, over the GPU's peak.

    Recomputed activations do not count (Chowdhery et al. 2022, appendix B), nor do gradients of frozen
    weights. Attention counts only the causal pairs within documents.

    Args:
        sizes: The model.
        setup: The training settings.
        seconds: Duration of the step.
        gpu: The accelerator of every rank.
    """
    products = 4 + 2 * sizes.trainable / sizes.parameters
    per_token = products * (sizes.active + sizes.vocabulary * sizes.hidden)
    per_token += 12 * setup.context * sizes.hidden * sizes.layers
    peak = (gpu.tflops if setup.bf16 else gpu.tflops32) * TERA
    return per_token * setup.tokens * setup.accumulation / seconds / peak
