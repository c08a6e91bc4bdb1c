"""How fast the GPUs and links of a run are, beside what they should be and beside one another.

A rank that is slower than SHARE of what its hardware reaches, or FACTOR times slower than the median of all,
is named; the second needs no table, and holds on a CPU too. Links are measured inside every host, between
neighbouring hosts, where a bad cable shows in both pairs of a host, and over all ranks.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..control.world import World, gather_objects
from ..engine.hardware import TERA, Accelerator, accelerator
from .footprint import BUS_EFFICIENCY, MEMORY_EFFICIENCY

MIB = 2**20
SHARE = {"TFLOP/s": 0.7, "GB/s": 0.5}  # of what hardware should reach: TCP for InfiniBand is a hundredth
FACTOR = {"cuda": 1.5, "cpu": 3.0}  # by which ranks are apart at most; on a CPU they disturb one another
TIMES = 6  # each measurement; the first does not count


class Speed(NamedTuple):
    """What one rank, or one host, has measured."""

    where: str  # the rank's host
    device: str  # of the host; empty for the host's own
    what: str
    value: float
    unit: str
    expected: float | None  # None: unknown

    def __str__(self) -> str:
        expected = "" if self.expected is None else f", {self.expected:,.0f} expected"
        return f"{self.what} {self.value:,.2f} {self.unit}{expected}"


def seconds(work: Callable[[], Any], device: torch.device, together: bool = False) -> float:
    """Return the least time that `work` takes; `together`: ranks begin at the same time."""
    times = []
    for _ in range(TIMES):
        if together:
            dist.barrier()
        if device.type == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return min(times[1:])


def computing(world: World, host: str, dtype: torch.dtype) -> list[Speed]:
    """Return how fast this rank multiplies matrices and copies memory."""
    device, on_gpu = world.device, world.device.type == "cuda"
    gpu = accelerator(torch.cuda.get_device_name()) if on_gpu else None
    n = 8192 if on_gpu else 512
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    products = 2 * n**3 / seconds(lambda: torch.mm(a, b), device) / TERA
    source = torch.ones((512 if on_gpu else 16) * MIB, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    memory = 2 * source.numel() / seconds(lambda: target.copy_(source), device) / 1e9
    peak = None if gpu is None else (gpu.tflops if dtype.itemsize == 2 else gpu.tflops32) * gpu.efficiency
    bandwidth = None if gpu is None else 1000 * gpu.bandwidth_tb * MEMORY_EFFICIENCY
    name = f"GPU {device.index}" if on_gpu else f"rank {world.rank}"
    return [
        Speed(host, name, "matrix products", products, "TFLOP/s", peak),
        Speed(host, name, "memory", memory, "GB/s", bandwidth),
    ]


def slow(speeds: Sequence[Speed], device: str) -> list[str]:
    """Return for each of `speeds`, which are of one thing, what is wrong with it; empty: nothing.

    device: the type of those that measured.
    """
    median = statistics.median(speed.value for speed in speeds)
    faults = []
    for speed in speeds:
        fault, share = "", SHARE[speed.unit]
        if speed.expected is not None and speed.value < share * speed.expected:
            fault = f"below {share:.0%} of what it should be"
        elif speed.value * FACTOR[device] < median:
            fault = f"the median is {median:,.2f} {speed.unit}"
        faults.append(fault)
    return faults


def bus(world: World, group: Any, ranks: int, gather: bool) -> float:
    """Return the bus bandwidth, GB/s, of an all-reduce (or all-gather) among the `ranks` of a group."""
    size = (256 if world.device.type == "cuda" else 8) * MIB // 4 // ranks * ranks
    whole, part = torch.ones(size, device=world.device), torch.ones(size // ranks, device=world.device)

    def collective() -> None:
        if gather:
            dist.all_gather_into_tensor(whole, part, group=group)
        else:
            dist.all_reduce(whole, group=group)

    moved = (1 if gather else 2) * (ranks - 1) / ranks * 4 * size
    return moved / seconds(collective, world.device) / 1e9


def pairs(hosts: int) -> list[list[tuple[int, int]]]:
    """Return the pairs of neighbours in a ring of more than two hosts, in rounds in which none is in two."""
    if hosts < 3:
        return []
    ring = [(i, (i + 1) % hosts) for i in range(hosts)]
    even = hosts - hosts % 2
    return [part for part in (ring[0:even:2], ring[1:even:2], ring[even:]) if part]


def links(world: World, host: str, network_gb: float | None) -> list[Speed]:
    """Return the bandwidths that this rank measures for all: inside its host, to neighbours, over all ranks.

    network_gb: of the host's ports, GB/s; None: unknown. All ranks must call.
    """
    hosts = gather_objects(host)
    names = list(dict.fromkeys(hosts))
    members = {name: [rank for rank, of in enumerate(hosts) if of == name] for name in names}
    gpu: Accelerator | None = None
    if world.device.type == "cuda" and "PCIE" not in (device := torch.cuda.get_device_name()).upper():
        gpu = accelerator(device)
    inside = None if gpu is None else gpu.link_gb * BUS_EFFICIENCY
    across = None if network_gb is None else network_gb * BUS_EFFICIENCY
    if across is not None and inside is not None:
        across = min(across, inside)
    speeds = []
    groups = {name: dist.new_group(ranks) for name, ranks in members.items()}
    leads = members[host][0] == world.rank
    if len(members[host]) > 1:
        for gather, what in ((False, "all-reduce inside"), (True, "all-gather inside")):
            rate = bus(world, groups[host], len(members[host]), gather)
            speeds += [Speed(host, "", what, rate, "GB/s", inside)] * leads
    neighbours = []
    for pairing in pairs(len(names)):
        for pair in pairing:
            ranks = [members[names[index]][0] for index in pair]
            group = dist.new_group(ranks)
            if world.rank in ranks:
                neighbours.append((group, pair))
    rates = [bus(world, group, 2, gather=False) for group, _ in neighbours]
    if rates:
        speeds.append(Speed(host, "", "all-reduce with a neighbour", max(rates), "GB/s", across))
    if len(names) > 1:
        for gather, what in ((False, "all-reduce"), (True, "all-gather")):
            rate = bus(world, None, world.ranks, gather)
            speeds += [Speed("all", "", what, rate, "GB/s", across)] * world.is_main
    return speeds
