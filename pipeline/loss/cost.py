"""Transport costs between tokens: c(i, j) = 1 - cos(e_i, e_j) >= 0, from a frozen embedding E [V, H].

E is the output head of a pre-trained model, by default of the trained model itself. It never receives a
gradient and is not a parameter, so sharded optimizers do not see it. Its hidden size may differ from the
trained model's.

A `TokenPlan` sorts the tokens of a batch by target, so that a small window of cost rows [w, V] suffices.
`ExactRows` computes every row once per batch. `CachedRows` keeps the rows of frequent targets in float16
between calls. The plan is made on the host, in NumPy, where the labels are known before they reach the GPU.
The host therefore knows which cost rows each group of tokens needs, and never waits for the device.

Padding. A row of V = 50257 numbers ends in the middle of a vector, and kernels would read the next row one
number at a time. On an accelerator, rows therefore start a multiple of ALIGNMENT numbers apart. Kernels may
read and write the numbers between two rows but must not use them.

Products. On a CPU without bfloat16 instructions a bfloat16 product takes four times as long as a float32 one
(measured with AVX-512). There the factors are converted to float32, the larger one in blocks of rows.
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

from emo.common.causal_lm import IGNORE
from emo.common.errors import UserError

ALIGNMENT = 64  # numbers: 128 bytes in half precision, one cache line
BLOCK = 1024  # rows of the large factor in one product, so that the result stays in the cache
NORMALISE_ROWS = 4096  # rows normalised at a time, so that the float32 copy stays small
WINDOW_MB = 8.0  # budget of exact cost rows on a CPU
ROWS_MB = 128.0  # budget of float32 rows on an accelerator, for costs or the kernels' scratch memory
CACHE_WINDOW_CPU = 64  # missing rows computed together
CONVERTED_CPU = 16  # rows converted to float16 at a time, so that they stay in the cache
TWIN_COST = 1e-3  # two tokens with a smaller cost are indistinguishable


def padded_width(V: int) -> int:
    """Round V up to a multiple of ALIGNMENT."""
    return -(-V // ALIGNMENT) * ALIGNMENT


def row_stride(V: int, device: torch.device) -> int:
    """Return the distance between two rows: V on a CPU, whose products need contiguous matrices."""
    return V if device.type == "cpu" else padded_width(V)


def max_live_rows(V: int) -> int:
    """Return how many float32 rows [V] an accelerator holds in addition to the logits."""
    return max(16, int(ROWS_MB * 2**20) // (4 * V))


def padded_rows(n: int, V: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate n rows [n, V] without initialising them."""
    return torch.empty(n, row_stride(V, device), dtype=dtype, device=device)[:, :V]


def kernel_width(*rows: Tensor) -> int:
    """Return how many columns a kernel may access in each of `rows` [n, V]: more than V if all are padded."""
    V = rows[0].shape[1]
    width = padded_width(V)
    return width if all(part.stride(0) >= width for part in rows) else V


@functools.cache
def lacks_bfloat16() -> bool:
    """Return whether this is an x86 CPU without bfloat16 products. Other CPUs are assumed to have them."""
    x86 = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    return x86 and not (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def needs_widening(factor: Tensor) -> bool:
    """Return whether the products below are faster with `factor` than `torch.mm`."""
    return factor.device.type == "cpu" and factor.element_size() == 2 and lacks_bfloat16()


def mm_in_float32(x: Tensor, rows: Tensor, out: Tensor | None = None) -> Tensor:
    """Return x rows^T in float32 for half-precision x [n, k] and rows [m, k]; `out` is float32."""
    out = x.new_empty(len(x), len(rows), dtype=torch.float32) if out is None else out
    if x.is_cuda:
        return torch.mm(x, rows.t(), out_dtype=torch.float32, out=out)
    write_widened_product(x, rows, out)
    return out


def write_widened_product(x: Tensor, rows: Tensor, out: Tensor, shift: Tensor | None = None) -> None:
    """Write x rows^T - shift, rounded once, to `out` [n, m]; x [n, k], rows [m, k], shift [n]."""
    wide = x.float()
    for start in range(0, len(rows), BLOCK):
        part = slice(start, start + BLOCK)
        product = torch.mm(wide, rows[part].float().t())
        out[:, part] = product if shift is None else product.sub_(shift[:, None])


def mm_widened(x: Tensor, rows: Tensor) -> Tensor:
    """Return x rows [n, k] in float32; x [n, m], rows [m, k]."""
    product = torch.zeros(len(x), rows.shape[1])
    for start in range(0, len(rows), BLOCK):
        part = slice(start, start + BLOCK)
        product.addmm_(x[:, part].float(), rows[part].float())
    return product


def is_partitioned(weight: Tensor) -> bool:
    """Return whether DeepSpeed ZeRO-3 partitions the parameter. Only the hooks of its engine gather it."""
    return hasattr(weight, "ds_id")


def is_distributed(weight: Tensor) -> bool:
    """Return whether `weight` is a DTensor, as FSDP2 and tensor parallelism make them."""
    return hasattr(weight, "full_tensor")


@contextlib.contextmanager
def gathered(weight: Tensor) -> Iterator[Tensor]:
    """Yield the full `weight`, detached. This is a collective call if ZeRO-3 or FSDP2 partitions it."""
    if is_partitioned(weight):
        import deepspeed  # already imported: it partitioned the parameter

        with deepspeed.zero.GatheredParameters([weight], modifier_rank=None):
            yield weight.detach()
    elif is_distributed(weight):
        yield weight.detach().full_tensor()  # type: ignore[attr-defined]
    else:
        yield weight.detach()


class DevicePlan(NamedTuple):
    """The arrays of a `TokenPlan` as int64 tensors."""

    positions: Tensor  # [T] in the flat batch
    labels: Tensor  # [T] ascending
    target_index: Tensor  # [T] index of each token's target
    targets: Tensor  # [U] ascending


@dataclass(frozen=True, eq=False)
class TokenPlan:
    """The valid tokens of a batch, sorted by label. The fused head accepts it in place of labels."""

    size: int  # labels in the batch, valid or not
    positions: np.ndarray  # [T] in the flat batch
    labels: np.ndarray  # [T] ascending
    target_index: np.ndarray  # [T] index of each token's target in `targets`
    targets: np.ndarray  # [U] the distinct targets, ascending
    counts: np.ndarray  # [U] tokens per target
    packed: Tensor  # the memory of positions, labels, target_index and targets, in this order

    def __len__(self) -> int:
        """Return the number of valid tokens."""
        return len(self.positions)

    def check(self, vocab_size: int) -> None:
        """Raise UserError for a label outside a vocabulary of this size."""
        for label in (*self.labels[:1], *self.labels[-1:]):
            if not 0 <= label < vocab_size:
                problem = f"label {label} is outside the vocabulary of {vocab_size} tokens"
                raise UserError(problem, code="label-range")

    def per_document(self, bounds: Tensor, weights: Tensor | None = None) -> np.ndarray:
        """Count the valid tokens of each document, int64 [documents]; `bounds` of `segments`, on the host.

        With `weights` [N] of the labels, return their sums, float64.
        """
        document = np.searchsorted(bounds.numpy(), self.positions, side="right") - 1
        counts = None if weights is None else weights.reshape(-1).numpy()[self.positions]
        return np.bincount(document, counts, len(bounds) - 1)

    def to_device(self, device: torch.device) -> DevicePlan:
        """Send the arrays to `device` in one asynchronous copy."""
        T = len(self.positions)
        U = len(self.targets)
        return DevicePlan(*self.packed.to(device, non_blocking=True).split([T, T, T, U]))


Labels = Tensor | TokenPlan


def label_count(labels: Labels) -> int:
    """Return the number of labels in the batch, valid or not."""
    return labels.size if isinstance(labels, TokenPlan) else labels.numel()


def plan_tokens(labels: Tensor, pin: bool = False) -> TokenPlan:
    """Plan the loss of integer `labels` [...]. The label -100 leaves a token out.

    Labels on a device are fetched first, which is the only wait for the device. `pin` keeps the plan in
    pinned memory, from which it reaches a GPU without delay.
    """
    if labels.is_floating_point() or labels.is_complex():
        raise UserError(f"labels must be integers (got: {labels.dtype})", code="dtypes")
    flat = labels.detach().reshape(-1).cpu().numpy()
    positions = np.flatnonzero(flat != IGNORE)
    valid = flat[positions]
    order = np.argsort(valid, kind="stable")
    ordered = valid[order]
    is_first = np.ones(len(ordered), dtype=bool)
    is_first[1:] = ordered[1:] != ordered[:-1]
    starts = np.flatnonzero(is_first)
    T = len(ordered)
    U = len(starts)
    packed = torch.empty(3 * T + U, dtype=torch.int64, pin_memory=pin)
    sorted_positions, sorted_labels, target_index, targets = np.split(packed.numpy(), [T, 2 * T, 3 * T])
    sorted_positions[:] = positions[order]
    sorted_labels[:] = ordered
    target_index[:] = np.cumsum(is_first) - 1
    targets[:] = ordered[starts]
    counts = np.diff(starts, append=T)
    return TokenPlan(len(flat), sorted_positions, sorted_labels, target_index, targets, counts, packed)


class CostEmbedding:
    """Unit-length embedding rows [V, H] and the cost rows that follow from them.

    A row of zero length has no direction. Its cosine with every other row counts as 0, so its cost to every
    other token is 1, and to itself 0.
    """

    def __init__(self, rows: Tensor, cache_mb: float = 0.0) -> None:
        """Take rows [V, H] of unit (or zero) length; see `from_weight` for other rows.

        With `cache_mb` above 0 the cost rows of frequent targets are kept in that much memory, in float16.
        Every cost then has an error of up to 5e-4 of itself, or 3e-8, and gradients of less than 2e-3.
        """
        if cache_mb < 0:
            raise UserError(f"cache_mb must be 0 or more (got: {cache_mb:g})", code="option-range")
        self.rows = rows
        self.cache_mb = cache_mb
        self.fingerprint: str | None = None  # of the tensor that `load_cost` read
        self._cache: CostCache | None = None
        self._prepared: CostEmbedding | None = None
        self._excess: Tensor | None = None

    @classmethod
    def constant(cls, vocab_size: int) -> CostEmbedding:
        """Return costs of exactly 1 between different tokens, from rows of zero length: no geometry."""
        cost = cls(torch.zeros(vocab_size, 1))
        cost.fingerprint = f"constant {vocab_size}"
        return cost

    @classmethod
    def from_weight(
        cls, weight: Tensor, dtype: torch.dtype | None = None, cache_mb: float = 0.0
    ) -> CostEmbedding:
        """Return the embedding of a normalised copy of `weight` [V, H]; raises the errors of `unit_rows`.

        A parameter that ZeRO-3 or FSDP2 partitions is gathered first, in a collective call.
        """
        with gathered(weight) as matrix:
            return cls(unit_rows(matrix, dtype), cache_mb)

    def cached(self, memory_mb: float) -> CostEmbedding:
        """Return the same embedding with a cache of `memory_mb` for cost rows (0: exact, no cache)."""
        copy = type(self)(self.rows, memory_mb)
        copy.fingerprint = self.fingerprint
        return copy

    def permuted(self, seed: int) -> CostEmbedding:
        """Return the same costs between other tokens, permuted by `seed`: a control for the geometry."""
        order = torch.randperm(self.vocab_size, generator=torch.Generator().manual_seed(seed))
        cost = CostEmbedding(self.rows[order.to(self.rows.device)], self.cache_mb)
        cost.fingerprint = f"{self.fingerprint} permuted {seed}"
        return cost

    @property
    def vocab_size(self) -> int:
        """Return V."""
        return self.rows.shape[0]

    @property
    def cache(self) -> CostCache | None:
        """Return the cache, which is made at its first use, or None if rows are exact."""
        if self.cache_mb and self._cache is None:
            self._cache = CostCache(self.vocab_size, self.cache_mb, self.rows.device)
        return self._cache

    def prepared_for(self, device: torch.device, model_dtype: torch.dtype) -> CostEmbedding:
        """Return this embedding on the model's device, in a dtype no wider than the model's.

        The copy is kept. For a half-precision model the rows become float16, whose three more bits help
        because entries are at most 1, or bfloat16 on a CPU that multiplies only bfloat16 fast.
        """
        dtype = self.rows.dtype
        if model_dtype.itemsize == 2:
            fast = device.type == "cpu" and not lacks_bfloat16()
            dtype = torch.bfloat16 if fast else torch.float16
        if self.rows.device == device and self.rows.dtype == dtype:
            return self
        copy = self._prepared
        if copy is None or (copy.rows.device, copy.rows.dtype) != (device, dtype):
            rows = torch.empty_like(self.rows, dtype=dtype, device=device)
            for start in range(0, len(rows), NORMALISE_ROWS):
                part = slice(start, start + NORMALISE_ROWS)
                rows[part] = round_unit_rows(self.rows[part].to(device), dtype)
            copy = self._prepared = CostEmbedding(rows, self.cache_mb)
        return copy

    def cosines(self, targets: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the cosines [u, V] of the tokens `targets` [u] with all, in float32 (float64 if E is).

        They are written to `out` if it is given. Half precision would round cosines near 1 to steps of 5e-4.
        """
        rows = self.rows[targets]
        if rows.dtype.itemsize == 2:
            return mm_in_float32(rows, self.rows, out)
        if out is None or out.dtype == rows.dtype:
            return torch.mm(rows, self.rows.t(), out=out)
        return out.copy_(torch.mm(rows, self.rows.t()))

    def transport(self, P: Tensor) -> Tensor:
        """Return C P [n, V] for distributions P [n, V]: the cost of moving their mass to each token."""
        rows = self.rows
        direction = torch.mm(P.to(rows.dtype), rows)
        half = rows.dtype.itemsize == 2
        out = padded_rows(len(P), len(rows), torch.float32 if half else rows.dtype, rows.device)
        product = mm_in_float32(direction, rows, out) if half else torch.mm(direction, rows.t(), out=out)
        cosines = product.to(P.dtype)
        # 1 - |e_i|^2: rounding for unit rows, and 1 for rows of zero length, whose cost to themselves is 0
        diagonal = 1 - torch.linalg.vecdot(rows, rows).to(P.dtype)
        return cosines.neg_().add_(1).addcmul_(P, diagonal, value=-1).clamp_(min=0)

    def costs(self, targets: Tensor, out: Tensor | None = None) -> Tensor:
        """Return cost rows [u, V] of the tokens `targets` [u], in `out` or float32 (float64 if E is).

        Costs are never negative, and exactly 0 at the target itself. For half-precision rows the cost is
        |e_i - e_y|^2 / 2, to which the rounding of a row's length adds nothing.
        """
        dtype = torch.promote_types(self.rows.dtype, torch.float32)
        if out is None:
            out = self.rows.new_empty(len(targets), self.vocab_size, dtype=dtype)
        if out.dtype.itemsize < dtype.itemsize:  # subtract from 1 before rounding
            return out.copy_(self.costs(targets))
        if self.rows.dtype == dtype:
            self.cosines(targets, out).neg_().add_(1)
        else:
            self._write_half_precision_costs(targets, out)
        return out.clamp_(min=0).scatter_(1, targets[:, None], 0)

    def _write_half_precision_costs(self, targets: Tensor, out: Tensor) -> None:
        """Write |e_i - e_y|^2 / 2 for half-precision rows to `out` [u, V]."""
        if self._excess is None:  # (|e_i|^2 - 1) / 2 [V], from rounding; 0 for rows of zero length
            parts = self.rows.split(NORMALISE_ROWS)
            squares = torch.cat([torch.linalg.vector_norm(p.float(), dim=1) for p in parts]).square_()
            self._excess = torch.where(squares > 0, (squares - 1) / 2, 0.0)
        rows = self.rows[targets]
        if rows.device.type == "cpu" and not needs_widening(rows):
            # the difference is taken inside the product, which is rounded to eight bits afterwards
            out.copy_(torch.ones_like(out, dtype=rows.dtype).addmm_(rows, self.rows.t(), alpha=-1))
            out.add_(self._excess)
        else:
            torch.sub(self._excess + 1, self.cosines(targets, out), out=out)
        out.add_(self._excess[targets][:, None])


def unit_rows(weight: Tensor, dtype: torch.dtype | None = None, checked: bool = True) -> Tensor:
    """Return `weight` [V, H] with its rows scaled to length 1. Rows of zero length stay zero.

    The default dtype is the weight's own, or float16 for bfloat16, since no entry is above 1. Raises
    UserError for a weight that is not a matrix and, if `checked`, for NaN and infinity. Unchecked, these stay
    in the rows, and the host does not wait for the device.
    """
    if weight.dim() != 2 or weight.numel() == 0:
        problem = f"cost embedding must be a matrix [V, H] (got: {list(weight.shape)}); gather sharded ones"
        raise UserError(problem, code="cost-shape")
    usual = torch.float16 if weight.dtype == torch.bfloat16 else weight.dtype
    rows = torch.empty_like(weight, dtype=dtype or usual)
    work = torch.promote_types(torch.promote_types(weight.dtype, rows.dtype), torch.float32)
    finite = []
    zeros = []
    for start in range(0, len(weight), NORMALISE_ROWS):
        part = weight[start : start + NORMALISE_ROWS].to(work)
        # divide by the largest entry first: squares of tiny or huge entries leave float32's range
        peak = part.abs().amax(1, keepdim=True)
        empty = peak == 0
        finite.append(torch.isfinite(peak).all())
        zeros.append(empty.sum())
        part = part / torch.where(empty, 1.0, peak)
        norm = torch.linalg.vector_norm(part, dim=1, keepdim=True)
        part = part / torch.where(empty, 1.0, norm)
        rows[start : start + NORMALISE_ROWS] = round_unit_rows(part, rows.dtype)
    if not checked:
        return rows
    if not torch.stack(finite).all():
        raise UserError("cost embedding has NaN or infinite values", code="not-finite")
    if count := int(sum(zeros)):
        problem = f"{count} of {len(rows)} rows have zero length; their cost to every other token is 1"
        warnings.warn(f"cost embedding: {problem}", stacklevel=2)
    return rows


def round_unit_rows(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Round unit rows [n, H] to `dtype`. In float16, one small entry per row is moved to keep the length 1.

    Rounding alone changes lengths by up to 1e-4, which would be added to the cost between near twins.
    """
    if dtype != torch.float16 or rows.dtype == dtype:
        return rows.to(dtype)
    wide = rows.to(dtype).float()
    excess = torch.linalg.vecdot(wide, wide).sub_(1)[:, None]
    column = wide.abs().sub_(0.5 * wide.shape[1] ** -0.5).abs_().argmin(1, keepdim=True)
    entry = wide.gather(1, column)
    moved = (entry.square() - excess).clamp_(min=0).sqrt_().copysign_(entry)
    fits = 2 * excess.abs() < entry.square()
    return wide.scatter_(1, column, torch.where(fits, moved, entry)).to(dtype)


class NumberCost(CostEmbedding):
    """Costs between tokens that are numbers, by the distance d = |v_i - v_y|, and 0 for other tokens.

        c = d                     if d <= 9
        c = 9 (1 + ln(d / 9))     otherwise

    A weighted sum of `demd` and `mle` with these costs is the number token loss (NTL-WAS, arXiv 2411.02083)
    between digits. Long numbers in a vocabulary, such as 66666666, would dominate it. Above nine the cost
    therefore grows with the logarithm of the distance, and never exceeds 800.
    """

    def __init__(self, rows: Tensor, cache_mb: float = 0.0) -> None:
        """Take the values of the tokens [V] or [V, 1], with NaN for tokens that are not numbers."""
        super().__init__(rows.view(-1, 1), cache_mb)

    def prepared_for(self, device: torch.device, model_dtype: torch.dtype) -> CostEmbedding:
        """Return the values on the model's device in their own dtype: bfloat16 cannot represent 1234."""
        if self.rows.device == device:
            return self
        if self._prepared is None or self._prepared.rows.device != device:
            self._prepared = NumberCost(self.rows.to(device), self.cache_mb)
        return self._prepared

    def cosines(self, targets: Tensor, out: Tensor | None = None) -> Tensor:
        """Return 1 - cost [u, V], for kernels that read costs in that form."""
        return self.costs(targets, out).neg_().add_(1)

    def costs(self, targets: Tensor, out: Tensor | None = None) -> Tensor:
        """Return cost rows [u, V] of the tokens `targets` [u], in `out` or the dtype of the values."""
        values = self.rows[:, 0]
        distance = (values - values[targets][:, None]).abs_().nan_to_num_(nan=0.0)
        costs = distance.clamp(max=9.0).add_(distance.clamp_(min=9.0).div_(9.0).log_().mul_(9.0))
        return costs if out is None else out.copy_(costs)

    def transport(self, P: Tensor) -> Tensor:
        """Return C P [n, V]. Mass on tokens that are not numbers does not move."""
        (numbers,) = (~self.rows[:, 0].isnan()).nonzero(as_tuple=True)
        between = self.costs(numbers)[:, numbers].to(P.dtype)
        return torch.zeros_like(P).index_copy_(1, numbers, P[:, numbers] @ between)


class LiveCost:
    """The trained head as cost embedding ("adaptive" cost), normalised and detached at every call."""


LIVE = LiveCost()


class CostCache:
    """A table of cost rows of frequent targets in float16, within a memory budget, kept between calls.

    Rows are rounded whether they come from the table or not, so results do not depend on earlier batches. In
    a full table, a target that has become more frequent replaces the least frequent one.
    """

    def __init__(self, vocab_size: int, memory_mb: float, device: torch.device) -> None:
        row_bytes = row_stride(vocab_size, device) * torch.float16.itemsize
        live = CACHE_WINDOW_CPU if device.type == "cpu" else max_live_rows(vocab_size)
        self.window = min(vocab_size, live)
        self.capacity = min(vocab_size, max(0, int(memory_mb * 2**20) // row_bytes - self.window))
        # the last `window` rows hold targets outside the table
        self.rows = padded_rows(self.capacity + self.window, vocab_size, torch.float16, device)
        # the host tracks which row belongs to which target, so that it never queries the device
        self.slot = np.full(vocab_size, -1)
        self.owner = np.full(self.capacity, -1)
        self.frequency = np.zeros(vocab_size, np.int64)
        self.used = 0

    def allocate(self, missing: np.ndarray, current: np.ndarray) -> np.ndarray:
        """Assign a row to each of the targets `missing` [k], k <= window, and return the rows, int64 [k].

        Targets of the current batch keep their rows. Rare targets get a temporary row behind the table.
        """
        slots = np.arange(len(missing)) + self.capacity
        free = min(self.capacity - self.used, len(missing))
        slots[:free] = np.arange(self.used, self.used + free)
        self.slot[missing[:free]] = slots[:free]
        self.owner[slots[:free]] = missing[:free]
        self.used += free
        remaining = len(missing) - free
        if remaining and self.capacity:
            count = self.frequency[self.owner]
            in_use = self.slot[current]  # includes those just assigned
            count[in_use[in_use >= 0]] = np.iinfo(np.int64).max
            victims = np.argsort(count, kind="stable")[:remaining]
            eager = np.argsort(-self.frequency[missing[free:]], kind="stable")[: len(victims)]
            wins = self.frequency[missing[free:]][eager] > count[victims]
            winners = eager[wins] + free
            replaced = victims[wins]
            slots[winners] = replaced
            self.slot[self.owner[replaced]] = -1
            self.slot[missing[winners]] = replaced
            self.owner[replaced] = missing[winners]
        return slots


class CostRows(NamedTuple):
    """Cost rows of the distinct targets of a group of tokens, and the row that each token uses."""

    rows: Tensor  # [u, V], any dtype
    row_index: Tensor  # [n] int64
    similarity: bool = False  # the rows hold cosines s; the cost is max(0, 1 - s)


def _group_end(plan: TokenPlan, start: int, stop: int, targets: int) -> int:
    """Return the end of the longest group of tokens in [start, stop) with at most `targets` targets."""
    first = plan.target_index[start]
    return start + int(np.searchsorted(plan.target_index[start:stop], first + targets))


class ExactRows:
    """Cost rows computed once each, in the precision of the embedding, in a window of `size` rows."""

    def __init__(
        self,
        cost: CostEmbedding,
        plan: TokenPlan,
        on_device: DevicePlan,
        dtype: torch.dtype | None,
        size: int,
    ) -> None:
        self.cost = cost
        self.plan = plan
        self.on_device = on_device
        self.size = size
        self.similarity = dtype is None  # keep the cosines of the product
        self.first = self.last = 0  # the targets in the window
        dtype = dtype or torch.promote_types(cost.rows.dtype, torch.float32)
        self.rows = padded_rows(size, cost.vocab_size, dtype, cost.rows.device)

    def group_end(self, start: int, stop: int) -> int:
        """Return the end, at most `stop`, of a group from token `start` whose rows fit into the window."""
        return _group_end(self.plan, start, stop, self.size)

    def read_group(self, start: int, stop: int) -> CostRows:
        """Return the rows of tokens [start, stop) of the plan, valid until the next call."""
        low = int(self.plan.target_index[start])
        high = int(self.plan.target_index[stop - 1]) + 1
        if high > self.last:
            overlap = self.last - low
            if overlap > 0:
                shared = self.rows[low - self.first : self.last - self.first]
                self.rows[:overlap] = shared if overlap <= low - self.first else shared.clone()
            first = max(low, self.last)
            self.first = low
            self.last = min(low + self.size, len(self.plan.targets))
            targets = self.on_device.targets[first : self.last]
            compute = self.cost.cosines if self.similarity else self.cost.costs
            compute(targets, self.rows[first - low : self.last - low])
        rows = self.rows[low - self.first : high - self.first]
        return CostRows(rows, self.on_device.target_index[start:stop] - low, self.similarity)


class CachedRows:
    """Cost rows from a `CostCache`. Missing rows are computed one window at a time."""

    def __init__(
        self, cost: CostEmbedding, cache: CostCache, plan: TokenPlan, on_device: DevicePlan,
        dtype: torch.dtype | None,
    ) -> None:  # fmt: skip
        self.cost = cost
        self.cache = cache
        self.plan = plan
        self.on_device = on_device
        self.dtype = dtype
        cache.frequency[plan.targets] += plan.counts
        self.slots = cache.slot[plan.targets]  # -1: not in the table
        self._slots_on_device: Tensor | None = None

    def group_end(self, start: int, stop: int) -> int:
        """Return the end, at most `stop`, of a group from token `start` that reads the table itself."""
        return stop if self.dtype is not None else _group_end(self.plan, start, stop, self.cache.window)

    def read_group(self, start: int, stop: int) -> CostRows:
        """Return the rows of tokens [start, stop): the full table, or a copy of these rows in `dtype`."""
        low = int(self.plan.target_index[start])
        high = int(self.plan.target_index[stop - 1]) + 1
        index = self.on_device.target_index[start:stop]
        if self.dtype is None and high - low <= self.cache.window:
            return CostRows(self.cache.rows, self._fill(low, high)[index])
        shape = (high - low, self.cost.vocab_size)
        rows = torch.empty(shape, dtype=self.dtype or torch.float32, device=index.device)
        for first in range(low, high, self.cache.window):
            last = min(first + self.cache.window, high)
            rows[first - low : last - low] = self.cache.rows[self._fill(first, last)[first:last]]
        return CostRows(rows, index - low)

    def _fill(self, low: int, high: int) -> Tensor:
        """Load targets [low, high), at most a window, into the table; return all slots on the device."""
        device = self.cost.rows.device
        if (self.slots[low:high] < 0).any():
            # temporary rows are overwritten with this window, so their targets are missing again
            self.slots[self.slots >= self.cache.capacity] = -1
            missing = np.flatnonzero(self.slots[low:] < 0)[: self.cache.window] + low
            slots = self.cache.allocate(self.plan.targets[missing], self.plan.targets)
            self.slots[missing] = slots
            self._slots_on_device = None
            costs = self.cost.costs(self.on_device.targets[_send(missing, device)])
            destination = _send(slots, device)
            step = CONVERTED_CPU if device.type == "cpu" else len(missing)
            for start in range(0, len(missing), step):
                part = slice(start, start + step)
                self.cache.rows[destination[part]] = costs[part].to(torch.float16)
        if self._slots_on_device is None:
            self._slots_on_device = _send(self.slots, device)
        return self._slots_on_device


def _send(array: np.ndarray, device: torch.device) -> Tensor:
    """Copy an array to `device` without waiting for the copy."""
    tensor = torch.from_numpy(array.copy())
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def open_rows(
    cost: CostEmbedding,
    plan: TokenPlan,
    on_device: DevicePlan,
    dtype: torch.dtype | None,
    group: int,
    chunk: int,
) -> ExactRows | CachedRows:
    """Return a reader of the cost rows of a plan's targets, for at most `group` tokens per request.

    Costs have the `dtype`, or for None their stored form, which kernels convert while reading. On a CPU a
    window of rows exceeds neither WINDOW_MB nor a `chunk` of logits.
    """
    if cost.cache is not None:
        return CachedRows(cost, cost.cache, plan, on_device, dtype)
    on_cpu = cost.rows.device.type == "cpu"
    itemsize = (dtype or torch.float32).itemsize
    fitting = int(WINDOW_MB * 2**20) // (cost.vocab_size * itemsize) if on_cpu else 1
    return ExactRows(cost, plan, on_device, dtype, min(max(group, min(chunk, fitting)), len(plan.targets)))


def find_twins(cost: CostEmbedding, tokens: Tensor) -> Tensor:
    """Return which of `tokens` [n] have another of them at a cost below TWIN_COST, bool [n]."""
    rows = cost.rows[tokens.to(cost.rows.device)]
    costs = CostEmbedding(rows).costs(torch.arange(len(tokens), device=rows.device))
    return (costs.fill_diagonal_(torch.inf).amin(1) < TWIN_COST).cpu()
