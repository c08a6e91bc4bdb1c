"""The keys of a recipe that limit how long a run, or a step, may take."""

from __future__ import annotations

from emo.common.config.recipe import FREE, Section, mark


class LimitsConfig(Section):
    """The keys of `train` that limit how long a run, or a step, may take."""

    timeout_minutes: float = mark(FREE, 10, gt=0, le=1e5)
    """A step fails when a rank waits longer than this for another."""
    max_minutes: float | None = mark(FREE, None, gt=0)
    """Save and stop after this time, as at any request to stop."""
