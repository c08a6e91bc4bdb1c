"""Run `emo preflight` as a rank on hosts 0, 1, 2 and 2, of which host 1 is slow: python -m ... RECIPE."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from emo.pipeline.cli import run_and_exit
from emo.pipeline.planning import health, preflight


def measure_slowly(seconds: float) -> None:
    """Add `seconds` to everything that preflight measures on this rank."""
    measure = health.measure_seconds

    def slowly(work: Callable[[], Any], device: torch.device) -> float:
        def late() -> None:
            time.sleep(seconds)
            work()

        return measure(late, device)

    health.measure_seconds = slowly


if __name__ == "__main__":
    rank = int(os.environ["RANK"])
    preflight.node_name = lambda: f"host-{min(rank, 2)}"
    if rank == 1:
        measure_slowly(0.15)
    run_and_exit(["preflight", *sys.argv[1:]])
