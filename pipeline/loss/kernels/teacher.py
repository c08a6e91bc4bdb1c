"""Divergences from a teacher in Triton, in one launch for all rows.

The results are those of `teacher.compare_with_teacher`. A program reads its row three times. The first pass
computes the normalisers of both sides, the second the divergence and the sums of u that its gradient needs
(`divergences.py`), and the third writes the gradient. The teacher's row is read as its head's product left
it. The k + 1 entries of a stored teacher stay in registers, and the row is read once for the mass of the rest
and once for the gradient. PyTorch computes the products of the teacher's head, and C p of eq. 15.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ..cost import CostEmbedding, kernel_width
from ..divergences import EPS, BoundDivergence
from ..rows import Chunk, Terms
from ..teacher import TeacherRows, TopK
from .objectives import WARPS, complete_logits

Flags = dict[str, bool | int | str]  # constants that a kernel is compiled for
BLOCK = 2048  # columns in flight, for each of student, teacher and result


@triton.jit
def _more_mass(x, peak, mass):
    """Return the largest of `peak` and x, and the sum of all exponentials relative to it."""
    higher = tl.maximum(peak, tl.max(x))
    return higher, mass * tl.exp(peak - higher) + tl.sum(tl.exp(x - higher))


@triton.jit
def _log_sum_exp(x):
    """Return log sum exp x of a block."""
    peak = tl.max(x)
    return peak + tl.log(tl.sum(tl.exp(x - peak)))


@triton.jit
def _mixture(p, q, share):
    """Return share p + (1 - share) q, at least the smallest normal number: its logarithm is finite."""
    return tl.maximum(share * p + (1.0 - share) * q, 1.1754944e-38)


@triton.jit
def _kl_term(p, log_p, log_q):
    """Return p log(p / q), which is 0 for p = 0."""
    return tl.where(p > 0.0, p * (log_p - log_q), 0.0)


@triton.jit
def _entries(log_p, log_q, Cp, share, KIND: tl.constexpr):
    """Return the terms of the divergence called KIND, and u_i = q_i dL/dq_i."""
    p = tl.exp(log_p)
    q = tl.exp(log_q)
    if KIND == "kl":
        loss = _kl_term(p, log_p, log_q)
        u = -p
    elif KIND == "reverse_kl":
        u = q * (log_q - log_p)
        loss = u
    elif KIND == "jsd":
        log_m = tl.log(_mixture(p, q, share))
        u = (1.0 - share) * q * (log_q - log_m)
        loss = share * _kl_term(p, log_p, log_m) + u
    elif KIND == "skew_kl":
        m = _mixture(p, q, share)
        loss = _kl_term(p, log_p, tl.log(m))
        u = (1.0 - share) * (1.0 - share) * (q / m) * (q - p)
    elif KIND == "tv":
        loss = 0.5 * tl.abs(q - p)
        u = tl.where(q > p, 0.5 * q, tl.where(q < p, -0.5 * q, 0.0))
    else:
        tl.static_assert(KIND == "demd_dense")
        loss = tl.abs(q - p) * Cp
        u = tl.where(q > p, q * Cp, tl.where(q < p, -q * Cp, 0.0))
    return loss, u


@triton.jit
def _gradient(u, log_q, at_top, top_u, others_u, others_q):
    """Return u_i - q_i sum u. The most likely entry uses the others' sums, so that nothing cancels."""
    q = tl.exp(log_q)
    return tl.where(at_top, top_u * others_q - q * others_u, u - q * (top_u + others_u))


@triton.jit
def _load_student(
    row, columns, inside, V, y, target, shift, bias, cap, HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr
):
    """Return a block of the student's logits, and which of its columns are tokens with a logit above -inf."""
    z = tl.load(row + columns, mask=inside, other=0.0)
    present = (columns < V) & (z > float("-inf"))
    z = complete_logits(z, bias, columns, inside, shift, cap, HAS_BIAS, HAS_CAP)
    return tl.where(columns == y, target, z), present


@triton.jit
def _load_teacher(
    row, columns, inside, scale, bias, cap, sharpness, HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr
):
    """Return a block of the teacher's logits, divided by its temperature."""
    t = tl.load(row + columns, mask=inside, other=0.0) * scale
    return sharpness * complete_logits(t, bias, columns, inside, 0.0, cap, HAS_BIAS, HAS_CAP)


@triton.jit
def _store_grad(row, columns, inside, g, z, cap, factor, HAS_CAP: tl.constexpr, ADDS: tl.constexpr):
    """Write a block of the gradient, or add it to the block in memory."""
    g *= factor
    if HAS_CAP:
        g *= 1.0 - (z / cap) * (z / cap)
    if ADDS:
        g += tl.load(row + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(row + columns, g.to(row.dtype.element_ty), mask=inside)


@triton.jit
def live_kernel(
    logits, stride, gradient, gradient_stride, labels, targets, shifts, bias, divergence, nll,
    V, width, cap, logit_scale, share, factor,
    teacher, teacher_stride, teacher_bias, teacher_scale, teacher_cap, sharpness, transport, transport_stride,
    eps,
    HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr, IS_SCALED: tl.constexpr, KIND: tl.constexpr,
    WRITES: tl.constexpr, ADDS: tl.constexpr, BLOCK: tl.constexpr,
    TEACHER_BIAS: tl.constexpr, TEACHER_CAP: tl.constexpr, HAS_TRANSPORT: tl.constexpr, IS_EMO: tl.constexpr,
):  # fmt: skip
    """Store one row's divergence and -log p of its label, and write the gradient.

    With IS_EMO the divergence is (KIND + sg[w] D) / 2 with D of eq. 15 and w = KIND / (D + eps).
    """
    row = tl.program_id(0).to(tl.int64)
    y = tl.load(labels + row)
    target = tl.load(targets + row)
    shift = tl.load(shifts + row)
    z_row = logits + row * stride
    t_row = teacher + row * teacher_stride
    cost_row = transport + row * transport_stride
    low = -1.7e38  # has no weight, yet is finite
    peak, mass, top = low, 0.0, 0
    plain_peak, plain_mass = low, 0.0
    teacher_peak, teacher_mass = low, 0.0
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < width
        z, _ = _load_student(z_row, columns, inside, V, y, target, shift, bias, cap, HAS_BIAS, HAS_CAP)
        if IS_SCALED:
            plain = tl.where(columns < V, z, low)
            plain_peak, plain_mass = _more_mass(plain, plain_peak, plain_mass)
        z = tl.where(columns < V, z * logit_scale, low)
        highest, index = tl.max(z, 0, return_indices=True)
        top = tl.where(highest > peak, start + index, top)
        peak, mass = _more_mass(z, peak, mass)
        t = _load_teacher(
            t_row, columns, inside, teacher_scale, teacher_bias, teacher_cap, sharpness,
            TEACHER_BIAS, TEACHER_CAP,
        )  # fmt: skip
        t = tl.where(columns < V, t, low)
        teacher_peak, teacher_mass = _more_mass(t, teacher_peak, teacher_mass)
    lse = peak + tl.log(mass)
    teacher_lse = teacher_peak + tl.log(teacher_mass)
    plain_lse = lse
    if IS_SCALED:
        plain_lse = plain_peak + tl.log(plain_mass)
    tl.store(nll + row, tl.maximum(plain_lse - target, 0.0))

    total, top_u, others_u, others_q = 0.0, 0.0, 0.0, 0.0
    far, far_top_u, far_others_u = 0.0, 0.0, 0.0
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < width
        z, _ = _load_student(z_row, columns, inside, V, y, target, shift, bias, cap, HAS_BIAS, HAS_CAP)
        t = _load_teacher(
            t_row, columns, inside, teacher_scale, teacher_bias, teacher_cap, sharpness,
            TEACHER_BIAS, TEACHER_CAP,
        )  # fmt: skip
        log_q = tl.where(columns < V, z * logit_scale - lse, low)
        log_p = tl.where(columns < V, t - teacher_lse, low)
        Cp = log_q
        if HAS_TRANSPORT:
            Cp = tl.load(cost_row + columns, mask=inside, other=0.0)
            Cp = tl.where(columns < V, Cp, 0.0)
        loss, u = _entries(log_p, log_q, Cp, share, KIND)
        total += tl.sum(loss)
        top_u += tl.sum(tl.where(columns == top, u, 0.0))
        others_u += tl.sum(tl.where(columns == top, 0.0, u))
        others_q += tl.sum(tl.where(columns == top, 0.0, tl.exp(log_q)))
        if IS_EMO:
            loss, u = _entries(log_p, log_q, Cp, share, "demd_dense")
            far += tl.sum(loss)
            far_top_u += tl.sum(tl.where(columns == top, u, 0.0))
            far_others_u += tl.sum(tl.where(columns == top, 0.0, u))
    weight = 0.0
    if IS_EMO:
        weight = total / (far + eps)
        total = 0.5 * (total + weight * far)
        top_u = 0.5 * (top_u + weight * far_top_u)
        others_u = 0.5 * (others_u + weight * far_others_u)
    tl.store(divergence + row, total)

    if WRITES:
        for start in range(0, width, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            inside = columns < width
            z, _ = _load_student(z_row, columns, inside, V, y, target, shift, bias, cap, HAS_BIAS, HAS_CAP)
            t = _load_teacher(
                t_row, columns, inside, teacher_scale, teacher_bias, teacher_cap, sharpness,
                TEACHER_BIAS, TEACHER_CAP,
            )  # fmt: skip
            log_q = z * logit_scale - lse
            log_p = t - teacher_lse
            Cp = log_q
            if HAS_TRANSPORT:
                Cp = tl.load(cost_row + columns, mask=inside, other=0.0)
            _, u = _entries(log_p, log_q, Cp, share, KIND)
            if IS_EMO:
                _, far_u = _entries(log_p, log_q, Cp, share, "demd_dense")
                u = 0.5 * (u + weight * far_u)
            g = _gradient(u, log_q, columns == top, top_u, others_u, others_q)
            _store_grad(gradient + row * gradient_stride, columns, inside, g, z, cap, factor, HAS_CAP, ADDS)


@triton.jit
def stored_kernel(
    logits, stride, gradient, gradient_stride, labels, targets, shifts, bias, divergence, nll,
    V, width, cap, logit_scale, share, factor, ids, stored, written, log_probs, k,
    HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr, IS_SCALED: tl.constexpr, KIND: tl.constexpr,
    WRITES: tl.constexpr, ADDS: tl.constexpr, BLOCK: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """Store one row's divergence over k tokens and the rest, -log p of its label, and write the gradient.

    The row's logits of the tokens `ids` are in `stored`, and -inf in the row itself. Their gradient goes to
    `written`, to which it is added with ADDS. The tokens of the rest share its gradient in proportion to
    their mass.
    """
    row = tl.program_id(0).to(tl.int64)
    y = tl.load(labels + row)
    target = tl.load(targets + row)
    shift = tl.load(shifts + row)
    z_row = logits + row * stride
    low = -1.7e38  # has no weight, yet is finite
    rest_peak, rest_mass = low, 0.0
    plain_peak, plain_mass = low, 0.0
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < width
        z, rest = _load_student(z_row, columns, inside, V, y, target, shift, bias, cap, HAS_BIAS, HAS_CAP)
        if IS_SCALED:
            plain = tl.where(rest, z, low)
            plain_peak, plain_mass = _more_mass(plain, plain_peak, plain_mass)
        z = tl.where(rest, z * logit_scale, low)
        rest_peak, rest_mass = _more_mass(z, rest_peak, rest_mass)
    rest_lse = rest_peak + tl.log(rest_mass)

    entry = tl.arange(0, ENTRIES)  # the k tokens, and then the rest
    is_token = entry < k
    token = tl.load(ids + row * k + entry, mask=is_token, other=0)
    z_k = tl.load(stored + row * k + entry, mask=is_token, other=0.0)
    z_k = complete_logits(z_k, bias, token, is_token, shift, cap, HAS_BIAS, HAS_CAP)
    z_k = tl.where(token == y, target, z_k)
    log_q = tl.where(is_token, z_k * logit_scale, tl.where(entry == k, rest_lse, low))
    lse = _log_sum_exp(log_q)
    plain_lse = lse
    if IS_SCALED:
        plain = tl.where(is_token, z_k, tl.where(entry == k, plain_peak + tl.log(plain_mass), low))
        plain_lse = _log_sum_exp(plain)
    tl.store(nll + row, tl.maximum(plain_lse - target, 0.0))

    smallest = -87.33654  # log of the smallest normal number
    log_q = tl.where(entry == k, tl.maximum(log_q - lse, smallest), log_q - lse)
    log_p = tl.load(log_probs + row * (k + 1) + entry, mask=entry <= k, other=low).to(tl.float32)
    loss, u = _entries(log_p, log_q, log_q, share, KIND)
    tl.store(divergence + row, tl.sum(loss))
    if WRITES:
        _highest, top = tl.max(log_q, 0, return_indices=True)
        top_u = tl.sum(tl.where(entry == top, u, 0.0))
        others_u = tl.sum(tl.where(entry == top, 0.0, u))
        others_q = tl.sum(tl.where(entry == top, 0.0, tl.exp(log_q)))
        g_k = _gradient(u, log_q, entry == top, top_u, others_u, others_q)
        _store_grad(written + row * k, entry, is_token, g_k, z_k, cap, factor, HAS_CAP, ADDS)
        g_rest = tl.sum(tl.where(entry == k, g_k, 0.0))
        for start in range(0, width, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            inside = columns < width
            z, rest = _load_student(z_row, columns, inside, V, y, target, shift, bias, cap, HAS_BIAS, HAS_CAP)
            z = tl.where(rest, z, 0.0)
            g = tl.where(rest, g_rest * tl.exp(z * logit_scale - rest_lse), 0.0)
            _store_grad(gradient + row * gradient_stride, columns, inside, g, z, cap, factor, HAS_CAP, ADDS)


def write_divergences(
    G: Tensor,
    logits: Tensor,
    chunk: Chunk,
    teacher: TeacherRows | TopK,
    cost: CostEmbedding | None,
    terms: Terms,
    gradient: bool,
    adds: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the weighted divergences, the unweighted ones and -log p of the labels of a chunk, each [n].

    Args:
        G: [n, V] for the gradient of the weighted ones. It may be `logits` for one divergence without `adds`.
        logits: The student's [n, V], overwritten.
        chunk: The tokens.
        teacher: Its rows, overwritten.
        cost: Transport costs.
        terms: The parts of the loss.
        gradient: Whether to compute the gradient.
        adds: Add the gradient to G instead of overwriting it.
    """
    objective, keep = terms.objective, 1 - terms.label_smoothing
    teaching: _LiveTeaching | _StoredTeaching
    if isinstance(teacher, TeacherRows):
        teaching = _LiveTeaching(teacher, logits, G, cost if objective.needs_transport else None)
    else:
        teaching = _StoredTeaching(teacher, logits, G)
    pointers, flags = _student_arguments(logits, G, chunk, terms, teaching.width)
    flags["WRITES"] = gradient
    parts = []
    for weight, divergence in objective.divergences:
        outputs = torch.empty(2, len(logits), dtype=torch.float32, device=logits.device).unbind()
        share = next(iter(divergence.options.values()), 0.5)
        numbers = (terms.softcap or 1.0, objective.logit_scale, share, weight * keep * objective.logit_scale)
        arguments = (*pointers, *outputs, logits.shape[1], teaching.width, *numbers)
        teaching.launch(arguments, divergence, {**flags, "ADDS": adds})
        parts.append((outputs[0] * (weight * keep), *outputs))
        adds = True
    loss, divergences = (functools.reduce(operator.add, x) for x in list(zip(*parts, strict=True))[:2])
    return loss, divergences, outputs[1]


def _pad_bias(bias: Tensor | None, logits: Tensor, width: int) -> Tensor:
    """Return the bias padded to the kernels' width; `logits` stand in for an unused pointer."""
    V = logits.shape[1]
    return logits if bias is None else F.pad(bias.detach()[:V], (0, width - V))


def _student_arguments(
    logits: Tensor, G: Tensor, chunk: Chunk, terms: Terms, width: int
) -> tuple[tuple[Any, ...], Flags]:
    """Return the pointers and flags of a kernel that concern the student."""
    cap, target, offset = terms.softcap, chunk.target_logit, chunk.offset
    target = target - offset if cap is None else cap * torch.tanh(target / cap)
    bias = _pad_bias(chunk.bias, logits, width)
    pointers = (logits, logits.stride(0), G, G.stride(0), chunk.labels, target, offset, bias)
    flags: Flags = {
        "HAS_BIAS": chunk.bias is not None,
        "HAS_CAP": cap is not None,
        "IS_SCALED": terms.objective.logit_scale != 1.0,
        "BLOCK": min(BLOCK, triton.next_power_of_2(logits.shape[1])),
        "num_warps": WARPS,
    }
    return pointers, flags


class _LiveTeaching:
    """Launches of `live_kernel` for one chunk."""

    def __init__(self, rows: TeacherRows, logits: Tensor, G: Tensor, cost: CostEmbedding | None) -> None:
        """Take the student's logits and gradient, and the costs if a divergence transports mass."""
        transport = logits  # an unused pointer
        if cost is not None:
            rows = rows.normalised()
            transport = cost.transport(rows.z.exp())
        self.width = kernel_width(logits, G, rows.z, transport)
        model = rows.teacher
        bias = _pad_bias(model.bias, logits, self.width)
        numbers = (model.logit_scale, model.softcap or 1.0, 1 / model.temperature)
        self.arguments = (rows.z, rows.z.stride(0), bias, *numbers, transport, transport.stride(0), EPS)
        self.flags = {"TEACHER_BIAS": model.bias is not None, "TEACHER_CAP": model.softcap is not None}
        self.n = len(logits)

    def launch(self, arguments: tuple[Any, ...], divergence: BoundDivergence, flags: Flags) -> None:
        is_emo = divergence.name == "emo_dense"
        flags |= {"KIND": "kl" if is_emo else divergence.name, "IS_EMO": is_emo}
        flags |= {"HAS_TRANSPORT": divergence.needs_costs, **self.flags}
        live_kernel[(self.n,)](*arguments, *self.arguments, **flags)


class _StoredTeaching:
    """Launches of `stored_kernel` for one chunk."""

    def __init__(self, teacher: TopK, logits: Tensor, G: Tensor) -> None:
        """Take the student's gradient and its logits, in which those of the stored tokens become -inf."""
        self.ids, self.log_p = teacher
        self.G, self.width = G, kernel_width(logits, G)
        self.stored = logits.gather(1, self.ids)
        logits.scatter_(1, self.ids, -torch.inf)

    def launch(self, arguments: tuple[Any, ...], divergence: BoundDivergence, flags: Flags) -> None:
        n, k = self.ids.shape
        written = self.G.gather(1, self.ids) if flags["ADDS"] else torch.empty_like(self.stored)
        flags |= {"KIND": divergence.name, "ENTRIES": triton.next_power_of_2(k + 1)}
        stored_kernel[(n,)](*arguments, self.ids, self.stored, written, self.log_p, k, **flags)
        if flags["WRITES"]:
            self.G.scatter_(1, self.ids, written)
