"""Run `deepspeed`, pass signals on to its ranks, wait for them, and return the run's exit code.

    emo train [options of deepspeed --] RECIPE.yaml [key=value ...]
    launch/continual.sh [options of deepspeed --] RECIPE.yaml [key=value ...]

The `deepspeed` command passes no signals on. It kills ranks that need more than 30 seconds to finish their
step, does not wait for ranks whose launcher died, and reports a killed launcher as success. Therefore it runs
here in its own session, where Ctrl-C does not reach it.

Each rank of this host writes a report in a directory. The rank locks its report while it lives, and writes
its exit code there (pipeline/control/stop.py). The launcher's output goes to a file, from which rank 0 copies
it to the run's log. The ranks receive the real standard output over a socket (pipeline/control/output.py).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(next(d for d in Path(__file__).resolve().parents if (d / "emo").is_dir())))

import emo.common.packages  # noqa: F401 - before all others

# isort: split
from emo.pipeline.control.stop import leave_early

if __name__ == "__main__":
    leave_early()  # before the imports below, which take seconds on a busy host

# isort: split
import psutil

from emo.common.cli.commands import announce
from emo.common.cli.progress import show_activity
from emo.common.errors import ExitCode, UserError, exit_code_of
from emo.launch.rank import SCRIPTS, recipe_arguments
from emo.pipeline.checkpoint.claims import check_keys
from emo.pipeline.config import load_config
from emo.pipeline.control.heartbeat import find_late_rank
from emo.pipeline.control.output import serve_stdout
from emo.pipeline.control.run_dir import STOP
from emo.pipeline.control.stop import CALLED, CHOSEN_PORT, CONSOLE, REPORTS, REQUESTS, SUPERVISOR

POLL = 0.2  # seconds between looks at the launcher and the ranks
HOSTFILE = Path("/job/hostfile")  # the default of `deepspeed`
RENDEZVOUS = ("--master_port", "--master_addr", "--node_rank")  # options for the address where ranks meet
REMOTE = ("--launcher", "--force_multi")  # options that put other programs between launcher and ranks
TRAINING_CODES = (ExitCode.DONE, ExitCode.FAILURE, ExitCode.MISTAKE, ExitCode.STOPPED)


class RankReport(NamedTuple):
    """The reports of the ranks of this host."""

    file: Path
    pid: int  # 0 if the rank is just starting
    code: int | None  # None if it lives, or was killed
    node: str  # the node whose GPU or driver failed, or empty

    def is_alive(self) -> bool:
        """Return whether the rank holds the lock on its report."""
        with self.file.open(encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return self.pid > 0
        return False


def read_reports(directory: Path) -> list[RankReport]:
    """Return the reports of the ranks that have started."""
    reports = []
    for path in sorted(directory.glob("rank-*")):
        pid, code, node, *_ = [*path.read_text(encoding="utf-8").split(), "", "", ""]
        reports.append(RankReport(path, int(pid or 0), int(code) if code else None, node))
    return reports


class Supervisor:
    """Runs one `deepspeed` command and waits for it and the ranks of this host."""

    def __init__(self, options: list[str], program: list[str], arguments: list[str], reports: Path) -> None:
        """Describe the run.

        Args:
            options: Options of `deepspeed`.
            program: A script, or --module and a module, that each rank runs.
            arguments: Arguments of the program.
            reports: An empty directory for the reports of the ranks.
        """
        self.command = ["deepspeed", *options, *program, *arguments]
        self.program = program[-1]
        self.reports = reports
        self.uses_hostfile = HOSTFILE.is_file() or _has(options, ("--hostfile", "-H"))
        self.uses_ssh = self.uses_hostfile and "--no_ssh" not in options
        self.is_remote = self.uses_hostfile or _has(options, REMOTE)
        self.chooses_port = not _has(options, RENDEZVOUS)
        self.log = reports / "launcher.log"
        self._signals: list[int] = []  # received by this process
        self._notified: set[Path] = set()  # reports of the ranks that a signal was sent to
        self._launcher: subprocess.Popen[bytes]

    def run(self, run_dir: Path | None) -> int:
        """Run the command; return the exit code of the run. run_dir: the run directory, if it is known."""
        for number in REQUESTS:
            signal.signal(number, lambda number, _: self._signals.append(number))
        self._start()
        starting = contextlib.ExitStack()  # shows on standard error that no rank has started yet
        starting.enter_context(show_activity("starting deepspeed"))
        announced = False
        while self._launcher.poll() is None or self._processes():
            if not announced and any(self.reports.glob("rank-*")):
                starting.close()
                announce("ranks")  # each also reports by itself, but only seconds later
                announced = True
            if self._signals.count(signal.SIGINT) > 1:
                self._kill()
            elif self._signals:
                self._pass_on(self._signals[0], run_dir)
            time.sleep(POLL)
        starting.close()
        return self._exit_code(run_dir)

    def _start(self) -> None:
        """Start the launcher in its own session."""
        environment = os.environ | {REPORTS: str(self.reports), SUPERVISOR: str(os.getpid())}
        if self.is_remote:
            self._launcher = subprocess.Popen(self.command, env=environment, start_new_session=True)
            return
        environment[CONSOLE] = serve_stdout()
        if self.chooses_port:  # another run may use DeepSpeed's default
            with socket.socket() as probe:
                probe.bind(("", 0))
                port = environment[CHOSEN_PORT] = str(probe.getsockname()[1])
            self.command[1:1] = [f"--master_port={port}"]
        with self.log.open("a+b") as file:
            streams: Any = {"stdin": subprocess.DEVNULL, "stdout": file}
            self._launcher = subprocess.Popen(
                self.command, env=environment, start_new_session=True, **streams
            )

    def _processes(self) -> list[psutil.Process]:
        """Return the living processes of the launcher's session that launch or run the program."""
        living = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                ours = os.getsid(process.pid) == self._launcher.pid and self.program in process.cmdline()
                if ours and process.status() != psutil.STATUS_ZOMBIE:
                    living.append(process)
        return living

    def _kill(self) -> None:
        for process in self._processes():
            with contextlib.suppress(psutil.Error):
                process.kill()

    def _pass_on(self, number: int, run_dir: Path | None) -> None:
        """Send a signal once to each rank, or to the launcher if no rank of this host has started.

        Signals do not reach ranks that a hostfile starts over ssh. They look for a file.
        """
        reports = read_reports(self.reports)
        if not reports and not self._notified:
            self._notified.add(self.reports)
            if self.uses_ssh and run_dir is not None and run_dir.is_dir():
                (run_dir / STOP).touch()
            else:
                self._launcher.terminate()
        for report in reports:
            if report.file not in self._notified and report.is_alive():
                self._notified.add(report.file)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(report.pid, number)

    def _exit_code(self, run_dir: Path | None) -> int:
        """Return the exit code of the run; explain on standard error what the ranks could not."""
        reports = read_reports(self.reports)
        codes = [report.code for report in reports]
        code = run_exit_code(self._launcher.returncode, codes, bool(self._signals), self.uses_hostfile)
        if code == ExitCode.MISTAKE and any(report.node for report in reports):
            code = ExitCode.FAILURE  # a GPU that fails makes other ranks report mistakes
        killed = [report.file.name.removeprefix("rank-") for report in reports if report.code is None]
        if killed and code == ExitCode.FAILURE:
            line = f"error: killed or aborted without a message: rank {', '.join(killed)}"
            reason = None if run_dir is None else find_late_rank(run_dir)
            print("; ".join(filter(None, (line, reason))), file=sys.stderr)
        if not reports and code not in (ExitCode.DONE, ExitCode.STOPPED) and self.log.is_file():
            sys.stderr.write(self.log.read_text(errors="replace", encoding="utf-8"))
        return code


def _has(options: list[str], names: tuple[str, ...]) -> bool:
    return any(option.startswith(names) for option in options)


def run_exit_code(launcher: int, ranks: list[int | None], requested: bool, hosts: bool = False) -> int:
    """Return the exit code of a run.

    Without reports, because no rank had started here or all run on other hosts, the launcher's code counts.
    Its 0 counts only with `hosts`, because `deepspeed` also returns 0 when its launch.py was killed.

    Args:
        launcher: Exit code of `deepspeed`.
        ranks: Exit codes of this host's ranks, None for a killed one.
        requested: Whether this process was asked to stop.
        hosts: Whether the run may use other hosts.
    """
    trusted = launcher if launcher in TRAINING_CODES else ExitCode.FAILURE
    if not ranks:
        if requested and launcher < 0:
            return ExitCode.STOPPED  # before anything had started
        return ExitCode.FAILURE if launcher == 0 and not hosts else trusted
    codes = set(ranks)
    if codes == {ExitCode.DONE}:  # a killed launcher changes nothing; otherwise a rank of another host failed
        return ExitCode.DONE if launcher <= 0 else trusted
    if ExitCode.MISTAKE in {*codes, launcher}:  # the launcher exits with the code of one rank
        return ExitCode.MISTAKE
    return ExitCode.STOPPED if codes <= {ExitCode.DONE, ExitCode.STOPPED} else ExitCode.FAILURE


def dry_run_ranks(options: list[str]) -> str | None:
    """Return the number of ranks of a dry run without a launcher, empty for one per device; else None."""
    words = " ".join(options).replace("=", " ").split()
    if not words:
        return ""
    return words[1] if len(words) == 2 and words[0] in ("--num_gpus", "--num_accelerators") else None


def launch(program: list[str], arguments: list[str]) -> int:
    """Run a program under `deepspeed` and return the exit code of the run.

    A mistake in the arguments or the recipe is reported here, before any rank starts.

    Args:
        program: A script, or --module and a module, that each rank runs.
        arguments: Options of `deepspeed`, then `--`, then arguments of the program.
    """
    dashes = arguments.index("--") if "--" in arguments else -1
    options = arguments[: max(dashes, 0)]
    arguments = arguments[dashes + 1 :]

    def run() -> int:
        run_dir = None
        name = Path(program[-1]).stem
        if name in SCRIPTS or "--module" in program:
            if name in SCRIPTS:
                os.environ.setdefault(CALLED, f"./launch/{name}.sh")
            args = recipe_arguments(name, arguments)
            config = load_config(args.recipe, args.overrides)
            check_keys(config)
            announce("train")
            run_dir = config.output_dir
            if args.dry_run and not HOSTFILE.is_file() and (ranks := dry_run_ranks(options)) is not None:
                os.environ |= {} if ranks == "" else {"WORLD_SIZE": ranks}
                command = ["-m", *program[1:]] if "--module" in program else program
                os.execv(sys.executable, [sys.executable, *command, *arguments])
        with tempfile.TemporaryDirectory(prefix="ranks-", ignore_cleanup_errors=True) as reports:
            try:
                return Supervisor(options, program, arguments, Path(reports)).run(run_dir)
            except FileNotFoundError as error:
                name = error.filename
                raise UserError(
                    f"{name} is not installed; run make setup, or pip install {name}", code="missing-extra"
                ) from None

    return exit_code_of(run)


def train(words: list[str]) -> int:
    """Run `emo train`, with the `deepspeed` command of this Python even if its environment is not active."""
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    os.environ[CALLED] = "emo train"
    return launch(["--module", "emo.launch.rank"], words[1:])


if __name__ == "__main__":
    sys.exit(launch(sys.argv[1:2], sys.argv[2:]))
