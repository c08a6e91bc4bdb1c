"""What happens when a loss or gradient is not finite, or the loss jumps.

A step whose gradient is not finite is never applied (DeepSpeed drops it on all ranks at once). It is counted,
and where its rows come from is written to bad_batches.jsonl, so that it can be looked at and replayed. After
`train.max_skipped` such steps in a row the run stops: the weights or the data are at fault, not one batch.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common.errors import UserError
from pipeline.config import TrainConfig
from pipeline.engine import Sums
from pipeline.run_dir import BAD_BATCHES

WINDOW = 50  # applied steps that a spike is measured against
ENOUGH = 10  # of them before anything is called a spike


class Guard:
    """Watches the steps of one rank; all ranks see the same sums and decide alike."""

    def __init__(
        self, run_dir: Path, train: TrainConfig, writes: bool, state: dict[str, Any] | None = None
    ) -> None:
        """state: what `state` returned when the checkpoint was saved from which the run resumes."""
        self.path = run_dir / BAD_BATCHES
        self.train = train
        self.writes = writes
        self.skipped = 0  # in this process
        state = state or {}
        self._in_a_row = int(state.get("in_a_row", 0))
        self._recent: deque[float] = deque(state.get("recent", ()), maxlen=WINDOW)

    def state(self) -> dict[str, Any]:
        """What later steps are judged by, so that a resumed run judges alike."""
        return {"in_a_row": self._in_a_row, "recent": list(self._recent)}

    def observe(self, step: int, sums: Sums, rows: Callable[[], list[Any]]) -> str | None:
        """Judge step `step` (from 1). A line for the user if something is wrong, else None.

        `rows()` tells where the rows of the batch come from. Raises UserError when the run must end.
        """
        nll = sums.nll / max(1, sums.tokens)
        if not sums.applied or not math.isfinite(nll):
            self.skipped += 1
            self._in_a_row += 1
            self._record("not finite", step, nll, rows)
            if self._in_a_row >= self.train.max_skipped:
                raise UserError(
                    f"{self._in_a_row} steps in a row up to step {step} had no finite gradient and were "
                    f"skipped; their rows are listed in {self.path}; lower train.lr or look at the rows"
                )
            return f"step {step} skipped: its loss or gradient is not finite ({self._in_a_row} in a row)"
        self._in_a_row = 0
        usual = statistics.median(self._recent) if len(self._recent) >= ENOUGH else math.inf
        self._recent.append(nll)
        if self.train.spike_factor and nll > self.train.spike_factor * usual:
            self._record("spike", step, nll, rows)
            if self.train.spike_stops:
                raise UserError(
                    f"the loss jumped to {nll:.3g} at step {step} (usual: {usual:.3g}); its rows are listed "
                    f"in {self.path}; lower train.lr, or set train.spike_stops=false to continue"
                )
            return f"step {step}: the loss jumped to {nll:.3g} (usual: {usual:.3g})"
        return None

    def _record(self, reason: str, step: int, nll: float, rows: Callable[[], list[Any]]) -> None:
        if self.writes:
            record = {"step": step, "reason": reason, "nll": repr(nll), "rows": rows()}
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
