"""Exports as other programs read them: names of tensors, RoPE under both names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig
from transformers.conversion_mapping import get_model_conversion_mapping

from emo.pipeline.export import exported_names, exported_tensors, persistent_buffers
from emo.pipeline.readers import saved_tensors, write_config
from tests.helpers.families import EXPORTED, FAMILIES, family


IGNORED = ("rope_parameters", "_name_or_path", "architectures", "dtype", "torch_dtype")


def without_type(rope: dict[str, Any]) -> dict[str, Any]:
    """RoPE's settings without their older name of the kind, which transformers carries along."""
    return {k: without_type(v) if isinstance(v, dict) else v for k, v in rope.items() if k != "type"}


@pytest.mark.parametrize("name", FAMILIES | EXPORTED)
def test_names_and_rope_of_every_family(name: str, tmp_path: Path) -> None:
    """Tensors are named and shaped as `save_pretrained` does it; RoPE's settings are read again unchanged."""
    model = family(name)
    tensors = [(t.name, *t.parts) for t in exported_tensors(model)] + [*persistent_buffers(model)]
    model.config.save_pretrained(tmp_path)
    write_config(tmp_path, {})
    config = json.loads((tmp_path / "config.json").read_text())
    before, after = model.config.to_dict(), AutoConfig.from_pretrained(tmp_path).to_dict()
    assert config.get("torch_dtype") == config.get("dtype")
    if (rope := before.get("rope_parameters")) is not None:
        assert without_type(rope) == without_type(after["rope_parameters"])
        assert {"rope_theta", "rotary_emb_base", "global_rope_theta"} & config.keys()
        assert "rope_scaling" in config
    assert {k: v for k, v in after.items() if k in before and k not in IGNORED} == {
        k: v for k, v in before.items() if k in after and k not in IGNORED
    }
    if get_model_conversion_mapping(model, add_legacy=False):
        model.save_pretrained(tmp_path)
        expected = load_file(tmp_path / "model.safetensors")
        written = dict(saved_tensors(model, exported_names(model), iter(tensors)))
        assert written.keys() == expected.keys()
        assert all(torch.equal(written[key], expected[key]) for key in expected)
