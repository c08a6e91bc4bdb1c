"""The divergence KL(base, model) of every token from the model before training, for validation.

Both sides are a `Teacher`, so the same hidden states and head give exactly 0. The logits of a chunk of tokens
exist at a time.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from .cost import Labels, TokenPlan, label_count, plan_tokens
from .divergences import kl_sum
from .fused import Spec, chunk_bytes
from .rows import statistics_dtype
from .teacher import Teacher, TeacherBatch, TopK, merge_others

MATRICES = 7  # of a chunk's logits that exist together, in the statistics' dtype


@torch.compiler.disable
@torch.no_grad()
def most_likely(model: Teacher, labels: Labels, k: int, spec: Spec) -> TopK:
    """Return the k most likely tokens at each valid label, with a row per valid label in their order."""
    assert model.weight is not None
    chunks = [model.top_k(part, len(model.weight), k) for part in _chunks(model, labels, spec)]
    return TopK(*(torch.cat(columns) for columns in zip(*chunks, strict=True)))


@torch.compiler.disable
@torch.no_grad()
def kl_from_base(model: Teacher, base: TeacherBatch, labels: Labels, spec: Spec) -> Tensor:
    """Return KL(base, model) at every label [N] in nats, 0 for ignored ones.

    It is exact for a live base. A stored base is the result of `most_likely`: the sum then has its k tokens
    and one entry for all others together. That is at most the exact value, and equal to it for k = V - 1.
    """
    assert model.weight is not None
    V = len(model.weight)
    values = [torch.zeros(0, dtype=statistics_dtype(model.hidden.dtype), device=model.hidden.device)]
    chunks = _chunks(model, labels, spec)
    start = 0
    for positions in chunks:
        log_q = model.log_probs(positions, V)
        if isinstance(base, TopK):
            side = base.group(slice(start, start + len(positions)))
            log_p = side.log_p.to(log_q.dtype)
            log_q = merge_others(log_q, side.ids)
        else:
            log_p = base.log_probs(positions, V)
        values.append(kl_sum(log_p.exp(), log_p, log_q))
        start += len(positions)
    out = values[0].new_zeros(label_count(labels))
    out[torch.cat(chunks)] = torch.cat(values)
    return out


def _chunks(model: Teacher, labels: Labels, spec: Spec) -> tuple[Tensor, ...]:
    """Return the flat positions of the valid labels, ascending, in chunks that fit into the budget."""
    assert model.weight is not None
    plan = labels if isinstance(labels, TokenPlan) else plan_tokens(labels)
    positions = torch.from_numpy(np.sort(plan.positions)).to(model.hidden.device)
    row_bytes = len(model.weight) * statistics_dtype(model.hidden.dtype).itemsize
    return positions.split(max(16, int(chunk_bytes(spec, model.hidden) / (MATRICES * row_bytes))))
