"""The row passes in PyTorch: logits in, p' (softmax without the target) in between, gradients out."""

from __future__ import annotations

import torch
from torch import Tensor

from pipeline.loss.cost import Costs
from pipeline.loss.rowwise import Chunk, RowUpdate, Statistics, Terms

L2_BYTES = 512 * 1024  # rows of one pass; half of a typical L2 cache


class TorchRows:
    """A group of rows in PyTorch, on a CPU few enough for the cache: z in, p' in between, G out."""

    def __init__(
        self,
        z: Tensor,
        logits: Tensor,
        chunk: Chunk,
        costs: Costs | None,
        terms: Terms,
        spare: Tensor | None = None,
    ) -> None:
        self.z = z  # [k, V] statistics' dtype; `logits` itself where that has the same dtype
        self.logits = logits  # [k, V] model dtype: read once, written once
        self.chunk, self.costs, self.terms = chunk, costs, terms
        self.y = chunk.labels[:, None]
        V, on_cpu = z.shape[1], z.device.type == "cpu"
        self.step = max(1, L2_BYTES // (V * z.element_size())) if on_cpu else len(z)
        self.row_loop = on_cpu and V >= 4096  # below, Python would cost more than it saves
        self.slope: Tensor | None = None  # d capped / d uncapped logit
        self.p_log_p = spare  # [k, V] becomes p' log p', where the objective asks for the entropy

    def statistics(self) -> Statistics:
        """Return the statistics of the rows, and turn these into p', the softmax without the target."""
        # bring the logits to float32, complete them and take the target out
        target_logit, shift, bias = self.chunk.target_logit, self.chunk.shift, self.chunk.bias
        z, cap = self.z, self.terms.softcap
        if z is not self.logits:
            z.copy_(self.logits)
        if bias is not None:
            z.add_(bias)
        offset = torch.zeros_like(target_logit) if shift is None else shift.to(z.dtype)
        z_y = target_logit - offset
        if cap is not None:
            z.add_(offset[:, None]).scatter_(1, self.y, target_logit[:, None])
            z.div_(cap).tanh_()
            self.slope = 1 - z.square()
            z.mul_(cap)
            offset, z_y = torch.zeros_like(offset), z.gather(1, self.y)[:, 0]
        z_mean = None
        if self.terms.label_smoothing:
            z_mean = z.scatter_(1, self.y, z_y[:, None]).mean(1)
        # low enough to have no weight, yet finite: a vocabulary of one token stays defined
        z.scatter_(1, self.y, torch.finfo(z.dtype).min / 2)
        objective = self.terms.objective
        scale = objective.logit_scale
        lse, top, plain, plain_d, entropy = [], [], [], [], []
        for start in range(0, len(z), self.step):
            part = z[start : start + self.step]
            if scale != 1.0:
                plain.append(torch.logsumexp(part, 1))
                plain_d.append(self._dot(torch.softmax(part, 1), start))
                part.mul_(scale)
            peak = part.amax(1)
            spare = None if self.p_log_p is None else self.p_log_p[start : start + self.step].copy_(part)
            torch.softmax(part, 1, out=part)
            largest = part.amax(1)
            # the largest p' is exp(0) over the sum of exponentials
            lse.append(peak - largest.log())
            top.append(largest)
            if spare is not None:
                spare.sub_(lse[-1][:, None]).mul_(part)
                entropy.append(-spare.sum(1))
        gap = torch.cat(lse) - scale * z_y
        return Statistics(
            gap,
            self._dot(z, 0),
            z_y,
            offset,
            z_mean,
            entropy=torch.cat(entropy) if entropy else None,
            squares=torch.linalg.vecdot(z, z) if "S" in objective.needs else None,
            top=torch.cat(top) if "top" in objective.needs else None,
            plain_gap=torch.cat(plain) - z_y if plain else None,
            plain_d=torch.cat(plain_d) if plain_d else None,
        )

    def _dot(self, p: Tensor, start: int) -> Tensor:
        """Return sum_i p_i c_i of rows of probabilities [n, V], the `start`-th and following, [n]."""
        if self.costs is None:
            return p.new_zeros(len(p))
        which = self.costs.which[start : start + len(p)]
        if not self.row_loop:
            return torch.linalg.vecdot(p, self.costs.rows[which])
        pairs = zip(p.unbind(), which.tolist(), strict=True)
        return torch.stack([row.dot(self.costs.rows[i]) for row, i in pairs])

    def write(self, update: RowUpdate) -> None:
        """Overwrite p' by G, in the model's dtype."""
        z = self.z
        costs, beta = self.costs, update.beta
        if costs is not None and beta is not None and not self.row_loop:
            z.mul_(costs.rows[costs.which].mul_(beta[:, None]).add_(1))
        elif costs is not None and beta is not None:
            for p, i, b in zip(z.unbind(), costs.which.tolist(), beta.tolist(), strict=True):
                p.addcmul_(p, costs.rows[i], value=b)
        if update.kappa is not None and self.p_log_p is not None:
            z.addcmul_(self.p_log_p, update.kappa[:, None])
        if update.scale is not None:
            z.mul_(update.scale[:, None])
        if update.uniform:
            z.sub_(update.uniform)
        z.scatter_(1, self.y, update.target[:, None])
        if self.slope is not None:
            z.mul_(self.slope)
        if z is not self.logits:
            self.logits.copy_(z)
