"""Fused output head and loss: hidden states and labels in, summed loss and gradients out.

The logits of all tokens never exist together. Tokens are processed in chunks. The logits of a chunk become
its gradient in place, and two matrix products consume them in the forward pass, so that nothing is computed
twice. Between forward and backward only the gradients [N, H] and [V, H] are kept.

The file follows a token: options (`Spec`), `fused_linear_loss`, `run_chunks` and `LogitReader` (its logits),
`process_chunk` (its loss and the gradient G of its logits), `Accumulator` (gradients of hidden states and
head), `Totals` (the sums).

The sums include a histogram of the objective's weights. EMO's w = m / D has no upper limit: if the model
prefers a token whose cost is near 0, D vanishes and w explodes. Loss and perplexity do not show that, but the
weights do. Histograms can be added over chunks, micro-batches and ranks.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from emo.common.errors import UserError

from .cost import (
    BLOCK,
    CachedRows,
    CostEmbedding,
    CostRows,
    ExactRows,
    Labels,
    LiveCost,
    TokenPlan,
    label_count,
    max_live_rows,
    mm_widened,
    needs_widening,
    open_rows,
    padded_rows,
    padded_width,
    plan_tokens,
    unit_rows,
    write_widened_product,
)
from .objectives import Objective
from .rows import Chunk, Terms, Tokens, TorchRows, solve, statistics_dtype
from .teacher import Teacher, TeacherBatch, TeacherRows, TopK, compare_with_teacher

# Default budget of a chunk's logits in MB. Each chunk reads the head twice, and reads and writes the float32
# sum of its gradient. For n tokens on an H100 that takes at most 394 / n of the time of the three products,
# at any V and H (`tests/bench/kernels_static.py`). For V = 152064 a chunk has 1,765 tokens, and half the size
# would double that cost. For V = 32000 it has 8,192 tokens, and half the size would save 0.25 of 1.5 GB.
CHUNK_MB = 512
CHUNK_MB_CPU = {2: 32, 4: 48, 8: 48}  # on a CPU, by the bytes of a logit
GROUP_BYTES = 2 * 1024 * 1024  # rows that share one round of per-token scalars, on a CPU


@dataclass(frozen=True)
class Spec:
    """All options of the loss that are not tensors of the model."""

    terms: Terms
    cost: CostEmbedding | LiveCost | None
    logit_scale: float = 1.0  # factor on h W^T, before the soft cap
    memory_mb: float | None = None  # budget of a chunk's logits; None: CHUNK_MB or CHUNK_MB_CPU
    kernels: str = "auto"  # auto | torch | triton
    by_token: bool = False  # whether the sums include the losses of every token

    def uses_triton(self, like: Tensor) -> bool:
        """Return whether the element-wise part of the loss of `like` runs in Triton."""
        if self.kernels == "torch" or like.dtype == torch.float64:
            return False
        installed = importlib.util.find_spec("triton") is not None
        if self.kernels == "auto":
            return like.is_cuda and installed
        if not (installed and (like.is_cuda or os.environ.get("TRITON_INTERPRET") == "1")):
            needs = "triton and a GPU (or TRITON_INTERPRET=1, for tests)"
            raise UserError(f"kernels=triton needs {needs}; set kernels=auto", code="no-triton")
        return True


def check_extra_terms(objective: Objective, z_loss: float, label_smoothing: float) -> None:
    """Raise UserError if an objective cannot be combined with z_loss or label_smoothing."""
    if (objective.logit_scale != 1.0 or objective.normalised) and (z_loss or label_smoothing):
        reason = "divides its weights by their mean" if objective.normalised else "changes the logit scale"
        problem = f"objective {objective.name} {reason}; remove z_loss and label_smoothing"
        raise UserError(problem, code="options-clash")


def make_spec(
    objective: Objective,
    cost: CostEmbedding | LiveCost | None,
    *,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    memory_mb: float | None = None,
    kernels: str = "auto",
) -> Spec:
    """Check the options of `fused_linear_loss`, documented there. Raises UserError for one out of range."""
    if cost is not None and not isinstance(cost, CostEmbedding | LiveCost):
        problem = f"cost must be a CostEmbedding (got: {type(cost).__name__})"
        raise UserError(f"{problem}; make one with CostEmbedding.from_weight", code="cost-type")
    for name, value, valid, condition in (
        ("softcap", softcap, softcap is None or softcap > 0, "above 0"),
        ("z_loss", z_loss, z_loss >= 0, "0 or more"),
        ("label_smoothing", label_smoothing, 0 <= label_smoothing < 1, "in [0, 1)"),
        ("memory_mb", memory_mb, memory_mb is None or memory_mb > 0, "above 0"),
        ("kernels", kernels, kernels in ("auto", "torch", "triton"), "auto, torch or triton"),
    ):
        if not valid:
            raise UserError(f"{name} must be {condition} (got: {value})", code="option-range")
    check_extra_terms(objective, z_loss, label_smoothing)
    terms = Terms(objective, softcap, z_loss, label_smoothing)
    return Spec(terms, cost, logit_scale, memory_mb, kernels)


def _check_objective_inputs(spec: Spec, labels: int, stored: Tensor | None, vocab_size: int) -> None:
    """Raise UserError if the costs or `stored` are missing or do not fit the number of labels and logits."""
    objective = spec.terms.objective
    if spec.cost is None and objective.needs_cost:
        raise UserError(f"objective {objective.name} needs a cost embedding", code="needs-cost")
    if isinstance(spec.cost, CostEmbedding) and spec.cost.vocab_size != vocab_size:
        problem = f"the cost embedding has {spec.cost.vocab_size} rows, but there are {vocab_size} logits"
        raise UserError(f"{problem}; use one vocabulary for both", code="cost-vocabulary")
    if stored is None and "stored" in objective.needs:
        problem = f"objective {objective.name} needs a stored log-probability for every token"
        raise UserError(problem, code="needs-stored")
    if stored is not None and stored.numel() != labels:
        raise UserError(f"stored {list(stored.shape)} must match {labels} labels", code="shapes")


def _check_head_inputs(
    hidden: Tensor, weight: Tensor, labels: Labels, spec: Spec, teacher: TeacherBatch | None
) -> None:
    """Raise UserError for shapes or dtypes that do not fit, and for a missing or needless teacher."""
    V = len(weight)
    N = label_count(labels)
    if weight.dim() != 2 or weight.numel() == 0:
        problem = f"fused loss: the head's weight has shape {list(weight.shape)}"
        cure = "under ZeRO-3 call the head itself (fuse_head), or gather it around loss and backward"
        raise UserError(f"{problem}; {cure}", code="sharded-head")
    if hidden.shape != (N, weight.shape[1]):
        shapes = f"hidden {list(hidden.shape)}, labels [{N}] and head {list(weight.shape)}"
        raise UserError(f"fused loss: {shapes} must have shapes [N, H], [N], [V, H]", code="shapes")
    if hidden.dtype != weight.dtype:
        raise UserError(f"fused loss: hidden is {hidden.dtype} but the head is {weight.dtype}", code="dtypes")
    objective = spec.terms.objective
    if bool(objective.divergences) != (teacher is not None):
        problem = "needs a teacher" if objective.divergences else "takes no teacher"
        raise UserError(f"objective {objective.name} {problem}", code="needs-teacher")
    if isinstance(teacher, TopK) and objective.needs_transport:
        problem = "needs all probabilities of its teacher, but only the largest are stored"
        raise UserError(f"objective {objective.name} {problem}; use a live teacher", code="needs-teacher")
    mismatch = None if teacher is None else teacher.find_shape_problem(N, V)
    if mismatch is not None:
        raise UserError(f"teacher: {mismatch}", code="shapes")


def group_size(vocab_size: int, dtype: torch.dtype, device: torch.device, limit: int) -> int:
    """Return how many tokens to process together, at most `limit`. On a CPU they fit into the cache."""
    if device.type != "cpu":
        return min(limit, max_live_rows(vocab_size))
    return min(limit, max(1, GROUP_BYTES // (vocab_size * statistics_dtype(dtype).itemsize)))


# Weights from 2^-20 to 2^20, in steps of a quarter of an octave.
LOWEST = -20
HIGHEST = 20
PER_OCTAVE = 4
BINS = (HIGHEST - LOWEST) * PER_OCTAVE + 1


class LossSums(NamedTuple):
    """Sums over the valid tokens. For means, divide by the tokens, or the weights, of the global batch."""

    loss: Tensor  # scalar float32 (float64 for a float64 model), the only differentiable one
    nll: Tensor  # negative log-likelihood, nats; detached
    demd: Tensor  # earth mover distance; detached, NaN without a cost embedding
    tokens: Tensor  # int64 count
    divergence: Tensor  # from a teacher, without weights; detached, NaN without one
    weights: Tensor  # [BINS + 1] histogram of the objective's weights, float64
    # [2, N] loss and NLL of every label, 0 for ignored ones; [2, 0] unless requested. A third row is the
    # divergence from the model before training (from_base.py).
    by_token: Tensor


class Totals:
    """Sums over the chunks of one call."""

    def __init__(self, spec: Spec, labels: int, like: Tensor) -> None:
        """Start at zero for a call with this number of labels, valid or not; `like`: its input tensor."""
        self.spec = spec
        device = like.device
        self.dtype = statistics_dtype(like.dtype)
        self.sums = torch.zeros(5, dtype=torch.float64, device=device)  # the columns of `add`
        self.tokens = 0
        self.counts: Tensor | int = 0  # what the tokens count as
        self.weights = torch.zeros(BINS + 1, dtype=torch.float64, device=device)
        self.by_token = torch.zeros(2, labels if spec.by_token else 0, dtype=self.dtype, device=device)

    def add(self, tokens: Tokens, positions: Tensor) -> None:
        """Add a chunk, whose tokens have the `positions` [n] in the flat batch."""
        divergence = torch.zeros_like(tokens.nll) if tokens.divergence is None else tokens.divergence
        weight = tokens.weight if tokens.times is None else tokens.weight * tokens.times
        columns = (tokens.loss, tokens.nll, tokens.demd, divergence, weight)
        self.sums += torch.stack(columns).sum(1, dtype=torch.float64)
        self.tokens += len(tokens.loss)
        self.counts += len(weight) if tokens.times is None else tokens.times.sum(dtype=torch.float64)
        self.weights += histogram(tokens.weight, self.spec.terms.objective.weight_cap, tokens.times)
        if self.spec.by_token:
            self.by_token[:, positions] = torch.stack((tokens.loss, tokens.nll))

    def finish(self, training: bool) -> tuple[LossSums, Tensor | None]:
        """Return the sums, and the factor that the gradient lacks: one over the mean weight.

        The factor is None (1) unless the objective is normalised. In training the mean is over the tokens of
        all ranks, which then call together.
        """
        loss = self.sums[0].to(self.dtype)
        nll, demd, divergence = self.sums[1:4].to(self.dtype).unbind()
        factor = self._mean_weight_factor(training) if self.spec.terms.objective.normalised else None
        if factor is not None:
            loss = loss * factor.to(self.dtype)
            self.by_token[0] *= factor.to(self.dtype)
            shift = (factor.log2() * PER_OCTAVE).round().long()  # of the histogram, to a bin
            index = (torch.arange(BINS, device=loss.device) + shift).clamp(0, BINS - 1)
            shifted = torch.zeros_like(self.weights).scatter_add_(0, index, self.weights[:BINS])
            shifted[BINS] = self.weights[BINS]
            self.weights = shifted
        if self.spec.cost is None:
            demd = torch.full_like(nll, torch.nan)
        if not self.spec.terms.objective.divergences:
            divergence = torch.full_like(nll, torch.nan)
        count = torch.full((), self.tokens, dtype=torch.int64, device=loss.device)
        return LossSums(loss, nll, demd, count, divergence, self.weights, self.by_token), factor

    def _mean_weight_factor(self, training: bool) -> Tensor:
        weight = self.sums[4]
        count = self.counts if isinstance(self.counts, Tensor) else torch.full_like(weight, self.counts)
        counts = torch.stack((count, weight))
        if training and dist.is_available() and dist.is_initialized():
            dist.all_reduce(counts)
        tokens, weight = counts.unbind()
        return torch.where(weight > 0, tokens / weight, 1.0)


def histogram(weight: Tensor, cap: float | None, count: Tensor | None = None) -> Tensor:
    """Return counts [BINS + 1] of the sizes of weights [n], float64. The last entry counts those at the cap.

    `count` [n] is what each of them counts as, by default 1.
    NaN counts as the largest weight. The step will be skipped, and the histogram then shows the reason.
    """
    counts = torch.zeros(BINS + 1, dtype=torch.float64, device=weight.device)
    size = weight.detach().double().abs().nan_to_num(nan=2.0**HIGHEST)
    size = size.clamp(min=2.0**LOWEST, max=2.0**HIGHEST)
    index = ((size.log2() - LOWEST) * PER_OCTAVE).round().long()
    count = torch.ones_like(size) if count is None else count.double()
    counts.scatter_add_(0, index, count)
    if cap is not None:
        counts[BINS] = (count * (weight >= cap)).sum()
    return counts


def quantile(counts: Sequence[float], share: float) -> float:
    """Return the weight that a `share` above 0 of all tokens does not exceed, to a quarter of an octave.

    It is NaN without tokens, and 0 in the lowest bin.
    """
    cumulative = np.cumsum(counts[:BINS])
    if not cumulative[-1]:
        return float("nan")
    index = int(np.searchsorted(cumulative, share * cumulative[-1]))
    return float(2.0 ** (LOWEST + index / PER_OCTAVE)) if index else 0.0


def summarize_weights(counts: Sequence[float]) -> dict[str, float]:
    """Return median, 99th percentile and largest weight, and the share of tokens at the cap.

    The result is empty if all weights are 1.
    """
    total = sum(counts[:BINS])
    if counts[-LOWEST * PER_OCTAVE] == total:
        return {}
    shares = {"weight_p50": 0.5, "weight_p99": 0.99, "weight_max": 1.0}
    result = {name: quantile(counts, share) for name, share in shares.items()}
    return result | ({"weight_capped": counts[BINS] / total} if counts[BINS] else {})


def fused_linear_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Labels,
    objective: Objective,
    cost: CostEmbedding | LiveCost | None = None,
    *,
    bias: Tensor | None = None,
    teacher: TeacherBatch | None = None,
    stored: Tensor | None = None,
    weights: Tensor | None = None,
    **options: Any,
) -> LossSums:
    """Return the loss of hidden states against labels through a linear head, as sums over the valid tokens.

        z = cap(scale h W^T + b),    loss = sum_t L(softmax(z_t), y_t)

    with an objective L. The loss is differentiable in `hidden`, `weight` and `bias`, once. The logits [N, V]
    are never built. With a cost embedding the DEMD is reported for every objective.

    Args:
        hidden: [..., H], float64, float32, bfloat16 or float16.
        weight: [V, H], of the same dtype.
        labels: [...], int64: labels[i] is the token that hidden[i] predicts (no shift); -100 leaves a token
            out. A plan made in advance (`plan_tokens`) avoids waiting for the device.
        objective: From `get_objective` or `weighted_sum`.
        cost: Transport costs of V tokens, for objectives that read D; `LIVE` takes those of `weight`.
        bias: [V], added to the logits.
        teacher: For divergences, at the same positions: hidden states and a head (Teacher), or stored
            log-probabilities (TopK), which work without transport costs only.
        stored: [...], a log-probability of every label in nats, for `psft` and `excess`.
        weights: [...], the weight of every label, 0 or more. A token of weight w counts as w tokens in all
            sums except `tokens`. For means, divide by the sum of the weights.

    Options:
        softcap: logits become cap * tanh(logits / cap).
        logit_scale: factor on h W^T, before the soft cap.
        z_loss: weight of (log sum exp z)^2 per token.
        label_smoothing: share e; the loss becomes (1 - e) L + e mean_i(-log p_i), for every objective.
        kernels: auto (Triton on a GPU that has it, else PyTorch), torch or triton.
        memory_mb: budget of a chunk's logits; by default 32 or 48 on a CPU, 512 elsewhere.

    Returns:
        LossSums, summed in float64.

    Raises:
        UserError: shapes, dtypes or options do not fit, or an input of the objective is missing.
    """
    spec = make_spec(objective.require_fixed(), cost, **options)
    return apply_fused(hidden, weight, bias, labels, spec, teacher, stored, weights)


@torch.compiler.disable
def apply_fused(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Labels,
    spec: Spec,
    teacher: TeacherBatch | None,
    stored: Tensor | None,
    weights: Tensor | None = None,
) -> LossSums:
    """Return the loss with checked options; arguments as in `fused_linear_loss`, on any device.

    Under autocast the inputs are cast first.
    """
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden = hidden.to(dtype)
        weight = weight.to(dtype)
    hidden = hidden.reshape(-1, hidden.shape[-1])
    stored, weights = (None if x is None else x.reshape(-1) for x in (stored, weights))
    if weights is not None and len(weights) != label_count(labels):
        raise UserError(
            f"weights {list(weights.shape)} must match {label_count(labels)} labels", code="shapes"
        )
    _check_head_inputs(hidden, weight, labels, spec, teacher)
    _check_objective_inputs(spec, label_count(labels), stored, len(weight))
    recording = torch.is_grad_enabled()
    needs = tuple(recording and x is not None and x.requires_grad for x in (hidden, weight, bias))
    with torch.autocast(hidden.device.type, enabled=False):  # autocast would round the costs' products
        inputs = (hidden, weight, bias, labels, spec, needs, teacher, stored, weights)
        return LossSums(*_FusedLoss.apply(*inputs))


@torch.compiler.disable
def logits_loss(
    logits: Tensor,
    labels: Tensor,
    objective: Objective,
    cost: CostEmbedding | LiveCost | None = None,
    *,
    stored: Tensor | None = None,
    **options: Any,
) -> LossSums:
    """Return the loss of `logits` [..., V] against `labels` [...], for code without hidden states.

    The other arguments and the result are those of `fused_linear_loss`, without soft cap and scale, which the
    logits include already. The gradient, computed in forward, is the only other tensor of the logits' size.
    Raises UserError for shapes or options that do not fit, and for a teacher or `LIVE`, which need the fused
    head.
    """
    for name in ("softcap", "logit_scale"):
        if name in options:
            raise UserError(f"the logits include {name} already; remove it", code="options-clash")
    spec = make_spec(objective.require_fixed(), cost, **options)
    V = logits.shape[-1]
    if logits.shape[:-1] != labels.shape:
        shapes = f"logits {list(logits.shape)} and labels {list(labels.shape)}"
        raise UserError(f"{shapes} must have shapes [..., V] and [...]", code="shapes")
    if isinstance(cost, LiveCost) or objective.divergences:
        raise UserError("the live head and a teacher need the fused head (fuse_head)", code="needs-head")
    _check_objective_inputs(spec, labels.numel(), stored, V)
    needs = (torch.is_grad_enabled() and logits.requires_grad, False, False)
    flat = logits.reshape(-1, V)
    stored = None if stored is None else stored.reshape(-1)
    with torch.autocast(logits.device.type, enabled=False):  # autocast would round the costs' products
        return LossSums(
            *_FusedLoss.apply(flat, None, None, labels.reshape(-1), spec, needs, None, stored, None)
        )


GradientFlags = tuple[
    bool, bool, bool
]  # gradients that autograd needs: hidden states or logits, weight, bias


class _FusedLoss(torch.autograd.Function):
    """The loss. Its gradients are computed in forward and returned, scaled, in backward, once."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        labels: Labels,
        spec: Spec,
        needs: GradientFlags,
        teacher: TeacherBatch | None,
        stored: Tensor | None,
        weights: Tensor | None,
    ) -> tuple[Tensor, ...]:
        gradients = Accumulator(x, weight, needs)
        totals = Totals(spec, label_count(labels), x)
        options = (any(needs), teacher, stored, weights)
        for positions, G, tokens in run_chunks(x, weight, bias, labels, spec, *options):
            totals.add(tokens, positions)
            if any(needs):
                gradients.add(G, tokens.row, positions, spec.logit_scale)
        sums, ctx.factor = totals.finish(training=any(needs))
        ctx.gradients = gradients.finish()
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in (x, weight, bias)]
        ctx.mark_non_differentiable(*sums[1:])
        return tuple(sums)

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError("the fused loss was differentiated twice; run its forward pass again")
        gradients = ctx.gradients
        ctx.gradients = None  # autograd needs them no more, so they are freed early
        factor = d_loss if ctx.factor is None else d_loss * ctx.factor
        scaled = (materialize_grad(*pair, factor) for pair in zip(gradients, ctx.dtypes, strict=True))
        return (*scaled, None, None, None, None, None, None)


def run_chunks(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    labels: Labels,
    spec: Spec,
    gradient: bool,
    teacher: TeacherBatch | None = None,
    stored: Tensor | None = None,
    weights: Tensor | None = None,
) -> Iterator[tuple[Tensor, Tensor, Tokens]]:
    """Yield positions [n] in the flat batch, gradient rows G [n, V] and results of each chunk of tokens.

    x is hidden states [N, H], or logits [N, V] if `weight` [V, H] is None. bias is [V], stored and weights
    are [N]. Without `gradient` the rows have no meaning. The next chunk overwrites them in any case.
    """
    plan = labels if isinstance(labels, TokenPlan) else plan_tokens(labels, pin=x.device.type == "cuda")
    plan.check(x.shape[1] if weight is None else len(weight))
    if len(plan):
        batch = _BatchChunks(x, weight, bias, plan, spec, gradient, teacher, stored, weights)
        for start in range(0, len(plan), batch.size):
            yield batch.process(start)


class _BatchChunks:
    """Everything that the chunks of a batch share. `process` computes one of them.

    The constructor takes the arguments of `run_chunks`, with the labels as a plan.
    """

    def __init__(
        self,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        plan: TokenPlan,
        spec: Spec,
        gradient: bool,
        teacher: TeacherBatch | None,
        stored: Tensor | None,
        weights: Tensor | None,
    ) -> None:
        self.weights = None if weights is None else weights.to(x.device, statistics_dtype(x.dtype))
        self.terms = spec.terms
        self.gradient = gradient
        self.teacher = teacher
        self.stored = stored
        self.triton = spec.uses_triton(x)
        self.on_device = plan.to_device(x.device)
        self.cost = _prepare_cost(spec.cost, weight, x)
        objective = spec.terms.objective
        beyond_teacher = objective.uses_target or spec.terms.label_smoothing or spec.terms.z_loss
        self.with_targets = teacher is None or bool(beyond_teacher) or spec.cost is not None
        # Divergences read the logits after another part of the loss has begun to write the gradient.
        overwritten = self.with_targets or (self.triton and len(objective.divergences) > 1)
        self.copies = teacher is not None and overwritten
        V = x.shape[1] if weight is None else len(weight)
        self.size = min(_chunk_size(spec, x, V, self.copies, isinstance(teacher, Teacher)), len(plan))
        self.rows: ExactRows | CachedRows | None = None
        if self.cost is not None and self.with_targets:
            group = group_size(V, x.dtype, x.device, self.size)
            dtype = None if self.triton else statistics_dtype(x.dtype)
            self.rows = open_rows(self.cost, plan, self.on_device, dtype, group, self.size)
        self.reader = LogitReader(x, weight, bias, spec.logit_scale, self.size)

    def process(self, start: int) -> tuple[Tensor, Tensor, Tokens]:
        """Return what `run_chunks` yields for the chunk that begins with token `start` of the plan."""
        part = slice(start, min(start + self.size, len(self.on_device.positions)))
        positions = self.on_device.positions[part]
        z, chunk = self.reader.read(start, positions, self.on_device.labels[part], self.stored)
        if self.teacher is None:
            tokens = process_chunk(z, chunk, self.rows, self.terms, self.gradient, self.triton)
        else:
            tokens = self._add_teacher(self.teacher, positions, z, chunk)
        if self.weights is not None:
            tokens = tokens.repeated(self.weights[positions])
        return positions, z, tokens

    def _add_teacher(self, teacher: TeacherBatch, positions: Tensor, z: Tensor, chunk: Chunk) -> Tokens:
        """Process a chunk of logits z [n, V] whose loss includes divergences from a teacher."""
        options = (self.terms, self.gradient, self.triton)
        n, V = z.shape
        logits = padded_rows(n, V, z.dtype, z.device).copy_(z) if self.copies else z
        tokens_of_targets = None
        if self.with_targets:
            tokens_of_targets = process_chunk(z, chunk, self.rows, *options, in_full=True)
        side = teacher.at_positions(positions, V, statistics_dtype(z.dtype))
        return add_divergences(z, logits, chunk, side, self.cost, *options, tokens_of_targets)


def _chunk_size(spec: Spec, x: Tensor, V: int, copies: bool, live_teacher: bool) -> int:
    """Return the tokens of a chunk whose logits, copies and teacher's logits fit into the budget."""
    dtype = x.dtype
    matrices = 1.0 + copies  # of the logits' size
    if live_teacher:
        matrices += statistics_dtype(dtype).itemsize / dtype.itemsize
    return max(16, int(chunk_bytes(spec, x) / (V * dtype.itemsize * matrices)))


def chunk_bytes(spec: Spec, x: Tensor) -> float:
    """Return the budget of the logits of a chunk of hidden states like `x`."""
    default = CHUNK_MB_CPU[x.dtype.itemsize] if x.device.type == "cpu" else CHUNK_MB
    return (spec.memory_mb or default) * 2**20


def _prepare_cost(
    cost: CostEmbedding | LiveCost | None, weight: Tensor | None, x: Tensor
) -> CostEmbedding | None:
    if isinstance(cost, LiveCost):
        if weight is None:
            return None
        cost = CostEmbedding(unit_rows(weight.detach(), checked=False))
    return None if cost is None else cost.prepared_for(x.device, x.dtype)


class LogitReader:
    """Computes the logits of one chunk at a time.

    In half precision the product h W^T is rounded to 8 bits, which is coarse for a logit of 30 and fine near
    0. The target's logit, computed in float32, is therefore subtracted inside the product, before the
    rounding. Logits that compete with the target keep their digits.
    """

    def __init__(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, logit_scale: float, size: int
    ) -> None:
        """Take x and weight as in `run_chunks`; `size` is the number of tokens per chunk."""
        self.x = x
        self.weight = weight
        self.logit_scale = logit_scale
        self.dtype = statistics_dtype(x.dtype)
        self.bias = None if bias is None else bias.to(self.dtype)
        self.buffer = None if weight is None else padded_rows(size, len(weight), x.dtype, x.device)

    def read(self, start: int, positions: Tensor, y: Tensor, stored: Tensor | None) -> tuple[Tensor, Chunk]:
        """Return the logits [n, V] of the tokens at `positions` [n] with labels y [n], and their chunk.

        `start` is the index of the first token in the plan. The next call overwrites the logits.
        """
        z = self.x[positions]
        offset = None
        if self.weight is None or self.buffer is None:
            target = z.gather(1, y[:, None])[:, 0].to(self.dtype)
        else:
            h = z if self.logit_scale == 1.0 else z.mul_(self.logit_scale)
            z = self.buffer[: len(h)]
            if h.dtype == self.dtype:
                torch.mm(h, self.weight.t(), out=z)
                target = z.gather(1, y[:, None])[:, 0]
            else:
                target = torch.linalg.vecdot(h.to(self.dtype), self.weight[y].to(self.dtype))
                shift = target.to(h.dtype)
                offset = shift.to(self.dtype)
                if needs_widening(h):
                    write_widened_product(h, self.weight, z, shift)
                else:
                    z.copy_((-shift)[:, None].expand_as(z))
                    z.addmm_(h, self.weight.t())
        if self.bias is not None:
            target = target + self.bias[y]
        column = None if stored is None else stored[positions].to(self.dtype)
        offset = torch.zeros_like(target) if offset is None else offset
        return z, Chunk(start, y, target, offset, self.bias, column)


class _Scratch(NamedTuple):
    """Memory that the groups of a chunk share in PyTorch."""

    wide: Tensor | None  # [k, V] logits in the statistics' dtype
    p_log_p: Tensor | None  # [k, V] for objectives that read the entropy

    @classmethod
    def allocate(cls, k: int, logits: Tensor, terms: Terms) -> _Scratch:
        dtype = statistics_dtype(logits.dtype)

        def rows(needed: bool) -> Tensor | None:
            return torch.empty(k, logits.shape[1], dtype=dtype, device=logits.device) if needed else None

        return cls(rows(logits.dtype != dtype), rows("H" in terms.objective.needs))

    def open_group(self, logits: Tensor, chunk: Chunk, costs: CostRows | None, terms: Terms) -> TorchRows:
        wide = logits if self.wide is None else self.wide[: len(logits)]
        p_log_p = None if self.p_log_p is None else self.p_log_p[: len(logits)]
        return TorchRows(wide, logits, chunk, costs, terms, p_log_p)


def process_chunk(
    logits: Tensor,
    chunk: Chunk,
    costs: ExactRows | CachedRows | None,
    terms: Terms,
    gradient: bool,
    triton: bool,
    in_full: bool = False,
) -> Tokens:
    """Return the losses of a chunk of logits [n, V]. With `gradient`, overwrite these by G (`rows.py`).

    `costs` reads the cost rows. `in_full` asks for G without separate row factors.
    """
    n, V = logits.shape
    # kernels have no temporaries, so only the number of cost rows limits their groups
    step = n if triton else group_size(V, logits.dtype, logits.device, n)
    scratch = None if triton else _Scratch.allocate(step, logits, terms)
    in_full = in_full or terms.softcap is not None or logits.dtype == torch.float16
    parts = []
    solver = solve
    stop = 0
    while stop < n:
        start = stop
        stop = min(stop + step, n)
        rows = None
        if costs is not None:
            stop = costs.group_end(chunk.start + start, chunk.start + stop) - chunk.start
            rows = costs.read_group(chunk.start + start, chunk.start + stop)
        block = logits[start:stop]
        part = chunk.rows(start, stop)
        if scratch is None:
            from .kernels.objectives import TritonRows, compiled_solve

            group: TorchRows | TritonRows = TritonRows(block, part, rows, terms)
            solver = compiled_solve if logits.is_cuda else solve
        else:
            group = scratch.open_group(block, part, rows, terms)
        tokens, update = solver(terms, group.statistics(), part.stored, V, in_full)
        if gradient:
            group.write(update)
        parts.append(tokens[:5])  # without parts that are None
    return Tokens(*(torch.cat(column) for column in zip(*parts, strict=True)))


def add_divergences(
    G: Tensor,
    logits: Tensor,
    chunk: Chunk,
    teacher: TeacherRows | TopK,
    cost: CostEmbedding | None,
    terms: Terms,
    gradient: bool,
    triton: bool,
    tokens: Tokens | None,
) -> Tokens:
    """Return the results of a chunk with its divergences from a teacher, whose gradient is added to G.

    G [n, V] is the gradient of the other parts of the loss and `tokens` are their results. Without other
    parts `tokens` is None, and G may be `logits` [n, V] itself. Logits and teacher are overwritten.
    """
    (n, V) = logits.shape
    parts = []
    # kernels have no temporaries, except for (C p) of eq. 15
    unlimited = triton and not terms.objective.needs_transport
    step = n if unlimited else group_size(V, logits.dtype, logits.device, n)
    for start in range(0, n, step):
        part = slice(start, min(start + step, n))
        arguments = (
            logits[part],
            chunk.rows(part.start, part.stop),
            teacher.group(part),
            cost,
            terms,
            gradient,
        )
        if triton:
            from .kernels.teacher import write_divergences

            parts.append(write_divergences(G[part], *arguments, tokens is not None))
        else:
            result = compare_with_teacher(*arguments)
            if result.gradient is not None:
                G[part].copy_(result.gradient) if tokens is None else G[part].add_(result.gradient)
            parts.append(result[:-1])
    loss, divergence, nll = (torch.cat(column) for column in zip(*parts, strict=True))
    if tokens is not None:
        return tokens._replace(loss=tokens.loss + loss, divergence=divergence)
    ones = torch.ones_like(loss)
    return Tokens(loss, nll, torch.zeros_like(nll), row=ones, weight=ones, divergence=divergence)


BLOCKS = 8  # of the head's gradient on an accelerator
Blocks = list[Tensor]  # consecutive rows of a gradient


class Accumulator:
    """Gradients of the loss sum over chunks, in float32 (float64) for head and bias.

        d_hidden = (G W) r s        d_weight = G^T (h r s)        d_bias = G^T r

    with the row factors r [n] and the logit scale s. In half precision the head's sum is kept in blocks of
    rows. Each is freed when it is rounded, so that the full sum and its rounded copy never exist together.
    """

    def __init__(self, x: Tensor, weight: Tensor | None, needs: GradientFlags) -> None:
        """Take x and weight as in `run_chunks`."""
        self.x = x
        self.weight = weight
        V = x.shape[1] if weight is None else len(weight)
        stats = statistics_dtype(x.dtype)
        self.d_x = torch.zeros_like(x) if needs[0] else None
        self.d_bias = torch.zeros(V, dtype=stats, device=x.device) if needs[2] else None
        self.block_rows = V
        if x.dtype != stats:
            self.block_rows = padded_width(-(-V // BLOCKS)) if x.is_cuda else BLOCK
        self.blocks: Blocks | None = [] if needs[1] else None

    def add(self, G: Tensor, row: Tensor, positions: Tensor, scale: float) -> None:
        """Add a chunk: G [n, V] in the model's dtype, row factors [n], positions [n], the logit scale."""
        factor = (row * scale)[:, None]
        if self.d_x is not None and self.weight is None:
            self.d_x[positions] = G.mul_(row[:, None].to(G.dtype))
        elif self.d_x is not None and self.weight is not None:
            product = mm_widened(G, self.weight) if needs_widening(G) else torch.mm(G, self.weight)
            self.d_x[positions] = (product * factor).to(G.dtype)
        if self.d_bias is not None:
            for start in range(0, len(self.d_bias), BLOCK):
                block = slice(start, start + BLOCK)
                self.d_bias[block] += torch.mv(G[:, block].t().to(row.dtype), row)
        if self.blocks is not None:
            self._add_to_blocks(self.blocks, G, (self.x[positions] * factor).to(G.dtype))

    def _add_to_blocks(self, blocks: Blocks, G: Tensor, scaled: Tensor) -> None:
        """Add G^T (h r s), for `scaled` h r s [n, H]."""
        stats = statistics_dtype(G.dtype)
        widened = needs_widening(G)
        mixed = G.is_cuda and G.dtype != stats  # only CUDA multiplies half precision into a float32 sum
        scaled = scaled.to(stats) if widened else scaled
        is_first = not blocks
        for index, start in enumerate(range(0, G.shape[1], self.block_rows)):
            part = G[:, start : start + self.block_rows].t()
            part = part.to(stats) if widened else part
            if is_first:
                product = torch.mm(part, scaled, out_dtype=stats) if mixed else torch.mm(part, scaled)
                blocks.append(product.to(stats))
            elif part.dtype == stats:
                blocks[index].addmm_(part, scaled)
            elif mixed:
                torch.addmm(blocks[index], part, scaled, out_dtype=stats, out=blocks[index])
            else:
                blocks[index] += torch.mm(part, scaled)

    def finish(self) -> tuple[Blocks | None, Blocks | None, Blocks | None]:
        """Return the gradients of the loss sum in x, weight and bias, all zero if there was no chunk."""
        if self.blocks == [] and self.weight is not None:
            self.blocks.append(torch.zeros_like(self.weight, dtype=statistics_dtype(self.weight.dtype)))
        d_x, d_bias = ([x] if x is not None else None for x in (self.d_x, self.d_bias))
        return d_x, self.blocks, d_bias


def materialize_grad(blocks: Blocks | None, dtype: torch.dtype | None, factor: Tensor) -> Tensor | None:
    """Return the gradient in `blocks` times the scalar `factor`, in `dtype`, and empty the list."""
    if blocks is None or dtype is None:
        return None
    if len(blocks) == 1 and blocks[0].dtype == dtype:
        return blocks.pop().mul_(factor)
    rows = sum(len(block) for block in blocks)
    out = blocks[0].new_empty((rows, *blocks[0].shape[1:]), dtype=dtype)
    blocks.reverse()
    start = 0
    while blocks:
        block = blocks.pop()
        for first in range(0, len(block), BLOCK):  # no second float32 copy of a large block
            part = block[first : first + BLOCK]
            out[start + first : start + first + len(part)] = part.mul_(factor)
        start += len(block)
    return out
