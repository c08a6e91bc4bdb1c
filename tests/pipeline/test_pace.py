"""Which rank is slow, and for how long it has to be so before anybody is told."""

from __future__ import annotations

import ctypes
import logging
from types import SimpleNamespace
from typing import Any

import pytest

from emo.pipeline import pace
from emo.pipeline.pace import Stragglers

HOSTS = ["a", "a", "b", "b"]
EVEN, LATE = [1.0, 1.1, 1.0, 1.0], [1.0, 1.0, 1.0, 2.0]


@pytest.mark.parametrize(
    ("windows", "step", "warned"),
    [
        ([LATE, LATE, LATE], 3.0, 1),  # once
        ([LATE, EVEN, LATE], 3.0, 0),
        ([LATE, LATE[::-1], LATE], 3.0, 0),
        ([LATE, LATE, LATE[::-1], LATE[::-1]], 3.0, 2),
        ([EVEN, EVEN], 3.0, 0),
        ([LATE, LATE], 30.0, 0),  # it hardly matters
    ],
)
def test_a_straggler_is_told_once_it_persists(
    windows: list[list[float]], step: float, warned: int, caplog: pytest.LogCaptureFixture
) -> None:
    stragglers = Stragglers(HOSTS)
    with caplog.at_level(logging.WARNING):
        for seconds in windows:
            stragglers.add([float("nan"), *seconds[1:]])  # the first step of a launch
            stragglers.add(seconds)
            stragglers.add([second + 2 for second in seconds])
            record = stragglers.record(step)
            assert record["rank_seconds_max"] == pytest.approx(max(seconds) + 1)
            assert record["slowest_host"] == HOSTS[record["slowest_rank"]]
    assert len(caplog.records) == warned
    assert stragglers.record(step) == {}


def test_a_temperature_is_the_driver_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """None where there is no driver, or it does not know the GPU."""
    assert pace.temperature("absent") is None

    def measured(handle: ctypes.c_void_p, sensor: int, degrees: Any) -> int:
        degrees._obj.value = 61
        return int(sensor != 0 or handle.value != 7)

    def found(name: bytes, handle: Any) -> int:
        handle._obj.value = 7
        return int(name != b"GPU-1-2")

    driver = {"nvmlInit_v2": lambda: 0, "nvmlDeviceGetHandleByUUID": found}
    library = SimpleNamespace(**driver, nvmlDeviceGetTemperature=measured)
    monkeypatch.setattr(ctypes, "CDLL", lambda _: library)
    assert (pace.temperature("1-2"), pace.temperature("2-1")) == (61, None)
