"""Starting the same command again: what must match, which checkpoint is taken, what a save holds."""

from __future__ import annotations

import importlib.metadata
import json
import logging
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from data_prep.shards import TokenDataset

from data_prep.config import UserError
from pipeline import checkpoint
from pipeline.config import RunConfig, dump_config
from pipeline.engine import REPOSITORY, Engine, NonFiniteLossError, barrier, gather_objects
from pipeline.export import export_model

log = logging.getLogger(__name__)

CONFIG = "config.yaml"
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
    "train.export_checkpoints",
    "train.tensorboard",
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
    config.run_dir.mkdir(parents=True, exist_ok=True)
    checkpoint.write_atomic(path, yaml.safe_dump(mine, sort_keys=False))


def load_newest(engine: Engine, run_dir: Path) -> tuple[int, int]:
    """Load the newest checkpoint that is valid by content; its steps and supervised tokens, or 0, 0.

    Torn ones are passed over with a line that says why; every rank hashes a part of the files.
    """
    for directory in reversed(checkpoint.checkpoints(run_dir)):
        found = checkpoint.problem(directory, engine.world.rank, engine.world.ranks)
        problems = [p for p in gather_objects(found) if p is not None]
        if problems:
            log.warning("%s is not used: %s", directory.name, problems[0])
            continue
        state = json.loads((directory / checkpoint.STATE).read_text())
        if (state["ranks"], state["zero_stage"]) != (engine.world.ranks, engine.stage):
            raise UserError(
                f"{directory} was saved by {state['ranks']} ranks at ZeRO stage {state['zero_stage']}; "
                f"go on with as many and that stage (now: {engine.world.ranks}, {engine.stage})"
            )
        engine.load(directory)
        log.info("resumed from %s", directory)
        return int(state["step"]), int(state["tokens"])
    return 0, 0


def save(engine: Engine, config: RunConfig, step: int, tokens: int, fingerprint: str) -> None:
    """Save a checkpoint after `step` by the directory protocol; all ranks must call."""
    partial = checkpoint.partial_directory(config.run_dir, step)
    if engine.world.is_main:
        checkpoint.remove(partial)
        partial.mkdir(parents=True)
    barrier()
    engine.save(partial)
    if config.train.export_checkpoints:
        info = export_info(config, step, tokens, fingerprint)
        export_model(engine, config, partial / checkpoint.HF, info)
    if engine.world.is_main:
        state = {
            "step": step,
            "tokens": tokens,
            "ranks": engine.world.ranks,
            "zero_stage": engine.stage,
            "data_fingerprint": fingerprint,
        }
        checkpoint.write_atomic(partial / checkpoint.STATE, json.dumps(state))
    barrier()
    names = checkpoint.list_files(partial)[engine.world.rank :: engine.world.ranks]
    described = gather_objects(checkpoint.describe(partial, names))
    if engine.world.is_main:
        checkpoint.write_complete(partial, {k: v for part in described for k, v in part.items()})
        checkpoint.publish(config.run_dir, step)
        checkpoint.prune(config.run_dir, config.train.keep_last)
    barrier()


def record_bad_batch(
    run_dir: Path, step: int, data: TokenDataset, rows: np.ndarray, error: NonFiniteLossError
) -> str:
    """Write where the rows of a step with a non-finite loss come from; the message for the user."""
    path = run_dir / "bad_batch.json"
    rows_from = data.provenance(rows)
    checkpoint.write_atomic(path, json.dumps({"step": step, "loss": str(error), "rows": rows_from}))
    return (
        f"the loss of step {step} is {error}; its rows are listed in {path}; lower train.lr, or look at "
        "the rows; the last checkpoint is untouched"
    )


def export_info(config: RunConfig, step: int, tokens: int, fingerprint: str) -> dict[str, Any]:
    """What an export says of its origin."""
    return {
        "run": str(config.run_dir),
        "origin": config.model.path or "new",
        "objective": config.objective.name,
        "objective_params": config.objective.params,
        "cost": config.objective.cost,
        "step": step,
        "tokens": tokens,
        "data_fingerprint": fingerprint,
        "seed": config.train.seed,
        "lr": config.train.lr,
        "batch": config.train.batch,
        "git": _git_commit(),
        **{p: importlib.metadata.version(p) for p in ("torch", "transformers", "deepspeed")},
    }


def _git_commit() -> str:
    result = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=REPOSITORY, capture_output=True, text=True
    )
    return result.stdout.strip() or "unknown"


def _flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict) or not tree:
        return {prefix: tree}
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat.update(_flatten(value, f"{prefix}.{key}" if prefix else str(key)))
    return flat
