"""A rank's own time, slow ranks, and readings of the driver."""

from __future__ import annotations

import logging
from typing import Any

import pynvml
import pytest
import torch
from torch import nn

from emo.pipeline.engine.device import pace
from emo.pipeline.engine.device.pace import OwnTime
from emo.pipeline.monitor.stragglers import Stragglers

HOSTS = ["a", "a", "b", "b"]
EVEN, LATE = [1.0, 1.1, 1.0, 1.0], [1.0, 1.0, 1.0, 2.0]


@pytest.mark.parametrize(
    ("windows", "steps", "seconds", "warnings"),
    [
        ([LATE, LATE, LATE], 5, 3.0, 1),  # one warning
        ([LATE, LATE, LATE], 3, 3.0, 0),  # too few steps
        ([EVEN[::-1], LATE[::-1], EVEN], 50, 3.0, 0),
        ([[1.0, 1.0, 1.0, 1.1], LATE], 50, 3.0, 0),  # slowest in two windows, but slow in only one
        ([LATE, EVEN, LATE], 9, 3.0, 0),
        ([LATE, LATE[::-1], LATE], 9, 3.0, 0),
        ([LATE, LATE, LATE[::-1], LATE[::-1]], 5, 3.0, 2),
        ([EVEN, EVEN], 9, 3.0, 0),
        ([LATE, LATE], 9, 30.0, 0),  # the delay is a small part of a step
    ],
)
def test_a_rank_that_stays_slow_is_warned_about_once(
    windows: list[list[float]], steps: int, seconds: float, warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    stragglers = Stragglers(HOSTS)
    with caplog.at_level(logging.WARNING):
        for window in windows:
            stragglers.add([float("nan"), *window[1:]])  # the first step of a launch is not timed
            for _ in range(steps):
                stragglers.add(window)
            record = stragglers.record(seconds)
            assert record["rank_seconds_max"] == pytest.approx(max(window))
            assert record["slowest_host"] == HOSTS[record["slowest_rank"]]
    assert len(caplog.records) == warnings
    assert stragglers.record(seconds) == {}


class Event:
    """An event of a device on which every pass takes a quarter of a second."""

    count = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        Event.count += 1
        self.at = 250 * Event.count

    def elapsed_time(self, end: Event) -> float:
        return end.at - self.at  # milliseconds


def test_the_head_is_timed_on_the_device_and_only_in_training(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_the_driver_s_readings_are_none_where_it_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """There may be no driver, an unknown GPU, or a reading that the GPU does not support."""
    assert pace.read_temperature("absent") is None

    def find(name: str) -> int:
        if name != "GPU-known":
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return 7

    def count_errors(*_: Any) -> int:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", find)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetTemperature", lambda handle, sensor: 54 + handle + sensor)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetTotalEccErrors", count_errors)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCurrentClocksThrottleReasons", lambda handle: 0x41)
    assert (pace.read_temperature("known"), pace.read_temperature("unknown")) == (61, None)
    monkeypatch.setattr(pace, "_uuid", lambda: "known")
    assert pace.gpu_faults() == ["too hot"]
    monkeypatch.setattr(pynvml, "nvmlDeviceGetTotalEccErrors", lambda handle, kind, counter: 3 * kind)
    assert pace.gpu_faults() == ["3 uncorrectable memory errors", "too hot"]
