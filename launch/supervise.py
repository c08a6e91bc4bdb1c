"""Run `deepspeed SCRIPT ...`, pass signals on to its ranks, wait for them, return the run's exit code.

    launch/continual.sh [options of deepspeed --] RECIPE.yaml [key=value ...]
    emo train [options of deepspeed --] RECIPE.yaml [key=value ...]

By itself the `deepspeed` command passes no signals on, kills ranks that need more than 30 seconds to finish
their step, does not wait for ranks whose launcher died, and takes a launcher that was killed for success.
Therefore it runs here in a session of its own, where Ctrl-C does not reach it. Each rank of this host leaves
a report in a directory: locked as long as the rank lives, and with its exit code when it has ended (see
pipeline/control/stop.py). What the launcher itself prints goes to a file, from which rank 0 takes it into
the run's log; the ranks find the real standard output as their standard input (pipeline/monitor/console.py).
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
from typing import Any, NamedTuple, NoReturn

sys.path.insert(0, str(next(d for d in Path(__file__).resolve().parents if (d / "emo").is_dir())))

import emo.common.packages  # noqa: F401 - before all others

# isort: split
from emo.pipeline.control.stop import leave_early

if __name__ == "__main__":
    leave_early()  # before the imports below, which take seconds on a busy host

# isort: split
import psutil

from emo.common.errors import ExitCode, UserError, exit_code_of
from emo.pipeline.checkpoint.claims import check_keys
from emo.pipeline.cli import recipe_arguments
from emo.pipeline.config import load_config
from emo.pipeline.control.heartbeat import late
from emo.pipeline.control.stop import CALLED, CHOSEN_PORT, CONSOLE, REPORTS, REQUESTS

TICK = 0.2  # seconds
HOSTFILE = Path("/job/hostfile")  # that `deepspeed` takes when none is named
MEETING = ("--master_port", "--master_addr", "--node_rank")  # options of those who know where ranks meet
# Options under which other programs, which use their standard input, stand between launcher and ranks.
ELSEWHERE = ("--launcher", "--force_multi")
OF_TRAINING = (ExitCode.DONE, ExitCode.FAILURE, ExitCode.MISTAKE, ExitCode.STOPPED)


class Rank(NamedTuple):
    """A rank of this host, as its report shows it."""

    report: Path
    pid: int  # 0: it is just starting
    code: int | None  # None: it lives, or was killed
    node: str  # whose GPU or driver failed; empty for any other end

    def lives(self) -> bool:
        """Return whether it holds the lock on its report."""
        with self.report.open(encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return self.pid > 0
        return False


def reported(reports: Path) -> list[Rank]:
    """Return the ranks that have reported so far."""
    ranks = []
    for path in sorted(reports.glob("rank-*")):
        pid, code, node, *_ = [*path.read_text(encoding="utf-8").split(), "", "", ""]
        ranks.append(Rank(path, int(pid or 0), int(code) if code else None, node))
    return ranks


def supervise(
    options: list[str], script: str, arguments: list[str], reports: Path, run_dir: Path | None
) -> int:
    """Run the `deepspeed` command, wait for it and the ranks of this host; return the run's exit code."""
    hosts = HOSTFILE.is_file() or any(option.startswith(("--hostfile", "-H")) for option in options)
    requests: list[int] = []  # signals that arrived here
    for number in REQUESTS:
        signal.signal(number, lambda number, _: requests.append(number))
    command = ["deepspeed", *options, script, *arguments]
    environment = os.environ | {REPORTS: str(reports)}
    log = reports / "launcher.log"
    if hosts or any(option.startswith(ELSEWHERE) for option in options):
        launcher = subprocess.Popen(command, env=environment, start_new_session=True)
    else:
        environment[CONSOLE] = "stdin"
        if not any(option.startswith(MEETING) for option in options):
            with socket.socket() as probe:  # DeepSpeed's usual port may be another run's, or about to be
                probe.bind(("", 0))
                port = environment[CHOSEN_PORT] = str(probe.getsockname()[1])
            command[1:1] = [f"--master_port={port}"]
        with log.open("a+b") as file:
            streams: Any = {"stdin": sys.stdout, "stdout": file}
            launcher = subprocess.Popen(command, env=environment, start_new_session=True, **streams)

    def processes() -> list[psutil.Process]:
        """Return the living processes of the launcher's session that launch or run the script."""
        living = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                ours = os.getsid(process.pid) == launcher.pid and script in process.cmdline()
                if ours and process.status() != psutil.STATUS_ZOMBIE:
                    living.append(process)
        return living

    passed_on: set[Path] = set()
    while launcher.poll() is None or processes():
        if requests.count(signal.SIGINT) > 1:
            for process in processes():
                with contextlib.suppress(psutil.Error):
                    process.kill()
        elif requests:
            ranks = reported(reports)
            if not ranks and not passed_on:  # all start later or run elsewhere: the launcher has to tell them
                passed_on.add(reports)
                launcher.terminate()
            for rank in ranks:
                if rank.report not in passed_on and rank.lives():
                    passed_on.add(rank.report)
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(rank.pid, requests[0])
        time.sleep(TICK)
    ranks = reported(reports)
    code = verdict(launcher.returncode, [rank.code for rank in ranks], bool(requests), hosts)
    if code == ExitCode.MISTAKE and any(rank.node for rank in ranks):
        code = ExitCode.FAILURE  # what other ranks make of a GPU that fails is no mistake
    killed = [rank.report.name.removeprefix("rank-") for rank in ranks if rank.code is None]
    if killed and code == ExitCode.FAILURE:
        line = f"error: killed or aborted without a word: rank {', '.join(killed)}"
        reason = None if run_dir is None else late(run_dir)
        print("; ".join(filter(None, (line, reason))), file=sys.stderr)
    if not ranks and code not in (ExitCode.DONE, ExitCode.STOPPED) and log.is_file():
        sys.stderr.write(log.read_text(errors="replace", encoding="utf-8"))
    return code


def verdict(launcher: int, ranks: list[int | None], requested: bool, hosts: bool = False) -> int:
    """Return the exit code of a run from those of `deepspeed` and of this host's ranks (None: killed).

    Without reports (no rank had started here, or all run on other hosts) the launcher's own code counts; but
    0, which `deepspeed` also returns when its launch.py was killed, only if there are other `hosts`.
    """
    believed = launcher if launcher in OF_TRAINING else ExitCode.FAILURE
    if not ranks:
        if requested and launcher < 0:
            return ExitCode.STOPPED  # ended from here before anything had begun
        return ExitCode.FAILURE if launcher == 0 and not hosts else believed
    codes = set(ranks)
    if codes == {ExitCode.DONE}:  # a killed launcher changes nothing; else a rank of another host failed
        return ExitCode.DONE if launcher <= 0 else believed
    if ExitCode.MISTAKE in {*codes, launcher}:  # its own code is that of a rank, perhaps of another host
        return ExitCode.MISTAKE
    return ExitCode.STOPPED if codes <= {ExitCode.DONE, ExitCode.STOPPED} else ExitCode.FAILURE


def dry_ranks(options: list[str]) -> str | None:
    """Return the ranks of a dry run that needs no launcher, empty for as many as devices; else None."""
    words = " ".join(options).replace("=", " ").split()
    if not words:
        return ""
    return words[1] if len(words) == 2 and words[0] in ("--num_gpus", "--num_accelerators") else None


def main(argv: list[str]) -> int:
    """Run the script argv[0] under `deepspeed`; options before `--` go to `deepspeed` itself.

    Arguments or a recipe that no rank could use are answered at once, and so is --help.
    """
    script, *arguments = argv
    dashes = arguments.index("--") if "--" in arguments else -1
    options, arguments = arguments[: max(dashes, 0)], arguments[dashes + 1 :]

    def run() -> int:
        run_dir = None
        if (stem := Path(script).stem) in ("continual", "instruct"):
            os.environ.setdefault(CALLED, f"./launch/{stem}.sh")
            args = recipe_arguments(stem, arguments)
            config = load_config(args.recipe, args.overrides)
            check_keys(config)
            run_dir = config.output_dir
            if args.dry_run and not HOSTFILE.is_file() and (ranks := dry_ranks(options)) is not None:
                os.environ |= {} if ranks == "" else {"WORLD_SIZE": ranks}
                os.execv(sys.executable, [sys.executable, script, *arguments])
        with tempfile.TemporaryDirectory(prefix="ranks-", ignore_cleanup_errors=True) as reports:
            try:
                return supervise(options, script, arguments, Path(reports), run_dir)
            except FileNotFoundError as error:
                name = error.filename
                raise UserError(f"{name} is not installed; run make setup, or pip install {name}") from None

    return exit_code_of(run)


def train(words: list[str]) -> NoReturn:
    """Run `emo train`: become what the script beside this file becomes.

    Ranks know their supervisor by this file's name. The `deepspeed` of this Python is taken, be its
    environment active or not.
    """
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    os.environ[CALLED] = "emo train"
    script = str(Path(__file__).resolve().parent / "continual.sh")
    os.execv(sys.executable, [sys.executable, __file__, script, *words[1:]])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
