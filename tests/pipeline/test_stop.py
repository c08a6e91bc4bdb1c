"""Every way to ask for a stop is noticed at once, whatever the rank is doing, and nothing else is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from emo.common.errors import ExitCode
from emo.pipeline.stop import REPORTS, StopRequest, _grace
from tests.conftest import REPO
from tests.helpers.launching import wait_for

# A rank in the named phase. The main thread is inside one call, as it would be in a collective.
RANK = """
import sys, time
from pathlib import Path
from emo.pipeline.stop import StopRequest, Watch
watch = Watch()
assert "torch" not in sys.modules and "psutil" not in sys.modules
phase, run_dir = sys.argv[-2:]
if phase != "starting":
    watch.joined()
if phase == "training":
    watch.trains()
stop = StopRequest(Path(run_dir), None, watch)
print("ready", flush=True)
while stop.reason is None:
    time.sleep(0.1)
print(stop.reason, flush=True)
watch.ended(75)
sys.exit(75)
"""
# A stand-in for DeepSpeed's launch.py: starts a rank and waits.
LAUNCHER = """
import subprocess, sys
sys.exit(subprocess.run(sys.argv[sys.argv.index("--") + 1:]).returncode)
"""


def start(
    directory: Path, phase: str, *before: str, environment: dict[str, str] | None = None
) -> subprocess.Popen[str]:
    """A rank in `phase`, once it is ready, started by the command `before`."""
    (directory / "rank.py").write_text(RANK)
    command = [*before, sys.executable, str(directory / "rank.py"), phase, str(directory)]
    settings = os.environ | {"PYTHONPATH": str(REPO)} | (environment or {})
    process = subprocess.Popen(
        command, cwd=REPO, env=settings, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
@pytest.mark.parametrize("phase", ["starting", "training"])
def test_a_signal_is_a_request(tmp_path: Path, phase: str, number: signal.Signals) -> None:
    """A rank that is still starting ends at once: nobody waits for it, and there is nothing to save."""
    rank = start(tmp_path, phase)
    rank.send_signal(number)
    output = rank.communicate(timeout=20)[0]
    assert rank.returncode == ExitCode.STOPPED
    assert (output == f"{number.name}\n") == (phase == "training"), output


@pytest.mark.parametrize("phase", ["starting", "loading", "training"])
def test_a_lost_launcher_is_noticed_in_every_phase(tmp_path: Path, phase: str) -> None:
    report = tmp_path / "rank-0"
    (tmp_path / "launcher.py").write_text(LAUNCHER)
    before = [sys.executable, str(tmp_path / "launcher.py"), "--"]
    process = start(tmp_path, phase, *before, environment={REPORTS: str(tmp_path)})
    pid = int(report.read_text())
    process.kill()
    wait_for(lambda: len(report.read_text().split()) == 2, "end of the rank", 20)
    assert report.read_text() == f"{pid} 75\n"
    assert "the launcher is gone" in process.communicate()[0]


def test_a_launcher_that_was_gone_before_the_first_look(tmp_path: Path) -> None:
    """DeepSpeed's launch.py has died while Python was starting."""
    (tmp_path / "rank.py").write_text(RANK)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "rank.py"), "loading", str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(REPO), "CROSS_RANK": "0"},
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert done.returncode == ExitCode.STOPPED, done.stdout
    assert "the launcher is gone" in done.stderr


def test_a_time_limit_and_a_file_are_requests(tmp_path: Path) -> None:
    watch: Any = SimpleNamespace(reason=None)  # a real one would block signals of the test process
    assert StopRequest(tmp_path, 60, watch).reason is None
    assert "max_minutes" in (StopRequest(tmp_path, 1e-9, watch).reason or "")
    (tmp_path / "STOP").touch()
    assert "STOP" in (StopRequest(tmp_path, 60, watch).reason or "")


def test_a_rank_takes_the_time_that_its_launcher_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PET_SHUTDOWN_TIMEOUT", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"):
        monkeypatch.delenv(name, raising=False)
    assert _grace(["python", "-m", "torch.distributed.run", "a.py"]) == 20
    monkeypatch.setenv("PET_SHUTDOWN_TIMEOUT", "600")
    assert _grace(["torchrun", "a.py"]) == 590
    assert _grace(["torchrun", "--nnodes", "2", "--shutdown-timeout=60", "a.py"]) == 50
    assert _grace(["python", "-m", "deepspeed.launcher.launch", "a.py"]) == 20
