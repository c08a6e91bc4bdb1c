"""Parts 1 and 2 of the GPU campaign: is the fused loss right, and how fast is it?"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from emo.pipeline.loss.cost import CostEmbedding
from emo.pipeline.loss.fused import fused_linear_loss
from emo.pipeline.loss.objectives import get_objective
from tests.bench import common, objectives
from tests.bench._objectives_setting import Setting, Shape
from tests.campaigns.gpu_setting import DEVICE, GIB, GPU, MILLI, Figures, MissingError
from tests.helpers.loss_reference import losses_from_logits, relative_error, unit_rows

# Bounds of a relative error where logits and gradients are rounded to 8 bits. The likeliest tokens are 8 to
# 16 above the target here. Half a quantum there is 2^-5: the relative error of their probabilities, and so of
# their entries of the gradient. The target's entry, computed in float32, is as large as these together, and
# halves it; where an objective has no target, nothing does.
BF16, BF16_WITHOUT_TARGET = 2**-6, 2**-5


class Case(NamedTuple):
    """An objective with the options that make it take another way through the kernels."""

    objective: str
    options: dict[str, Any] = {}
    cache_mb: float = 0.0
    bound: float = 1e-5  # of a relative error in float32
    half: float = BF16  # the same in bfloat16


CASES = (
    Case("mle"),
    Case("emo"),
    Case("emo", cache_mb=64.0, bound=2e-3),
    Case("emo", {"z_loss": 1e-3, "label_smoothing": 0.1}),
    Case("emo", {"softcap": 5.0}),
    Case("mile"),
    Case("deft"),
    Case("neg_entropy", bound=1e-4, half=BF16_WITHOUT_TARGET),  # log p + H cancels
    Case("gem"),
)


class _Costs:
    """Rows of the matrix of costs, made when they are asked for: it is never there whole."""

    def __init__(self, E: Tensor) -> None:
        self.unit = unit_rows(E.double())

    def __getitem__(self, y: Tensor) -> Tensor:
        rows = (1 - self.unit[y] @ self.unit.T).clamp(min=0)
        return rows.scatter(1, y[:, None], 0.0)


def _inputs(V: int, dtype: torch.dtype, quick: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, head, labels of which some repeat and some are left out, and an embedding."""
    N, H = (9, 12) if quick else (200, 256)
    generator = torch.Generator(DEVICE).manual_seed(V)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=DEVICE)

    labels = torch.randint(V, (N,), generator=generator, device=DEVICE)
    labels[1::4] = labels[0]
    labels[::7] = -100
    h, w = draw(N, H).to(dtype), (draw(V, H) * 3 * H**-0.5).to(dtype)
    return h, w, labels, draw(V, 32)


def _results(h: Tensor, w: Tensor, labels: Tensor, E: Tensor, case: Case, kernels: str) -> dict[str, Any]:
    h, w = (x.clone().requires_grad_() for x in (h, w))
    cost = CostEmbedding.from_weight(E, cache_mb=case.cache_mb)
    sums = fused_linear_loss(
        h, w, labels, get_objective(case.objective), cost, kernels=kernels, memory_mb=16, **case.options
    )
    sums.loss.backward()
    return {"loss": sums.loss.detach(), "demd": sums.demd, "d_hidden": h.grad, "d_weight": w.grad}


def _truth(h: Tensor, w: Tensor, labels: Tensor, E: Tensor, case: Case) -> dict[str, Any]:
    """The same, written out naively in float64 by autograd."""
    h, w = (x.double().requires_grad_() for x in (h, w))
    z, options = h @ w.T, dict(case.options)
    if "softcap" in options:
        cap = options.pop("softcap")
        z = cap * torch.tanh(z / cap)
    loss, _, demd = losses_from_logits(z, labels, _Costs(E), case.objective, **options)  # type: ignore[arg-type]
    loss.sum().backward()
    return {"loss": loss.sum().detach(), "demd": demd.sum().detach(), "d_hidden": h.grad, "d_weight": w.grad}


def kernels(show: Figures) -> None:
    """Part 1: Triton's kernels (on a CPU its interpreter) and PyTorch's beside float64."""
    vocabularies = (150,) if show.quick else (32000, 50257, 128256, 152064)
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        for V in vocabularies:
            with show.attempt(f"V={V} {name}"):
                show.need_seconds(20)  # Triton compiles the kernels of a vocabulary anew
                _compare(show, V, dtype, name)


def _compare(show: Figures, V: int, dtype: torch.dtype, name: str) -> None:
    """The largest error of both kinds of kernels, as a share of what is allowed."""
    given = _inputs(V, dtype, show.quick)
    worst = {"triton": (0.0, ""), "torch": (0.0, "")}
    for case in CASES[:3] if show.quick else CASES:
        want = _truth(*given, case)
        bound = case.half if dtype == torch.bfloat16 else case.bound
        for kind in worst:
            results = _results(*given, case, kind)
            for what, value in results.items():
                error = relative_error(value, want[what])
                share = error / bound if error == error else float("inf")
                options = " ".join((case.objective, *case.options, "cached" if case.cache_mb else "")).strip()
                worst[kind] = max(worst[kind], (share, f"{what} of {options}: {error:.1e} of {bound:g}"))
    for kind, (share, note) in worst.items():
        what = f"V={V} {name}: error of {kind} kernels beside float64 / what is allowed"
        show(what, share, at_most=1.0, always=True, note=note)


def speed(show: Figures) -> None:
    """Part 2: time and memory of the fused loss beside peers, at LLaMA-7B's head and at V = 152064."""
    if show.quick:
        shapes = [Shape("small", 128, 2000, 64, "bfloat16")]
    else:
        shapes = [
            Shape("LLaMA-7B head", 8192, 32000, 4096, "bfloat16"),
            Shape("large vocabulary", 8192, 152064, 4096, "bfloat16"),
        ]
    for shape in shapes:
        with show.attempt(str(shape)):
            show.need_seconds(60)
            _race(show, shape, first=shape is shapes[0])
    with show.attempt("whole step"):
        show.need_seconds(30)
        report = common.Report("gpu")
        objectives.whole_step(report, rounds=1 if show.quick else 10, quick=show.quick)
        value = report.ratios["whole step: EMO time / MLE"]["value"]
        show("whole step: EMO cached / MLE, time", value, at_most=1.005, note=report.notes[-1])


def _race(show: Figures, shape: Shape, first: bool) -> None:
    """All contestants that run here, in turn."""
    setting = Setting(shape)
    report = common.Report("gpu")
    runs: dict[str, Callable[[int], Any]] = objectives.runnable(setting, report)
    for note in report.notes:
        show.skip(note.partition(" left out")[0], note.partition("): ")[2])
    if shape.N * shape.V * 2 > 8 * GIB:
        raise MissingError("its logits would not fit")
    h, w = setting.hidden.detach(), setting.weight.detach()

    def products(i: int) -> None:
        """The three matrix products that no linear cross-entropy can do without, and nothing else."""
        logits = h @ w.T
        logits @ w
        logits.T @ h

    runs["bare products"] = products
    times = common.race(runs, rounds=1 if show.quick else 10)
    for name in runs:
        show(f"{shape.label}: {name}, time", statistics.median(times[name]) * MILLI, "ms")
    ratio, where = common.ratio, shape.label
    exact, cached, mle = objectives.OURS_EMO, objectives.OURS_CACHE, objectives.OURS_MLE
    liger = "Liger fused linear CE"
    if first:
        show(f"{where}: EMO cached / MLE, time", ratio(times, cached, mle), at_most=1.03)
        show(f"{where}: EMO exact / MLE, time", ratio(times, exact, mle), at_most=1.12)
    else:
        for name in (exact, cached):
            show(f"{where}: {name} / bare products, time", ratio(times, name, "bare products"), at_most=1.5)
    if liger in runs:
        show(f"{where}: Liger / MLE, time", ratio(times, liger, mle), at_least=1.0)
    if GPU:
        for name in runs:
            setting.hidden.grad = setting.weight.grad = None
            torch.cuda.empty_cache()
            peak = common.peak_memory_mb(lambda name=name: runs[name](1)) * 2**20 / GIB  # type: ignore[misc]
            most = 6.0 if not first and name in (exact, cached) else None
            show(f"{where}: {name}, memory above inputs", peak, "GiB", at_most=most)
