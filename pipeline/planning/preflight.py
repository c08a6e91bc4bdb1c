"""`emo preflight`: check that every host is fit to train, on the ranks that would train.

emo preflight RECIPE                                        this host
deepspeed --hostfile HOSTS --module emo preflight RECIPE    all hosts
torchrun --nnodes N --nproc-per-node M ... -m emo preflight RECIPE    all hosts, without ssh
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
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
from emo.common.errors import UserError, one_line
from emo.common.provenance import library_versions

from ..config import RunConfig
from ..control.stop import node_name
from ..control.world import World, end_world, gather_objects
from ..engine.device.devices import find_c_compiler, local_ranks, threads_per_rank
from ..engine.device.hardware import GIB
from ..engine.device.pace import gpu_faults
from ..engine.start import address_of_host, is_reachable, start_world
from . import health
from .checks import TrainingRun, check_run
from .setup import disk_bytes, setup_of, sizes_of

MIB = 2**20
VERBS = "libibverbs.so.1"
EFA_PLUGIN = "libnccl-net.so"


class Finding(NamedTuple):
    """One line of the report."""

    host: str
    check: str
    state: str
    advice: str = ""  # empty if all is well


class Fabric(NamedTuple):
    """The network of one host, as NCCL sees it."""

    kind: str  # InfiniBand, RoCE, EFA or sockets
    gbytes: float | None  # GB/s of all active ports, if known
    reason: str
    advice: str = ""  # if there is a faster network that cannot be used


def preflight(config: RunConfig) -> int:
    """Check all hosts, print a table and list the unfit hosts. All ranks must call.

    Return 0 if all is well, else 1.
    """
    with tempfile.TemporaryDirectory() as directory:
        nccl_log = Path(directory) / "nccl.log"
        if "NCCL_DEBUG" not in os.environ:
            os.environ.update(NCCL_DEBUG="INFO", NCCL_DEBUG_SUBSYS="INIT,NET", NCCL_DEBUG_FILE=str(nccl_log))
        world = start_world(timeout_minutes=5)
        network = find_fabric()
        host_ranks = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or world.ranks
        several_hosts = world.ranks > int(host_ranks)
        is_first = int(os.environ.get("LOCAL_RANK", 0)) == 0  # of its host
        run, recipe = _check_recipe(config, world)
        findings = [recipe]
        if is_first:
            findings += _check_host(config, run, world)
            findings += _check_interface() if several_hosts else ()
        findings += _check_gloo()
        findings += _check_run_directory(config, run, world)
        speeds, unfit = _measure_speeds(world, config, network)
        shared = [*_compare_hosts(), *speeds]
        if is_first and several_hosts and world.device.type == "cuda":
            findings.append(_describe_network(network, nccl_log))
        everything = [*(finding for part in gather_objects(findings) for finding in part), *shared]
    if world.is_main:
        table = Table("host", "check", "found", "what to do", title=f"{world.ranks} ranks")
        for finding in dict.fromkeys(everything):  # the ranks of a host repeat some
            table.add_row(finding.host, finding.check, finding.state, finding.advice or "ok")
        make_console().print(table)
        if unfit:  # train.sbatch parses this line
            print(f"unfit: {','.join(unfit)}")
    end_world()
    return int(any(finding.advice for finding in everything))


def _check_recipe(config: RunConfig, world: World) -> tuple[TrainingRun | None, Finding]:
    host = socket.gethostname()
    try:
        run = check_run(config, world.ranks)
    except UserError as error:
        return None, Finding(host, "recipe", "cannot start", str(error))
    return run, Finding(host, "recipe", f"{run.batch}; {len(run.data):,} rows in {config.data.dir}")


def _check_host(config: RunConfig, run: TrainingRun | None, world: World) -> Iterator[Finding]:
    """Check what one rank of a host can see alone. `start_world` has checked that its GPUs work."""
    host = socket.gethostname()
    on_gpu = world.device.type == "cuda"
    name = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}" if on_gpu else "none; CPU"
    yield Finding(host, "GPUs", name)
    path = find_c_compiler()
    advice = "install gcc: Triton compiles with it" if on_gpu and path is None else ""
    yield Finding(host, "C compiler", path or "none", advice)
    offloads = run is not None and "offload_optimizer" in run.ds_config["zero_optimization"]
    current = torch.get_num_threads()
    share = threads_per_rank()
    wrong = current > share or (offloads and current < share)  # torchrun gives each rank one thread
    state = f"{current} for each of {local_ranks()} ranks, with {share} cores each"
    yield Finding(host, "threads", state, f"export OMP_NUM_THREADS={share}" if wrong else "")
    if on_gpu and config.model.dtype == "bfloat16" and not torch.cuda.is_bf16_supported():
        yield Finding(host, "bf16", "not supported", "set model.dtype=float32")
    free = shutil.disk_usage("/dev/shm").free  # NCCL and gloo use it within a host
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


def _check_interface() -> Iterator[Finding]:
    """Check that the name of this host does not resolve to loopback, where other hosts cannot reach it."""
    host = socket.gethostname()
    chosen = os.environ.get("GLOO_SOCKET_IFNAME")
    address = address_of_host()
    names = ", ".join(name for _, name in socket.if_nameindex() if name != "lo")
    advice = f"set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME (here: {names})"
    reachable = chosen or is_reachable(address)
    yield Finding(host, "interface", chosen or f"{host} is {address}", "" if reachable else advice)


def _check_gloo() -> Iterator[Finding]:
    """Check that hosts reach each other over gloo, which exchanges checkpoints. All ranks must call."""
    try:
        gather_objects(0, dist.new_group(backend="gloo", timeout=datetime.timedelta(minutes=1)))
    except RuntimeError as error:
        advice = "set GLOO_SOCKET_IFNAME to the interface between the hosts"
        yield Finding(socket.gethostname(), "gloo", one_line(error, 100), advice)


def _check_run_directory(config: RunConfig, run: TrainingRun | None, world: World) -> Iterator[Finding]:
    """Check that all hosts share the run directory and that checkpoints fit into it. All ranks must call."""
    host = socket.gethostname()
    directory = config.output_dir
    probe = directory / f".preflight-{gather_objects(uuid.uuid4().hex)[0]}"
    created = not directory.exists()
    if world.is_main:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            probe.touch()
            yield Finding(host, "run directory", str(directory))
            if run is not None:
                sizes = sizes_of(run.model, run.hf_config, config.model.linear_dtype)
                setup = setup_of(config, run.batch, run.ds_config, run.objective, attention=run.attention)
                needed = disk_bytes(config, sizes, setup)
                free = shutil.disk_usage(directory).free
                advice = "free space, set output_dir elsewhere, or a smaller train.save_total_limit"
                state = (
                    f"{free / GIB:,.0f} GiB free, checkpoints and export take up to {needed / GIB:,.1f} GiB"
                )
                yield Finding(host, "disk", state, "" if free > needed else advice)
        except OSError as error:
            yield Finding(host, "run directory", str(error), "set output_dir to a writable directory")
    dist.barrier()
    if not world.is_main:
        with contextlib.suppress(OSError):  # NFS may remember that it did not exist, until a write
            directory.mkdir(parents=True, exist_ok=True)
    if not world.is_main and not probe.exists():
        with contextlib.suppress(OSError):
            if created:  # on this host alone
                directory.rmdir()
        advice = f"set output_dir to a file system that all hosts share ({directory} is not)"
        yield Finding(host, "run directory", "not that of rank 0", advice)
    dist.barrier()
    if world.is_main:
        with contextlib.suppress(OSError):
            probe.unlink()
            if created:
                directory.rmdir()


def _compare_hosts() -> Iterator[Finding]:
    """Compare the library versions and clocks of all hosts. All ranks must call."""
    local = library_versions("torch", "deepspeed", "transformers") | {"python": platform.python_version()}
    versions = " ".join(f"{name} {version}" for name, version in local.items())
    (_, first), *others = gather_objects((socket.gethostname(), versions))
    yield Finding("all", "versions", first)
    yield from (Finding(h, "versions", v, "install the same versions") for h, v in others if v != first)
    dist.barrier()  # ranks read their clocks within far less than a second after it
    times = gather_objects(time.time())
    spread = max(times) - min(times)
    advice = "" if spread < 1.0 else "run a time service (chrony) on every host"
    yield Finding("all", "clock", f"within {spread:.2f} s", advice)


def _measure_speeds(world: World, config: RunConfig, network: Fabric) -> tuple[list[Finding], list[str]]:
    """Measure GPUs and links. Return findings and the names of unfit hosts. All ranks must call."""
    host = node_name()
    dtype = getattr(torch, config.model.dtype)
    measured = health.measure_computing(world, host, dtype)
    measured += health.measure_links(world, host, network.gbytes)
    faults = gpu_faults() if world.device.type == "cuda" else []
    gathered = gather_objects((measured, [(host, f"GPU {world.device.index}", fault) for fault in faults]))
    speeds = [speed for part, _ in gathered for speed in part]
    findings = []
    unfit = [fault for _, part in gathered for fault in part]
    for quantity in dict.fromkeys(speed.quantity for speed in speeds):
        group = [speed for speed in speeds if speed.quantity == quantity]
        low = min(speed.value for speed in group)
        high = max(speed.value for speed in group)
        state = f"{low:,.2f} to {high:,.2f}" if len(group) > 1 else f"{low:,.2f}"
        expected = group[0].expected
        state += f" {group[0].unit}" + (f", {expected:,.0f} expected" if expected else "")
        advice = ""
        for speed, fault in zip(group, health.find_faults(group, world.device.type), strict=True):
            if fault and speed.where == "all":
                advice = f"far too slow: check {network.kind} of every host, cables, GPUDirect, NVLink"
            elif fault:
                unfit.append((speed.where, speed.device, f"{speed}; {fault}"))
        findings.append(Finding("all", quantity, state, advice))
    cure = "exclude this host and have it repaired"
    findings += [Finding(name, device or "links", state, cure) for name, device, state in unfit]
    return findings, list(dict.fromkeys(name for name, *_ in unfit))


def _describe_network(network: Fabric, nccl_log: Path) -> Finding:
    """Return the network of this host, and the one that NCCL uses according to its log."""
    text = nccl_log.read_text(encoding="utf-8") if nccl_log.is_file() else ""
    advice = network.advice
    used = ["", *re.findall(r"NCCL INFO Using network (.+)", text)][-1].strip()
    if used.lower().startswith("socket") and network.kind != "sockets":
        advice = "NCCL_DEBUG=INFO shows why NCCL does not use it"
    state = f"{network.kind} ({network.reason})" + (f"; NCCL uses {used}" if used else "")
    return Finding(socket.gethostname(), "network", state, advice)


def find_fabric(
    ports: Path = Path("/sys/class/infiniband"),
    devices: Path = Path("/dev/infiniband"),
    environment: Mapping[str, str] = os.environ,
) -> Fabric:
    """Return the network that NCCL would choose on this host."""
    rates: dict[str, float] = {}  # GB/s by kind
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
    elif not _can_load(library):
        package = "libibverbs1 and ibverbs-providers" if kind != "EFA" else "--build-arg EFA=VERSION (image)"
        cure = f"{library} is missing: install {package}"
    elif not any(devices.glob("uverbs*")):
        cure = f"give the container the RDMA devices ({devices}/uverbs*)"
    if cure:
        return Fabric("sockets", None, f"{kind} is present but cannot be used", cure)
    return Fabric(kind, rates[kind] or None, f"{rates[kind]:g} GB/s of active ports")


def _can_load(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True
