"""Checks of a host, and the error codes and exit codes of failed ranks."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import AcceleratorError, OutOfMemoryError
from torch.distributed import DistBackendError, DistNetworkError

from emo.common.errors import ExitCode, FailureError, UserError
from emo.common.io.files import DiskFullError
from emo.launch import rank
from emo.pipeline.control import world
from emo.pipeline.control.stop import HARDWARE, TRAINING, SignalWatch, node_name
from emo.pipeline.control.world import World, broken_device, explain, lost_a_peer
from emo.pipeline.engine import start
from emo.pipeline.engine.device import devices
from emo.pipeline.engine.device.devices import BINDING, GpuFacts, find_gpu_error
from emo.pipeline.planning import preflight

OLD = "The NVIDIA driver on your system is too old (found version 12020). Please update your GPU driver"
CPU_ONLY = GpuFacts("cpu", None, build="", present=False, visible=None, granted=0, usable=0, problem="")
CUDA = CPU_ONLY._replace(build="CUDA 13.0", present=True)


@pytest.mark.parametrize(
    ("gpus", "ranks", "code"),
    [
        (CPU_ONLY._replace(present=True), 2, "cpu-build"),
        (CUDA._replace(problem=OLD), 2, "old-driver"),
        (CUDA._replace(visible=""), 2, "gpus-hidden"),
        (CUDA._replace(present=False), 2, "no-gpu"),
        (CUDA._replace(device="cuda", usable=1, visible="3", granted=8), 8, "too-few-gpus"),
        (CUDA._replace(device="cuda", usable=4, visible="0,1,2,3"), 8, "too-few-gpus"),
        (CUDA._replace(present=False, granted=8), 8, HARDWARE),  # the driver was not loaded after a reboot
        (CUDA._replace(device="cuda", usable=7, granted=8), 8, HARDWARE),
        (CPU_ONLY, 2, None),
        (CPU_ONLY._replace(device="xpu"), 2, None),
        (CUDA._replace(device="cuda", usable=2), 2, None),
        (CUDA._replace(requested="cpu", usable=1), 2, None),
    ],
)
def test_ranks_do_not_start_without_usable_gpus(gpus: GpuFacts, ranks: int, code: str | None) -> None:
    """An error is a failure if another host may have the GPU, and otherwise a mistake of the user."""
    error = find_gpu_error(gpus, ranks)
    assert (error.code if error else None) == code
    assert isinstance(error, FailureError) == (code == HARDWARE)


def test_ranks_share_the_allowed_cores_unless_srun_has_bound_each(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*BINDING, "LOCAL_WORLD_SIZE", "LOCAL_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert devices.local_ranks() == 1
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    for allowed, count, launcher, expected in (
        (4, 4, "RANK", 1),
        (8, 8, "SLURM_PROCID", 8),
        (32, 8, "SLURM_PROCID", 4),  # a job on half of a host, with unbound ranks
    ):
        monkeypatch.setenv(launcher, "0")
        monkeypatch.setenv("LOCAL_SIZE", str(count))
        monkeypatch.setattr(devices, "CORES", frozenset(range(allowed)))
        assert devices.threads_per_rank() == expected


@pytest.mark.parametrize(
    ("allowed", "near", "bound"),
    [
        (range(128), "0-31,64-95", {*range(32), *range(64, 96)}),
        (range(128), "", None),
        (range(8), "64-127", None),  # bound by Slurm to the other socket
        (range(64, 72), "64-127", set(range(64, 72))),
        (range(60, 68), "64-127", None),
    ],
)
def test_a_rank_is_bound_to_the_cores_near_its_gpu(
    allowed: range, near: str, bound: set[int] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, results = "0000:1b:00.0", []
    (tmp_path / address).mkdir()
    (tmp_path / address / "local_cpulist").write_text(near + "\n")
    assert devices.read_near_cores("0000:ff:00.0", tmp_path) == set()
    cores = devices.read_near_cores(address, tmp_path)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8" if len(allowed) > 8 else "1")
    monkeypatch.setattr(devices, "CORES", frozenset(allowed))
    monkeypatch.setattr(devices, "read_near_cores", lambda _: cores)
    monkeypatch.setattr("os.sched_setaffinity", lambda _, chosen: results.append(chosen))
    devices.bind_to_near_cores(address)
    assert results == ([] if bound is None else [bound])


@pytest.mark.parametrize(
    ("named", "set_before", "route", "chosen"),
    [
        ("127.0.1.1", None, "10.0.0.7", "eth1"),
        ("does not resolve", None, "10.0.0.7", "eth1"),
        ("10.0.0.7", None, "10.0.0.7", None),  # what gloo does by itself is right
        ("127.0.1.1", "eth0", "10.0.0.7", "eth0"),
        ("127.0.1.1", None, "127.0.0.1", None),
    ],
)
def test_gloo_uses_the_route_to_rank_0_if_the_host_is_called_loopback(
    named: str, set_before: str | None, route: str, chosen: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1"}
    environment |= {} if set_before is None else {"GLOO_SOCKET_IFNAME": set_before}
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setattr(start, "address_of_host", lambda: named)
    addresses = {"lo": "127.0.0.1", "eth0": "192.168.0.7", "eth1": "10.0.0.7"}
    found = {name: [SimpleNamespace(address=address)] for name, address in addresses.items()}
    monkeypatch.setattr(start.psutil, "net_if_addrs", lambda: found)
    probe = mock.MagicMock()
    probe.__enter__.return_value.getsockname.return_value = (route, 1)
    monkeypatch.setattr(start.socket, "socket", lambda *_: probe)
    start.choose_gloo_interface()
    assert environment.get("GLOO_SOCKET_IFNAME") == chosen


def test_errors_that_only_some_ranks_raise_are_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their hosts print them. An error that all ranks raise together is printed by rank 0 alone."""

    def fail() -> None:
        raise UserError("a shard is missing", code="no-weights")

    with pytest.raises(UserError) as own, world.local_errors():
        fail()
    monkeypatch.setattr(world, "gather_objects", lambda value: [value, value])
    with pytest.raises(UserError) as shared, world.local_errors():
        world.raise_on_all_ranks(fail)
    assert own.value.local and not shared.value.local


def test_environment_variables_of_the_user_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton runs the code in its cache, so a cache that is a link is not used."""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "TRITON_CACHE_DIR")
    cache = tmp_path / f"triton-{os.getuid()}"

    def set_environment(before: dict[str, str]) -> dict[str, str]:
        for name in names:
            monkeypatch.delenv(name, raising=False)
        for name, value in before.items():
            monkeypatch.setenv(name, value)
        rank._set_environment()
        return {name: os.environ[name] for name in names if name in os.environ}

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    allocator = "expandable_segments:True,pinned_max_round_threshold_mb:64"
    defaults = {"PYTORCH_ALLOC_CONF": allocator, "TRITON_CACHE_DIR": str(cache)}
    assert set_environment({}) == defaults and cache.stat().st_mode & 0o777 == 0o700
    for settings in ({names[0]: "x", names[2]: "y"}, {names[1]: "x", names[2]: "y"}):
        assert set_environment(settings) == settings
    cache.rename(tmp_path / "other")
    cache.symlink_to(tmp_path / "other")
    assert names[2] not in set_environment({})


Port = tuple[str, str, str, str]  # driver, link layer, rate, state


def host_with(directory: Path, ports: list[Port], lacks: str) -> preflight.Fabric:
    """Return the network of a host with these ports, but without the library or device `lacks`."""
    for number, (driver, *texts) in enumerate(ports):
        device = directory / "class" / f"device_{number}"
        (device / "ports/1").mkdir(parents=True)
        for name, text in zip(("link_layer", "rate", "state"), texts, strict=True):
            (device / "ports/1" / name).write_text(f"{text}\n")
        (directory / "drivers" / driver).mkdir(parents=True, exist_ok=True)
        (device / "device").mkdir()
        (device / "device/driver").symlink_to(directory / "drivers" / driver)
    (directory / "dev").mkdir()
    if lacks != "uverbs0":
        (directory / "dev/uverbs0").touch()
    return preflight.find_fabric(directory / "class", directory / "dev", {})


NDR = ("mlx5_core", "InfiniBand", "400 Gb/sec (4X NDR)", "4: ACTIVE")
ROCE = ("mlx5_core", "Ethernet", "100 Gb/sec (4X EDR)", "4: ACTIVE")
EFA = ("efa", "Unspecified", "100 Gb/sec (4X EDR)", "4: ACTIVE")
DOWN = ("mlx5_core", "InfiniBand", "10 Gb/sec (4X SDR)", "1: DOWN")


@pytest.mark.parametrize(
    ("ports", "lacks", "kind", "gbytes"),
    [
        ([DOWN], "", "sockets", None),
        ([NDR, DOWN, ROCE], "", "InfiniBand", 50),
        ([ROCE, ROCE], "", "RoCE", 25),
        ([EFA] * 4, "", "EFA", 50),
        ([NDR], "libibverbs.so.1", "sockets", None),  # NCCL would silently use TCP
        ([NDR], "uverbs0", "sockets", None),  # in a container
    ],
)
def test_preflight_finds_the_network_that_nccl_would_use(
    tmp_path: Path, ports: list[Port], lacks: str, kind: str, gbytes: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "_can_load", lambda library: library != lacks)
    network = host_with(tmp_path, ports, lacks)
    assert (network.kind, network.gbytes) == (kind, gbytes)
    assert bool(network.advice) == (kind == "sockets" and ports != [DOWN])


@pytest.fixture(autouse=True)
def four_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)


LOST = """
Connection closed by peer [10.0.0.3]:4711
[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Timed out waiting 600000ms for recv
Gloo connectFullMesh failed with [pair.cc:144] no error, Connection refused
[3] is setting up NCCL communicator via c10d store: store->get('0') got error: failed to recv, got 0 bytes
This may indicate a possible application crash on rank 0 or a network set up issue.
NCCL error: ncclRemoteError: A call failed possibly due to a network error
socketPollConnect: connect returned No route to host
[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)
""".strip().splitlines()
NOT_LOST = """
ncclInvalidUsage: Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 7000
ncclSystemError: Error while creating shared memory segment: No space left on device
mat1 and mat2 shapes cannot be multiplied
""".strip().splitlines()


@pytest.mark.parametrize("text", [*LOST, *NOT_LOST])
def test_errors_that_mean_a_lost_rank_are_recognised(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert lost_a_peer(RuntimeError(text)) == (text in LOST)
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    assert not lost_a_peer(RuntimeError(text))


@pytest.mark.parametrize("kind", [UserError, FailureError])
def test_errors_keep_their_class_on_all_ranks(kind: type[UserError], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise kind("the disk is full", code="full")

    main = World(0, 2, torch.device("cpu"))
    monkeypatch.setattr(world, "gather_objects", lambda value: [value, ("elsewhere", None)])
    for run in (lambda: world.raise_on_all_ranks(fail), lambda: world.run_on_main(main, fail)):
        with pytest.raises(UserError) as caught:
            run()
        assert type(caught.value) is kind and caught.value.code == "full"


MISTAKE, FAILURE = ExitCode.MISTAKE, ExitCode.FAILURE
DEVICE = [
    AcceleratorError("CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors might be"),
    RuntimeError("CUDA error: all CUDA-capable devices are busy or unavailable"),
    RuntimeError("CUDA unknown error - this may be due to an incorrectly set up environment"),
    RuntimeError("GPU 0000:3B:00.0 has fallen off the bus (Xid 79)"),
    RuntimeError("No CUDA GPUs are available"),
    DistBackendError("ncclUnhandledCudaError: Cuda failure 'uncorrectable ECC error encountered'"),
]
MAY_PASS = [
    *DEVICE,
    RuntimeError("NCCL error: unhandled cuda error (run with NCCL_DEBUG=INFO for details)"),
    DistNetworkError("The client socket has timed out"),
    OSError(errno.ENOSPC, "No space left on device"),
    DiskFullError("no space left while writing runs/a; make room in runs"),
    SafetensorError("Error while serializing: I/O error (os error 28)"),
]
LASTING = [
    SafetensorError("Error while deserializing header"),
    FileNotFoundError(errno.ENOENT, "No such file", "costs.pt"),
]
OTHER = [
    OutOfMemoryError("CUDA out of memory"),
    MemoryError(),
    KeyError("x"),
    OSError("CUDA_HOME environment variable is not set"),  # nvcc is missing
    RuntimeError("NCCL error: invalid usage (Duplicate GPU detected)"),
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    DistBackendError("ncclUnhandledCudaError: Call failed. Last error: Cuda failure 2 'out of memory'"),
    ValueError("the tax id of xidel; ecc errors"),
]
CASES = [
    *((error, FAILURE, FAILURE) for error in MAY_PASS),
    *((error, MISTAKE, MISTAKE) for error in LASTING),
    *((error, MISTAKE, FAILURE) for error in OTHER),
]


@pytest.mark.parametrize(("error", "before", "later"), CASES, ids=lambda value: str(value)[:60])
def test_exit_codes_before_and_after_a_step(error: Exception, before: ExitCode, later: ExitCode) -> None:
    assert (explain(error, advanced=False)[0], explain(error, advanced=True)[0]) == (before, later)
    assert broken_device(error) == (error in DEVICE)
    assert error in OTHER or explain(error, advanced=False)[1] is not None  # a message without a traceback


@pytest.mark.parametrize(
    ("error", "advanced", "report"),
    [
        (DEVICE[0], True, "1 node-7"),
        (FailureError("7 of 8 GPUs", code=HARDWARE), False, "1 node-7"),
        (UserError("a mistake", code="test"), True, "2"),
    ],
)
def test_a_rank_reports_its_code_and_the_node_to_avoid(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception, advanced: bool, report: str
) -> None:
    """train.sbatch and the supervisor read the report. The node's name comes from Slurm."""
    monkeypatch.setenv("SLURMD_NODENAME", "node-7")

    class Quiet(SignalWatch):
        def __init__(self) -> None:
            self._report = os.open(tmp_path / "rank-0", os.O_RDWR | os.O_CREAT)
            self._blamed_node, self._phase, self.advanced = "", TRAINING, advanced

    def run() -> int:
        raise error

    monkeypatch.setattr(rank, "leave", lambda code: sys.exit(code))
    watch = Quiet()
    try:
        watch.report_exit(rank._report_errors(run, watch))
    except SystemExit as end:
        watch.report_exit(int(end.code or 0))
    assert (tmp_path / "rank-0").read_text(encoding="utf-8") == f"{os.getpid()} {report}\n"
    assert node_name() == "node-7"
