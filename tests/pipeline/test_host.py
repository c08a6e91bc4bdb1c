"""What a host must have: GPUs, a rank's share of the cores, the network of NCCL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from emo.common.errors import FailureError
from emo.pipeline.planning import host
from emo.pipeline.planning import preflight as module
from emo.pipeline.planning.host import BINDING, Gpus, refusal, threads
from emo.pipeline.planning.preflight import Fabric, fabric
from emo.pipeline.stop import HARDWARE

OLD = (
    "The NVIDIA driver on your system is too old (found version 12020). Please update your GPU driver by "
    "downloading and installing a new version"
)
CPU_ONLY = Gpus("cpu", chosen=None, build="", present=False, visible=None, granted=0, usable=0, problem="")
CUDA = CPU_ONLY._replace(build="CUDA 13.0", present=True)
SEVEN = CUDA._replace(device="cuda", usable=7)


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
        (SEVEN._replace(granted=8), 8, HARDWARE),
    ],
)
def test_a_gpu_that_cannot_be_used_is_refused(gpus: Gpus, ranks: int, code: str) -> None:
    """A mistake of the user is code 2; what another host may have is worth another start."""
    error = refusal(gpus, ranks)
    assert error is not None and error.code == code
    assert isinstance(error, FailureError) == (code == HARDWARE)


def test_what_may_start() -> None:
    chosen = [CUDA._replace(chosen="cpu"), CUDA._replace(chosen="cpu", usable=1)]
    for gpus in (CPU_ONLY, CUDA._replace(device="cuda", usable=2), *chosen, CPU_ONLY._replace(device="xpu")):
        assert refusal(gpus, 2) is None


def test_ranks_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a container; unless srun has bound each to its own."""
    for name in (*BINDING, "LOCAL_WORLD_SIZE", "LOCAL_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert host.ranks_here() == 1
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    for allowed, ranks, launcher, expected in (
        (4, 4, "RANK", 1),
        (8, 8, "SLURM_PROCID", 8),
        (32, 8, "SLURM_PROCID", 4),  # a job on half of a host, its ranks not bound
    ):
        monkeypatch.setenv(launcher, "0")
        monkeypatch.setenv("LOCAL_SIZE", str(ranks))
        monkeypatch.setattr("os.sched_getaffinity", lambda _, n=allowed: set(range(n)))
        assert threads() == expected


def host_with(
    directory: Path, *ports: tuple[str, str, str, str], uverbs: bool = True, **environment: str
) -> Fabric:
    """Return the network of a host with ports of (driver, link layer, rate, state)."""
    for number, (driver, layer, rate, state) in enumerate(ports):
        device = directory / "class" / f"device_{number}"
        port = device / "ports/1"
        port.mkdir(parents=True)
        for name, text in (("link_layer", layer), ("rate", rate), ("state", state)):
            (port / name).write_text(f"{text}\n")
        (directory / "drivers" / driver).mkdir(parents=True, exist_ok=True)
        (device / "device").mkdir()
        (device / "device/driver").symlink_to(directory / "drivers" / driver)
    (directory / "dev").mkdir()
    if uverbs:
        (directory / "dev/uverbs0").touch()
    return fabric(directory / "class", directory / "dev", environment)


NDR = ("mlx5_core", "InfiniBand", "400 Gb/sec (4X NDR)", "4: ACTIVE")
ROCE = ("mlx5_core", "Ethernet", "100 Gb/sec (4X EDR)", "4: ACTIVE")
EFA = ("efa", "Unspecified", "100 Gb/sec (4X EDR)", "4: ACTIVE")
DOWN = ("mlx5_core", "InfiniBand", "10 Gb/sec (4X SDR)", "1: DOWN")


@pytest.mark.parametrize(
    ("ports", "options", "missing", "kind", "gbytes"),
    [
        ([DOWN], {}, "", "sockets", None),
        ([NDR, DOWN, ROCE], {}, "", "InfiniBand", 50),
        ([ROCE, ROCE], {}, "", "RoCE", 25),
        ([EFA] * 4, {}, "", "EFA", 50),
        ([NDR], {}, "libibverbs.so.1", "sockets", None),  # an image without it: TCP without a word
        ([NDR], {"uverbs": False}, "", "sockets", None),  # a container without the device
    ],
)
def test_the_network_that_nccl_would_use(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ports: list[tuple[str, str, str, str]],
    options: dict[str, Any],
    missing: str,
    kind: str,
    gbytes: float | None,
) -> None:
    monkeypatch.setattr(module, "_loads", lambda library: library != missing)
    network = host_with(tmp_path, *ports, **options)
    assert (network.kind, network.gbytes) == (kind, gbytes)
    assert bool(network.advice) == (kind == "sockets" and ports != [DOWN])
