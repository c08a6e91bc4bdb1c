"""Biases and the gains of norms do not decay, as in Trainer."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.trainer_pt_utils import get_parameter_names

from emo.common.errors import UserError
from emo.pipeline.planning.ds_file import parameter_groups
from tests.helpers.families import family as of_family
from tests.pipeline.test_export import FAMILIES


def model(family: str) -> nn.Module:
    settings = AutoConfig.for_model(family, vocab_size=64, max_position_embeddings=32, **FAMILIES[family])
    return AutoModelForCausalLM.from_config(settings)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_groups_are_those_of_trainer(family: str) -> None:
    result = model(family)
    forbidden = [
        r"bias",
        r"layernorm",
        r"rmsnorm",
        r"(?:^|\.)norm(?:$|\.)",
        r"_norm(?:$|\.)",
        r"\.ln_",
        r"^ln_",
    ]
    decaying = set(get_parameter_names(result, [nn.LayerNorm], forbidden))
    names = {id(p): n for n, p in result.named_parameters()}
    first, second = parameter_groups(result, 0.1)
    assert {names[id(p)] for p in first["params"]} == decaying & set(names.values())
    assert {names[id(p)] for p in second["params"]} == set(names.values()) - decaying
    assert (first["weight_decay"], second["weight_decay"]) == (0.1, 0.0)


def test_partitioned_parameters_count_with_their_whole_shape() -> None:
    """Under ZeRO-3 a rank holds flat pieces."""
    layer = nn.Linear(4, 4)
    for parameter in layer.parameters():
        parameter.ds_shape = parameter.shape  # type: ignore[attr-defined]
        parameter.data = torch.empty(0)
    first, second = parameter_groups(layer, 0.1)
    assert first["params"] == [layer.weight] and second["params"] == [layer.bias]


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "gpt2"])
def test_muon_takes_the_matrices_of_the_body(family: str) -> None:
    result = model(family)
    first, *others = parameter_groups(result, 0.1, use_muon=True)
    names = {id(p): n for n, p in result.named_parameters()}
    taken = {names[id(p)] for p in first["params"]}
    assert first["use_muon"] and first["weight_decay"] == 0.1
    assert taken and all(result.get_parameter(name).dim() == 2 for name in taken)
    tables = [result.get_input_embeddings().weight, result.get_output_embeddings().weight]
    assert not taken & {names[id(p)] for p in tables if id(p) in names}
    assert not any(word in name for name in taken for word in ("embed", "lm_head", "wte", "wpe"))
    assert [group["weight_decay"] for group in others] == [0.1, 0.0]
    together = [p for group in (first, *others) for p in group["params"]]
    assert len(together) == len({id(p) for p in together}) == len(names)


def test_muon_refuses_matrices_that_are_stored_transposed() -> None:
    with pytest.raises(UserError, match="this model stores them transposed"):
        parameter_groups(model("gpt2"), 0.1, use_muon=True)


def test_muon_refuses_experts_in_one_tensor() -> None:
    """They would be left to AdamW, at its rate, without a word."""
    with pytest.raises(UserError) as error:
        parameter_groups(of_family("mixtral"), 0.1, use_muon=True)
    assert error.value.code == "muon-dimensions"
