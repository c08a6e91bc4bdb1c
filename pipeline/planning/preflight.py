"""Is every host fit to train? Checked where training would run, by every rank, before hours are spent.

python -m pipeline preflight RECIPE                                        this host
deepspeed --hostfile HOSTS --module pipeline preflight RECIPE              all hosts
torchrun --nnodes N --nproc-per-node M ... -m pipeline preflight RECIPE    likewise without ssh
"""

from __future__ import annotations

import contextlib
import os
import platform
import resource
import shutil
import socket
import statistics
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from common.errors import UserError
from common.provenance import library_versions
from pipeline import engine
from pipeline.config import RunConfig
from pipeline.planning.checks import check
from pipeline.planning.fabric import LEAST, Fabric, expected_bandwidth, fabric, used_network
from pipeline.planning.host import compiler, ranks_here, threads
from pipeline.planning.plan import model_sizes
from pipeline.ranks import World, end_world, gather_objects

MIB, GIB = 2**20, 2**30
SHARED_MEMORY = GIB  # NCCL and gloo talk through it within a host
OPEN_FILES = 4096
CLOCK = 1.0  # seconds apart; leases and logs lean on the clock
WRITE_MIB = 64
STATE_BYTES = 14  # of a checkpoint per trainable parameter: float32 weights, two moments, weights


class Finding(NamedTuple):
    """One line of the report: a host, what was checked, its state, and advice where it is wrong."""

    host: str
    check: str
    state: str
    advice: str = ""  # what to do; empty when all is well


def preflight(config: RunConfig) -> int:
    """Check all hosts and print a table; 0 when all is well, else 1. All ranks must call."""
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory) / "nccl.log"
        if "NCCL_DEBUG" not in os.environ:
            os.environ.update(NCCL_DEBUG="INFO", NCCL_DEBUG_SUBSYS="INIT,NET", NCCL_DEBUG_FILE=str(log))
        world = engine.start_world(timeout_minutes=5)
        network = fabric()
        findings = [*_host(config, world), *_run_directory(config, world)]
        common = [*_agreement(), *_clock(), *_bandwidth(world, network)]
        findings += _network(network, log.read_text(encoding="utf-8") if log.is_file() else "", world)
        every = [*(finding for part in gather_objects(findings) for finding in part), *common]
    failed = any(finding.advice for finding in every)
    if world.is_main:
        table = Table("host", "check", "found", "what to do", title=f"{world.ranks} ranks")
        for finding in dict.fromkeys(every):  # ranks of a host find the same
            table.add_row(finding.host, finding.check, finding.state, finding.advice or "ok")
        Console().print(table)
    end_world()
    return int(failed)


def _host(config: RunConfig, world: World) -> Iterator[Finding]:
    """Yield what a rank can see alone. One rank per host looks; every rank resolves the recipe."""
    host, offloaded = socket.gethostname(), False
    try:
        ready = check(config, world.ranks, local=True)
        offloaded = "offload_optimizer" in ready.ds_config["zero_optimization"]
        rows = len(ready.data) if ready.data is not None else 0
        yield Finding(host, "recipe", f"{ready.batch}; {rows:,} rows in {config.data.dir}")
    except UserError as error:
        yield Finding(host, "recipe", "cannot start", str(error))
    if int(os.environ.get("LOCAL_RANK", 0)):
        return
    yield from _compute(host, world, offloaded)
    on_gpu = world.device.type == "cuda"
    if on_gpu and config.model.dtype == "bfloat16" and not torch.cuda.is_bf16_supported():
        yield Finding(host, "bf16", "not supported", "set model.dtype=float32")
    free = shutil.disk_usage("/dev/shm").free
    advice = "" if free >= SHARED_MEMORY else "give the container more, e.g. docker run --shm-size 16g"
    yield Finding(host, "/dev/shm", f"{free / GIB:.1f} GiB free", advice)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    advice = "" if soft >= OPEN_FILES else f"ulimit -n {min(hard, 65536) if hard > 0 else 65536}"
    yield Finding(host, "open files", str(soft), advice)
    if Path("/sys/class/infiniband").is_dir():
        locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        words = "unlimited" if locked == resource.RLIM_INFINITY else f"{locked / MIB:.0f} MiB"
        advice = "" if locked == resource.RLIM_INFINITY else "ulimit -l unlimited, or InfiniBand will fail"
        yield Finding(host, "locked memory", words, advice)
    if _several_hosts(world):
        yield _interface(host)


def _compute(host: str, world: World, offloaded: bool) -> Iterator[Finding]:
    """Yield the devices and threads of this host. That its GPUs can be used, `start_world` has seen to.

    offloaded: the optimizer steps on the host's cores.
    """
    on_gpu = world.device.type == "cuda"
    name = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}" if on_gpu else "none; CPU"
    yield Finding(host, "GPUs", name)
    compiler_path = compiler()
    advice = "install gcc: Triton compiles with it" if on_gpu and compiler_path is None else ""
    yield Finding(host, "C compiler", compiler_path or "none", advice)
    ranks, current, share = ranks_here(), torch.get_num_threads(), threads()
    wrong = current > share or (offloaded and current < share)  # torchrun gives ranks one thread
    advice = f"export OMP_NUM_THREADS={share}" if wrong else ""
    yield Finding(host, "threads", f"{current} for each of {ranks} ranks, with {share} cores each", advice)


def _several_hosts(world: World) -> bool:
    return world.ranks > int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("LOCAL_SIZE", world.ranks)))


def _network(network: Fabric, log: str, world: World) -> Iterator[Finding]:
    """Yield what the ranks of several hosts talk through: what NCCL says, and what this host has."""
    if int(os.environ.get("LOCAL_RANK", 0)) or not _several_hosts(world) or world.device.type != "cuda":
        return
    used = used_network(log)
    advice = network.advice
    if used is not None and used.lower().startswith("socket") and network.kind != "sockets":
        advice = "NCCL_DEBUG=INFO shows why NCCL passes over it"
    words = f"{network.kind} ({network.why})" + (f"; NCCL uses {used}" if used else "")
    yield Finding(socket.gethostname(), "network", words, advice)


def _interface(host: str) -> Finding:
    """Return this host's interface: a name that resolves to loopback sends ranks to themselves."""
    chosen = os.environ.get("GLOO_SOCKET_IFNAME") or os.environ.get("NCCL_SOCKET_IFNAME")
    if chosen:
        return Finding(host, "interface", chosen)
    try:
        address = socket.gethostbyname(host)
    except OSError:
        address = "does not resolve"
    names = [name for _, name in socket.if_nameindex() if name != "lo"]
    loopback = address.startswith("127.") or not address[0].isdigit()
    advice = f"set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME (here: {', '.join(names)})" if loopback else ""
    return Finding(host, "interface", f"{host} is {address}", advice)


def _run_directory(config: RunConfig, world: World) -> list[Finding]:
    """Return whether all hosts see one run directory, how fast it takes data, and whether checkpoints fit."""
    host = socket.gethostname()
    directory = config.run_dir
    mark = gather_objects(uuid.uuid4().hex)[0]
    probe = directory / f".preflight-{mark}"
    created = not directory.exists()
    findings = []
    if world.is_main:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            began = time.perf_counter()
            with probe.open("wb") as file:
                file.write(os.urandom(MIB) * WRITE_MIB)
                file.flush()
                os.fsync(file.fileno())
            rate = WRITE_MIB * MIB / (time.perf_counter() - began) / 1e9
            findings.append(Finding(host, "run directory", f"{directory}: writes {rate:.2f} GB/s"))
            findings += _disk(config, host)
        except OSError as error:
            findings.append(Finding(host, "run directory", str(error), "set run_dir to where you may write"))
    dist.barrier()
    if not world.is_main and not probe.exists() and not findings:
        advice = f"put run_dir on a file system that all hosts share ({directory} is not)"
        findings.append(Finding(host, "run directory", "not that of rank 0", advice))
    dist.barrier()
    if world.is_main:
        with contextlib.suppress(OSError):
            probe.unlink()
        if created and directory.exists() and not any(directory.iterdir()):
            directory.rmdir()
    return findings


def _disk(config: RunConfig, host: str) -> list[Finding]:
    """Return whether the checkpoints fit; nothing where the model cannot be resolved (reported already)."""
    try:
        needed = model_sizes(config).trainable * STATE_BYTES * (config.train.keep_last + 1)
    except UserError:
        return []
    free = shutil.disk_usage(config.run_dir).free
    advice = "" if free > needed else "free space, set run_dir elsewhere, or a smaller train.keep_last"
    words = f"{free / GIB:,.0f} GiB free, checkpoints take up to {needed / GIB:,.1f} GiB"
    return [Finding(host, "disk", words, advice)]


def _agreement() -> Iterator[Finding]:
    """Yield the versions that differ between hosts, or that all are the same."""
    local = library_versions("torch", "deepspeed", "transformers")
    local["python"] = platform.python_version()
    everyone = gather_objects((socket.gethostname(), local))
    for name, version in local.items():
        differing = {host: versions[name] for host, versions in everyone if versions[name] != version}
        if differing:
            yield Finding(
                next(iter(differing)), name, f"{differing}, elsewhere {version}", "install one version"
            )
    if len({tuple(versions.items()) for _, versions in everyone}) == 1:
        yield Finding("all", "versions", " ".join(f"{name} {version}" for name, version in local.items()))


def _clock() -> Iterator[Finding]:
    """Yield the spread of clocks read right after a barrier, whose own spread is well below what matters."""
    dist.barrier()
    times = gather_objects((socket.gethostname(), time.time()))
    apart = max(t for _, t in times) - min(t for _, t in times)
    advice = "" if apart < CLOCK else "run a time service (chrony) on every host"
    yield Finding("all", "clock", f"within {apart:.2f} s", advice)


def _bandwidth(world: World, network: Fabric) -> Iterator[Finding]:
    """Yield the bus bandwidth of an all-reduce as in training, GB/s, median of five, and the expected one."""
    if world.ranks == 1:
        return
    bytes_ = 256 * MIB if world.device.type != "cpu" else 16 * MIB
    tensor = torch.ones(bytes_ // 4, device=world.device)
    rates = []
    for _ in range(6):
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(tensor)
        if world.device.type != "cpu":
            torch.cuda.synchronize()
        rates.append(2 * (world.ranks - 1) / world.ranks * bytes_ / (time.perf_counter() - began) / 1e9)
    device = torch.cuda.get_device_name() if world.device.type == "cuda" else ""
    yield judged_bandwidth(
        statistics.median(rates[1:]), expected_bandwidth(device, network, _several_hosts(world)), network.kind
    )


def judged_bandwidth(measured: float, expected: float | None, kind: str) -> Finding:
    """Return the finding on a bandwidth: below LEAST of what is expected something is wrong."""
    words = f"{measured:.2f} GB/s of bus bandwidth"
    if expected is None:
        return Finding("all", "all-reduce", words)
    slow = measured < LEAST * expected
    advice = f"far too slow: see {kind} of every host, cables, GPUDirect, NVLink" if slow else ""
    return Finding("all", "all-reduce", f"{words}, {expected:.0f} expected", advice)
