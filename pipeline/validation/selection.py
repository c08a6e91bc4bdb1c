"""The best checkpoint of a run by a validation metric (`train.keep_best`), and early stopping."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from ..checkpoint.config import SavingConfig
from ..control.run_dir import Best
from ..engine.totals import StepTotals
from ..monitor.component import Component
from ..monitor.metrics import means_per_token

log = logging.getLogger(__name__)


class Selection(Component):
    """Remembers the validation with the lowest value, and how many have passed without a lower one.

    It is the same on all ranks, because their totals are.
    """

    name = "selection"

    def __init__(self, train: SavingConfig) -> None:
        self._metric = train.keep_best
        self._stopping = train.early_stopping
        self.best: Best | None = None
        self._lowest = math.inf
        self._waited = 0

    @property
    def exhausted(self) -> bool:
        """Return whether early_stopping ends the run."""
        return self._stopping is not None and self._waited >= self._stopping.patience

    def compare(self, step: int, measured: Mapping[str, StepTotals]) -> bool:
        """Take note of a validation after `step` steps. Return whether its checkpoint is now the best one."""
        if self._stopping is not None:
            value = read_metric(measured, self._stopping.metric)
            improved = value < self._lowest
            self._waited = 0 if improved else self._waited + 1
            self._lowest = min(value, self._lowest) if improved else self._lowest
            if self.exhausted:
                line = "step %d: no lower %s for %d validations, so early_stopping ends the run"
                log.info(line, step, self._stopping.metric, self._waited)
        if self._metric is None or not step:  # before the first step there is no checkpoint
            return False
        value = read_metric(measured, self._metric)
        improved = not math.isnan(value) and (self.best is None or value < self.best.value)
        if improved:
            self.best = Best(step, self._metric, value)
        return improved

    def state_dict(self) -> dict[str, object]:
        state: dict[str, object] = {"best": self.best}
        if self._stopping is not None:
            lowest = self._lowest if math.isfinite(self._lowest) else None
            state |= {"metric": self._stopping.metric, "lowest": lowest, "waited": self._waited}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["best"] is not None and state["best"][1] == self._metric:
            self.best = Best(*state["best"])
        if self._stopping is not None and state.get("metric") == self._stopping.metric:
            self._lowest = math.inf if state["lowest"] is None else state["lowest"]
            self._waited = state["waited"]


def read_metric(measured: Mapping[str, StepTotals], metric: str) -> float:
    """Return `nll`, a mean over the validation sets, or `SET/nll`. NaN if it was not measured."""
    name, _, key = metric.rpartition("/")
    sets = [measured[name]] if name else list(measured.values())
    values = [means_per_token(totals, totals.divisor).get(key, math.nan) for totals in sets]
    return sum(values) / len(values)
