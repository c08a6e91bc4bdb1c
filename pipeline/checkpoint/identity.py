"""The identity of a run: everything besides its recipe that decides its numbers, as digests.

    objective      name and parameters of each objective, defaults included
    program        hash of every file of an objective that is a program
    normalisation  rows that share a mean, if the objective divides its weights by one
    deepspeed      the part of DeepSpeed's configuration that decides the numbers
    model          the architecture in the model's configuration
    adapters       settings of the adapters
    data           fingerprint of the training rows
    validation     fingerprint of each validation set
    scores         hashes of the stored log-probabilities that the objective reads, by data set
    cost           fingerprint of the cost embedding
    teacher        hash of the weights of a live teacher, before training if it averages the weights

It is written into config.yaml and every checkpoint. A run resumes only with an equal identity, and with equal
keys of its recipe except free ones.
"""

from __future__ import annotations

import hashlib
import json
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from transformers import PretrainedConfig

from emo.common.config.objective_names import registered_objectives
from emo.common.config.recipe import dump_recipe, format_value
from emo.common.errors import UserError
from emo.common.io.files import sha256, write_text
from emo.common.provenance import REPOSITORY
from emo.data_prep.shards.format import TokenDataset
from emo.data_prep.shards.scores import Scores

from ..batches.config import Batch, MixtureConfig
from ..batches.order import MixtureStart
from ..config import RunConfig, dump_config
from ..control.run_dir import CONFIG, TRUNK, checkpoints, step_of
from ..engine.ds_config import decisive_settings
from ..loss.objectives import OBJECTIVES, Objective
from ..model.adapters import hash_adapter
from .claims import IDENTITY, MIXTURES, NEW_DIRECTORY, compare_keys, iterate_changes, read_recorded

Identity = dict[str, object]  # part -> JSON value

# Name of each part in messages, and where to change it.
PARTS = {
    "data": "training data (data, emo prepare)",
    "validation": "validation set (data.validation)",
    "scores": "stored scores (emo score)",
    "objective": "objective (objective.params)",
    "program": "objective program (its files)",
    "normalisation": "number of rows in a pass (train.micro_batch_size, ranks)",
    "model": "model configuration (config.json of model.path)",
    "adapters": "way to make adapters (the version of peft)",
    "deepspeed": "DeepSpeed configuration (the file that `deepspeed` names)",
    "cost": "cost embedding (model.path or objective.cost)",
    "teacher": "teacher (the weights of objective.teacher)",
}
# Keys of a model's or an adapter's configuration that describe its origin and storage.
NOT_ARCHITECTURE = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache")
NOT_ADAPTERS = ("base_model_name_or_path", "inference_mode", "peft_version", "revision")


def identify(
    parts: Sequence[Objective],
    config: RunConfig,
    batch: Batch,
    ds_config: Mapping[str, Any],
    model: tuple[PretrainedConfig, Any] | None,
    data: TokenDataset | None,
    validation: Mapping[str, TokenDataset],
    scores: Sequence[Scores | None],
) -> Identity:
    """Return the identity of a run, without its cost embedding and teacher.

    Args:
        parts: The objectives.
        config: The recipe.
        batch: Rows of a step.
        ds_config: The resolved DeepSpeed configuration.
        model: Its configuration, and the module with adapters. None if training may use another model.
        data: The training rows. None if they are not prepared.
        validation: The validation sets.
        scores: The stored scores of each data set. Empty if they were not read.
    """
    shared_mean: Any = None
    if any(part.normalised for part in parts) and batch.accumulation > 1:
        shared_mean = {"micro_batch": batch.micro, "ranks": batch.replicas}
    identity: Identity = {
        "objective": [{"name": part.name, "params": dict(part.params)} for part in parts],
        "program": _hash_programs(config),
        "normalisation": shared_mean,
        "deepspeed": decisive_settings(ds_config),
    }
    if model is not None:
        hf_config, module = model
        architecture = {k: v for k, v in hf_config.to_diff_dict().items() if k not in NOT_ARCHITECTURE}
        identity |= {"model": _digest(architecture), "adapters": None}
        if hasattr(module, "peft_config"):
            (adapter,) = module.peft_config.values()
            settings = {k: v for k, v in adapter.to_dict().items() if k not in NOT_ADAPTERS}
            start = hash_adapter(config.model)
            identity["adapters"] = _digest(settings) + ("" if start is None else f" from {start}")
    if data is not None:
        identity["data"] = data.fingerprint
        identity["validation"] = {name: rows.fingerprint for name, rows in validation.items()}
    if scores:
        shards = {c.data.directory.name: [s.sha256 for s in c.about.shards] for c in scores if c is not None}
        identity["scores"] = {name: _digest(hashes) for name, hashes in shards.items()}
    return identity


def _digest(value: Any) -> str:
    """Return the sha256 of a JSON value. The order of keys and sets does not matter."""
    text = json.dumps(value, sort_keys=True, default=lambda v: sorted(v) if isinstance(v, set) else str(v))
    return hashlib.sha256(text.encode()).hexdigest()


def _hash_programs(config: RunConfig) -> dict[str, str]:
    """Return the sha256 of each file of the recipe's objectives that are programs, by module or file name.

    These are the file that the recipe or an installed package names, the loaded modules of the same package,
    and all loaded modules outside installed libraries. Creating the objectives has imported what they use.
    Data files that a program reads are not included.
    """
    hashes: dict[str, str] = {}
    entry_points = {name: value.partition(":")[0] for name, value in registered_objectives().items()}
    libraries = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    for name in (config.objective.name, *(part.name for part in config.objective.sum or ())):
        if name in OBJECTIVES:
            continue
        source = name.rpartition(":")[0] or entry_points[name]
        program = Path(source if source.endswith(".py") else str(sys.modules[source].__file__)).absolute()
        hashes[program.name if source.endswith(".py") else source] = sha256(program)
        for module, loaded in sorted(sys.modules.items()):
            origin = getattr(getattr(loaded, "__spec__", None), "origin", None)
            path = Path(origin or "")
            package = module.split(".")[0]
            if module == "__main__" or package == "emo" or path.suffix != ".py":
                continue
            near = path.is_relative_to(program.parent) or not path.is_relative_to(REPOSITORY)
            installed = any(path.is_relative_to(library) for library in libraries)
            if package == source.split(".")[0] or (near and not installed):
                hashes[module] = sha256(path)
    return hashes


def check_run_dir(config: RunConfig, identity: Identity) -> None:
    """Raise UserError, which names each difference, if another run was started in the run directory.

    Fields marked `free` may differ. The mixture may differ if `train.mixture_from` is set.
    """
    run_dir = config.output_dir
    newest = max(map(step_of, checkpoints(run_dir)), default=0)
    if (run_dir / CONFIG).is_file():
        check_config_file(run_dir, run_dir / CONFIG, newest, config, identity)
    elif newest and not (run_dir / TRUNK).is_file():  # a branch that was never claimed starts again
        problem = f"{run_dir} has checkpoints but no {CONFIG}, which they were trained with"
        raise UserError(f"{problem}. Restore it, {NEW_DIRECTORY}", code="config-missing")


def check_config_file(
    where: Path | str, file: Path, newest: int, config: RunConfig, identity: Identity
) -> None:
    """Raise UserError if a config.yaml was written by another run.

    Args:
        where: The run directory or its copy.
        file: The config.yaml.
        newest: Step of the newest checkpoint.
        config: The recipe.
        identity: What this run has read.
    """
    recorded = read_recorded(file)
    compare_keys(where, recorded, newest, config)
    check_unchanged(where, recorded.get(IDENTITY), identity)


def check_unchanged(where: Path | str, before: Any, now: Identity) -> None:
    """Raise UserError naming each part of the identity `before` that has changed.

    Parts that `now` lacks are not compared, because they are not known yet.
    """
    if not isinstance(before, dict):
        problem = f"{where} does not record what it was trained with, so another version of emo wrote it"
        raise UserError(f"{problem}. Continue it with that version, {NEW_DIRECTORY}", code="other-version")
    changed = []
    for part, value in now.items():
        if part not in before or before[part] != value:
            trees = {part: before.get(part)}, {part: value}
            key, was, is_now = next(iterate_changes(*trees), (part, "not known", format_value(value)))
            problem = f"{where} was trained with another {PARTS[part]}: {key} was {was} and is {is_now}"
            changed.append(UserError(f"{problem}. Restore it, {NEW_DIRECTORY}", code=f"changed-{part}"))
    if changed:
        raise UserError.of(changed)


def mixture_history(config: RunConfig) -> list[MixtureStart]:
    """Return the mixtures that the run was trained with, and the recipe's, in the order of their steps."""
    recorded = _recorded_mixtures(config)
    now = config.train.mixture
    start = config.train.mixture_from
    if not recorded or recorded[-1].mixture == now:
        return recorded or [MixtureStart(0, now)]
    if start is None:  # a branch that failed before its first step: `compare_keys` has not seen it yet
        problem = f"{config.output_dir} was started with another train.mixture"
        cure = "restore it, or set train.mixture_from to the step from which the new one is used"
        raise UserError(f"{problem}; {cure}", code="changed-mixture")
    earlier = [entry for entry in recorded if entry.step < start]
    return earlier if earlier and earlier[-1].mixture == now else [*earlier, MixtureStart(start, now)]


def check_mixture(config: RunConfig, step: int) -> None:
    """Raise UserError if the mixture changes at another step than `step`, from which the run continues."""
    recorded = _recorded_mixtures(config)
    if recorded and recorded != mixture_history(config) and config.train.mixture_from != step:
        problem = f"train.mixture_from={config.train.mixture_from}, but the run continues from step {step}"
        cure = f"set train.mixture_from={step}, or restore the old train.mixture"
        raise UserError(f"{problem}; {cure}", code="mixture-step")


def _recorded_mixtures(config: RunConfig) -> list[MixtureStart]:
    """Return the mixtures of this run or of the one that it branches off, or none for a new run."""
    path = config.output_dir / CONFIG
    if not path.is_file() and config.train.decay_from is not None:
        path = config.output_dir / TRUNK
    if not path.is_file():
        return []
    tree = read_recorded(path)
    entries = tree.get(MIXTURES) or [{"step": 0, "mixture": tree["train"].get("mixture")}]
    pairs = ((entry["step"], entry["mixture"]) for entry in entries)
    return [MixtureStart(step, None if m is None else MixtureConfig.model_validate(m)) for step, m in pairs]


def claim_run_dir(config: RunConfig, identity: Identity) -> None:
    """Write config.yaml. The run directory then belongs to this recipe and identity."""
    tree = {**yaml.safe_load(dump_config(config)), IDENTITY: identity}
    history = mixture_history(config)
    if len(history) > 1:
        entries = ((step, m and m.model_dump(mode="json")) for step, m in history)
        tree[MIXTURES] = [{"step": step, "mixture": mixture} for step, mixture in entries]
    write_text(config.output_dir / CONFIG, dump_recipe(tree))
