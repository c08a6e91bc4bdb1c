"""Options of the loss: checked once, and the kernels and chunk sizes that follow from them."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass

import torch
from torch import Tensor

from common.errors import UserError
from pipeline.loss.cost import CostEmbedding, LiveCost
from pipeline.loss.registry import Objective
from pipeline.loss.rowwise import Terms, statistics_dtype

# MB of logits alive at a time, unless asked otherwise. Each chunk reads the head twice, and reads and writes
# the float32 sum of its gradient: at most 394 / n of the time of the three products for n tokens on an H100,
# at any V and H (`tests/bench/kernels_static.py`). For V = 152064 these are 1,765 tokens, of which half would
# cost as much again; for V = 32000 one chunk takes 8,192, and half of it would save 0.25 of 1.5 GB.
CHUNK_MB = 512
CHUNK_MB_CPU = {2: 32, 4: 48, 8: 48}  # on a CPU, by the bytes of a logit
GROUP_BYTES = 2 * 1024 * 1024  # rows that share one round of per-token scalars, on a CPU
GROUP_TOKENS = 1024  # the same on an accelerator; bounds how many cost rows are alive


@dataclass(frozen=True)
class Spec:
    """Everything about the loss that is not a tensor of the model."""

    terms: Terms
    cost: CostEmbedding | LiveCost | None
    logit_scale: float = 1.0  # factor on h W^T, before the soft cap
    memory_mb: float | None = None  # budget of a chunk's logits; None: CHUNK_MB or CHUNK_MB_CPU
    kernels: str = "auto"  # auto | torch | triton
    by_token: bool = False  # whether the sums come with the losses of every token


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
        raise UserError(
            f"costs come as a CostEmbedding (given: {type(cost).__name__}); "
            "CostEmbedding.from_weight makes one of a tensor",
            code="cost-type",
        )
    if softcap is not None and softcap <= 0:
        raise UserError(f"softcap must be above 0 (given: {softcap:g})", code="option-range")
    if z_loss < 0:
        raise UserError(f"z_loss must not be negative (given: {z_loss:g})", code="option-range")
    if not 0 <= label_smoothing < 1:
        raise UserError(
            f"label_smoothing must lie in [0, 1) (given: {label_smoothing:g})", code="option-range"
        )
    if memory_mb is not None and memory_mb <= 0:
        raise UserError(f"memory_mb must be above 0 (given: {memory_mb:g})", code="option-range")
    if kernels not in ("auto", "torch", "triton"):
        raise UserError(f"kernels must be auto, torch or triton (given: {kernels})", code="option-range")
    if (objective.logit_scale != 1.0 or objective.normalised) and (z_loss or label_smoothing):
        reason = "divides its weights by their mean" if objective.normalised else "changes the logits' scale"
        raise UserError(
            f"objective {objective.name} {reason} and cannot be combined with z_loss or label_smoothing; "
            "leave them out",
            code="options-clash",
        )
    terms = Terms(objective, softcap, z_loss, label_smoothing)
    return Spec(terms, cost, logit_scale, memory_mb, kernels)


def check_inputs(spec: Spec, labels: int, stored: Tensor | None, vocab_size: int) -> None:
    """Check the inputs of a call with this number of labels. Raises UserError where the objective lacks an
    input or gets one that does not fit."""
    objective = spec.terms.objective
    if spec.cost is None and objective.needs_cost:
        raise UserError(f"objective {objective.name} needs a cost embedding", code="needs-cost")
    if isinstance(spec.cost, CostEmbedding) and spec.cost.vocab_size != vocab_size:
        raise UserError(
            f"the cost embedding has {spec.cost.vocab_size} rows but the logits have {vocab_size} columns; "
            "both must share one vocabulary",
            code="cost-vocabulary",
        )
    if stored is None and "stored" in objective.needs:
        raise UserError(
            f"objective {objective.name} needs a stored log-probability for every token", code="needs-stored"
        )
    if stored is not None and stored.numel() != labels:
        raise UserError(f"stored {list(stored.shape)} and {labels} labels do not fit", code="shapes")


def use_triton(spec: Spec, like: Tensor) -> bool:
    """Return True where the element-wise part of the loss of `like` runs in Triton.

    Raises UserError where `kernels=triton` cannot run.
    """
    if spec.kernels == "torch" or like.dtype == torch.float64:
        return False
    installed = importlib.util.find_spec("triton") is not None
    if spec.kernels == "auto":
        return like.is_cuda and installed
    if not installed:
        raise UserError(
            "kernels=triton, but triton is not installed; install it or set kernels=torch", code="no-triton"
        )
    if not (like.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"):
        raise UserError(
            "kernels=triton needs a GPU (or TRITON_INTERPRET=1, for tests); set kernels=auto",
            code="no-triton",
        )
    return True


def chunk_size(spec: Spec, logits: torch.dtype, vocab_size: int, device: torch.device) -> int:
    """Return the tokens per chunk that keep its logits within the memory budget."""
    budget = spec.memory_mb or (CHUNK_MB_CPU[logits.itemsize] if device.type == "cpu" else CHUNK_MB)
    matrices = 4 if spec.terms.objective.dense else 1  # the teacher's distribution and two temporaries
    return max(16, int(budget * 2**20) // (vocab_size * logits.itemsize * matrices))


def group_size(vocab_size: int, dtype: torch.dtype, device: torch.device, most: int) -> int:
    """Return the tokens handled together, at most `most`: on a CPU as many as stay in the cache."""
    if device.type != "cpu":
        return min(most, GROUP_TOKENS)
    return min(most, max(1, GROUP_BYTES // (vocab_size * statistics_dtype(dtype).itemsize)))
