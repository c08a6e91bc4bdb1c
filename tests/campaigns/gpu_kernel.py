"""Part 6 of the GPU campaign, its first half: torch's kernel for documents beside SDPA, without any model."""

from __future__ import annotations

import importlib
import inspect
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from emo.pipeline.loss.head import SEGMENTS, VARLEN, document_mask, segments
from tests.bench import common
from tests.campaigns.gpu_figures import Figures, MissingError
from tests.helpers.loss_reference import relative_error

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
ERROR = 1.5e-2 if GPU else 1e-5  # relative, of bfloat16 and of float32
HEADS, KEYS, SIZE = 16, 4, 64  # heads of queries, of keys and values, and values of each
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


class _Layer(nn.Module):
    """What transformers hands to an attention function besides tensors."""

    is_causal = True
    num_key_value_groups = HEADS // KEYS


def functions(show: Figures) -> None:
    """Output and gradients of packed rows beside SDPA in float64 under a mask; the time that they take."""
    varlen, note = _kernel()
    lengths = (23, 9, 32) if show.quick else (700, 37, 2, 1309)
    positions = torch.cat([torch.arange(n, device=DEVICE) for n in lengths]).repeat(2, 1)
    generator = torch.Generator(DEVICE).manual_seed(0)
    dtype = torch.bfloat16 if GPU else torch.float32
    given = [
        torch.randn(2, heads, sum(lengths), SIZE, generator=generator, device=DEVICE).to(dtype)
        for heads in (HEADS, KEYS, KEYS, HEADS)  # the last is the gradient of the output
    ]
    exact = [x.double() for x in given]
    truth = _outcome(_masked(positions, torch.float64), *exact)
    known = {VARLEN: _segmented(varlen, positions), "sdpa": _masked(positions, dtype)}
    for name, attend in known.items():
        errors = {
            case: relative_error(results, truth[case]) for case, results in _outcome(attend, *given).items()
        }
        worst = max(errors, key=errors.__getitem__)
        why = f"the worst: {worst}" + (note if name == VARLEN else "")
        case = f"{name}, packed: error beside float64 under a mask"
        show(case, errors[worst], at_most=ERROR, always=True, note=why)
    window = lengths[0] // 2
    mask = document_mask(positions, torch.float64)
    far = torch.ones(mask.shape[-2:], dtype=torch.bool, device=DEVICE).tril(-window)
    truth = _outcome(_under(mask.masked_fill(far, torch.finfo(torch.float64).min)), *exact)
    results = _outcome(_segmented(varlen, positions, sliding_window=window), *given)
    value = max(relative_error(results[case], truth[case]) for case in truth)
    case = f"{VARLEN}, packed, a window of {window} tokens: error beside float64 under a mask"
    show(case, value, at_most=ERROR, always=True, note=note.removeprefix("; "))
    runs: dict[str, Callable[[int], Any]] = {
        name: lambda i, attend=attend: _outcome(attend, *given)  # type: ignore[misc]
        for name, attend in known.items()
    }
    times = common.race(runs, rounds=1 if show.quick else 10)
    note = f"sdpa under its mask takes {statistics.median(times['sdpa']) * 1e3:.2f} ms"
    show(f"{VARLEN} / sdpa, forward and backward, time", common.ratio(times, VARLEN, "sdpa"), note=note)


def _kernel() -> tuple[Any, str]:
    """The module of the attention, and what has to be said of it. Raises MissingError without the kernel.

    Before torch 2.12 the kernel may want as many heads of keys as of queries; they are repeated for it here,
    so that the rest of it can be compared.
    """
    try:
        module = importlib.import_module("emo.pipeline.loss.varlen")
    except ImportError as error:
        raise MissingError(error) from None
    kernel = module.varlen_attn
    names = inspect.signature(kernel).parameters
    lacking = [name for name in ("scale", "window_size") if name not in names]
    if lacking:
        raise MissingError(f"varlen_attn of torch {torch.__version__} has no {', '.join(lacking)}")
    if "enable_gqa" in names:
        return module, ""

    def repeated(q: Tensor, k: Tensor, v: Tensor, *bounds: Any, enable_gqa: bool, **options: Any) -> Any:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        return kernel(q, k, v, *bounds, **options)

    module.varlen_attn = repeated  # type: ignore[attr-defined]
    return module, f"; keys are repeated: varlen_attn of torch {torch.__version__} has no enable_gqa"


def _segmented(module: Any, positions: Tensor, **options: Any) -> Attention:
    """Attention by segments; where documents begin is known beforehand, as in the trainer."""
    bounds, longest = segments(positions)
    told = dict(zip(SEGMENTS, (bounds, bounds, longest, longest), strict=True))
    return lambda q, k, v: module.varlen_attention(_Layer(), q, k, v, None, **told, **options)[0]


def _masked(positions: Tensor, dtype: torch.dtype) -> Attention:
    return _under(document_mask(positions, dtype))


def _under(mask: Tensor) -> Attention:
    """SDPA as transformers calls it, under a mask that is there beforehand."""
    return lambda q, k, v: sdpa_attention_forward(_Layer(), q, k, v, mask)[0]


def _outcome(attend: Attention, q: Tensor, k: Tensor, v: Tensor, above: Tensor) -> dict[str, Tensor]:
    """Output [b, L, H, D] and the gradients of queries, keys and values."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    output = attend(q, k, v)
    output.backward(above.transpose(1, 2))
    assert q.grad is not None and k.grad is not None and v.grad is not None
    return {"output": output.detach(), "d_query": q.grad, "d_key": k.grad, "d_value": v.grad}
