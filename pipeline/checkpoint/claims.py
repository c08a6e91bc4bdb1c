"""Which keys of a recipe may differ from those that a run directory was started with.

This imports no large library, so that `emo train` can answer before it starts any rank.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from emo.common.config.recipe import FREE, format_value, marked, read_written
from emo.common.errors import UserError

from ..config import RunConfig, dump_config
from ..control.run_dir import CONFIG, checkpoints, step_of

IDENTITY = "identity"  # in config.yaml: what was read
MIXTURES = "mixtures"  # in config.yaml, once it has changed: which mixture held from which step on
ANEW = "or set output_dir, and train.copy_to where it is set, to a new directory"


def check_keys(config: RunConfig) -> None:
    """Raise UserError where the run directory was started with other keys; one that cannot be read passes."""
    claimed: Any = None
    with contextlib.suppress(OSError, ValueError):
        claimed = read_written(config.output_dir / CONFIG)
    if isinstance(claimed, dict):
        newest = max(map(step_of, checkpoints(config.output_dir)), default=0)
        compare_keys(config.output_dir, claimed, newest, config)


def compare_keys(where: Path | str, claimed: Mapping[str, Any], newest: int, config: RunConfig) -> None:
    """Raise UserError naming every key of a run's config.yaml that differs from the recipe and may not.

    Fields marked `free` may differ, and the mixture where `train.mixture_from` says so. where: what holds the
    checkpoints of the run; `newest` is the step of the last.
    """
    train, mistakes, mixed = config.train, [], False
    free = (*marked(RunConfig, FREE), MIXTURES, IDENTITY)
    for key, before, now in differences(claimed, yaml.safe_load(dump_config(config))):
        if any(f"{key}.".startswith(f"{part}.") for part in free):
            continue
        if f"{key}.".startswith("train.mixture."):
            mixed = True
        else:
            problem = f"{where} was started with {key}={before}, and the recipe now has {now}"
            mistakes.append(UserError(f"{problem}; restore the old value, {ANEW}", code="changed-key"))
    if mixed and train.mixture is None:
        cure = "train.mixture={temperature: 1} takes all domains in proportion"
        mistakes.append(UserError(f"{where} was trained with a mixture; {cure}, {ANEW}", code="mixture-gone"))
    elif mixed and train.mixture_from is None:
        cure = f"train.mixture_from={newest} lets this one hold from its newest checkpoint on"
        problem = f"{where} was trained with another train.mixture"
        mistakes.append(UserError(f"{problem}; {cure}; or restore the old one", code="changed-mixture"))
    if mistakes:
        raise UserError.of(mistakes)


def differences(before: Any, now: Any, key: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield the dotted keys of leaves that differ between two trees, with both values in words."""
    before, now = (None if tree == {} else tree for tree in (before, now))  # an absent key is None
    trees = [tree for tree in (now, before) if isinstance(tree, dict)]
    if before == now:
        return
    if trees:
        for name in dict.fromkeys(name for tree in trees for name in tree):
            was, is_now = (tree.get(name) if isinstance(tree, dict) else None for tree in (before, now))
            yield from differences(was, is_now, f"{key}.{name}" if key else str(name))
        return
    hashed = re.compile("[0-9a-f]{64}")  # its beginning will do
    texts = [hashed.sub(lambda digest: digest[0][:12], format_value(value)) for value in (before, now)]
    yield key, texts[0], texts[1]
