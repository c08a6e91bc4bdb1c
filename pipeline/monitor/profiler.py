"""What a rank computes in some steps, for chrome://tracing, ui.perfetto.dev and pytorch.org/memory_viz."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ..control.run_dir import PROFILE
from ..engine.devices import on_gpu
from .config import ProfileConfig

MOST = 1_000_000  # allocations that are kept, with the lines that made them


class Profile:
    """Records the steps of train.profile; on other ranks than its own, or without one, nothing."""

    def __init__(self, profile: ProfileConfig | None, run_dir: Path, rank: int) -> None:
        profiled = profile is not None and rank in profile.ranks
        self._first, self._last = profile.steps if profiled and profile is not None else (0, 0)
        self._path = run_dir / PROFILE / f"rank-{rank}"
        self._profiler: Any = None

    def starts(self, step: int) -> None:
        """Step `step` (from 1) is about to be taken."""
        if step == self._first:
            if on_gpu():
                torch.cuda.memory._record_memory_history(max_entries=MOST)
            self._profiler = torch.profiler.profile()
            self._profiler.start()

    def ended(self, step: int) -> None:
        """Step `step` was taken; after the last one the files are written."""
        if step == self._last:
            self.close()

    def close(self) -> None:
        """Write what was recorded, also where the run ends before the last step."""
        if self._profiler is None:
            return
        self._profiler.stop()
        self._path.parent.mkdir(exist_ok=True)
        self._profiler.export_chrome_trace(f"{self._path}.json.gz")
        self._profiler = None
        if on_gpu():
            torch.cuda.memory._dump_snapshot(f"{self._path}.memory.pickle")
            torch.cuda.memory._record_memory_history(enabled=None)
