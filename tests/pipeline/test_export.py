"""Adapters are merged as their layers store weights; what cannot be exported is refused before training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from emo.common.errors import FailureError, UserError
from emo.pipeline import export
from emo.pipeline.config import ModelConfig, RunConfig, load_config
from emo.pipeline.export import exported_tensors, write_shards
from emo.pipeline.model import add_lora
from emo.pipeline.planning.checks import rehearse
from tests.conftest import REPO

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "bos_token_id": 1, "eos_token_id": 2},
    "opt": {"hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 2},
}


def model(family: str, **lora: Any) -> tuple[nn.Module, RunConfig]:
    """A small model, with adapters whose values are not zero if `lora` is given, and its recipe."""
    overrides = [f"model.lora.{k}={v}" for k, v in lora.items()]
    config = load_config(REPO / "launch/recipes/quickstart-pretrain.yaml", overrides)
    torch.manual_seed(0)
    settings = AutoConfig.for_model(family, vocab_size=64, max_position_embeddings=32, **FAMILIES[family])
    plain = AutoModelForCausalLM.from_config(settings).eval()
    if not lora:
        return plain, config
    chosen = ModelConfig(architecture={"model_type": family}, lora=config.model.lora)
    adapted = add_lora(plain, chosen, 0).eval()
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if ".lora_" in name:
                parameter.normal_(std=0.3)
    return adapted, config


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("targets", ["all-linear", "embedding"])
def test_merged_tensors_give_the_adapted_model(family: str, targets: str) -> None:
    """GPT-2's Conv1D stores [in, out]; embeddings carry adapters of another shape."""
    if targets == "embedding":
        targets = {"llama": "[embed_tokens]", "gpt2": "[wte]", "opt": "[embed_tokens]"}[family]
    adapted, config = model(family, r=4, alpha=16, targets=targets)
    if targets != "all-linear" and adapted.get_base_model().config.tie_word_embeddings:  # type: ignore[operator]
        with pytest.raises(UserError, match=r"model.lora.targets: .* and lm_head.weight are one tensor"):
            rehearse(adapted, config)
        return
    rehearse(adapted, config)
    merged = {t.name: t.merged(*(p.detach() for p in t.parts)) for t in exported_tensors(adapted)}
    assert any(t.adapters for t in exported_tensors(adapted))
    plain, _ = model(family)
    plain.load_state_dict(merged, strict=False)
    ids = torch.arange(16)[None]
    with torch.no_grad():
        result, expected = plain(input_ids=ids).logits, adapted(input_ids=ids).logits
    assert torch.allclose(result, expected, atol=1e-4)


def test_a_full_disk_leaves_the_gathers_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other ranks must still find rank 0 in them: the error is returned, and tensors can be drained."""

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export, "save_file", full)
    monkeypatch.setattr(export, "SHARD_BYTES", 100)
    plain, config = model("llama")
    copied = export.Copied(plain, torch.zeros(1), torch.zeros(1), (t for t in tensors(5)))  # type: ignore[arg-type]
    error = export.write_export(copied, config, tmp_path / "x", {}, export.check)
    assert isinstance(error, FailureError) and not (tmp_path / "x").exists()
    assert len(list(copied.tensors)) == 3  # two were taken when the first shard was full


def tensors(count: int) -> list[tuple[str, torch.Tensor]]:
    return [(f"t{i}", torch.zeros(20)) for i in range(count)]


def test_shards_are_named_and_indexed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "SHARD_BYTES", 100)
    write_shards(tmp_path / "x", tensors(3))
    index = json.loads((tmp_path / "x/model.safetensors.index.json").read_text())
    assert index["weight_map"] == {f"t{i}": f"model-0000{i + 1}-of-00003.safetensors" for i in range(3)}
    assert index["metadata"] == {"total_size": 240}
    assert all((tmp_path / "x" / file).is_file() for file in index["weight_map"].values())
