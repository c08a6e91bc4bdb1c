"""The recipe keys that limit the duration of a run or a step."""

from __future__ import annotations

from emo.common.config.recipe import FREE, Section, mark


class LimitsConfig(Section):
    """The keys of `train` that limit the duration of a run or a step."""

    timeout_minutes: float = mark(FREE, 10, gt=0, le=1e5)
    """A step fails if a rank waits longer than this for another one."""
    max_minutes: float | None = mark(FREE, None, gt=0)
    """Save a checkpoint and stop after this many minutes."""
