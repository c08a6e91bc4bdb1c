"""The DeepSpeed file that a recipe names: read, checked whole, and completed from the recipe."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deepspeed.accelerator import get_accelerator
from deepspeed.git_version_info import installed_ops
from deepspeed.ops.op_builder import AsyncIOBuilder
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from pydantic import BaseModel, ValidationError
from torch.utils import cpp_extension

from common.errors import UserError, nearest, one_line
from common.provenance import REPOSITORY, shipped
from common.untrusted import JSON_BYTES, read_bytes
from pipeline.config import Batch, RunConfig, TrainConfig
from pipeline.planning.host import check_compiler, on_gpu, ranks_here

# What the recipe decides; a DeepSpeed file that sets one of these would be a second owner of the fact.
OWNED_BY_RECIPE = {
    "train_batch_size": "train.batch",
    "train_micro_batch_size_per_gpu": "train.micro_batch",
    "gradient_accumulation_steps": "train.batch and train.micro_batch",
    "optimizer": "train.optimizer, train.lr, train.betas, train.eps, train.weight_decay",
    "scheduler": "train.schedule and train.warmup_ratio",
    "gradient_clipping": "train.clip",
    "bf16": "model.dtype",
    "fp16": "model.dtype",
}
# These write to or send to where no recipe says so.
REPORTS = ("tensorboard", "wandb", "comet", "csv_monitor", "flops_profiler")
CUT_OVER_RANKS = {"sequence_parallel_size": "every row", "tensor_parallel": "the output head"}
# What may differ between two launches of a run: where things are, when they move and what is reported. All
# else, whatever DeepSpeed will call it, decides the numbers or how a checkpoint is laid out.
FREE = {
    *(
        "steps_per_print",
        "wall_clock_breakdown",
        "memory_breakdown",
        "dump_state",
        "comms_logger",
        "log_level",
    ),
    *("timers", "checkpoint", "disable_python_gc", "compile", "aio"),
}
FREE_ZERO = {
    *("overlap_comm", "contiguous_gradients", "allgather_partitions", "allgather_bucket_size"),
    *("reduce_bucket_size", "prefetch_bucket_size", "param_persistence_threshold", "zero_hpz_partition_size"),
    *("model_persistence_threshold", "max_live_parameters", "max_reuse_distance", "memory_efficient_linear"),
    *("gather_16bit_weights_on_model_save", "log_trace_cache_warnings", "enable_sanity_checks"),
    *("module_granularity_threshold", "use_all_reduce_for_fetch_params", "allgather_sequential"),
}
GRADIENT_TYPES = ("fp32", "bf16", "fp16")
MUON_MOMENTUM = 0.95  # that Muon's author and DeepSpeed use


def deepspeed_config(config: RunConfig, batch: Batch) -> dict[str, Any]:
    """Return the DeepSpeed configuration: the file that the recipe names, completed from the recipe.

    Raises UserError when the file is missing, holds anything that DeepSpeed does not know or accept, sets
    what the recipe owns, or asks for what cannot work.
    """
    path = shipped(config.deepspeed)
    tree = _read(path, config.deepspeed)
    for key, instead in OWNED_BY_RECIPE.items():
        if key in tree:
            raise UserError(f"{path} sets {key}; remove it and set {instead} in the recipe")
    for key in REPORTS:
        if key in tree:
            raise UserError(
                f"{path} sets {key}, which reports beside the run directory; remove it and set "
                "train.tensorboard, train.wandb or train.profile in the recipe"
            )
    for key, cut in CUT_OVER_RANKS.items():
        if key in tree:
            raise UserError(
                f"{path} sets {key}, which cuts {cut} over ranks, and the loss needs it whole; remove it "
                "(ZeRO-3 and model.activation_checkpointing save memory, too)"
            )
    _check(tree, path)
    _check_combination(config, tree, path, batch.ranks)
    on_cpu = get_accelerator().device_name() == "cpu"
    zero = tree.setdefault("zero_optimization", {"stage": 1})
    if on_cpu:
        zero["overlap_comm"] = False  # gloo has no streams to overlap on
        for part in ("offload_optimizer", "offload_param"):
            (zero.get(part) or {}).pop("pin_memory", None)
    train = config.train
    if train.optimizer == "muon":
        zero["reduce_scatter"] = False  # it needs whole gradients
    tree.update(
        train_batch_size=batch.batch,
        train_micro_batch_size_per_gpu=batch.micro,
        gradient_accumulation_steps=batch.accumulation,
        optimizer=_optimizer(train, fused=not on_cpu or "offload_optimizer" in zero),
        gradient_clipping=train.clip,
        bf16={"enabled": config.model.dtype == "bfloat16"},
        steps_per_print=10**9,
        timers={"throughput": {"enabled": False}},  # which would wait for the device twice a micro-batch
    )
    return tree


def _optimizer(train: TrainConfig, fused: bool) -> dict[str, Any]:
    """Return DeepSpeed's section of that name.

    AdamW is PyTorch's everywhere. DeepSpeed's own compile when first used, which takes a CUDA toolkit on
    every host, and keep another state; `fused` is as fast: one kernel over each flat partition.
    """
    adam = {"lr": train.lr, "betas": list(train.betas), "eps": train.eps, "weight_decay": train.weight_decay}
    adam |= {"torch_adam": True} | ({"fused": True} if fused else {})
    if train.optimizer == "muon":
        return {"type": "Muon", "params": adam | {"muon_lr": train.muon_lr, "momentum": MUON_MOMENTUM}}
    return {"type": "AdamW", "params": adam}


def decisive(ds_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a complete DeepSpeed configuration decides of a run's numbers and of its checkpoints.

    What is written out although it is the default is left out, and so is what the recipe owns.
    """
    zero = DeepSpeedZeroConfig(**ds_config.get("zero_optimization", {}))
    tree = zero.model_dump(mode="json", exclude_defaults=True, exclude=FREE_ZERO)
    for part in ("offload_param", "offload_optimizer"):
        device = (tree.pop(part, None) or {}).get("device", "none")
        if device != "none":
            tree[part] = device
    others = {k: v for k, v in ds_config.items() if k not in FREE and k not in OWNED_BY_RECIPE}
    return others | {"zero_optimization": tree | {"stage": zero_stage(dict(ds_config))}}


def zero_stage(ds_config: dict[str, Any]) -> int:
    """Return the ZeRO stage of a DeepSpeed configuration."""
    return int(ds_config.get("zero_optimization", {}).get("stage", 0))


def check_host(ds_config: dict[str, Any]) -> None:
    """Raises UserError when this host lacks what the configuration needs of it.

    Weights on NVMe need libaio and a directory; secondary copies of weights (hpZ) need groups within a host.
    """
    check_compiler(on_gpu())
    size, ranks = ds_config.get("zero_optimization", {}).get("zero_hpz_partition_size", 1), ranks_here()
    if size > 1 and ranks % size:
        raise UserError(
            f"zero_hpz_partition_size={size} must divide the {ranks} ranks of a host, or weights would be "
            f"gathered between hosts; set it to {ranks} or a divisor, or deepspeed=ds_configs/zero3.json"
        )
    offload = ds_config.get("zero_optimization", {}).get("offload_param") or {}
    if offload.get("device") != "nvme":
        return
    if on_gpu() and cpp_extension.CUDA_HOME is None and not installed_ops.get("async_io"):
        raise UserError(
            "weights on NVMe need an operation that DeepSpeed compiles with nvcc, which is not here; install "
            "the CUDA toolkit and set CUDA_HOME, or set deepspeed=ds_configs/zero3_offload.json"
        )
    if not AsyncIOBuilder().is_compatible():
        raise UserError("weights on NVMe need libaio and its headers: install libaio-dev on every host")
    directory = offload.get("nvme_path") or "(not given)"
    if not os.access(directory, os.W_OK):
        raise UserError(f"nvme_path {directory} is not a writable directory; set it to one")


def _read(path: Path, setting: Path) -> dict[str, Any]:
    if not path.is_file():
        names = [
            file.relative_to(REPOSITORY).as_posix() for file in sorted(REPOSITORY.glob("ds_configs/*.json"))
        ]
        raise UserError(f"deepspeed={setting} is not a file; {nearest(str(setting), names)}")
    try:
        text = read_bytes(path, JSON_BYTES).decode()
        tree = json.loads(text, object_pairs_hook=_without_repeats)
    except (ValueError, OSError, RecursionError) as error:
        raise UserError(f"deepspeed={path} is not JSON: {one_line(error, 150)}") from None
    if not isinstance(tree, dict):
        raise UserError(f"deepspeed={path} must hold a JSON object; see ds_configs/")
    return tree


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Raises ValueError for a key given twice, of which JSON would keep the last."""
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise ValueError(f"the key {key!r} is given twice")
        values[key] = value
    return values


class _Lookups(dict[str, Any]):
    """A dictionary that remembers which keys were looked up, present or not."""

    keys_read: set[str]

    def get(self, key: str, default: Any = None) -> Any:
        self.keys_read.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.keys_read.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.keys_read.add(str(key))
        return super().__contains__(key)


def _check(tree: dict[str, Any], path: Path) -> None:
    """Refuse what DeepSpeed would misread or, at the top level, ignore.

    DeepSpeed itself says which keys it knows: it is given the file, and what it does not look up is unknown.
    """
    if "zero_optimization" in tree:
        _check_zero(tree["zero_optimization"], path)
    types = tree.get("data_types", {})
    accumulated = types.get("grad_accum_dtype", "fp32") if isinstance(types, dict) else None
    if accumulated not in GRADIENT_TYPES or types.keys() - {"grad_accum_dtype"}:
        raise UserError(
            f"{path}: data_types must be an object with grad_accum_dtype, one of {', '.join(GRADIENT_TYPES)}"
        )
    lookups = _Lookups(tree, train_micro_batch_size_per_gpu=1, gradient_accumulation_steps=1)
    lookups.keys_read = set()
    problem = None
    try:
        DeepSpeedConfig(lookups)
    except Exception as error:  # whatever its sections raise for values that they do not expect
        problem = _reason(error)
    unknown = [key for key in tree if key not in lookups.keys_read]
    if unknown and problem is None:
        keys = lookups.keys_read - OWNED_BY_RECIPE.keys()
        raise UserError(f"{path}: DeepSpeed knows no key {unknown[0]}; {nearest(unknown[0], sorted(keys))}")
    if problem is not None:
        raise UserError(f"{path}: DeepSpeed refuses it: {problem}")


def _check_zero(zero: Any, path: Path) -> None:
    if not isinstance(zero, dict):
        raise UserError(f"{path}: zero_optimization must be an object with stage; see ds_configs/")
    try:
        DeepSpeedZeroConfig(**zero)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in ("zero_optimization", *first["loc"]))
        if first["type"] == "extra_forbidden":
            keys = _keys_at(DeepSpeedZeroConfig, first["loc"][:-1])
            raise UserError(f"{path}: unknown key {key}; {nearest(str(first['loc'][-1]), keys)}") from None
        raise UserError(f"{path}: {_refusal(first, 'zero_optimization')}") from None


def _keys_at(cls: type[BaseModel], loc: tuple[int | str, ...]) -> list[str]:
    """Return the keys of the section at `loc` below `cls`."""
    for part in loc:
        annotation = cls.model_fields[str(part)].annotation
        for candidate in (annotation, *getattr(annotation, "__args__", ())):
            if isinstance(candidate, type) and issubclass(candidate, BaseModel):
                cls = candidate
    return list(cls.model_fields)


def _reason(error: Exception) -> str:
    if isinstance(error, ValidationError):
        return _refusal(error.errors()[0])
    return one_line(error, 200)


def _refusal(error: Mapping[str, Any], *section: str) -> str:
    """Return what pydantic refuses in words: the key, the reason and the value."""
    message = error["msg"]
    if error["type"] == "enum":  # it lists a second name of a value like a value of its own
        options = dict.fromkeys(re.split(", | or ", error["ctx"]["expected"]))
        message = f"must be one of {', '.join(options)}"
    key = ".".join(map(str, (*section, *error["loc"])))
    return f"{key}{': ' if key else ''}{message} (given: {error['input']!r})"


def _check_combination(config: RunConfig, tree: dict[str, Any], path: Path, ranks: int) -> None:
    """Refuse what is valid on its own and does not work for us."""
    zero = tree.get("zero_optimization", {"stage": 1})
    if zero_stage({"zero_optimization": zero}) == 0:
        raise UserError(
            f"{path} sets ZeRO stage 0, under which DeepSpeed applies gradients that are not finite; set "
            "stage 1, which gives the same numbers in less memory",
            code="zero-stage",
        )
    offload = zero.get("offload_optimizer") or {}
    if offload.get("ratio", 1.0) != 1.0 or offload.get("super_offload") or zero.get("zenflow"):
        raise UserError(
            f"{path}: zenflow, and offload_optimizer with super_offload or a ratio below 1, need DeepSpeed's "
            "own Adam, which is not used here; remove them"
        )
    size = zero.get("zero_hpz_partition_size", 1)
    if size > 1 and (zero_stage(tree) != 3 or ranks % size):
        raise UserError(
            f"{path}: zero_hpz_partition_size={size} needs ZeRO stage 3 and ranks in groups of {size}, not "
            f"stage {zero_stage(tree)} and {ranks} ranks; set it to the ranks of a host, or remove it"
        )
    if config.train.optimizer == "muon":
        _check_muon(config, tree, path)
    if offload.get("device") == "nvme":
        raise UserError(
            f"{path} puts the optimizer on NVMe, and DeepSpeed does not bring the weights back when a run "
            "resumes; set its device to cpu (weights may be on NVMe, see ds_configs/zero3_nvme.json)"
        )
    if config.model.compile and zero_stage(tree) == 3:
        raise UserError(
            "model.compile=true does not help under ZeRO-3, which runs hooks between all layers; "
            "set deepspeed=ds_configs/zero1.json or zero2.json, or leave it out"
        )


def _check_muon(config: RunConfig, tree: dict[str, Any], path: Path) -> None:
    """Refuse what DeepSpeed's Muon cannot do, or what nobody has compared with a plain Muon."""
    zero = tree.get("zero_optimization", {})
    if zero.get("offload_optimizer") or zero.get("reduce_scatter"):
        raise UserError(
            f"{path}: train.optimizer=muon needs ZeRO stage 1, 2 or 3 without offload_optimizer and without "
            "reduce_scatter; set deepspeed=ds_configs/zero2.json, or train.optimizer=adamw without muon_lr"
        )
    if config.model.lora is not None:
        raise UserError(
            "train.optimizer=muon is for the matrices of a body that trains whole, not for the factors of "
            "model.lora; set train.optimizer=adamw without muon_lr"
        )
