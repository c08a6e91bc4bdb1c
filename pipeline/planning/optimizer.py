"""What the optimizer takes: its groups of parameters, and DeepSpeed's Muon where a recipe asks for it."""

from __future__ import annotations

import importlib
import os
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from common.errors import UserError


def parameter_groups(model: nn.Module, weight_decay: float, use_muon: bool = False) -> list[dict[str, Any]]:
    """Return the optimizer's groups: biases and the gains of norms (fewer than two dimensions) do not decay.

    One group where that makes no difference; under ZeRO-3 `ds_shape` is the shape before partitioning. With
    `use_muon`: before them the group that Muon takes, matrices that are neither an embedding nor the head.

    Raises UserError for a model whose matrices Muon would scale the wrong way round, or not find.
    """
    trainable = [p for p in model.parameters() if p.requires_grad]
    if use_muon:
        if any(isinstance(module, Conv1D) for module in model.modules()):
            raise UserError(
                "train.optimizer=muon scales a matrix by its outputs over its inputs, and this model stores "
                "them transposed (Conv1D); set train.optimizer=adamw without muon_lr, or take another model"
            )
        if any(_dimensions(p) > 2 for p in trainable):
            raise UserError(
                "train.optimizer=muon is for matrices, and weights of this model have three dimensions, as "
                "all experts of a mixture in one tensor have; set train.optimizer=adamw without muon_lr",
                code="muon-dimensions",
            )
        embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
        head: Any = model.get_output_embeddings()  # type: ignore[operator]
        tables = {id(p) for m in (*embeddings, head) for p in m.parameters()}
        body = [p for p in trainable if _dimensions(p) == 2 and id(p) not in tables]
        taken = {id(p) for p in body}
        first = {"params": body, "weight_decay": weight_decay, "use_muon": True}
        return [first, *_adam_groups([p for p in trainable if id(p) not in taken], weight_decay)]
    return _adam_groups(trainable, weight_decay)


def _adam_groups(trainable: list[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    decaying = [p for p in trainable if _dimensions(p) > 1]
    fixed = [p for p in trainable if _dimensions(p) <= 1]
    if not weight_decay or not decaying or not fixed:
        return [{"params": trainable, "weight_decay": weight_decay if decaying else 0.0}]
    return [{"params": decaying, "weight_decay": weight_decay}, {"params": fixed, "weight_decay": 0.0}]


def _dimensions(parameter: nn.Parameter) -> int:
    return len(getattr(parameter, "ds_shape", parameter.shape))


def muon(groups: list[dict[str, Any]], params: dict[str, Any]) -> torch.optim.Optimizer:
    """Return DeepSpeed's Muon with PyTorch's AdamW for the rest, of `parameter_groups`.

    params: of the DeepSpeed file's section `optimizer`. DeepSpeed itself would sort by name, and take the
    embeddings of GPT-2 and MPT for matrices of the body.
    """
    from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

    settings = []
    for group in groups:
        use = group.get("use_muon", False)
        keys = ("momentum",) if use else ("betas", "eps")
        rate = params["muon_lr" if use else "lr"]
        settings.append({**group, "use_muon": use, "lr": rate} | {key: params[key] for key in keys})
        for parameter in group["params"]:
            parameter.use_muon = use
    fused = {"fused": True} if params.get("fused") else {}
    return MuonWithAuxAdam(settings, adam_optimizer=torch.optim.AdamW, adam_optimizer_kwargs=fused)


def import_muon() -> None:
    """Import DeepSpeed's Muon, which it asks for whatever the optimizer, with its functions left uncompiled.

    Their decorators alone would load PyTorch's compiler: a second of every start. On a GPU that trains with
    Muon they stay compiled.
    """
    before = os.environ.get("TORCHDYNAMO_DISABLE")
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    try:
        importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
    finally:
        del os.environ["TORCHDYNAMO_DISABLE"]
        if before is not None:
            os.environ["TORCHDYNAMO_DISABLE"] = before
