"""The live teacher of a run: choose its model, check that it fits the data, and hold its weights.

Under ZeRO-3 its weights are partitioned and offloaded like the student's. Otherwise every rank holds them.
`base` is the model before training: a copy of it or, with adapters, the trained model without them. Either
has the RoPE of `model.rope`, because the model before training cannot read longer rows without it. A teacher
from another directory keeps its own RoPE.
An average of the trained model is a copy, too. With adapters, it is a second set of them.
"""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import nn
from transformers import PretrainedConfig

from emo.common.context_length import context_length
from emo.common.errors import UserError
from emo.common.io.files import Hashes
from emo.common.io.weights import load_model_config
from emo.data_prep.encoding.tokenizer import load_tokenizer, tokenizer_fingerprint
from emo.data_prep.shards.format import Manifest

from ..config import RunConfig
from ..control.run_dir import DATA_HASHES
from ..control.world import World, gather_objects
from ..engine.average import AVERAGED
from ..engine.device.devices import usable_attention
from ..engine.ds_config import DsConfig
from ..engine.sequence import check_heads
from ..loss import fuse_model, get_objective, probe_model
from ..loss.models.frozen import AdapterTeacher, BaseTeacher, FrozenCausalLM, LiveTeacher, SelfTeacher
from ..loss.models.head import packing_problem
from .build import check_shape, load_pretrained, model_config
from .config import ModelConfig
from .export import ADAPTER
from .objective.config import BASE, TeacherConfig

log = logging.getLogger(__name__)

KEY = "objective.teacher.model"
# Sections of the student's DeepSpeed configuration that define how weights are held.
HOLDING = ("train_micro_batch_size_per_gpu", "bf16", "zero_optimization")


def teacher_config(config: RunConfig) -> ModelConfig | None:
    """Return the model of a live teacher that has its own weights, or None."""
    if not config.objective.has_live_teacher:
        return None
    teacher = config.objective.resolved_teacher
    options = {"dtype": config.model.dtype, "attn_implementation": config.model.attn_implementation}
    if isinstance(teacher, TeacherConfig) and teacher.model is not None:
        options["dtype"] = teacher.dtype or config.model.dtype
        return ModelConfig(path=teacher.model, revision=teacher.revision, **options)
    if config.model.lora is not None or config.objective.teaches_itself:
        return None
    path, revision = config.initial_weights()
    return ModelConfig(path=path, revision=revision, rope=config.model.rope, **options)


def check_teacher(
    config: RunConfig,
    student: PretrainedConfig,
    manifests: list[Manifest],
    local: bool = True,
    gpus: bool | None = None,
) -> None:
    """Raise UserError for a teacher that does not fit the trained model, the rows or their tokenizer.

    Args:
        config: The recipe.
        student: The trained model.
        manifests: The data sets.
        local: Whether the teacher must be available.
        gpus: For a run on other hosts, whether they have GPUs. None if the run is on this host.
    """
    teacher = config.objective.resolved_teacher
    source = teacher_config(config)
    if not isinstance(teacher, TeacherConfig) or teacher.model is None or source is None:
        return
    try:
        settings = model_config(source, key=KEY)
    except UserError:
        if local or Path(teacher.model).exists():
            raise
        return
    check_shape(settings, f"{KEY}={teacher.model}")
    text = settings.get_text_config()
    entries = student.get_text_config().vocab_size
    if text.vocab_size < entries:
        problem = f"has {text.vocab_size} vocabulary entries, but the trained model has {entries}"
        cure = "Choose a teacher with at least as many."
        raise UserError(f"{KEY}={teacher.model} {problem}. {cure}", code="teacher-vocabulary")
    check_heads(text, config.train.sequence_parallel, f"{KEY}={teacher.model}")
    usable_attention(source, settings, config.train.sequence_parallel > 1, gpus)
    context = context_length(text)
    if context is not None and config.data.sequence_len > context:
        problem = f"has a context of {context}, but rows have {config.data.sequence_len} tokens"
        cure = f"Set data.sequence_len={context} and prepare the data again."
        raise UserError(f"{KEY}={teacher.model} {problem}. {cure}", code="teacher-context")
    if not manifests:
        return
    try:
        tokenizer = load_tokenizer(teacher.model, teacher.revision)
    except UserError:
        log.warning("%s=%s has no tokenizer: cannot check that it fits the data", KEY, teacher.model)
        return
    if any(m.tokenizer_fingerprint != tokenizer_fingerprint(tokenizer, m.eos_id) for m in manifests):
        problem = "has another tokenizer than the data, so its probabilities are of other tokens"
        cure = "Choose a teacher with the same tokenizer."
        raise UserError(f"{KEY}={teacher.model} {problem}. {cure}", code="teacher-tokenizer")


def check_teacher_storage(config: RunConfig, ds_config: DsConfig) -> None:
    """Raise UserError if DeepSpeed cannot hold the teacher's weights as it holds those of the model."""
    zero = ds_config["zero_optimization"]
    on_nvme = (zero.get("offload_param") or {}).get("device") == "nvme"
    if config.objective.average_decay is not None and on_nvme:
        problem = "objective.teacher.ema does not work with weights on NVMe (offload_param)"
        raise UserError(f"{problem}. Offload them to the CPU.", code="teacher-nvme")
    teacher = teacher_config(config)
    if zero.get("stage") == 3 and teacher is not None and teacher.dtype != config.model.dtype:
        problem = f"ZeRO-3 holds a teacher in model.dtype={config.model.dtype}"
        cure = "Remove objective.teacher.dtype, or set deepspeed=ds_configs/zero2.json"
        raise UserError(f"{problem}. {cure}.", code="teacher-dtype")
    has_weights = teacher is not None or config.objective.average_decay is not None
    if zero.get("zero_hpz_partition_size", 1) > 1 and has_weights:
        problem = "zero_hpz_partition_size does not work with a teacher that has separate weights"
        raise UserError(f"{problem}. Remove it, or use stored scores.", code="teacher-hpz")


def teacher_identity(config: RunConfig, world: World) -> str | None:
    """Return a string that identifies the weights of a live teacher. All ranks must call.

    It is made of the hashes of local weight files, or of a hub model's name and commit.
    """
    model = teacher_config(config)
    if model is None:
        return None
    assert model.path is not None
    digest = f"{model.path} {model.revision}"
    if world.is_main:
        hashes = Hashes(config.output_dir / DATA_HASHES)
        files = sorted(p for p in Path(model.path).glob("*") if p.suffix in (".safetensors", ".bin"))
        digest = " ".join(map(hashes.sha256, files)) or digest
        hashes.save()
    return str(gather_objects(digest)[0])


def add_teacher(
    model: Any, config: RunConfig, ds_config: DsConfig, world: World, packs: bool
) -> dict[str, nn.Parameter]:
    """Load the live teacher of a recipe, if any, and attach it to the trained model. All ranks must call.

    Attach the model before training as well, if it is in memory.

    Returns the parameters of the teacher by the names that they have in the trained model. There are none if
    the teacher is the model without its adapters. Under ZeRO-3 call it while transformers builds partitioned
    models. Raises UserError for damaged weights, and for a model that the fused head does not reproduce or
    that does not separate packed documents.

    Args:
        model: The trained model, with its adapters.
        config: The recipe.
        ds_config: The student's DeepSpeed configuration.
        world: The ranks.
        packs: Rows hold several documents.
    """
    reference = config.objective.resolved_teacher
    temperature = reference.temperature if isinstance(reference, TeacherConfig) else 1.0
    fused = model
    if config.model.lora is not None:
        fused = model.get_base_model()
        fused.base_teacher = BaseTeacher(model) if config.holds_base else None
    if config.objective.average_decay is not None and config.model.lora is not None:
        return add_averaged_adapters(model, temperature)
    if config.objective.teaches_itself:
        fused.teacher = SelfTeacher(fused, temperature)
        return {}
    if reference == BASE and config.model.lora is not None:
        fused.teacher = fused.base_teacher
        return {}
    settings = teacher_config(config)
    if settings is None:
        return {}
    teacher, engine = _load_teacher(settings, ds_config, world, packs or world.sequence > 1)
    fused.teacher = LiveTeacher(teacher, temperature, engine)
    if reference == BASE:
        fused.base_teacher = fused.teacher
    return dict(teacher.named_parameters())


def _load_teacher(settings: ModelConfig, ds_config: DsConfig, world: World, packs: bool) -> tuple[Any, Any]:
    """Return a frozen model that ends in the fused head, and its engine under ZeRO-3."""
    assert settings.path is not None
    hf_config = load_model_config(settings.path, settings.revision)
    attn = usable_attention(settings, hf_config, shared=world.sequence > 1)
    source = (settings.path, settings.revision, settings.dtype, attn, KEY)
    teacher: Any = load_pretrained(*source, rope=settings.rope, trained=False)
    teacher.config.use_cache = False
    teacher.eval().requires_grad_(False)
    fuse_model(teacher, get_objective("mle"), forward=FrozenCausalLM)
    engine: Any = None
    if ds_config["zero_optimization"]["stage"] == 3:
        sections = {key: ds_config[key] for key in HOLDING if key in ds_config}
        engine, *_ = deepspeed.initialize(model=teacher, config=sections)
        engine.eval()
    else:
        teacher.to(world.device)
    if probe_model(teacher, engine, packed=False, collective=True, device=world.device) == "refused":
        if packs:
            raise UserError(f"the teacher: {packing_problem(teacher)}", code="packing")
        teacher.packing = "alone"
    return teacher, engine


def add_averaged_adapters(model: Any, temperature: float) -> dict[str, nn.Parameter]:
    """Add a frozen copy of the adapters for the teacher, and return its parameters by the adapters' names."""
    settings = copy.deepcopy(model.peft_config[ADAPTER])
    with torch.random.fork_rng(devices=[]):
        model.add_adapter(AVERAGED, settings, autocast_adapter_dtype=False)
    named = dict(model.named_parameters())
    copies = {name.replace(AVERAGED, ADAPTER): p for name, p in named.items() if f".{AVERAGED}" in name}
    for name, parameter in copies.items():
        parameter.requires_grad_(False)
        parameter.data.copy_(named[name].requires_grad_(True).data)
    model.get_base_model().teacher = AdapterTeacher(model, AVERAGED, temperature)
    return copies
