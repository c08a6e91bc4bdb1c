"""Attention within packed documents, without a mask: torch's kernel under the name `varlen`.

Importing this module registers it with transformers. It applies to calls with the bounds of documents
(`head.segments`). Calls without them, as in generation, use SDPA.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from .head import VARLEN

LARGEST_HEAD = 256  # the kernel's limit on the size of a head
HEAD_STEP = 8  # its sizes are multiples of this


def varlen_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Return causal attention within documents, [b, L, H, D], for the arguments that transformers passes.

    Args:
        module: The attention layer.
        query: [b, H, L, D].
        key: [b, H', L, D], where H is a multiple of H'.
        value: [b, H', L, D'].
        attention_mask: For SDPA, which computes calls without bounds.
        dropout: Must be 0.
        scaling: Factor on the scores; by default D^-0.5.
        sliding_window: Number of tokens that a token sees, itself included.
        cu_seq_lens_q: Bounds of the documents (`head.segments`).
        max_length_q: Length of the longest document.

    Raises:
        ValueError: an argument that the kernel does not support.
    """
    if cu_seq_lens_q is None or max_length_q is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    unsupported = [name for name in ("softcap", "s_aux", "position_bias") if kwargs.get(name) is not None]
    causal = kwargs.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        unsupported.append("attention to later tokens")
    if key.shape[2] != query.shape[2]:
        unsupported.append("a cache of keys")
    if dropout:
        unsupported.append("dropout")
    if unsupported:
        raise ValueError(f"attn_implementation={VARLEN} does not support {', '.join(unsupported)}")
    b, _, length, size = query.shape
    scale = size**-0.5 if scaling is None else scaling
    width = -max(size, value.shape[-1]) // HEAD_STEP * -HEAD_STEP
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    # zeros at the end of the last dimension change no product
    q, k, v = (x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in (q, k, v))
    left = -1 if sliding_window is None or sliding_window >= max_length_q else sliding_window - 1
    attend = attend_in_one_call if q.is_cuda else attend_per_document
    out = attend(q, k, v, cu_seq_lens_q, max_length_q, scale, left)
    return out[..., : value.shape[-1]].unflatten(0, (b, length)), None


def attend_in_one_call(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int, scale: float, left: int
) -> Tensor:
    """Return causal attention within documents on a GPU, by one call of torch's kernel, [T, H, D].

    q is [T, H, D], k and v are [T, H', D] in half precision. Document i is tokens bounds[i] to
    bounds[i + 1] - 1. A token sees itself and `left` earlier tokens, or all for -1.
    """
    window = (left, 0)
    lengths = (bounds, bounds, longest, longest)
    return varlen_attn(q, k, v, *lengths, scale=scale, window_size=window, enable_gqa=True)  # type: ignore


def attend_per_document(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int, scale: float, left: int
) -> Tensor:
    """Return the same as `attend_in_one_call` on any device, in any precision, one document at a time."""
    parts = []
    for first, end in itertools.pairwise(bounds.tolist()):
        mask = None
        if 0 <= left < end - first - 1:
            ones = torch.ones(end - first, end - first, dtype=torch.bool, device=q.device)
            mask = ones.tril().triu(-left)
        query, key, value = (x[first:end].transpose(0, 1)[None] for x in (q, k, v))
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
        )
        parts.append(out[0].transpose(0, 1))
    return torch.cat(parts)


AttentionInterface.register(VARLEN, varlen_attention)
AttentionMaskInterface.register(VARLEN, sdpa_mask)
