"""What happens when a loss or gradient is not finite, or the loss jumps.

A step whose loss or gradient is not finite is never applied (DeepSpeed drops it on all ranks at once). It is
counted, and where its rows come from is written to bad_batches.jsonl, so that it can be looked at and
replayed. After `train.max_skipped` such steps in a row the run stops: the weights or the data are at fault,
not one batch.
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
        self._recent: deque[float] = deque(state.get("recent", ()), maxlen=WINDOW)  # NLL
        self._losses: deque[float] = deque(state.get("losses", ()), maxlen=WINDOW)

    def state(self) -> dict[str, Any]:
        """Return what later steps are judged by, so that a resumed run judges alike."""
        return {"in_a_row": self._in_a_row, "recent": list(self._recent), "losses": list(self._losses)}

    def observe(self, step: int, sums: Sums, rows: Callable[[], list[Any]]) -> str | None:
        """Judge step `step` (from 1). Return a line for the user if something is wrong, else None.

        `rows()` tells where the rows of the batch come from. Raises UserError when the run must end.
        """
        loss, nll = (total / max(1, sums.tokens) for total in (sums.loss, sums.nll))
        if not sums.applied or not math.isfinite(loss):
            self.skipped += 1
            self._in_a_row += 1
            self._record("not finite", step, loss, nll, rows)
            if self._in_a_row >= self.train.max_skipped:
                raise UserError(
                    f"{self._in_a_row} steps in a row up to step {step} had no finite gradient and were "
                    f"skipped; their rows are listed in {self.path}; lower train.lr or look at the rows",
                    code="not-finite",
                )
            return f"step {step} skipped: its loss or gradient is not finite ({self._in_a_row} in a row)"
        self._in_a_row = 0
        jumped = None
        for name, value, recent in (("loss", loss, self._losses), ("NLL", nll, self._recent)):
            usual = statistics.median(recent) if len(recent) >= ENOUGH else math.inf
            if math.isfinite(value):
                recent.append(value)
            if self.train.spike_factor and usual > 0 and value > self.train.spike_factor * usual:
                jumped = jumped or f"the {name} jumped to {value:.3g} at step {step} (usual: {usual:.3g})"
        if jumped is None:
            return None
        self._record("spike", step, loss, nll, rows)
        if self.train.spike_stops:
            raise UserError(
                f"{jumped}; its rows are listed in {self.path}; lower train.lr, or set "
                "train.spike_stops=false to continue",
                code="spike",
            )
        return jumped

    def _record(self, reason: str, step: int, loss: float, nll: float, rows: Callable[[], list[Any]]) -> None:
        if self.writes:
            record = {"step": step, "reason": reason, "loss": repr(loss), "nll": repr(nll), "rows": rows()}
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
