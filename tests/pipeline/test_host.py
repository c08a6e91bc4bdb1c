"""What a host must have: GPUs that can be used, no build left half done, and a rank's share of the cores."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from emo.common.errors import FailureError
from emo.pipeline.planning import host
from emo.pipeline.planning.host import BINDING, Gpus, compiling, refusal, threads
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
        (CUDA._replace(problem="Unexpected error from cudaGetDeviceCount()"), 2, HARDWARE),
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


@pytest.mark.parametrize(
    ("allowed", "cores", "ranks", "launcher", "expected"),
    [
        (64, 64, 8, "RANK", 8),
        (6, 6, 4, "RANK", 1),
        (4, 64, 4, "RANK", 1),  # a container with four cores
        (8, 64, 8, "SLURM_PROCID", 8),  # bound: they are its own already
        (32, 64, 8, "SLURM_PROCID", 4),  # a job on half of a host, its ranks not bound
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


STARTING = """
import sys
from emo.pipeline.planning.host import compiling
with compiling():
    print("inside", flush=True)
    sys.stdin.read()
"""


def test_a_killed_build_does_not_hang_the_next_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's lock of a build is removed, except while another start is under way."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    lock = tmp_path / "py311_cpu" / "cpu_adam" / "lock"
    lock.parent.mkdir(parents=True)
    command, pipe = [sys.executable, "-c", STARTING], subprocess.PIPE
    other = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
    assert other.stdout is not None and other.stdout.readline() == "inside\n"
    lock.touch()
    with compiling():
        assert lock.exists()
    other.kill()
    other.communicate()
    with compiling():
        assert not lock.exists()
