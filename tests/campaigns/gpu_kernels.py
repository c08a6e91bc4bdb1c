"""Parts 1, 2, 4 and 6 of the GPU campaign: correctness and speed of the fused loss, and packed documents."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from emo.common.causal_lm import IGNORE
from emo.pipeline.loss import Teacher, fuse_model, get_objective, weighted_sum
from emo.pipeline.loss.cost import CostEmbedding
from emo.pipeline.loss.models.head import SEGMENTS, VARLEN, document_mask, segments
from emo.pipeline.loss.models.varlen import varlen_attention
from tests.bench import common, objectives
from tests.bench._objectives_setting import HEAD_TIME, STEP_TIME, Setting, Shape
from tests.campaigns import gpu_setting
from tests.campaigns.gpu_setting import DEVICE, GIB, GPU, MILLI, Figures, MissingError
from tests.helpers.loss_reference import (
    divergence_reference,
    fused_step,
    inputs,
    logits_of,
    reference,
    relative_error,
    top,
    unit_rows,
)

DTYPE = torch.bfloat16 if GPU else torch.float32
ERROR = 1.5e-2 if GPU else 1e-5  # relative error of an attention function
ALIKE = 1e-2 if GPU else 1e-4  # relative difference of NLLs, because kernels sum in another order
HEADS, KEYS, SIZE = 16, 4, 64  # query heads, key and value heads, and size of a head
LONG = 4096  # tokens of a row whose memory is measured
ROWS, LAYERS = 2, 8
SMALL = Shape("small", 128, 2000, 64, "bfloat16")
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]

# Bounds of the relative error if logits and gradients are rounded to 8 bits. The logits of the most likely
# tokens exceed the target's by 8 to 16 here. Half a rounding step there is 2^-5, which is the relative error
# of their probabilities and gradient entries. The target's entry is computed in float32 and as large as the
# others together, which halves the relative error. Objectives without a target lack this entry.
BF16, BF16_WITHOUT_TARGET = 2**-6, 2**-5


class Case(NamedTuple):
    """An objective with options that select a path through the kernels."""

    objective: str
    options: dict[str, Any] = {}
    cache_mb: float = 0.0
    bound: float = 1e-5  # of the relative error in float32
    half: float = BF16  # of the relative error in bfloat16
    k: int = 0  # stored entries of the teacher, 0 for a live teacher


CASES = (
    Case("mle"),
    Case("emo"),
    Case("emo", cache_mb=64.0, bound=2e-3),
    Case("emo", {"z_loss": 1e-3, "label_smoothing": 0.1}),
    Case("emo", {"softcap": 5.0}),
    Case("mile"),
    Case("eaft"),
    Case("smoothed"),
    Case("deft"),
    Case("neg_entropy", bound=1e-4, half=BF16_WITHOUT_TARGET),  # log p + H cancels
    Case("gem"),
)
AGAINST = tuple(
    Case(*case, half=BF16_WITHOUT_TARGET, k=k)
    for *case, k in (
        ("kl", {}, 0),
        ("jsd", {"softcap": 5.0, "mle": 1.0}, 0),
        ("jsd", {"softcap": 5.0, "mle": 1.0}, 64),
        ("reverse_kl", {}, 0),
        ("reverse_kl", {"temperature": 2.0}, 64),
        ("skew_kl", {"temperature": 2.0}, 0),
        ("tv", {}, 0),
        ("demd_dense", {}, 0),
        ("emo_dense", {"softcap": 5.0}, 0),
    )
)


def kernels(show: Figures) -> None:
    """Part 1: compare the Triton kernels (interpreted on a CPU) and the PyTorch kernels with float64."""
    _vocabularies(show, 32000, 128256)


def vocabularies(show: Figures) -> None:
    """Part 6: repeat part 1 at other vocabulary sizes, and measure the speed at a large one."""
    _vocabularies(show, 152064, 50257)
    shape = Shape("large vocabulary", 8192, 152064, 4096, "bfloat16")
    with show.attempt(str(shape)):
        _race(show, SMALL if show.quick else shape, large=True)


def _vocabularies(show: Figures, *sizes: int) -> None:
    for V in (150,) if show.quick else sizes:
        for dtype in (torch.bfloat16, torch.float32):
            name = f"V={V} {str(dtype).removeprefix('torch.')}"
            with show.attempt(name):
                for kind, (share, note) in _worst(V, dtype, show.quick).items():
                    words = f"{name}: error of {kind} kernels beside float64 / what is allowed"
                    show(words, share, at_most=1.0, always=True, note=f"{note}; {len(CASES)} cases")
                for kind, (share, note) in _worst_against(V, dtype, show.quick).items():
                    words = f"{name}: error of {kind} divergences beside float64 / what is allowed"
                    show(words, share, at_most=1.0, always=True, note=note)


def _worst(V: int, dtype: torch.dtype, quick: bool) -> dict[str, tuple[float, str]]:
    """Return the largest error of each kind of kernels as a share of its bound, and where it occurs."""
    N, H = (9, 12) if quick else (200, 256)
    h, w, labels, E = (x.detach().to(DEVICE) for x in inputs(N, V, H, dtype, scale=3 * H**-0.5))
    labels[1::4] = labels[1]  # tokens that share a row of costs
    leaves, E = (h.requires_grad_(), w.requires_grad_()), E[:, :32]
    worst = {"triton": (0.0, ""), "torch": (0.0, "")}
    for case in CASES:
        want = reference(*leaves, labels, E, case.objective, **case.options)
        cost = CostEmbedding.from_weight(E, cache_mb=case.cache_mb)
        for kind in worst:
            beside = {"kernels": kind, "memory_mb": 16, **case.options}
            results = fused_step(*leaves, labels, get_objective(case.objective), cost, **beside)
            worst[kind] = max(worst[kind], _share(results, want, case, dtype))
    return worst


def _worst_against(V: int, dtype: torch.dtype, quick: bool) -> dict[str, tuple[float, str]]:
    """Return the results of `_worst` for divergences from a teacher that is twice as wide."""
    N, H = (9, 12) if quick else (200, 256)
    h, w, labels, E = (x.detach().to(DEVICE) for x in inputs(N, V, H, dtype, scale=3 * H**-0.5))
    leaves, unit = (h.requires_grad_(), w.requires_grad_()), unit_rows(E[:, :32].double())
    generator = torch.Generator(DEVICE).manual_seed(1)
    hidden, weight = (torch.randn(n, 2 * H, device=DEVICE, generator=generator) for n in (N, V))
    live = Teacher((hidden * (2 * H) ** -0.5).to(dtype), weight.to(dtype), softcap=30.0, temperature=0.5)
    z = logits_of(live.hidden, weight.to(dtype), None, live.softcap, 1.0)
    log_p = (z / live.temperature).log_softmax(-1)
    worst = {"triton": (0.0, ""), "torch": (0.0, "")}
    for case in AGAINST:
        options = dict(case.options)
        mle, temperature = options.pop("mle", 0.0), options.pop("temperature", 1.0)
        objective = get_objective(case.objective, temperature=temperature)
        if mle:
            objective = weighted_sum([(get_objective("mle"), mle), (objective, 1.0)])
        cost = CostEmbedding(unit.to(torch.float32)) if objective.needs_cost else None
        side: Any = top(log_p, case.k) if case.k else live
        arguments = (*leaves, labels, log_p, lambda p: 1 - (p @ unit) @ unit.T, case.objective, {})
        want = divergence_reference(*arguments, mle=mle, temperature=temperature, k=case.k, **options)
        for kind in worst:
            beside = {"kernels": kind, "memory_mb": 16, **options}
            results = fused_step(*leaves, labels, objective, cost, teacher=side, **beside)
            worst[kind] = max(worst[kind], _share(results, want, case, dtype))
    return worst


def _share(
    results: dict[str, Tensor], want: dict[str, Tensor], case: Case, dtype: torch.dtype
) -> tuple[float, str]:
    """Return the largest error of a case as a share of its bound, and where it occurs."""
    bound = case.half if dtype == torch.bfloat16 else case.bound
    words = " ".join((case.objective, *case.options, "cached" if case.cache_mb else "")).strip()
    words += f" top {case.k}" if case.k else ""
    worst = (0.0, "")
    for key in ("loss", "demd", "divergence", "d_hidden", "d_weight"):
        if key in want:
            error = relative_error(results[key], want[key])
            share = error / bound if error == error else float("inf")
            worst = max(worst, (share, f"{key} of {words}: {error:.1e} of {bound:g}"))
    return worst


def speed(show: Figures) -> None:
    """Part 2: measure the fused loss and its peers at LLaMA-7B's head, and a complete training step."""
    shape = SMALL if show.quick else Shape("LLaMA-7B head", 8192, 32000, 4096, "bfloat16")
    with show.attempt(str(shape)):
        _race(show, shape, large=False)
    with show.attempt("whole step"):
        report = common.Report("gpu")
        objectives.whole_step(report, rounds=1 if show.quick else 10, quick=show.quick)
        value = report.ratios["whole step: EMO time / MLE"]["value"]
        show("whole step: EMO cached / MLE, time", value, at_most=STEP_TIME, note=report.notes[-1])


def _race(show: Figures, shape: Shape, large: bool) -> None:
    setting, report, where = Setting(shape), common.Report("gpu"), shape.label
    runs: dict[str, Callable[[int], Any]] = objectives.runnable(setting, report)
    for note in report.notes:
        show.skip(note.partition(" left out")[0], note.partition("): ")[2])
    if shape.N * shape.V * 2 > 8 * GIB:
        raise MissingError("its logits would not fit")
    h, w = setting.hidden.detach(), setting.weight.detach()

    def products(i: int) -> None:
        logits = h @ w.T
        logits @ w
        logits.T @ h

    runs["bare products"] = products
    times = common.race(runs, rounds=1 if show.quick else 10)
    for name in runs:
        show(f"{where}: {name}, time", statistics.median(times[name]) * MILLI, "ms")
    exact, cached, mle = objectives.OURS_EMO, objectives.OURS_CACHE, objectives.OURS_MLE
    liger = "Liger fused linear CE"
    if large:
        for name in (exact, cached):
            value = common.ratio(times, name, "bare products")
            show(f"{where}: {name} / bare products, time", value, at_most=1.5)
    else:
        show(f"{where}: EMO cached / MLE, time", common.ratio(times, cached, mle), at_most=HEAD_TIME)
        show(f"{where}: EMO exact / MLE, time", common.ratio(times, exact, mle), at_most=1.12)
    if liger in runs:
        show(f"{where}: Liger / MLE, time", common.ratio(times, liger, mle), at_least=1.0)
    for name, run in runs.items() if GPU else ():
        setting.hidden.grad = setting.weight.grad = None
        torch.cuda.empty_cache()
        peak = common.peak_memory_mb(lambda run=run: run(1)) * 2**20 / GIB  # type: ignore[misc]
        most = 6.0 if large and name in (exact, cached) else None
        show(f"{where}: {name}, memory above inputs", peak, "GiB", at_most=most)


class _Layer(nn.Module):
    """A stand-in for the module that transformers passes to an attention function."""

    is_causal = True
    num_key_value_groups = HEADS // KEYS


def attention(show: Figures) -> None:
    """Part 4: compare packed rows with single documents, and measure the memory of packing."""
    lengths = (23, 9, 32) if show.quick else (700, 37, 2, 1309)
    with show.attempt(f"{VARLEN} beside sdpa"):
        _functions(show, lengths)
    for name in (VARLEN, "flash_attention_2", "sdpa", "eager"):
        with show.attempt(name):
            _documents_alone(show, name, _model(name, "toy" if show.quick else "220M", layers=2), lengths)
            if GPU:
                _memory(show, name)
                torch.cuda.empty_cache()
            else:
                show.skip(f"{name}: memory at {LONG} tokens", "needs a GPU")


def _functions(show: Figures, lengths: tuple[int, ...]) -> None:
    """Compare output and gradients of packed rows with SDPA in float64 under a mask."""
    positions = torch.cat([torch.arange(n, device=DEVICE) for n in lengths]).repeat(2, 1)
    generator = torch.Generator(DEVICE).manual_seed(0)
    drawn = [
        torch.randn(2, heads, sum(lengths), SIZE, generator=generator, device=DEVICE).to(DTYPE)
        for heads in (HEADS, KEYS, KEYS, HEADS)  # the last is the gradient of the output
    ]
    exact = [x.double() for x in drawn]
    bounds, longest = segments(positions)  # computed beforehand, as in the trainer
    documents = dict(zip(SEGMENTS, (bounds, bounds, longest, longest), strict=True))

    def segmented(**options: Any) -> Attention:
        return lambda q, k, v: varlen_attention(_Layer(), q, k, v, None, **documents, **options)[0]

    def masked(mask: Tensor) -> Attention:
        return lambda q, k, v: sdpa_attention_forward(_Layer(), q, k, v, mask)[0]

    mask = document_mask(positions, torch.float64)
    window = lengths[0] // 2
    far = torch.ones(mask.shape[-2:], dtype=torch.bool, device=DEVICE).tril(-window)
    narrow = mask.masked_fill(far, torch.finfo(torch.float64).min)
    ways = {
        f"{VARLEN}, packed": (segmented(), mask),
        "sdpa, packed": (masked(document_mask(positions, DTYPE)), mask),
        f"{VARLEN}, packed, a window of {window} tokens": (segmented(sliding_window=window), narrow),
    }
    for name, (attend, under) in ways.items():
        truth, results = _outcome(masked(under), *exact), _outcome(attend, *drawn)
        errors = {key: relative_error(results[key], truth[key]) for key in truth}
        worst = max(errors, key=errors.__getitem__)
        case = f"{name}: error beside float64 under a mask"
        show(case, errors[worst], at_most=ERROR, always=True, note=f"the worst: {worst}")


def _outcome(attend: Attention, q: Tensor, k: Tensor, v: Tensor, above: Tensor) -> dict[str, Tensor]:
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    output = attend(q, k, v)
    gradients = torch.autograd.grad(output, (q, k, v), above.transpose(1, 2))
    return dict(zip(("output", "d_query", "d_key", "d_value"), (output.detach(), *gradients), strict=True))


def _model(name: str, size: str, layers: int) -> Any:
    """Return a random LLaMA with the fused head. Raises MissingError if it needs flash-attn and lacks it."""
    if name == "flash_attention_2":
        gpu_setting.needs("flash_attn")
    model = gpu_setting.random_model(size, DTYPE, name, num_hidden_layers=layers)
    model.config.use_cache = False
    fuse_model(model, get_objective("mle"))
    return model


def _row(lengths: tuple[int, ...], seeds: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids, positions and labels of a row of random documents, each drawn from a seed."""
    drawn = [
        torch.randint(1024, (length,), generator=torch.Generator().manual_seed(seed))
        for length, seed in zip(lengths, seeds, strict=True)
    ]
    positions = torch.cat([torch.arange(length) for length in lengths])
    labels = torch.cat([torch.cat((ids[1:], torch.tensor([IGNORE]))) for ids in drawn])
    return torch.cat(drawn)[None].to(DEVICE), positions[None].to(DEVICE), labels[None].to(DEVICE)


@torch.no_grad()
def _nll(model: Any, lengths: tuple[int, ...], seeds: list[int]) -> Tensor:
    """Return the mean negative log-likelihood per token of each document in a packed row."""
    ids, positions, labels = _row(lengths, seeds)
    document = torch.repeat_interleave(torch.tensor(lengths)).to(DEVICE)
    results = []
    for i in range(len(lengths)):
        part = labels.masked_fill(document != i, IGNORE)
        sums = model(input_ids=ids, labels=part, position_ids=positions)
        results.append(sums.nll / sums.tokens.clamp(min=1))
    return torch.stack(results).double()


def _documents_alone(show: Figures, name: str, model: Any, lengths: tuple[int, ...]) -> None:
    seeds = list(range(1, len(lengths) + 1))
    packed = _nll(model, lengths, seeds)
    alone = torch.cat([_nll(model, (n,), [seed]) for n, seed in zip(lengths, seeds, strict=True)])
    value = float(((packed - alone).abs() / alone).max())
    show(f"{name}: packed and alone, likelihoods apart", value, at_most=ALIKE, always=True)
    moved = float((_nll(model, lengths, [0, *seeds[1:]]) - packed)[1:].abs().max())
    note = "largest change of a document's likelihood when the one before it is another"
    show(f"{name}: what other documents leak, nats a token", moved, at_most=1e-4, always=True, note=note)


def _memory(show: Figures, name: str) -> None:
    """Compare the peak memory of a forward and backward pass of packed rows with single documents.

    The target is the memory that `planning.footprint` counts. For SDPA this is a boolean mask, and the
    bfloat16 version that every layer keeps for its backward pass. For attention by segments it is nothing,
    and one mask is tolerated. Eager attention, which keeps all of its scores, is not counted.
    """
    peaks = []  # GiB
    model = _model(name, "220M", LAYERS)
    for lengths in ((LONG,), (1000, 50, 2046, 1000)):
        rows = [_row(lengths, [10 * row + i for i in range(len(lengths))]) for row in range(ROWS)]
        ids, positions, labels = (torch.cat(column) for column in zip(*rows, strict=True))

        def step(ids: Tensor = ids, positions: Tensor = positions, labels: Tensor = labels) -> None:
            sums = model(input_ids=ids, labels=labels, position_ids=positions)
            (sums.loss / sums.tokens).backward()
            model.zero_grad(set_to_none=True)

        step()
        peaks.append(common.peak_memory_mb(step) / 1024)
    single, packed = peaks
    note = f"{packed:.2f} GiB packed, {single:.2f} as one document a row"
    mask = ROWS * LONG * LONG / GIB
    most = {"sdpa": (1 + 2 * LAYERS) * mask, "eager": None}.get(name, mask)
    case = f"{name}: memory of packing, {ROWS} rows of {LONG} tokens, {LAYERS} layers"
    show(case, packed - single, "GiB", at_most=most, note=note)
