"""The Slurm parts of the cluster campaign: controller, daemon and munge for a cluster of this one machine.

launch/slurm/train.sbatch gets its warning before the time limit, saves, is queued again, and resumes.
Evaluation is scheduled: as a job that depends on a training, and by Slurm's crontab.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.campaigns.campaign import Campaign
from tests.campaigns.scrontab import find_scrontab
from tests.conftest import REPO
from tests.helpers import launching
from tests.helpers.evaluating import tiny_model, write_tasks
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
        "MpiDefault=none\nGresTypes=gpu\nKillWait=30\nSchedulerParameters=sched_interval=2\nScronParameters=enable\n"
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

    def __init__(self, environment: dict[str, str], recipe: Path, run_dir: Path, *extra: str) -> None:
        """Submit the recipe; `more` are options of Slurm (with dashes) and overrides of the recipe."""
        self.environment, self.log = environment, run_dir.with_suffix(".slurm")
        options = [option for option in extra if option.startswith("--")]
        overrides = [option for option in extra if not option.startswith("--")]
        command = ["sbatch", "--parsable", *self.SHAPE, *options, f"--output={self.log}"]
        command += [
            "launch/slurm/train.sbatch",
            "continual",
            str(recipe),
            f"output_dir={run_dir}",
            *overrides,
        ]
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
    job = Job(
        environment, recipe, run_dir, *shape, "train.max_steps=200000", "train.lr_scheduler_type=constant"
    )

    def step() -> str:
        return ask(environment, "scontrol", "show", "step", f"{job.id}.0")

    job.wait(lambda _: "CPUs=" in step(), 120)
    results = re.search(r"CPUs=(\d+) Tasks=(\d+)", step())
    each = int(results[1]) // int(results[2]) if results else 0
    words = f"{each} of {cores} asked for" if results else job.story()
    show("slurm", "cores of each rank", words, each == cores)
    job.cancel()


def slurm(directory: Path, show: Campaign) -> None:
    """train.sbatch: the warning before the time limit, the queue again, the end, and a mistake."""
    recipe = launching.tiny_recipe(directory)
    done = launching.run(2, str(recipe), f"output_dir={directory / 'plain'}")
    assert done.returncode == 0, done.stdout
    home = directory / "slurm"
    home.mkdir()
    with slurm_cluster(home) as environment:
        run_dir = directory / "by-slurm"
        job = Job(environment, recipe, run_dir, "train.save_steps=3")
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
            "train.max_steps=200000",
            "train.lr_scheduler_type=constant",
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

        job = Job(environment, recipe, directory / "mistake", "train.learning_rate=-1")
        state = job.wait(lambda _: False)
        good = "FAILED" in state and "ExitCode=2:0" in state and "Restarts=0" in state
        show("slurm", "a mistake is not tried again", "exit code 2" if good else job.story(), good)


# --- scheduled evaluation ---------------------------------------------------------------------------------


def scheduled(directory: Path, show: Campaign) -> None:
    """evaluate.sbatch as a job that waits for a training, and evaluate.scron as a line of Slurm's crontab."""
    recipe = launching.tiny_recipe(directory)
    data = write_tasks(directory / "tasks", ["sst2"], train=20, test=8)
    home = directory / "slurm"
    home.mkdir()
    with slurm_cluster(home) as environment:
        environment |= {"EVAL_CACHE": str(directory / "cache")}
        after_training(environment, recipe, data, show)
        by_crontab(environment, directory, data, show)


def after_training(environment: dict[str, str], recipe: Path, data: Path, show: Campaign) -> None:
    """The export of a run is evaluated when the run is finished; after a mistake nothing waits for ever."""
    directory = recipe.parent
    longer = "model.architecture.max_position_embeddings=1024"  # room for demonstrations
    for name, extra, expected, words in (
        ("good", longer, "COMPLETED", "waited, then evaluated the export"),
        ("bad", "train.learning_rate=-1", "CANCELLED", "cancelled when the training had failed"),
    ):
        run_dir, log = directory / name, directory / f"{name}.evaluation"
        training = Job(environment, recipe, run_dir, extra)
        waiting = subprocess.run(
            [
                *("sbatch", "--parsable", f"--dependency=afterok:{training.id}", f"--output={log}"),
                *("--cpus-per-task=1", "--mem-per-cpu=1000", "launch/slurm/evaluate.sbatch"),
                *(str(run_dir), str(data), "--tasks", "sst2"),
            ],
            env=environment,
            cwd=REPO,
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        ).stdout.strip()
        waits = "Reason=Dependency" in ask(environment, "scontrol", "show", "job", waiting)
        training.wait(lambda _: False)
        state = ended(environment, waiting)
        done = run_dir / "eval" / "watch" / "done" / f"{name}.json"
        evaluated = done.is_file() and json.loads(done.read_text())["state"] == "evaluated"
        good = waits and f"JobState={expected}" in state and evaluated == (name == "good")
        output = log.read_text()[-1500:] if log.is_file() else "no output"
        results = words if good else f"{training.story()}\n{state}\n{output}"
        show("scheduled", f"a job after a training: {name}", results, good)


def ended(environment: dict[str, str], job: str, timeout: float = 900) -> str:
    """What the scheduler says of a job when it is over, or the time is up."""
    deadline = time.monotonic() + timeout
    while True:
        state = ask(environment, "scontrol", "show", "job", job)
        if Job.OVER.search(state) or time.monotonic() > deadline:
            return state
        time.sleep(1)


def by_crontab(environment: dict[str, str], directory: Path, data: Path, show: Campaign) -> None:
    """A pass every minute: one finds nothing, one finds an export, one finds it evaluated."""
    scrontab = find_scrontab(directory / "scrontab")
    if scrontab is None:
        show("scheduled", "scrontab", "skipped: this Slurm has none, and it could not be built", True)
        return
    run, log = directory / "watched", directory / "scrontab.log"
    run.mkdir()
    text = (REPO / "launch/slurm/evaluate.scron").read_text()
    edits = {"*/20 * * * *": "* * * * *", "/home/me/emo/runs/emo/evaluate.log": str(log)}
    edits |= {"/home/me/emo": str(REPO), "runs/emo /data/nlu": f"{run} {data} --tasks sst2"}
    edits |= {"--cpus-per-task=8": "--cpus-per-task=1", "--mem-per-cpu=4G": "--mem-per-cpu=1000M"}
    for old, new in edits.items():
        assert old in text, old
        text = text.replace(old, new)
    table = directory / "table"
    table.write_text(text)
    made = subprocess.run([scrontab, table], env=environment, capture_output=True, text=True)
    listed = ask(environment, scrontab, "-l")
    show(
        "scheduled",
        "scrontab",
        "taken" if listed == text.strip() else made.stdout + made.stderr,
        listed == text.strip(),
    )

    def passes() -> list[int]:
        """How many checkpoints each pass has evaluated."""
        return [int(n) for n in re.findall(r"(\d+) evaluated", log.read_text())] if log.is_file() else []

    try:
        launching.wait_for(lambda: passes() == [0], "first pass", 600)
        tiny_model(run / "export")
        launching.wait_for(lambda: 1 in passes(), "evaluation", 600)
        results = passes()
        launching.wait_for(lambda: len(passes()) > len(results), "pass after it", 600)
        once = sum(passes()) == 1 and json.loads((run / "eval/watch/done/watched.json").read_text())
        good = bool(once) and once["state"] == "evaluated"
        words = f"evaluated {passes()} of one export" if good else log.read_text()[-1500:]
    except AssertionError as error:
        output = log.read_text()[-1500:] if log.is_file() else "no output"
        words, good = f"{error}\n{output}\n{ask(environment, 'scontrol', 'show', 'job')}", False
    show("scheduled", "a pass every minute", words, good)
    ask(environment, scrontab, "-r")
