"""Export a checkpoint that was saved without an export, in one process on the CPU.

The checkpoint holds the trained weights, and the files of an export except weights. A run with adapters also
needs its base model, under the name in config.yaml.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from emo.common.config.recipe import parse_section, read_written
from emo.common.errors import UserError, one_line

from ..config import RunConfig
from ..control.run_dir import CONFIG, HF, HF_SETTINGS, checkpoint_problem, checkpoints
from ..engine.engine import frozen_sum
from ..engine.snapshots import read_weights
from ..model.adapters import add_lora
from ..model.build import load_base
from ..model.export import check_export, complete_export, view_model, write_content
from .claims import IDENTITY, MIXTURES
from .saver import Saved, read_saved


def export_checkpoint(source: Path, target: Path) -> Path:
    """Export a checkpoint, or the newest one of a run directory, to a new directory. Return the checkpoint.

    Raises UserError for a damaged checkpoint, or if `target` exists.
    """
    if target.exists():
        raise UserError(f"{target} exists. Give a new directory", code="export-target")
    checkpoint = _find_checkpoint(source)
    if (problem := checkpoint_problem(checkpoint)) is not None:
        raise UserError(f"{checkpoint} is not a valid checkpoint: {problem}", code="checkpoint-damaged")
    target.parent.mkdir(parents=True, exist_ok=True)
    if (checkpoint / HF).is_dir():
        complete_export(target, lambda directory: _copy(checkpoint / HF, directory), lambda directory: None)
        return checkpoint
    settings = checkpoint / HF_SETTINGS
    if not settings.is_dir():
        problem = f"{checkpoint} has no {HF_SETTINGS}/, because another version of emo wrote it"
        raise UserError(f"{problem}. Export it with that version", code="other-version")
    config = _read_config(checkpoint.parent)
    view = view_model(_load_model(read_saved(checkpoint), config, settings), config)
    complete_export(
        target,
        lambda directory: write_content(view, config, directory, lambda folder: _copy(settings, folder)),
        lambda directory: check_export(
            directory, view.probe, view.logits, torch.zeros(0, 0, dtype=torch.long)
        ),
    )
    return checkpoint


def _copy(source: Path, target: Path) -> None:
    shutil.copytree(source, target, dirs_exist_ok=True)


def _find_checkpoint(source: Path) -> Path:
    """Return `source`, or its newest checkpoint if it is a run directory."""
    if not source.is_dir():
        raise UserError(f"{source} does not exist. Give a run directory or a checkpoint in it", code="no-run")
    if source.resolve().name.startswith("step-"):
        return source.resolve()
    if not (found := checkpoints(source)):
        raise UserError(f"{source} has no complete checkpoint", code="no-checkpoint")
    return found[-1]


def _read_config(run_dir: Path) -> RunConfig:
    """Return the recipe of a run, with the directory that it is in now."""
    try:
        tree = read_written(run_dir / CONFIG)
        keys = {key: value for key, value in tree.items() if key not in (IDENTITY, MIXTURES)}
    except (OSError, ValueError) as error:
        problem = f"{run_dir / CONFIG} cannot be read ({one_line(error, 120)})"
        raise UserError(f"{problem}. Copy it next to the checkpoint", code="run-config") from None
    return parse_section(RunConfig, keys | {"output_dir": str(run_dir)}, "")


def _load_model(saved: Saved, config: RunConfig, settings: Path) -> nn.Module:
    """Return the model of a checkpoint on the CPU, with its adapters."""
    model: nn.Module
    if config.model.lora is None:
        dtype = getattr(torch, config.model.dtype)
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(settings), dtype=dtype)
    else:
        base = load_base(config, "eager", alone=True)
        model = add_lora(base, config.model, config.train.seed)
        if frozen_sum(model) % 2**64 != saved.frozen:
            problem = f"model.path={config.model.path} differs from the base model of {saved.directory}"
            raise UserError(f"{problem}. Restore the old weights", code="changed-base")
    weights = read_weights(saved.directory)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    places = trained | dict(model.named_buffers())
    if missing := [name for name in trained if name not in weights]:
        raise UserError(f"{saved.directory} has no weights for {missing[0]}", code="checkpoint-state")
    with torch.no_grad():
        for name in places.keys() & weights.keys():
            places[name].copy_(weights[name].contiguous())
    return model
