"""Less memory for activations: MLPs in tiles of tokens, and checkpoints in host memory."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from emo.common.errors import UserError

from .device.devices import on_gpu

TILED = "model.tiled_mlp"


def offload_checkpoints(model: nn.Module) -> None:
    """Keep the inputs of checkpointed layers in host memory until the backward pass."""
    pinned = on_gpu()

    def checkpoint_on_host(function: Any, *args: Any) -> Any:
        with save_on_cpu(pin_memory=pinned):
            return checkpoint(function, *args, use_reentrant=False)

    for module in model.modules():
        if hasattr(module, "_gradient_checkpointing_func"):
            module._gradient_checkpointing_func = checkpoint_on_host  # type: ignore[assignment]


def tile_mlps(model: nn.Module, width: int) -> None:
    """Compute the MLP of each layer in tiles of about `width` tokens, by DeepSpeed's TiledMLP.

    Its activations are computed again in the backward pass. Parameters, their names and saved files do not
    change. Raises UserError for a model that has no such MLPs.
    """
    for mlp in find_mlps(model):
        _tile_mlp(mlp, width)


def find_mlps(model: nn.Module) -> list[nn.Module]:
    """Return the MLPs of a model's layers. Raises UserError if they cannot be computed in tiles."""
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    mlps = [mlp for layer in layers if isinstance(mlp := getattr(layer, "mlp", None), nn.Module)]
    problem = ""
    if not mlps:
        problem = f"finds no MLPs in the layers of {type(model).__name__}"
    elif any(isinstance(part, nn.Dropout) and part.p for mlp in mlps for part in mlp.modules()):
        problem = "needs MLPs without dropout, also of adapters (model.lora.dropout=0)"
    elif any(hasattr(mlp, "experts") or len(inspect.signature(mlp.forward).parameters) > 1 for mlp in mlps):
        problem = f"does not work with the MLPs of {type(model).__name__}"
    if problem:
        raise UserError(f"{TILED} {problem}. Set it to false", code="tiled-mlp")
    return mlps


def _tile_mlp(mlp: nn.Module, width: int) -> None:
    plain = mlp.forward

    def forward(hidden: Tensor) -> Tensor:
        # Imported late, because DeepSpeed's module imports all of its runtime.
        from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP

        tokens = hidden.shape[:-1].numel()
        tiles = -(-tokens // width)
        if tiles < 2 or not (torch.is_grad_enabled() and hidden.requires_grad):
            return plain(hidden)
        tiles = -(-tokens // -(-tokens // tiles))  # torch.chunk may make fewer than asked for
        tiled: Tensor = TiledMLP.apply(lambda _, x: plain(x), mlp, hidden, tiles, list(mlp.parameters()))
        return tiled

    mlp.forward = forward
