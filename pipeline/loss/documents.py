"""Documents that share a row: where each begins, and the inputs with which none sees another.

A document begins with a row, and wherever a position does not follow the one before it by one. Padding after
the last document of a row counts as another document.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from common.errors import UserError

VARLEN = "varlen"  # the attention of varlen.py
BOUNDS, LONGEST = "cu_seq_lens_q", "max_length_q"  # transformers' names for the results of `segments`
SEGMENTS = (BOUNDS, "cu_seq_lens_k", LONGEST, "max_length_k")


def by_segments(attention: str) -> bool:
    """Return True for attention that takes the documents' bounds, and needs no mask to separate them."""
    return attention == VARLEN or "flash" in attention


def segments(positions: Tensor) -> tuple[Tensor, int]:
    """Return the bounds of the documents in rows of `positions` [b, L], and the length of the longest.

    The bounds are int32 [documents + 1], cumulative lengths over all rows one after the other, from 0 to b *
    L. On a GPU this waits for the device; the loader calls it on the host.
    """
    begins = torch.nn.functional.pad(_starts(positions), (1, 0), value=True).flatten().nonzero()[:, 0]
    bounds = torch.cat((begins, begins.new_tensor([positions.numel()]))).to(torch.int32)
    return bounds, int(bounds.diff().max())


def by_document(values: Tensor, bounds: Tensor) -> Tensor:
    """Return the sums of `values` [N] over the documents with these `bounds` (of `segments`), float64.

    Each is summed in one order, so that equal values have equal sums.
    """
    return torch.segment_reduce(values.double(), "sum", lengths=bounds.diff())


def keep_apart(model: Any, positions: Tensor, inputs: dict[str, Any]) -> None:
    """Complete the `inputs` of a fused `model` so that no document of its rows sees another.

    positions [b, L] are among the inputs. So may be their `segments`, as cu_seq_lens_q and max_length_q;
    otherwise these are computed here, once for all layers. Raises UserError for documents that
    `model.packing` cannot keep apart, and for a mask that contradicts the positions.
    """
    bounds, _, longest, _ = (inputs.pop(name, None) for name in SEGMENTS)
    mask = inputs.get("attention_mask")
    if mask is not None:
        if mask.dim() != 2 or not _restart(positions):
            return
        # padding after a document is never seen; padding before one must be separated by its position
        begins = mask[:, 1:].bool() & ~mask[:, :-1].bool()
        if bool((begins & ~_starts(positions)).any()):
            raise UserError(
                "attention_mask and position_ids contradict each other: a document follows padding although "
                "its positions continue; pad on the right, or restart position_ids where a document starts",
                code="mask-positions",
            )
        del inputs["attention_mask"]  # with it, transformers would not look at the positions
    attention = model.config._attn_implementation
    if model.packing == "refused" and _restart(positions):
        raise UserError(refusal(model), code="packing")
    if model.packing == "mask":
        kind = model.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else model.dtype
        inputs["attention_mask"] = document_mask(positions, dtype)
    elif model.packing == "positions" and by_segments(attention):
        if bounds is None or longest is None:
            bounds, longest = segments(positions)
        inputs.update(zip(SEGMENTS, (bounds, bounds, longest, longest), strict=True))
        if attention == VARLEN:
            # transformers takes a mask of four dimensions as it is, and then makes none of [b, 1, L, L]
            inputs["attention_mask"] = positions.new_empty((1, 1, 0, 0), dtype=torch.bool)


def refusal(model: Any) -> str:
    """Return the reason why packed rows cannot train `model`, in one line."""
    attention = model.config._attn_implementation
    problem = (
        f"{type(model).__name__} lets documents that share a row see each other, with "
        f"attn_implementation={attention}: "
    )
    if by_segments(attention):
        return f"{problem}it does not heed where documents begin; set attn_implementation=sdpa or eager"
    return (
        f"{problem}it ignores restarting positions and cannot be given a mask that separates them; train it "
        "on rows of one document each, or choose a model family that keeps them apart (LLaMA, GPT-2, OPT, "
        "Mistral, Qwen, Gemma)"
    )


def document_mask(positions: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask to add to attention scores, [b, 1, L, L]: 0 within a document, backwards."""
    document = torch.nn.functional.pad(_starts(positions), (1, 0)).cumsum(dim=1)
    same = document[:, None, :, None] == document[:, None, None, :]
    mask = torch.full(same.shape, torch.finfo(dtype).min, dtype=dtype, device=same.device)
    return mask.masked_fill_(same.tril(), 0.0)


def _starts(positions: Tensor) -> Tensor:
    """Return True for those of tokens 1 to L - 1 that start a document, [b, L - 1]."""
    return positions.diff(dim=1) != 1


def _restart(positions: Tensor) -> bool:
    return bool(_starts(positions).any())
