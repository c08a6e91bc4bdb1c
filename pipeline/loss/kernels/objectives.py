"""The element-wise part of the fused loss in Triton: two passes over each row of logits, the second writes.

The results are those of `rows.TorchRows`, without its temporaries. Logits are read as the matrix product
leaves them, costs as they are stored, and everything in between stays in registers in float32. One program
processes one row. With TRITON_INTERPRET=1 the kernels run on a CPU, for tests.

Rows have V columns. The kernels access `width` columns, more than V if rows are padded (`cost.py`), so that
the mask of the last block ends at a full vector. Values beyond V are arbitrary, possibly NaN, and never enter
a sum. `tests/bench/kernels_static.py` counts registers, vector loads and bytes of the compiled code.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ..cost import CostRows, kernel_width
from ..rows import Chunk, RowUpdate, Statistics, Terms, largest_logits, solve

BLOCK = 4096  # columns of a row in flight
WARPS = 8
# About forty operations on one number per token take longer to launch than to run. Inductor compiles `solve`
# and the objective into one kernel.
compiled_solve = torch.compile(solve, dynamic=True)


@triton.jit
def complete_logits(z, bias, columns, inside, shift, cap, HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr):
    """Add the bias to the logits z of a block, and cap them."""
    z = z.to(tl.float32)
    if HAS_BIAS:
        z += tl.load(bias + columns, mask=inside, other=0.0)
    if HAS_CAP:
        z = cap * (1.0 - 2.0 / (1.0 + tl.exp(2.0 * (z + shift) / cap)))  # cap tanh((z + shift) / cap)
    return z


@triton.jit
def _load_costs(pointer, columns, inside, SIMILARITY: tl.constexpr):
    """Load the transport costs of a block from costs or cosines."""
    c = tl.load(pointer + columns, mask=inside, other=0.0).to(tl.float32)
    if SIMILARITY:
        c = tl.maximum(1.0 - c, 0.0)
    return c


@triton.jit
def _sum_exponentials(z, peak, mass):
    """Return the largest of `peak` and z, exp(z) relative to it, the factor of earlier sums, the new sum."""
    higher = tl.maximum(peak, tl.max(z))
    e = tl.exp(z - higher)
    shrink = tl.exp(peak - higher)
    return higher, e, shrink, mass * shrink + tl.sum(e)


@triton.jit
def statistics_kernel(
    logits, stride, labels, shifts, bias, costs, cost_stride, cost_index,
    lse, d_rest, total, top, entropy, squares, plain_lse, plain_d, kernel_sum, kernel_z,
    V, width, cap, logit_scale, kernel_factor,
    HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr, HAS_COST: tl.constexpr, HAS_TOTAL: tl.constexpr,
    HAS_ENTROPY: tl.constexpr, HAS_SQUARES: tl.constexpr, HAS_KERNEL: tl.constexpr, IS_SCALED: tl.constexpr,
    SIMILARITY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store the statistics of one row without its target.

    These are L' (log-sum-exp), D' and the largest p', and on request the sum of the logits, H' and S'. With
    IS_SCALED they are those of the logits times `logit_scale`, and L' and D' of the logits themselves go to
    `plain_lse` and `plain_d`.
    """
    row = tl.program_id(0).to(tl.int64)
    y = tl.load(labels + row)
    shift = tl.load(shifts + row)
    low = -1.7e38  # has no weight, yet is finite: a row with only the target stays defined
    peak, mass, transported = low, 0.0, 0.0
    plain_peak, plain_mass, plain_transported = low, 0.0, 0.0
    summed = 0.0
    smooth, smooth_z = 0.0, 0.0
    spread = 0.0  # sum of e (z - peak)
    squared = 0.0
    if HAS_COST:
        cost_row = costs + tl.load(cost_index + row) * cost_stride
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < width
        z = tl.load(logits + row * stride + columns, mask=inside, other=0.0)
        z = complete_logits(z, bias, columns, inside, shift, cap, HAS_BIAS, HAS_CAP)
        other = (columns < V) & (columns != y)
        if HAS_COST:  # it may be NaN beyond V, cost_index a weight of 0 would not remove
            c = tl.where(other, _load_costs(cost_row, columns, inside, SIMILARITY), 0.0)
        if HAS_TOTAL:
            summed += tl.sum(tl.where(other, z, 0.0))
        if HAS_KERNEL:
            k = tl.where(other, tl.exp(kernel_factor * c * c), 0.0)
            smooth += tl.sum(k)
            smooth_z += tl.sum(tl.where(other, k * z, 0.0))
        if IS_SCALED:
            plain = tl.where(other, z, low)
            plain_peak, e, shrink, plain_mass = _sum_exponentials(plain, plain_peak, plain_mass)
            if HAS_COST:
                plain_transported = plain_transported * shrink + tl.sum(e * c)
            z = z * logit_scale
        z = tl.where(other, z, low)
        before = mass
        last = peak
        peak, e, shrink, mass = _sum_exponentials(z, peak, mass)
        if HAS_ENTROPY:
            moved = tl.where(before > 0.0, shrink * before * (last - peak), 0.0)
            spread = spread * shrink + moved + tl.sum(tl.where(e > 0.0, e * (z - peak), 0.0))
        if HAS_SQUARES:
            squared = squared * shrink * shrink + tl.sum(e * e)
        if HAS_COST:
            transported = transported * shrink + tl.sum(e * c)
    tl.store(lse + row, peak + tl.log(mass))
    tl.store(d_rest + row, transported / mass)
    tl.store(top + row, 1.0 / mass)
    if HAS_KERNEL:
        tl.store(kernel_sum + row, smooth)
        tl.store(kernel_z + row, smooth_z)
    if HAS_TOTAL:
        tl.store(total + row, summed)
    if HAS_ENTROPY:
        tl.store(entropy + row, tl.log(mass) - spread / mass)
    if HAS_SQUARES:
        tl.store(squares + row, squared / mass / mass)
    if IS_SCALED:
        tl.store(plain_lse + row, plain_peak + tl.log(plain_mass))
        tl.store(plain_d + row, plain_transported / plain_mass)


@triton.jit
def gradient_kernel(
    logits, stride, labels, shifts, bias, costs, cost_stride, cost_index, lse, beta, kappa, scale, target,
    share, width, cap, logit_scale, uniform, kernel_factor,
    HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr, HAS_COST: tl.constexpr, HAS_ENTROPY: tl.constexpr,
    HAS_SCALE: tl.constexpr, HAS_KERNEL: tl.constexpr, IS_SCALED: tl.constexpr, SIMILARITY: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Overwrite one row of logits by G."""
    row = tl.program_id(0).to(tl.int64)
    y = tl.load(labels + row)
    shift = tl.load(shifts + row)
    row_lse = tl.load(lse + row)
    at_target = tl.load(target + row)
    if HAS_COST:
        cost_row = costs + tl.load(cost_index + row) * cost_stride
        row_beta = tl.load(beta + row)
    if HAS_KERNEL:
        row_share = tl.load(share + row)
    if HAS_ENTROPY:
        row_kappa = tl.load(kappa + row)
    if HAS_SCALE:
        row_scale = tl.load(scale + row)
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < width
        z = tl.load(logits + row * stride + columns, mask=inside, other=0.0)
        z = complete_logits(z, bias, columns, inside, shift, cap, HAS_BIAS, HAS_CAP)
        slope = 1.0
        if HAS_CAP:
            slope = 1.0 - (z / cap) * (z / cap)
        if IS_SCALED:
            z = z * logit_scale
        # the target's logit may be far above the log-sum-exp of the others
        log_p = tl.minimum(z - row_lse, 0.0)
        g = tl.exp(log_p)
        factor = 1.0
        if HAS_COST:
            c = _load_costs(cost_row, columns, inside, SIMILARITY)
            factor += row_beta * c
        if HAS_ENTROPY:
            factor += row_kappa * tl.maximum(log_p, -200.0)  # the product is 0 if p' is 0 in float32
        g *= factor
        if HAS_SCALE:
            g = g * row_scale - uniform
        if HAS_KERNEL:
            g -= row_share * tl.exp(kernel_factor * c * c)
        g *= slope
        g = tl.where(columns == y, at_target, g)
        tl.store(logits + row * stride + columns, g.to(logits.dtype.element_ty), mask=inside)


class TritonRows:
    """A group of rows of logits [n, V], processed by the kernels."""

    def __init__(self, logits: Tensor, chunk: Chunk, costs: CostRows | None, terms: Terms) -> None:
        self.logits, self.terms, self.costs = logits, terms, costs
        self.labels, self.target_logit, self.offset = chunk.labels, chunk.target_logit, chunk.offset
        self.bias: Tensor | None = None  # padded to the kernels' width
        if chunk.bias is not None:
            self.bias = F.pad(chunk.bias, (0, kernel_width(logits) - len(chunk.bias)))
        self.lse = torch.empty_like(chunk.target_logit)
        self.cap_slope: Tensor | None = None
        smoothing = terms.objective.smoothing
        self.kernel_factor = 0.0 if smoothing is None else -0.5 / smoothing.width**2

    def _common(self, with_cost: bool) -> tuple[tuple, dict, int]:
        """Return pointers (unused ones point to the logits), flags, and the kernels' width."""
        logits, costs = self.logits, self.costs if with_cost else None
        rows = logits if costs is None else costs.rows
        cost_index = self.labels if costs is None else costs.row_index
        bias = logits if self.bias is None else self.bias
        pointers = (
            logits,
            logits.stride(0),
            self.labels,
            self.offset,
            bias,
            rows,
            rows.stride(0),
            cost_index,
        )
        flags = {
            "HAS_BIAS": self.bias is not None,
            "HAS_CAP": self.terms.softcap is not None,
            "HAS_COST": costs is not None,
            "IS_SCALED": self.terms.objective.logit_scale != 1.0,
            "SIMILARITY": costs is not None and costs.similarity,
            "BLOCK": min(BLOCK, triton.next_power_of_2(logits.shape[1])),
            "num_warps": WARPS,
        }
        return pointers, flags, kernel_width(logits, *([] if costs is None else [costs.rows]))

    def statistics(self) -> Statistics:
        """Return the statistics of the rows. It may change the logit of the target in the rows."""
        cap, smoothing, objective = self.terms.softcap, self.terms.label_smoothing, self.terms.objective
        target, offset = self.target_logit, self.offset
        if cap is not None:
            tanh = torch.tanh(self.target_logit / cap)
            target, offset, self.cap_slope = cap * tanh, torch.zeros_like(offset), 1 - tanh.square()
        n, V = self.logits.shape
        scaled = objective.logit_scale != 1.0
        pointers, flags, width = self._common(with_cost=True)
        outputs = [torch.empty_like(self.lse) for _ in range(9)]
        statistics_kernel[(n,)](
            *pointers, self.lse, *outputs, V, width, cap or 1.0, objective.logit_scale, self.kernel_factor,
            HAS_TOTAL=bool(smoothing), HAS_ENTROPY="H" in objective.needs, HAS_SQUARES="S" in objective.needs,
            HAS_KERNEL=objective.smoothing is not None,
            **flags,
        )  # fmt: skip
        d_rest, total, top, entropy, squares, plain_lse, plain_d, kernel_sum, kernel_z = outputs
        smooths = objective.smoothing is not None
        return Statistics(
            self.lse,
            d_rest,
            target,
            offset,
            z_mean=(total + target - offset) / V if smoothing else None,
            H=entropy if "H" in objective.needs else None,
            S=squares if "S" in objective.needs else None,
            top=top if "top" in objective.needs else None,
            likeliest=self._likeliest() if "H_top" in objective.needs else None,
            kernel_sum=kernel_sum if smooths else None,
            kernel_z=kernel_z if smooths else None,
            unscaled_lse=plain_lse if scaled else None,
            unscaled_d=plain_d if scaled else None,
        )

    def _likeliest(self) -> Tensor:
        """Return the largest logits of the other tokens, [n, 20]."""
        lowest = torch.finfo(self.logits.dtype).min / 2
        self.logits.scatter_(1, self.labels[:, None], lowest)  # no kernel reads it
        if self.bias is None:
            values = largest_logits(self.logits).to(self.lse.dtype)
        else:
            bias = self.bias[: self.logits.shape[1]]
            values = torch.cat([largest_logits(part + bias) for part in self.logits.split(256)])
        cap = self.terms.softcap
        if cap is not None:
            values = cap * torch.tanh((values + self.offset[:, None]) / cap)
        return self.terms.objective.logit_scale * values

    def write(self, update: RowUpdate) -> None:
        """Overwrite the rows by G."""
        smooths = update.share is not None
        pointers, flags, width = self._common(with_cost=update.beta is not None or smooths)
        # The kernel reads beta with costs, so smoothed targets without a transport part need zeros.
        zeros = torch.zeros_like(self.lse) if smooths and update.beta is None else None
        optional = (update.beta if zeros is None else zeros, update.kappa, update.scale, update.share)
        beta, kappa, scale, share = (self.lse if x is None else x for x in optional)  # an unused pointer
        target = update.target if self.cap_slope is None else update.target * self.cap_slope
        gradient_kernel[(len(self.logits),)](
            *pointers, self.lse, beta, kappa, scale, target,
            share, width, self.terms.softcap or 1.0, self.terms.objective.logit_scale, update.uniform,
            self.kernel_factor, HAS_ENTROPY=update.kappa is not None, HAS_SCALE=update.scale is not None,
            HAS_KERNEL=smooths, **flags,
        )  # fmt: skip
