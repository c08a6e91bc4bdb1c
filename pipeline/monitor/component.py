"""The interface of what runs next to the training loop: heartbeat, guard, metrics, profiler, samples, ..."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..batches.loader import StepBatch
from ..engine.totals import StepTotals


@dataclass
class RunState:
    """How far a run has come."""

    steps: int  # steps of the whole run
    first_step: int = 0  # steps that earlier launches had taken
    step: int = 0  # steps taken so far
    tokens: int = 0  # supervised tokens so far
    lr: float = 0.0  # learning rate of the step that is being taken

    def advance(self, tokens: int) -> None:
        """Count a step on `tokens` supervised tokens."""
        self.step += 1
        self.tokens += tokens

    def is_due(self, every: int) -> bool:
        """Return whether something happens after this step: every so many steps, if not 0, and at the end."""
        return self.step == self.steps or (every > 0 and self.step % every == 0)


class Component:
    """Something that the trainer calls around each step. The methods do nothing unless a subclass has them.

    All ranks have the same components in the same order, so that a method may communicate.
    """

    name = ""  # the key of its state in a checkpoint, for components that have a state

    def before_training(self, state: RunState) -> None:
        """Prepare for the loop. Called once."""

    def before_step(self, state: RunState) -> None:
        """Prepare for step `state.step + 1`."""

    def after_step(self, state: RunState, batch: StepBatch, totals: StepTotals) -> None:
        """Handle the step that was just counted in `state`. Raises UserError to end the run."""

    def after_save(self, state: RunState) -> None:
        """Handle a checkpoint of a run that continues or is finished."""

    def state_dict(self) -> dict[str, object]:
        """Return the state that a checkpoint keeps, as JSON can hold it. Components with a name have one."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the `state_dict` in the checkpoint that the run resumes from."""

    def close(self) -> None:
        """Write what is left. Called once, after the last step."""
