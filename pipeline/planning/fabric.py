"""The network between hosts: what NCCL would use and why, and the bandwidth that it should reach."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from pipeline.planning.footprint import BUS_EFFICIENCY, accelerator

VERBS, EFA_PLUGIN = "libibverbs.so.1", "libnccl-net.so"
LEAST = 0.5  # of the expected bandwidth; less means that something is wrong


class Fabric(NamedTuple):
    """The network of one host, as NCCL sees it."""

    kind: str  # InfiniBand, RoCE, EFA or sockets
    gbytes: float | None  # GB/s of all its active ports; None: unknown
    why: str
    advice: str = ""  # where there is a faster one that cannot be used


def fabric(
    ports: Path = Path("/sys/class/infiniband"),
    devices: Path = Path("/dev/infiniband"),
    environment: Mapping[str, str] = os.environ,
) -> Fabric:
    """Return the network that NCCL would choose on this host."""
    rates: dict[str, float] = {}
    for port in sorted(ports.glob("*/ports/*")):
        if "ACTIVE" not in _read(port / "state"):
            continue
        driver = (port.parent.parent / "device/driver").resolve().name
        layer = _read(port / "link_layer")
        kind = "EFA" if driver == "efa" else "RoCE" if layer == "Ethernet" else "InfiniBand"
        rate = re.match(r"[\d.]+", _read(port / "rate"))
        rates[kind] = rates.get(kind, 0.0) + (float(rate[0]) / 8 if rate else 0.0)
    if not rates:
        return Fabric("sockets", None, "no active InfiniBand, RoCE or EFA device")
    kind = max(rates, key=lambda name: rates[name])
    if environment.get("NCCL_NET", "").lower() == "socket":
        return _sockets(kind, "NCCL_NET=Socket", "unset NCCL_NET")
    if kind == "EFA":
        if not _loads(EFA_PLUGIN):
            return _sockets(kind, f"{EFA_PLUGIN} is missing", "build the image with --build-arg EFA=VERSION")
    elif environment.get("NCCL_IB_DISABLE", "0") not in ("", "0"):
        return _sockets(kind, "NCCL_IB_DISABLE is set", "unset NCCL_IB_DISABLE")
    elif not _loads(VERBS):
        return _sockets(kind, f"{VERBS} is missing", "install libibverbs1 and ibverbs-providers")
    if not any(devices.glob("uverbs*")):
        return _sockets(kind, f"no {devices}/uverbs* here", "give the container the RDMA devices")
    return Fabric(kind, rates[kind] or None, f"{rates[kind]:g} GB/s of active ports")


def _sockets(kind: str, why: str, cure: str) -> Fabric:
    return Fabric("sockets", None, f"{kind} is here, but {why}", cure)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def used_network(log: str) -> str | None:
    """Return the network that NCCL says it uses in a log of NCCL_DEBUG=INFO, or None."""
    lines = re.findall(r"NCCL INFO Using network (.+)", log)
    return lines[-1].strip() if lines else None


def expected_bandwidth(device: str, fabric: Fabric, several_hosts: bool) -> float | None:
    """Return the GB/s of bus bandwidth that an all-reduce should reach, or None where that is unknown.

    device: the GPU's name. Among hosts the network is the limit unless the links in a host are slower.
    """
    gpu = accelerator(device)
    inside = None if gpu is None or "PCIE" in device.upper() else gpu.link_gb
    limits = [rate for rate in (inside, fabric.gbytes if several_hosts else None) if rate is not None]
    if not limits or (several_hosts and fabric.gbytes is None):
        return None
    return min(limits) * BUS_EFFICIENCY
