"""Every way to ask for a stop is noticed at once, whatever a rank does; the supervisor ends as its ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from emo.common.errors import ExitCode
from emo.launch.supervise import verdict
from emo.pipeline.control.stop import REPORTS, StopRequest
from tests.conftest import REPO
from tests.helpers.launching import PIPED, wait_for

DONE, FAILURE, MISTAKE, STOPPED = ExitCode.DONE, ExitCode.FAILURE, ExitCode.MISTAKE, ExitCode.STOPPED

# A rank in the named phase. The main thread is inside one call, as it would be in a collective, and its last
# step takes so many seconds.
RANK = """
import os, sys, time
from pathlib import Path
from emo.pipeline.control.stop import StopRequest, Watch
watch = Watch()
assert "torch" not in sys.modules and "psutil" not in sys.modules
from emo.pipeline.monitor.console import split_output
chatter = split_output()
phase, seconds = sys.argv[1:]
if phase != "starting":
    watch.joined()
if phase == "training":
    watch.trains()
stop = StopRequest(Path(__file__).parent, None, watch)
os.write(1, b"chatter of a library\\n")
print("ready", flush=True)
while stop.reason is None and phase != "broken":
    time.sleep(0.05)
if phase == "broken":  # a GPU of rank 0, of which rank 1 makes something else
    if os.environ["RANK"] == "0":
        watch.blame_node()
    code = 1 + int(os.environ["RANK"])
    watch.ended(code)
    sys.exit(code)
print(stop.reason, flush=True)
time.sleep(float(seconds))
watch.ended(75)
sys.exit(75)
"""
# A stand-in for the `deepspeed` command and its launch.py in one: two ranks, and no thought of signals.
DEEPSPEED = f"""#!{sys.executable}
import os, subprocess, sys
command = [sys.executable, *(word for word in sys.argv[1:] if not word.startswith("--"))]
print("chatter of a launcher, called with", *sys.argv[1:], flush=True)
if "fail" in sys.argv:
    sys.exit("no host answers")
started = [subprocess.Popen(command, env=os.environ | {{"RANK": str(rank)}}) for rank in range(2)]
codes = [process.wait() for process in started]
sys.exit(max(code & 255 for code in codes))
"""
# One for torchrun: it passes a signal on, and kills ranks that take long to end.
TORCHRUN = """
import signal, subprocess, sys
rank = subprocess.Popen([sys.executable, *sys.argv[sys.argv.index("--") + 1:]])
signal.signal(signal.SIGTERM, lambda *_: rank.terminate())
sys.exit(rank.wait())
"""
# One for launch.py alone: starts a rank and waits.
LAUNCHER = """
import subprocess, sys
sys.exit(subprocess.run(sys.argv[sys.argv.index("--") + 1:]).returncode)
"""


@pytest.fixture
def rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The script of a rank, beside the launchers."""
    for name, text in (
        ("deepspeed", DEEPSPEED),
        ("torchrun", TORCHRUN),
        ("launcher.py", LAUNCHER),
        ("rank.py", RANK),
    ):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PYTHONPATH", str(REPO))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path / "rank.py"


def start(*command: str | Path, ranks: int = 1) -> subprocess.Popen[str]:
    """A command in a session of its own, as a shell in a terminal starts it, once its ranks are ready."""
    words = [sys.executable, *map(str, command)]
    process = subprocess.Popen(words, cwd=REPO, start_new_session=True, **PIPED)
    assert process.stdout is not None
    output = ""
    while output.count("ready") < ranks:  # several write; their lines may run into each other
        line = process.stdout.readline()
        assert line, f"it ended with {process.wait()}: {output}"
        output += line
    assert "chatter" not in output, "a user sees what is for users"
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
@pytest.mark.parametrize("phase", ["starting", "training"])
def test_a_signal_is_a_request(rank: Path, phase: str, number: signal.Signals) -> None:
    """A rank that is still starting ends at once: nobody waits for it, and there is nothing to save."""
    process = start(rank, phase, "0")
    process.send_signal(number)
    output = process.communicate(timeout=20)[0]
    assert process.returncode == STOPPED
    assert (output == f"{number.name}\n") == (phase == "training"), output


@pytest.mark.parametrize("phase", ["starting", "loading", "training"])
def test_a_lost_launcher_is_noticed_in_every_phase(
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
def test_a_launcher_that_is_about_to_kill(
    rank: Path, restarts: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Is ended so that a long step can be finished, unless it is going to start the ranks again."""
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", restarts)
    process = start(rank.parent / "torchrun", "--shutdown-timeout=2", "--", rank, "training", "2.5")
    process.terminate()
    output = process.communicate(timeout=20)[0]
    assert process.returncode == code
    assert ("save without it" in output) == (restarts == "0"), output


def test_a_launcher_that_was_gone_before_the_first_look(rank: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed's launch.py has died while Python was starting."""
    monkeypatch.setenv("CROSS_RANK", "0")
    done = subprocess.run([sys.executable, rank, "loading", "0"], timeout=20, **PIPED)
    assert done.returncode == STOPPED and "the launcher is gone" in done.stdout


def test_a_time_limit_and_a_file_are_requests(tmp_path: Path) -> None:
    watch: Any = SimpleNamespace(reason=None)  # a real one would block signals of the test process
    assert StopRequest(tmp_path, 60, watch).reason is None
    assert "max_minutes" in (StopRequest(tmp_path, 1e-9, watch).reason or "")
    (tmp_path / "STOP").touch()
    assert "STOP" in (StopRequest(tmp_path, 60, watch).reason or "")


@pytest.mark.parametrize(
    ("launcher", "ranks", "requested", "expected"),
    [
        (0, [DONE, DONE], False, DONE),
        (0, [None, None], False, FAILURE),  # launch.py was killed, and the ranks with it
        (0, [STOPPED, STOPPED], False, STOPPED),  # launch.py was killed, and the ranks saved
        (-9, [STOPPED, STOPPED], True, STOPPED),
        (1, [DONE, DONE], False, FAILURE),  # a rank on another host
        (247, [FAILURE, None], False, FAILURE),
        (1, [MISTAKE, None], False, MISTAKE),  # NCCL aborted the one that was left
        (2, [FAILURE, None], False, MISTAKE),  # a rank on another host said so
        (2, [], False, MISTAKE),  # an unknown option of deepspeed
        (-15, [], True, STOPPED),
        (0, [], False, FAILURE),  # launch.py was killed before a rank had started
        (130, [], False, FAILURE),  # deepspeed itself was interrupted: no rank has said that it saved
    ],
)
def test_the_verdict(launcher: int, ranks: list[int | None], requested: bool, expected: ExitCode) -> None:
    """A run that did not finish never ends with 0."""
    assert verdict(launcher, ranks, requested) == expected


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1, signal.SIGKILL])
def test_a_signal_reaches_the_ranks_and_all_are_waited_for(rank: Path, number: signal.Signals) -> None:
    """Ctrl-C, which a terminal sends to the whole group, in a slow step; or the launcher is killed."""
    process = start("launch/supervise.py", rank, "training", "1", ranks=2)
    launcher = int(subprocess.check_output(["pgrep", "-P", str(process.pid)]))
    begun = time.monotonic()
    os.kill(launcher if number == signal.SIGKILL else -process.pid, number)  # a process, or its whole group
    process.communicate(timeout=60)
    assert process.returncode == STOPPED and time.monotonic() - begun > 1


def test_a_second_ctrl_c_ends_the_run_at_once(rank: Path) -> None:
    process = start("launch/supervise.py", rank, "training", "300", ranks=2)
    os.killpg(process.pid, signal.SIGINT)
    time.sleep(1)
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == FAILURE
    assert "killed or aborted without a word: rank 0, 1" in output


def test_a_gpu_that_failed_is_no_mistake_whatever_the_other_ranks_say(rank: Path) -> None:
    process = start("launch/supervise.py", rank, "broken", "0", ranks=2)
    process.communicate(timeout=60)
    assert process.returncode == FAILURE


def supervised(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "launch/supervise.py", *arguments]
    return subprocess.run(command, cwd=REPO, env=os.environ | environment, capture_output=True, text=True)


def test_a_launcher_that_fails_by_itself_is_heard(rank: Path) -> None:
    """Its output is no chatter then: nobody else can say what was wrong."""
    done = supervised("rank.py", "--master_port=1", "--", "fail")
    assert done.returncode == FAILURE and done.stdout == ""
    assert "no host answers" in done.stderr and "called with --master_port=1 rank.py" in done.stderr


@pytest.mark.parametrize(
    ("argument", "code"), [("--help", DONE), ("nowhere.yaml", MISTAKE), ("--x", MISTAKE)]
)
def test_help_and_mistakes_are_answered_without_the_launcher(argument: str, code: ExitCode) -> None:
    """Nothing that takes seconds is started: no `deepspeed` is on the path here."""
    done = supervised("launch/continual.sh", argument, PATH="")
    assert done.returncode == code and "is not installed" not in done.stderr, done.stderr
