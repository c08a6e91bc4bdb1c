"""Components for garbage collection and the heartbeat of the run."""

from __future__ import annotations

import gc

from emo.common.io.files import replace_nonfinite

from ..batches.loader import StepBatch
from ..control.lock import RunLock
from ..engine.device.pace import device_facts
from ..engine.totals import StepTotals
from .component import Component, RunState


class GarbageCollection(Component):
    """Collects garbage at fixed steps, so that ranks do not wait for one another's collections."""

    EVERY = 10  # steps

    def before_training(self, state: RunState) -> None:
        """Leave out what exists already: an automatic collection would rescan every module."""
        gc.collect()
        gc.freeze()
        gc.disable()

    def after_step(self, state: RunState, batch: StepBatch, totals: StepTotals) -> None:
        if state.step % self.EVERY == 0:
            gc.collect()

    @staticmethod
    def restore() -> None:
        """Let Python collect garbage by itself again."""
        gc.enable()
        gc.unfreeze()


class Heartbeat(Component):
    """Records each step in the heartbeat of the run, and measurements of this rank at log windows."""

    def __init__(self, lock: RunLock, rank: int, logging_steps: int) -> None:
        self._lock = lock
        self._rank = rank
        self._logging_steps = logging_steps

    def after_step(self, state: RunState, batch: StepBatch, totals: StepTotals) -> None:
        self._lock.record_step(state.step)
        if state.is_due(self._logging_steps):
            self._lock.record_facts(seconds=replace_nonfinite(totals.seconds[self._rank]), **device_facts())
