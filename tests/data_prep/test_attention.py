"""Packed rows train like single documents: equal logits, loss and gradients, and no document sees another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM as Models
from transformers import GPT2Config, LlamaConfig

from emo.data_prep.shards import TokenDataset
from tests.helpers.corpus import alpaca_rows, prepared, segments, texts, train_set, write_jsonl

DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
SMALL: dict[str, Any] = {
    "llama": LlamaConfig(
        vocab_size=400,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    ),
    "gpt2": GPT2Config(vocab_size=400, n_embd=32, n_layer=2, n_head=4, n_positions=512, **DROPOUT),
}


def packed(tmp_path: Path, kind: str) -> TokenDataset:
    """Return rows that hold several documents or examples each."""
    rows = alpaca_rows(12) if kind == "instruct" else [{"text": text} for text in texts(40, sentences=2)]
    write_jsonl(tmp_path / "a.jsonl", rows)
    block = 512 if kind == "instruct" else 96
    config = prepared(tmp_path, kind=kind, sequence_len=block, shards=1)
    return train_set(config)


def loss_and_gradients(
    model: torch.nn.Module, batches: list[dict[str, torch.Tensor]]
) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
    """Return the summed loss, the logits of each batch and the gradients."""
    model.zero_grad()
    total, logits = torch.zeros(()), []
    for batch in batches:
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        logits.append(model(**inputs, use_cache=False).logits)
        flat, labels = logits[-1].flatten(0, 1), batch["labels"].flatten()
        total = total + torch.nn.functional.cross_entropy(flat, labels, ignore_index=-100, reduction="sum")
    total.backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return total.detach(), [batch.detach() for batch in logits], gradients


@pytest.mark.parametrize("kind", ["text", "instruct"])
@pytest.mark.parametrize("name", SMALL)
def test_packed_equals_unpacked(tmp_path: Path, name: str, kind: str) -> None:
    torch.manual_seed(0)
    model = Models.from_config(SMALL[name], attn_implementation="sdpa").eval()
    data = packed(tmp_path, kind)
    rows = {k: torch.from_numpy(v) for k, v in data.batch(np.arange(len(data))).items()}
    alone = [{"input_ids": torch.tensor([i]), "labels": torch.tensor([y])} for i, y in segments(data)]
    assert len(alone) > 2 * len(data), "rows must hold several segments"
    loss, (together,), gradients = loss_and_gradients(model, [rows])
    loss_alone, apart, gradients_alone = loss_and_gradients(model, alone)
    flat = torch.cat([row[: data.tokens_of(i)] for i, row in enumerate(together)])
    torch.testing.assert_close(flat, torch.cat([logits[0] for logits in apart]), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(loss, loss_alone, rtol=1e-5, atol=1e-5)
    for a, b in zip(gradients, gradients_alone, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * max(1.0, float(b.abs().max())))
