"""Transport costs between tokens: c(i, j) = 1 - cos(e_i, e_j) >= 0, from a frozen embedding E [V, H].

E is the output head of a pre-trained model (the trained model's own by default). It never receives
a gradient and is not a parameter: sharded optimizers must not see it. Its hidden size need not be the
trained model's.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from common.errors import UserError
from pipeline.loss.cost_cache import CostCache
from pipeline.loss.gathering import whole
from pipeline.loss.products import half_dtype, in_float32, widens

DIGIT = 9.0  # distances between numbers up to which their cost is the distance
NORMALISE_ROWS = 4096  # rows normalised at a time, so that the float32 copy stays small


class CostEmbedding:
    """Unit-length embedding rows [V, H], and the cost rows that follow from them.

    A row of zero length has no direction: its cosine with every other row counts as 0, so its cost
    to every *other* token is 1 and to itself 0 like everybody's.
    """

    def __init__(self, rows: Tensor, cache_mb: float = 0.0) -> None:
        """Take rows that are already of unit (or zero) length; see `from_weight` for raw ones.

        With `cache_mb` above 0 the cost rows of frequent targets are kept in that much memory, in
        float16: every cost is then off by up to 5e-4 of itself, or 3e-8, gradients by less than 2e-3. With 0
        (the default) they are as exact as the rows.
        """
        if cache_mb < 0:
            raise UserError(f"the cost cache's memory must not be negative (given: {cache_mb:g} MB)")
        self.rows = rows
        self.cache_mb = cache_mb
        self.fingerprint: str | None = None  # of the tensor that `load_cost` read it from
        self._cache: CostCache | None = None
        self._placed: CostEmbedding | None = None
        self._excess: Tensor | None = None

    def cached(self, memory_mb: float) -> CostEmbedding:
        """The same embedding with a cache of `memory_mb` for cost rows (0: exact, no cache)."""
        found = type(self)(self.rows, memory_mb)
        found.fingerprint = self.fingerprint
        return found

    @classmethod
    def constant(cls, vocab_size: int) -> CostEmbedding:
        """Costs of 1 between different tokens: no geometry. Exact, since rows without length have none."""
        found = cls(torch.zeros(vocab_size, 1))
        found.fingerprint = f"constant {vocab_size}"
        return found

    def permuted(self, seed: int) -> CostEmbedding:
        """The same costs between other tokens: geometry of the right size in the wrong places."""
        order = torch.randperm(self.vocab_size, generator=torch.Generator().manual_seed(seed))
        found = CostEmbedding(self.rows[order.to(self.rows.device)], self.cache_mb)
        found.fingerprint = f"{self.fingerprint} permuted {seed}"
        return found

    @property
    def cache(self) -> CostCache | None:
        """The cache, made at its first use; None where rows are exact."""
        if self.cache_mb and self._cache is None:
            self._cache = CostCache(self.vocab_size, self.cache_mb, self.rows.device)
        return self._cache

    def placed(self, device: torch.device, model_dtype: torch.dtype) -> CostEmbedding:
        """This embedding on the model's device, no wider than the model is; the copy is kept.

        For a half-precision model the rows become float16 (entries are at most 1, so its three more bits are
        worth having), or bfloat16 on a CPU that multiplies only those fast.
        """
        dtype = half_dtype(device) if model_dtype.itemsize == 2 else self.rows.dtype
        if self.rows.device == device and self.rows.dtype == dtype:
            return self
        if self._placed is None or (self._placed.rows.device, self._placed.rows.dtype) != (device, dtype):
            rows = torch.empty_like(self.rows, dtype=dtype, device=device)
            for start in range(0, len(rows), NORMALISE_ROWS):
                part = slice(start, start + NORMALISE_ROWS)
                rows[part] = rounded(self.rows[part].to(device), dtype)
            self._placed = CostEmbedding(rows, self.cache_mb)
        return self._placed

    @classmethod
    def from_weight(
        cls, weight: Tensor, dtype: torch.dtype | None = None, cache_mb: float = 0.0
    ) -> CostEmbedding:
        """Normalise a copy of `weight` [V, H]; the copy has `dtype`, by default that of `unit_rows`.

        A parameter that ZeRO-3 or FSDP2 keeps in pieces is gathered first (a collective call). Raises
        UserError when the weight is not a matrix or holds NaN or infinity.
        """
        with whole(weight) as matrix:
            return cls(unit_rows(matrix, dtype), cache_mb)

    @property
    def vocab_size(self) -> int:
        return self.rows.shape[0]

    @property
    def hidden_size(self) -> int:
        return self.rows.shape[1]

    def cosines(self, targets: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the cosines [u, V] of the tokens `targets` [u] with all, in float32 (float64 if E is).

        In `out` if given. Half precision would tell those next to 1 apart in steps of 5e-4 or more.
        """
        rows = self.rows[targets]
        if rows.dtype.itemsize == 2:
            return in_float32(rows, self.rows, out)
        if out is None or out.dtype == rows.dtype:
            return torch.mm(rows, self.rows.t(), out=out)
        return out.copy_(torch.mm(rows, self.rows.t()))

    def costs(self, targets: Tensor, out: Tensor | None = None) -> Tensor:
        """Return cost rows [u, V] of the tokens `targets` [u], in `out` or float32 (float64 if E is).

        Never negative, and exactly 0 at the target itself whatever the rounding. For rows in half precision
        it is |e_i - e_y|^2 / 2, which does not take a rounded length for a distance.
        """
        dtype = torch.promote_types(self.rows.dtype, torch.float32)
        if out is None:
            out = self.rows.new_empty(len(targets), self.vocab_size, dtype=dtype)
        if out.dtype.itemsize < dtype.itemsize:  # the difference from 1 is taken before digits are given up
            return out.copy_(self.costs(targets))
        if self.rows.dtype == dtype:
            self.cosines(targets, out).neg_().add_(1)
        else:
            excess = self.excess()
            rows = self.rows[targets]
            if rows.device.type == "cpu" and not widens(rows):
                # the difference is taken inside the product, which is rounded to eight bits afterwards
                out.copy_(torch.ones_like(out, dtype=rows.dtype).addmm_(rows, self.rows.t(), alpha=-1))
                out.add_(excess)
            else:
                torch.sub(excess + 1, self.cosines(targets, out), out=out)
            out.add_(excess[targets][:, None])
        return out.clamp_(min=0).scatter_(1, targets[:, None], 0)

    def excess(self) -> Tensor:
        """Return (|e_i|^2 - 1) / 2 of every row [V], from rounding, in float32; 0 for rows without length."""
        if self._excess is None:
            parts = [
                torch.linalg.vector_norm(part.float(), dim=1) for part in self.rows.split(NORMALISE_ROWS)
            ]
            squares = torch.cat(parts).square_()
            self._excess = torch.where(squares > 0, (squares - 1) / 2, 0.0)
        return self._excess


def unit_rows(weight: Tensor, dtype: torch.dtype | None = None, checked: bool = True) -> Tensor:
    """Return `weight` [V, H] with its rows scaled to length one (zero rows stay zero).

    In `dtype`, by default the weight's own, or float16 for bfloat16: no entry is above 1. Not `checked`: what
    is not finite stays so in the rows, and nothing is asked of the device.
    """
    if weight.dim() != 2 or weight.numel() == 0:
        raise UserError(
            f"cost embedding needs a full [V, H] matrix (got shape {list(weight.shape)}); "
            "gather the parameter first if it is sharded"
        )
    usual = torch.float16 if weight.dtype == torch.bfloat16 else weight.dtype
    rows = torch.empty_like(weight, dtype=dtype or usual)
    work = torch.promote_types(torch.promote_types(weight.dtype, rows.dtype), torch.float32)
    finite, zeros = [], []
    for start in range(0, len(weight), NORMALISE_ROWS):
        part = weight[start : start + NORMALISE_ROWS].to(work)
        # scale by the largest entry first: squares of tiny or huge entries leave float32's range
        peak = part.abs().amax(1, keepdim=True)
        empty = peak == 0
        finite.append(torch.isfinite(peak).all())
        zeros.append(empty.sum())
        part = part / torch.where(empty, 1.0, peak)
        norm = torch.linalg.vector_norm(part, dim=1, keepdim=True)
        rows[start : start + NORMALISE_ROWS] = rounded(part / torch.where(empty, 1.0, norm), rows.dtype)
    if not checked:
        return rows
    if not torch.stack(finite).all():
        raise UserError("cost embedding holds NaN or infinite values")
    if found := int(sum(zeros)):
        warnings.warn(
            f"cost embedding: {found} of {len(rows)} rows have length zero; "
            "their cost to every other token is 1",
            stacklevel=2,
        )
    return rows


def rounded(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Return unit rows [n, H] in `dtype`; in float16 a small entry of each is moved to keep its length at 1.

    Rounding alone changes lengths by up to 1e-4, which would be added to the cost of near twins.
    """
    if dtype != torch.float16 or rows.dtype == dtype:
        return rows.to(dtype)
    wide = rows.to(dtype).float()
    excess = torch.linalg.vecdot(wide, wide).sub_(1)[:, None]
    chosen = wide.abs().sub_(0.5 * wide.shape[1] ** -0.5).abs_().argmin(1, keepdim=True)
    entry = wide.gather(1, chosen)
    moved = (entry.square() - excess).clamp_(min=0).sqrt_().copysign_(entry)
    fits = 2 * excess.abs() < entry.square()
    return wide.scatter_(1, chosen, torch.where(fits, moved, entry)).to(dtype)


class NumberCost(CostEmbedding):
    """Costs between tokens that are numbers, by the distance d = |v_i - v_y|; 0 wherever one is none.

        c = d                     where d <= 9
        c = 9 (1 + ln(d / 9))     beyond

    With `demd` beside likelihood in a sum this is the number token loss (NTL-WAS, arXiv 2411.02083) between
    digits: a wrong one costs more the further it is off. A vocabulary's long numbers would swamp it, since a
    token may be 66666666; beyond nine the cost grows with the ratio, smoothly, and never passes 800.
    """

    def __init__(self, rows: Tensor, cache_mb: float = 0.0) -> None:
        """Take the tokens' values [V] or [V, 1]; NaN for what is no number."""
        super().__init__(rows.view(-1, 1), cache_mb)

    def placed(self, device: torch.device, model_dtype: torch.dtype) -> CostEmbedding:
        """The values on the model's device, never narrowed: 1234 has no place in bfloat16."""
        return self if self.rows.device == device else NumberCost(self.rows.to(device), self.cache_mb)

    def cosines(self, targets: Tensor, out: Tensor | None = None) -> Tensor:
        """Return 1 - cost, for kernels that read costs in that form."""
        return self.costs(targets, out).neg_().add_(1)

    def costs(self, targets: Tensor, out: Tensor | None = None) -> Tensor:
        """Return costs [u, V] for the tokens `targets` [u], in the values' dtype or in `out`."""
        values = self.rows[:, 0]
        distance = (values - values[targets][:, None]).abs_().nan_to_num_(nan=0.0)
        costs = distance.clamp(max=DIGIT).add_(distance.clamp_(min=DIGIT).div_(DIGIT).log_().mul_(DIGIT))
        return costs if out is None else out.copy_(costs)


class LiveCost:
    """Stands for the head as it trains ("adaptive" cost): normalised anew, detached, at every call."""


LIVE = LiveCost()
