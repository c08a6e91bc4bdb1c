"""Measurements of this rank's device: computing time, memory, temperature and faults.

Under ZeRO the ranks wait for one another in every layer, so a whole step takes every rank as long as the
slowest one. OwnTime therefore measures two parts without collectives: the host's work between two steps,
where batches are built, and the output head, the largest such computation. The times are sent with the sums
of the next step, when the device has long finished them. So measuring adds no wait.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from typing import Any

import pynvml
import torch
from torch import nn

from .devices import on_gpu
from .hardware import GIB

# Reasons of a lower clock that are a fault of the host.
CLOCK_FAULTS = {
    pynvml.nvmlClocksThrottleReasonHwSlowdown: "slowed down by its hardware",
    pynvml.nvmlClocksThrottleReasonHwThermalSlowdown: "too hot",
    pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown: "held back by its power supply",
}


class OwnTime:
    """Seconds of each step that this rank computes without waiting for other ranks."""

    def __init__(self, head: nn.Module) -> None:
        """head: output head of a model inside its engine, so that its weight is gathered before the timer."""
        self.last = math.nan  # of the previous step
        self._step_start = time.perf_counter()
        self._host_seconds = 0.0
        self._active = False
        self._times: list[Any] = []  # start and end of each pass through the head
        head.register_forward_pre_hook(self._record_time)
        head.register_forward_hook(self._record_time)

    def start_step(self) -> None:
        """Start timing the host's work for the next step."""
        self._step_start = time.perf_counter()

    def start_compute(self) -> None:
        """Stop timing the host, and time the head from here on."""
        self._host_seconds = time.perf_counter() - self._step_start
        self._times = []
        self._active = True

    def end_step(self) -> None:
        """Add up the times of a step that the device has finished."""
        pairs = zip(self._times[::2], self._times[1::2], strict=True)
        head = sum(a.elapsed_time(b) / 1e3 if on_gpu() else b - a for a, b in pairs)
        self.last = self._host_seconds + head
        self._active = False

    @torch.compiler.disable
    def _record_time(self, *_: Any) -> None:
        if self._active and on_gpu():
            self._times.append(torch.cuda.Event(enable_timing=True))
            self._times[-1].record()
        elif self._active:
            self._times.append(time.perf_counter())


def device_facts() -> dict[str, float | None]:
    """Return the peak memory of this rank's GPU in GiB and its temperature; empty on a CPU.

    Neither waits for the device.
    """
    if not on_gpu():
        return {}
    return {"memory_gib": torch.cuda.max_memory_allocated() / GIB, "temperature": read_temperature(_uuid())}


def read_temperature(uuid: str) -> int | None:
    """Return the temperature of a GPU in degrees Celsius, None if the driver does not report it."""
    return _query_driver(uuid, pynvml.nvmlDeviceGetTemperature, pynvml.NVML_TEMPERATURE_GPU)


def gpu_faults() -> list[str]:
    """Describe the faults that the driver reports for this rank's GPU."""
    ecc = (pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC)  # since the last reboot
    errors = _query_driver(_uuid(), pynvml.nvmlDeviceGetTotalEccErrors, *ecc)
    reasons = _query_driver(_uuid(), pynvml.nvmlDeviceGetCurrentClocksThrottleReasons) or 0
    faults = [text for bit, text in CLOCK_FAULTS.items() if reasons & bit]
    return [f"{errors} uncorrectable memory errors", *faults] if errors else faults


def _uuid() -> str:
    return str(torch.cuda.get_device_properties().uuid)


def _query_driver(uuid: str, function: Callable[..., int], *arguments: int) -> int | None:
    handle = _driver_handle(uuid)
    try:
        return None if handle is None else function(handle, *arguments)
    except pynvml.NVMLError:
        return None


@functools.cache
def _driver_handle(uuid: str) -> Any:
    """Return the driver's handle of a GPU. None without a driver, or if it does not know the GPU."""
    try:
        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except pynvml.NVMLError:
        return None
