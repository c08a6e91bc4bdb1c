"""The Slurm parts of the cluster campaign: controller, daemon and munge for a cluster of this one machine.

launch/slurm/train.sbatch gets its warning before the time limit, saves, is queued again, and resumes.
Evaluation is scheduled: as a job that depends on a training, and by Slurm's crontab.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.campaigns.campaign import Campaign, call
from tests.conftest import REPO
from tests.helpers import launching
from tests.helpers.evaluating import tiny_model, write_tasks
from tests.helpers.launching import losses

PACKAGES = ["slurmctld", "slurmd", "slurm-client", "munge"]
LONG = ("train.max_steps=200000", "train.lr_scheduler_type=constant")
LISTS = Path("/etc/apt")  # where this machine's package lists come from
OVER = re.compile("JobState=(COMPLETED|FAILED|CANCELLED|TIMEOUT|NODE_FAIL|OUT_OF_MEMORY)")


@contextlib.contextmanager
def slurm_cluster(directory: Path) -> Iterator[dict[str, str]]:
    """A controller and a daemon for this machine, which pretends to have two GPUs."""
    host = call("hostname", "-s")
    for name in ("state", "spool", "log"):
        (directory / name).mkdir(parents=True)
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
    munge = ["munged", "-F", "--force", f"--key-file={key}", f"--log-file={directory}/log/munge"]
    kinds = {"socket": "socket", "pid-file": "pid", "seed-file": "seed"}
    munge += [f"--{option}={directory}/munge.{kind}" for option, kind in kinds.items()]
    services = []
    try:
        for command in (munge, ["slurmctld", "-D"], ["slurmd", "-D"]):
            log = (directory / f"{command[0]}.out").open("w")
            services.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
            time.sleep(2)
        sinfo = ("sinfo", "-h", "-o", "%t")
        launching.wait_for(lambda: "idle" in ask(environment, *sinfo), f"idle node; see {directory}", 60)
        yield environment
    finally:
        subprocess.run(["scancel", "-u", "root"], env=environment, capture_output=True)
        time.sleep(1)
        for service in reversed(services):
            service.terminate()
            service.wait(30)


def ask(environment: dict[str, str], *command: str | Path) -> str:
    return subprocess.run(command, env=environment, capture_output=True, text=True, cwd=REPO).stdout.strip()


def tail(log: Path) -> str:
    return log.read_text("utf-8")[-1500:] if log.is_file() else "no output"


def state_of(environment: dict[str, str], job: str, timeout: float = 900) -> str:
    """Return what the scheduler says of a job, or of all jobs of an array, once over, or the time is up."""
    deadline = time.monotonic() + timeout
    while True:
        state = ask(environment, "scontrol", "show", "job", job)
        if 0 < state.count("JobState=") == len(OVER.findall(state)) or time.monotonic() > deadline:
            return state
        time.sleep(1)


class Job:
    """A job of train.sbatch under observation: what the scheduler said of it, in order."""

    SHAPE = ("--nodes=1", "--ntasks-per-node=2", "--gpus-per-node=2", "--cpus-per-task=1", "--mem=2000")

    def __init__(self, environment: dict[str, str], recipe: Path, name: str, *extra: str) -> None:
        """Submit the recipe; `extra` are options of Slurm (with dashes) and overrides of the recipe."""
        self.environment, self.run_dir = environment, recipe.parent / name
        self.log = self.run_dir.with_suffix(".slurm")
        options = [option for option in extra if option.startswith("--")]
        overrides = [option for option in extra if not option.startswith("--")]
        command = ["sbatch", "--parsable", *self.SHAPE, *options, f"--output={self.log}"]
        command += ["launch/slurm/train.sbatch", "continual", str(recipe), f"output_dir={self.run_dir}"]
        self.id = ask(environment, *command, *overrides)
        self.began = time.monotonic()
        self.history: list[str] = []

    def wait(self, until: Callable[[str], object] = lambda _: False, timeout: float = 900) -> str:
        """Return the job's state once `until` holds of it, or it is over, or the time is up."""
        deadline, held_since = time.monotonic() + timeout, None
        while True:
            state = ask(self.environment, "scontrol", "show", "job", self.id)
            words = " ".join(re.findall(r"(?:JobState|Reason|Restarts|ExitCode)=\S+", state))
            words += f" node: {ask(self.environment, 'sinfo', '-h', '-N', '-o', '%t (%E)')}"
            now = time.monotonic()
            if not self.history or self.history[-1].split(" s: ")[1] != words:
                self.history.append(f"{now - self.began:.0f} s: {words}")
            if until(state) or OVER.search(state) or now > deadline:
                return state
            # Slurm holds a requeued job for two minutes; a few seconds are enough here.
            held_since = (held_since or now) if "Reason=BeginTime" in state else None
            if held_since is not None and now - held_since > 5:
                ask(self.environment, "scontrol", "update", f"jobid={self.id}", "StartTime=now")
                held_since = None
            time.sleep(0.5)

    def story(self) -> str:
        return f"{tail(self.log)}\n" + "\n".join(self.history)

    def cancel(self) -> None:
        ask(self.environment, "scancel", self.id)
        self.wait(timeout=120)


def slurm(directory: Path, show: Campaign) -> None:
    """train.sbatch: cores, the warning before the time limit, the queue again, the end, and a mistake."""
    recipe = launching.tiny_recipe(directory)
    done = launching.run(2, str(recipe), f"output_dir={directory / 'plain'}")
    assert done.returncode == 0, done.stdout
    with slurm_cluster(directory / "slurm") as environment:
        job = Job(environment, recipe, "by-slurm", "train.save_steps=3")
        good = "COMPLETED" in job.wait() and losses(job.run_dir) == losses(directory / "plain")
        show("slurm", "a whole run", "losses equal", good, job.story())

        # One rank that asks for all cores of the node: the step that srun starts must have them.
        cores = os.cpu_count() or 1
        shape = ("--ntasks-per-node=1", f"--cpus-per-task={cores}", "--gpus-per-node=1")
        job = Job(environment, recipe, "cores", *shape, *LONG)
        step = ["scontrol", "show", "step", f"{job.id}.0"]
        job.wait(lambda _: "CPUs=" in ask(environment, *step), 120)
        match = re.search(r"CPUs=(\d+) Tasks=(\d+)", ask(environment, *step))
        each = int(match[1]) // int(match[2]) if match else 0
        words = f"{each} of {cores} asked for" if match else job.story()
        show("slurm", "cores of each rank", words, each == cores)
        job.cancel()

        # Three minutes, warned one minute before, which Slurm may do up to a minute early. A warning that
        # comes while the run is still starting is answered too, but then only a later life can resume.
        job = Job(environment, recipe, "warned", *LONG, "--time=3", "--signal=USR1@60")
        state = job.wait(lambda state: "Restarts=0" not in state)
        good = "exit code 75" in tail(job.log) and "Restarts=1" in state
        show("slurm", "warned before the time limit", "ended with 75, queued again", good, job.story())
        job.wait(lambda _: "resumed from" in tail(job.log))
        good = "resumed from" in tail(job.log)
        show("slurm", "a later life", "resumed from the checkpoint", good, job.story())
        job.cancel()

        job = Job(environment, recipe, "mistake", "train.learning_rate=-1")
        state = job.wait()
        good = "FAILED" in state and "ExitCode=2:0" in state and "Restarts=0" in state
        show("slurm", "a mistake is not tried again", "exit code 2", good, job.story())


def scheduled(directory: Path, show: Campaign) -> None:
    """evaluate.sbatch as a job that waits for a training, and evaluate.scron as a line of Slurm's crontab."""
    recipe = launching.tiny_recipe(directory)
    data = write_tasks(directory / "tasks", ["sst2"], train=20, test=8)
    with slurm_cluster(directory / "slurm") as environment:
        environment |= {"EVAL_CACHE": str(directory / "cache")}
        after_training(environment, recipe, data, show)
        by_crontab(environment, directory, data, show)


def after_training(environment: dict[str, str], recipe: Path, data: Path, show: Campaign) -> None:
    """The export of a run is evaluated when the run is finished; after a mistake nothing waits for ever."""
    longer = "model.architecture.max_position_embeddings=1024"  # room for demonstrations
    for name, extra, expected, words in (
        ("good", longer, "COMPLETED", "waited, then evaluated the export"),
        ("bad", "train.learning_rate=-1", "CANCELLED", "cancelled when the training had failed"),
    ):
        training, log = Job(environment, recipe, name, extra), recipe.parent / f"{name}.evaluation"
        command = ["sbatch", "--parsable", f"--dependency=afterok:{training.id}", f"--output={log}"]
        command += ["--cpus-per-task=1", "--mem-per-cpu=1000", "launch/slurm/evaluate.sbatch"]
        waiting = ask(environment, *command, training.run_dir, data, "--tasks", "sst2")
        waits = "Reason=Dependency" in ask(environment, "scontrol", "show", "job", waiting)
        training.wait()
        state = state_of(environment, waiting)
        done = training.run_dir / "eval" / "watch" / "done" / f"{name}.json"
        evaluated = done.is_file() and json.loads(done.read_text())["state"] == "evaluated"
        good = waits and f"JobState={expected}" in state and evaluated == (name == "good")
        otherwise = f"{training.story()}\n{state}\n{tail(log)}"
        show("scheduled", f"a job after a training: {name}", words, good, otherwise)


def by_crontab(environment: dict[str, str], directory: Path, data: Path, show: Campaign) -> None:
    """A pass every minute: one finds nothing, one finds an export, one finds it evaluated."""
    scrontab = shutil.which("scrontab") or _build_scrontab(directory / "scrontab")
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
    (directory / "table").write_text(text)
    made = subprocess.run([scrontab, directory / "table"], env=environment, capture_output=True, text=True)
    good = ask(environment, scrontab, "-l") == text.strip()
    show("scheduled", "scrontab", "taken", good, made.stdout + made.stderr)

    def passes() -> list[int]:
        """How many checkpoints each pass has evaluated."""
        return [int(n) for n in re.findall(r"(\d+) evaluated", log.read_text())] if log.is_file() else []

    try:
        launching.wait_for(lambda: passes() == [0], "first pass", 600)
        tiny_model(run / "export")
        launching.wait_for(lambda: 1 in passes(), "evaluation", 600)
        before = len(passes())
        launching.wait_for(lambda: len(passes()) > before, "pass after it", 600)
        done = json.loads((run / "eval/watch/done/watched.json").read_text())
        words, good = "", sum(passes()) == 1 and done["state"] == "evaluated"
    except AssertionError as error:
        words, good = f"{error}\n{ask(environment, 'scontrol', 'show', 'job')}\n", False
    results = f"evaluated {passes()} of one export"
    show("scheduled", "a pass every minute", results, good, words + tail(log))
    ask(environment, scrontab, "-r")


def _build_scrontab(directory: Path) -> str | None:
    """Compile the command, which Debian's Slurm lacks, from the installed version's sources (a minute).

    Returns None where that fails.
    """
    for folder in ("lists", "apt"):
        (directory / folder).mkdir(parents=True)
    for path in (*LISTS.glob("sources.list"), *LISTS.glob("sources.list.d/*")):
        if "/debian" in (text := path.read_text()):  # this machine's own lists, as lists of sources
            text = re.sub(r"^Types:.*$", "Types: deb-src", text, flags=re.MULTILINE)
            text = re.sub(r"^deb ", "deb-src ", text, flags=re.MULTILINE)
            (directory / "apt" / path.name).write_text(text)
    apt = ["apt-get", "-oDir::Etc::SourceList=/dev/null", f"-oDir::Etc::SourceParts={directory}/apt"]
    apt += [f"-oDir::State::Lists={directory}/lists", "-oAPT::Sandbox::User=root"]
    try:
        version = call("dpkg-query", "-W", "-f", "${source:Version}", "slurm-client")
        call(*apt, "update", cwd=directory)
        call(*apt, "source", "--download-only", f"slurm-wlm={version}", cwd=directory)
        call("tar", "-xf", next(directory.glob("*.orig.tar.*")), cwd=directory)
        source = next(path.parent for path in directory.glob("*/configure"))
        call("./configure", "--without-munge", "--disable-debug", cwd=source)
        here = source / "src" / "scrontab"
        for name in ("default_crontab", "usage"):
            as_object = ["-z", "noexecstack", "--format=binary", f"{name}.txt"]
            call("ld", "-r", "-o", f"{name}.o", *as_object, cwd=here)
        library = next(Path("/usr/lib").glob("*/slurm-wlm/libslurmfull.so"))
        linked = [str(library), f"-Wl,-rpath,{library.parent}", "-rdynamic"]
        files = sorted(path for kind in ("*.c", "*.o") for path in here.glob(kind))
        call("gcc", f"-I{source}", "-o", directory / "scrontab", *files, *linked)
    except (subprocess.CalledProcessError, FileNotFoundError, StopIteration) as error:
        print(error, str(getattr(error, "stderr", ""))[-600:])
        return None
    return str(directory / "scrontab")
