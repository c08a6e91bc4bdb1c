"""Is every host fit to train? Checked where training would run, by every rank, before hours are spent.

emo preflight RECIPE                                        this host
deepspeed --hostfile HOSTS --module emo preflight RECIPE    all hosts
torchrun --nnodes N --nproc-per-node M ... -m emo preflight RECIPE    likewise without ssh
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import re
import resource
import shutil
import socket
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from rich.table import Table

from emo.common.cli.progress import make_console
from emo.common.errors import UserError
from emo.common.provenance import library_versions

from ..config import RunConfig
from ..control.stop import node_name
from ..control.world import World, end_world, gather_objects
from ..engine.devices import find_c_compiler, local_ranks, threads_per_rank
from ..engine.hardware import GIB
from ..engine.pace import gpu_faults
from ..engine.start import start_world
from . import health
from .checks import TrainingRun, check_run

MIB = 2**20
VERBS, EFA_PLUGIN = "libibverbs.so.1", "libnccl-net.so"
STATE_BYTES = 14  # of a checkpoint per trainable parameter: float32 weights, two moments, weights


class Finding(NamedTuple):
    """One line of the report: a host, what was checked, its state, and advice where it is wrong."""

    host: str
    check: str
    state: str
    advice: str = ""  # what to do; empty when all is well


def preflight(config: RunConfig) -> int:
    """Check all hosts, print a table, and name those that are unfit; 0 when all is well, else 1.

    All ranks must call.
    """
    host = socket.gethostname()
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory) / "nccl.log"
        if "NCCL_DEBUG" not in os.environ:
            os.environ.update(NCCL_DEBUG="INFO", NCCL_DEBUG_SUBSYS="INIT,NET", NCCL_DEBUG_FILE=str(log))
        world = start_world(timeout_minutes=5)
        of_host = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or world.ranks
        several = world.ranks > int(of_host)
        network, ready, findings = fabric(), None, []
        try:
            ready = check_run(config, world.ranks)
            rows = f"{len(ready.data):,} rows in {config.data.dir}"
            findings.append(Finding(host, "recipe", f"{ready.batch}; {rows}"))
        except UserError as error:
            findings.append(Finding(host, "recipe", "cannot start", str(error)))
        first = int(os.environ.get("LOCAL_RANK", 0)) == 0
        if first:
            findings += _host(host, config, ready, world, several)
        findings += _run_directory(host, config, ready, world)
        speeds, unfit = _speeds(world, config, network)
        common = [*_agreement(), *speeds]
        if first and several and world.device.type == "cuda":
            text, advice = log.read_text(encoding="utf-8") if log.is_file() else "", network.advice
            used = ["", *re.findall(r"NCCL INFO Using network (.+)", text)][-1].strip()
            if used.lower().startswith("socket") and network.kind != "sockets":
                advice = "NCCL_DEBUG=INFO shows why NCCL passes over it"
            words = f"{network.kind} ({network.why})" + (f"; NCCL uses {used}" if used else "")
            findings.append(Finding(host, "network", words, advice))
        every = [*(finding for part in gather_objects(findings) for finding in part), *common]
    if world.is_main:
        table = Table("host", "check", "found", "what to do", title=f"{world.ranks} ranks")
        for finding in dict.fromkeys(every):  # ranks of a host find the same
            table.add_row(finding.host, finding.check, finding.state, finding.advice or "ok")
        make_console().print(table)
        if unfit:  # train.sbatch reads it
            print(f"unfit: {','.join(unfit)}")
    end_world()
    return int(any(finding.advice for finding in every))


def _host(
    host: str, config: RunConfig, ready: TrainingRun | None, world: World, several: bool
) -> Iterator[Finding]:
    """Yield what one rank of a host can see alone. That the GPUs can be used, `start_world` has seen to."""
    on_gpu = world.device.type == "cuda"
    name = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}" if on_gpu else "none; CPU"
    yield Finding(host, "GPUs", name)
    path = find_c_compiler()
    advice = "install gcc: Triton compiles with it" if on_gpu and path is None else ""
    yield Finding(host, "C compiler", path or "none", advice)
    offloaded = ready is not None and "offload_optimizer" in ready.ds_config["zero_optimization"]
    current, share = torch.get_num_threads(), threads_per_rank()
    wrong = current > share or (offloaded and current < share)  # torchrun gives ranks one thread
    words = f"{current} for each of {local_ranks()} ranks, with {share} cores each"
    yield Finding(host, "threads", words, f"export OMP_NUM_THREADS={share}" if wrong else "")
    if on_gpu and config.model.dtype == "bfloat16" and not torch.cuda.is_bf16_supported():
        yield Finding(host, "bf16", "not supported", "set model.dtype=float32")
    free = shutil.disk_usage("/dev/shm").free  # NCCL and gloo talk through it within a host
    advice = "" if free >= GIB else "give the container more, e.g. docker run --shm-size 16g"
    yield Finding(host, "/dev/shm", f"{free / GIB:.1f} GiB free", advice)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    advice = "" if soft >= 4096 else f"ulimit -n {min(hard, 65536) if hard > 0 else 65536}"
    yield Finding(host, "open files", str(soft), advice)
    if Path("/sys/class/infiniband").is_dir():
        locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        unlimited = locked == resource.RLIM_INFINITY
        advice = "" if unlimited else "ulimit -l unlimited, or InfiniBand will fail"
        yield Finding(host, "locked memory", "unlimited" if unlimited else f"{locked / MIB:.0f} MiB", advice)
    if several:  # a name that resolves to loopback sends ranks to themselves
        chosen = os.environ.get("GLOO_SOCKET_IFNAME") or os.environ.get("NCCL_SOCKET_IFNAME")
        try:
            address = socket.gethostbyname(host)
        except OSError:
            address = "does not resolve"
        names = ", ".join(name for _, name in socket.if_nameindex() if name != "lo")
        loopback = not chosen and (address.startswith("127.") or not address[0].isdigit())
        advice = f"set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME (here: {names})" if loopback else ""
        yield Finding(host, "interface", chosen or f"{host} is {address}", advice)


def _run_directory(
    host: str, config: RunConfig, ready: TrainingRun | None, world: World
) -> Iterator[Finding]:
    """Yield whether all hosts see one run directory, and whether checkpoints fit into it."""
    directory = config.output_dir
    probe = directory / f".preflight-{gather_objects(uuid.uuid4().hex)[0]}"
    created = not directory.exists()
    if world.is_main:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            probe.touch()
            yield Finding(host, "run directory", str(directory))
            if ready is not None:
                trainable = sum(p.numel() for p in ready.model.parameters() if p.requires_grad)
                needed = trainable * STATE_BYTES * (config.train.save_total_limit + 1)
                free = shutil.disk_usage(directory).free
                advice = "free space, set output_dir elsewhere, or a smaller train.save_total_limit"
                words = f"{free / GIB:,.0f} GiB free, checkpoints take up to {needed / GIB:,.1f} GiB"
                yield Finding(host, "disk", words, "" if free > needed else advice)
        except OSError as error:
            yield Finding(host, "run directory", str(error), "set output_dir to where you may write")
    dist.barrier()
    if not world.is_main and not probe.exists():
        advice = f"set output_dir to a file system that all hosts share ({directory} is not)"
        yield Finding(host, "run directory", "not that of rank 0", advice)
    dist.barrier()
    if world.is_main:
        with contextlib.suppress(OSError):
            probe.unlink()
            if created:
                directory.rmdir()


def _agreement() -> Iterator[Finding]:
    """Yield the versions of rank 0, those of hosts that have others, and the spread of their clocks."""
    local = library_versions("torch", "deepspeed", "transformers") | {"python": platform.python_version()}
    words = " ".join(f"{name} {version}" for name, version in local.items())
    (_, first), *others = gather_objects((socket.gethostname(), words))
    yield Finding("all", "versions", first)
    yield from (Finding(h, "versions", v, "install one version") for h, v in others if v != first)
    dist.barrier()  # right after it clocks are read at times far closer than the second that matters
    times = gather_objects(time.time())
    apart = max(times) - min(times)
    advice = "" if apart < 1.0 else "run a time service (chrony) on every host"
    yield Finding("all", "clock", f"within {apart:.2f} s", advice)


def _speeds(world: World, config: RunConfig, network: Fabric) -> tuple[list[Finding], list[str]]:
    """Return how fast GPUs, memory and links are, those that are too slow, and the names of their hosts."""
    host, dtype = node_name(), getattr(torch, config.model.dtype)
    measured = health.computing(world, host, dtype) + health.links(world, host, network.gbytes)
    faults = gpu_faults() if world.device.type == "cuda" else []
    gathered = gather_objects((measured, [(host, f"GPU {world.device.index}", fault) for fault in faults]))
    speeds = [speed for part, _ in gathered for speed in part]
    findings, unfit = [], [fault for _, part in gathered for fault in part]
    for what in dict.fromkeys(speed.what for speed in speeds):
        alike = [speed for speed in speeds if speed.what == what]
        low, high = min(speed.value for speed in alike), max(speed.value for speed in alike)
        words = f"{low:,.2f} to {high:,.2f}" if len(alike) > 1 else f"{low:,.2f}"
        expected = alike[0].expected
        words += f" {alike[0].unit}" + (f", {expected:,.0f} expected" if expected else "")
        together = [speed.where == "all" for speed in alike]
        problem = ""
        for speed, fault in zip(alike, health.slow(alike, world.device.type), strict=True):
            if fault and speed.where == "all":
                problem = f"far too slow: see {network.kind} of every host, cables, GPUDirect, NVLink"
            elif fault:
                unfit.append((speed.where, speed.device, f"{speed}; {fault}"))
        findings.append(Finding("all", what, words, problem if any(together) else ""))
    cure = "leave this host out, and have it looked at"
    findings += [Finding(host, device or "links", state, cure) for host, device, state in unfit]
    return findings, list(dict.fromkeys(host for host, *_ in unfit))


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
        texts: dict[str, str] = {}
        for name in ("state", "link_layer", "rate"):
            with contextlib.suppress(OSError):
                texts[name] = (port / name).read_text(encoding="utf-8").strip()
        if "ACTIVE" not in texts.get("state", ""):
            continue
        driver = (port.parent.parent / "device/driver").resolve().name
        by_layer = "RoCE" if texts.get("link_layer") == "Ethernet" else "InfiniBand"
        kind = "EFA" if driver == "efa" else by_layer
        rate = re.match(r"[\d.]+", texts.get("rate", ""))
        rates[kind] = rates.get(kind, 0.0) + (float(rate[0]) / 8 if rate else 0.0)
    if not rates:
        return Fabric("sockets", None, "no active InfiniBand, RoCE or EFA device")
    kind = max(rates, key=lambda name: rates[name])
    library = EFA_PLUGIN if kind == "EFA" else VERBS
    cure = ""
    if environment.get("NCCL_NET", "").lower() == "socket":
        cure = "unset NCCL_NET"
    elif kind != "EFA" and environment.get("NCCL_IB_DISABLE", "0") not in ("", "0"):
        cure = "unset NCCL_IB_DISABLE"
    elif not _loads(library):
        package = "libibverbs1 and ibverbs-providers" if kind != "EFA" else "--build-arg EFA=VERSION (image)"
        cure = f"{library} is missing: install {package}"
    elif not any(devices.glob("uverbs*")):
        cure = f"give the container the RDMA devices ({devices}/uverbs*)"
    if cure:
        return Fabric("sockets", None, f"{kind} is here and cannot be used", cure)
    return Fabric(kind, rates[kind] or None, f"{rates[kind]:g} GB/s of active ports")


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True
