"""Comparison of a recipe with the configuration that a run directory was started with, key by key.

This module imports no large library, so that `emo train` can answer before it starts any rank.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from emo.common.config.recipe import FREE, format_value, marked, read_written
from emo.common.errors import UserError, one_line

from ..config import RunConfig, dump_config
from ..control.run_dir import CONFIG, checkpoints, step_of

IDENTITY = "identity"  # key of config.yaml for the Identity of the run (identity.py)
MIXTURES = "mixtures"  # key of config.yaml for the mixtures of a run that changed its mixture
NEW_DIRECTORY = "or set output_dir, and train.copy_to if it is set, to a new directory"


def check_keys(config: RunConfig) -> None:
    """Raise UserError if the run directory was started with other keys. Does nothing if it cannot be read."""
    try:
        recorded = read_written(config.output_dir / CONFIG)
    except (OSError, ValueError):
        return
    newest = max(map(step_of, checkpoints(config.output_dir)), default=0)
    compare_keys(config.output_dir, recorded, newest, config)


def read_recorded(file: Path) -> dict[str, Any]:
    """Return the config.yaml of a run. Raises UserError if it is damaged."""
    try:
        return read_written(file)
    except ValueError as error:
        raise UserError(
            f"{file} is damaged ({one_line(error, 120)}). Restore it, {NEW_DIRECTORY}", code="run-config"
        ) from None


def compare_keys(
    where: Path | str,
    recorded: Mapping[str, Any],
    newest: int,
    config: RunConfig,
    others: Collection[str] = (),
) -> None:
    """Raise UserError for every key of a run's config.yaml that the recipe must not change, but changes.

    Fields marked `free` may change. The mixture may change if `train.mixture_from` is set.

    Args:
        where: The run directory or its copy.
        recorded: The content of config.yaml.
        newest: Step of the newest checkpoint.
        config: The recipe.
        others: More keys that may change.
    """
    train = config.train
    mistakes: list[UserError] = []
    mixture_changed = False
    free = (*marked(RunConfig, FREE), MIXTURES, IDENTITY, *others)
    for key, before, now in iterate_changes(recorded, yaml.safe_load(dump_config(config))):
        if any(f"{key}.".startswith(f"{prefix}.") for prefix in free):
            continue
        if f"{key}.".startswith("train.mixture."):
            mixture_changed = True
        else:
            problem = f"{where} was started with {key}={before}, but the recipe has {now}"
            mistakes.append(UserError(f"{problem}. Restore it, {NEW_DIRECTORY}", code="changed-key"))
    if mixture_changed and train.mixture is None:
        cure = f"set train.mixture={{temperature: 1}} for all domains in proportion, {NEW_DIRECTORY}"
        mistakes.append(UserError(f"{where} was trained with a mixture; {cure}", code="mixture-gone"))
    elif mixture_changed and train.mixture_from is None:
        cure = f"set train.mixture_from={newest} to use the new one from the newest checkpoint on"
        problem = f"{where} was trained with another train.mixture"
        mistakes.append(UserError(f"{problem}; {cure}, or restore the old one", code="changed-mixture"))
    if mistakes:
        raise UserError.of(mistakes)


def iterate_changes(before: Any, now: Any, key: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield the dotted key and both values, as text, of each leaf that differs between two trees."""
    before, now = (None if tree == {} else tree for tree in (before, now))  # an absent key is None
    if before == now:
        return
    trees = [tree if isinstance(tree, dict) else {} for tree in (before, now)]
    if any(trees):
        old, new = trees
        for name in {**new, **old}:
            yield from iterate_changes(old.get(name), new.get(name), f"{key}.{name}" if key else str(name))
        return
    texts = [re.sub("([0-9a-f]{12})[0-9a-f]{52}", r"\1", format_value(value)) for value in (before, now)]
    yield key, texts[0], texts[1]
