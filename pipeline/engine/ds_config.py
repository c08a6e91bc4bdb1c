"""The DeepSpeed file that a recipe names, completed from the recipe; and what its optimizer takes."""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

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

from emo.common.config.recipe import shown
from emo.common.errors import UserError, nearest, one_line
from emo.common.io.untrusted import JSON_BYTES, read_bytes
from emo.common.parallel import environment
from emo.common.provenance import REPOSITORY, shipped

from ..batches.config import Batch
from ..config import RunConfig
from .devices import compiler, on_gpu, ranks_here

log = logging.getLogger(__name__)

REPORTS = ("tensorboard", "wandb", "comet", "csv_monitor", "flops_profiler")
# What the recipe decides; a DeepSpeed file that sets one of these would be a second owner of the fact.
OWNED_BY_RECIPE = {
    "train_batch_size": "train.global_batch_size",
    "train_micro_batch_size_per_gpu": "train.micro_batch_size",
    "gradient_accumulation_steps": "train.global_batch_size and train.micro_batch_size",
    "optimizer": "train.optimizer, train.learning_rate, train.betas, train.eps, train.weight_decay",
    "scheduler": "train.lr_scheduler_type and train.warmup_ratio",
    "gradient_clipping": "train.max_grad_norm",
    "bf16": "model.dtype",
    "fp16": "model.dtype",
    "amp": "model.dtype",
    **dict.fromkeys(REPORTS, "train.report_to or train.profile"),
}
CUT_OVER_RANKS = ("sequence_parallel_size", "tensor_parallel")
AUTO = "auto"  # in files for Hugging Face's Trainer: filled in from its arguments
# What may differ between two launches of a run: where things are, when they move and what is reported. All
# else, whatever DeepSpeed will call it, decides the numbers or how a checkpoint is laid out.
FREE = {
    *("steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state", "comms_logger"),
    *("log_level", "timers", "checkpoint", "disable_python_gc", "compile", "aio"),
}
FREE_ZERO = {
    *("overlap_comm", "contiguous_gradients", "allgather_partitions", "allgather_bucket_size"),
    *("reduce_bucket_size", "prefetch_bucket_size", "param_persistence_threshold", "zero_hpz_partition_size"),
    *("model_persistence_threshold", "max_live_parameters", "max_reuse_distance", "memory_efficient_linear"),
    *("gather_16bit_weights_on_model_save", "log_trace_cache_warnings", "enable_sanity_checks"),
    *("module_granularity_threshold", "use_all_reduce_for_fetch_params", "allgather_sequential"),
}


def deepspeed_config(config: RunConfig, batch: Batch) -> dict[str, Any]:
    """Return the DeepSpeed configuration: the file that the recipe names, completed from the recipe."""
    path, train = shipped(config.deepspeed), config.train
    tree = _without_owned(config, _read(path, config.deepspeed), path, batch)
    mistakes = [
        UserError(
            f"{path} sets {key}, but the loss needs complete rows and a complete output head; remove it, and "
            "use ZeRO-3 to save memory",
            code="ds-cuts",
        )
        for key in CUT_OVER_RANKS
        if tree.pop(key, None) is not None
    ]
    if mistakes := [*mistakes, *_unknown_keys(tree, path)]:
        raise UserError.of(mistakes)
    _check_combination(config, tree, path, batch.ranks)
    on_cpu = get_accelerator().device_name() == "cpu"
    zero = tree.setdefault("zero_optimization", {"stage": 1})
    if on_cpu:
        zero["overlap_comm"] = False  # gloo has no streams to overlap on
        for part in ("offload_optimizer", "offload_param"):
            (zero.get(part) or {}).pop("pin_memory", None)
    # AdamW is PyTorch's everywhere. DeepSpeed's own compile when first used, which takes a CUDA toolkit on
    # every host, and keep another state; `fused` is as fast: one kernel over each flat partition.
    adam: dict[str, Any] = {"lr": train.learning_rate, "betas": list(train.betas), "eps": train.eps}
    adam |= {"weight_decay": train.weight_decay, "torch_adam": True}
    if not on_cpu or "offload_optimizer" in zero:
        adam["fused"] = True
    optimizer = {"type": "AdamW", "params": adam}
    if train.optimizer == "muon":
        zero["reduce_scatter"] = False  # it needs whole gradients
        # the momentum that Muon's author and DeepSpeed use
        optimizer = {"type": "Muon", "params": adam | {"muon_lr": train.muon_lr, "momentum": 0.95}}
    tree.update(
        train_batch_size=batch.slots,
        train_micro_batch_size_per_gpu=batch.micro,
        gradient_accumulation_steps=batch.accumulation,
        optimizer=optimizer,
        gradient_clipping=train.max_grad_norm,
        bf16={"enabled": config.model.dtype == "bfloat16"},
        steps_per_print=10**9,
        timers={"throughput": {"enabled": False}},  # which would wait for the device twice a micro-batch
    )
    return tree


def _without_owned(config: RunConfig, tree: dict[str, Any], path: Path, batch: Batch) -> dict[str, Any]:
    """Return a DeepSpeed file without what the recipe owns, and without each value "auto".

    So files for Hugging Face's Trainer can be used as they are. One warning lists what is left out. Raises
    UserError that lists the values which contradict the recipe.
    """
    train = config.train
    owned: dict[str, Any] = {
        "train_batch_size": train.global_batch_size,
        "train_micro_batch_size_per_gpu": batch.micro,
        "gradient_accumulation_steps": batch.accumulation,
        "gradient_clipping": train.max_grad_norm,
        "bf16.enabled": config.model.dtype == "bfloat16",
        "optimizer.params.lr": train.learning_rate,
        "optimizer.params.betas": list(train.betas),
        "optimizer.params.eps": train.eps,
        "optimizer.params.weight_decay": train.weight_decay,
    }
    owned |= {f"{key}.enabled": False for key in ("fp16", "amp", *REPORTS)}
    rest, removed = _without_auto(tree)
    wrong, ignored = [], dict.fromkeys(key for key in tree if key in OWNED_BY_RECIPE)
    for key, value in _leaves({key: rest.pop(key) for key in OWNED_BY_RECIPE if key in rest}):
        kind = key.partition(".")[0]
        if key == "optimizer.type":
            differs = value not in ("Adam", "AdamW") or train.optimizer != "adamw"
        else:
            # a schedule with numbers, or a value where DeepSpeed has a section
            unlike = key in OWNED_BY_RECIPE or (kind == "scheduler" and key != "scheduler.type")
            differs = value != owned[key] if key in owned else unlike
        if differs and not (key == "train_micro_batch_size_per_gpu" and value == train.micro_batch_size):
            cure = f"remove it, or set {OWNED_BY_RECIPE[kind]} to what it says"
            problem = f"{path} sets {key}={shown(value)}, which contradicts the recipe"
            wrong.append(UserError(f"{problem}; {cure}", code="ds-owned"))
    if wrong:
        raise UserError.of(wrong)
    removed = [key for key in removed if key.partition(".")[0] not in ignored]
    if ignored or removed:
        parts = [f"the recipe decides {', '.join(ignored)}"] if ignored else []
        parts += [f"DeepSpeed's defaults hold for {', '.join(removed)}"] if removed else []
        log.warning("%s: %s", path, "; ".join(parts))
    return rest


def _without_auto(tree: dict[str, Any], where: str = "") -> tuple[dict[str, Any], list[str]]:
    """Return a tree without values "auto", and the keys that had them."""
    kept: dict[str, Any] = {}
    removed: list[str] = []
    for key, value in tree.items():
        if value == AUTO or (isinstance(value, list) and AUTO in value):
            removed.append(f"{where}{key}")
        elif isinstance(value, dict):
            kept[key], inner = _without_auto(value, f"{where}{key}.")
            removed += inner
        else:
            kept[key] = value
    return kept, removed


def _leaves(tree: dict[str, Any], where: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each value of a tree with its key."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{where}{key}.")
        else:
            yield f"{where}{key}", value


def decisive(ds_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a complete DeepSpeed configuration decides of a run's numbers and of its checkpoints."""
    zero = DeepSpeedZeroConfig(**ds_config.get("zero_optimization", {}))
    tree = zero.model_dump(mode="json", exclude_defaults=True, exclude=FREE_ZERO)
    for part in ("offload_param", "offload_optimizer"):
        device = (tree.pop(part, None) or {}).get("device", "none")
        if device != "none":
            tree[part] = device
    others = {k: v for k, v in ds_config.items() if k not in FREE and k not in OWNED_BY_RECIPE}
    return others | {"zero_optimization": tree | {"stage": zero_stage(ds_config)}}


def zero_stage(ds_config: Mapping[str, Any]) -> int:
    """Return the ZeRO stage of a DeepSpeed configuration."""
    return int(ds_config.get("zero_optimization", {}).get("stage", 0))


def check_host(ds_config: dict[str, Any]) -> None:
    """Raise UserError when this host lacks what the configuration needs of it."""
    if on_gpu() and importlib.util.find_spec("triton") is not None and compiler() is None:
        raise UserError(
            "Triton compiles its kernels, and there is no C compiler: install gcc", code="compiler"
        )
    zero = ds_config.get("zero_optimization", {})
    size, ranks = zero.get("zero_hpz_partition_size", 1), ranks_here()
    if size > 1 and ranks % size:
        problem = f"zero_hpz_partition_size={size} must divide the {ranks} ranks of a host"
        raise UserError(f"{problem}; set it to {ranks} or a divisor", code="hpz-ranks")
    offload = zero.get("offload_param") or {}
    if offload.get("device") != "nvme":
        return
    if on_gpu() and cpp_extension.CUDA_HOME is None and not installed_ops.get("async_io"):
        raise UserError("weights on NVMe need nvcc: install the CUDA toolkit", code="nvme-nvcc")
    if not AsyncIOBuilder().is_compatible():
        raise UserError("weights on NVMe need libaio: install libaio-dev on every host", code="nvme-libaio")
    if not os.access(offload.get("nvme_path") or "(not given)", os.W_OK):
        raise UserError("nvme_path is not a writable directory; set it to one", code="nvme-path")


def _read(path: Path, setting: Path) -> dict[str, Any]:
    if not path.is_file():
        files = sorted(REPOSITORY.glob("ds_configs/*.json"))
        hint = nearest(str(setting), [file.relative_to(REPOSITORY).as_posix() for file in files])
        raise UserError(f"deepspeed={setting} is not a file; {hint}")

    def without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)  # of a key that is given twice JSON would keep the last value
        if len(values) < len(pairs):
            raise ValueError(f"a key is given twice: {', '.join(key for key, _ in pairs)}")
        return values

    try:
        tree: Any = json.loads(read_bytes(path, JSON_BYTES), object_pairs_hook=without_repeats)
    except (ValueError, OSError, RecursionError) as error:
        raise UserError(f"deepspeed={path} is no JSON: {one_line(error, 150)}", code="ds-file") from None
    if not isinstance(tree, dict):
        raise UserError(f"deepspeed={path} must hold a JSON object, not {shown(tree)}", code="ds-file")
    tree = {key: value for key, value in tree.items() if value is not None}  # null: as if it were absent
    if not isinstance(zero := tree.get("zero_optimization", AUTO), dict) and zero != AUTO:
        problem = f"{path}: zero_optimization must be a section, not {shown(zero)}"
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


def _unknown_keys(tree: dict[str, Any], path: Path) -> list[UserError]:
    """Return what DeepSpeed would misread or, at the top level, ignore.

    DeepSpeed itself says which keys it knows: it is given the file, and what it does not look up is unknown.
    """
    lookups = _Lookups(tree, train_micro_batch_size_per_gpu=1, gradient_accumulation_steps=1)
    lookups.keys_read = set()
    section = "zero_optimization."
    try:
        DeepSpeedZeroConfig(**tree.get("zero_optimization", {}))
        section = ""
        DeepSpeedConfig(lookups)
        if tree.get("data_types", {}).keys() - {"grad_accum_dtype"}:
            raise ValueError("data_types may hold grad_accum_dtype alone")
    except ValidationError as error:
        keys = ((section + ".".join(map(str, e["loc"])), _said(e), shown(e["input"])) for e in error.errors())
        messages = [f"rejects {key}: {message} (given: {value})" for key, message, value in keys]
    except Exception as error:  # whatever its sections raise for values that they do not expect
        messages = [f"rejects the file: {one_line(error, 200)}"]
    else:
        known = sorted(lookups.keys_read - OWNED_BY_RECIPE.keys())
        unknown = (key for key in tree if key not in lookups.keys_read)
        messages = [f"knows no key {key}; {nearest(key, known)}" for key in unknown]
    return [UserError(f"{path}: DeepSpeed {message}", code="ds-file") for message in messages]


def _said(problem: Mapping[str, Any]) -> str:
    """Return what pydantic says of a value; of an enumeration each value once, whose members may be alike."""
    if problem["type"] != "enum":
        return str(problem["msg"])
    values = dict.fromkeys(problem["ctx"]["expected"].replace(" or ", ", ").split(", "))
    return f"must be one of {', '.join(values)}"


def _check_combination(config: RunConfig, tree: dict[str, Any], path: Path, ranks: int) -> None:
    """Refuse what is valid alone and does not work here."""
    zero = tree.get("zero_optimization", {"stage": 1})
    stage, size = int(zero.get("stage", 0)), zero.get("zero_hpz_partition_size", 1)
    offload, muon = zero.get("offload_optimizer") or {}, config.train.optimizer == "muon"
    problems = []
    if stage == 0:
        problem = f"{path} sets ZeRO stage 0, under which DeepSpeed applies gradients that are not finite"
        problem += "; set stage 1, which gives the same numbers"
        problems.append(UserError(problem, code="zero-stage"))
    problem = ""
    if offload.get("ratio", 1.0) != 1.0 or offload.get("super_offload") or zero.get("zenflow"):
        problem = "remove zenflow, super_offload and ratio, which need DeepSpeed's own Adam"
    elif size > 1 and (stage != 3 or ranks % size):
        problem = f"zero_hpz_partition_size={size} needs ZeRO stage 3, and ranks that it divides; remove it"
    elif muon and (offload or zero.get("reduce_scatter") or config.model.lora is not None):
        # not possible, or never compared with plain Muon
        problem = "train.optimizer=muon goes without model.lora, offload_optimizer and reduce_scatter"
    elif offload.get("device") == "nvme":
        problem = "an optimizer on NVMe does not resume (weights do: ds_configs/zero3_nvme.json); set cpu"
    if problem:
        problems.append(UserError(f"{path}: {problem}", code="ds-combination"))
    if problems:
        raise UserError.of(problems)


def parameter_groups(
    model: nn.Module, weight_decay: float, use_muon: bool = False, head_lr_ratio: float = 1.0
) -> list[dict[str, Any]]:
    """Return the optimizer's groups: biases and the gains of norms (fewer than two dimensions) do not decay.

    One group where that makes no difference; under ZeRO-3 `ds_shape` is the shape before partitioning. With
    `use_muon`: before them the group that Muon takes, matrices that are neither an embedding nor the head.
    The head's weights are in groups of their own, with a `ratio`, where that is not 1.

    Raises UserError for a model whose matrices Muon would scale the wrong way round, or not find.
    """
    trainable = [p for p in model.parameters() if p.requires_grad]
    dimensions = {id(p): len(getattr(p, "ds_shape", p.shape)) for p in trainable}
    groups: list[dict[str, Any]] = []
    if use_muon:
        transposed = any(isinstance(module, Conv1D) for module in model.modules())
        if transposed or max(dimensions.values()) > 2:
            problem = "train.optimizer=muon is not for transposed matrices (Conv1D) and experts in one tensor"
            raise UserError(f"{problem}; set train.optimizer=adamw without muon_lr", code="muon-dimensions")
        embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
        head: Any = model.get_output_embeddings()  # type: ignore[operator]
        tables = {id(p) for m in (*embeddings, head) for p in m.parameters()}
        body = [p for p in trainable if dimensions[id(p)] == 2 and id(p) not in tables]
        groups = [{"params": body, "weight_decay": weight_decay, "use_muon": True}]
        by_muon = {id(p) for p in body}
        trainable = [p for p in trainable if id(p) not in by_muon]
    decaying = [p for p in trainable if dimensions[id(p)] > 1]
    fixed = [p for p in trainable if dimensions[id(p)] < 2]
    if not weight_decay or not decaying or not fixed:
        groups.append({"params": trainable, "weight_decay": weight_decay if decaying else 0.0})
    else:
        groups.append({"params": decaying, "weight_decay": weight_decay})
        groups.append({"params": fixed, "weight_decay": 0.0})
    if head_lr_ratio == 1:
        return groups
    of_head = {id(p) for p in model.get_output_embeddings().parameters()}  # type: ignore[operator]
    apart = []
    for group in groups:
        parts = {1.0: [p for p in group["params"] if id(p) not in of_head]}
        parts[head_lr_ratio] = [p for p in group["params"] if id(p) in of_head]
        apart += [group | {"params": part, "ratio": ratio} for ratio, part in parts.items() if part]
    return apart


def muon(groups: list[dict[str, Any]], params: dict[str, Any]) -> torch.optim.Optimizer:
    """Return DeepSpeed's Muon with PyTorch's AdamW for the rest, of `parameter_groups`.

    params: of the DeepSpeed file's section `optimizer`. DeepSpeed itself would sort by name, and take the
    embeddings of GPT-2 and MPT for matrices of the body.
    """
    from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

    settings = []
    for group in groups:
        use = group.get("use_muon", False)
        keys = {"lr": params["muon_lr" if use else "lr"], "use_muon": use}
        keys |= {key: params[key] for key in (("momentum",) if use else ("betas", "eps"))}
        settings.append(group | keys)
        for parameter in group["params"]:
            parameter.use_muon = use
    fused = {"fused": True} if params.get("fused") else {}
    return MuonWithAuxAdam(settings, adam_optimizer=torch.optim.AdamW, adam_optimizer_kwargs=fused)


def import_muon() -> None:
    """Import DeepSpeed's Muon, which it asks for whatever the optimizer, with its functions left uncompiled.

    Their decorators alone would load PyTorch's compiler: a second of every start. On a GPU that trains with
    Muon they stay compiled.
    """
    with environment({"TORCHDYNAMO_DISABLE": "1"}):
        importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
