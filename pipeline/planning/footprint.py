"""Memory and time of a training step, from sizes alone: what `plan` predicts.

The memory of one GPU, by part (bf16; P parameters, n ranks, T tokens per pass, h hidden, f inner width):

    states       weights 2 P, accumulated gradients 4 P, optimizer 12 P bytes, divided by n as ZeRO says
    gathered     weights that ZeRO-3 brings together around the layer at work, communication buckets, and the
                 gradients in the model's precision that ZeRO-1 keeps for the whole of a step
    activations  what a layer keeps for its backward pass, times layers; with checkpointing h per token and
                 layer, and one layer whole; with a mask for packed rows also that
    loss         a chunk of logits, the head's float32 gradient [V, h], the cost embedding [V, h]
    update       while the optimizer steps, when the last three are free again: a copy of the gradient under
                 ZeRO-3; under ZeRO-1 its gradients 2 P, and as much for the copy that ranks reduce before

The time of a step adds matrix products, attention, element-wise traffic, communication and the optimizer; a
pass takes at least as long as the host needs to issue it. Five constants come from published runs, which
tests/helpers/published.py lists: efficiencies of two GPUs, ATTENTION, SHORT and EXPOSED. Others are counted.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple

from ..engine.hardware import GB, NODE, TERA, Accelerator
from ..loss.fused import CHUNK_MB

TIME_ERROR = 0.15  # largest over published runs that no constant was fitted to; of 56, 54 are within 0.10
MEMORY_ERROR = 0.25  # of what is not states, over published runs; states are known
ATTENTION = 0.29  # of the efficiency of matrix products that attention reaches
SHORT = 660  # a product over h elements takes as long as one over h + SHORT without its beginning and end
EXPOSED = 0.46  # of the time that communication beside computing would take among neighbours: it slows both
HIDDEN_BY_COMPUTE = 0.9  # share of the computing time under which communication can run at all
BUS_EFFICIENCY = 0.75  # of a link's bandwidth that a large collective reaches
MEMORY_EFFICIENCY = 0.85  # of the memory bandwidth that element-wise kernels reach
# Bytes a parameter that ZeRO-1 moves once a step over gradients that are not sharded: they are copied to half
# precision for the reduction and back, measured, scaled, clipped and set to zero.
UNSHARDED = 40
HOST_LINK = 20 * GB  # bytes/s between a GPU and its host, for offloading
HOST_ADAM = 4e9  # parameters/s that a host updates, over all its ranks (Ren et al. 2021: 10e9 in 2.6 s)
GROUP = 1e9  # parameters that ZeRO-3 updates together
# Seconds that the host is busy for a parameter tensor in a pass: Python, kernel launches, ZeRO's hooks. An
# estimate. A pass of a model of 32 layers with 9 tensors each, far too small to keep a processor busy, took
# 179 ms under ZeRO-2 and 402 ms under ZeRO-3 on a slow core; a core of a GPU host is taken for twice as fast.
HOST_TENSOR = 0.179 / (32 * 9) / 2
HOST_TENSOR_ZERO3 = 0.402 / (32 * 9) / 2
COMPILED_HOST = 0.5  # of that, where torch.compile launches fewer and larger kernels; an estimate


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
    tensors: int  # parameters as the host sees them, one by one
    idle: int = 0  # parameters of the layers that a token does not pass through: experts it is not routed to

    @property
    def active(self) -> int:
        """Return parameters of the layers that a token passes through."""
        return self.body - self.idle


@dataclass(frozen=True)
class Setup:
    """The settings of training that memory and time depend on."""

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
    compiled: bool = False  # by torch.compile, which fuses the element-wise work of a layer
    kernels: bool = False  # Liger's, which fuse the same; launches and memory are counted as without
    masked: bool = False  # SDPA reads who may attend to whom in packed rows from a mask [b, 1, L, L]
    hpz: int = 1  # GPUs that share a second copy of the weights, so that gathers stay among them; 1: none
    reduced: int = 2  # bytes of a gradient on its way between ranks
    all_reduced: bool = True  # ZeRO-2 sends gradients to all ranks, not to their owner alone
    teacher: Sizes | None = None  # a frozen model whose forward pass every batch goes through as well
    copied: bool = True  # the teacher has weights of its own, held as this model's are
    teacher_width: int = 2  # bytes of its weights and activations
    attended: float | None = (
        None  # tokens that a token attends to on average; None: a document fills each row
    )
    written: float = 0.0  # tokens, one after the other, that a pass writes itself, on average over steps

    @property
    def tokens(self) -> int:
        """Return tokens per pass and rank."""
        return self.micro * self.block

    @property
    def width(self) -> int:
        """Return bytes of a weight or activation."""
        return 2 if self.bf16 else 4

    @property
    def context(self) -> float:
        """Return how many tokens a token attends to on average: causal, and within its document."""
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
    update: float  # while the optimizer steps, when the three before are free again

    @property
    def peak(self) -> dict[str, float]:
        """Return the parts that are held at the worst moment: in a pass, or while the optimizer steps."""
        in_pass = self.gathered + self.activations + self.loss
        absent = ["update"] if in_pass >= self.update else ["gathered", "activations", "loss"]
        return {name: size for name, size in self._asdict().items() if name not in absent}

    @property
    def total(self) -> float:
        """Return the bytes in use at the worst moment."""
        return sum(self.peak.values())

    @property
    def surely(self) -> float:
        """Return the bytes that suffice even where all but states takes MEMORY_ERROR more than predicted."""
        states = self.parameters + self.gradients + self.optimizer
        return states + (self.total - states) * (1 + MEMORY_ERROR)


class Time(NamedTuple):
    """Seconds of one optimizer step, by part."""

    matrices: float
    attention: float
    elementwise: float
    head: float
    teacher: float
    writing: float  # of batches by the model itself
    communication: float  # by which the step is longer
    optimizer: float
    host: float  # by which issuing a pass takes longer than computing it

    @property
    def total(self) -> float:
        return sum(self)


def memory(sizes: Sizes, setup: Setup) -> Memory:
    """Return the largest memory that one GPU holds during a step."""
    share = [1 / setup.ranks if setup.stage >= stage else 1.0 for stage in (3, 2, 1)]
    parameters = sizes.parameters * setup.width * share[0]
    gradients = sizes.trainable * 4 * share[1]
    # DeepSpeed's ZeRO keeps float32 weights and two moments, also beside float32 weights.
    shard = sizes.trainable * share[2]
    optimizer = shard * 12
    if setup.stage == 3:  # a group at a time, with a copy of its gradient
        update = min(shard, GROUP) * 4
    else:  # beside float32 weights two copies of the shard's gradient, once the other shards' are freed
        update = 0.0 if setup.bf16 else max(0.0, shard * 8 - gradients)
    head = sizes.vocabulary * sizes.hidden
    trains_head = sizes.trainable == sizes.parameters
    gathered = (4 if trains_head else 2) * setup.bucket * setup.width if setup.ranks > 1 else 0.0
    gathered = min(gathered, 2.0 * sizes.trainable * 4)
    if setup.stage == 3 and (setup.ranks > 1 or setup.offload_parameters):
        gathered += min(sizes.parameters, setup.live + setup.bucket) * setup.width
    if setup.stage == 2 and not setup.bf16 and setup.accumulation > 1:
        gathered += shard * 4  # the gradient of one pass, beside the sum
    if setup.stage == 1 and setup.bf16:
        gathered += sizes.trainable * setup.width
        reducing = sizes.trainable * setup.reduced if setup.reduced < 4 else 0  # also with one rank
        update = sizes.trainable * setup.width + reducing
    if setup.hpz > 1:
        parameters += sizes.parameters * setup.width / setup.hpz
    if setup.offload_optimizer:
        optimizer = gradients = update = 0.0
    if setup.offload_parameters:
        parameters = 0.0
    loss = setup.chunk_mb * 2**20 + 2 * setup.tokens * sizes.hidden * 4
    loss += head * (4 + setup.width) if trains_head else 0.0
    if setup.cost:
        loss += head * setup.width + setup.cache_mb * 2**20
    width, h, f = setup.width, sizes.hidden, sizes.inner
    # A layer's bytes per token: inputs of norms in float32, and every factor of a product.
    norms, attention = 2 * h * (4 + 2 * width), width * (2 * h + 2 * sizes.key_values)
    layer = norms + attention + width * f * (4 if sizes.gated else 2)
    saved = width * h * sizes.layers + layer if setup.checkpointing else layer * sizes.layers
    activations = setup.tokens * (saved + layer / 2)  # half a layer's worth of gradients on their way back
    if setup.masked:  # one of booleans, and what every layer makes of it and keeps for its backward pass
        kept = 1 if setup.checkpointing else sizes.layers
        activations = setup.tokens * setup.block * (1 + width * kept) + activations
    return Memory(
        parameters, gradients, optimizer, gathered, activations, loss, _teacher_bytes(setup), update
    )


def _teacher_bytes(setup: Setup) -> float:
    """Return what a teacher holds on one GPU: its weights, and beside them a layer and its hidden states."""
    teacher, width = setup.teacher, setup.teacher_width
    if teacher is None:
        return 0.0
    layer = setup.tokens * width * (6 * teacher.hidden + 4 * teacher.inner)
    if not setup.copied:
        return layer
    weights = teacher.parameters * width
    if setup.stage < 3:
        return weights + layer
    gathered = min(teacher.parameters, setup.live + setup.bucket) * width if setup.ranks > 1 else 0.0
    return gathered + layer + (0.0 if setup.offload_parameters else weights / setup.ranks)


def step_time(sizes: Sizes, setup: Setup, gpu: Accelerator, network_gb: float = 200.0) -> Time:
    """Return seconds of one optimizer step; `network_gb`: GB/s that a node reaches others with."""
    T, k = setup.tokens, setup.accumulation
    rate = (gpu.tflops if setup.bf16 else gpu.tflops32) * TERA * gpu.efficiency
    bus = gpu.bandwidth_tb * TERA * MEMORY_EFFICIENCY
    passes = 4 if setup.checkpointing else 3
    teacher_s = 0.0
    if setup.teacher is not None:
        alone = dataclasses.replace(setup, teacher=None)
        teacher_s = _forward(
            setup.teacher, alone, gpu, network_gb, setup.teacher_width if setup.copied else 0
        )
    backward_of_weights = sizes.trainable / sizes.parameters  # frozen weights need no gradient of their own
    products = 2 * sizes.active * T * (passes - 1 + backward_of_weights)
    context = setup.block if setup.masked else setup.context  # a mask hides the rest after it was computed
    attention = 4 * T * context * sizes.hidden * sizes.layers * (passes + 0.5)  # q k, the weighted sum of v
    head = 2 * sizes.vocabulary * sizes.hidden * T * (2 + backward_of_weights)
    beginnings = 1 + SHORT / sizes.hidden
    matrices_s = k * products / rate * beginnings
    attention_s = k * attention / (rate * ATTENTION)
    head_s = k * head / rate * beginnings
    # Bytes that a pass moves to bring gradients into a bucket and to add them up in float32.
    adding = 10 / (setup.ranks if setup.stage >= 2 else 1)
    gradient_traffic = sizes.trainable * (adding + (2 * setup.width if setup.stage >= 2 else 0))
    # Bytes that element-wise kernels move per token and layer, forward and backward. LLaMA's RMSNorm and
    # rotary embedding are half a dozen kernels each in transformers; LayerNorm is one.
    h, f, rotated = sizes.hidden, sizes.inner, sizes.hidden + sizes.key_values
    if sizes.gated:
        # Liger: q and k in place 8, gate and up to their product and back 16, two norms 20, residuals 24
        fused = setup.compiled or setup.kernels
        volume = 55 * h + 8 * rotated + 18 * f if fused else 240 * h + 55 * rotated + 26 * f
    else:
        volume = (55 if setup.compiled else 110) * h + 10 * f
    traffic = T * (volume * setup.width / 2) * sizes.layers * passes / 3 + gradient_traffic
    elementwise_s = k * traffic / bus
    computing = matrices_s + attention_s + head_s + elementwise_s + teacher_s
    communication_s = _communication(sizes, setup, gpu.link_gb, network_gb, computing)
    shard = sizes.trainable / setup.ranks
    optimizer_s = 28 * shard / bus
    if setup.stage == 1 and setup.bf16 and setup.ranks > 1:
        optimizer_s += UNSHARDED * sizes.trainable / bus
    if setup.offload_optimizer:  # gradients go down in every pass, weights come up
        optimizer_s = (4 * k + setup.width) * shard / HOST_LINK + shard * min(setup.ranks, NODE) / HOST_ADAM
    if setup.offload_parameters:
        communication_s += k * 2 * sizes.parameters * setup.width / setup.ranks / HOST_LINK
    per_tensor = HOST_TENSOR_ZERO3 if setup.stage == 3 else HOST_TENSOR
    again = 4 / 3 if setup.checkpointing else 1.0
    host = k * (sizes.tensors * per_tensor * again * (COMPILED_HOST if setup.compiled else 1.0))
    device = computing + communication_s
    # The larger of the two takes the time, and where they are alike neither waits for the other all along.
    waiting = (device**4 + host**4) ** 0.25 - device
    writing_s = k * setup.written * _token(sizes, setup, gpu, network_gb)
    parts = (matrices_s, attention_s, elementwise_s, head_s, teacher_s, writing_s, communication_s)
    return Time(*parts, optimizer_s, waiting)


def _forward(sizes: Sizes, setup: Setup, gpu: Accelerator, network_gb: float, gathered: int) -> float:
    """Return seconds that a step's forward passes of a frozen model take.

    gathered: bytes of a weight that ZeRO-3 brings in every pass; 0 where the weights are at hand.
    """
    # A step that trains has three passes, whose element-wise work is alike, and the head's three products.
    frozen = dataclasses.replace(setup, checkpointing=False, ranks=1, offload_optimizer=False)
    whole = step_time(sizes, dataclasses.replace(frozen, offload_parameters=False), gpu, network_gb)
    seconds = (whole.matrices + whole.attention + whole.elementwise + whole.head) / 3
    if setup.stage == 3 and setup.ranks > 1:
        link = gpu.link_gb if setup.ranks <= NODE else min(gpu.link_gb, network_gb)
        moved = setup.accumulation * gathered * sizes.parameters
        seconds = max(seconds, moved / (link * GB * BUS_EFFICIENCY))
    return seconds


def _token(sizes: Sizes, setup: Setup, gpu: Accelerator, network_gb: float) -> float:
    """Return seconds in which a pass writes a token of each of its texts.

    It reads all weights, which ZeRO-3 gathers first, and launches what a forward pass launches.
    """
    bytes_ = setup.width * sizes.parameters
    host = sizes.tensors * (HOST_TENSOR_ZERO3 if setup.stage == 3 else HOST_TENSOR) / 3
    gathered = 0.0
    if setup.stage == 3 and setup.ranks > 1:
        link = gpu.link_gb if setup.ranks <= NODE else min(gpu.link_gb, network_gb)
        gathered = bytes_ / (link * GB * BUS_EFFICIENCY)
    return max(bytes_ / (gpu.bandwidth_tb * TERA * MEMORY_EFFICIENCY), host, gathered)


def _communication(sizes: Sizes, setup: Setup, link: float, network: float, computing: float) -> float:
    """Return seconds by which communication lengthens a step.

    Beside computing it takes time for every byte that it moves through the GPU, which does not depend on how
    slow the network is, until it takes longer than there is computing to hide under.
    """
    n, k, width = setup.ranks, setup.accumulation, setup.width
    if n == 1:
        return 0.0
    gradients, weights = setup.reduced * sizes.trainable, width * sizes.trainable
    inside = link * GB * BUS_EFFICIENCY / ((n - 1) / n)  # as among neighbours
    bus = inside if n <= NODE else inside * min(1.0, network / link)
    beside = after = 0.0  # bytes, beside computing and after it
    local_bytes = 0.0  # of these what stays in a node
    if setup.stage == 3:  # gather for forward, gather for backward, reduce-scatter gradients: every pass
        gathers = 2 * k * width * sizes.parameters
        beside = gathers + k * gradients
        if setup.hpz > 1:  # only the first gather after an update leaves the node
            local_bytes = gathers * (1 - 1 / (2 * k))
    elif setup.stage == 2:  # reduce gradients every pass, gather weights once updated
        beside, after = k * gradients * (2 if setup.all_reduced else n / (n - 1)), weights
    else:  # all-reduce gradients when the last pass is done, gather weights once updated
        after = 2 * gradients + weights
    taken = (beside - local_bytes) / bus + local_bytes / inside
    # The first gather of a pass and its last reduction, of a layer and of embedding and head, stand alone.
    alone = taken * 2 / 3 * (1 / sizes.layers + 1 - sizes.body / sizes.parameters)
    return after / bus + alone + max(EXPOSED * beside / inside, taken - HIDDEN_BY_COMPUTE * computing)


def utilisation(sizes: Sizes, setup: Setup, seconds: float, gpu: Accelerator) -> float:
    """Return the MFU: the share of the peak that goes into what training needs, 6 P + attention a token.

    Recomputed activations do not count (Chowdhery et al. 2022, appendix B), nor do the gradients that frozen
    weights are spared; attention counts causal and within documents.
    """
    needed = 4 + 2 * sizes.trainable / sizes.parameters
    per_token = needed * (sizes.active + sizes.vocabulary * sizes.hidden)
    per_token += 12 * setup.context * sizes.hidden * sizes.layers
    peak = (gpu.tflops if setup.bf16 else gpu.tflops32) * TERA
    return per_token * setup.tokens * setup.accumulation / seconds / peak
