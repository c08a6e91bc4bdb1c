"""Packed rows train like single documents: equal logits, loss and gradients, and no document sees another."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM as Models
from transformers import GPT2Config, LlamaConfig, OPTConfig

from data_prep.shards import TokenDataset
from tests.helpers.corpus import alpaca_rows, data_config, run, segments, texts, train_set, write_jsonl

SMALL: dict[str, Any] = {
    "llama": LlamaConfig(
        vocab_size=400,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
    ),
    "gpt2": GPT2Config(
        vocab_size=400,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=512,
        attn_pdrop=0.0,
        embd_pdrop=0.0,
        resid_pdrop=0.0,
    ),
    "opt": OPTConfig(
        vocab_size=400,
        hidden_size=32,
        ffn_dim=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=512,
        dropout=0.0,
        word_embed_proj_dim=32,
    ),
}


# transformers' OPT makes its mask without looking at position_ids: it needs the mask given.
NEEDS_MASK = ("opt",)


def block_mask(positions: torch.Tensor) -> torch.Tensor:
    """Added to attention scores, [b, 1, L, L]: 0 for earlier tokens of the segment, else -1e30."""
    segment = (positions == 0).cumsum(dim=1)
    same = segment[:, None, :, None] == segment[:, None, None, :]
    return torch.where(same & torch.ones_like(same[:1, :1]).tril(), 0.0, -1e30)


def packed(tmp_path: Path, kind: str) -> TokenDataset:
    """Rows that hold several documents or examples each."""
    rows = alpaca_rows(12) if kind == "instruct" else [{"text": text} for text in texts(40, sentences=2)]
    write_jsonl(tmp_path / "a.jsonl", rows)
    block = 512 if kind == "instruct" else 96
    config = data_config(tmp_path, sources=[{"files": "a.jsonl"}], kind=kind, block=block, shards=1)
    run(config)
    return train_set(config)


def loss_and_gradients(
    model: torch.nn.Module, batches: list[dict[str, torch.Tensor]]
) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
    """Logits of each batch, the summed loss and its gradients."""
    model.zero_grad()
    total, logits = torch.zeros(()), []
    for batch in batches:
        batch = dict(batch)
        labels = batch.pop("labels")
        out = model(**batch, use_cache=False).logits.float()
        logits.append(out.detach())
        total = (
            total
            + torch.nn.functional.cross_entropy(
                out.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"
            ).cpu()
        )
    total.backward()
    return total.detach(), logits, [p.grad.clone() for p in model.parameters() if p.grad is not None]


def compare(
    model: torch.nn.Module, data: TokenDataset, tolerance: float, device: str = "cpu", mask: bool = False
) -> None:
    """Whole packed rows against each segment alone."""
    model = model.eval().to(device)
    rows = {k: torch.from_numpy(v).to(device) for k, v in data.batch(np.arange(len(data))).items()}
    if mask:
        rows["attention_mask"] = block_mask(rows["position_ids"])
    alone = [
        {"input_ids": torch.tensor([ids], device=device), "labels": torch.tensor([labels], device=device)}
        for ids, labels in segments(data)
    ]
    assert len(alone) > 2 * len(data), "rows must hold several segments"
    loss, (together,), gradients = loss_and_gradients(model, [rows])
    loss_alone, apart, gradients_alone = loss_and_gradients(model, alone)
    flat = torch.cat([row[: data.tokens_of(i)] for i, row in enumerate(together)])
    torch.testing.assert_close(flat, torch.cat([one[0] for one in apart]), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(loss, loss_alone, rtol=tolerance, atol=tolerance)
    for a, b in zip(gradients, gradients_alone, strict=True):
        torch.testing.assert_close(
            a, b, rtol=10 * tolerance, atol=10 * tolerance * max(1.0, float(b.abs().max()))
        )


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["text", "instruct"])
@pytest.mark.parametrize("name", SMALL)
def test_packed_equals_unpacked(tmp_path: Path, name: str, kind: str, attention: str) -> None:
    torch.manual_seed(0)
    model = Models.from_config(SMALL[name], attn_implementation=attention)
    compare(model, packed(tmp_path, kind), 1e-5, mask=name in NEEDS_MASK)


@pytest.mark.parametrize("name", SMALL)
def test_no_document_sees_another(tmp_path: Path, name: str) -> None:
    """Other tokens in the first segment change nothing in the later ones; plain positions would let them."""
    torch.manual_seed(0)
    model = Models.from_config(SMALL[name], attn_implementation="sdpa").eval()
    data = packed(tmp_path, "text")
    batch = {k: torch.from_numpy(v) for k, v in data.batch(np.array([1])).items() if k != "labels"}
    second = int((batch["position_ids"][0] == 0).nonzero()[1])
    changed = dict(batch, input_ids=batch["input_ids"].clone())
    changed["input_ids"][0, :second] = (changed["input_ids"][0, :second] + 7) % 400
    masks = {"attention_mask": block_mask(batch["position_ids"])} if name in NEEDS_MASK else {}
    plain = {"position_ids": torch.arange(data.manifest.block)[None]}
    with torch.no_grad():
        before, after = (model(**(b | masks), use_cache=False).logits[0] for b in (batch, changed))
        leak = [model(**(b | plain), use_cache=False).logits[0] for b in (batch, changed)]
    assert not torch.equal(before[:second], after[:second])
    torch.testing.assert_close(before[second:], after[second:], rtol=0, atol=1e-6)
    assert (leak[0][second:] - leak[1][second:]).abs().max() > 1e-3


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.skipif(importlib.util.find_spec("flash_attn") is None, reason="flash-attn is not installed")
@pytest.mark.parametrize("kind", ["text", "instruct"])
def test_packed_equals_unpacked_with_flash_attention(tmp_path: Path, kind: str) -> None:
    torch.manual_seed(0)
    model = Models.from_config(SMALL["llama"], attn_implementation="flash_attention_2", dtype=torch.bfloat16)
    compare(model, packed(tmp_path, kind), 3e-2, "cuda")
