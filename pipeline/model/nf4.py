"""Frozen weights in NF4, the 4-bit type of QLoRA (Dettmers et al. 2023, arXiv 2305.14314).

bitsandbytes stores one value of 4 bits per weight, and statistics of blocks of 64 weights. A linear layer
restores its weight in the model's dtype whenever it is used.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D


def is_4bit(parameter: Tensor | None) -> bool:
    """Return whether bitsandbytes stores a parameter in 4 bits."""
    return getattr(parameter, "quant_state", None) is not None


def nf4_options(name: str | None, dtype: torch.dtype, on_cpu: bool = False) -> dict[str, Any]:
    """Return options of `from_pretrained` for linear layers in the type `name`, or none without a name.

    on_cpu: keep the weights on the CPU. transformers puts them on the GPU if there is one.
    """
    if name is None:
        return {}
    from transformers import BitsAndBytesConfig

    options = {
        "bnb_4bit_quant_type": name,
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": dtype,
    }
    place = {"device_map": {"": "cpu"}} if on_cpu else {}
    return {"quantization_config": BitsAndBytesConfig(load_in_4bit=True, **options), **place}


def prepare_nf4(model: PreTrainedModel) -> None:
    """Keep 4-bit weights out of checkpoints, and their layout constant while a model trains."""

    def drop_statistics(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for name in [name for name in state if name.startswith(f"{prefix}weight.")]:
            del state[name]

    for layer in model.modules():
        if is_4bit(getattr(layer, "weight", None)):
            # Otherwise validation on some CPUs would store the weights in another order.
            layer.support_avx512bf16_for_cpu = False
            layer.register_state_dict_post_hook(drop_statistics)


def full_values(parameter: nn.Parameter) -> Tensor:
    """Return the values of a parameter, restored in the model's dtype if it is stored in 4 bits."""
    if not is_4bit(parameter):
        return parameter.detach()
    restore = importlib.import_module("bitsandbytes.functional").dequantize_4bit
    return restore(parameter.data, parameter.quant_state)  # type: ignore[attr-defined]


def linear_weights(model: Any) -> Iterator[nn.Parameter]:
    """Yield the weights that NF4 applies to: those of frozen linear layers except the output head."""
    head = model.get_output_embeddings()
    for layer in model.modules():
        is_linear = isinstance(layer, (nn.Linear, Conv1D)) and layer is not head
        if is_linear and not layer.weight.requires_grad:
            yield layer.weight
