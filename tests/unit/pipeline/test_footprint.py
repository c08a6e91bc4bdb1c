"""The predicted memory of activations matches traces."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, LlamaConfig, LlamaModel

from emo.pipeline.planning import footprint
from emo.pipeline.planning.footprint import Setup, Sizes
from tests.helpers.accelerator import traced

TOKENS = 3001  # differs from all widths, so that a trace can recognise tensors over tokens


class FlashAttention(torch.autograd.Function):
    """A stand-in that saves the same tensors for its backward pass as flash attention."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.empty_like(q.transpose(1, 2))
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:3], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(x) for x in ctx.saved_tensors[:3])


def attention(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **_: Any) -> tuple[Tensor, None]:
    return FlashAttention.apply(q, k, v), None


def peak(sizes: Sizes, layers: int, checkpointing: bool, implementation: str = "traced") -> int:
    """Return the peak bytes of a LLaMA's activations in a forward and backward pass over one row."""
    shape = {"hidden_size": sizes.hidden, "intermediate_size": sizes.inner, "num_hidden_layers": layers}
    shape |= {"num_attention_heads": sizes.hidden // 128, "num_key_value_heads": sizes.key_values // 128}
    config = LlamaConfig(**shape, vocab_size=64)
    AttentionInterface.register("traced", attention)
    with torch.device("meta"):
        model = LlamaModel(config).to(torch.bfloat16).train()
    model.config._attn_implementation = implementation
    eager = {"attention_mask": torch.empty(1, 1, TOKENS, TOKENS, dtype=torch.bfloat16, device="meta")}
    inputs = eager if implementation == "eager" else {}
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    embedded = torch.empty(1, TOKENS, sizes.hidden, dtype=torch.bfloat16, device="meta", requires_grad=True)
    with traced(embedded, counts=lambda tensor: TOKENS in tensor.shape) as trace:
        hidden = model(inputs_embeds=embedded, use_cache=False, **inputs).last_hidden_state
        hidden.backward(torch.empty_like(hidden))
    return trace.peak


LLAMA = {
    "7B": Sizes(0, 0, 0, 32, 4096, 11008, 4096, True, 32000, 291),
    "13B": Sizes(0, 0, 0, 40, 5120, 13824, 5120, True, 32000, 363),
    "8B": Sizes(0, 0, 0, 32, 4096, 14336, 1024, True, 128256, 291),
}


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", list(LLAMA))
def test_predicted_activations_are_those_of_a_trace(name: str, checkpointing: bool) -> None:
    sizes = LLAMA[name]
    two, three, four = (peak(sizes, layers, checkpointing) for layers in (2, 3, 4))
    assert four - three == three - two  # all layers need the same memory
    total = four + (four - three) * (sizes.layers - 4)
    setup = Setup(8, 3, 1, TOKENS, checkpointing=checkpointing)
    assert footprint.memory(sizes, setup).activations == pytest.approx(total, rel=0.1)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_predicted_scores_of_eager_attention_are_those_of_a_trace(checkpointing: bool) -> None:
    sizes = dataclasses.replace(LLAMA["8B"], layers=3, heads=32)
    setup = Setup(8, 3, 1, TOKENS, checkpointing=checkpointing, eager=True)
    total = peak(sizes, 3, checkpointing, "eager")
    assert footprint.memory(sizes, setup).activations == pytest.approx(total, rel=0.1)
