"""Preflight on this host: what is well, and what is not; and the network that NCCL would use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from emo.pipeline.planning import preflight as module
from emo.pipeline.planning.preflight import Fabric, expected_bandwidth, fabric
from tests.helpers import launching

CHECKS = "GPUs,C compiler,threads,2 ranks,/dev/shm,open files,run directory,versions,clock,all-reduce"


def test_fit_and_unfit_hosts(tmp_path: Path) -> None:
    """Two ranks; then one without data, and a run directory that cannot be: each with what to do."""
    recipe = launching.tiny_recipe(tmp_path)
    command = [f"{launching.BIN}/python", "-m", "emo", "preflight", str(recipe)]
    group = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "COLUMNS": "200", "MASTER_ADDR": "127.0.0.1"}
    group["MASTER_PORT"] = str(launching.free_port())
    ranks = [group | {"RANK": rank, "LOCAL_RANK": rank} for rank in "01"]
    done = launching.run_forked([*command, f"output_dir={tmp_path / 'run'}"], ranks)
    assert done.returncode == 0 and all(check in done.stdout for check in CHECKS.split(",")), done.stdout
    assert not (tmp_path / "run").exists()  # nothing stays behind
    (tmp_path / "file").write_text("")
    wrong = [f"output_dir={tmp_path / 'file' / 'run'}", f"data.dir={tmp_path / 'none'}"]
    done = launching.run_forked([*command, *wrong], [{"COLUMNS": "200"}])
    assert done.returncode == 1, done.stdout
    assert all(cure in done.stdout for cure in ("emo prepare", "set output_dir to where you may write"))


def host(
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
        ([EFA], {}, "libnccl-net.so", "sockets", None),
        ([NDR], {}, "libibverbs.so.1", "sockets", None),  # an image without it: TCP without a word
        ([NDR], {"uverbs": False}, "", "sockets", None),  # a container without the device
        ([NDR], {"NCCL_IB_DISABLE": "1"}, "", "sockets", None),
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
    network = host(tmp_path, *ports, **options)
    assert (network.kind, network.gbytes) == (kind, gbytes)
    assert bool(network.advice) == (kind == "sockets" and ports != [DOWN])


@pytest.mark.parametrize(
    ("device", "gbytes", "several", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", 400.0, True, 300.0),
        ("NVIDIA A100-SXM4-80GB", 400.0, True, 225.0),  # the links in a node are slower
        ("NVIDIA A100-SXM4-80GB", None, True, None),  # sockets over who knows what
        ("NVIDIA A100-PCIE-40GB", None, False, None),
    ],
)
def test_expected_bandwidth(device: str, gbytes: float | None, several: bool, expected: float | None) -> None:
    assert expected_bandwidth(device, Fabric("InfiniBand", gbytes, ""), several) == expected
