"""Stop requests reach a rank in every phase, and the supervisor's exit code depends on its ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from emo.common.errors import ExitCode
from emo.pipeline.control.stop import REPORTS
from tests.conftest import REPO
from tests.helpers.launching import ENVIRONMENT, PIPED, wait_for

DONE, FAILURE, MISTAKE, STOPPED = ExitCode.DONE, ExitCode.FAILURE, ExitCode.MISTAKE, ExitCode.STOPPED

# Simulates a rank in a phase. Its last step takes some seconds in one call, like a collective.
RANK = """
import os, sys, time
from pathlib import Path
from emo.pipeline.control.stop import StopRequest, SignalWatch
watch = SignalWatch()
assert "torch" not in sys.modules and "psutil" not in sys.modules
from emo.pipeline.monitor.console import split_output
output = split_output()
phase, seconds = sys.argv[1:]
if phase != "starting":
    watch.enter_group()
if phase == "training":
    watch.enter_training()
stop = StopRequest(Path(__file__).parent, None, watch)
os.write(1, b"chatter of a library\\n")
print("ready", flush=True)
while stop.reason is None and phase != "broken":
    time.sleep(0.05)
if phase == "broken":  # a GPU of rank 0 fails, and rank 1 reports another error
    if os.environ["RANK"] == "0":
        watch.blame_node()
    code = 1 + int(os.environ["RANK"])
    watch.report_exit(code)
    sys.exit(code)
print(stop.reason, flush=True)
time.sleep(float(seconds))
watch.report_exit(75)
sys.exit(75)
"""
# Stands in for the `deepspeed` command and its launch.py. It starts two ranks and forwards no signals.
DEEPSPEED = f"""#!{sys.executable}
import os, subprocess, sys
command = [sys.executable, *(arg for arg in sys.argv[1:] if not arg.startswith("--"))]
print("chatter of a launcher, called with", *sys.argv[1:], flush=True)
if "fail" in sys.argv:
    sys.exit("no host answers")
started = [subprocess.Popen(command, env=os.environ | {{"RANK": str(rank)}}) for rank in range(2)]
codes = [process.wait() for process in started]
sys.exit(max(code & 255 for code in codes))
"""
# Stands in for torchrun, which forwards SIGTERM to its rank.
TORCHRUN = """
import signal, subprocess, sys
rank = subprocess.Popen([sys.executable, *sys.argv[sys.argv.index("--") + 1:]])
signal.signal(signal.SIGTERM, lambda *_: rank.terminate())
sys.exit(rank.wait())
"""
# Stands in for launch.py, which starts a rank and waits.
LAUNCHER = """
import subprocess, sys
sys.exit(subprocess.run(sys.argv[sys.argv.index("--") + 1:]).returncode)
"""


@pytest.fixture
def rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write the scripts of a rank and its launchers, and return the rank's script."""
    scripts = {"deepspeed": DEEPSPEED, "torchrun": TORCHRUN, "launcher.py": LAUNCHER, "rank.py": RANK}
    for name, text in scripts.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PYTHONPATH", str(REPO))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path / "rank.py"


def start(*command: str | Path, ranks: int = 1) -> subprocess.Popen[str]:
    """Start a Python script in a separate session, as a terminal does, and wait until its ranks are ready."""
    arguments = [sys.executable, *map(str, command)]
    process = subprocess.Popen(arguments, cwd=REPO, start_new_session=True, **PIPED)
    assert process.stdout is not None
    output = ""
    while output.count("ready") < ranks:  # lines of several ranks may be mixed
        line = process.stdout.readline()
        assert line, f"exit code {process.wait()}: {output}"
        output += line
    assert "chatter" not in output, "output of libraries belongs in log.txt"
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
@pytest.mark.parametrize("phase", ["starting", "training"])
def test_a_signal_requests_a_stop(rank: Path, phase: str, number: signal.Signals) -> None:
    """A training rank reports the signal, and a rank that is still starting exits at once."""
    process = start(rank, phase, "0")
    process.send_signal(number)
    output = process.communicate(timeout=20)[0]
    assert process.returncode == STOPPED
    assert (output == f"{number.name}\n") == (phase == "training"), output


@pytest.mark.parametrize("phase", ["starting", "loading", "training"])
def test_the_death_of_the_launcher_is_noticed_in_every_phase(
    rank: Path, phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(REPORTS, str(rank.parent))
    process = start(rank.parent / "launcher.py", "--", sys.executable, rank, phase, "0")
    report = rank.parent / "rank-0"
    pid = int(report.read_text())
    process.kill()
    wait_for(lambda: len(report.read_text().split()) == 2, "end of the rank", 20)
    assert report.read_text() == f"{pid} 75\n"
    assert "the launcher is gone" in process.communicate()[0]


@pytest.mark.parametrize(("restarts", "code"), [("0", -signal.SIGKILL), ("3", STOPPED)])
def test_a_rank_kills_its_launcher_to_finish_a_long_step(
    rank: Path, restarts: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A torchrun that restarts ranks is not killed."""
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", restarts)
    process = start(rank.parent / "torchrun", "--shutdown-timeout=2", "--", rank, "training", "2.5")
    process.terminate()
    output = process.communicate(timeout=20)[0]
    assert process.returncode == code
    assert ("save without it" in output) == (restarts == "0"), output


def test_a_launcher_that_died_while_python_started_is_noticed(
    rank: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CROSS_RANK", "0")
    done = subprocess.run([sys.executable, rank, "loading", "0"], timeout=20, **PIPED)
    assert done.returncode == STOPPED and "the launcher is gone" in done.stdout


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1, signal.SIGKILL])
def test_the_supervisor_waits_for_all_ranks(rank: Path, number: signal.Signals) -> None:
    """It waits after Ctrl-C, which signals the whole process group, and after its launcher is killed."""
    process = start("launch/supervise.py", rank, "training", "1", ranks=2)
    launcher = int(subprocess.check_output(["pgrep", "-P", str(process.pid)]))
    start_time = time.monotonic()
    os.kill(launcher if number == signal.SIGKILL else -process.pid, number)  # a process, or its whole group
    process.communicate(timeout=60)
    assert process.returncode == STOPPED and time.monotonic() - start_time > 1


def test_a_second_ctrl_c_kills_the_ranks(rank: Path) -> None:
    process = start("launch/supervise.py", rank, "training", "300", ranks=2)
    os.killpg(process.pid, signal.SIGINT)
    time.sleep(1)
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == FAILURE
    assert "killed or aborted without a message: rank 0, 1" in output


def test_a_failed_gpu_decides_the_exit_code(rank: Path) -> None:
    process = start("launch/supervise.py", rank, "broken", "0", ranks=2)
    process.communicate(timeout=60)
    assert process.returncode == FAILURE


def supervise(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "launch/supervise.py", *arguments]
    return subprocess.run(command, cwd=REPO, env=os.environ | environment, capture_output=True, text=True)


def test_the_output_of_a_launcher_that_fails_is_shown(rank: Path) -> None:
    done = supervise("rank.py", "--master_port=1", "--", "fail")
    assert done.returncode == FAILURE and done.stdout == ""
    assert "no host answers" in done.stderr and "called with --master_port=1 rank.py" in done.stderr


@pytest.mark.parametrize(
    ("argument", "code"), [("--help", DONE), ("nowhere.yaml", MISTAKE), ("--x", MISTAKE)]
)
def test_help_and_mistakes_do_not_start_the_launcher(argument: str, code: ExitCode) -> None:
    """The supervisor answers although there is no `deepspeed` on the path."""
    done = supervise("launch/continual.sh", argument, PATH="")
    assert done.returncode == code and "is not installed" not in done.stderr, done.stderr


def test_a_signal_while_rank_0_imports_its_modules_stops_it_cleanly() -> None:
    """The thread that shows the start must not receive the signal, because it would kill the rank."""
    command = [sys.executable, "-m", "emo.launch.rank", "nowhere.yaml"]
    rank = subprocess.Popen(command, cwd=REPO, env=ENVIRONMENT | {"RANK": "0"}, **PIPED)
    tasks = Path(f"/proc/{rank.pid}/task")
    wait_for(lambda: len(list(tasks.iterdir())) >= 3, "the threads of SignalWatch and of the start", 30)
    rank.terminate()
    output, _ = rank.communicate(timeout=30)
    assert rank.returncode == ExitCode.STOPPED, output
