"""Tiled MLPs and checkpoints in host memory have the loss and gradients of plain layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from emo.pipeline.engine import activations
from emo.pipeline.model.kernels import check_kernels
from tests.helpers.families import VOCAB, family
from tests.helpers.refusals import refused

IDS = torch.arange(2 * 23).view(2, 23) % VOCAB


def gradients(model: Any) -> list[Tensor]:
    model.zero_grad()
    model(input_ids=IDS, labels=IDS).loss.backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("width", [1, 5, 7, 45, 64])
@pytest.mark.parametrize("trained", ["", "attn"])
def test_tiled_mlps_have_the_gradients_of_plain_ones(width: int, trained: str) -> None:
    model = family("llama").train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained in name)
    expected = gradients(model)
    activations.tile_mlps(model, width)
    torch.testing.assert_close(gradients(model), expected)
    before = gradients(model)
    check_kernels(model, lambda: model(input_ids=IDS), activations.TILED)
    assert all(map(torch.equal, before, [p.grad for p in model.parameters() if p.grad is not None]))


def test_a_wrong_tile_is_found_and_other_models_are_rejected() -> None:
    model = family("llama")
    activations.tile_mlps(model, 5)
    layer: Any = model.model.layers[0]
    tiled = layer.mlp.forward
    layer.mlp.forward = lambda hidden: tiled(hidden.flip(1))
    with torch.no_grad(), refused("kernels-differ"):
        check_kernels(model, lambda: model(input_ids=IDS), activations.TILED)
    for name, changes in (("opt", {}), ("gpt2", {"resid_pdrop": 0.1})):
        with refused("tiled-mlp"):
            activations.tile_mlps(family(name, **changes), 5)


def test_only_the_inputs_of_layers_go_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    model = family("llama").train()
    expected = gradients(model)
    stored: list[Tensor] = []

    def host(pin_memory: bool) -> saved_tensors_hooks:
        return saved_tensors_hooks(lambda x: (stored.append(x), x)[1], lambda x: x)

    monkeypatch.setattr(activations, "save_on_cpu", host)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    activations.offload_checkpoints(model)
    torch.testing.assert_close(gradients(model), expected)
    large = [x for x in stored if x.numel()]
    assert len(large) == model.config.num_hidden_layers
    assert all(x.shape == (2, 23, model.config.hidden_size) for x in large)
