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
from pipeline.config import MixtureConfig, RunConfig, dump_config
from pipeline.engine import to_universal
from pipeline.identity import PARTS, Identity, check_same
from pipeline.order import Holding
from pipeline.ranks import World, gather_objects, on_main
from pipeline.run_dir import CONFIG, INITIAL, STATE, checkpoints, problem, read_marker, step_of

log = logging.getLogger(__name__)

IDENTITY = "identity"  # in config.yaml: what was read, see identity.py
MIXTURES = "mixtures"  # in config.yaml, once it has changed: which mixture held from which step on


def compare(config: RunConfig, identity: Identity) -> None:
    """Refuse a run directory that another configuration or other content started.

    Fields marked `free` may differ, and the mixture where `train.mixture_from` says so. Raises UserError
    naming the first key that was changed, added or removed, or what else is not what it was.
    """
    if not (config.run_dir / CONFIG).is_file():
        if checkpoints(config.run_dir):
            raise UserError(
                f"{config.run_dir} holds checkpoints but not the {CONFIG} that they were trained with; "
                "put it back, or set run_dir to a new directory"
            )
        return
    claimed = _claimed(config.run_dir)
    previous, current = _flatten(claimed), _flatten(yaml.safe_load(dump_config(config)))
    free = (*marked(RunConfig, "free"), MIXTURES, IDENTITY)
    for key in dict.fromkeys((*current, *previous)):
        if current.get(key) == previous.get(key) or any(_within(key, section) for section in free):
            continue
        if _within(key, "train.mixture"):
            _check_mixture_may_change(config)
            continue
        before, now = (f"{key}={shown(t[key])}" if key in t else f"no {key}" for t in (previous, current))
        raise UserError(
            f"{config.run_dir} was started with {before}, and the recipe now has {now}; set run_dir to a new "
            "directory, or restore the old value",
            code="changed-key",
        )
    check_same(config.run_dir, claimed.get(IDENTITY) if isinstance(claimed, dict) else None, identity)


def _within(key: str, section: str) -> bool:
    return key == section or key.startswith(section + ".")


def _claimed(run_dir: Path) -> Any:
    """Return the content of config.yaml."""
    path = run_dir / CONFIG
    try:
        return read_written(path)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path} cannot be read ({one_line(error, 100)}); put the original back, or set run_dir to a new "
            "directory"
        ) from None


def _check_mixture_may_change(config: RunConfig) -> None:
    """Raises UserError unless the recipe says from which step its mixture holds."""
    if config.train.mixture is None:
        raise UserError(
            f"{config.run_dir} was trained with a train.mixture, and without one its domains could not go on "
            "where they are; train.mixture={temperature: 1} takes all in proportion, or set run_dir to a new "
            "directory"
        )
    if config.train.mixture_from is None:
        newest = max(map(step_of, checkpoints(config.run_dir)), default=0)
        raise UserError(
            f"{config.run_dir} was trained with another train.mixture; set train.mixture_from={newest} to "
            "let this one hold from its newest checkpoint on, or restore the old one"
        )


def mixtures(config: RunConfig) -> list[Holding]:
    """Return the mixtures by first step: those that the run was trained with, and the recipe's.

    `compare` has found that it may change, where it does.
    """
    recorded, now, start = _recorded(config.run_dir), config.train.mixture, config.train.mixture_from
    if not recorded or recorded[-1].mixture == now:
        return recorded or [Holding(0, now)]
    assert start is not None
    earlier = [holding for holding in recorded if holding.step < start]
    return earlier if earlier and earlier[-1].mixture == now else [*earlier, Holding(start, now)]


def check_mixture(config: RunConfig, saved: Saved | None) -> None:
    """Raises UserError for a mixture that changes at another step than the run goes on from."""
    step = saved.step if saved is not None else 0
    recorded = _recorded(config.run_dir)
    if recorded and recorded != mixtures(config) and config.train.mixture_from != step:
        raise UserError(
            f"train.mixture_from={config.train.mixture_from}, and the run goes on from step {step}; set "
            f"train.mixture_from={step}, or restore the old train.mixture"
        )


def _recorded(run_dir: Path) -> list[Holding]:
    """Return the mixtures of a run that was claimed; none of one that was not."""
    if not (run_dir / CONFIG).is_file():
        return []
    tree = _claimed(run_dir)
    try:
        entries = tree.get(MIXTURES) or [{"step": 0, "mixture": tree["train"].get("mixture")}]
        return [
            Holding(
                int(entry["step"]),
                None if entry["mixture"] is None else MixtureConfig.model_validate(entry["mixture"]),
            )
            for entry in entries
        ]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{run_dir / CONFIG} does not say which mixtures it was trained with ({one_line(error, 100)}); "
            "put the original back, or set run_dir to a new directory"
        ) from None


def clear_unstarted(config: RunConfig) -> None:
    """Remove the first weights of a launch that ended before the run was claimed: it may have had others."""
    if not (config.run_dir / CONFIG).is_file():
        shutil.rmtree(config.run_dir / INITIAL, ignore_errors=True)


def claim(config: RunConfig, identity: Identity) -> None:
    """Write config.yaml: from now on the run directory belongs to this configuration and what it has read."""
    tree, history = {**yaml.safe_load(dump_config(config)), IDENTITY: identity}, mixtures(config)
    if len(history) > 1:
        entries = [(step, None if m is None else m.model_dump(mode="json")) for step, m in history]
        tree[MIXTURES] = [{"step": step, "mixture": mixture} for step, mixture in entries]
    text = yaml.safe_dump(tree, sort_keys=False)
    write_text(config.run_dir / CONFIG, text)


class Saved(NamedTuple):
    """A checkpoint that is valid by content."""

    directory: Path
    step: int
    tokens: int  # supervised tokens up to this step
    ranks: int
    groups: list[int]  # parameters in each of the optimizer's groups
    frozen: int  # of the engine: which weights the adapters belong to
    identity: Identity  # of what was trained with
    progress: dict[str, Any]  # of metrics and guard, between two records


STATE_KINDS: dict[str, Any] = {
    **dict.fromkeys(("step", "tokens", "ranks", "frozen"), int),
    **dict.fromkeys(("identity", "progress"), dict),
    "groups": list,
}


def newest_valid(run_dir: Path, world: World) -> Saved | None:
    """Return the newest checkpoint whose files are as COMPLETE says, or None; all ranks must call.

    Others are passed over with a line that says why. Every rank hashes a part of the files.
    """
    for directory in reversed(checkpoints(run_dir)):
        fault = problem(directory, world.rank, world.ranks)
        problems = [p for p in gather_objects(fault) if p is not None]
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
    """Return the path from which this many ranks can load `saved`, and whether that is a universal copy.

    On as many ranks as saved it: the checkpoint itself. Else: a universal copy, in a folder of its own.
    Raises UserError when that would have to hold Muon's state, of which DeepSpeed's universal format knows
    nothing.
    """
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


def check_identity(saved: Saved | None, identity: Identity) -> None:
    """Raise UserError unless all ranks and the checkpoint have read the same; all ranks must call."""
    first, *others = gather_objects(identity)
    for other in others:
        if other != first:
            part = next(part for part in first if other.get(part) != first[part])
            raise UserError(
                f"hosts read different things as {PARTS[part][0]}; give all of them the same files",
                code=f"hosts-{part}",
            )
    if saved is not None:
        check_same(saved.directory, saved.identity, identity)


def _flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Return dotted keys and their values; an empty section holds none."""
    if not isinstance(tree, dict):
        return {prefix: tree}
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat.update(_flatten(value, f"{prefix}.{key}" if prefix else str(key)))
    return flat
