"""Measure the speed of the GPUs and links of a run, and find the slow ones.

A rank is too slow below SHARE of what its hardware should reach, or FACTOR times below the median of all
ranks. The median needs no table of hardware and also works on a CPU. Links are measured within every host,
between neighbouring hosts (a bad cable shows in both pairs of its host) and over all ranks.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..control.world import World, gather_objects
from ..engine.device.hardware import TERA, accelerator
from .footprint import BUS_EFFICIENCY, MEMORY_EFFICIENCY

MIB = 2**20
SHARE = {"TFLOP/s": 0.7, "GB/s": 0.5}  # smallest share; TCP instead of InfiniBand reaches a hundredth
FACTOR = {"cuda": 1.5, "cpu": 3.0}  # largest ratio of median and rank; ranks on a CPU disturb each other
REPETITIONS = 6  # of each measurement; the first is a warm-up


class Speed(NamedTuple):
    """A measurement of one rank or host."""

    where: str  # host of the rank
    device: str  # on the host; empty for a measurement of the host
    quantity: str
    value: float
    unit: str
    expected: float | None  # None: unknown

    def __str__(self) -> str:
        expected = "" if self.expected is None else f", {self.expected:,.0f} expected"
        return f"{self.quantity} {self.value:,.2f} {self.unit}{expected}"


def find_faults(speeds: Sequence[Speed], device: str) -> list[str]:
    """Return the fault of each of `speeds`, or an empty text.

    All must measure the same quantity on ranks of this torch device type.
    """
    median = statistics.median(speed.value for speed in speeds)
    faults = []
    for speed in speeds:
        fault = ""
        share = SHARE[speed.unit]
        if speed.expected is not None and speed.value < share * speed.expected:
            fault = f"below {share:.0%} of the expected speed"
        elif speed.value * FACTOR[device] < median:
            fault = f"the median is {median:,.2f} {speed.unit}"
        faults.append(fault)
    return faults


def measure_seconds(work: Callable[[], Any], device: torch.device) -> float:
    """Return the shortest time that `work` takes."""
    times = []
    for _ in range(REPETITIONS):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times[1:])


def measure_computing(world: World, host: str, dtype: torch.dtype) -> list[Speed]:
    """Measure how fast this rank multiplies matrices and copies memory."""
    device = world.device
    on_gpu = world.device.type == "cuda"
    gpu = accelerator(torch.cuda.get_device_name()) if on_gpu else None
    n = 8192 if on_gpu else 512
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    products = 2 * n**3 / measure_seconds(lambda: torch.mm(a, b), device) / TERA
    source = torch.ones((512 if on_gpu else 16) * MIB, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    memory = 2 * source.numel() / measure_seconds(lambda: target.copy_(source), device) / 1e9
    peak = None if gpu is None else (gpu.tflops if dtype.itemsize == 2 else gpu.tflops32) * gpu.efficiency
    bandwidth = None if gpu is None else 1000 * gpu.bandwidth_tb * MEMORY_EFFICIENCY
    name = f"GPU {device.index}" if on_gpu else f"rank {world.rank}"
    return [
        Speed(host, name, "matrix products", products, "TFLOP/s", peak),
        Speed(host, name, "memory", memory, "GB/s", bandwidth),
    ]


def _measure_bus(world: World, group: Any, ranks: int, gather: bool = False) -> float:
    """Return the bus bandwidth in GB/s of an all-reduce or all-gather among the ranks of a group."""
    size = (256 if world.device.type == "cuda" else 8) * MIB // 4 // ranks * ranks
    full = torch.ones(size, device=world.device)
    part = torch.ones(size // ranks, device=world.device)

    def communicate() -> None:
        if gather:
            dist.all_gather_into_tensor(full, part, group=group)
        else:
            dist.all_reduce(full, group=group)

    moved = (1 if gather else 2) * (ranks - 1) / ranks * 4 * size
    return moved / measure_seconds(communicate, world.device) / 1e9


def neighbour_rounds(hosts: int) -> list[list[tuple[int, int]]]:
    """Return the pairs of neighbours in a ring of hosts, in rounds that contain no host twice.

    Two hosts or fewer have no pairs, since their links are those over all ranks.
    """
    if hosts < 3:
        return []
    ring = [(i, (i + 1) % hosts) for i in range(hosts)]
    even = hosts - hosts % 2
    return [part for part in (ring[0:even:2], ring[1:even:2], ring[even:]) if part]


def measure_links(world: World, host: str, network_gb: float | None) -> list[Speed]:
    """Measure bandwidths within this host, to its neighbours and over all ranks. All ranks must call.

    `network_gb` is the bandwidth in GB/s of the host's network ports, if it is known.
    """
    hosts = gather_objects(host)
    members: dict[str, list[int]] = {}  # ranks by host
    for rank, name in enumerate(hosts):
        members.setdefault(name, []).append(rank)
    inside, across = _expected_bandwidths(world, network_gb)
    speeds = []
    groups = {name: dist.new_group(ranks) for name, ranks in members.items()}
    if len(members[host]) > 1:
        for gather, quantity in ((False, "all-reduce inside"), (True, "all-gather inside")):
            rate = _measure_bus(world, groups[host], len(members[host]), gather)
            if members[host][0] == world.rank:
                speeds.append(Speed(host, "", quantity, rate, "GB/s", inside))
    leaders = [ranks[0] for ranks in members.values()]
    neighbours = []
    for first, second in (pair for pairs in neighbour_rounds(len(leaders)) for pair in pairs):
        ranks = [leaders[first], leaders[second]]
        group = dist.new_group(ranks)  # all ranks must create every group
        if world.rank in ranks:
            neighbours.append(group)
    rates = [_measure_bus(world, group, 2) for group in neighbours]
    if rates:
        speeds.append(Speed(host, "", "all-reduce with a neighbour", max(rates), "GB/s", across))
    if len(members) > 1:
        for gather, quantity in ((False, "all-reduce"), (True, "all-gather")):
            rate = _measure_bus(world, None, world.ranks, gather)
            if world.is_main:
                speeds.append(Speed("all", "", quantity, rate, "GB/s", across))
    return speeds


def _expected_bandwidths(world: World, network_gb: float | None) -> tuple[float | None, float | None]:
    """Return the expected bandwidths in GB/s within a host and between hosts, if known."""
    inside = across = None
    if world.device.type == "cuda" and "PCIE" not in (device := torch.cuda.get_device_name()).upper():
        gpu = accelerator(device)
        inside = None if gpu is None else gpu.link_gb * BUS_EFFICIENCY
    if network_gb is not None:
        across = network_gb * BUS_EFFICIENCY
        across = across if inside is None else min(across, inside)
    return inside, across
