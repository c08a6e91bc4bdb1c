"""What one job does when all parts are there: all rows -> the plan of all shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from common.errors import UserError
from data_prep.config import VALIDATION, DataConfig, set_called
from data_prep.inputs import Input
from data_prep.scan.assignment import Assignment
from data_prep.scan.parts import Part, Seen, by_reason, require_usable
from data_prep.selection import Selection, select


def assign(
    config: DataConfig, inputs: list[Input], parts: list[Part], place: Path, threads: int
) -> Assignment:
    """Return which rows each shard takes, its columns in `place`. Raises UserError when there are none."""
    seen = _seen(parts)
    for one, own in zip(inputs, seen, strict=True):
        require_usable(one, own, config.strict)
    splits = np.array([one.split for one in inputs], np.uint16)
    weights = np.array([one.source.weight for one in inputs])
    selection = select(parts, config, weights, splits, place, threads)
    summary = _summary(config, inputs, seen, selection, splits)
    pieces = np.concatenate([part.pieces() for part in parts])
    return Assignment(pieces, selection.shard, selection.copies, summary)


def _seen(parts: list[Part]) -> list[Seen]:
    """Return what was seen of each input, in order."""
    found: dict[int, Seen] = {}
    for part in parts:
        for seen in part.seen():
            if seen.input in found:
                found[seen.input].add(seen)
            else:
                found[seen.input] = seen
    return [found[number] for number in sorted(found)]


def _facts(one: Input, seen: Seen) -> dict[str, Any]:
    """What an input is and how it was read, for the manifest."""
    facts: dict[str, Any] = seen.identity | {"format": one.spec.format, "weight": one.source.weight}
    facts |= {"rows": seen.rows, "columns": seen.columns, "columns_not_read": seen.not_read}
    return facts | {"messages_left_out": seen.messages}


def _summary(
    config: DataConfig, inputs: list[Input], seen: list[Seen], selection: Selection, splits: np.ndarray
) -> dict[str, Any]:
    """What became of the rows, per input and in all. Raises UserError when a split is left without rows."""
    sources = []
    for number, (one, own) in enumerate(zip(inputs, seen, strict=True)):
        copies = dict(zip(config.splits, selection.used[number].tolist(), strict=True))
        sources.append(_facts(one, own) | copies | {"rejected": by_reason(selection.rejected[number])})
    rejected = by_reason(selection.rejected.sum(axis=0))
    train, *sets = selection.rows.tolist()
    if not train:
        if config.validation_fraction and sets[0]:
            raise UserError(
                f"no row is left to train on: data.validation_fraction={config.validation_fraction} takes "
                f"all {sets[0]:,} of them; set a smaller one"
            )
        reasons = ", ".join(f"{n} {reason}" for reason, n in rejected.items())
        raise UserError(f"no row of the sources can be trained on: {reasons or 'there are none'}")
    for number, (name, count) in enumerate(zip(config.validation_sets, sets, strict=True), 1):
        if not count:
            raise _no_validation(config, name, by_reason(selection.rejected[splits == number].sum(axis=0)))
    chars = dict(zip(config.splits, selection.chars.tolist(), strict=True))
    return {"sources": sources, "rejected": rejected, "chars": chars}


def _no_validation(config: DataConfig, name: str, rejected: dict[str, int]) -> UserError:
    key = "data.validation" if name == VALIDATION else f"data.validation.{name}"
    if config.validation_fraction:
        reason = f"data.validation_fraction={config.validation_fraction:g} takes no row; set a larger one"
    else:
        reasons = ", ".join(f"{n:,} {reason}" for reason, n in rejected.items())
        reason = f"its sources have no usable row of their own ({reasons}); give other {key} sources"
    return UserError(f"the {set_called(name)} is empty: {reason}, or none")
