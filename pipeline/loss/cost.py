"""Transport costs between tokens: c(i, j) = 1 - cos(e_i, e_j) >= 0, from a frozen embedding E [V, H].

E is the output head of a pre-trained model (the trained model's own by default). It never receives a gradient
and is not a parameter: sharded optimizers must not see it. Its hidden size need not be the trained model's.

A `TokenPlan` sorts a batch's tokens by target, so that a small window of cost rows [w, V] suffices.
`ExactRows` computes every row once a batch, `CachedRows` keeps the rows of frequent targets in float16
between calls. The plan is made on the host (arrays there are NumPy's), which has the labels before the GPU:
it knows which costs a group of tokens needs without asking the device, whose queue never runs dry.

Padding. A row of V = 50257 numbers ends in the middle of a vector, and kernels would read the next one a
number at a time. On an accelerator rows therefore lie a multiple of ALIGNMENT numbers apart. Kernels may read
and write the numbers between two rows, and must not use them.

Products. On a CPU without instructions for bfloat16 a product takes four times as long in it as in float32
(measured with AVX-512). There the factors are widened, the larger one a block of rows at a time.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from emo.common.errors import UserError
from emo.common.labels import IGNORE

ALIGNMENT = 64  # numbers; 128 bytes in half precision, a line of the cache
BLOCK = 1024  # rows of the large factor at a time: the product stays in the cache


def padded_width(V: int) -> int:
    """Return V rounded up to whole multiples of ALIGNMENT."""
    return -(-V // ALIGNMENT) * ALIGNMENT


def row_stride(V: int, device: torch.device) -> int:
    """Return the numbers from one row to the next; V on a CPU, whose products want whole matrices."""
    return V if device.type == "cpu" else padded_width(V)


def rows_alive(V: int) -> int:
    """Return how many rows [V] an accelerator holds in float32 beside the logits."""
    return max(16, int(ROWS_MB * 2**20) // (4 * V))


def padded_rows(n: int, V: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return memory for n rows [n, V], uninitialised."""
    return torch.empty(n, row_stride(V, device), dtype=dtype, device=device)[:, :V]


def touchable(*rows: Tensor) -> int:
    """Return how many columns a kernel may touch in each of `rows` [n, V]: above V where all are padded."""
    V = rows[0].shape[1]
    width = padded_width(V)
    return width if all(part.stride(0) >= width for part in rows) else V


@functools.cache
def _lacks_instructions() -> bool:
    """Return whether this is an x86 CPU without bfloat16 products; other CPUs are left alone."""
    x86 = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    return x86 and not (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def widens(factor: Tensor) -> bool:
    """Return True where products with `factor` are faster through the functions below than `torch.mm`."""
    return factor.device.type == "cpu" and factor.element_size() == 2 and _lacks_instructions()


def in_float32(x: Tensor, rows: Tensor, out: Tensor | None = None) -> Tensor:
    """Return x rows^T for half-precision x [n, k] and rows [m, k] in float32, or in a float32 `out`."""
    out = x.new_empty(len(x), len(rows), dtype=torch.float32) if out is None else out
    if x.is_cuda:
        return torch.mm(x, rows.t(), out_dtype=torch.float32, out=out)
    against_rows(x, rows, out)
    return out


def against_rows(x: Tensor, rows: Tensor, out: Tensor, less: Tensor | None = None) -> None:
    """Write x rows^T - less, rounded once, to `out` [n, m] of any dtype; x [n, k], rows [m, k], less [n]."""
    wide = x.float()
    for start in range(0, len(rows), BLOCK):
        part = slice(start, start + BLOCK)
        product = torch.mm(wide, rows[part].float().t())
        out[:, part] = product if less is None else product.sub_(less[:, None])


def with_rows(x: Tensor, rows: Tensor) -> Tensor:
    """Return x rows [n, k] in float32;  x [n, m], rows [m, k]."""
    product = torch.zeros(len(x), rows.shape[1])
    for start in range(0, len(rows), BLOCK):
        part = slice(start, start + BLOCK)
        product.addmm_(x[:, part].float(), rows[part].float())
    return product


def is_partitioned(weight: Tensor) -> bool:
    """Return True where DeepSpeed ZeRO-3 partitions the parameter; only its engine's hooks gather it."""
    return hasattr(weight, "ds_id")


def is_distributed(weight: Tensor) -> bool:
    """Return True for a DTensor, as FSDP2 and tensor parallelism make them."""
    return hasattr(weight, "full_tensor")


@contextlib.contextmanager
def whole(weight: Tensor) -> Iterator[Tensor]:
    """Yield all of `weight`, detached. A collective call where ZeRO-3 or FSDP2 partitions it."""
    if is_partitioned(weight):
        import deepspeed  # has been imported already: it partitioned the parameter

        with deepspeed.zero.GatheredParameters([weight], modifier_rank=None):
            yield weight.detach()
    elif is_distributed(weight):
        yield weight.detach().full_tensor()  # type: ignore[attr-defined]
    else:
        yield weight.detach()


class OnDevice(NamedTuple):
    """A plan's arrays as tensors, int64."""

    positions: Tensor  # [T] in the flat batch
    labels: Tensor  # [T] ascending
    which: Tensor  # [T] index of each token's target
    targets: Tensor  # [U] ascending


@dataclass(frozen=True, eq=False)
class TokenPlan:
    """The valid tokens of a batch, sorted by label: stands for labels wherever a fused head takes them."""

    size: int  # labels in the batch, valid or not
    positions: np.ndarray  # [T] in the flat batch
    labels: np.ndarray  # [T] ascending
    which: np.ndarray  # [T] index of each token's target in `targets`
    targets: np.ndarray  # [U] the distinct targets, ascending
    counts: np.ndarray  # [U] tokens that have each
    packed: Tensor  # the memory of the first four, one after the other

    def __len__(self) -> int:
        """Return the number of valid tokens."""
        return len(self.positions)

    def check(self, vocab_size: int) -> None:
        """Raise UserError for a label that has no row in a vocabulary of this size."""
        for label in (*self.labels[:1], *self.labels[-1:]):
            if not 0 <= label < vocab_size:
                raise UserError(f"label {label} lies outside the {vocab_size} tokens", code="label-range")

    def per_document(self, bounds: Tensor) -> np.ndarray:
        """Return the valid tokens of each document, int64 [documents]; bounds on the host, of `segments`."""
        document = np.searchsorted(bounds.numpy(), self.positions, side="right") - 1
        return np.bincount(document, minlength=len(bounds) - 1)

    def on(self, device: torch.device) -> OnDevice:
        """Return the arrays on `device`, sent there by one asynchronous copy."""
        T, U = len(self.positions), len(self.targets)
        return OnDevice(*self.packed.to(device, non_blocking=True).split([T, T, T, U]))


Labels = Tensor | TokenPlan


def label_count(labels: Labels) -> int:
    """Return the number of labels in the batch, valid or not."""
    return labels.size if isinstance(labels, TokenPlan) else labels.numel()


def plan_tokens(labels: Tensor, pin: bool = False) -> TokenPlan:
    """Return the plan for integer `labels` [...]; -100 leaves a token out.

    Labels on a device are fetched first, the only wait for it. `pin`: hold the plan in pinned memory, from
    which it reaches a GPU without delay.
    """
    if labels.is_floating_point() or labels.is_complex():
        raise UserError(f"labels must be whole numbers (given: {labels.dtype})", code="dtypes")
    flat = labels.detach().reshape(-1).cpu().numpy()
    positions = np.flatnonzero(flat != IGNORE)
    chosen = flat[positions]
    order = np.argsort(chosen, kind="stable")
    ordered = chosen[order]
    first = np.ones(len(ordered), dtype=bool)
    first[1:] = ordered[1:] != ordered[:-1]
    begins = np.flatnonzero(first)
    T, U = len(ordered), len(begins)
    packed = torch.empty(3 * T + U, dtype=torch.int64, pin_memory=pin)
    sorted_positions, sorted_labels, which, targets = np.split(packed.numpy(), [T, 2 * T, 3 * T])
    sorted_positions[:], sorted_labels[:] = positions[order], ordered
    which[:], targets[:] = np.cumsum(first) - 1, ordered[begins]
    counts = np.diff(begins, append=T)
    return TokenPlan(len(flat), sorted_positions, sorted_labels, which, targets, counts, packed)


NORMALISE_ROWS = 4096  # rows normalised at a time, so that the float32 copy stays small
WINDOW_MB = 8.0  # of exact rows alive at a time on a CPU
ROWS_MB = (
    128.0  # of float32 rows alive at a time on an accelerator, of costs or of the kernels' scratch memory
)
CACHE_WINDOW_CPU = 64  # missing rows computed together
CONVERTED_CPU = 16  # rows brought to float16 at a time, so that they stay in the cache
TWIN_COST = 1e-3  # below it, the costs do not tell two tokens apart


class CostEmbedding:
    """Unit-length embedding rows [V, H], and the cost rows that follow from them.

    A row of zero length has no direction: its cosine with every other row counts as 0, so its cost
    to every *other* token is 1 and to itself 0.
    """

    def __init__(self, rows: Tensor, cache_mb: float = 0.0) -> None:
        """Take rows [V, H] that are already of unit (or zero) length; see `from_weight` for raw ones.

        With `cache_mb` above 0 the cost rows of frequent targets are kept in that much memory, in
        float16: every cost is then off by up to 5e-4 of itself, or 3e-8, gradients by less than 2e-3. With 0
        (the default) they are as exact as the rows.
        """
        if cache_mb < 0:
            raise UserError(f"the cost cache needs 0 MB or more (given: {cache_mb:g})", code="option-range")
        self.rows = rows
        self.cache_mb = cache_mb
        self.fingerprint: str | None = None  # of the tensor that `load_cost` read it from
        self._cache: CostCache | None = None
        self._placed: CostEmbedding | None = None
        self._excess: Tensor | None = None

    def cached(self, memory_mb: float) -> CostEmbedding:
        """Return the same embedding with a cache of `memory_mb` for cost rows (0: exact, no cache)."""
        copy = type(self)(self.rows, memory_mb)
        copy.fingerprint = self.fingerprint
        return copy

    @classmethod
    def constant(cls, vocab_size: int) -> CostEmbedding:
        """Return costs of 1 between different tokens: no geometry. Exact: rows of zero length have none."""
        cost = cls(torch.zeros(vocab_size, 1))
        cost.fingerprint = f"constant {vocab_size}"
        return cost

    def permuted(self, seed: int) -> CostEmbedding:
        """Return the same costs between other tokens, permuted by `seed`: a control for the geometry."""
        order = torch.randperm(self.vocab_size, generator=torch.Generator().manual_seed(seed))
        cost = CostEmbedding(self.rows[order.to(self.rows.device)], self.cache_mb)
        cost.fingerprint = f"{self.fingerprint} permuted {seed}"
        return cost

    @property
    def cache(self) -> CostCache | None:
        """Return the cache, made at its first use; None where rows are exact."""
        if self.cache_mb and self._cache is None:
            self._cache = CostCache(self.vocab_size, self.cache_mb, self.rows.device)
        return self._cache

    def placed(self, device: torch.device, model_dtype: torch.dtype) -> CostEmbedding:
        """Return this embedding on the model's device, no wider than the model is; the copy is remembered.

        For a half-precision model the rows become float16 (entries are at most 1, so its three more bits are
        worth having), or bfloat16 on a CPU that multiplies only those fast.
        """
        dtype = self.rows.dtype
        if model_dtype.itemsize == 2:
            fast = device.type == "cpu" and not _lacks_instructions()
            dtype = torch.bfloat16 if fast else torch.float16
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
        """Return the embedding of a normalised copy of `weight` [V, H], with the errors of `unit_rows`.

        A parameter that ZeRO-3 or FSDP2 keeps in pieces is gathered first (a collective call).
        """
        with whole(weight) as matrix:
            return cls(unit_rows(matrix, dtype), cache_mb)

    @property
    def vocab_size(self) -> int:
        """Return V."""
        return self.rows.shape[0]

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

    def transport(self, P: Tensor) -> Tensor:
        """Return C P [n, V] of distributions P [n, V]: what it costs to bring their mass to each token."""
        rows = self.rows
        direction = torch.mm(P.to(rows.dtype), rows)
        half = rows.dtype.itemsize == 2
        out = padded_rows(len(P), len(rows), torch.float32 if half else rows.dtype, rows.device)
        product = in_float32(direction, rows, out) if half else torch.mm(direction, rows.t(), out=out)
        cosines = product.to(P.dtype)
        # 1 - |e_i|^2: rounding for unit rows; 1 for rows of length zero, whose cost to themselves is 0 too
        diagonal = 1 - torch.linalg.vecdot(rows, rows).to(P.dtype)
        return cosines.neg_().add_(1).addcmul_(P, diagonal, value=-1).clamp_(min=0)

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
            if self._excess is None:  # (|e_i|^2 - 1) / 2 [V], from rounding; 0 for rows without length
                parts = self.rows.split(NORMALISE_ROWS)
                squares = torch.cat([torch.linalg.vector_norm(p.float(), dim=1) for p in parts]).square_()
                self._excess = torch.where(squares > 0, (squares - 1) / 2, 0.0)
            rows = self.rows[targets]
            if rows.device.type == "cpu" and not widens(rows):
                # the difference is taken inside the product, which is rounded to eight bits afterwards
                out.copy_(torch.ones_like(out, dtype=rows.dtype).addmm_(rows, self.rows.t(), alpha=-1))
                out.add_(self._excess)
            else:
                torch.sub(self._excess + 1, self.cosines(targets, out), out=out)
            out.add_(self._excess[targets][:, None])
        return out.clamp_(min=0).scatter_(1, targets[:, None], 0)


def unit_rows(weight: Tensor, dtype: torch.dtype | None = None, checked: bool = True) -> Tensor:
    """Return `weight` [V, H] with its rows scaled to length one (zero rows stay zero).

    In `dtype`, by default the weight's own, or float16 for bfloat16: no entry is above 1. Raises UserError
    for a weight that is no matrix and, where `checked`, for one that is not finite; unchecked, NaN and
    infinity stay in the rows, and the host does not wait for the device.
    """
    if weight.dim() != 2 or weight.numel() == 0:
        problem = (
            f"cost embedding needs a matrix [V, H] (got {list(weight.shape)}); gather it first if sharded"
        )
        raise UserError(problem, code="cost-shape")
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
        raise UserError("cost embedding holds NaN or infinite values", code="not-finite")
    if count := int(sum(zeros)):
        problem = f"{count} of {len(rows)} rows have length zero; their cost to every other token is 1"
        warnings.warn(f"cost embedding: {problem}", stacklevel=2)
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
    """Costs between tokens that are numbers, by the distance d = |v_i - v_y|; 0 beside other tokens.

        c = d                     where d <= 9
        c = 9 (1 + ln(d / 9))     beyond

    With `demd` beside likelihood in a sum this is the number token loss (NTL-WAS, arXiv 2411.02083) between
    digits. A vocabulary's long numbers, as 66666666, would swamp it: beyond nine the cost grows with the
    ratio, smoothly, and never passes 800.
    """

    def __init__(self, rows: Tensor, cache_mb: float = 0.0) -> None:
        """Take the tokens' values [V] or [V, 1]; NaN for tokens that are no numbers."""
        super().__init__(rows.view(-1, 1), cache_mb)

    def placed(self, device: torch.device, model_dtype: torch.dtype) -> CostEmbedding:
        """Return the values on the model's device, never narrowed: 1234 has no place in bfloat16."""
        return self if self.rows.device == device else NumberCost(self.rows.to(device), self.cache_mb)

    def cosines(self, targets: Tensor, out: Tensor | None = None) -> Tensor:
        """Return 1 - cost, for kernels that read costs in that form."""
        return self.costs(targets, out).neg_().add_(1)

    def costs(self, targets: Tensor, out: Tensor | None = None) -> Tensor:
        """Return costs [u, V] for the tokens `targets` [u], in the values' dtype or in `out`."""
        values = self.rows[:, 0]
        distance = (values - values[targets][:, None]).abs_().nan_to_num_(nan=0.0)
        costs = distance.clamp(max=9.0).add_(distance.clamp_(min=9.0).div_(9.0).log_().mul_(9.0))
        return costs if out is None else out.copy_(costs)

    def transport(self, P: Tensor) -> Tensor:
        """Return C P [n, V]; tokens that are no numbers neither send nor take."""
        (numbers,) = (~self.rows[:, 0].isnan()).nonzero(as_tuple=True)
        between = self.costs(numbers)[:, numbers].to(P.dtype)
        return torch.zeros_like(P).index_copy_(1, numbers, P[:, numbers] @ between)


class LiveCost:
    """The trained head as cost embedding ("adaptive" cost): normalised anew, detached, at every call."""


LIVE = LiveCost()


class CostCache:
    """A table of cost rows of frequent targets in float16, within a memory budget, that lives between calls.

    A row is rounded whether it was in the table or not, so results do not depend on earlier batches. When the
    table is full, a target that has become more frequent replaces the least frequent one.
    """

    def __init__(self, vocab_size: int, memory_mb: float, device: torch.device) -> None:
        row_bytes = row_stride(vocab_size, device) * torch.float16.itemsize
        self.window = min(vocab_size, CACHE_WINDOW_CPU if device.type == "cpu" else rows_alive(vocab_size))
        self.capacity = min(vocab_size, max(0, int(memory_mb * 2**20) // row_bytes - self.window))
        rows = self.capacity + self.window  # the last `window` rows: targets outside the table
        self.rows = padded_rows(rows, vocab_size, torch.float16, device)
        # the host knows which row belongs to which target, so that nothing has to be asked of the device
        self.slot = np.full(vocab_size, -1)
        self.owner = np.full(self.capacity, -1)
        self.frequency = np.zeros(vocab_size, np.int64)
        self.used = 0

    def allocate(self, missing: np.ndarray, current: np.ndarray) -> np.ndarray:
        """Return a row of the table for each of the targets `missing` [k] from it, k <= window, int64 [k].

        Targets of the batch under way (`current`) stay; rare ones get a passing row behind the table.
        """
        slots = np.arange(len(missing)) + self.capacity
        free = min(self.capacity - self.used, len(missing))
        slots[:free] = np.arange(self.used, self.used + free)
        self.slot[missing[:free]], self.owner[slots[:free]] = slots[:free], missing[:free]
        self.used += free
        remaining = len(missing) - free
        if remaining and self.capacity:
            count = self.frequency[self.owner]
            in_use = self.slot[current]  # those just assigned among them
            count[in_use[in_use >= 0]] = np.iinfo(np.int64).max
            victims = np.argsort(count, kind="stable")[:remaining]
            eager = np.argsort(-self.frequency[missing[free:]], kind="stable")[: len(victims)]
            wins = self.frequency[missing[free:]][eager] > count[victims]
            chosen, taken = eager[wins] + free, victims[wins]
            slots[chosen] = taken
            self.slot[self.owner[taken]] = -1
            self.slot[missing[chosen]], self.owner[taken] = taken, missing[chosen]
        return slots


class Costs(NamedTuple):
    """Cost rows of the distinct targets of some tokens, and which of them each token uses."""

    rows: Tensor  # [u, V]; any dtype
    which: Tensor  # [n] int64
    similarity: bool = False  # the rows hold cosines s instead of costs max(0, 1 - s), the target's included


def _reach(plan: TokenPlan, start: int, stop: int, targets: int) -> int:
    """Return the end of the longest group of tokens in [start, stop) that has at most so many targets."""
    return start + int(np.searchsorted(plan.which[start:stop], plan.which[start] + targets))


class ExactRows:
    """Every row computed from the embedding, in its precision, once; a window of `size` of them is held."""

    def __init__(
        self, cost: CostEmbedding, plan: TokenPlan, order: OnDevice, dtype: torch.dtype | None, size: int
    ) -> None:
        self.cost, self.plan, self.order, self.size = cost, plan, order, size
        self.similarity = dtype is None  # leave the cosines as the product gives them
        self.first = self.last = 0  # the targets in the window
        dtype = dtype or torch.promote_types(cost.rows.dtype, torch.float32)
        self.rows = padded_rows(size, cost.vocab_size, dtype, cost.rows.device)

    def reach(self, start: int, stop: int) -> int:
        """Return the end, at most `stop`, of a group from token `start` whose rows fit into the window."""
        return _reach(self.plan, start, stop, self.size)

    def group(self, start: int, stop: int) -> Costs:
        """Return the rows for tokens [start, stop) of the plan, valid until the next call."""
        low, high = int(self.plan.which[start]), int(self.plan.which[stop - 1]) + 1
        if high > self.last:
            overlap = self.last - low
            if overlap > 0:
                kept = self.rows[low - self.first : self.last - self.first]
                self.rows[:overlap] = kept if overlap <= low - self.first else kept.clone()
            first, self.first = max(low, self.last), low
            self.last = min(low + self.size, len(self.plan.targets))
            targets, out = self.order.targets[first : self.last], self.rows[first - low : self.last - low]
            compute = self.cost.cosines if self.similarity else self.cost.costs
            compute(targets, out)
        rows = self.rows[low - self.first : high - self.first]
        return Costs(rows, self.order.which[start:stop] - low, self.similarity)


class CachedRows:
    """Rows from a `CostCache`; missing ones are computed, a window of them at a time."""

    def __init__(
        self,
        cost: CostEmbedding,
        cache: CostCache,
        plan: TokenPlan,
        order: OnDevice,
        dtype: torch.dtype | None,
    ) -> None:
        self.cost, self.cache, self.plan, self.order, self.dtype = cost, cache, plan, order, dtype
        cache.frequency[plan.targets] += plan.counts
        self.slots = cache.slot[plan.targets]  # -1: not in the table
        self._slots_on_device: Tensor | None = None

    def reach(self, start: int, stop: int) -> int:
        """Return the end, at most `stop`, of a group of tokens from `start` that reads the table itself."""
        return stop if self.dtype is not None else _reach(self.plan, start, stop, self.cache.window)

    def group(self, start: int, stop: int) -> Costs:
        """Return the rows for tokens [start, stop): the whole table, or a copy of them in `dtype`."""
        low, high = int(self.plan.which[start]), int(self.plan.which[stop - 1]) + 1
        which = self.order.which[start:stop]
        if self.dtype is None and high - low <= self.cache.window:
            return Costs(self.cache.rows, self._filled(low, high)[which])
        shape = (high - low, self.cost.vocab_size)
        rows = torch.empty(shape, dtype=self.dtype or torch.float32, device=which.device)
        for first in range(low, high, self.cache.window):
            last = min(first + self.cache.window, high)
            rows[first - low : last - low] = self.cache.rows[self._filled(first, last)[first:last]]
        return Costs(rows, which - low)

    def _filled(self, low: int, high: int) -> Tensor:
        """Return all slots on the device, once targets [low, high), at most a window, are in the table."""
        device = self.cost.rows.device
        if (self.slots[low:high] < 0).any():
            # passing rows are overwritten with this window; mark their targets missing again
            self.slots[self.slots >= self.cache.capacity] = -1
            missing = np.flatnonzero(self.slots[low:] < 0)[: self.cache.window] + low
            slots = self.cache.allocate(self.plan.targets[missing], self.plan.targets)
            self.slots[missing] = slots
            self._slots_on_device = None
            costs = self.cost.costs(self.order.targets[_sent(missing, device)])
            to = _sent(slots, device)
            step = CONVERTED_CPU if device.type == "cpu" else len(missing)
            for start in range(0, len(missing), step):
                part = slice(start, start + step)
                self.cache.rows[to[part]] = costs[part].to(torch.float16)
        if self._slots_on_device is None:
            self._slots_on_device = _sent(self.slots, device)
        return self._slots_on_device


def _sent(array: np.ndarray, device: torch.device) -> Tensor:
    """Return a copy of an array on `device` that the host does not wait for."""
    tensor = torch.from_numpy(array.copy())
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def open_rows(
    cost: CostEmbedding, plan: TokenPlan, order: OnDevice, dtype: torch.dtype | None, most: int, chunk: int
) -> ExactRows | CachedRows:
    """Return the cost rows of a plan's targets, for requests of at most `most` tokens.

    `order` is the plan on the device. They come as costs in the statistics' `dtype`; for None in whatever
    form they have, for kernels that convert while reading. Windows of rows are no larger than WINDOW_MB on a
    CPU, nor than a `chunk` of logits; elsewhere a request is served alone.
    """
    if cost.cache is not None:
        return CachedRows(cost, cost.cache, plan, order, dtype)
    on_cpu = cost.rows.device.type == "cpu"
    itemsize = (dtype or torch.float32).itemsize
    fitting = int(WINDOW_MB * 2**20) // (cost.vocab_size * itemsize) if on_cpu else 1
    return ExactRows(cost, plan, order, dtype, min(max(most, min(chunk, fitting)), len(plan.targets)))


def twins(cost: CostEmbedding, tokens: Tensor) -> Tensor:
    """Return which of `tokens` [n] have another one among them at a cost below TWIN_COST, bool [n]."""
    rows = cost.rows[tokens.to(cost.rows.device)]
    costs = CostEmbedding(rows).costs(torch.arange(len(tokens), device=rows.device))
    return (costs.fill_diagonal_(torch.inf).amin(1) < TWIN_COST).cpu()
