"""How a batch is gone through: in chunks of logits, and within them in groups that share a pass."""

from __future__ import annotations

import importlib.util
import os
from typing import NamedTuple

import torch
from torch import Tensor

from common.errors import UserError
from pipeline.loss.cost import CostEmbedding
from pipeline.loss.cost_rows import CostRows, open_rows
from pipeline.loss.kernels_torch import TorchRows
from pipeline.loss.rowwise import Chunk, RowPass, Terms, Tokens, solve, statistics_dtype
from pipeline.loss.spec import Spec
from pipeline.loss.token_plan import Labels, OnDevice, TokenPlan, plan_tokens

# MB of logits alive at a time, unless asked otherwise. Each chunk reads the head twice, and reads and writes
# the float32 sum of its gradient: at most 394 / n of the time of the three products for n tokens on an H100,
# at any V and H (`tests/bench/kernels_static.py`). For V = 152064 these are 1,765 tokens, of which half would
# cost as much again; for V = 32000 one chunk takes 8,192, and half of it would save 0.25 of 1.5 GB.
CHUNK_MB = 512
CHUNK_MB_CPU = {2: 32, 4: 48, 8: 48}  # on a CPU, by the bytes of a logit
GROUP_BYTES = 2 * 1024 * 1024  # rows that share one round of per-token scalars, on a CPU
GROUP_TOKENS = 1024  # the same on an accelerator; bounds how many cost rows are alive


def use_triton(spec: Spec, hidden: Tensor) -> bool:
    """Whether the element-wise part runs in Triton. Raises UserError where `kernels=triton` cannot run."""
    if spec.kernels == "torch" or hidden.dtype == torch.float64:
        return False
    installed = importlib.util.find_spec("triton") is not None
    if spec.kernels == "auto":
        return hidden.is_cuda and installed
    if not installed:
        raise UserError("kernels=triton, but triton is not installed; install it or set kernels=torch")
    if not (hidden.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"):
        raise UserError("kernels=triton needs a GPU (or TRITON_INTERPRET=1, for tests); set kernels=auto")
    return True


def chunk_rows(spec: Spec, logits: torch.dtype, vocab_size: int, device: torch.device) -> int:
    """Tokens per chunk that keep its logits within the memory budget."""
    budget = spec.memory_mb or (CHUNK_MB_CPU[logits.itemsize] if device.type == "cpu" else CHUNK_MB)
    matrices = 4 if spec.terms.objective.dense else 1  # the teacher's distribution and two temporaries
    return max(16, int(budget * 2**20) // (vocab_size * logits.itemsize * matrices))


class Walk(NamedTuple):
    """How a batch is gone through, whether its logits exist already or not."""

    total: int  # valid tokens
    order: OnDevice
    size: int  # tokens per chunk
    triton: bool
    rows: CostRows | None  # where a cost embedding is used with one target per token


def walk_over(spec: Spec, cost: CostEmbedding | None, labels: Labels, vocab_size: int, like: Tensor) -> Walk:
    """The walk over `labels`, whose logits will have the dtype and device of `like`.

    Raises UserError for labels that do not fit the vocabulary or the batch.
    """
    dtype, device = like.dtype, like.device
    plan = labels if isinstance(labels, TokenPlan) else plan_tokens(labels, pin=device.type == "cuda")
    plan.check(vocab_size)
    order, total = plan.on(device), len(plan)
    size = min(chunk_rows(spec, dtype, vocab_size, device), max(total, 1))
    triton = use_triton(spec, like)
    rows: CostRows | None = None
    if cost is not None and total and not spec.terms.objective.dense:
        group = group_size(vocab_size, dtype, device, size)
        placed = cost.placed(device, dtype)
        rows = open_rows(placed, plan, order, statistics_dtype(dtype), group, size, as_stored=triton)
    return Walk(total, order, size, triton, rows)


def group_size(vocab_size: int, dtype: torch.dtype, device: torch.device, most: int) -> int:
    """Tokens handled together: on a CPU as many as stay in the cache."""
    if device.type != "cpu":
        return min(most, GROUP_TOKENS)
    return min(most, max(1, GROUP_BYTES // (vocab_size * statistics_dtype(dtype).itemsize)))


def process_chunk(
    logits: Tensor, chunk: Chunk, costs: CostRows | None, terms: Terms, gradient: bool, triton: bool
) -> Tokens:
    """Losses of a chunk of logits [n, V]; with `gradient`, overwrite the logits by G."""
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
