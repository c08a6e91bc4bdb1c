"""How long each rank works by itself in a step, and which rank holds the others up.

Under ZeRO the ranks wait for each other in every layer, so a whole step takes all of them as long as the
slowest. What a rank does alone is timed instead: the host between two steps, where batches come from, and the
output head, the largest piece of computing without a collective. The times travel with the sums of the next
step, when all that is timed on the device is long done: no wait is added.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import math
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from .devices import on_gpu
from .hardware import GIB

log = logging.getLogger(__name__)

PERSISTS, AT_LEAST = 2, 10  # windows in a row, and steps in all, in which the same rank is the slowest
SLOW = 1.2  # times the median of the ranks
MATTERS = 0.05  # of a step: the least by which a rank that is warned of is slower than the median


class OwnTime:
    """The seconds that this rank works alone in a step."""

    def __init__(self, head: nn.Module) -> None:
        """head: of a model that is in its engine, so that its weight is there when it is timed."""
        self.last = math.nan  # of the step before
        self._mark, self._host, self._on = time.perf_counter(), 0.0, False
        self._times: list[Any] = []  # beginning and end of each pass of the head
        head.register_forward_pre_hook(self._note)
        head.register_forward_hook(self._note)

    def start_step(self) -> None:
        """The host turns to the next step."""
        self._mark = time.perf_counter()

    def start_compute(self) -> None:
        """The first pass of a step through the model is next."""
        self._host, self._times, self._on = time.perf_counter() - self._mark, [], True

    def end_step(self) -> None:
        """The sums of the step have arrived, so the device is done with it."""
        pairs = zip(self._times[::2], self._times[1::2], strict=True)
        self.last = self._host + sum(a.elapsed_time(b) / 1e3 if on_gpu() else b - a for a, b in pairs)
        self._on = False

    @torch.compiler.disable
    def _note(self, *_: Any) -> None:
        if self._on and on_gpu():
            self._times.append(torch.cuda.Event(enable_timing=True))
            self._times[-1].record()
        elif self._on:
            self._times.append(time.perf_counter())


class Stragglers:
    """Tells over log windows which rank is the slowest, and warns once of one that stays so."""

    def __init__(self, hosts: Sequence[str]) -> None:
        """hosts: by rank."""
        self._hosts, self._sums, self._steps = hosts, [0.0] * len(hosts), 0
        self._slowest, self._windows, self._for = -1, 0, 0  # the windows and steps that it has been slow for
        self._warned: set[int] = set()

    def add(self, seconds: Sequence[float]) -> None:
        """Count a step, by rank; one of which a rank does not know the time is left out."""
        if 0 < len(seconds) == len(self._sums) and not math.isnan(sum(seconds)):
            self._sums = [a + b for a, b in zip(self._sums, seconds, strict=True)]
            self._steps += 1

    def record(self, step_seconds: float) -> dict[str, Any]:
        """Return what metrics.jsonl says of the window, and begin another; nothing of an empty one.

        step_seconds: of a whole step.
        """
        if not self._steps:
            return {}
        means = [total / self._steps for total in self._sums]
        most, usual = max(means), statistics.median_low(means)
        rank = means.index(most)
        slow = most > SLOW * usual and most - usual > MATTERS * step_seconds
        if rank != self._slowest or not slow:
            self._slowest, self._windows, self._for = rank, 0, 0
        self._windows, self._for = self._windows + slow, self._for + slow * self._steps
        self._sums, self._steps = [0.0] * len(means), 0
        if self._windows >= PERSISTS and self._for >= AT_LEAST and rank not in self._warned:
            self._warned.add(rank)
            line = "rank %d on %s is slow: alone it takes %.3g s a step, others %.3g s (emo top RUN_DIR)"
            log.warning(line, rank, self._hosts[rank], most, usual)
        times = {"rank_seconds_max": most, "rank_seconds_median": usual}
        return times | {"slowest_rank": rank, "slowest_host": self._hosts[rank]}


def device_facts() -> dict[str, float | None]:
    """Return the most memory that this rank's GPU held, in GiB, and its temperature; empty on a CPU.

    Both are counters of the host and the driver: the device is not waited for.
    """
    if not on_gpu():
        return {}
    uuid = str(torch.cuda.get_device_properties().uuid)
    return {"memory_gib": torch.cuda.max_memory_allocated() / GIB, "temperature": temperature(uuid)}


def temperature(uuid: str) -> int | None:
    """Return the degrees Celsius of a GPU; None where its driver does not tell."""
    return _reading(uuid, "nvmlDeviceGetTemperature", ctypes.c_uint, 0)


# Bits of nvmlClocksThrottleReasons that are a fault of the host, and what each means.
THROTTLES = {0x8: "slowed down by its hardware", 0x40: "too hot", 0x80: "held back by its power supply"}


def gpu_faults() -> list[str]:
    """Return what the driver finds wrong with this rank's GPU, in words; empty where it does not tell."""
    uuid = str(torch.cuda.get_device_properties().uuid)
    errors = _reading(uuid, "nvmlDeviceGetTotalEccErrors", ctypes.c_ulonglong, 1, 0) or 0  # since the boot
    reasons = _reading(uuid, "nvmlDeviceGetCurrentClocksThrottleReasons", ctypes.c_ulonglong) or 0
    ecc = [f"{errors} uncorrectable memory errors"] if errors else []
    return ecc + [words for bit, words in THROTTLES.items() if reasons & bit]


def _reading(uuid: str, function: str, kind: Any, *which: int) -> int | None:
    """Return a number of the driver's; None where it does not tell."""
    nvml, handle = _sensor(uuid)
    value = kind()
    if nvml is None or getattr(nvml, function)(handle, *which, ctypes.byref(value)):
        return None
    return int(value.value)


@functools.cache
def _sensor(uuid: str) -> tuple[Any, ctypes.c_void_p]:
    """Return the driver's library, None where it does not know the GPU, and its handle of it."""
    handle = ctypes.c_void_p()
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None, handle
    name = f"GPU-{uuid}".encode()
    failed = nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByUUID(name, ctypes.byref(handle))
    return (None if failed else nvml), handle
