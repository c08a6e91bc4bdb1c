"""The loss against a teacher: its side of a batch, live or stored, and the pass over a chunk of logits.

The teacher's logits live as long as the student's, for a chunk of tokens. A stored teacher gave its k most
likely tokens and the mass of the rest; both sides are then compared over k + 1 entries, the last of which is
all other tokens together. What that leaves out can only make a divergence smaller (data processing).
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .cost import CostEmbedding, in_float32, padded_rows
from .divergences import Pair
from .rows import Chunk, Terms, statistics_dtype


class Teacher(NamedTuple):
    """A teacher's side of a batch: its hidden states through its own head. Never differentiated."""

    hidden: Tensor  # [..., H'], one row per student row
    # [V', H'], V' >= V: entries beyond the student's V are padding, and left out. None: the student's own
    weight: Tensor | None
    bias: Tensor | None = None  # [V']
    softcap: float | None = None
    logit_scale: float = 1.0  # factor on h W^T, before the soft cap
    temperature: float = 1.0  # that its logits are divided by

    def fault(self, labels: int, vocab_size: int) -> str | None:
        """Return why it does not fit so many labels and logits, or None."""
        assert self.weight is not None
        if self.hidden.shape[:-1].numel() == labels and len(self.weight) >= vocab_size:
            return None
        shapes = f"hidden {list(self.hidden.shape)} and head {list(self.weight.shape)}"
        return f"{shapes} do not fit {labels} tokens and {vocab_size} entries"

    def rows(self, positions: Tensor, vocab_size: int, dtype: torch.dtype) -> TeacherRows:
        """Return its side of flat positions [n] in `dtype`, not yet normalised."""
        hidden = self.hidden.detach().flatten(0, -2)[positions]
        assert self.weight is not None
        weight = self.weight.detach()[:vocab_size]
        half = hidden.dtype.itemsize == 2
        z = padded_rows(len(hidden), vocab_size, torch.float32 if half else hidden.dtype, hidden.device)
        product = in_float32(hidden, weight, z) if half else torch.mm(hidden, weight.t(), out=z)
        return TeacherRows(product.to(dtype), self)

    def log_probs(self, positions: Tensor, vocab_size: int) -> Tensor:
        """Return log p [n, V] of flat positions [n], in the statistics' dtype."""
        return self.rows(positions, vocab_size, statistics_dtype(self.hidden.dtype)).normalised().z


class TeacherRows(NamedTuple):
    """Rows of a live teacher's logits, as its head's product left them."""

    z: Tensor  # [n, V], h W^T
    teacher: Teacher  # whose bias, scale, cap and temperature are still to come

    def group(self, part: slice) -> TeacherRows:
        """Return some of the rows."""
        return self._replace(z=self.z[part])

    def normalised(self) -> TeacherRows:
        """Return log p, which takes the rows' place and lacks nothing more."""
        z, teacher = self.z, self.teacher
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
    log_p: Tensor  # [..., k + 1]: their log-probabilities, and that of all other tokens together

    def fault(self, labels: int, vocab_size: int) -> str | None:
        """Return why it does not fit so many labels and logits, or None."""
        if self.ids.shape[:-1].numel() == labels and self.log_p.shape[-1] == self.ids.shape[-1] + 1:
            return None
        shapes = f"ids {list(self.ids.shape)} and log_p {list(self.log_p.shape)}"
        return f"{shapes} do not fit {labels} tokens"

    def rows(self, positions: Tensor) -> TopK:
        """Return it for flat positions [n]."""
        return TopK(*(x.flatten(0, -2)[positions] for x in self))

    def group(self, part: slice) -> TopK:
        """Return some of its rows."""
        return TopK(*(x[part] for x in self))


Side = Teacher | TopK


class Beside(Protocol):
    """A model beside the one that trains (`frozen.py`)."""

    def side(self, tokens: int, inputs: dict[str, Any]) -> Teacher:
        """Return its side of a batch of `tokens` tokens."""
        ...


class Against(NamedTuple):
    """The divergences of a group of tokens."""

    loss: Tensor  # [n]: their sum, weighted
    divergence: Tensor  # [n]: their sum, without weights
    nll: Tensor  # [n], of the labels
    gradient: Tensor | None  # [n, V] of the loss, for the model's logits


def compare(
    logits: Tensor,
    chunk: Chunk,
    teacher: TeacherRows | TopK,
    cost: CostEmbedding | None,
    terms: Terms,
    gradient: bool,
) -> Against:
    """Return the divergences of logits [n, V] from a teacher; a live one's rows are used up."""
    objective, dtype = terms.objective, statistics_dtype(logits.dtype)
    z, y = logits.to(dtype, copy=True), chunk.labels[:, None]
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
    if objective.logit_scale != 1.0:
        lse = z.mul_(objective.logit_scale).logsumexp(1)
    log_q = z.sub_(lse[:, None])
    q = log_q.exp()
    rest = None  # the student's mass on all tokens that are not stored
    if isinstance(teacher, TopK):
        stored = [x.gather(1, teacher.ids) for x in (log_q, q)]
        rest = q.scatter_(1, teacher.ids, 0.0).sum(1, keepdim=True).clamp_(min=torch.finfo(dtype).tiny)
        log_entries, entries = (torch.cat(two, 1) for two in zip(stored, (rest.log(), rest), strict=True))
        log_p = teacher.log_p.to(dtype)
        pair = Pair(log_p, log_entries, entries, log_p.exp())
    else:
        log_p = teacher.normalised().z
        p = log_p.exp()
        costly = cost is not None and objective.transports
        pair = Pair(log_p, log_q, q, p, cost.transport(p) if costly and cost is not None else None)
    loss, divergence = torch.zeros_like(nll), torch.zeros_like(nll)
    rows = torch.zeros_like(pair.q) if gradient else None
    for weight, comparison in objective.against:
        gap = comparison.of(pair)
        loss += weight * gap.loss
        divergence += gap.loss
        if rows is not None:
            rows.add_(gap.u.sub_(pair.q * gap.u.sum(1, keepdim=True)), alpha=weight)
    if rows is not None:  # a row sums to zero; its likeliest entry would be what two large numbers leave
        top = pair.q.argmax(1, keepdim=True)
        rows.scatter_(1, top, 0.0).scatter_(1, top, -rows.sum(1, keepdim=True))
    keep = 1 - terms.label_smoothing
    if rows is not None and rest is not None and isinstance(teacher, TopK):
        # what the rest gets together, its tokens share in proportion
        rows = q.mul_(rows[:, -1:] / rest).scatter_(1, teacher.ids, rows[:, :-1])
    if rows is not None:
        rows.mul_(keep * objective.logit_scale)
        rows = rows if slope is None else rows.mul_(slope)
    return Against(keep * loss, divergence, nll, rows)
