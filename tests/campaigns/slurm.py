"""The Slurm part of the cluster campaign: controller, daemon and munge for a cluster of this one machine.

launch/slurm/train.sbatch gets its warning before the time limit, saves, is queued again, and resumes.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.campaigns.campaign import Campaign
from tests.conftest import REPO
from tests.helpers import launching
from tests.helpers.launching import losses


def call(*command: str | Path) -> str:
    return subprocess.run(list(map(str, command)), check=True, capture_output=True, text=True).stdout


@contextlib.contextmanager
def slurm_cluster(directory: Path) -> Iterator[dict[str, str]]:
    """A controller and a daemon for this machine, which pretends to have two GPUs."""
    host = call("hostname", "-s").strip()
    for name in ("state", "spool", "log"):
        (directory / name).mkdir()
    config = directory / "slurm.conf"
    config.write_text(
        f"ClusterName=emo\nSlurmctldHost={host}(127.0.0.1)\nSlurmUser=root\nSlurmdUser=root\nAuthType=auth/munge\n"
        f"AuthInfo=socket={directory}/munge.socket\n"
        f"StateSaveLocation={directory}/state\nSlurmdSpoolDir={directory}/spool\n"
        f"SlurmctldPidFile={directory}/ctld.pid\nSlurmdPidFile={directory}/d.pid\n"
        f"SlurmctldLogFile={directory}/log/ctld\nSlurmdLogFile={directory}/log/d\n"
        "SlurmctldPort=16817\nSlurmdPort=16818\nProctrackType=proctrack/linuxproc\nTaskPlugin=task/none\n"
        "SelectType=select/cons_tres\nSelectTypeParameters=CR_CPU\nReturnToService=2\nSwitchType=switch/none\n"
        "MpiDefault=none\nGresTypes=gpu\nKillWait=30\nSchedulerParameters=sched_interval=2\n"
        f"NodeName={host} NodeAddr=127.0.0.1 CPUs={os.cpu_count()} RealMemory=4000 Gres=gpu:2 State=UNKNOWN\n"
        f"PartitionName=test Nodes={host} Default=YES MaxTime=INFINITE State=UP\n"
    )
    (directory / "gres.conf").write_text("Name=gpu File=/dev/null\nName=gpu File=/dev/zero\n")
    (directory / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=yes\n")
    key = directory / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    for folder in (directory, directory.parent):
        folder.chmod(0o755)
    environment = launching.ENVIRONMENT | {"SLURM_CONF": str(config)}
    munge = ["munged", "-F", "--force", f"--key-file={key}", f"--socket={directory}/munge.socket"]
    munge += [f"--pid-file={directory}/munge.pid", f"--log-file={directory}/log/munge"]
    munge += [f"--seed-file={directory}/munge.seed"]
    services = []
    try:
        for command in (munge, ["slurmctld", "-D"], ["slurmd", "-D"]):
            log = (directory / f"{command[0]}.out").open("w")
            services.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
            time.sleep(2)
        deadline = time.monotonic() + 60
        while "idle" not in ask(environment, "sinfo", "-h", "-o", "%t"):
            logs = "".join(p.read_text()[-400:] for p in directory.glob("*.out"))
            assert time.monotonic() < deadline, f"no idle node after 60 s: {logs}"
            time.sleep(1)
        yield environment
    finally:
        subprocess.run(["scancel", "-u", "root"], env=environment, capture_output=True)
        time.sleep(1)
        for service in reversed(services):
            service.terminate()
            service.wait(30)


def ask(environment: dict[str, str], *command: str | Path) -> str:
    """What a command of the cluster prints."""
    return subprocess.run(command, env=environment, capture_output=True, text=True, cwd=REPO).stdout.strip()


class Job:
    """A job of train.sbatch under observation: what the scheduler said of it, in order."""

    OVER = re.compile("JobState=(COMPLETED|FAILED|CANCELLED|TIMEOUT|NODE_FAIL|OUT_OF_MEMORY)")
    SHAPE = ("--nodes=1", "--ntasks-per-node=2", "--gpus-per-node=2", "--cpus-per-task=1", "--mem=2000")

    def __init__(self, environment: dict[str, str], recipe: Path, run_dir: Path, *more: str) -> None:
        """Submit the recipe; `more` are options of Slurm (with dashes) and overrides of the recipe."""
        self.environment, self.log = environment, run_dir.with_suffix(".slurm")
        options = [option for option in more if option.startswith("--")]
        overrides = [option for option in more if not option.startswith("--")]
        command = ["sbatch", "--parsable", *self.SHAPE, *options, f"--output={self.log}"]
        command += ["launch/slurm/train.sbatch", "continual", str(recipe), f"run_dir={run_dir}", *overrides]
        self.id = self._call(*command)
        self.began = time.monotonic()
        self.history: list[str] = []
        self._held_since: float | None = None

    def wait(self, until: Callable[[str], bool], timeout: float = 900) -> str:
        """The job's state once `until` holds of it, or it is over, or the time is up."""
        deadline = time.monotonic() + timeout
        while True:
            state = self._call("scontrol", "show", "job", self.id)
            self._note(state)
            if until(state) or self.OVER.search(state) or time.monotonic() > deadline:
                return state
            self._release(state)
            time.sleep(0.5)

    def output(self) -> str:
        """The end of what the job printed."""
        return self.log.read_text()[-1500:] if self.log.is_file() else "no output"

    def story(self) -> str:
        """The end of its output, and what the scheduler said of job and node, in order."""
        return f"{self.output()}\n" + "\n".join(self.history)

    def cancel(self) -> None:
        """Take the job away and wait until it is gone."""
        self._call("scancel", self.id)
        self.wait(lambda _: False, 120)

    def _note(self, state: str) -> None:
        words = " ".join(re.findall(r"(?:JobState|Reason|Restarts|ExitCode)=\S+", state))
        words += f" node: {self._call('sinfo', '-h', '-N', '-o', '%t (%E)')}"
        if not self.history or self.history[-1].split(" s: ")[1] != words:
            self.history.append(f"{time.monotonic() - self.began:.0f} s: {words}")

    def _release(self, state: str) -> None:
        """Slurm holds a requeued job for two minutes; a few seconds are enough here."""
        if "Reason=BeginTime" not in state:
            self._held_since = None
            return
        self._held_since = self._held_since or time.monotonic()
        if time.monotonic() - self._held_since > 5:
            self._call("scontrol", "update", f"jobid={self.id}", "StartTime=now")
            self._held_since = None

    def _call(self, *command: str) -> str:
        return ask(self.environment, *command)


def cores_of_ranks(environment: dict[str, str], recipe: Path, run_dir: Path, show: Campaign) -> None:
    """One rank that asks for all cores of the node: the step that srun starts must have them."""
    cores = os.cpu_count() or 1
    shape = ("--ntasks-per-node=1", f"--cpus-per-task={cores}", "--gpus-per-node=1")
    job = Job(environment, recipe, run_dir, *shape, "train.steps=200000", "train.schedule=constant")

    def step() -> str:
        return ask(environment, "scontrol", "show", "step", f"{job.id}.0")

    job.wait(lambda _: "CPUs=" in step(), 120)
    found = re.search(r"CPUs=(\d+) Tasks=(\d+)", step())
    each = int(found[1]) // int(found[2]) if found else 0
    words = f"{each} of {cores} asked for" if found else job.story()
    show("slurm", "cores of each rank", words, each == cores)
    job.cancel()


def slurm(directory: Path, show: Campaign) -> None:
    """train.sbatch: the warning before the time limit, the queue again, the end, and a mistake."""
    recipe = launching.tiny_recipe(directory)
    done = launching.run(2, str(recipe), f"run_dir={directory / 'plain'}")
    assert done.returncode == 0, done.stdout
    home = directory / "slurm"
    home.mkdir()
    with slurm_cluster(home) as environment:
        run_dir = directory / "by-slurm"
        job = Job(environment, recipe, run_dir, "train.save_every=3")
        state = job.wait(lambda _: False)
        good = "COMPLETED" in state and losses(run_dir) == losses(directory / "plain")
        show("slurm", "a whole run", "losses equal" if good else job.story(), good)
        cores_of_ranks(environment, recipe, directory / "cores", show)

        # Three minutes, warned one minute before, which Slurm may do up to a minute early. A warning that
        # comes while the run is still starting is answered too, but then only a later life can resume.
        limits = ("--time=3", "--signal=USR1@60")
        job = Job(
            environment,
            recipe,
            directory / "warned",
            "train.steps=200000",
            "train.schedule=constant",
            *limits,
        )
        state = job.wait(lambda s: "Restarts=0" not in s)
        again = "exit code 75" in job.output() and "Restarts=1" in state
        show(
            "slurm",
            "warned before the time limit",
            "ended with 75, queued again" if again else job.story(),
            again,
        )
        job.wait(lambda _: "resumed from" in job.output())
        resumed = "resumed from" in job.output()
        show("slurm", "a later life", "resumed from the checkpoint" if resumed else job.story(), resumed)
        job.cancel()

        job = Job(environment, recipe, directory / "mistake", "train.lr=-1")
        state = job.wait(lambda _: False)
        good = "FAILED" in state and "ExitCode=2:0" in state and "Restarts=0" in state
        show("slurm", "a mistake is not tried again", "exit code 2" if good else job.story(), good)
