"""Find the rank that holds the others up."""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Sequence

log = logging.getLogger(__name__)

# A rank is slow if its own time is more than SLOW_RATIO times the median of the ranks, and the difference is
# more than SLOW_SHARE of a whole step.
SLOW_RATIO = 1.2
SLOW_SHARE = 0.05
# A warning needs the same slow rank in so many windows in a row, and in so many steps.
MIN_WINDOWS = 2
MIN_STEPS = 10


class Stragglers:
    """Finds the slowest rank of each log window, and warns once about a rank that stays slow."""

    def __init__(self, hosts: Sequence[str]) -> None:
        """hosts: name of each rank's host."""
        self._hosts = hosts
        self._sums = [0.0] * len(hosts)
        self._steps = 0
        self._slowest = -1
        self._slow_windows = 0  # in a row with this rank
        self._slow_steps = 0
        self._warned: set[int] = set()

    def add(self, seconds: Sequence[float]) -> None:
        """Count a step by each rank's own time. A step with an unknown time is left out."""
        if 0 < len(seconds) == len(self._sums) and not math.isnan(sum(seconds)):
            self._sums = [a + b for a, b in zip(self._sums, seconds, strict=True)]
            self._steps += 1

    def record(self, step_seconds: float) -> dict[str, float | str]:
        """Return the window's part of a record in metrics.jsonl, and start the next window.

        step_seconds: duration of a whole step, on average.
        """
        if not self._steps:
            return {}
        means = [total / self._steps for total in self._sums]
        slowest = max(means)
        median = statistics.median_low(means)
        rank = means.index(slowest)
        slow = slowest > SLOW_RATIO * median and slowest - median > SLOW_SHARE * step_seconds
        if rank != self._slowest or not slow:
            self._slowest = rank
            self._slow_windows = 0
            self._slow_steps = 0
        if slow:
            self._slow_windows += 1
            self._slow_steps += self._steps
        self._sums = [0.0] * len(means)
        self._steps = 0
        persists = self._slow_windows >= MIN_WINDOWS and self._slow_steps >= MIN_STEPS
        if persists and rank not in self._warned:
            self._warned.add(rank)
            log.warning(
                "rank %d on %s is slow: its own work takes %.3g s per step, the median rank's %.3g s. "
                "`emo top RUN_DIR` shows all ranks",
                *(rank, self._hosts[rank], slowest, median),
            )
        return {
            "rank_seconds_max": slowest,
            "rank_seconds_median": median,
            "slowest_rank": rank,
            "slowest_host": self._hosts[rank],
        }
