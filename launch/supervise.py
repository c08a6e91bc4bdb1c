"""Run `deepspeed SCRIPT ...`, pass signals on to its ranks, wait for them, return the run's exit code.

    launch/continual.sh [options of deepspeed --] RECIPE.yaml [key=value ...]
    emo-continual [options of deepspeed --] RECIPE.yaml [key=value ...]     where a wheel is installed

By itself the `deepspeed` command passes no signals on, kills ranks that need more than 30 seconds to finish
their step, does not wait for ranks whose launcher died, and takes a launcher that was killed for success.
Therefore it runs here in a session of its own, where Ctrl-C does not reach it. Each rank of this host leaves
a report in a directory: locked as long as the rank lives, and with its exit code when it has ended (see
pipeline/stop.py). What the launcher itself prints goes to a file, from which rank 0 takes it into the run's
log; the ranks find the real standard output as their standard input (see pipeline/report/streams.py).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NoReturn

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.errors import ExitCode, UserError
from pipeline.cli import SCRIPTS, recipe_arguments
from pipeline.config import load_config
from pipeline.stop import CALLED, CHOSEN_PORT, CONSOLE, REPORTS, REQUESTS

HERE = Path(__file__).resolve().parent
TICK = 0.2  # seconds
HOSTFILE = Path("/job/hostfile")  # that `deepspeed` takes when none is named
MEETING = ("--master_port", "--master_addr", "--node_rank")  # options of those who know where ranks meet
# Options under which other programs, which use their standard input, stand between launcher and ranks.
ELSEWHERE = ("--launcher", "--force_multi")
OF_TRAINING = (ExitCode.DONE, ExitCode.FAILURE, ExitCode.MISTAKE, ExitCode.STOPPED)


class Rank:
    """A rank of this host, as its report shows it."""

    def __init__(self, report: Path) -> None:
        self.report = report
        words = report.read_text(encoding="utf-8").split()
        self.pid = int(words[0]) if words else 0
        self.code = int(words[1]) if len(words) > 1 else None  # None: it lives, or was killed

    def lives(self) -> bool:
        """Whether it holds the lock on its report."""
        if not self.pid:
            return False
        with self.report.open(encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False


class Supervisor:
    """One run of the `deepspeed` command."""

    def __init__(self, options: list[str], script: str, arguments: list[str], reports: Path) -> None:
        self.reports = reports
        self.script = script
        self.hosts = HOSTFILE.is_file() or any(one.startswith(("--hostfile", "-H")) for one in options)
        self.requests: list[int] = []  # signals that arrived here
        self._told: set[Path] = set()
        for number in REQUESTS:
            signal.signal(number, lambda number, _: self.requests.append(number))
        command = ["deepspeed", *options, script, *arguments]
        environment = os.environ | {REPORTS: str(reports)}
        self.log = reports / "launcher.log"
        if self.hosts or any(one.startswith(ELSEWHERE) for one in options):
            self.launcher = subprocess.Popen(command, env=environment, start_new_session=True)
            return
        environment[CONSOLE] = "stdin"
        if not any(one.startswith(MEETING) for one in options):
            port = environment[CHOSEN_PORT] = _free_port()
            command[1:1] = [f"--master_port={port}"]
        with self.log.open("a+b") as log:
            self.launcher = subprocess.Popen(
                command, env=environment, stdin=sys.stdout, stdout=log, start_new_session=True
            )

    def run(self) -> int:
        """Wait for the launcher and for every rank, passing requests on; the exit code of the run.

        A second Ctrl-C kills them.
        """
        while self.launcher.poll() is None or self._processes():
            if self.requests.count(signal.SIGINT) > 1:
                for process in self._processes():
                    with contextlib.suppress(psutil.Error):
                        process.kill()
            elif self.requests:
                self._pass_on(self.requests[0])
            time.sleep(TICK)
        ranks = self.ranks()
        codes = [rank.code for rank in ranks]
        code = verdict(self.launcher.returncode, codes, bool(self.requests), self.hosts)
        self._explain(code, ranks)
        return code

    def _explain(self, code: int, ranks: list[Rank]) -> None:
        """Say what no rank could have said: that some were killed, or that the launcher failed by itself."""
        killed = [rank.report.name.removeprefix("rank-") for rank in ranks if rank.code is None]
        if killed and code == ExitCode.FAILURE:
            print(f"error: killed or aborted without a word: rank {', '.join(killed)}", file=sys.stderr)
        if not ranks and code not in (ExitCode.DONE, ExitCode.STOPPED) and self.log.is_file():
            sys.stderr.write(self.log.read_text(errors="replace", encoding="utf-8"))

    def ranks(self) -> list[Rank]:
        """The ranks that have reported so far."""
        return [Rank(path) for path in sorted(self.reports.glob("rank-*"))]

    def _pass_on(self, number: int) -> None:
        """Send a request to every rank once, as soon as it is there to take it."""
        ranks = self.ranks()
        if (
            not ranks and not self._told
        ):  # none here yet, or all on other hosts: the launcher has to tell them
            self._told.add(self.reports)
            self.launcher.terminate()
        for rank in ranks:
            if rank.report not in self._told and rank.lives():
                self._told.add(rank.report)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank.pid, number)

    def _processes(self) -> list[psutil.Process]:
        """The living processes of the launcher's session that launch or run the script."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                ours = os.getsid(process.pid) == self.launcher.pid and self.script in process.cmdline()
                if ours and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found


def _free_port() -> str:
    """A port for the ranks of this host to meet at.

    DeepSpeed's usual port may look free while another run that has just started is about to take it.
    """
    with socket.socket() as probe:
        probe.bind(("", 0))
        return str(probe.getsockname()[1])


def verdict(launcher: int, ranks: list[int | None], requested: bool, hosts: bool = False) -> int:
    """The exit code of a run from those of the `deepspeed` command and of this host's ranks (None: killed).

    Without reports (no rank had started here, or all run on other hosts) the launcher's own code counts; but
    0, which `deepspeed` also returns when its launch.py was killed, only if there are other `hosts`.
    """
    if not ranks:
        if requested and launcher < 0:
            return ExitCode.STOPPED  # ended from here before anything had begun
        if launcher == 0 and not hosts:
            return ExitCode.FAILURE
        return launcher if launcher in OF_TRAINING else ExitCode.FAILURE
    codes = set(ranks)
    if codes == {ExitCode.DONE} and launcher <= 0:  # one that was killed then changes nothing
        return ExitCode.DONE
    if codes == {ExitCode.DONE}:  # a rank of another host has not finished
        return launcher if launcher in OF_TRAINING else ExitCode.FAILURE
    if ExitCode.MISTAKE in {*codes, launcher}:  # its own code is that of a rank, perhaps of another host
        return ExitCode.MISTAKE
    if codes <= {ExitCode.DONE, ExitCode.STOPPED}:
        return ExitCode.STOPPED
    return ExitCode.FAILURE


def mistaken(script: Path, arguments: list[str]) -> int:
    """Return the exit code for arguments or a recipe that no rank could use, said at once; 0 for good ones.

    Answers --help too, which ends the program.
    """
    os.environ.setdefault(CALLED, f"./launch/{script.name}")
    try:
        args = recipe_arguments(script.stem, arguments)
        load_config(args.recipe, args.overrides)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return ExitCode.MISTAKE
    return ExitCode.DONE


def main(argv: list[str]) -> int:
    """Run the script argv[0] under `deepspeed`; options before `--` go to `deepspeed` itself."""
    script, *arguments = argv
    options: list[str] = []
    if "--" in arguments:
        at = arguments.index("--")
        options, arguments = arguments[:at], arguments[at + 1 :]
    if Path(script).stem in SCRIPTS.values() and (code := mistaken(Path(script), arguments)):
        return code
    reports = Path(tempfile.mkdtemp(prefix="ranks-"))
    try:
        return Supervisor(options, script, arguments, reports).run()
    except FileNotFoundError as error:
        name = error.filename
        print(
            f"error: {name} is not installed; run make setup, or pip install {name}",
            file=sys.stderr,
        )
        return ExitCode.MISTAKE
    finally:
        shutil.rmtree(reports, ignore_errors=True)


def continual() -> NoReturn:
    """The command `emo-continual`."""
    _installed("emo-continual", "continual.sh")


def instruct() -> NoReturn:
    """The command `emo-instruct`."""
    _installed("emo-instruct", "instruct.sh")


def _installed(command: str, script: str) -> NoReturn:
    """As `command`, become what `script` beside this file becomes.

    Ranks know their supervisor by this file's name. The `deepspeed` of this Python is taken, be its
    environment active or not.
    """
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    os.environ[CALLED] = command
    os.execv(sys.executable, [sys.executable, __file__, str(HERE / script), *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
