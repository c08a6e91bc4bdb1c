"""Run the launchers on two hosts, on many nodes and on a Slurm cluster, all on one machine.

    python -m tests.campaigns.cluster [--parts hosts nodes slurm scheduled kubernetes] [--nodes 32]

Needs root and Debian's packages.

hosts       Two network namespaces have an address, a name and an sshd each. pdsh, torchrun and DeepSpeed
            without ssh start a run on them, which must give the losses of the run on one host. A remote rank
            is killed. Preflight checks both hosts.
nodes       --nodes network namespaces on a bridge have a torchrun and a rank each. The run must name a slow
            rank and a hung rank. A spare replaces a dead node. Without a spare the run continues on fewer
            nodes. Preflight must name a bad node.
slurm       A controller, a daemon and munge make a cluster of this machine. launch/slurm/train.sbatch gets
            its warning signal, saves, is queued again, and resumes.
scheduled   Evaluation on that cluster, as a job that depends on a training job, and as a line of scrontab.
kubernetes  launch/k8s, as kustomize renders it, must match the schemas of several Kubernetes versions.

Prints a table and exits with code 1 if something fails. A part that cannot run is skipped with the reason.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from emo.pipeline.control.run_dir import read_metrics
from tests.campaigns.campaign import Campaign, call, can_install, conduct
from tests.campaigns.kubernetes import kubernetes
from tests.campaigns.nodes import inside, kill, nodes
from tests.campaigns.soak import undisturbed
from tests.conftest import REPO
from tests.helpers import launching
from tests.helpers.evaluating import tiny_model, write_tasks
from tests.helpers.launching import losses, wait_for, wait_for_step

HOSTS = {"emo-a": "10.77.0.1", "emo-b": "10.77.0.2"}
SSH = ["iproute2", "openssh-server", "openssh-client", "pdsh"]
SLURM = ["slurmctld", "slurmd", "slurm-client", "munge"]
LONG = ("train.max_steps=200000", "train.lr_scheduler_type=constant")
OVER = re.compile("JobState=(COMPLETED|FAILED|CANCELLED|TIMEOUT|NODE_FAIL|OUT_OF_MEMORY)")
Environment = dict[str, str]


# --- two hosts --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def two_hosts(directory: Path) -> Iterator[Environment]:
    """Connect two namespaces, start an sshd in each, and yield the environment in which `ssh` finds them."""
    servers = []
    try:
        for name in HOSTS:
            call("ip", "netns", "add", name)
        a, b = HOSTS
        call("ip", "link", "add", "eth0", "netns", a, "type", "veth", "peer", "name", "eth0", "netns", b)
        key = directory / "key"
        call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key)
        entries = "127.0.0.1 localhost\n" + "".join(f"{ip} {name}\n" for name, ip in HOSTS.items())
        Path("/run/sshd").mkdir(exist_ok=True)
        for name, ip in HOSTS.items():
            call("ip", "-n", name, "addr", "add", f"{ip}/24", "dev", "eth0")
            for link in ("lo", "eth0"):
                call("ip", "-n", name, "link", "set", link, "up")
            etc = Path("/etc/netns") / name
            etc.mkdir(parents=True, exist_ok=True)
            (etc / "hosts").write_text(entries)
            settings = {"HostKey": key, "AuthorizedKeysFile": f"{key}.pub", "PermitRootLogin": "yes"}
            settings |= {"UsePAM": "no", "StrictModes": "no", "PidFile": "none", "AcceptEnv": "*"}
            settings["ListenAddress"] = ip
            config = directory / f"sshd-{name}"
            config.write_text("".join(f"{option} {value}\n" for option, value in settings.items()))
            servers.append(subprocess.Popen(inside(name, ["/usr/sbin/sshd", "-D", "-f", str(config)])))
        wrapper = directory / "bin" / "ssh"
        wrapper.parent.mkdir()
        trusting = "-o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR"
        wrapper.write_text(f'#!/bin/sh\nexec /usr/bin/ssh -i {key} {trusting} "$@"\n')
        wrapper.chmod(0o755)
        everywhere = launching.CHANGES | {"GLOO_SOCKET_IFNAME": "eth0"}
        everywhere |= {"PATH": f"{wrapper.parent}:{launching.ENVIRONMENT['PATH']}"}
        # DeepSpeed passes this environment to other hosts, as docs/how-to/multi-gpu.md describes
        environment = directory / "deepspeed_env"
        environment.write_text("".join(f"{key}={value}\n" for key, value in everywhere.items()))
        (directory / "hostfile").write_text("".join(f"{name} slots=1\n" for name in HOSTS))
        time.sleep(1)
        yield os.environ | everywhere | {"DS_ENV_FILE": str(environment), "PDSH_RCMD_TYPE": "ssh"}
    finally:
        for server in servers:
            server.terminate()
        for name in HOSTS:
            kill(name)
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
            shutil.rmtree(Path("/etc/netns") / name, ignore_errors=True)


def start(environment: Environment, *commands: list[str]) -> list[subprocess.Popen[str]]:
    """Start one command on each host. A single command runs on the first host."""
    options = launching.PIPED | {"cwd": REPO, "env": environment}
    return [subprocess.Popen(inside(h, c), **options) for h, c in zip(HOSTS, commands, strict=False)]


def finish(processes: list[subprocess.Popen[str]], timeout: float = 240) -> tuple[list[int], str]:
    """Return the exit codes and all output. A process that exceeds `timeout` is killed, with code -9."""
    output = ""
    for process in processes:
        try:
            output += process.communicate(timeout=timeout)[0]
        except subprocess.TimeoutExpired:
            process.kill()
            output += process.communicate()[0]
    return [process.returncode for process in processes], output


def hosts(directory: Path, show: Campaign) -> None:
    """Compare each way to start on two hosts with one host, run preflight, and kill a remote rank."""
    recipe = launching.tiny_recipe(directory)
    expected = undisturbed(recipe, directory / "one")
    address, port = HOSTS["emo-a"], "29511"
    script = ["launch/continual.sh", str(recipe)]
    deepspeed = [str(launching.BIN / "deepspeed"), "--hostfile", str(directory / "hostfile")]
    meeting = ["--master_addr", address, "--master_port", port]
    pdsh = [*deepspeed, "--launcher", "pdsh", *meeting]
    torchrun = [str(launching.BIN / "torchrun"), "--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d"]
    torchrun += [f"--rdzv-endpoint={address}:{port}", "--rdzv-id=emo"]
    ways = {
        "deepspeed --hostfile (pdsh)": [pdsh],
        "torchrun, c10d rendezvous": [[*torchrun, f"--local-addr={ip}"] for ip in HOSTS.values()],
        "deepspeed --no_ssh": [[*deepspeed, "--no_ssh", f"--node_rank={i}", *meeting] for i in range(2)],
    }
    with two_hosts(directory) as environment:
        for number, (way, starts) in enumerate(ways.items()):
            run_dir = directory / f"two-{number}"
            commands = ([*words, *script, f"output_dir={run_dir}"] for words in starts)
            codes, output = finish(start(environment, *commands))
            good = not any(codes) and losses(run_dir) == expected
            otherwise = f"exit codes {codes}: {output[-600:]}"
            show("hosts", way, "losses equal those of one host", good, otherwise)
        command = [*pdsh, "--module", "emo", "preflight", str(recipe), f"output_dir={directory / 'one'}"]
        codes, output = finish(start(environment, command))
        good = all(word in output for word in (*HOSTS, "2 ranks", "all-reduce")) and codes == [0]
        show("hosts", "preflight on both", "both seen", good, output[-600:])

        run_dir = directory / "lost"
        command = [*pdsh, *script, f"output_dir={run_dir}", "train.max_steps=3000", "train.save_steps=2"]
        command.append("train.lr_scheduler_type=constant")
        processes = start(environment, command)
        wait_for_step(run_dir, 5)
        kill("emo-b", b"--local_rank=")
        begun = time.monotonic()
        codes, output = finish(processes, 90)
        ended = codes[0] not in (0, -9) and "lost another rank" in output
        words = f"all ended after {time.monotonic() - begun:.0f} s"
        show("hosts", "remote rank killed", words, ended, output[-600:])
        step = int(read_metrics(run_dir)[-1]["step"])
        processes = start(environment, command)
        wait_for_step(run_dir, step + 3)
        (run_dir / "STOP").touch()
        codes, output = finish(processes, 90)
        good = codes == [75] and "resumed from" in output
        show("hosts", "the same command, then STOP", "resumed; exit code 75", good, output[-600:])


# --- Slurm ------------------------------------------------------------------------------------------------

# One setting per word. The node claims to have two GPUs.
SETTINGS = """
ClusterName=emo SlurmctldHost={host}(127.0.0.1) SlurmUser=root SlurmdUser=root AuthType=auth/munge
AuthInfo=socket={directory}/munge.socket StateSaveLocation={directory} SlurmdSpoolDir={directory}/spool
SlurmctldPidFile={directory}/ctld.pid SlurmdPidFile={directory}/d.pid SlurmctldPort=16817 SlurmdPort=16818
ProctrackType=proctrack/linuxproc TaskPlugin=task/none SelectType=select/cons_tres
SelectTypeParameters=CR_CPU ReturnToService=2 SwitchType=switch/none MpiDefault=none GresTypes=gpu KillWait=30
SchedulerParameters=sched_interval=2 ScronParameters=enable
"""
NODES = """
NodeName={host} NodeAddr=127.0.0.1 CPUs={cores} RealMemory=4000 Gres=gpu:2 State=UNKNOWN
PartitionName=test Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


@contextlib.contextmanager
def slurm_cluster(directory: Path) -> Iterator[Environment]:
    """Run a Slurm controller and daemon for this machine."""
    (directory / "spool").mkdir(parents=True)
    text = "\n".join(SETTINGS.split()) + NODES
    config = directory / "slurm.conf"
    config.write_text(text.format(host=call("hostname", "-s"), directory=directory, cores=os.cpu_count()))
    (directory / "gres.conf").write_text("Name=gpu File=/dev/null\nName=gpu File=/dev/zero\n")
    (directory / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=yes\n")
    key = directory / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    for folder in (directory, directory.parent):
        folder.chmod(0o755)
    environment = launching.ENVIRONMENT | {"SLURM_CONF": str(config)}
    munge = ["munged", "-F", "--force", f"--key-file={key}", f"--log-file={directory}/munge.log"]
    munge += [f"--{kind}={directory}/munge.{kind}" for kind in ("socket", "pid-file", "seed-file")]
    services = []
    try:
        for command in (munge, ["slurmctld", "-D"], ["slurmd", "-D"]):
            log = (directory / f"{command[0]}.out").open("w")
            services.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
            time.sleep(2)
        sinfo = ("sinfo", "-h", "-o", "%t")
        wait_for(lambda: "idle" in ask(environment, *sinfo), f"idle node; see {directory}", 60)
        yield environment
    finally:
        subprocess.run(["scancel", "-u", "root"], env=environment, capture_output=True)
        time.sleep(1)
        for service in reversed(services):
            service.terminate()
            service.wait(30)


def ask(environment: Environment, *command: str | Path) -> str:
    return subprocess.run(command, env=environment, capture_output=True, text=True, cwd=REPO).stdout.strip()


def tail(log: Path) -> str:
    return log.read_text("utf-8")[-1500:] if log.is_file() else "no output"


def evaluated(run_dir: Path) -> bool:
    """Return whether a run's export has been evaluated."""
    done = run_dir / "eval" / "watch" / "done" / f"{run_dir.name}.json"
    return done.is_file() and json.loads(done.read_text())["state"] == "evaluated"


class Job:
    """A job, or all jobs of an array, with the history of states that the scheduler reported."""

    def __init__(self, environment: Environment, log: Path, number: str) -> None:
        self.environment, self.log, self.id = environment, log, number
        self.began = time.monotonic()
        self.history: list[str] = []

    @staticmethod
    def submit(environment: Environment, log: Path, *command: str | Path) -> Job:
        return Job(environment, log, ask(environment, "sbatch", "--parsable", f"--output={log}", *command))

    def wait(self, until: Callable[[str], object] = lambda _: False, timeout: float = 900) -> str:
        """Return the job's state once `until` accepts it, the job has ended, or the time is up."""
        deadline, before = time.monotonic() + timeout, ""
        while True:
            state = ask(self.environment, "scontrol", "show", "job", self.id)
            words = " ".join(re.findall(r"(?:JobState|Reason|Restarts|ExitCode)=\S+", state))
            if words != before:
                self.history.append(f"{time.monotonic() - self.began:.0f} s: {words}")
            before, over = words, 0 < state.count("JobState=") == len(OVER.findall(state))
            if until(state) or over or time.monotonic() > deadline:
                return state
            if "Reason=BeginTime" in state:  # Slurm holds a requeued job for two minutes
                time.sleep(5)
                ask(self.environment, "scontrol", "update", f"jobid={self.id}", "StartTime=now")
            time.sleep(0.5)

    def story(self) -> str:
        return f"{tail(self.log)}\n" + "\n".join(self.history)

    def cancel(self) -> None:
        ask(self.environment, "scancel", self.id)
        self.wait(timeout=120)


def train(environment: Environment, run_dir: Path, *extra: str) -> Job:
    """Submit train.sbatch. `extra` contains Slurm options (with dashes) and overrides of the recipe."""
    shape = ["--nodes=1", "--ntasks-per-node=2", "--gpus-per-node=2", "--cpus-per-task=1", "--mem=2000"]
    shape += [option for option in extra if option.startswith("--")]
    overrides = [option for option in extra if not option.startswith("--")]
    command = ["continual", str(run_dir.parent / "recipe.yaml"), f"output_dir={run_dir}", *overrides]
    return Job.submit(
        environment, run_dir.with_suffix(".slurm"), *shape, "launch/slurm/train.sbatch", *command
    )


def slurm(directory: Path, show: Campaign) -> None:
    """Check a complete run of train.sbatch, the cores of a rank, the warning signal, and a mistake."""
    expected = undisturbed(launching.tiny_recipe(directory), directory / "plain")
    with slurm_cluster(directory / "slurm") as environment:
        job = train(environment, directory / "by-slurm", "train.save_steps=3")
        good = "COMPLETED" in job.wait() and losses(directory / "by-slurm") == expected
        show("slurm", "a whole run", "losses equal", good, job.story())

        # One rank requests all cores of the node. The step that srun starts must have them.
        cores = os.cpu_count() or 1
        shape = ("--ntasks-per-node=1", f"--cpus-per-task={cores}", "--gpus-per-node=1")
        job = train(environment, directory / "cores", *shape, *LONG)
        step = ("scontrol", "show", "step", f"{job.id}.0")
        job.wait(lambda _: "CPUs=" in ask(environment, *step), 120)
        match = re.search(r"CPUs=(\d+) Tasks=(\d+)", ask(environment, *step))
        each = int(match[1]) // int(match[2]) if match else 0
        words = f"{each} of {cores} asked for" if match else job.story()
        show("slurm", "cores of each rank", words, each == cores)
        job.cancel()

        # The limit is three minutes, with a warning one minute before, which may come a minute early. If the
        # run is still starting, it also exits with code 75, but only a later launch can resume.
        job = train(environment, directory / "warned", *LONG, "--time=3", "--signal=USR1@60")
        state = job.wait(lambda state: "Restarts=0" not in state)
        good = "exit code 75" in tail(job.log) and "Restarts=1" in state
        show("slurm", "warned before the time limit", "ended with 75, queued again", good, job.story())
        job.wait(lambda _: "resumed from" in tail(job.log))
        good = "resumed from" in tail(job.log)
        show("slurm", "a later life", "resumed from the checkpoint", good, job.story())
        job.cancel()

        job = train(environment, directory / "mistake", "train.learning_rate=-1")
        state = job.wait()
        good = all(words in state for words in ("FAILED", "ExitCode=2:0", "Restarts=0"))
        show("slurm", "a mistake is not tried again", "exit code 2", good, job.story())


# --- evaluation by Slurm ----------------------------------------------------------------------------------


def scheduled(directory: Path, show: Campaign) -> None:
    """Run evaluate.sbatch as a job that waits for a training job, and evaluate.scron as a crontab line."""
    launching.tiny_recipe(directory)
    data = write_tasks(directory / "tasks", ["sst2"], train=20, test=8)
    with slurm_cluster(directory / "slurm") as environment:
        environment |= {"EVAL_CACHE": str(directory / "cache")}
        after_training(environment, directory, data, show)
        by_crontab(environment, directory, data, show)


def after_training(environment: Environment, directory: Path, data: Path, show: Campaign) -> None:
    """Check that an export is evaluated after its run, and that the job is cancelled if the run fails."""
    longer = "model.architecture.max_position_embeddings=1024"  # long enough for demonstrations
    for name, extra, expected, words in (
        ("good", longer, "COMPLETED", "waited, then evaluated the export"),
        ("bad", "train.learning_rate=-1", "CANCELLED", "cancelled when the training had failed"),
    ):
        run_dir = directory / name
        training, log = train(environment, run_dir, extra), run_dir.with_suffix(".evaluation")
        shape = (f"--dependency=afterok:{training.id}", "--cpus-per-task=1", "--mem-per-cpu=1000")
        command = ("launch/slurm/evaluate.sbatch", run_dir, data, "--tasks", "sst2")
        waiting = Job.submit(environment, log, *shape, *command)
        waits = "Reason=Dependency" in ask(environment, "scontrol", "show", "job", waiting.id)
        training.wait()
        good = waits and f"JobState={expected}" in waiting.wait()
        good = good and evaluated(run_dir) == (name == "good")
        otherwise = f"{training.story()}\n{waiting.story()}"
        show("scheduled", f"a job after a training: {name}", words, good, otherwise)


def by_crontab(environment: Environment, directory: Path, data: Path, show: Campaign) -> None:
    """Check three passes of the crontab line: without an export, with a new one, and with an old one."""
    file, run = REPO / "launch/slurm/evaluate.scron", directory / "watched"
    run.mkdir()
    text = file.read_text()
    if shutil.which("scrontab"):
        answer = ask(environment, "scrontab", file)
        show("scheduled", "scrontab", "taken", ask(environment, "scrontab", "-l") == text.strip(), answer)
        ask(environment, "scrontab", "-r")
    else:
        show("scheduled", "scrontab", "skipped: this Slurm has none", True)
    settings = re.findall("^#SCRON (--(?!output).*)", text, re.M)
    settings += [f"--chdir={REPO}", "--cpus-per-task=1", "--mem-per-cpu=1000M"]
    command = text.splitlines()[-1].removeprefix("*/20 * * * * ")
    command = command.replace("runs/emo /data/nlu", f"{run} {data} --tasks sst2")
    passes, stories = [], ""
    for number in range(3):
        log = directory / f"pass-{number}.log"
        job = Job.submit(environment, log, *settings, f"--wrap={command}")
        job.wait()
        passes += re.findall(r"(\d+) evaluated", tail(job.log))
        stories += job.story()
        if number == 0:
            tiny_model(run / "export")
    good = passes == ["0", "1", "0"] and evaluated(run)
    show("scheduled", "a pass every minute", f"evaluated {passes} of one export", good, stories)


PARTS: dict[str, tuple[Callable[..., None], list[str]]] = {
    "hosts": (hosts, SSH),
    "nodes": (nodes, ["iproute2"]),
    "slurm": (slurm, SLURM),
    "scheduled": (scheduled, SLURM),
    "kubernetes": (kubernetes, []),
}


def cluster(directory: Path, args: argparse.Namespace, show: Campaign) -> None:
    for part in args.parts:
        run, packages = PARTS[part]
        if not packages or can_install(show, part, packages):
            (directory / part).mkdir()
            run(directory / part, show, **({"count": args.nodes} if run is nodes else {}))


if __name__ == "__main__":
    sys.exit(conduct("cluster", cluster, __doc__, parts=[*PARTS], nodes=32))
