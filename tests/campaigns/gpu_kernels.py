"""Parts 1, 2 and 6 of the GPU campaign: the fused loss right and fast, and documents that share a row."""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from emo.common.errors import UserError
from emo.common.labels import IGNORE
from emo.pipeline.loss import fuse_model, get_objective
from emo.pipeline.loss.cost import CostEmbedding
from emo.pipeline.loss.fused import fused_linear_loss
from emo.pipeline.loss.head import SEGMENTS, VARLEN, document_mask, segments
from tests.bench import common, objectives
from tests.bench._objectives_setting import Setting, Shape
from tests.campaigns import gpu_setting
from tests.campaigns.gpu_setting import DEVICE, GIB, GPU, MILLI, Figures, MissingError
from tests.helpers.loss_reference import losses_from_logits, relative_error, unit_rows

DTYPE = torch.bfloat16 if GPU else torch.float32
ERROR = 1.5e-2 if GPU else 1e-5  # relative, of an attention function
ALIKE = 1e-2 if GPU else 1e-4  # relative, of likelihoods: kernels add in another order
HEADS, KEYS, SIZE = 16, 4, 64  # heads of queries, of keys and values, and values of each
LONG = 4096  # tokens of a row whose memory is measured
ROWS, LAYERS = 2, 8
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]

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
                show.need_seconds(20)
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
    shapes = [Shape("LLaMA-7B head", 8192, 32000, 4096, "bfloat16")]
    shapes.append(Shape("large vocabulary", 8192, 152064, 4096, "bfloat16"))
    if show.quick:
        shapes = [Shape("small", 128, 2000, 64, "bfloat16")]
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
    setting = Setting(shape)
    report = common.Report("gpu")
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


class _Layer(nn.Module):
    """What transformers hands to an attention function besides tensors."""

    is_causal = True
    num_key_value_groups = HEADS // KEYS


def attention(show: Figures) -> None:
    """Part 6: packed rows give what single documents give; what packing costs in memory."""
    lengths = (23, 9, 32) if show.quick else (700, 37, 2, 1309)
    with show.attempt(f"{VARLEN} beside sdpa"):
        _functions(show, lengths)
    for name in (VARLEN, "flash_attention_2", "sdpa", "eager"):
        with show.attempt(name):
            show.need_seconds(15)
            model = _model(name, "toy" if show.quick else "220M", layers=2)
            _documents_alone(show, name, model, lengths)
            del model
            if GPU:
                _memory(show, name)
            else:
                show.skip(f"{name}: memory at {LONG} tokens", "needs a GPU")
        if GPU:
            torch.cuda.empty_cache()


def _functions(show: Figures, lengths: tuple[int, ...]) -> None:
    """Output and gradients of packed rows beside SDPA in float64 under a mask; the time that they take."""
    try:
        from emo.pipeline.loss.varlen import varlen_attention
    except ImportError as error:
        raise MissingError(error) from None
    positions = torch.cat([torch.arange(n, device=DEVICE) for n in lengths]).repeat(2, 1)
    generator = torch.Generator(DEVICE).manual_seed(0)
    given = [
        torch.randn(2, heads, sum(lengths), SIZE, generator=generator, device=DEVICE).to(DTYPE)
        for heads in (HEADS, KEYS, KEYS, HEADS)  # the last is the gradient of the output
    ]
    exact = [x.double() for x in given]
    bounds, longest = segments(positions)  # known beforehand, as in the trainer
    documents = dict(zip(SEGMENTS, (bounds, bounds, longest, longest), strict=True))

    def segmented(**options: Any) -> Attention:
        return lambda q, k, v: varlen_attention(_Layer(), q, k, v, None, **documents, **options)[0]

    def masked(mask: Tensor) -> Attention:
        return lambda q, k, v: sdpa_attention_forward(_Layer(), q, k, v, mask)[0]

    mask = document_mask(positions, torch.float64)
    truth = _outcome(masked(mask), *exact)
    known = {VARLEN: segmented(), "sdpa": masked(document_mask(positions, DTYPE))}
    for name, attend in known.items():
        results = _outcome(attend, *given)
        errors = {case: relative_error(results[case], truth[case]) for case in truth}
        worst = max(errors, key=errors.__getitem__)
        case = f"{name}, packed: error beside float64 under a mask"
        show(case, errors[worst], at_most=ERROR, always=True, note=f"the worst: {worst}")
    window = lengths[0] // 2
    far = torch.ones(mask.shape[-2:], dtype=torch.bool, device=DEVICE).tril(-window)
    truth = _outcome(masked(mask.masked_fill(far, torch.finfo(torch.float64).min)), *exact)
    results = _outcome(segmented(sliding_window=window), *given)
    value = max(relative_error(results[case], truth[case]) for case in truth)
    case = f"{VARLEN}, packed, a window of {window} tokens: error beside float64 under a mask"
    show(case, value, at_most=ERROR, always=True)
    runs: dict[str, Callable[[int], Any]] = {
        name: lambda i, attend=attend: _outcome(attend, *given)  # type: ignore[misc]
        for name, attend in known.items()
    }
    times = common.race(runs, rounds=1 if show.quick else 10)
    note = f"sdpa under its mask takes {statistics.median(times['sdpa']) * 1e3:.2f} ms"
    show(f"{VARLEN} / sdpa, forward and backward, time", common.ratio(times, VARLEN, "sdpa"), note=note)


def _outcome(attend: Attention, q: Tensor, k: Tensor, v: Tensor, above: Tensor) -> dict[str, Tensor]:
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    output = attend(q, k, v)
    gradients = torch.autograd.grad(output, (q, k, v), above.transpose(1, 2))
    return dict(zip(("output", "d_query", "d_key", "d_value"), (output.detach(), *gradients), strict=True))


def _model(name: str, size: str, layers: int) -> Any:
    """Return a LLaMA with random weights that ends in the fused head.

    Raises MissingError without that attention; where the trainer cannot be asked, it is tried.
    """
    if importlib.util.find_spec("pydantic") is None:
        if name == VARLEN:
            import emo.pipeline.loss.varlen  # noqa: F401 - registers it
        elif name == "flash_attention_2":
            gpu_setting.needs("flash_attn")
    else:
        from transformers import LlamaConfig

        from emo.pipeline.config import ModelConfig
        from emo.pipeline.planning.host import usable_attention

        dtype = "bfloat16" if GPU else "float32"
        config = ModelConfig(path="random weights", attn_implementation=name, dtype=dtype)
        try:
            usable_attention(config, LlamaConfig())
        except UserError as error:
            raise MissingError(error) from None
    model = gpu_setting.random_model(size, num_hidden_layers=layers, dtype=DTYPE, attn_implementation=name)
    model.config.use_cache = False
    fuse_model(model, get_objective("mle"))
    return model


def _documents(model: Any, lengths: tuple[int, ...], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    vocabulary = model.config.vocab_size
    return [torch.randint(vocabulary, (length,), generator=generator).to(DEVICE) for length in lengths]


def _row(documents: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    ids = torch.cat(documents)[None]
    positions = torch.cat([torch.arange(len(d), device=DEVICE) for d in documents])[None]
    labels = torch.cat([torch.cat((d[1:], d.new_tensor([IGNORE]))) for d in documents])[None]
    return ids, positions, labels


@torch.no_grad()
def _nll(model: Any, documents: list[Tensor]) -> Tensor:
    """Return the mean negative log-likelihood of a token of each document of a row that holds them."""
    ids, positions, labels = _row(documents)
    results, start = [], 0
    for document in documents:
        alone = torch.full_like(labels, IGNORE)
        part = slice(start, start + len(document))
        alone[:, part] = labels[:, part]
        sums = model(input_ids=ids, labels=alone, position_ids=positions)
        results.append(sums.nll / sums.tokens.clamp(min=1))
        start += len(document)
    return torch.stack(results).double()


def _documents_alone(show: Figures, name: str, model: Any, lengths: tuple[int, ...]) -> None:
    documents = _documents(model, lengths, seed=1)
    packed = _nll(model, documents)
    alone = torch.cat([_nll(model, [document]) for document in documents])
    value = float(((packed - alone).abs() / alone).max())
    show(f"{name}: packed and alone, likelihoods apart", value, at_most=ALIKE, always=True)
    others = [*_documents(model, lengths[:1], seed=2), *documents[1:]]
    moved = float((_nll(model, others) - packed)[1:].abs().max())
    note = "largest change of a document's likelihood when the one before it is another"
    show(f"{name}: what other documents leak, nats a token", moved, at_most=1e-4, always=True, note=note)


def _memory(show: Figures, name: str) -> None:
    """Peak of a forward and backward pass of ROWS long rows, packed, above that of single documents.

    The target is what `planning.footprint` counts: of SDPA a mask of booleans, and what every layer
    makes of it in bfloat16 and keeps for its backward pass; of attention by segments nothing, or one mask at
    most. Nobody counts eager attention, which keeps all of its scores.
    """
    peaks = []  # GiB
    model = _model(name, "220M", LAYERS)
    for lengths in ((LONG,), (1000, 50, 2046, 1000)):
        rows = [_row(_documents(model, lengths, seed)) for seed in range(ROWS)]
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
