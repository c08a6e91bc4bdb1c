"""The DeepSpeed configuration: a file completed from the recipe. Also the optimizer's parameter groups."""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.git_version_info import installed_ops
from deepspeed.ops.op_builder import AsyncIOBuilder
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from pydantic import ValidationError
from torch import nn
from torch.utils import cpp_extension
from transformers.pytorch_utils import Conv1D

from emo.common.config.recipe import format_value
from emo.common.errors import UserError, nearest, one_line
from emo.common.io.untrusted import JSON_BYTES, read_bytes
from emo.common.parallel import set_environment
from emo.common.provenance import REPOSITORY, shipped

from ..batches.config import Batch
from ..config import RunConfig, TrainConfig, flatten
from .device.devices import find_c_compiler, local_ranks, on_gpu
from .freezing import embedding_ids

log = logging.getLogger(__name__)

DsConfig = dict[str, Any]  # JSON: a DeepSpeed configuration or a section of it
ParameterGroup = dict[str, Any]  # as torch.optim expects it

REPORTS = ("tensorboard", "wandb", "comet", "csv_monitor", "flops_profiler")
# Sections and keys of a DeepSpeed file that the recipe decides, and the recipe's keys for them.
OWNED_BY_RECIPE = {
    "train_batch_size": "train.global_batch_size",
    "train_micro_batch_size_per_gpu": "train.micro_batch_size",
    "gradient_accumulation_steps": "train.global_batch_size and train.micro_batch_size",
    "managed_gradient_accumulation": "train.global_batch_size and train.micro_batch_size",
    "optimizer": "train.optimizer, train.learning_rate, train.betas, train.eps, train.weight_decay",
    "scheduler": "train.lr_scheduler_type and train.warmup_ratio",
    "gradient_clipping": "train.max_grad_norm",
    "bf16": "model.dtype",
    "fp16": "model.dtype",
    "amp": "model.dtype",
    **dict.fromkeys(REPORTS, "train.report_to or train.profile"),
}
EIGHT_BIT = {"adamw_8bit": "AdamW8bit", "paged_adamw_8bit": "PagedAdamW8bit"}  # classes of bitsandbytes
BF16_STATES = ("bf16_master_weights_and_grads", "bf16_optimizer_states")  # keys of DeepSpeed's section bf16
MODEL_PARALLEL = {
    "sequence_parallel_size": "which the recipe decides. Remove it, and set train.sequence_parallel",
    "tensor_parallel": "but the loss needs a complete output head. Remove it, and use ZeRO-3 to save memory",
}
AUTO = "auto"  # in files for the Hugging Face Trainer, which fills in its own arguments
# Settings that may differ between two launches of a run: paths, communication and reports. All others, known
# to DeepSpeed or not, decide the numbers or the layout of a checkpoint.
FREE = {
    *("steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state", "comms_logger"),
    *("log_level", "timers", "checkpoint", "disable_python_gc", "compile", "aio"),
}
OFFLOADED = ("offload_param", "offload_optimizer")  # sections of "zero_optimization" with a device
FREE_ZERO = {
    *("overlap_comm", "contiguous_gradients", "allgather_partitions", "allgather_bucket_size"),
    *("reduce_bucket_size", "prefetch_bucket_size", "param_persistence_threshold", "zero_hpz_partition_size"),
    *("model_persistence_threshold", "max_live_parameters", "max_reuse_distance", "memory_efficient_linear"),
    *("gather_16bit_weights_on_model_save", "log_trace_cache_warnings", "enable_sanity_checks"),
    *("module_granularity_threshold", "use_all_reduce_for_fetch_params", "allgather_sequential"),
}


def deepspeed_config(config: RunConfig, batch: Batch) -> DsConfig:
    """Return the DeepSpeed configuration: the file that the recipe names, completed from the recipe."""
    path = shipped(config.deepspeed)
    tree = _drop_owned_keys(config, _read_file(path, config.deepspeed), path, batch)
    errors = [
        UserError(f"{path} sets {key}, {cure}", code="ds-cuts")
        for key, cure in MODEL_PARALLEL.items()
        if tree.pop(key, None) is not None
    ]
    errors += _find_unknown_keys(tree, path)
    if errors:
        raise UserError.of(errors)
    zero = tree.setdefault("zero_optimization", {"stage": 1})
    for part in OFFLOADED:
        if (zero.get(part) or {}).get("device", "none") == "none":
            zero.pop(part, None)  # it has no effect
    _check_combination(config, tree, path, batch.ranks)
    on_cpu = get_accelerator().device_name() == "cpu"
    if on_cpu:
        zero["overlap_comm"] = False  # gloo has no streams to overlap on
        for part in OFFLOADED:
            (zero.get(part) or {}).pop("pin_memory", None)
    if config.train.optimizer == "muon":
        zero["reduce_scatter"] = False  # Muon needs complete gradients
    narrow = config.train.state_dtype == "bfloat16"
    if narrow:
        tree["data_types"] = {"grad_accum_dtype": "bf16"}
    if config.train.optimizer in EIGHT_BIT:
        tree["zero_allow_untested_optimizer"] = True  # DeepSpeed accepts only known classes otherwise
    tree.update(
        train_batch_size=batch.micro * batch.accumulation * batch.ranks,  # a shared row counts for each rank
        train_micro_batch_size_per_gpu=batch.micro,
        gradient_accumulation_steps=batch.accumulation,
        optimizer=_optimizer_section(config.train, fused=not on_cpu or "offload_optimizer" in zero),
        gradient_clipping=config.train.max_grad_norm,
        bf16={"enabled": config.model.dtype == "bfloat16"}
        | (dict.fromkeys(BF16_STATES, True) if narrow else {}),
        steps_per_print=10**9,
        timers={"throughput": {"enabled": False}},  # it would wait for the device twice per micro-batch
    )
    return tree


def _optimizer_section(train: TrainConfig, fused: bool) -> DsConfig:
    """Return the section `optimizer`.

    AdamW is always PyTorch's. DeepSpeed's AdamW is compiled when first used, which needs a CUDA toolkit on
    every host, and has another state. The fused one is as fast: it runs one kernel over each flat partition.
    """
    params: DsConfig = {"lr": train.learning_rate, "betas": list(train.betas), "eps": train.eps}
    params |= {"weight_decay": train.weight_decay, "torch_adam": True}
    if fused:
        params["fused"] = True
    if train.optimizer == "adamw":
        return {"type": "AdamW", "params": params}
    if train.optimizer in EIGHT_BIT:
        return {"type": EIGHT_BIT[train.optimizer], "params": params}
    # Muon's author and DeepSpeed both use this momentum.
    return {"type": "Muon", "params": params | {"muon_lr": train.muon_lr, "momentum": 0.95}}


def _drop_owned_keys(config: RunConfig, tree: DsConfig, path: Path, batch: Batch) -> DsConfig:
    """Return a DeepSpeed file without the keys that the recipe decides and without "auto" values.

    Files for the Hugging Face Trainer work unchanged. One warning lists the ignored keys. Raises UserError
    that lists all values which contradict the recipe.
    """
    remaining = _drop_auto(tree)
    owned = {key: remaining.pop(key) for key in OWNED_BY_RECIPE if key in remaining}
    errors = []
    for key, value in _contradictions(config, owned, batch):
        cure = f"Remove it, or change {OWNED_BY_RECIPE[key.partition('.')[0]]}"
        problem = f"{path} sets {key}={format_value(value)}, which contradicts the recipe"
        errors.append(UserError(f"{problem}. {cure}", code="ds-owned"))
    if errors:
        raise UserError.of(errors)
    ignored = [key for key in tree if key in OWNED_BY_RECIPE]
    autos = [key for key, value in flatten(tree, ".") if _is_auto(value)]
    defaults = [key for key in autos if key.partition(".")[0] not in ignored]
    if ignored or defaults:
        parts = [f"the recipe decides {', '.join(ignored)}"] if ignored else []
        parts += [f"DeepSpeed's defaults are used for {', '.join(defaults)}"] if defaults else []
        log.warning("%s: %s", path, "; ".join(parts))
    return remaining


def _contradictions(config: RunConfig, owned: DsConfig, batch: Batch) -> Iterator[tuple[str, Any]]:
    """Yield the values of a DeepSpeed file, by dotted key, that contradict the recipe."""
    train = config.train
    expected: DsConfig = {
        "train_batch_size": train.global_batch_size,
        "gradient_accumulation_steps": batch.accumulation,
        "managed_gradient_accumulation": True,
        "gradient_clipping": train.max_grad_norm,
        "bf16.enabled": config.model.dtype == "bfloat16",
        "optimizer.params.lr": train.learning_rate,
        "optimizer.params.betas": list(train.betas),
        "optimizer.params.eps": train.eps,
        "optimizer.params.weight_decay": train.weight_decay,
        **{f"{key}.enabled": False for key in ("fp16", "amp", *REPORTS)},
    }
    for key, value in flatten(owned, "."):
        if key == "optimizer.type":
            contradicts = value not in ("Adam", "AdamW") or train.optimizer != "adamw"
        elif key == "train_micro_batch_size_per_gpu":
            contradicts = value not in (batch.micro, train.micro_batch_size)
        elif key in expected:
            contradicts = value != expected[key]
        else:  # a schedule with numbers, or a value in place of a section
            contradicts = key in OWNED_BY_RECIPE or (key.startswith("scheduler.") and key != "scheduler.type")
        if contradicts:
            yield key, value


def _is_auto(value: Any) -> bool:
    return value == AUTO or (isinstance(value, list) and AUTO in value)


def _drop_auto(tree: DsConfig) -> DsConfig:
    present = ((key, value) for key, value in tree.items() if not _is_auto(value))
    return {key: _drop_auto(value) if isinstance(value, dict) else value for key, value in present}


def decisive_settings(ds_config: Mapping[str, Any]) -> DsConfig:
    """Return the settings that decide a run's numbers or the layout of its checkpoints."""
    zero = DeepSpeedZeroConfig(**ds_config.get("zero_optimization", {}))
    tree = zero.model_dump(mode="json", exclude_defaults=True, exclude=FREE_ZERO)
    for part in OFFLOADED:
        device = (tree.pop(part, None) or {}).get("device", "none")
        if device != "none":
            tree[part] = device
    others = {k: v for k, v in ds_config.items() if k not in FREE and k not in OWNED_BY_RECIPE}
    return others | {"zero_optimization": tree | {"stage": zero_stage(ds_config)}}


def zero_stage(ds_config: Mapping[str, Any]) -> int:
    """Return the ZeRO stage of a DeepSpeed configuration."""
    return int(ds_config.get("zero_optimization", {}).get("stage", 0))


def check_deepspeed_host(ds_config: DsConfig) -> None:
    """Raise UserError if this host lacks something that the configuration needs."""
    if on_gpu() and importlib.util.find_spec("triton") is not None and find_c_compiler() is None:
        raise UserError("Triton needs a C compiler, and this host has none. Install gcc", code="compiler")
    zero = ds_config.get("zero_optimization", {})
    size = zero.get("zero_hpz_partition_size", 1)
    ranks = local_ranks()
    if size > 1 and ranks % size:
        problem = f"zero_hpz_partition_size={size} does not divide the {ranks} ranks of a host"
        raise UserError(f"{problem}. Set it to {ranks} or a divisor", code="hpz-ranks")
    offload = zero.get("offload_param") or {}
    if offload.get("device") != "nvme":
        return
    if on_gpu() and cpp_extension.CUDA_HOME is None and not installed_ops.get("async_io"):
        raise UserError("weights on NVMe need nvcc. Install the CUDA toolkit", code="nvme-nvcc")
    if not AsyncIOBuilder().is_compatible():
        raise UserError("weights on NVMe need libaio. Install libaio-dev on every host", code="nvme-libaio")
    if not os.access(offload.get("nvme_path") or "(not given)", os.W_OK):
        raise UserError("nvme_path is not a writable directory. Set it to one", code="nvme-path")


def _read_file(path: Path, setting: Path) -> DsConfig:
    """Return the content of a DeepSpeed file without null values, which DeepSpeed treats as absent."""
    if not path.is_file():
        files = sorted(REPOSITORY.glob("ds_configs/*.json"))
        hint = nearest(str(setting), [file.relative_to(REPOSITORY).as_posix() for file in files])
        raise UserError(f"deepspeed={setting} is not a file; {hint}", code="ds-file")

    def reject_repeats(pairs: list[tuple[str, Any]]) -> DsConfig:
        values = dict(pairs)  # plain JSON would keep the last of repeated keys
        if len(values) < len(pairs):
            raise ValueError(f"a key is repeated: {', '.join(key for key, _ in pairs)}")
        return values

    try:
        tree: Any = json.loads(read_bytes(path, JSON_BYTES), object_pairs_hook=reject_repeats)
    except (ValueError, OSError, RecursionError) as error:
        raise UserError(f"deepspeed={path} is not JSON: {one_line(error, 150)}", code="ds-file") from None
    if not isinstance(tree, dict):
        raise UserError(f"deepspeed={path} must hold a JSON object, not {format_value(tree)}", code="ds-file")
    tree = {key: value for key, value in tree.items() if value is not None}
    if not isinstance(zero := tree.get("zero_optimization", AUTO), dict) and zero != AUTO:
        problem = f"{path}: zero_optimization must be a section, not {format_value(zero)}"
        raise UserError(problem, code="ds-file")
    return tree


class _Lookups(dict[str, Any]):
    """A dictionary that remembers which keys were looked up, present or not."""

    keys_read: set[str]

    def get(self, key: str, default: Any = None) -> Any:
        self.keys_read.add(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.keys_read.add(str(key))
        return super().__contains__(key)


def _find_unknown_keys(tree: DsConfig, path: Path) -> list[UserError]:
    """Return errors for values that DeepSpeed rejects and for keys that it would ignore.

    DeepSpeed parses the file here. A top-level key that it does not look up is unknown.
    """
    lookups = _Lookups(tree, train_micro_batch_size_per_gpu=1, gradient_accumulation_steps=1)
    lookups.keys_read = set()
    section = "zero_optimization."
    try:
        DeepSpeedZeroConfig(**tree.get("zero_optimization", {}))
        section = ""
        DeepSpeedConfig(lookups)
        if tree.get("data_types", {}).keys() - {"grad_accum_dtype"}:
            raise ValueError("data_types supports only grad_accum_dtype")
    except ValidationError as error:
        messages = [
            f"rejects {section}{'.'.join(map(str, e['loc']))}: {_describe(e)} "
            f"(given: {format_value(e['input'])})"
            for e in error.errors()
        ]
    except Exception as error:  # DeepSpeed raises any class for values that it does not expect
        messages = [f"rejects the file: {one_line(error, 200)}"]
    else:
        known = sorted(lookups.keys_read - OWNED_BY_RECIPE.keys())
        unknown = (key for key in tree if key not in lookups.keys_read)
        messages = [f"does not know the key {key}; {nearest(key, known)}" for key in unknown]
    return [UserError(f"{path}: DeepSpeed {message}", code="ds-file") for message in messages]


def _describe(problem: Mapping[str, Any]) -> str:
    """Return pydantic's message. For an enumeration, list a value once even if several members share it."""
    if problem["type"] != "enum":
        return str(problem["msg"])
    values = dict.fromkeys(problem["ctx"]["expected"].replace(" or ", ", ").split(", "))
    return f"must be one of {', '.join(values)}"


def _check_combination(config: RunConfig, tree: DsConfig, path: Path, ranks: int) -> None:
    """Raise UserError for settings that are valid but do not work together."""
    zero = tree["zero_optimization"]
    stage = int(zero.get("stage", 0))
    size = zero.get("zero_hpz_partition_size", 1)
    offload = zero.get("offload_optimizer") or {}
    muon = config.train.optimizer == "muon"
    errors = []
    if stage == 0:
        problem = f"{path} sets ZeRO stage 0, under which DeepSpeed applies gradients that are not finite"
        errors.append(UserError(f"{problem}. Set stage 1, which gives the same numbers", code="zero-stage"))
    problem = ""
    if offload.get("ratio", 1.0) != 1.0 or offload.get("super_offload") or zero.get("zenflow"):
        problem = "zenflow, super_offload and ratio need DeepSpeed's own Adam. Remove them"
    elif size > 1 and (stage != 3 or ranks % size):
        problem = f"zero_hpz_partition_size={size} needs ZeRO stage 3 and must divide the ranks. Remove it"
    elif muon and (offload or zero.get("reduce_scatter") or config.model.lora is not None):
        # Impossible, or never compared with plain Muon. With reduce_scatter, DeepSpeed 0.19.8 rejects ZeRO-3,
        # and a bfloat16 model under ZeRO-2 did not train one of its norms.
        problem = (
            "train.optimizer=muon cannot be combined with model.lora, offload_optimizer or reduce_scatter"
        )
    elif offload and config.train.optimizer in EIGHT_BIT:
        problem = f"train.optimizer={config.train.optimizer} cannot be combined with offload_optimizer. "
        problem += "Set deepspeed=ds_configs/zero3.json, or train.optimizer=adamw"
    elif config.train.state_dtype == "bfloat16" and (offload or config.model.dtype != "bfloat16"):
        problem = "train.state_dtype=bfloat16 needs model.dtype=bfloat16 and no offload_optimizer. Set "
        problem += "train.state_dtype=float32"
    elif stage == 3 and config.model.linear_dtype is not None:
        problem = f"model.lora.base_dtype={config.model.linear_dtype} does not work under ZeRO-3, which "
        problem += "cannot partition 4-bit weights. Set deepspeed=ds_configs/zero2.json"
    elif config.model.lora is not None and (zero.get("offload_param") or {}).get("device") == "nvme":
        problem = "model.lora does not work with weights on NVMe (offload_param). Offload them to the CPU"
    elif offload.get("device") == "nvme":
        problem = "an optimizer on NVMe cannot resume. Set its device to cpu, or put only the weights on NVMe"
        problem += " (ds_configs/zero3_nvme.json)"
    if problem:
        errors.append(UserError(f"{path}: {problem}", code="ds-combination"))
    if errors:
        raise UserError.of(errors)


class Grouping(NamedTuple):
    """Parts of a model that the optimizer treats differently."""

    head_lr_ratio: float = 1.0  # learning rate of the output head relative to other weights
    # Learning rate of the adapters' B and of all vectors relative to A, as PEFT's create_loraplus_optimizer
    # groups them. Adapters of embeddings keep the learning rate.
    loraplus_lr_ratio: float = 1.0
    embeddings_apart: bool = False  # because only embeddings and head train in the first steps

    @classmethod
    def of(cls, config: RunConfig) -> Grouping:
        """Return the grouping of a recipe."""
        lora = config.model.lora
        train = config.train
        loraplus = 1.0 if lora is None else lora.loraplus_lr_ratio
        return cls(train.head_lr_ratio, loraplus, train.only is not None)


UNIFORM = Grouping()


def parameter_groups(
    model: nn.Module, weight_decay: float, use_muon: bool = False, grouping: Grouping = UNIFORM
) -> list[ParameterGroup]:
    """Return the optimizer's groups. Biases and norm gains (fewer than two dimensions) do not decay.

    Args:
        model: A causal LM, partitioned under ZeRO-3.
        weight_decay: Decay of matrices.
        use_muon: Put the matrices that Muon trains in a group before the others.
        grouping: Unless a ratio is 1, its parameters are in separate groups with this `ratio`. Embeddings and
            head that are apart are in groups before the others, with `embedding` true.

    Raises UserError for a model that Muon cannot train.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups: list[ParameterGroup] = []
    if use_muon:
        body = _muon_matrices(model, parameters)
        groups.append({"params": body, "weight_decay": weight_decay, "use_muon": True})
        body_ids = set(map(id, body))
        parameters = [p for p in parameters if id(p) not in body_ids]
    decaying = [p for p in parameters if _dimensions(p) > 1]
    fixed = [p for p in parameters if _dimensions(p) < 2]
    if weight_decay and decaying and fixed:
        groups.append({"params": decaying, "weight_decay": weight_decay})
        groups.append({"params": fixed, "weight_decay": 0.0})
    else:
        groups.append({"params": parameters, "weight_decay": weight_decay if decaying else 0.0})
    if not grouping.head_lr_ratio == grouping.loraplus_lr_ratio == 1:
        head: Any = model.get_output_embeddings()  # type: ignore[operator]
        faster = (p for name, p in model.named_parameters() if ".lora_B." in name or _dimensions(p) < 2)
        ratios = {id(p): grouping.loraplus_lr_ratio for p in faster}
        ratios |= {id(p): grouping.head_lr_ratio for p in head.parameters()}
        groups = _split_groups(groups, lambda p: ratios.get(id(p), 1.0), "ratio")
    if grouping.embeddings_apart:
        chosen = embedding_ids(model)
        groups = _split_groups(groups, lambda p: id(p) in chosen, "embedding")
        groups.sort(key=lambda group: not group["embedding"])
    return groups


def _split_groups(
    groups: list[ParameterGroup], value_of: Callable[[nn.Parameter], float], key: str
) -> list[ParameterGroup]:
    """Split groups by a value of their parameters, which each new group has as `key`. 1 comes first."""
    split = []
    for group in groups:
        values = [value_of(p) for p in group["params"]]
        for value in sorted(set(values), key=lambda value: (value != 1, value)):
            part = [p for p, own in zip(group["params"], values, strict=True) if own == value]
            split.append(group | {"params": part, key: value})
    return split


def _muon_matrices(model: nn.Module, parameters: list[nn.Parameter]) -> list[nn.Parameter]:
    """Return the matrices that are neither an embedding nor the output head.

    Raises UserError for transposed matrices, whose updates Muon would scale wrongly, and for stacked ones.
    """
    transposed = any(isinstance(module, Conv1D) for module in model.modules())
    if transposed or max(map(_dimensions, parameters)) > 2:
        problem = (
            "train.optimizer=muon supports neither transposed matrices (Conv1D) nor experts in one tensor"
        )
        raise UserError(f"{problem}. Set train.optimizer=adamw without muon_lr", code="muon-dimensions")
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    excluded = {id(p) for module in (*embeddings, head) for p in module.parameters()}
    return [p for p in parameters if _dimensions(p) == 2 and id(p) not in excluded]


def _dimensions(parameter: nn.Parameter) -> int:
    """Return the number of dimensions of a parameter, before ZeRO-3 partitioned it."""
    return len(getattr(parameter, "ds_shape", parameter.shape))


def build_muon(groups: list[ParameterGroup], params: DsConfig) -> torch.optim.Optimizer:
    """Return DeepSpeed's Muon for one of the `parameter_groups` and PyTorch's AdamW for the others.

    DeepSpeed itself would sort parameters by name, and so train the embeddings of GPT-2 and MPT with Muon.

    Args:
        groups: From `parameter_groups`.
        params: `params` in the section `optimizer` of the DeepSpeed configuration.
    """
    from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

    settings = []
    for group in groups:
        use_muon = group.get("use_muon", False)
        keys = {"lr": params["muon_lr" if use_muon else "lr"], "use_muon": use_muon}
        keys |= {key: params[key] for key in (("momentum",) if use_muon else ("betas", "eps"))}
        settings.append(group | keys)
        for parameter in group["params"]:
            parameter.use_muon = use_muon
    fused = {"fused": True} if params.get("fused") else {}
    return MuonWithAuxAdam(settings, adam_optimizer=torch.optim.AdamW, adam_optimizer_kwargs=fused)


def build_8bit(groups: list[ParameterGroup], ds_config: DsConfig) -> torch.optim.Optimizer:
    """Return the 8-bit AdamW of bitsandbytes that the DeepSpeed configuration names."""
    optimizers = importlib.import_module("bitsandbytes.optim")
    settings = ds_config["optimizer"]["params"]
    params = {key: settings[key] for key in ("lr", "betas", "eps", "weight_decay")}
    return getattr(optimizers, ds_config["optimizer"]["type"])(groups, **params)


def page_states(optimizer: Any) -> None:
    """Let a paged optimizer of bitsandbytes page the averages that it has loaded into ordinary memory."""
    if not getattr(optimizer, "is_paged", False):
        return
    for parameter, state in optimizer.state.items():
        for name in {"state1", "state2"} & state.keys():
            loaded = state[name]
            state[name] = optimizer.get_state_buffer(parameter, dtype=loaded.dtype)
            state[name].copy_(loaded)


def import_muon() -> None:
    """Import DeepSpeed's Muon without its compiled functions.

    DeepSpeed imports it for every optimizer. Its decorators would load PyTorch's compiler, which adds a
    second to every start.
    """
    with set_environment({"TORCHDYNAMO_DISABLE": "1"}):
        importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
