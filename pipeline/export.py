"""A trained model as Hugging Face files: safetensors shards, configuration, tokenizer, model card.

Parameters are gathered one at a time and streamed to shards, so that no rank ever holds the whole model.
Adapters are merged into the weights. The export is checked by loading it and comparing logits.
"""

from __future__ import annotations

import contextlib
import copy
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.integrations import unset_hf_deepspeed_config

from common.files import write_text
from pipeline.config import RunConfig
from pipeline.engine import Engine
from pipeline.ranks import barrier
from pipeline.run_dir import EXPORT_INFO

SHARD_BYTES = 4 * 10**9
# Logits may differ by rounding only; a wrong or missing tensor changes them by far more.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.15}


class ExportError(Exception):
    """The exported model does not reproduce the trained one."""


def export_model(engine: Engine, config: RunConfig, target: Path, info: dict[str, object]) -> None:
    """Write the model to `target`; all ranks must call. Raises ExportError when the check fails."""
    model = engine.model
    base = unwrap(model)
    probe = torch.arange(16, device=engine.world.device)[None] % base.config.vocab_size
    engine.ds.eval()
    with torch.no_grad():
        logits = engine.ds(input_ids=probe).logits
    partial = target.with_name(target.name + ".partial")
    if engine.world.is_main:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    _write_weights(model, partial, engine.world.is_main)
    if engine.world.is_main:
        _write_rest(base, config, partial, info)
        _check(partial, probe.cpu(), logits.cpu())
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
    barrier()


def unwrap(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside an adapter wrapper, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator,return-value]


def exported_tensors(model: nn.Module) -> Iterator[tuple[str, list[nn.Parameter]]]:
    """Names of the exported model with the parameters each is made of; all ranks in the same order.

    A tied head appears once, under its first name, as `from_pretrained` expects. With adapters the list is
    [base weight, A, B].
    """
    parameters = dict(unwrap(model).named_parameters())
    for name, parameter in parameters.items():
        if ".lora_" in name:
            continue
        stem = name.removesuffix("base_layer.weight")
        adapters = [
            parameters[f"{stem}lora_{x}.default.weight"]
            for x in "AB"
            if stem != name and f"{stem}lora_{x}.default.weight" in parameters
        ]
        yield name.replace(".base_layer.", "."), [parameter, *adapters]


def _write_weights(model: nn.Module, target: Path, is_main: bool) -> None:
    """Stream all tensors to safetensors shards on rank 0; the others take part in the gathers."""
    shard: dict[str, Tensor] = {}
    shards: list[list[str]] = []
    sizes = 0

    def flush() -> None:
        if shard:
            save_file(shard, str(target / f"part-{len(shards):05d}"), metadata={"format": "pt"})
            shards.append(list(shard))
            shard.clear()

    def keep(name: str, tensor: Tensor) -> None:
        nonlocal sizes
        if sum(t.nbytes for t in shard.values()) + tensor.nbytes > SHARD_BYTES:
            flush()
        shard[name] = tensor.detach().to("cpu", copy=True).contiguous()
        sizes += tensor.nbytes

    scaling = _adapter_scaling(model)
    for name, parts in exported_tensors(model):
        partitioned = [p for p in parts if hasattr(p, "ds_id")]
        gather = deepspeed.zero.GatheredParameters(partitioned) if partitioned else contextlib.nullcontext()
        with gather:
            if is_main:
                weight, *adapters = (p.detach() for p in parts)
                if adapters:
                    delta = adapters[1].float() @ adapters[0].float()
                    weight = (weight.float() + scaling * delta).to(weight.dtype)
                keep(name, weight)
    if not is_main:
        return
    base = unwrap(model)
    persistent = set(base.state_dict())
    for name, buffer in base.named_buffers():
        if name in persistent:
            keep(name, buffer)
    flush()
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    if len(shards) == 1:
        names = ["model.safetensors"]
    else:
        weight_map = {t: names[i] for i, tensors in enumerate(shards) for t in tensors}
        index = {"metadata": {"total_size": sizes}, "weight_map": weight_map}
        write_text(target / "model.safetensors.index.json", json.dumps(index, indent=1))
    for i, name in enumerate(names):
        (target / f"part-{i:05d}").rename(target / name)


def _adapter_scaling(model: nn.Module) -> float:
    peft_config = getattr(model, "peft_config", None)
    return peft_config["default"].lora_alpha / peft_config["default"].r if peft_config else 1.0


def _write_rest(base: PreTrainedModel, config: RunConfig, target: Path, info: dict[str, object]) -> None:
    """Configuration, generation defaults, tokenizer, model card and export.json."""
    settings = copy.deepcopy(base.config)
    settings.architectures = [type(base).__name__.removeprefix("Fused")]
    settings.use_cache = True
    settings.save_pretrained(target)
    if base.generation_config is not None:
        base.generation_config.save_pretrained(target)
    tokenizer = config.data.dir / "tokenizer"
    for file in tokenizer.iterdir() if tokenizer.is_dir() else []:
        shutil.copy2(file, target / file.name)
    write_text(target / EXPORT_INFO, json.dumps(info, indent=1, default=str))
    write_text(target / "README.md", _model_card(config, info))


def _model_card(config: RunConfig, info: dict[str, object]) -> str:
    origin = config.model.path or "a new model"
    facts = "\n".join(f"| {key} | {value} |" for key, value in info.items())
    sources = ", ".join(str(s.hub or s.files or s.embedded) for s in config.data.sources)
    return (
        f"---\nlibrary_name: transformers\npipeline_tag: text-generation\n---\n"
        f"# {config.run_dir.name}\n\nTrained from {origin} with the `{config.objective.name}` objective on "
        f"{sources}.\n\n| fact | value |\n|---|---|\n{facts}\n"
    )


def _check(directory: Path, probe: Tensor, expected: Tensor) -> None:
    """Load the export on the CPU and compare its logits [1, T, V] with the trained model's."""
    unset_hf_deepspeed_config()
    loaded: Any = AutoModelForCausalLM.from_pretrained(directory, dtype="auto", output_loading_info=True)
    model, report = loaded
    wrong = [*report["missing_keys"], *report["unexpected_keys"], *report["mismatched_keys"]]
    if wrong:
        raise ExportError(f"{directory}: tensors do not fit the configuration: {sorted(wrong)[:3]}")
    model.eval()
    with torch.no_grad():
        found = model(input_ids=probe).logits
    scale = expected.float().abs().max().clamp_min(1.0)
    error = ((found.float() - expected.float()).abs().max() / scale).item()
    if not error <= TOLERANCE[model.dtype]:
        raise ExportError(f"{directory}: reloaded logits differ by {error:.2g} of their size")
