"""Which rank is slow, and for how long it has to be so before anybody is told."""

from __future__ import annotations

import ctypes
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from emo.pipeline.engine import pace
from emo.pipeline.engine.pace import OwnTime, Stragglers

HOSTS = ["a", "a", "b", "b"]
EVEN, LATE = [1.0, 1.1, 1.0, 1.0], [1.0, 1.0, 1.0, 2.0]


@pytest.mark.parametrize(
    ("windows", "steps", "seconds", "warned"),
    [
        ([LATE, LATE, LATE], 5, 3.0, 1),  # once
        ([LATE, LATE, LATE], 3, 3.0, 0),  # not for long
        ([EVEN[::-1], LATE[::-1], EVEN], 50, 3.0, 0),
        ([[1.0, 1.0, 1.0, 1.1], LATE], 50, 3.0, 0),  # slowest for two windows, slow for one
        ([LATE, EVEN, LATE], 9, 3.0, 0),
        ([LATE, LATE[::-1], LATE], 9, 3.0, 0),
        ([LATE, LATE, LATE[::-1], LATE[::-1]], 5, 3.0, 2),
        ([EVEN, EVEN], 9, 3.0, 0),
        ([LATE, LATE], 9, 30.0, 0),  # it hardly matters
    ],
)
def test_a_straggler_is_told_once_it_persists(
    windows: list[list[float]], steps: int, seconds: float, warned: int, caplog: pytest.LogCaptureFixture
) -> None:
    stragglers = Stragglers(HOSTS)
    with caplog.at_level(logging.WARNING):
        for window in windows:
            stragglers.add([float("nan"), *window[1:]])  # the first step of a launch
            for _ in range(steps):
                stragglers.add(window)
            record = stragglers.record(seconds)
            assert record["rank_seconds_max"] == pytest.approx(max(window))
            assert record["slowest_host"] == HOSTS[record["slowest_rank"]]
    assert len(caplog.records) == warned
    assert stragglers.record(seconds) == {}


class Event:
    """An event of a device on which all takes a quarter of a second."""

    count = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        Event.count += 1
        self.at = 250 * Event.count

    def elapsed_time(self, end: Event) -> float:
        return end.at - self.at  # milliseconds


def test_the_head_is_timed_on_the_device_and_in_training_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    head, clock = nn.Linear(1, 1), iter((0.0, 10.0, 12.0, 20.0, 21.0))
    monkeypatch.setattr(pace, "on_gpu", lambda: True)
    monkeypatch.setattr("torch.cuda.Event", Event)
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    timer = OwnTime(head)
    for passes, expected in ((2, 2 + 2 * 0.25), (1, 1 + 0.25)):
        timer.start_step()
        timer.start_compute()
        for _ in range(passes):
            head(torch.ones(1))
        timer.end_step()
        head(torch.ones(1))  # as in a validation
        assert timer.last == expected
    assert Event.count == 6


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
