"""The network that NCCL would use, by what a host has, and what its bandwidth should be."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.planning import fabric as module
from pipeline.planning.fabric import Fabric, expected_bandwidth, fabric, used_network
from pipeline.planning.preflight import judged_bandwidth


def host(
    directory: Path, *ports: tuple[str, str, str, str], uverbs: bool = True, **environment: str
) -> Fabric:
    """A host with ports of (driver, link layer, rate, state)."""
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
    ("ports", "options", "missing", "kind", "gbytes", "advised"),
    [
        ([], {}, "", "sockets", None, False),
        ([DOWN], {}, "", "sockets", None, False),
        ([NDR] * 8, {}, "", "InfiniBand", 400, False),
        ([NDR, DOWN, ROCE], {}, "", "InfiniBand", 50, False),
        ([ROCE, ROCE], {}, "", "RoCE", 25, False),
        ([EFA] * 4, {}, "", "EFA", 50, False),
        ([EFA], {}, "libnccl-net.so", "sockets", None, True),
        ([NDR], {}, "libibverbs.so.1", "sockets", None, True),  # an image without it: TCP without a word
        ([NDR], {"uverbs": False}, "", "sockets", None, True),  # a container without the device
        ([NDR], {"NCCL_IB_DISABLE": "1"}, "", "sockets", None, True),
        ([ROCE], {"NCCL_NET": "Socket"}, "", "sockets", None, True),
    ],
)
def test_what_nccl_would_use(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ports: list[tuple[str, str, str, str]],
    options: dict[str, object],
    missing: str,
    kind: str,
    gbytes: float | None,
    advised: bool,
) -> None:
    monkeypatch.setattr(module, "_loads", lambda library: library != missing)
    network = host(tmp_path, *ports, **options)  # type: ignore[arg-type]
    assert (network.kind, network.gbytes, bool(network.advice)) == (kind, gbytes, advised)


def test_what_nccl_says_counts() -> None:
    log = "node:7:9 [0] NCCL INFO NET/IB : No device found.\nnode:7:9 [0] NCCL INFO Using network Socket\n"
    assert used_network(log) == "Socket" and used_network("") is None


@pytest.mark.parametrize(
    ("device", "gbytes", "several", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", None, False, 337.5),  # NVLink
        ("NVIDIA H100 80GB HBM3", 400.0, True, 300.0),
        ("NVIDIA A100-SXM4-80GB", 400.0, True, 225.0),  # the links in a node are slower
        ("NVIDIA A100-SXM4-80GB", 25.0, True, 18.75),
        ("NVIDIA A100-SXM4-80GB", None, True, None),  # sockets over who knows what
        ("NVIDIA A100-PCIE-40GB", None, False, None),
        ("", None, False, None),
    ],
)
def test_expected_bandwidth(device: str, gbytes: float | None, several: bool, expected: float | None) -> None:
    assert expected_bandwidth(device, Fabric("InfiniBand", gbytes, ""), several) == expected


@pytest.mark.parametrize(
    ("measured", "expected", "fails"), [(2.0, 300.0, True), (160.0, 300.0, False), (0.1, None, False)]
)
def test_less_than_half_of_what_is_expected_fails(
    measured: float, expected: float | None, fails: bool
) -> None:
    """TCP in place of InfiniBand is a hundredth."""
    assert bool(judged_bandwidth(measured, expected, "InfiniBand").advice) == fails
