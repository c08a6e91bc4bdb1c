"""Output head and loss in one: hidden states and labels in, summed loss and gradients out.

The logits of all tokens never exist together. Tokens are taken in chunks; each chunk's logits become the
chunk's gradient in place and are used up by two matrix products at once, in the forward pass, so that nothing
is computed twice. Between forward and backward only the gradients [N, H] and [V, H] are held.

Tokens are sorted by label first (`token_plan.py`): a row of transport costs then serves all tokens with that
target. The file follows a token: `fused_linear_loss`, `run_chunks` (its logits), `process_chunk` (its loss
and the gradient G of its logits), `Accumulator` (the gradients of hidden state and head).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from common.errors import UserError
from pipeline.loss.cost import CostEmbedding, CostRows, LiveCost, open_rows, unit_rows
from pipeline.loss.dense import Teacher, process_dense_chunk
from pipeline.loss.kernels_torch import TorchRows
from pipeline.loss.registry import Objective
from pipeline.loss.rowwise import Chunk, RowPass, Terms, Tokens, solve, statistics_dtype
from pipeline.loss.spec import Spec, check_inputs, chunk_size, group_size, make_spec, use_triton
from pipeline.loss.sums import LossSums, Totals
from pipeline.loss.tensors import BLOCK, against_rows, padded_rows, padded_width, widens, with_rows
from pipeline.loss.token_plan import Labels, OnDevice, TokenPlan, label_count, plan_tokens

BLOCKS = 8  # of the head's gradient on an accelerator

Blocks = list[Tensor]  # consecutive rows of a gradient
Gradients = tuple[Blocks | None, Blocks | None, Blocks | None]  # of hidden, weight and bias
Needs = tuple[bool, bool, bool]  # which of them autograd asks for


def fused_linear_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Labels,
    objective: Objective,
    cost: CostEmbedding | LiveCost | None = None,
    *,
    bias: Tensor | None = None,
    teacher: Teacher | None = None,
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
        teacher: the distribution that `demd_dense` compares with, at the same positions.
        stored: [...], a log-probability of every label in nats, for `psft` and `excess`.

    Options:
        softcap: logits become cap * tanh(logits / cap).
        logit_scale: factor on h W^T, before the soft cap.
        z_loss: weight of (log sum exp z)^2 per token.
        label_smoothing: share e; the loss becomes (1 - e) L + e mean_i(-log p_i), for every objective.
        kernels: auto (Triton on a GPU that has it, else PyTorch), torch or triton.
        memory_mb: budget of a chunk's logits; by default 32 or 48 on a CPU, 512 elsewhere.

    Returns:
        LossSums: loss, NLL and DEMD in nats, nats and costs, summed in float64 and returned in float32
        (float64 for float64 inputs); divide by `tokens` for means.

    Raises:
        UserError: for shapes, dtypes or options that do not fit, and for an objective without its inputs.
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
    teacher: Teacher | None,
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


@torch.no_grad()
def token_nll(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, spec: Spec) -> Tensor:
    """Return -log p of every label in nats, like `labels` [...], float32 (float64); 0 where one is ignored.

    hidden [..., H], weight [V, H], bias [V]. Raises UserError for shapes or dtypes that do not fit.
    """
    flat = hidden.reshape(-1, hidden.shape[-1])
    _check(flat, weight, labels, spec, None)
    out = torch.zeros(labels.numel(), dtype=statistics_dtype(hidden.dtype), device=hidden.device)
    for chunk in run_chunks(flat, weight, bias, labels, spec, False, None, None):
        out[chunk.positions] = chunk.tokens.nll
    return out.view(labels.shape)


def _check(hidden: Tensor, weight: Tensor, labels: Labels, spec: Spec, teacher: Teacher | None) -> None:
    V, N = len(weight), label_count(labels)
    if weight.dim() != 2 or weight.numel() == 0:
        raise UserError(
            f"fused loss: the head's weight has shape {list(weight.shape)}; under ZeRO-3 call the head "
            "module itself (fuse_head) or gather the weight around loss and backward",
            code="sharded-head",
        )
    if hidden.shape != (N, weight.shape[1]):
        raise UserError(
            f"fused loss: hidden {list(hidden.shape)}, labels [{N}] and head "
            f"{list(weight.shape)} do not fit; expected [N, H], [N], [V, H]",
            code="shapes",
        )
    if hidden.dtype != weight.dtype:
        raise UserError(f"fused loss: hidden is {hidden.dtype} but the head is {weight.dtype}", code="dtypes")
    if spec.terms.objective.dense != (teacher is not None):
        raise UserError(
            "objective demd_dense needs a teacher, and no other objective takes one", code="needs-teacher"
        )
    if teacher is not None and teacher.hidden.shape[:-1].numel() * len(teacher.weight) != N * V:
        raise UserError(
            f"teacher: hidden {list(teacher.hidden.shape)} and head {list(teacher.weight.shape)} do not "
            f"fit {N} tokens and {V} vocabulary entries",
            code="shapes",
        )


class _FusedLoss(torch.autograd.Function):
    """The loss with gradients that are computed in forward and returned, scaled, in backward: once."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Labels,
        spec: Spec,
        needs: Needs,
        teacher: Teacher | None,
        stored: Tensor | None,
    ) -> tuple[Tensor, ...]:
        gradients, totals = Accumulator(hidden, weight, needs), Totals(spec, label_count(labels), hidden)
        for chunk in run_chunks(hidden, weight, bias, labels, spec, any(needs), teacher, stored):
            totals.add(chunk.tokens, chunk.positions)
            if any(needs):
                gradients.add(chunk.z, chunk.tokens.row, chunk.positions, spec.logit_scale)
        sums, ctx.factor = totals.finish(training=any(needs))
        ctx.gradients = gradients.finish()
        ctx.dtypes = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
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


class Walk(NamedTuple):
    """The order in which a batch is processed, whether its logits exist already or not."""

    total: int  # valid tokens
    order: OnDevice
    size: int  # tokens per chunk
    triton: bool
    rows: CostRows | None  # None without costs, and with a whole distribution per token as the target


def walk_over(spec: Spec, cost: CostEmbedding | None, labels: Labels, vocab_size: int, like: Tensor) -> Walk:
    """Return the walk over `labels`, whose logits will have the dtype and device of `like`.

    Raises UserError for labels that do not fit the vocabulary or the batch.
    """
    dtype, device = like.dtype, like.device
    plan = labels if isinstance(labels, TokenPlan) else plan_tokens(labels, pin=device.type == "cuda")
    plan.check(vocab_size)
    order, total = plan.on(device), len(plan)
    size = min(chunk_size(spec, dtype, vocab_size, device), max(total, 1))
    triton = use_triton(spec, like)
    rows: CostRows | None = None
    if cost is not None and total and not spec.terms.objective.dense:
        group = group_size(vocab_size, dtype, device, size)
        placed = cost.placed(device, dtype)
        rows = open_rows(placed, plan, order, statistics_dtype(dtype), group, size, as_stored=triton)
    return Walk(total, order, size, triton, rows)


class ProcessedChunk(NamedTuple):
    """A chunk of tokens that has gone through the head."""

    positions: Tensor  # [n] in the flat batch
    z: Tensor  # [n, V] the gradient rows G, or the logits as the kernels leave them
    tokens: Tokens


def run_chunks(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Labels,
    spec: Spec,
    gradient: bool,
    teacher: Teacher | None,
    stored: Tensor | None,
) -> Iterator[ProcessedChunk]:
    """Yield the chunks of a batch, all in the same buffer; with `gradient`, their z is G.

    hidden [N, H], weight [V, H], bias [V], labels and stored [N]. In half precision the product h W^T is
    rounded to 8 bits, coarse for a logit of 30 and fine near 0. So the target's logit, computed in float32,
    is subtracted inside the product, before the rounding: logits that compete with the target keep their
    digits.
    """
    V, device = len(weight), hidden.device
    stats = statistics_dtype(hidden.dtype)
    cost = spec.cost
    if isinstance(cost, LiveCost):
        cost = CostEmbedding(unit_rows(weight.detach(), checked=False))
    total, order, size, triton, rows = walk_over(spec, cost, labels, V, hidden)
    buffer = padded_rows(size if total else 0, V, hidden.dtype, device)
    wide_bias = None if bias is None else bias.to(stats)
    for start in range(0, total, size):
        stop = min(start + size, total)
        positions, y = order.positions[start:stop], order.labels[start:stop]
        h = hidden[positions]
        if spec.logit_scale != 1.0:
            h.mul_(spec.logit_scale)
        z = buffer[: len(h)]
        shift = None
        if hidden.dtype == stats:
            torch.mm(h, weight.t(), out=z)
            target = z.gather(1, y[:, None])[:, 0]
        else:
            target = torch.linalg.vecdot(h.to(stats), weight[y].to(stats))
            shift = target.to(h.dtype)
            if widens(h):
                against_rows(h, weight, z, less=shift)
            else:
                z.copy_((-shift)[:, None].expand_as(z))
                z.addmm_(h, weight.t())
        if wide_bias is not None:
            target = target + wide_bias[y]
        column = None if stored is None else stored[positions].to(stats)
        chunk = Chunk(start, y, target, shift, wide_bias, column)
        if teacher is not None and cost is not None:
            P = teacher.probabilities(positions)
            tokens = process_dense_chunk(z, chunk, P, cost.placed(device, hidden.dtype), spec.terms, gradient)
        else:
            tokens = process_chunk(z, chunk, rows, spec.terms, gradient, triton)
        yield ProcessedChunk(positions, z, tokens)


def process_chunk(
    logits: Tensor, chunk: Chunk, costs: CostRows | None, terms: Terms, gradient: bool, triton: bool
) -> Tokens:
    """Return the losses of a chunk of logits [n, V]; with `gradient`, overwrite these by G (`rowwise.py`)."""
    n, V = logits.shape
    dtype = statistics_dtype(logits.dtype)
    # kernels without temporaries have no use for groups where no cost rows are to be kept few
    step = n if triton and costs is None else group_size(V, logits.dtype, logits.device, n)
    in_full = terms.softcap is not None or logits.dtype == torch.float16
    scratch = None
    if logits.dtype != dtype and not triton:
        scratch = torch.empty(step, V, dtype=dtype, device=logits.device)
    spare = None
    if "H" in terms.objective.needs and not triton:
        spare = torch.empty(step, V, dtype=dtype, device=logits.device)
    parts = []
    for start in range(0, n, step):
        stop = min(start + step, n)
        block, part = logits[start:stop], chunk.rows(start, stop)
        rows = None if costs is None else costs.group(chunk.start + start, chunk.start + stop)
        group: RowPass
        if triton:
            from pipeline.loss.kernels_triton import TritonRows

            group = TritonRows(block, part, rows, terms)
        else:
            wide = block if scratch is None else scratch[: stop - start]
            group = TorchRows(
                wide, block, part, rows, terms, None if spare is None else spare[: stop - start]
            )
        tokens, update = solve(terms, group.statistics(), part.stored, V, in_full)
        if gradient:
            group.write(update)
        parts.append(tokens)
    return Tokens(*(torch.cat(column) for column in zip(*parts, strict=True)))


class Accumulator:
    """Gradients of the loss sum over chunks, in float32 (float64) for head and bias.

        d_hidden = (G W) r s        d_weight = G^T (h r s)        d_bias = G^T r

    with r [n] the rows' factors and s the logit scale. In half precision the head's sum is kept in blocks of
    rows: each is freed as it is rounded, so that the sum and its rounded copy never both exist whole.
    """

    def __init__(self, hidden: Tensor, weight: Tensor, needs: Needs) -> None:
        self.hidden, self.weight = hidden, weight
        V, stats = len(weight), statistics_dtype(hidden.dtype)
        self.d_hidden = torch.zeros_like(hidden) if needs[0] else None
        self.d_bias = torch.zeros(V, dtype=stats, device=hidden.device) if needs[2] else None
        self.rows = V
        if hidden.dtype != stats:
            self.rows = padded_width(-(-V // BLOCKS)) if hidden.is_cuda else BLOCK
        self.blocks: Blocks | None = [] if needs[1] else None

    def add(self, G: Tensor, row: Tensor, positions: Tensor, scale: float) -> None:
        """Add one chunk: G [n, V] in the model's dtype, row factors [n], positions [n] in the batch."""
        factor = (row * scale)[:, None]
        if self.d_hidden is not None:
            product = with_rows(G, self.weight) if widens(G) else torch.mm(G, self.weight)
            self.d_hidden[positions] = (product * factor).to(G.dtype)
        if self.blocks is not None:
            self._add_weight(G, (self.hidden[positions] * factor).to(G.dtype), self.blocks)
        if self.d_bias is not None:
            for start in range(0, len(self.weight), BLOCK):
                block = slice(start, start + BLOCK)
                self.d_bias[block] += torch.mv(G[:, block].t().to(row.dtype), row)

    def _add_weight(self, G: Tensor, scaled: Tensor, blocks: Blocks) -> None:
        """d_weight += G^T scaled, in place."""
        stats = statistics_dtype(G.dtype)
        mixed = G.is_cuda and G.dtype != stats  # only CUDA multiplies half precision into a float32 sum
        first, widened = not blocks, widens(G)
        scaled = scaled.to(stats) if widened else scaled
        for index, start in enumerate(range(0, G.shape[1], self.rows)):
            part = G[:, start : start + self.rows].t()
            part = part.to(stats) if widened else part
            if first:
                blocks.append(
                    torch.mm(part, scaled, out_dtype=stats) if mixed else torch.mm(part, scaled).to(stats)
                )
            elif part.dtype == stats:
                blocks[index].addmm_(part, scaled)
            elif mixed:
                torch.addmm(blocks[index], part, scaled, out_dtype=stats, out=blocks[index])
            else:
                blocks[index] += torch.mm(part, scaled)

    def finish(self) -> Gradients:
        """Return the three gradients of the loss sum; all zero if no chunk came."""
        if self.blocks is not None and not self.blocks:
            stats = statistics_dtype(self.weight.dtype)
            self.blocks.append(torch.zeros_like(self.weight, dtype=stats))
        d_hidden, d_bias = ([x] if x is not None else None for x in (self.d_hidden, self.d_bias))
        return d_hidden, self.blocks, d_bias


def use_up(blocks: Blocks | None, dtype: torch.dtype | None, factor: Tensor) -> Tensor | None:
    """Return the gradient in `blocks` times the scalar `factor`, in `dtype`; empties the list.

    In place where there is one block of the right dtype, else block by block, each freed as it has been
    rounded.
    """
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
