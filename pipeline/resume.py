"""Starting the same command again: what must match, and which checkpoint is taken."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from common.errors import UserError
from common.files import write_text
from pipeline.config import RunConfig, dump_config
from pipeline.engine import to_universal
from pipeline.ranks import World, gather_objects, main_first
from pipeline.run_dir import CONFIG, STATE, checkpoints, problem

log = logging.getLogger(__name__)

# Keys that may change when a run goes on: none of them changes what is learned.
FREE = {
    "run_dir",
    "data",  # its content is compared by fingerprint
    "model.attn_implementation",
    "model.activation_checkpointing",
    "train.micro_batch",
    "train.log_every",
    "train.eval_every",
    "train.eval_rows",
    "train.save_every",
    "train.keep_last",
    "train.keep_every",
    "train.async_save",
    "train.copy_to",
    "train.export_checkpoints",
    "train.tensorboard",
    "train.wandb",
    "train.profile",
    "train.timeout_minutes",
    "train.max_minutes",
    "train.max_skipped",
    "train.spike_factor",
    "train.spike_stops",
}


def claim_run_dir(config: RunConfig, fingerprint: str) -> None:
    """Write config.yaml into a new run directory, or refuse one that another configuration started."""
    path = config.run_dir / CONFIG
    mine = yaml.safe_load(dump_config(config))
    mine["data_fingerprint"] = fingerprint
    if path.is_file():
        theirs = _flatten(yaml.safe_load(path.read_text()))
        for key, value in _flatten(mine).items():
            if any(key == free or key.startswith(free + ".") for free in FREE):
                continue
            if theirs.get(key) != value:
                raise UserError(
                    f"{config.run_dir} was started with {key}={theirs.get(key)!r}, not {value!r}; "
                    "set run_dir to a new directory, or go on with the old value"
                )
    try:
        config.run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"run_dir={config.run_dir} cannot be made ({error}); set another") from None
    write_text(path, yaml.safe_dump(mine, sort_keys=False))


class Saved(NamedTuple):
    """A checkpoint that is valid by content."""

    directory: Path
    step: int
    tokens: int  # supervised tokens up to this step
    ranks: int
    zero_stage: int


def newest_valid(run_dir: Path, world: World) -> Saved | None:
    """The newest checkpoint whose files are as COMPLETE says, or None; all ranks must call.

    Others are passed over with a line that says why. Every rank hashes a part of the files.
    """
    for directory in reversed(checkpoints(run_dir)):
        found = problem(directory, world.rank, world.ranks)
        problems = [p for p in gather_objects(found) if p is not None]
        if not problems:
            state = json.loads((directory / STATE).read_text())
            return Saved(directory, *(int(state[k]) for k in ("step", "tokens", "ranks", "zero_stage")))
        log.warning("%s is not used: %s", directory.name, problems[0])
    return None


def loadable(saved: Saved, stage: int, world: World) -> tuple[Path, bool]:
    """Where this many ranks can load `saved` from, and whether that is a universal copy.

    On as many ranks as saved it: the checkpoint itself. Else: a universal copy, in a folder of its own.
    Raises UserError when the ZeRO stage differs, which DeepSpeed's universal format does not bridge.
    """
    if saved.zero_stage != stage:
        raise UserError(
            f"{saved.directory} was saved at ZeRO stage {saved.zero_stage}, not {stage}; "
            f"set deepspeed=ds_configs/zero{saved.zero_stage}.json, or start a new run_dir from an export"
        )
    if saved.ranks == world.ranks:
        return saved.directory, False
    copy = saved.directory.with_name(saved.directory.name + ".universal")
    with main_first(world):
        if world.is_main:
            name, ranks = saved.directory.name, saved.ranks
            log.info("%s was saved by %d ranks: converting it for %d", name, ranks, world.ranks)
            shutil.rmtree(copy, ignore_errors=True)
            to_universal(saved.directory / "state", copy / "state")
    return copy, True


def _flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict) or not tree:
        return {prefix: tree}
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat.update(_flatten(value, f"{prefix}.{key}" if prefix else str(key)))
    return flat
