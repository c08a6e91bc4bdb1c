"""The live teacher of a run: which model it is, whether it fits the data, and how its weights are held.

Under ZeRO-3 they are partitioned as the student's are, and offloaded where the student's are; otherwise every
rank holds them. `base` is the model before training: a copy of it, or with adapters the trained model itself
without them.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import deepspeed
from transformers import PretrainedConfig

from emo.common.errors import UserError
from emo.common.io.files import Hashes
from emo.common.io.weights import context_length, load_config
from emo.data_prep.encoding.tokenizer import load_tokenizer, tokenizer_fingerprint
from emo.data_prep.shards.format import Manifest

from ..config import RunConfig
from ..control.run_dir import DATA_HASHES
from ..control.world import World, gather_objects
from ..engine.devices import usable_attention
from ..loss import fuse_model, get_objective, probe_model
from ..loss.models.frozen import BaseTeacher, FrozenCausalLM, LiveTeacher
from ..loss.models.head import packing_problem
from .build import load_pretrained, model_config
from .config import ModelConfig
from .objective_config import BASE, TeacherConfig

log = logging.getLogger(__name__)

KEY = "objective.teacher.model"
# Of the student's DeepSpeed configuration: what says how weights are held.
HELD = ("train_micro_batch_size_per_gpu", "bf16", "zero_optimization")


def teacher_config(config: RunConfig) -> ModelConfig | None:
    """Return the model of a live teacher of its own; None where there is none."""
    teacher = config.objective.compared
    if not config.objective.lives:
        return None
    options = {"dtype": config.model.dtype, "attn_implementation": config.model.attn_implementation}
    if isinstance(teacher, TeacherConfig):
        options["dtype"] = teacher.dtype or config.model.dtype
        return ModelConfig(path=teacher.model, revision=teacher.revision, **options)
    if config.model.lora is not None:
        return None
    path, revision = config.initial_weights()
    return ModelConfig(path=path, revision=revision, **options)


def check_teacher(config: RunConfig, student: PretrainedConfig, manifests: list[Manifest]) -> None:
    """Raise UserError for a teacher that cannot judge these data, or whose vocabulary is too small."""
    teacher = config.objective.compared
    if not isinstance(teacher, TeacherConfig) or teacher.model is None:
        return
    source = ModelConfig(path=teacher.model, revision=teacher.revision)
    text, entries = model_config(source, key=KEY).get_text_config(), student.get_text_config().vocab_size
    if text.vocab_size < entries:
        problem = f"has {text.vocab_size} entries, and the model that trains has {entries}"
        raise UserError(f"{KEY}={teacher.model} {problem}; take one with as many", code="teacher-vocabulary")
    context = context_length(text)
    for manifest in manifests:
        if context is not None and manifest.block > context:
            problem = f"has a context of {context}, and rows are of {manifest.block} tokens"
            cure = f"set data.sequence_len={context} and prepare again"
            raise UserError(f"{KEY}={teacher.model} {problem}; {cure}", code="teacher-context")
    try:
        tokenizer = load_tokenizer(teacher.model, teacher.revision)
    except UserError:
        log.warning("%s=%s carries no tokenizer: cannot check that it fits the data", KEY, teacher.model)
        return
    if any(m.tokenizer_fingerprint != tokenizer_fingerprint(tokenizer, m.eos_id) for m in manifests):
        problem = "has another tokenizer than the data"
        cure = "its probabilities would be of other tokens; take a teacher with the same one"
        raise UserError(f"{KEY}={teacher.model} {problem}; {cure}", code="teacher-tokenizer")


def weights_digest(path: str, revision: str | None, hashes: Hashes) -> str:
    """Return a hash of the files of weights in a directory; of a hub model its name and commit."""
    files = sorted(p for p in Path(path).glob("*") if p.suffix in (".safetensors", ".bin"))
    return " ".join(map(hashes.sha256, files)) if files else f"{path} {revision}"


def teacher_identity(config: RunConfig, world: World) -> str | None:
    """Return what tells a live teacher's weights from others'; all ranks must call."""
    model = teacher_config(config)
    if model is None:
        return None
    assert model.path is not None
    digest = None
    if world.is_main:
        hashes = Hashes(config.output_dir / DATA_HASHES)
        digest = weights_digest(model.path, model.revision, hashes)
        hashes.save()
    return str(gather_objects(digest)[0])


def add_teacher(model: Any, config: RunConfig, ds_config: dict[str, Any], world: World, packs: bool) -> None:
    """Give a recipe's live teacher, probed, to the model that trains; all ranks must call.

    Under ZeRO-3 it must be called while transformers builds models partitioned. packs: rows hold several
    documents. Raises UserError for weights that are damaged, and for a model that the fused head does not
    reproduce or that does not keep documents apart.
    """
    if config.objective.compared == BASE and config.model.lora is not None:
        model.get_base_model().teacher = BaseTeacher(model)
        return
    settings = teacher_config(config)
    if settings is None:
        return
    assert settings.path is not None
    attn = usable_attention(settings, load_config(settings.path, settings.revision))
    teacher: Any = load_pretrained(settings.path, settings.revision, settings.dtype, attn, KEY)
    teacher.config.use_cache = False
    teacher.eval().requires_grad_(False)
    fuse_model(teacher, get_objective("mle"), forward=FrozenCausalLM)
    run: Any = None
    if ds_config["zero_optimization"]["stage"] == 3:
        held = {key: ds_config[key] for key in HELD if key in ds_config}
        run, *_ = deepspeed.initialize(model=teacher, config=held)
        run.eval()
    else:
        teacher.to(world.device)
    verdict = probe_model(teacher, run, packed=False, collective=True, device=world.device)
    if verdict == "refused" and packs:
        raise UserError(f"the teacher: {packing_problem(teacher)}", code="packing")
    if verdict == "refused":
        teacher.packing = "alone"
    reference = config.objective.compared
    temperature = reference.temperature if isinstance(reference, TeacherConfig) else 1.0
    base = model.get_base_model() if config.model.lora is not None else model
    base.teacher = LiveTeacher(teacher, temperature, run)
