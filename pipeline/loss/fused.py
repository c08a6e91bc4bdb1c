"""Output head and loss in one: hidden states and labels in, summed loss and gradients out.

The logits of all tokens never exist together. Tokens are taken in chunks; each chunk's logits become the
chunk's gradient in place and are used up by two matrix products at once, in the forward pass, so that nothing
is computed twice. Between forward and backward only the gradients [N, H] and [V, H] are held.

The file follows a token: its options (`Spec`), `fused_linear_loss`, `run_chunks` (its logits),
`process_chunk` (its loss and the gradient G of its logits), `Accumulator` (the gradients of hidden state and
head), `Totals` (the sums).

The sums come with a histogram of the objective's weights. EMO's w = m / D has no bound: where the
model favours a token that costs next to nothing from the target, D vanishes and w explodes. Neither loss nor
perplexity shows that; the weights do. Histograms add up over chunks, micro-batches and ranks.
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
    ExactRows,
    Labels,
    LiveCost,
    TokenPlan,
    against_rows,
    label_count,
    open_rows,
    padded_rows,
    padded_width,
    plan_tokens,
    rows_alive,
    unit_rows,
    widens,
    with_rows,
)
from .objectives import Objective
from .rows import Chunk, Terms, Tokens, TorchRows, solve, statistics_dtype
from .teacher import Side, Teacher, TeacherRows, TopK, compare

# MB of logits alive at a time, unless asked otherwise. Each chunk reads the head twice, and reads and writes
# the float32 sum of its gradient: at most 394 / n of the time of the three products for n tokens on an H100,
# at any V and H (`tests/bench/kernels_static.py`). For V = 152064 these are 1,765 tokens, of which half would
# cost as much again; for V = 32000 one chunk takes 8,192, and half of it would save 0.25 of 1.5 GB.
CHUNK_MB = 512
CHUNK_MB_CPU = {2: 32, 4: 48, 8: 48}  # on a CPU, by the bytes of a logit
GROUP_BYTES = 2 * 1024 * 1024  # rows that share one round of per-token scalars, on a CPU


@dataclass(frozen=True)
class Spec:
    """Everything about the loss that is not a tensor of the model."""

    terms: Terms
    cost: CostEmbedding | LiveCost | None
    logit_scale: float = 1.0  # factor on h W^T, before the soft cap
    memory_mb: float | None = None  # budget of a chunk's logits; None: CHUNK_MB or CHUNK_MB_CPU
    kernels: str = "auto"  # auto | torch | triton
    by_token: bool = False  # whether the sums come with the losses of every token

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
    """Return the options of `fused_linear_loss` in a Spec. Raises UserError naming the one out of range."""
    if cost is not None and not isinstance(cost, CostEmbedding | LiveCost):
        given = f"costs come as a CostEmbedding (given: {type(cost).__name__})"
        raise UserError(f"{given}; CostEmbedding.from_weight makes one of a tensor", code="cost-type")
    for name, value, valid, wanted in (
        ("softcap", softcap, softcap is None or softcap > 0, "above 0"),
        ("z_loss", z_loss, z_loss >= 0, "0 or more"),
        ("label_smoothing", label_smoothing, 0 <= label_smoothing < 1, "in [0, 1)"),
        ("memory_mb", memory_mb, memory_mb is None or memory_mb > 0, "above 0"),
        ("kernels", kernels, kernels in ("auto", "torch", "triton"), "auto, torch or triton"),
    ):
        if not valid:
            raise UserError(f"{name} must be {wanted} (given: {value})", code="option-range")
    if (objective.logit_scale != 1.0 or objective.normalised) and (z_loss or label_smoothing):
        reason = "divides its weights by their mean" if objective.normalised else "changes the logits' scale"
        raise UserError(
            f"objective {objective.name} {reason}; leave z_loss and label_smoothing out", code="options-clash"
        )
    terms = Terms(objective, softcap, z_loss, label_smoothing)
    return Spec(terms, cost, logit_scale, memory_mb, kernels)


def check_inputs(spec: Spec, labels: int, stored: Tensor | None, vocab_size: int) -> None:
    """Raise UserError where the objective lacks an input or gets one that does not fit `labels` labels."""
    objective = spec.terms.objective
    if spec.cost is None and objective.needs_cost:
        raise UserError(f"objective {objective.name} needs a cost embedding", code="needs-cost")
    if isinstance(spec.cost, CostEmbedding) and spec.cost.vocab_size != vocab_size:
        problem = f"the cost embedding has {spec.cost.vocab_size} rows but the logits {vocab_size} columns"
        raise UserError(f"{problem}; they must share one vocabulary", code="cost-vocabulary")
    if stored is None and "stored" in objective.needs:
        problem = f"objective {objective.name} needs a stored log-probability for every token"
        raise UserError(problem, code="needs-stored")
    if stored is not None and stored.numel() != labels:
        raise UserError(f"stored {list(stored.shape)} and {labels} labels do not fit", code="shapes")


def group_size(vocab_size: int, dtype: torch.dtype, device: torch.device, most: int) -> int:
    """Return the tokens handled together, at most `most`: on a CPU as many as stay in the cache."""
    if device.type != "cpu":
        return min(most, rows_alive(vocab_size))
    return min(most, max(1, GROUP_BYTES // (vocab_size * statistics_dtype(dtype).itemsize)))


LOWEST, HIGHEST, PER_OCTAVE = -20, 20, 4  # weights from 2^-20 to 2^20, in steps of a quarter of an octave
BINS = (HIGHEST - LOWEST) * PER_OCTAVE + 1


class LossSums(NamedTuple):
    """Sums over the valid tokens; divide by the global batch's token count for means."""

    loss: Tensor  # scalar float32 (float64 for a float64 model), the only differentiable one
    nll: Tensor  # negative log-likelihood, nats; detached
    demd: Tensor  # earth mover distance; detached, NaN without a cost embedding
    tokens: Tensor  # int64 count
    divergence: Tensor  # from a teacher, without weights; detached, NaN without one
    weights: Tensor  # [BINS + 1] histogram of the objective's weights, float64
    by_token: Tensor  # [2, N] loss and NLL of every label, 0 where it is ignored; [2, 0] unless asked for


class Totals:
    """Sums over the chunks of one call."""

    def __init__(self, spec: Spec, labels: int, like: Tensor) -> None:
        """Start at zero. labels: how many the call has, valid or not; like: hidden states or logits."""
        self.spec, device = spec, like.device
        self.dtype = statistics_dtype(like.dtype)
        self.sums = torch.zeros(5, dtype=torch.float64, device=device)  # the columns of `add`
        self.tokens = 0
        self.weights = torch.zeros(BINS + 1, dtype=torch.float64, device=device)
        self.by_token = torch.zeros(2, labels if spec.by_token else 0, dtype=self.dtype, device=device)

    def add(self, tokens: Tokens, positions: Tensor) -> None:
        """Add a chunk, whose tokens stand at these positions [n] of the flat batch."""
        gap = torch.zeros_like(tokens.nll) if tokens.divergence is None else tokens.divergence
        columns = (tokens.loss, tokens.nll, tokens.demd, gap, tokens.weight)
        self.sums += torch.stack(columns).sum(1, dtype=torch.float64)
        self.tokens += len(tokens.loss)
        self.weights += histogram(tokens.weight, self.spec.terms.objective.cap)
        if self.spec.by_token:
            self.by_token[:, positions] = torch.stack((tokens.loss, tokens.nll))

    def finish(self, training: bool) -> tuple[LossSums, Tensor | None]:
        """Return the sums, and the factor of the loss that its gradient lacks: one over the mean weight.

        The factor is None (1) unless the objective is normalised. While `training` the mean is over the
        tokens of all ranks, which then call together.
        """
        factor = None
        weight = self.sums[4]
        if self.spec.terms.objective.normalised:
            counts = torch.stack((torch.full_like(weight, self.tokens), weight))
            if training and dist.is_available() and dist.is_initialized():
                dist.all_reduce(counts)
            tokens, weight = counts.unbind()
            factor = torch.where(weight > 0, tokens / weight, 1.0)
        loss = self.sums[0].to(self.dtype)
        nll, demd, gap = self.sums[1:4].to(self.dtype).unbind()
        if factor is not None:
            loss = loss * factor.to(self.dtype)
            self.by_token[0] *= factor.to(self.dtype)
            shift = (factor.log2() * PER_OCTAVE).round().long()  # of the histogram, to a bin
            index = (torch.arange(BINS, device=loss.device) + shift).clamp(0, BINS - 1)
            shifted = torch.zeros_like(self.weights).scatter_add_(0, index, self.weights[:BINS])
            shifted[BINS], self.weights = self.weights[BINS], shifted
        if self.spec.cost is None:
            demd = torch.full_like(nll, torch.nan)
        if not self.spec.terms.objective.against:
            gap = torch.full_like(nll, torch.nan)
        count = torch.full((), self.tokens, dtype=torch.int64, device=loss.device)
        return LossSums(loss, nll, demd, count, gap, self.weights, self.by_token), factor


def histogram(weight: Tensor, cap: float | None) -> Tensor:
    """Return counts [BINS + 1] of the sizes of weights [n], float64; the last counts those at the cap.

    NaN counts as the largest: the step is going to be skipped, and the histogram then shows the reason.
    """
    counts = torch.zeros(BINS + 1, dtype=torch.float64, device=weight.device)
    size = weight.detach().double().abs().nan_to_num(nan=2.0**HIGHEST)
    size = size.clamp(min=2.0**LOWEST, max=2.0**HIGHEST)
    index = ((size.log2() - LOWEST) * PER_OCTAVE).round().long()
    counts.scatter_add_(0, index, torch.ones_like(size))
    if cap is not None:
        counts[BINS] = (weight >= cap).sum()
    return counts


def quantile(counts: Sequence[float], share: float) -> float:
    """Return the weight that a `share` above 0 of all tokens does not exceed, to a quarter of an octave.

    NaN without tokens; 0 in the lowest bin.
    """
    passed = np.cumsum(counts[:BINS])
    if not passed[-1]:
        return float("nan")
    index = int(np.searchsorted(passed, share * passed[-1]))
    return float(2.0 ** (LOWEST + index / PER_OCTAVE)) if index else 0.0


def summary(counts: Sequence[float]) -> dict[str, float]:
    """Return median, 99th percentile and largest weight, and the share of tokens at the cap.

    Empty where all weights are 1.
    """
    total = sum(counts[:BINS])
    if counts[-LOWEST * PER_OCTAVE] == total:
        return {}
    shares = {"weight_p50": 0.5, "weight_p99": 0.99, "weight_max": 1.0}
    result = {name: quantile(counts, share) for name, share in shares.items()}
    return result | ({"weight_capped": counts[BINS] / total} if counts[BINS] else {})


BLOCKS = 8  # of the head's gradient on an accelerator
Blocks = list[Tensor]  # consecutive rows of a gradient
Needs = tuple[bool, bool, bool]  # which gradients autograd asks for: hidden states or logits, weight, bias


def fused_linear_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Labels,
    objective: Objective,
    cost: CostEmbedding | LiveCost | None = None,
    *,
    bias: Tensor | None = None,
    teacher: Side | None = None,
    stored: Tensor | None = None,
    **options: Any,
) -> LossSums:
    """Return the loss of hidden states against labels through a linear head, as sums over the valid tokens.

        z = cap(scale h W^T + b),    loss = sum_t L(softmax(z_t), y_t)

    with L one of `objectives.py`. Differentiable in `hidden`, `weight` and `bias`, once; the logits [N, V]
    are never built. With a cost embedding the DEMD is reported for every objective.

    Args:
        hidden: [..., H], float64, float32, bfloat16 or float16.
        weight: [V, H], of the same dtype.
        labels: [...], int64: labels[i] is the token that hidden[i] predicts (nothing is shifted); -100 leaves
            a token out. A plan made of them beforehand (`plan_tokens`) spares the device a wait.
        objective: from `get_objective` or `weighted_sum`.
        cost: transport costs of V tokens, for objectives that read D; `LIVE` takes those of `weight`.
        bias: [V], added to the logits.
        teacher: what a divergence compares with, at the same positions: hidden states under a head (Teacher),
            or stored log-probabilities (TopK), which know no costs.
        stored: [...], a log-probability of every label in nats, for `psft` and `excess`.

    Options:
        softcap: logits become cap * tanh(logits / cap).
        logit_scale: factor on h W^T, before the soft cap.
        z_loss: weight of (log sum exp z)^2 per token.
        label_smoothing: share e; the loss becomes (1 - e) L + e mean_i(-log p_i), for every objective.
        kernels: auto (Triton on a GPU that has it, else PyTorch), torch or triton.
        memory_mb: budget of a chunk's logits; by default 32 or 48 on a CPU, 512 elsewhere.

    Returns:
        LossSums, summed in float64. Raises UserError for shapes, dtypes or options that do not fit, or an
        objective without its inputs.
    """
    spec = make_spec(objective.fixed(), cost, **options)
    return apply_fused(hidden, weight, bias, labels, spec, teacher, stored)


@torch.compiler.disable
def apply_fused(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Labels,
    spec: Spec,
    teacher: Side | None,
    stored: Tensor | None,
) -> LossSums:
    """Return the loss of a call with checked options: `fused_linear_loss`, and `FusedHead` with labels.

    hidden [..., H]; labels and `stored` [...] on any device. Under autocast the inputs are cast first.
    """
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    hidden = hidden.reshape(-1, hidden.shape[-1])
    stored = None if stored is None else stored.reshape(-1)
    _check(hidden, weight, labels, spec, teacher)
    check_inputs(spec, label_count(labels), stored, len(weight))
    inputs = (hidden, weight, bias)
    recording = torch.is_grad_enabled()
    needs = tuple(recording and x is not None and x.requires_grad for x in inputs)
    with torch.autocast(hidden.device.type, enabled=False):  # it would round the costs' products
        return LossSums(*_FusedLoss.apply(hidden, weight, bias, labels, spec, needs, teacher, stored))


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

    Arguments and results are those of `fused_linear_loss`, soft cap and scale applied already. The gradient,
    made in forward, is the only other tensor of the logits' size. Raises UserError for shapes or options that
    do not fit; for `demd_dense` and `LIVE`, which need the fused head.
    """
    for name in ("softcap", "logit_scale"):
        if name in options:
            raise UserError(f"{name} is part of the logits already; leave it out", code="options-clash")
    spec, V = make_spec(objective.fixed(), cost, **options), logits.shape[-1]
    if logits.shape[:-1] != labels.shape:
        shapes = f"logits {list(logits.shape)} and labels {list(labels.shape)}"
        raise UserError(f"{shapes} do not fit", code="shapes")
    if isinstance(cost, LiveCost) or objective.against:
        raise UserError("the live head and a teacher need the fused head (fuse_head)", code="needs-head")
    check_inputs(spec, labels.numel(), stored, V)
    needs = (torch.is_grad_enabled() and logits.requires_grad, False, False)
    flat, stored = logits.reshape(-1, V), None if stored is None else stored.reshape(-1)
    with torch.autocast(logits.device.type, enabled=False):  # it would round the costs' products
        return LossSums(*_FusedLoss.apply(flat, None, None, labels.reshape(-1), spec, needs, None, stored))


@torch.no_grad()
def token_nll(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, spec: Spec) -> Tensor:
    """Return -log p of every label in nats, like `labels` [...], float32 (float64); 0 where one is ignored.

    hidden [..., H], weight [V, H], bias [V]. Raises UserError for shapes or dtypes that do not fit.
    """
    flat = hidden.reshape(-1, hidden.shape[-1])
    _check(flat, weight, labels, spec, None)
    out = torch.zeros(labels.numel(), dtype=statistics_dtype(hidden.dtype), device=hidden.device)
    for positions, _, tokens in run_chunks(flat, weight, bias, labels, spec, False):
        out[positions] = tokens.nll
    return out.view(labels.shape)


def _check(hidden: Tensor, weight: Tensor, labels: Labels, spec: Spec, teacher: Side | None) -> None:
    V, N = len(weight), label_count(labels)
    if weight.dim() != 2 or weight.numel() == 0:
        problem = f"fused loss: the head's weight has shape {list(weight.shape)}; under ZeRO-3 call the head"
        raise UserError(
            f"{problem} itself (fuse_head) or gather it around loss and backward", code="sharded-head"
        )
    if hidden.shape != (N, weight.shape[1]):
        shapes = f"hidden {list(hidden.shape)}, labels [{N}] and head {list(weight.shape)}"
        raise UserError(f"fused loss: {shapes} do not fit; expected [N, H], [N], [V, H]", code="shapes")
    if hidden.dtype != weight.dtype:
        raise UserError(f"fused loss: hidden is {hidden.dtype} but the head is {weight.dtype}", code="dtypes")
    objective = spec.terms.objective
    if bool(objective.against) != (teacher is not None):
        problem = "needs a teacher" if objective.against else "takes no teacher"
        raise UserError(f"objective {objective.name} {problem}", code="needs-teacher")
    if isinstance(teacher, TopK) and objective.transports:
        problem = "needs every probability of its teacher, and the stored ones are the largest"
        raise UserError(f"objective {objective.name} {problem}; name a model", code="needs-teacher")
    fault = None if teacher is None else teacher.fault(N, V)
    if fault is not None:
        raise UserError(f"teacher: {fault}", code="shapes")


class _FusedLoss(torch.autograd.Function):
    """The loss with gradients that are computed in forward and returned, scaled, in backward: once."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        labels: Labels,
        spec: Spec,
        needs: Needs,
        teacher: Side | None,
        stored: Tensor | None,
    ) -> tuple[Tensor, ...]:
        gradients, totals = Accumulator(x, weight, needs), Totals(spec, label_count(labels), x)
        for positions, G, tokens in run_chunks(x, weight, bias, labels, spec, any(needs), teacher, stored):
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
        gradients, ctx.gradients = ctx.gradients, None  # free them as soon as autograd is done
        factor = d_loss if ctx.factor is None else d_loss * ctx.factor
        scaled = (use_up(*pair, factor) for pair in zip(gradients, ctx.dtypes, strict=True))
        return (*scaled, None, None, None, None, None)


def run_chunks(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    labels: Labels,
    spec: Spec,
    gradient: bool,
    teacher: Side | None = None,
    stored: Tensor | None = None,
) -> Iterator[tuple[Tensor, Tensor, Tokens]]:
    """Yield positions [n] in the flat batch, gradient rows G [n, V] and results of each chunk of tokens.

    x: hidden states [N, H] under a head's weight [V, H] and bias [V], or logits [N, V] where weight is None.
    Without `gradient` the rows are what the kernels leave of the logits; the next chunk overwrites them.

    In half precision the product h W^T is rounded to 8 bits, coarse for a logit of 30 and fine near 0. So the
    target's logit, computed in float32, is subtracted inside the product, before the rounding: logits that
    compete with the target keep their digits.
    """
    device, dtype, stats = x.device, x.dtype, statistics_dtype(x.dtype)
    V = x.shape[1] if weight is None else len(weight)
    plan = labels if isinstance(labels, TokenPlan) else plan_tokens(labels, pin=device.type == "cuda")
    plan.check(V)
    order, total, triton = plan.on(device), len(plan), spec.uses_triton(x)
    budget = spec.memory_mb or (CHUNK_MB_CPU[dtype.itemsize] if device.type == "cpu" else CHUNK_MB)
    alone = spec.terms.objective.by_target or spec.terms.label_smoothing or spec.terms.z_loss
    full = teacher is None or bool(alone) or spec.cost is not None  # something beside the divergences
    # parts that need the logits after others have begun to write the gradient
    later = teacher is not None and (full or (triton and len(spec.terms.objective.against) > 1))
    matrices = 1.0 + later  # of the logits' size: the logits, a copy of them, the teacher's
    if isinstance(teacher, Teacher):
        matrices += stats.itemsize / dtype.itemsize
    size = min(max(16, int(budget * 2**20 / (V * dtype.itemsize * matrices))), max(total, 1))
    cost, rows = spec.cost, None
    if isinstance(cost, LiveCost) and weight is not None:
        cost = CostEmbedding(unit_rows(weight.detach(), checked=False))
    if isinstance(cost, CostEmbedding) and total:
        cost = cost.placed(device, dtype)
        if full:
            most = group_size(V, dtype, device, size)
            rows = open_rows(cost, plan, order, None if triton else stats, most, size)
    buffer = padded_rows(size if total and weight is not None else 0, V, dtype, device)
    wide_bias = None if bias is None else bias.to(stats)
    for start in range(0, total, size):
        stop = min(start + size, total)
        positions, y = order.positions[start:stop], order.labels[start:stop]
        z, offset = x[positions], None
        if weight is None:
            target = z.gather(1, y[:, None])[:, 0].to(stats)
        else:
            h, z = z if spec.logit_scale == 1.0 else z.mul_(spec.logit_scale), buffer[: len(z)]
            if dtype == stats:
                torch.mm(h, weight.t(), out=z)
                target = z.gather(1, y[:, None])[:, 0]
            else:
                target = torch.linalg.vecdot(h.to(stats), weight[y].to(stats))
                shift = target.to(dtype)
                offset = shift.to(stats)
                if widens(h):
                    against_rows(h, weight, z, less=shift)
                else:
                    z.copy_((-shift)[:, None].expand_as(z))
                    z.addmm_(h, weight.t())
        if wide_bias is not None:
            target = target + wide_bias[y]
        column = None if stored is None else stored[positions].to(stats)
        offset = torch.zeros_like(target) if offset is None else offset
        chunk = Chunk(start, y, target, offset, wide_bias, column)
        if teacher is None:
            tokens = process_chunk(z, chunk, rows, spec.terms, gradient, triton)
        else:
            own, others = z, None
            if later:
                own = padded_rows(len(z), V, dtype, device).copy_(z)
            if full:
                others = process_chunk(z, chunk, rows, spec.terms, gradient, triton, in_full=True)
            if isinstance(teacher, Teacher):
                side: TeacherRows | TopK = teacher.rows(positions, V, stats)
            else:
                side = teacher.rows(positions)
            costs = cost if isinstance(cost, CostEmbedding) else None
            tokens = add_divergences(z, own, chunk, side, costs, spec.terms, gradient, triton, others)
        yield positions, z, tokens


def process_chunk(
    logits: Tensor,
    chunk: Chunk,
    costs: ExactRows | CachedRows | None,
    terms: Terms,
    gradient: bool,
    triton: bool,
    in_full: bool = False,
) -> Tokens:
    """Return the losses of a chunk of logits [n, V]; with `gradient`, overwrite these by G (`rows.py`).

    `in_full`: so that G needs no factors per row.
    """
    n, V = logits.shape
    dtype = statistics_dtype(logits.dtype)
    # kernels without temporaries are bound by the cost rows alone, which are to be kept few
    step = n if triton else group_size(V, logits.dtype, logits.device, n)
    in_full = in_full or terms.softcap is not None or logits.dtype == torch.float16
    scratch = spare = None
    if logits.dtype != dtype and not triton:
        scratch = torch.empty(step, V, dtype=dtype, device=logits.device)
    if "H" in terms.objective.needs and not triton:
        spare = torch.empty(step, V, dtype=dtype, device=logits.device)
    parts, solver, stop = [], solve, 0
    while stop < n:
        start, stop = stop, min(stop + step, n)
        rows = None
        if costs is not None:
            stop = costs.reach(chunk.start + start, chunk.start + stop) - chunk.start
            rows = costs.group(chunk.start + start, chunk.start + stop)
        block, part = logits[start:stop], chunk.rows(start, stop)
        if triton:
            from .kernels.objectives import TritonRows, solve_at_once

            group: TorchRows | TritonRows = TritonRows(block, part, rows, terms)
            solver = solve_at_once if logits.is_cuda else solve
        else:
            wide = block if scratch is None else scratch[: stop - start]
            entropy = None if spare is None else spare[: stop - start]
            group = TorchRows(wide, block, part, rows, terms, entropy)
        tokens, update = solver(terms, group.statistics(), part.stored, V, in_full)
        if gradient:
            group.write(update)
        parts.append(tokens[:-1])
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

    tokens: those of the other parts of the loss, whose gradient G [n, V] holds; None where there are none,
    and the model's `logits` [n, V] may be G itself. Logits and teacher are used up.
    """
    (n, V), parts = logits.shape, []
    # kernels have no temporaries, but (C p) of eq. 15 is one
    step = n if triton and not terms.objective.transports else group_size(V, logits.dtype, logits.device, n)
    for start in range(0, n, step):
        part = slice(start, min(start + step, n))
        group, side, into = chunk.rows(part.start, part.stop), teacher.group(part), G[part]
        if triton:
            from .kernels.teacher import write_divergences

            adds = tokens is not None
            results = write_divergences(into, logits[part], group, side, cost, terms, gradient, adds)
        else:
            against = compare(logits[part], group, side, cost, terms, gradient)
            if against.gradient is not None:
                into.copy_(against.gradient) if tokens is None else into.add_(against.gradient)
            results = against[:-1]
        parts.append(results)
    loss, divergence, nll = (torch.cat(column) for column in zip(*parts, strict=True))
    if tokens is not None:
        return tokens._replace(loss=tokens.loss + loss, divergence=divergence)
    ones = torch.ones_like(loss)
    return Tokens(loss, nll, torch.zeros_like(nll), row=ones, weight=ones, divergence=divergence)


class Accumulator:
    """Gradients of the loss sum over chunks, in float32 (float64) for head and bias.

        d_hidden = (G W) r s        d_weight = G^T (h r s)        d_bias = G^T r

    with r [n] the rows' factors and s the logit scale. In half precision the head's sum is kept in blocks of
    rows: each is freed as it is rounded, so that the sum and its rounded copy never both exist whole.
    """

    def __init__(self, x: Tensor, weight: Tensor | None, needs: Needs) -> None:
        """x and weight as in `run_chunks`."""
        self.x, self.weight = x, weight
        V, stats = x.shape[1] if weight is None else len(weight), statistics_dtype(x.dtype)
        self.d_x = torch.zeros_like(x) if needs[0] else None
        self.d_bias = torch.zeros(V, dtype=stats, device=x.device) if needs[2] else None
        self.rows = V
        if x.dtype != stats:
            self.rows = padded_width(-(-V // BLOCKS)) if x.is_cuda else BLOCK
        self.blocks: Blocks | None = [] if needs[1] else None

    def add(self, G: Tensor, row: Tensor, positions: Tensor, scale: float) -> None:
        """Add one chunk: G [n, V] in the model's dtype, row factors [n], positions [n] in the batch."""
        factor, widened, stats = (row * scale)[:, None], widens(G), statistics_dtype(G.dtype)
        if self.d_x is not None and self.weight is None:
            self.d_x[positions] = G.mul_(row[:, None].to(G.dtype))
        elif self.d_x is not None and self.weight is not None:
            product = with_rows(G, self.weight) if widened else torch.mm(G, self.weight)
            self.d_x[positions] = (product * factor).to(G.dtype)
        if self.d_bias is not None:
            for start in range(0, len(self.d_bias), BLOCK):
                block = slice(start, start + BLOCK)
                self.d_bias[block] += torch.mv(G[:, block].t().to(row.dtype), row)
        if self.blocks is None:
            return
        mixed = G.is_cuda and G.dtype != stats  # only CUDA multiplies half precision into a float32 sum
        scaled = (self.x[positions] * factor).to(G.dtype)
        scaled = scaled.to(stats) if widened else scaled
        first = not self.blocks
        for index, start in enumerate(range(0, G.shape[1], self.rows)):
            part = G[:, start : start + self.rows].t()
            part = part.to(stats) if widened else part
            if first:
                product = torch.mm(part, scaled, out_dtype=stats) if mixed else torch.mm(part, scaled)
                self.blocks.append(product.to(stats))
            elif part.dtype == stats:
                self.blocks[index].addmm_(part, scaled)
            elif mixed:
                sums = self.blocks[index]
                torch.addmm(sums, part, scaled, out_dtype=stats, out=sums)
            else:
                self.blocks[index] += torch.mm(part, scaled)

    def finish(self) -> tuple[Blocks | None, Blocks | None, Blocks | None]:
        """Return the gradients of the loss sum in x, weight and bias; all zero if no chunk came."""
        if self.blocks == [] and self.weight is not None:
            self.blocks.append(torch.zeros_like(self.weight, dtype=statistics_dtype(self.weight.dtype)))
        d_x, d_bias = ([x] if x is not None else None for x in (self.d_x, self.d_bias))
        return d_x, self.blocks, d_bias


def use_up(blocks: Blocks | None, dtype: torch.dtype | None, factor: Tensor) -> Tensor | None:
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
        for first in range(0, len(block), BLOCK):  # no second float32 copy of a large one
            part = block[first : first + BLOCK]
            out[start + first : start + first + len(part)] = part.mul_(factor)
        start += len(block)
    return out
