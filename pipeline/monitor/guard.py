"""Detection of losses and gradients that are not finite, and of losses that jump."""

from __future__ import annotations

import collections
import logging
import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from emo.common.errors import UserError

from ..batches.loader import StepBatch
from ..control.run_dir import BAD_BATCHES, append_records
from ..engine.totals import StepTotals
from .component import Component, RunState
from .config import MonitorConfig

log = logging.getLogger(__name__)

WINDOW = 50  # applied steps whose median is the usual loss
FEWEST = 10  # steps before spikes are detected


class Guard(Component):
    """Ends or warns of a run whose losses or gradients are not finite, or jump.

    DeepSpeed does not apply a step whose loss or gradient is not finite, on any rank. The guard writes where
    the rows of such a step come from to bad_batches.jsonl. After `train.max_skipped` of them in a row it ends
    the run: then the weights or the data are at fault, not a single batch. All ranks see the same totals and
    decide the same.
    """

    name = "guard"

    def __init__(
        self,
        run_dir: Path,
        config: MonitorConfig,
        writes: bool,
        provenance: Callable[[np.ndarray], list[Any]],
    ) -> None:
        """Create the guard of one rank.

        Args:
            run_dir: The run directory.
            config: thresholds.
            writes: Whether this rank writes bad_batches.jsonl.
            provenance: Returns the origin of rows, by their numbers.
        """
        self.path = run_dir / BAD_BATCHES
        self.config = config
        self.writes = writes
        self._provenance = provenance
        self._in_a_row = 0
        # Recent losses of applied steps. Batches that the model writes are compared with their own kind.
        self._recent: dict[str, deque[float]] = collections.defaultdict(lambda: deque(maxlen=WINDOW))

    def state_dict(self) -> dict[str, object]:
        """Return the recent losses that spike detection needs after a resume."""
        usual = {name: list(values) for name, values in self._recent.items()}
        return {"in_a_row": self._in_a_row, "usual": usual}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._in_a_row = state["in_a_row"]
        for name, values in state["usual"].items():
            self._recent[name].extend(values)

    def after_step(self, state: RunState, batch: StepBatch, totals: StepTotals) -> None:
        """Warn of a step that is not finite or jumps. Raises UserError when the run must end."""
        if warning := self.check(state.step, batch, totals):
            log.warning(warning)

    def check(self, step: int, batch: StepBatch, totals: StepTotals) -> str | None:
        """Return a warning about step `step` (from 1), or None. Raises UserError when the run must end."""
        loss = totals.loss / (totals.divisor or 1)
        nll = totals.nll / (totals.divisor or 1)
        if not totals.applied or not math.isfinite(loss):
            self._in_a_row += 1
            warning = f"step {step} skipped: its loss or gradient is not finite ({self._in_a_row} in a row)"
            self._record(step, batch, "not finite", loss, nll)
            if self._in_a_row >= self.config.max_skipped:
                raise UserError(self._error(warning, "lower train.learning_rate"), code="not-finite")
            return warning
        self._in_a_row = 0
        prefix = "" if batch.written is None else "written "
        jumps = [self._jump(step, prefix, *item) for item in (("loss", loss), ("NLL", nll))]
        spike = next((jump for jump in jumps if jump is not None), None)
        if spike is not None:
            self._record(step, batch, "spike", loss, nll)
            if self.config.spike_stops:
                cure = "lower train.learning_rate, or set train.spike_stops=false to continue"
                raise UserError(self._error(spike, cure), code="spike")
        return spike

    def _jump(self, step: int, prefix: str, name: str, value: float) -> str | None:
        """Add a value to the recent ones, and describe it if it is a spike compared with them."""
        recent = self._recent[prefix + name]
        usual = statistics.median(recent) if len(recent) >= FEWEST else math.inf
        if math.isfinite(value):
            recent.append(value)
        if self.config.spike_factor and usual > 0 and value > self.config.spike_factor * usual:
            return f"the {name} jumped to {value:.3g} at step {step} (usual: {usual:.3g})"
        return None

    def _record(self, step: int, batch: StepBatch, reason: str, loss: float, nll: float) -> None:
        if self.writes:
            rows = self._provenance(batch.rows)
            record = {"step": step, "reason": reason, "loss": repr(loss), "nll": repr(nll), "rows": rows}
            append_records(self.path, [record])

    def _error(self, problem: str, cure: str) -> str:
        return f"{problem}; its rows are listed in {self.path}; {cure}"
