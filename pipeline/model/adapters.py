"""LoRA adapters of a model: adding, continuing and writing them. PEFT implements and stores them."""

from __future__ import annotations

import contextlib
import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from emo.common.errors import UserError, nearest, one_line
from emo.common.io.files import sha256, write_text
from emo.common.io.hub import hub_directory
from emo.common.io.untrusted import read_json
from emo.common.io.weights import ADAPTER as SETTINGS
from emo.common.io.weights import ADAPTER_FILE

from ..control.run_dir import read_export_info
from ..loss.models.head import require_plain_head
from .config import LoraConfig, ModelConfig

ADAPTER = "default"  # PEFT's name of a run's only adapter
EXPERTS = "experts, and layers with the names of theirs, cannot have adapters. Name others, such as q_proj"
# Values of PEFT's settings for adapters that can be continued. Others change the scaling or the base model.
USUAL: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "alpha_pattern": ({}, None),
    "rank_pattern": ({}, None),
    "init_lora_weights": (True, False, None, "gaussian"),
}


def add_lora(model: PreTrainedModel, config: ModelConfig, seed: int) -> nn.Module:
    """Add low-rank adapters, initialised from `seed`, to linear layers and freeze all other weights."""

    import peft

    assert config.lora is not None
    targets = config.lora.targets
    for target in targets if isinstance(targets, list) else ():  # peft reports a single wrong name itself
        _check_lora_target(model, target)
    settings = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=config.lora.r,
        lora_alpha=config.lora.alpha,
        lora_dropout=config.lora.dropout,
        target_modules=targets,
        use_rslora=config.lora.use_rslora,
        use_dora=config.lora.use_dora,
    )
    if targets == "all-linear" and (experts := _names_of_experts(model)):
        settings.target_modules = _linear_layers(model) - experts
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            # Adapters stay in the model's dtype. Otherwise ZeRO-3 would build them in float32 and ZeRO-2
            # would cast them. DeepSpeed keeps a float32 copy of all trainable weights.
            adapted = peft.get_peft_model(model, settings, autocast_adapter_dtype=False)
    except (ValueError, re.error) as error:
        reason = EXPERTS if "ParamWrapper" in str(error) else one_line(error)
        raise UserError(f"model.lora.targets={targets}: {reason}", code="lora-targets") from None
    if any(isinstance(module, peft.tuners.lora.ParamWrapper) for module in model.modules()):
        raise UserError(f"model.lora.targets={targets}: {EXPERTS}", code="lora-targets")
    require_plain_head(model)
    if config.lora.train_embeddings:
        if hasattr(model.get_input_embeddings(), "base_layer"):
            problem = "model.lora.train_embeddings=true trains the embeddings in full"
            raise UserError(f"{problem}. Remove them from model.lora.targets", code="lora-targets")
        for layer in _embedding_layers(model):
            layer.requires_grad_(True)
    return adapted


def _names_of_experts(model: PreTrainedModel) -> set[str]:
    """Return the names of layers that PEFT takes for experts, whose weights transformers stacks."""
    from peft.utils import transformers_weight_conversion as conversion

    kind = conversion._MODEL_TO_CONVERSION_PATTERN.get(model.config.model_type)
    return set(conversion._MOE_TARGET_MODULE_MAPPING.get(kind, ()))


def _linear_layers(model: PreTrainedModel) -> set[str]:
    """Return the last parts of the names of linear layers, except the head."""
    head = model.get_output_embeddings()
    layers = ((n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear) and m is not head)
    return {name.rpartition(".")[2] for name, _ in layers}


def _embedding_layers(model: PreTrainedModel) -> tuple[nn.Module, nn.Module]:
    """Return the token embedding and the output head."""
    return model.get_input_embeddings(), model.get_output_embeddings()


def _check_lora_target(model: PreTrainedModel, target: str) -> None:
    """Raise UserError if `target` names no layer of the model."""
    names = [name for name, module in model.named_modules() if name and not list(module.children())]
    if not any(f".{name}".endswith(f".{target}") for name in names):
        suffixes = {name.rpartition(".")[2] for name in names if not name.endswith(".lm_head")}
        hint = nearest(target, sorted(name for name in suffixes if not name.isdigit()))
        raise UserError(
            f"model.lora.targets={target} names no layer of {type(model).__name__}; {hint}",
            code="lora-targets",
        )


def adapter_tensors(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of a model's adapters, with their names in PEFT's files.

    Embeddings and head are among them if they train. PEFT stores a tied weight under both names.
    """
    for name, parameter in model.named_parameters(remove_duplicate=False):
        is_adapter = ".lora_" in name and f".{ADAPTER}" in name  # not those of a teacher
        if is_adapter or (".lora_" not in name and parameter.requires_grad):
            yield name.replace(f".{ADAPTER}", ""), parameter


def _tensor_name(name: str) -> str:
    """Return the name that transformers and PEFT read, of a tensor in an adapter's file.

    PEFT itself writes the lengths of DoRA without `.weight`, and transformers does not find them then.
    """
    return f"{name}.weight" if name.endswith("lora_magnitude_vector") else name


def _find_adapter(source: str) -> Path:
    """Return the directory of an adapter, downloading it from the Hub if necessary."""
    directory = Path(source)
    if not directory.is_dir():
        files = [SETTINGS, ADAPTER_FILE]
        directory = hub_directory(source, None, "model.lora.path: ", code="adapter", allow_patterns=files)
    for name in (SETTINGS, ADAPTER_FILE):
        if not (directory / name).is_file():
            problem = f"model.lora.path={source} has no {name}, so it is not an adapter in PEFT's format"
            raise UserError(f"{problem}. Name the directory of an adapter", code="adapter")
    return directory


def hash_adapter(config: ModelConfig) -> str | None:
    """Return the sha256 of the adapter that training starts from, or None."""
    if config.lora is None or config.lora.path is None:
        return None
    return sha256(_find_adapter(config.lora.path) / ADAPTER_FILE)


def check_adapter(model: nn.Module, config: LoraConfig) -> None:
    """Raise UserError unless the adapter in `config.path` has the recipe's settings and fits the model."""
    assert config.path is not None
    directory = _find_adapter(config.path)
    problem = f"model.lora.path={config.path}"
    try:
        settings = read_json(directory / SETTINGS)
        with safe_open(directory / ADAPTER_FILE, "pt") as file:
            stored = {_tensor_name(name): tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (OSError, ValueError, SafetensorError) as error:
        problem += f" is damaged ({one_line(error, 120)})"
        raise UserError(f"{problem}. Restore it", code="adapter") from None
    for key, usual in USUAL.items():
        if settings.get(key) not in usual:
            cure = "Merge it into its base model with PEFT, and start a new adapter"
            raise UserError(f"{problem} has {key}={settings[key]}. {cure}", code="adapter")
    for key in ("r", "alpha", "use_rslora", "use_dora"):
        wanted = getattr(config, key)
        found = settings.get({"alpha": "lora_alpha"}.get(key, key)) or False
        if found != wanted:
            raise UserError(f"{problem} has {key}={found}. Set model.lora.{key} to that", code="adapter")
    base: Any = model.get_base_model()  # type: ignore[operator]
    if config.train_embeddings:
        tied = base.config.get_text_config().tie_word_embeddings
        if bool(settings.get("ensure_weight_tying")) != tied:
            problem += f" was trained on a model with {'un' * tied}tied embeddings"
            raise UserError(f"{problem}. Set model.path as for that adapter", code="adapter")
    info: dict[str, object] = {}
    with contextlib.suppress(OSError, ValueError):
        info = read_export_info(directory)
    if info and (found := info.get("base_dtype")) != config.base_dtype:
        problem += f" was trained with model.lora.base_dtype={found or 'null'}"
        raise UserError(f"{problem}. Set the same value", code="adapter")
    needed = {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in adapter_tensors(model)}
    if different := sorted(stored.items() ^ needed.items()):
        name, shape = different[0]
        which = "has" if (name, shape) in stored.items() else "lacks"
        cure = "Set model.lora.targets, train_embeddings and model.path as for that adapter"
        raise UserError(f"{problem} {which} {name} of shape {list(shape)}. {cure}", code="adapter")


def load_adapter(model: nn.Module, source: str) -> None:
    """Start the adapters of a model from those in a directory or on the Hub."""
    import deepspeed

    file = _find_adapter(source) / ADAPTER_FILE
    tensors = {_tensor_name(name): tensor for name, tensor in load_file(file).items()}
    for name, parameter in adapter_tensors(model):
        partitioned = [parameter] if hasattr(parameter, "ds_id") else []
        gathered = deepspeed.zero.GatheredParameters(partitioned, modifier_rank=0, enabled=bool(partitioned))
        with gathered, torch.no_grad():
            parameter.copy_(tensors[name])


def write_adapter(
    directory: Path, model: Any, config: ModelConfig, tensors: Iterator[tuple[str, Tensor]]
) -> None:
    """Write an adapter as PEFT does, with the name of its base model."""
    directory.mkdir(parents=True, exist_ok=True)
    save_file(dict(tensors), str(directory / ADAPTER_FILE), metadata={"format": "pt"})
    settings = copy.deepcopy(model.peft_config[ADAPTER])
    is_local = config.path is not None and Path(config.path).is_dir()
    settings.base_model_name_or_path = str(Path(config.path or "").absolute()) if is_local else config.path
    settings.revision = config.revision
    settings.inference_mode = True
    if config.lora is not None and config.lora.train_embeddings:
        base = model.get_base_model()
        names = {layer: name for name, layer in base.named_modules()}
        embedding, head = map(names.__getitem__, _embedding_layers(base))
        settings.ensure_weight_tying = base.config.get_text_config().tie_word_embeddings
        settings.modules_to_save = [embedding] if settings.ensure_weight_tying else [embedding, head]
    tree = {key: sorted(v) if isinstance(v, set) else v for key, v in settings.to_dict().items()}
    write_text(directory / SETTINGS, json.dumps(tree, indent=2, sort_keys=True, default=str) + "\n")
