"""Starting the same command again: what must match, and which checkpoint is taken."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from common.errors import UserError, one_line
from common.files import write_text
from common.recipe import marked, read_written, shown
from pipeline.config import RunConfig, dump_config
from pipeline.engine import to_universal
from pipeline.model import Cost
from pipeline.planning.ds_file import zero_stage
from pipeline.ranks import World, gather_objects, on_main
from pipeline.run_dir import CONFIG, INITIAL, STATE, checkpoints, problem, read_marker

log = logging.getLogger(__name__)


def compare(config: RunConfig, fingerprint: str) -> None:
    """Refuse a run directory that another configuration started; fields marked `free` may differ.

    fingerprint: of the training data. Raises UserError naming the first key that was changed, added or
    removed.
    """
    path = config.run_dir / CONFIG
    if not path.is_file():
        if checkpoints(config.run_dir):
            raise UserError(
                f"{config.run_dir} holds checkpoints but not the {CONFIG} that they were trained with; "
                "put it back, or set run_dir to a new directory"
            )
        return
    try:
        theirs = _flatten(read_written(path))
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path} cannot be read ({one_line(error, 100)}); put the original back, or set run_dir to a new "
            "directory"
        ) from None
    mine = _flatten(_resolved(config, fingerprint))
    free = marked(RunConfig, "free")
    for key in dict.fromkeys((*mine, *theirs)):
        if mine.get(key) == theirs.get(key) or any(key == f or key.startswith(f + ".") for f in free):
            continue
        before, now = (f"{key}={shown(t[key])}" if key in t else f"no {key}" for t in (theirs, mine))
        raise UserError(
            f"{config.run_dir} was started with {before}, and the recipe now has {now}; set run_dir to a new "
            "directory, or restore the old value"
        )


def clear_unstarted(config: RunConfig) -> None:
    """Remove the first weights of a launch that ended before the run was claimed: it may have had others."""
    if not (config.run_dir / CONFIG).is_file():
        shutil.rmtree(config.run_dir / INITIAL, ignore_errors=True)


def claim(config: RunConfig, fingerprint: str) -> None:
    """Write config.yaml: from now on the run directory belongs to this configuration."""
    text = yaml.safe_dump(_resolved(config, fingerprint), sort_keys=False)
    write_text(config.run_dir / CONFIG, text)


def _resolved(config: RunConfig, fingerprint: str) -> dict[str, Any]:
    return {**yaml.safe_load(dump_config(config)), "data_fingerprint": fingerprint}


class Saved(NamedTuple):
    """A checkpoint that is valid by content."""

    directory: Path
    step: int
    tokens: int  # supervised tokens up to this step
    ranks: int
    zero_stage: int
    groups: list[int]  # parameters in each of the optimizer's groups
    frozen: int  # of the engine: which weights the adapters belong to
    cost: str | None  # fingerprint of the cost embedding
    progress: dict[str, Any]  # of metrics and guard, between two records


STATE_KINDS: dict[str, Any] = {
    **dict.fromkeys(("step", "tokens", "ranks", "zero_stage", "frozen"), int),
    "groups": list,
    "cost": str | None,
    "progress": dict,
}


def newest_valid(run_dir: Path, world: World) -> Saved | None:
    """The newest checkpoint whose files are as COMPLETE says, or None; all ranks must call.

    Others are passed over with a line that says why. Every rank hashes a part of the files.
    """
    for directory in reversed(checkpoints(run_dir)):
        found = problem(directory, world.rank, world.ranks)
        problems = [p for p in gather_objects(found) if p is not None]
        if not problems:
            return _read(directory)
        log.warning("%s is not used: %s", directory.name, problems[0])
    return None


def _read(directory: Path) -> Saved:
    """Raises UserError when the checkpoint is of a version that described it differently."""
    try:
        state = read_marker(directory / STATE)
        for key, kind in STATE_KINDS.items():
            if not isinstance(state[key], kind):
                raise TypeError(f"{key} is {type(state[key]).__name__}")
        return Saved(directory, **{key: state[key] for key in STATE_KINDS})
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{directory} was written by another version of this program ({STATE}: {one_line(error, 80)}); "
            "continue it with that version, or start a new run_dir"
        ) from None


def loadable(saved: Saved, ds_config: dict[str, Any], world: World) -> tuple[Path, bool]:
    """Where this many ranks can load `saved` from, and whether that is a universal copy.

    On as many ranks as saved it: the checkpoint itself. Else: a universal copy, in a folder of its own.
    Raises UserError when the ZeRO stage differs, which DeepSpeed's universal format does not bridge, and when
    it would have to hold Muon's state, of which it knows nothing.
    """
    stage = zero_stage(ds_config)
    if saved.zero_stage != stage:
        raise UserError(
            f"{saved.directory} was saved at ZeRO stage {saved.zero_stage}, not {stage}; "
            f"set deepspeed=ds_configs/zero{saved.zero_stage}.json, or start a new run_dir from an export"
        )
    if saved.ranks == world.ranks:
        return saved.directory, False
    if ds_config["optimizer"]["type"] == "Muon":
        raise UserError(
            f"{saved.directory} was saved by {saved.ranks} ranks, and DeepSpeed cannot convert the state of "
            f"Muon for {world.ranks}; start {saved.ranks} ranks, or a new run_dir from an export"
        )
    copy = saved.directory.with_name(saved.directory.name + ".universal")

    def convert() -> None:
        log.info(
            "%s was saved by %d ranks: converting it for %d", saved.directory.name, saved.ranks, world.ranks
        )
        shutil.rmtree(copy, ignore_errors=True)
        to_universal(saved.directory / "state", copy / "state")

    on_main(world, convert)
    return copy, True


def check_groups(saved: Saved, groups: list[int]) -> None:
    """Raises UserError when the optimizer groups its parameters otherwise than the one that was saved."""
    if saved.groups != groups:
        raise UserError(
            f"{saved.directory} was saved with {saved.groups} parameters in the optimizer's groups, and this "
            f"run has {groups}: the model or this program has changed; set run_dir to a new directory"
        )


def check_frozen(saved: Saved, frozen: int) -> None:
    """Raises UserError when weights that do not train, which no checkpoint holds, are not what they were."""
    if saved.frozen != frozen:
        raise UserError(
            f"{saved.directory} holds adapters of another base model than model.path is now; put the old "
            "weights back, or set run_dir to a new directory"
        )


def check_cost(saved: Saved | None, cost: Cost) -> str | None:
    """The fingerprint of the cost embedding, which must be that of the checkpoint; all ranks must call.

    Raises UserError when the base model was replaced under the run, or hosts read different ones.
    """
    mine = getattr(cost, "fingerprint", None)
    everyone = gather_objects(mine)
    if len(set(everyone)) > 1:
        raise UserError(
            "hosts read different cost embeddings; make model.path and objective.cost the same model on all"
        )
    if saved is not None and saved.cost != mine:
        raise UserError(
            f"{saved.directory} was trained with another cost embedding than the one read now: model.path or "
            "objective.cost was replaced since; put the old model back, or set run_dir to a new directory"
        )
    return mine


def _flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted keys and their values; an empty section holds none."""
    if not isinstance(tree, dict):
        return {prefix: tree}
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat.update(_flatten(value, f"{prefix}.{key}" if prefix else str(key)))
    return flat
