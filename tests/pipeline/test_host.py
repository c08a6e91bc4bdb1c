"""What a host must have: GPUs that can be used, a compiler, and how many threads a rank takes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from emo.common.errors import FailureError, UserError
from emo.pipeline.engine import start_world
from emo.pipeline.planning import host
from emo.pipeline.planning.host import BINDING, Gpus, check_compiler, refusal, threads
from emo.pipeline.stop import HARDWARE
from tests.conftest import REPO

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
        (CPU_ONLY._replace(device="cuda", chosen="cuda"), 2, "cpu-build"),
        (CUDA._replace(problem=OLD), 2, "old-driver"),
        (CUDA._replace(visible=""), 2, "gpus-hidden"),
        (CUDA._replace(visible="-1", device="cuda", chosen="cuda"), 2, "gpus-hidden"),
        (CUDA._replace(present=False), 2, "no-gpu"),
        (CUDA._replace(device="cuda", usable=1), 2, "too-few-gpus"),
        (CUDA._replace(device="cuda", usable=1, visible="3", granted=8), 8, "too-few-gpus"),
        (CUDA._replace(device="cuda", usable=4, visible="0,1,2,3"), 8, "too-few-gpus"),
        (CUDA._replace(problem="Unexpected error from cudaGetDeviceCount()"), 2, HARDWARE),
        (CUDA, 2, HARDWARE),
        (CUDA._replace(present=False, granted=8), 8, HARDWARE),  # the driver was not loaded after a reboot
        (SEVEN, 8, HARDWARE),
        (SEVEN._replace(visible="0,1,2,3,4,5,6,7"), 8, HARDWARE),
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


def test_a_kernel_needs_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Said before weights are loaded, not at the first step."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    check_compiler(on_gpu=False)
    with pytest.raises(UserError):
        check_compiler(on_gpu=True)
    monkeypatch.setenv("CC", "/opt/cc")
    check_compiler(on_gpu=True)


@pytest.mark.parametrize(
    ("allowed", "cores", "ranks", "launcher", "expected"),
    [
        (64, 64, 8, "RANK", 8),
        (2, 2, 4, "RANK", 1),
        (6, 6, 4, "RANK", 1),
        (8, 8, 1, "RANK", 8),
        (4, 64, 4, "RANK", 1),  # a container with four cores
        (8, 64, 8, "SLURM_PROCID", 8),  # bound: they are its own already
        (32, 64, 8, "SLURM_PROCID", 4),  # a job on half of a host, its ranks not bound
        (1, 1, 1, "OMPI_COMM_WORLD_RANK", 1),
    ],
)
def test_ranks_share_the_cores(
    allowed: int, cores: int, ranks: int, launcher: str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (*BINDING, "LOCAL_WORLD_SIZE", "LOCAL_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert host.ranks_here() == 1
    monkeypatch.setenv(launcher, "0")
    monkeypatch.setenv("LOCAL_SIZE" if launcher == "RANK" else "LOCAL_WORLD_SIZE", str(ranks))
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(allowed)))
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    assert threads() == expected


def test_a_rank_takes_its_share_of_the_cores_and_no_port_of_another() -> None:
    """Cores also beside a GPU, for optimizers that step on the host; what the user sets is left."""
    program = (
        "import os, torch; os.sched_getaffinity = lambda _: set(range(12))\n"
        "from emo.pipeline.engine import start_world; from emo.pipeline.ranks import end_world\n"
        "start_world(); end_world(); print(torch.get_num_threads())\n"
        "os.environ['OMP_NUM_THREADS'] = '1'; torch.set_num_threads(1)\n"
        "start_world(); end_world(); print(torch.get_num_threads())\n"
        "import socket; taken = socket.create_server(('', 0))\n"
        "os.environ.update(RANK='0', WORLD_SIZE='1', MASTER_ADDR='127.0.0.1')\n"
        "os.environ['MASTER_PORT'] = str(taken.getsockname()[1])\n"
        "start_world()"
    )
    environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    environment |= {"DS_ACCELERATOR": "cpu", "LOCAL_WORLD_SIZE": "4"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=REPO, env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout.split()[-2:] == ["3", "1"], done.stderr
    assert re.search(r"UserError: port \d+ of this host is taken", done.stderr)


@pytest.mark.parametrize(("port", "passing"), [("4000", True), ("4001", False)])
def test_a_port_that_is_taken_is_worth_another_start_if_we_chose_it(
    port: str, passing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def taken(**_: object) -> None:
        raise torch.distributed.DistNetworkError("EADDRINUSE")

    monkeypatch.setattr("deepspeed.init_distributed", taken)
    for name, value in {"PIPELINE_PORT": "4000", "MASTER_PORT": port, "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError) as error:
        start_world()
    assert isinstance(error.value, FailureError) == passing
