"""Recording of single steps with torch.profiler.

The files open in chrome://tracing, ui.perfetto.dev and pytorch.org/memory_viz.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ..batches.loader import StepBatch
from ..control.run_dir import PROFILE
from ..engine.device.devices import on_gpu
from ..engine.totals import StepTotals
from .component import Component, RunState
from .config import ProfileConfig

MAX_ALLOCATIONS = 1_000_000  # memory events that are kept, with the lines that caused them


class Profiler(Component):
    """Records the steps of train.profile on its ranks. Elsewhere it does nothing."""

    def __init__(self, config: ProfileConfig | None, run_dir: Path, rank: int) -> None:
        enabled = config is not None and rank in config.ranks
        self._first, self._last = config.steps if config is not None and enabled else (0, 0)
        self._path = run_dir / PROFILE / f"rank-{rank}"
        self._profiler: Any = None

    def before_step(self, state: RunState) -> None:
        if state.step + 1 == self._first:
            if on_gpu():
                torch.cuda.memory._record_memory_history(max_entries=MAX_ALLOCATIONS)
            self._profiler = torch.profiler.profile()
            self._profiler.start()

    def after_step(self, state: RunState, batch: StepBatch, totals: StepTotals) -> None:
        if state.step == self._last or totals.stop:
            self.close()

    def close(self) -> None:
        """Write what was recorded, also if the run stops before the last step to record."""
        if self._profiler is None:
            return
        self._profiler.stop()
        self._path.parent.mkdir(exist_ok=True)
        self._profiler.export_chrome_trace(f"{self._path}.json.gz")
        self._profiler = None
        if on_gpu():
            torch.cuda.memory._dump_snapshot(f"{self._path}.memory.pickle")
            torch.cuda.memory._record_memory_history(enabled=None)
