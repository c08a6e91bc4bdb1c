"""The loss against a teacher: its side of a batch, live or stored, and the pass over a chunk of logits.

The teacher's logits exist for one chunk of tokens at a time. A stored teacher has its k most likely tokens
and the mass of all others. Student and teacher are then compared over k + 1 entries, the last of which is the
rest. This can only make a divergence smaller (data processing inequality).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .cost import CostEmbedding, mm_in_float32, padded_rows
from .divergences import Distributions
from .rows import Chunk, Terms, statistics_dtype


class Teacher(NamedTuple):
    """A live teacher's side of a batch: its hidden states and its head. It is never differentiated."""

    hidden: Tensor  # [..., H'], one row per student row
    # [V', H'], V' >= V: entries beyond the student's V are padding and ignored. None: the student's head
    weight: Tensor | None
    bias: Tensor | None = None  # [V']
    softcap: float | None = None
    logit_scale: float = 1.0  # factor on h W^T, before the soft cap
    temperature: float = 1.0  # divides its logits

    def find_shape_problem(self, labels: int, vocab_size: int) -> str | None:
        """Return why it does not fit this number of labels and logits, or None."""
        assert self.weight is not None
        if self.hidden.shape[:-1].numel() == labels and len(self.weight) >= vocab_size:
            return None
        shapes = f"hidden {list(self.hidden.shape)} and head {list(self.weight.shape)}"
        return f"{shapes} do not fit {labels} tokens and {vocab_size} entries"

    def at_positions(self, positions: Tensor, vocab_size: int, dtype: torch.dtype) -> TeacherRows:
        """Return its rows at flat positions [n] in `dtype`, not yet normalised."""
        assert self.weight is not None
        weight = self.weight.detach()[:vocab_size]
        # autocast may leave hidden states in another type than the head's
        hidden = self.hidden.detach().flatten(0, -2)[positions].to(weight.dtype)
        half = hidden.dtype.itemsize == 2
        z = padded_rows(len(hidden), vocab_size, torch.float32 if half else hidden.dtype, hidden.device)
        product = mm_in_float32(hidden, weight, z) if half else torch.mm(hidden, weight.t(), out=z)
        return TeacherRows(product.to(dtype), self)

    def log_probs(self, positions: Tensor, vocab_size: int) -> Tensor:
        """Return log p [n, V] at flat positions [n], in the statistics' dtype."""
        dtype = statistics_dtype(self.hidden.dtype)
        return self.at_positions(positions, vocab_size, dtype).normalised().z

    def top_k(self, positions: Tensor, vocab_size: int, k: int) -> TopK:
        """Return its k most likely tokens at flat positions [n]."""
        log_p = self.log_probs(positions, vocab_size)
        ids = log_p.topk(k).indices
        return TopK(ids, merge_others(log_p, ids))


class TeacherRows(NamedTuple):
    """Rows of a live teacher's logits, as its head's product left them."""

    z: Tensor  # [n, V], h W^T
    teacher: Teacher  # its bias, scale, cap and temperature are not applied yet

    def group(self, part: slice) -> TeacherRows:
        """Return some of the rows."""
        return self._replace(z=self.z[part])

    def normalised(self) -> TeacherRows:
        """Turn the rows into log p, in place."""
        z = self.z
        teacher = self.teacher
        if teacher.logit_scale != 1.0:
            z.mul_(teacher.logit_scale)
        if teacher.bias is not None:
            z.add_(teacher.bias.detach()[: z.shape[1]])
        if teacher.softcap is not None:
            z.div_(teacher.softcap).tanh_().mul_(teacher.softcap)
        if teacher.temperature != 1.0:
            z.div_(teacher.temperature)
        return TeacherRows(z.sub_(z.logsumexp(1, keepdim=True)), Teacher(teacher.hidden, teacher.weight))


class TopK(NamedTuple):
    """A stored teacher's side of a batch."""

    ids: Tensor  # [..., k] int64: its most likely tokens
    log_p: Tensor  # [..., k + 1]: their log-probabilities, and one of all other tokens together

    def find_shape_problem(self, labels: int, vocab_size: int) -> str | None:
        """Return why it does not fit this number of labels, or None."""
        if self.ids.shape[:-1].numel() == labels and self.log_p.shape[-1] == self.ids.shape[-1] + 1:
            return None
        shapes = f"ids {list(self.ids.shape)} and log_p {list(self.log_p.shape)}"
        return f"{shapes} do not fit {labels} tokens"

    def at_positions(self, positions: Tensor, vocab_size: int, dtype: torch.dtype) -> TopK:
        """Return its rows at flat positions [n]."""
        return TopK(*(x.flatten(0, -2)[positions] for x in self))

    def group(self, part: slice) -> TopK:
        """Return some of its rows."""
        return TopK(*(x[part] for x in self))


TeacherBatch = Teacher | TopK


def merge_others(log_p: Tensor, ids: Tensor) -> Tensor:
    """Return log p of tokens `ids` [n, k] and of all others together, [n, k + 1]; log_p is overwritten."""
    listed = log_p.gather(1, ids)
    return torch.cat((listed, log_p.scatter_(1, ids, -torch.inf).logsumexp(1, keepdim=True)), 1)


class TeacherModel(Protocol):
    """A model that teaches the one being trained (`models/frozen.py`)."""

    def run_batch(self, tokens: int, inputs: Mapping[str, Any]) -> Teacher:
        """Return its side of a batch of `tokens` tokens."""
        ...


class TeacherLoss(NamedTuple):
    """The divergences of a group of tokens."""

    loss: Tensor  # [n]: their weighted sum
    divergence: Tensor  # [n]: their sum, without weights
    nll: Tensor  # [n], of the labels
    gradient: Tensor | None  # [n, V] of the loss, for the student's logits


def compare_with_teacher(
    logits: Tensor,
    chunk: Chunk,
    teacher: TeacherRows | TopK,
    cost: CostEmbedding | None,
    terms: Terms,
    gradient: bool,
) -> TeacherLoss:
    """Return the divergences of the student's logits [n, V] from a teacher. Live rows are overwritten."""
    objective = terms.objective
    log_q, slope, nll = _student_log_probs(logits, chunk, terms)
    q = log_q.exp()
    if isinstance(teacher, TopK):
        distributions = _over_stored_entries(log_q, q, teacher)
    else:
        log_p = teacher.normalised().z
        p = log_p.exp()
        Cp = cost.transport(p) if cost is not None and objective.needs_transport else None
        distributions = Distributions(log_p, log_q, q, p, Cp)
    loss = torch.zeros_like(nll)
    divergence = torch.zeros_like(nll)
    rows = torch.zeros_like(distributions.q) if gradient else None
    for weight, bound in objective.divergences:
        terms_of_one = bound.compute(distributions)
        loss += weight * terms_of_one.loss
        divergence += terms_of_one.loss
        if rows is not None:
            u = terms_of_one.u
            rows.add_(u.sub_(distributions.q * u.sum(1, keepdim=True)), alpha=weight)
    keep = 1 - terms.label_smoothing
    if rows is not None:
        # a row sums to zero, and its most likely entry would be the difference of two large numbers
        top = distributions.q.argmax(1, keepdim=True)
        rows.scatter_(1, top, 0.0).scatter_(1, top, -rows.sum(1, keepdim=True))
        if isinstance(teacher, TopK):
            # the tokens of the rest share its gradient in proportion to their mass
            rest = distributions.q[:, -1:]
            rows = q.mul_(rows[:, -1:] / rest).scatter_(1, teacher.ids, rows[:, :-1])
        rows.mul_(keep * objective.logit_scale)
        rows = rows if slope is None else rows.mul_(slope)
    return TeacherLoss(keep * loss, divergence, nll, rows)


def _student_log_probs(logits: Tensor, chunk: Chunk, terms: Terms) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return log q [n, V], the slope of the soft cap [n, V], and the NLL [n] of the labels."""
    dtype = statistics_dtype(logits.dtype)
    scale = terms.objective.logit_scale
    z = logits.to(dtype, copy=True)
    y = chunk.labels[:, None]
    if chunk.bias is not None:
        z.add_(chunk.bias)
    if logits.dtype != dtype:
        z.add_(chunk.offset[:, None])
    z.scatter_(1, y, chunk.target_logit[:, None])
    slope = None
    if terms.softcap is not None:
        slope = 1 - torch.tanh_(z.div_(terms.softcap)).square()
        z.mul_(terms.softcap)
    lse = z.logsumexp(1)
    nll = (lse - z.gather(1, y)[:, 0]).clamp(min=0)
    if scale != 1.0:
        lse = z.mul_(scale).logsumexp(1)
    return z.sub_(lse[:, None]), slope, nll


def _over_stored_entries(log_q: Tensor, q: Tensor, teacher: TopK) -> Distributions:
    """Return both distributions over the stored tokens and the rest; q [n, V] becomes 0 at stored tokens."""
    stored_log_q = log_q.gather(1, teacher.ids)
    stored_q = q.gather(1, teacher.ids)
    rest = q.scatter_(1, teacher.ids, 0.0).sum(1, keepdim=True).clamp_(min=torch.finfo(q.dtype).tiny)
    log_p = teacher.log_p.to(q.dtype)
    log_entries = torch.cat((stored_log_q, rest.log()), 1)
    entries = torch.cat((stored_q, rest), 1)
    return Distributions(log_p, log_entries, entries, log_p.exp())
