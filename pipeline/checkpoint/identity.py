"""What decides a run's numbers besides the keys of its recipe, digested from what was opened.

    objective      each objective with its parameters, defaults included
    program        hash of every file of an objective that is a program
    normalisation  which rows share a mean, where the objective divides its weights by one
    deepspeed      what DeepSpeed's configuration decides of the numbers
    model          what the model's configuration says of its architecture
    adapters       how the adapters were made
    data           fingerprint of the training rows
    validation     fingerprint of each validation set
    scores         of each data set, the hashes of the stored log-probabilities that the objective reads
    cost           fingerprint of the cost embedding
    teacher        hash of the weights of a live teacher

It is written into config.yaml and every checkpoint. A run that resumes must be the same in all parts, and in
every key of its recipe that is not free.
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
from emo.common.config.recipe import format_value, read_written
from emo.common.errors import UserError
from emo.common.io.files import sha256, write_text
from emo.common.provenance import REPOSITORY
from emo.data_prep.shards.format import TokenDataset
from emo.data_prep.shards.scores import Scores

from ..batches.config import Batch, MixtureConfig
from ..batches.order import Holding
from ..config import RunConfig, dump_config
from ..control.run_dir import CONFIG, checkpoints, step_of
from ..engine.ds_config import decisive_settings
from ..loss.objectives import OBJECTIVES, Objective
from .claims import ANEW, IDENTITY, MIXTURES, compare_keys, differences

Identity = dict[str, Any]  # part -> JSON value

# What each part is called in a message, and where it is put right.
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
# Of a model's configuration: what says where it is from and how it is held, not what it computes.
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
    """Return all that is known of a run's identity before the cost embedding is read.

    parts: the objectives, which are made already. model: its configuration, and itself with its adapters, on
    any device; None where it may be another one elsewhere. scores: of the data sets; empty where unread.
    """
    together: Any = None
    if any(part.normalised for part in parts) and batch.accumulation > 1:
        together = {"micro_batch": batch.micro, "ranks": batch.ranks}
    facts: Identity = {
        "objective": [{"name": part.name, "params": dict(part.params)} for part in parts],
        "program": _programs(config),
        "normalisation": together,
        "deepspeed": decisive_settings(ds_config),
    }
    if model is not None:
        settings, module = model
        architecture = {k: v for k, v in settings.to_diff_dict().items() if k not in NOT_ARCHITECTURE}
        facts |= {"model": _digest(architecture), "adapters": None}
        if hasattr(module, "peft_config"):
            (adapter,) = module.peft_config.values()
            adapter_settings = {k: v for k, v in adapter.to_dict().items() if k not in NOT_ADAPTERS}
            facts["adapters"] = _digest(adapter_settings)
    if data is not None:
        facts["data"] = data.fingerprint
        facts["validation"] = {name: rows.fingerprint for name, rows in validation.items()}
    if scores:
        shards = {c.data.directory.name: [s.sha256 for s in c.about.shards] for c in scores if c is not None}
        facts["scores"] = {name: _digest(hashes) for name, hashes in shards.items()}
    return facts


def _digest(value: Any) -> str:
    """Return the sha256 of a JSON value, whatever the order of its keys and sets."""
    text = json.dumps(value, sort_keys=True, default=lambda v: sorted(v) if isinstance(v, set) else str(v))
    return hashlib.sha256(text.encode()).hexdigest()


def _programs(config: RunConfig) -> dict[str, str]:
    """Return the sha256 of each file of the recipe's objectives that are programs, by module or file name.

    These are the file that the recipe or an installed package names, the other modules of its package that
    are loaded, and all that is loaded and part of no installed library. Making the objectives has imported
    what they use. Data files that a program reads are not among them.
    """
    hashes: dict[str, str] = {}
    points = {name: value.partition(":")[0] for name, value in registered_objectives().items()}
    libraries = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    for name in (config.objective.name, *(part.name for part in config.objective.sum or ())):
        if name in OBJECTIVES:
            continue
        source = name.rpartition(":")[0] or points[name]
        program = Path(source if source.endswith(".py") else str(sys.modules[source].__file__)).absolute()
        hashes[program.name if source.endswith(".py") else source] = sha256(program)
        for module, loaded in sorted(sys.modules.items()):
            origin = getattr(getattr(loaded, "__spec__", None), "origin", None)
            path, package = Path(origin or ""), module.split(".")[0]
            if module == "__main__" or package == "emo" or path.suffix != ".py":
                continue
            near = path.is_relative_to(program.parent) or not path.is_relative_to(REPOSITORY)
            installed = any(path.is_relative_to(library) for library in libraries)
            if package == source.split(".")[0] or (near and not installed):
                hashes[module] = sha256(path)
    return hashes


def compare(config: RunConfig, identity: Identity) -> None:
    """Raise UserError where another configuration or other content started the run; it names each key.

    Fields marked `free` may differ, and the mixture where `train.mixture_from` says so.
    """
    run_dir = config.output_dir
    newest = max(map(step_of, checkpoints(run_dir)), default=0)
    if (run_dir / CONFIG).is_file():
        compare_claimed(run_dir, run_dir / CONFIG, newest, config, identity)
    elif newest:
        problem = f"{run_dir} holds checkpoints but not the {CONFIG} that they were trained with"
        raise UserError(f"{problem}; put it back, {ANEW}", code="config-missing")


def compare_claimed(
    where: Path | str, claim: Path, newest: int, config: RunConfig, identity: Identity
) -> None:
    """Raise UserError where the run of a config.yaml, `claim`, is not that of `config` and `identity`.

    where: what holds the checkpoints of that run; `newest` is the step of the last.
    """
    claimed = dict(read_written(claim))
    compare_keys(where, claimed, newest, config)
    check_same(where, claimed.get(IDENTITY), identity)


def check_same(where: Path | str, before: Any, now: Identity) -> None:
    """Raise UserError naming each thing that has changed since `before` was written.

    Parts that `now` does not have are not known yet, and not compared.
    """
    if not isinstance(before, dict):
        problem = f"{where} does not say what it was trained with: another version of this program made it"
        raise UserError(f"{problem}; continue it with that version, {ANEW}", code="other-version")
    changed = []
    for part, value in now.items():
        if part not in before or before[part] != value:
            trees = {part: before.get(part)}, {part: value}
            key, was, is_now = next(differences(*trees), (part, "not known", format_value(value)))
            problem = f"{where} was trained with another {PARTS[part]}: {key} was {was} and is {is_now}"
            changed.append(UserError(f"{problem}; restore it, {ANEW}", code=f"changed-{part}"))
    if changed:
        raise UserError.of(changed)


def _claimed(run_dir: Path) -> dict[str, Any]:
    """Return the content of config.yaml."""
    path = run_dir / CONFIG
    return dict(read_written(path))


def mixtures(config: RunConfig) -> list[Holding]:
    """Return the mixtures by first step: those that the run was trained with, and the recipe's."""
    recorded, now, start = _recorded(config.output_dir), config.train.mixture, config.train.mixture_from
    if not recorded or recorded[-1].mixture == now:
        return recorded or [Holding(0, now)]
    assert start is not None
    earlier = [holding for holding in recorded if holding.step < start]
    return earlier if earlier and earlier[-1].mixture == now else [*earlier, Holding(start, now)]


def check_mixture(config: RunConfig, step: int) -> None:
    """Raise UserError for a mixture that changes at another step than `step`, from which the run goes on."""
    recorded = _recorded(config.output_dir)
    if recorded and recorded != mixtures(config) and config.train.mixture_from != step:
        problem = f"train.mixture_from={config.train.mixture_from}, and the run goes on from step {step}"
        cure = f"set train.mixture_from={step}, or restore the old train.mixture"
        raise UserError(f"{problem}; {cure}", code="mixture-step")


def _recorded(run_dir: Path) -> list[Holding]:
    """Return the mixtures of a run that was claimed; none of one that was not."""
    if not (run_dir / CONFIG).is_file():
        return []
    tree = _claimed(run_dir)
    entries = tree.get(MIXTURES) or [{"step": 0, "mixture": tree["train"].get("mixture")}]
    pairs = ((entry["step"], entry["mixture"]) for entry in entries)
    return [Holding(step, None if m is None else MixtureConfig.model_validate(m)) for step, m in pairs]


def claim(config: RunConfig, identity: Identity) -> None:
    """Write config.yaml: from now on the run directory belongs to this configuration and what it has read."""
    tree, history = {**yaml.safe_load(dump_config(config)), IDENTITY: identity}, mixtures(config)
    if len(history) > 1:
        mixed = ((step, m and m.model_dump(mode="json")) for step, m in history)
        tree[MIXTURES] = [{"step": step, "mixture": mixture} for step, mixture in mixed]
    write_text(config.output_dir / CONFIG, yaml.safe_dump(tree, sort_keys=False))
