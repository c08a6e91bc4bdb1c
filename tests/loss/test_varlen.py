"""Attention by segments: within a document what it is alone, for every family that is offered it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from emo.common.errors import UserError
from emo.pipeline.config import ModelConfig
from emo.pipeline.loss import fuse_model, get_objective, probe_model
from emo.pipeline.loss.head import segments
from emo.pipeline.loss.varlen import varlen_attention
from emo.pipeline.planning.attention import usable_attention
from tests.helpers.families import FAMILIES, family, tiny_llama
from tests.helpers.loss_reference import relative_error
from tests.helpers.packing import documents, packed_rows

VARLEN = ModelConfig(architecture={"model_type": "llama"}, attn_implementation="varlen")
LAYER = SimpleNamespace(is_causal=True)


def alone(q: Tensor, k: Tensor, v: Tensor, bounds: list[int], scale: float, window: int | None) -> Tensor:
    """The definition, in float64: softmax(q k^T * scale) v over earlier tokens of the document, [T, H, D]."""
    token = torch.arange(bounds[-1])
    document = torch.bucketize(token, torch.tensor(bounds), right=True)
    apart = token[:, None] - token[None, :]
    visible = (document[:, None] == document) & (apart >= 0) & (apart < (window or bounds[-1]))
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * scale
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~visible, -torch.inf).softmax(-1), v)


@pytest.mark.parametrize("window", [None, 1, 9])
@pytest.mark.parametrize(
    ("heads", "groups", "size", "value_size", "scaling"),
    [(2, 2, 16, 16, None), (4, 2, 8, 8, 0.3), (4, 1, 10, 10, None), (2, 1, 12, 7, None)],
)
def test_documents_attend_to_themselves(
    window: int | None, heads: int, groups: int, size: int, value_size: int, scaling: float | None
) -> None:
    """Values and gradients against the definition: grouped heads, windows, widths that the kernel lacks."""
    positions = packed_rows()[2]
    b, length = positions.shape
    bounds, longest = segments(positions)
    torch.manual_seed(0)
    q = torch.randn(b, heads, length, size, requires_grad=True)
    k = torch.randn(b, groups, length, size, requires_grad=True)
    v = torch.randn(b, groups, length, value_size, requires_grad=True)
    weights = torch.randn(b, length, heads, value_size)
    bounded: dict[str, Any] = {"cu_seq_lens_q": bounds, "max_length_q": longest}
    out, _ = varlen_attention(LAYER, q, k, v, None, scaling=scaling, sliding_window=window, **bounded)
    flat = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
    want = alone(*flat, bounds.tolist(), size**-0.5 if scaling is None else scaling, window)
    torch.testing.assert_close(out.flatten(0, 1).double(), want, rtol=1e-5, atol=1e-5)
    got = torch.autograd.grad((out * weights).sum(), (q, k, v), retain_graph=True)
    expected = torch.autograd.grad((want * weights.flatten(0, 1)).sum(), (q, k, v))
    for a, e in zip(got, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("keys", [{"dropout": 0.1}, {"softcap": 3.0}, {"is_causal": False}])
def test_unsupported_arguments_are_errors(keys: dict[str, Any]) -> None:
    x = torch.randn(1, 2, 8, 8)
    bounded: dict[str, Any] = {"cu_seq_lens_q": torch.tensor([0, 8], dtype=torch.int32), "max_length_q": 8}
    with pytest.raises(ValueError):
        varlen_attention(LAYER, x, x, x, None, **bounded, **keys)


# Differences from their usual form: no dropout of attention, no soft cap, grouped heads, windows.
CHANGES: dict[str, dict[str, Any]] = {
    "gpt2": {"attn_pdrop": 0.0},
    "gpt_bigcode": {"attn_pdrop": 0.0},
    "llama": {"num_key_value_heads": 1},
    "mistral": {"num_key_value_heads": 1},
    "gemma": {"num_key_value_heads": 1},
    "qwen2": {
        "num_key_value_heads": 1,
        "use_sliding_window": True,
        "sliding_window": 4,
        "max_window_layers": 1,
    },
}
# Their own attention, soft caps, recurrences, or dropout.
REFUSED = {
    *("gpt_neo", "gptj", "falcon", "falcon-alibi", "mpt", "bloom", "xglm", "biogpt", "stablelm", "bert"),
    *("gemma2", "mamba", "mamba2", "rwkv", "jamba", "bamba", "falcon_h1", "recurrent_gemma", "xlstm"),
    *("openai-gpt", "bart", "bert-generation", "minimax", "falcon_mamba", "lfm2", "gpt_oss"),
}


def gradients(model: Any, loss: Tensor) -> Tensor:
    model.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("name", FAMILIES)
def test_packed_rows_train_like_single_documents(name: str) -> None:
    """Rows of documents and padding under `varlen`, documents alone under SDPA: one loss, one gradient.

    A family either is offered it, and is right, or is refused it in one line.
    """
    changes = CHANGES.get(name, {})
    ordinary = family(name, **changes)
    try:
        model = family(name, usable_attention(VARLEN, ordinary.config), **changes)
        fuse_model(model, get_objective("mle"))
        assert probe_model(model) == "positions"
    except UserError as error:
        assert name in REFUSED, error
        return
    assert name not in REFUSED
    ids, labels, positions = packed_rows()
    sums = model(input_ids=ids, labels=labels, position_ids=positions)
    logits = (ordinary(input_ids=part[None], use_cache=False).logits[0, :-1] for part in documents(ids))
    want = sum(
        F.cross_entropy(z, part[1:], reduction="sum") for z, part in zip(logits, documents(ids), strict=True)
    )
    assert relative_error(sums.loss.detach(), want.detach()) <= 1e-5
    assert relative_error(gradients(model, sums.loss), gradients(ordinary, want)) <= 2e-4
    with torch.no_grad():  # validation
        model.eval()
        validation = model(input_ids=ids, labels=labels, position_ids=positions).loss
    assert relative_error(validation, want.detach()) <= 1e-5


def test_no_tensor_grows_with_the_square_of_a_block() -> None:
    """A block of 4,096 tokens, forward and backward; under SDPA its mask alone has 4,096 squared."""
    length, elements = 4096, 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal elements
            out = func(*args, **(kwargs or {}))
            tensors = out if isinstance(out, (tuple, list)) else (out,)
            elements = max([elements, *(t.numel() for t in tensors if isinstance(t, Tensor))])
            return out

    lengths = [1500, 600, 1, 1995]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    ids = torch.arange(length)[None] % 61
    largest = {}
    for attention in ("sdpa", "varlen"):
        model = tiny_llama(61, max_position_embeddings=length, num_key_value_heads=1)
        model.set_attn_implementation(attention)
        fuse_model(model, get_objective("mle"))
        elements = 0
        with Watch():
            model(input_ids=ids, labels=ids, position_ids=positions).loss.backward()
        largest[attention] = elements
    assert largest["sdpa"] >= length**2
    assert largest["varlen"] <= 128 * length
