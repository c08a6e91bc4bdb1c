"""What decides a run's numbers besides the keys of its recipe, digested from what was opened.

    data           fingerprint of the training rows
    validation     fingerprint of each validation set
    scores         of each data set, the hashes of the stored log-probabilities that the objective reads
    objective      each objective with its parameters, defaults included
    program        hash of every file of an objective that is a program
    normalisation  which rows share a mean, where the objective divides its weights by one
    model          what the model's configuration says of its architecture
    adapters       how the adapters were made
    deepspeed      what DeepSpeed's configuration decides of the numbers
    cost           fingerprint of the cost embedding

It is written into config.yaml and every checkpoint. A run that resumes must be the same in all parts, and in
every key of its recipe that is not free.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import importlib.util
import json
import re
import shutil
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from transformers import PretrainedConfig

from emo.common.errors import UserError, one_line
from emo.common.files import write_text
from emo.common.provenance import REPOSITORY
from emo.common.recipe import marked, read_written, shown
from emo.data_prep.scores import Scores
from emo.data_prep.shards import TokenDataset
from emo.pipeline.config import Batch, MixtureConfig, RunConfig, dump_config
from emo.pipeline.loss.objectives import BUILT_IN, ENTRY_POINTS, Objective
from emo.pipeline.order import Holding
from emo.pipeline.planning.ds_file import decisive
from emo.pipeline.run_dir import CONFIG, INITIAL, checkpoints, step_of

Identity = dict[str, Any]  # part -> JSON value

# Of each part: what it is called in a message, and how it is put right.
PARTS = {
    "data": ("training data", "prepare the rows again that it was started with"),
    "validation": ("validation set", "restore data.validation and its rows"),
    "scores": ("stored scores", "write the scores again with the model that they were from"),
    "objective": ("objective", "set its parameters in objective.params to what they were"),
    "program": ("objective program", "restore the file"),
    "normalisation": (
        "number of rows that an objective with normalised weights sees together",
        "set train.micro_batch_size, and start as many ranks, as before",
    ),
    "model": ("model configuration", "restore the config.json of model.path"),
    "adapters": ("way to make adapters", "install the version of peft that it was started with"),
    "deepspeed": ("DeepSpeed configuration", "restore the file that `deepspeed` names"),
    "cost": ("cost embedding", "put the old model back where model.path or objective.cost names it"),
}
# Of a model's configuration: what says where it is from and how it is held, not what it computes.
NOT_ARCHITECTURE = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache")
NOT_ADAPTERS = ("base_model_name_or_path", "inference_mode", "peft_version", "revision")
IDENTITY = "identity"  # in config.yaml: what was read
MIXTURES = "mixtures"  # in config.yaml, once it has changed: which mixture held from which step on


def compare(config: RunConfig, identity: Identity) -> None:
    """Raise UserError where another configuration or other content started the run; it names the first key.

    Fields marked `free` may differ, and the mixture where `train.mixture_from` says so.
    """
    run_dir, train = config.output_dir, config.train
    anew = "or set output_dir to a new directory"
    if not (run_dir / CONFIG).is_file():
        if checkpoints(run_dir):
            problem = f"{run_dir} holds checkpoints but not the {CONFIG} that they were trained with"
            raise UserError(f"{problem}; put it back, {anew}", code="config-missing")
        return
    claimed = _claimed(run_dir)
    previous, current = _flatten(claimed), _flatten(yaml.safe_load(dump_config(config)))
    free = (*marked(RunConfig, "free"), MIXTURES, IDENTITY)
    for key in dict.fromkeys((*current, *previous)):
        if current.get(key) == previous.get(key) or any(f"{key}.".startswith(f"{part}.") for part in free):
            continue
        if f"{key}.".startswith("train.mixture."):
            if train.mixture is None:
                problem = f"{run_dir} was trained with a train.mixture, where its domains go on"
                cure = "train.mixture={temperature: 1} takes all in proportion"
                raise UserError(f"{problem}; {cure}, {anew}", code="mixture-gone")
            if train.mixture_from is None:
                newest = max(map(step_of, checkpoints(run_dir)), default=0)
                cure = f"train.mixture_from={newest} lets this one hold from its newest checkpoint on"
                problem = f"{run_dir} was trained with another train.mixture"
                raise UserError(f"{problem}; {cure}; or restore the old one", code="changed-mixture")
            continue
        before, now = (f"{key}={shown(t[key])}" if key in t else f"no {key}" for t in (previous, current))
        problem = f"{run_dir} was started with {before}, and the recipe now has {now}"
        raise UserError(f"{problem}; restore the old value, {anew}", code="changed-key")
    check_same(run_dir, claimed.get(IDENTITY), identity)


def _claimed(run_dir: Path) -> dict[str, Any]:
    """Return the content of config.yaml."""
    path = run_dir / CONFIG
    try:
        return dict(read_written(path))
    except (OSError, ValueError, TypeError) as error:
        cure = "put the original back, or set output_dir to a new directory"
        problem = f"{path} cannot be read ({one_line(error, 100)})"
        raise UserError(f"{problem}; {cure}", code="config-unreadable") from None


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


def clear_unstarted(config: RunConfig) -> None:
    """Remove the first weights of a launch that ended before the run was claimed: it may have had others."""
    if not (config.output_dir / CONFIG).is_file():
        shutil.rmtree(config.output_dir / INITIAL, ignore_errors=True)


def claim(config: RunConfig, identity: Identity) -> None:
    """Write config.yaml: from now on the run directory belongs to this configuration and what it has read."""
    tree, history = {**yaml.safe_load(dump_config(config)), IDENTITY: identity}, mixtures(config)
    if len(history) > 1:
        mixed = ((step, m and m.model_dump(mode="json")) for step, m in history)
        tree[MIXTURES] = [{"step": step, "mixture": mixture} for step, mixture in mixed]
    write_text(config.output_dir / CONFIG, yaml.safe_dump(tree, sort_keys=False))


def _flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Return dotted keys and their values; an empty section holds none."""
    if not isinstance(tree, dict):
        return {prefix: tree}
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat.update(_flatten(value, f"{prefix}.{key}" if prefix else str(key)))
    return flat


def of_data(data: TokenDataset, validation: Mapping[str, TokenDataset]) -> Identity:
    """Return what rows are trained on and measured."""
    measured = {name: rows.fingerprint for name, rows in validation.items()}
    return {"data": data.fingerprint, "validation": measured}


def of_scores(scores: Sequence[Scores | None]) -> Identity:
    """Return which log-probabilities an objective reads beside the rows."""
    read = [column for column in scores if column is not None]
    hashes = {column.data.directory.name: [shard.sha256 for shard in column.about.shards] for column in read}
    return {"scores": {name: _digest(digests) for name, digests in hashes.items()}}


def of_objective(parts: Sequence[Objective], programs: Mapping[str, str], batch: Batch) -> Identity:
    """Return what is minimised. programs: what `programs` returned before the objectives were made."""
    together: Any = None
    if any(part.normalised for part in parts) and batch.accumulation > 1:
        together = {"micro_batch": batch.micro, "ranks": batch.ranks}
    return {
        "objective": [{"name": part.name, "params": dict(part.params)} for part in parts],
        "program": dict(programs),
        "normalisation": together,
    }


def of_model(settings: PretrainedConfig, model: Any) -> Identity:
    """Return what the model computes, apart from its weights. model: with its adapters, on any device."""
    architecture = {k: v for k, v in settings.to_diff_dict().items() if k not in NOT_ARCHITECTURE}
    adapters = None
    if hasattr(model, "peft_config"):
        (adapter,) = model.peft_config.values()
        adapters = {k: v for k, v in adapter.to_dict().items() if k not in NOT_ADAPTERS}
    return {"model": _digest(architecture), "adapters": None if adapters is None else _digest(adapters)}


def of_deepspeed(ds_config: Mapping[str, Any]) -> Identity:
    """Return what DeepSpeed's configuration decides."""
    return {"deepspeed": decisive(ds_config)}


def check_same(run_dir: Path, before: Any, now: Identity) -> None:
    """Raise UserError naming the first thing that has changed since `before` was written.

    Parts that `now` does not have are not known yet, and not compared.
    """
    if not isinstance(before, dict):
        problem = f"{run_dir} does not say what it was trained with: another version of this program made it"
        cure = "continue it with that version, or set output_dir to a new directory"
        raise UserError(f"{problem}; {cure}", code="other-version")
    for part, value in now.items():
        if part not in before or before[part] != value:
            subject, cure = PARTS[part]
            problem = f"another {subject}: {_difference(before.get(part), value)}"
            line = f"{run_dir} was trained with {problem}; {cure}, or set output_dir to a new directory"
            raise UserError(line, code=f"changed-{part}")


def _difference(before: Any, now: Any) -> str:
    """Return where two parts differ, in words."""
    if isinstance(before, dict) and isinstance(now, dict):
        key = next(key for key in dict.fromkeys((*before, *now)) if before.get(key) != now.get(key))
        if key not in now:
            return f"{key} is gone"
        return f"{key} is new" if key not in before else f"{key}: {_difference(before[key], now[key])}"
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        return next(_difference(*pair) for pair in zip(before, now, strict=True) if pair[0] != pair[1])
    texts = (value if isinstance(value, str) else json.dumps(value) for value in (before, now))
    hashed = re.compile("[0-9a-f]{64}")  # its beginning will do
    was, is_now = (text[:12] if hashed.fullmatch(text) else one_line(text, 80) for text in texts)
    return f"it was {was} and is {is_now}"


def _digest(value: Any) -> str:
    """Return the sha256 of a JSON value, whatever the order of its keys and sets."""
    text = json.dumps(value, sort_keys=True, default=lambda v: sorted(v) if isinstance(v, set) else str(v))
    return hashlib.sha256(text.encode()).hexdigest()


def programs(config: RunConfig) -> dict[str, str]:
    """Return the sha256 of each file of the recipe's objectives that are programs, by module or file name.

    These are the file that the recipe or an installed package names, the modules of its own package that it
    imports, and all that it imports or is loaded and part of no installed library. Call it again once the
    objectives are made: what they import by name is known then. Data files that a program reads are not.
    """
    hashes: dict[str, str] = {}
    for name in (config.objective.name, *(part.name for part in config.objective.sum or ())):
        if name in BUILT_IN:
            continue
        where = name.rpartition(":")[0]
        if not where:
            points = importlib.metadata.entry_points(group=ENTRY_POINTS)
            where = next((point.module for point in points if point.name == name), "")
        path = Path(where) if where.endswith(".py") else _file_of(where)
        if path is not None:
            _add_program(hashes, path.name if where.endswith(".py") else where, path, where.split(".")[0])
            for module in [name for name in sys.modules if name != "__main__"]:  # imported by name, maybe
                file = _file_of(module)
                if file is None or not _is_of_user(module, file):
                    continue
                if file.is_relative_to(path.parent) or not file.is_relative_to(REPOSITORY):
                    _add_program(hashes, module, file, module.split(".")[0])
    return hashes


def _add_program(hashes: dict[str, str], name: str, path: Path, package: str) -> None:
    """Add a file to `hashes`, and the modules that it imports."""
    if name in hashes:
        return
    try:
        content = path.read_bytes()
        tree = ast.parse(content)
    except (OSError, SyntaxError, ValueError):
        return  # whoever imports it says more
    hashes[name] = hashlib.sha256(content).hexdigest()
    for node in ast.walk(tree):
        modules: list[str] = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parent = name.rsplit(".", node.level)[0] if node.level else ""
            base = ".".join(filter(None, (parent, node.module)))
            modules = [base, *(f"{base}.{alias.name}" for alias in node.names)]
        for module in modules:
            file = _file_of(module)
            if file is not None and (module.split(".")[0] == package or _is_of_user(module, file)):
                _add_program(hashes, module, file, package)


def _file_of(module: str) -> Path | None:
    """Return the Python file of a module that was imported, or can be; None for what has none."""
    try:
        loaded = sys.modules.get(module)
        spec = getattr(loaded, "__spec__", None) or importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    origin = spec.origin if spec is not None else None
    return Path(origin) if origin is not None and origin.endswith(".py") else None


def _is_of_user(module: str, path: Path) -> bool:
    """Return whether a module is part neither of an installed library nor of this project."""
    if module.split(".")[0] == "emo" and path.is_relative_to(REPOSITORY):
        return False
    libraries = (sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    return not any(path.is_relative_to(library) for library in libraries)
