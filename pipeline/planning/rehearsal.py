"""The export of a run, gone through before its first step without any weights."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from common.errors import UserError, one_line
from pipeline.config import RunConfig
from pipeline.export import Exported, exported_tensors, unwrap, write_rest


def rehearse(model: nn.Module, config: RunConfig) -> None:
    """Go through the export of `model` without its weights: names, shapes, adapters, configuration, files.

    `model` may lie on the meta device or be partitioned. Raises UserError when the export of the trained
    model would fail.
    """
    base = unwrap(model)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        try:
            write_rest(base, config, directory, {})
            settings = AutoConfig.from_pretrained(directory)
            with torch.device("meta"):
                plain = AutoModelForCausalLM.from_config(settings)
        except (OSError, ValueError, KeyError) as error:
            raise UserError(
                f"the trained model could not be exported: its configuration cannot be written and read "
                f"back ({one_line(error, 200)}); correct model.path or model.architecture"
            ) from None
    tensors = list(exported_tensors(model))
    _refuse_tied(base, tensors)
    expected = {n: tuple(p.shape) for n, p in plain.named_parameters()}
    actual = {tensor.name: _merged_shape(tensor) for tensor in tensors}
    for name in sorted(expected.keys() | actual.keys()):
        if expected.get(name) != actual.get(name):
            raise UserError(
                f"the trained model could not be exported: {name} would be {_shape(actual.get(name))} "
                f"where {type(plain).__name__} has {_shape(expected.get(name))}; "
                "set model.lora.targets to other layers, or use another model"
            )


def _refuse_tied(base: PreTrainedModel, tensors: list[Exported]) -> None:
    """Adapters on one of two layers that share a weight cannot be merged: the other would change as well."""
    names: dict[int, list[str]] = {}
    for name, parameter in base.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name.replace(".base_layer.", "."))
    for tensor in tensors:
        sharing = names[id(tensor.base)]
        if tensor.adapters and len(sharing) > 1:
            raise UserError(
                f"model.lora.targets: {' and '.join(sharing)} are one tensor, and adapters on one of the "
                "layers cannot be exported; leave it out of the targets"
            )


def _merged_shape(tensor: Exported) -> tuple[int, ...] | str:
    """Return the shape of an exported tensor, or why its parts do not fit together."""
    whole = [torch.empty(getattr(p, "ds_shape", p.shape), device="meta") for p in tensor.parts]
    try:
        return tuple(tensor.merged(*whole).shape)
    except RuntimeError as error:
        return one_line(error, 100)


def _shape(shape: tuple[int, ...] | str | None) -> str:
    return "nothing" if shape is None else str(list(shape)) if isinstance(shape, tuple) else shape
