"""Two hosts and a Slurm cluster on one machine: the launchers, really run. Needs root and Debian's packages.

    python -m tests.campaigns.cluster [--parts hosts slurm scheduled kubernetes]

hosts       two network namespaces with an address, a name and an sshd each. A ZeRO-3 run over them by pdsh,
            by torchrun and by DeepSpeed without ssh; each must give the losses of the run on one host. A
            remote rank is killed; preflight looks at both hosts.
slurm       controller, daemon and munge for a cluster of this one machine; launch/slurm/train.sbatch gets its
            warning signal, saves, is queued again, and resumes.
scheduled   evaluation on that Slurm: a job that depends on a training, and a line of scrontab.
kubernetes  launch/k8s, as kustomize renders it, against the schemas of several Kubernetes versions.

Prints a table and exits 1 when something fails. Where it cannot run it says why and exits 0.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from emo.pipeline.run_dir import read_metrics
from tests.campaigns.campaign import Campaign, call, can_install, options
from tests.campaigns.kubernetes import kubernetes
from tests.conftest import REPO
from tests.helpers import launching
from tests.helpers.evaluating import tiny_model, write_tasks
from tests.helpers.launching import losses, wait_for_step

HOSTS = {"emo-a": "10.77.0.1", "emo-b": "10.77.0.2"}
SLURM = ["slurmctld", "slurmd", "slurm-client", "munge"]
LONG = ("train.max_steps=200000", "train.lr_scheduler_type=constant")
LISTS = Path("/etc/apt")  # where this machine's package lists come from
OVER = re.compile("JobState=(COMPLETED|FAILED|CANCELLED|TIMEOUT|NODE_FAIL|OUT_OF_MEMORY)")
Parts = dict[str, tuple[Callable[[Path, Campaign], None], list[str]]]


@contextlib.contextmanager
def two_hosts(directory: Path) -> Iterator[dict[str, str]]:
    """Two namespaces joined by a cable, an sshd in each; the environment in which `ssh` finds them."""
    servers = []
    try:
        for name in HOSTS:
            call("ip", "netns", "add", name)
        a, b = HOSTS
        call("ip", "link", "add", "eth0", "netns", a, "type", "veth", "peer", "name", "eth0", "netns", b)
        key = directory / "key"
        call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key)
        entries = "127.0.0.1 localhost\n" + "".join(f"{ip} {name}\n" for name, ip in HOSTS.items())
        for name, ip in HOSTS.items():
            call("ip", "-n", name, "addr", "add", f"{ip}/24", "dev", "eth0")
            for link in ("lo", "eth0"):
                call("ip", "-n", name, "link", "set", link, "up")
            etc = Path("/etc/netns") / name
            etc.mkdir(parents=True, exist_ok=True)
            (etc / "hosts").write_text(entries)
            config = directory / f"sshd-{name}"
            config.write_text(
                f"HostKey {key}\nAuthorizedKeysFile {key}.pub\nPermitRootLogin yes\nUsePAM no\n"
                f"StrictModes no\nPidFile none\nListenAddress {ip}\nAcceptEnv *\n"
            )
            Path("/run/sshd").mkdir(exist_ok=True)
            servers.append(subprocess.Popen(inside(name, ["/usr/sbin/sshd", "-D", "-f", str(config)])))
        wrapper = directory / "bin" / "ssh"
        wrapper.parent.mkdir()
        trusting = "-o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR"
        wrapper.write_text(f'#!/bin/sh\nexec /usr/bin/ssh -i {key} {trusting} "$@"\n')
        wrapper.chmod(0o755)
        everywhere = launching.CHANGES | {"GLOO_SOCKET_IFNAME": "eth0"}
        everywhere |= {"PATH": f"{wrapper.parent}:{launching.ENVIRONMENT['PATH']}"}
        # what other hosts get reaches them by this file (README: .deepspeed_env)
        environment = directory / "deepspeed_env"
        environment.write_text("".join(f"{key}={value}\n" for key, value in everywhere.items()))
        (directory / "hostfile").write_text("".join(f"{name} slots=1\n" for name in HOSTS))
        yield os.environ | everywhere | {"DS_ENV_FILE": str(environment), "PDSH_RCMD_TYPE": "ssh"}
    finally:
        for server in servers:
            server.terminate()
        for name in HOSTS:
            _kill(name)
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
            shutil.rmtree(Path("/etc/netns") / name, ignore_errors=True)


def _kill(host: str, word: bytes = b"") -> None:
    listed = subprocess.run(["ip", "netns", "pids", host], capture_output=True, text=True).stdout
    for pid in listed.split():
        with contextlib.suppress(OSError):
            if word in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(int(pid), signal.SIGKILL)


def inside(host: str, command: list[str]) -> list[str]:
    names = ["unshare", "--uts", "sh", "-c", f'hostname {host}; exec "$@"', "sh"]
    return ["ip", "netns", "exec", host, *names, *command]


def run_on(
    hosts: list[str], commands: list[list[str]], environment: dict[str, str], timeout: float = 240
) -> Callable[[], tuple[list[int], str]]:
    """Start a command on each host; the function that is returned waits for exit codes and all output.

    Whatever still runs after `timeout` is killed and shows as -9.
    """
    processes = [
        subprocess.Popen(inside(host, command), cwd=REPO, env=environment, **launching.PIPED)
        for host, command in zip(hosts, commands, strict=True)
    ]

    def finish() -> tuple[list[int], str]:
        output = ""
        for process in processes:
            try:
                output += process.communicate(timeout=timeout)[0]
            except subprocess.TimeoutExpired:
                process.kill()
                output += process.communicate()[0]
        return [process.returncode for process in processes], output

    return finish


def hosts(directory: Path, show: Campaign) -> None:
    """Every way to start on two hosts, against one; preflight; the loss of a host."""
    recipe = launching.tiny_recipe(directory)
    done = launching.run(2, str(recipe), f"output_dir={directory / 'one'}")
    assert done.returncode == 0, done.stdout
    expected = losses(directory / "one")
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
        time.sleep(1)
        for number, (way, starts) in enumerate(ways.items()):
            run_dir = directory / f"two-{number}"
            commands = [[*start, *script, f"output_dir={run_dir}"] for start in starts]
            codes, output = run_on(list(HOSTS)[: len(starts)], commands, environment)()
            good = not any(codes) and losses(run_dir) == expected
            otherwise = f"exit codes {codes}: {output[-600:]}"
            show("hosts", way, "losses equal those of one host", good, otherwise)
        command = [*pdsh, "--module", "emo", "preflight", str(recipe), f"output_dir={directory / 'one'}"]
        codes, output = run_on(["emo-a"], [command], environment)()
        seen = all(word in output for word in (*HOSTS, "2 ranks", "all-reduce")) and codes == [0]
        show("hosts", "preflight on both", "both seen", seen, output[-600:])

        run_dir = directory / "lost"
        command = [*pdsh, *script, f"output_dir={run_dir}", "train.max_steps=3000", "train.save_steps=2"]
        command.append("train.lr_scheduler_type=constant")
        finish = run_on(["emo-a"], [command], environment, timeout=90)
        wait_for_step(run_dir, 5)
        _kill("emo-b", b"--local_rank=")
        begun = time.monotonic()
        codes, output = finish()
        ended = codes[0] not in (0, -9) and "lost another rank" in output
        words = f"all ended after {time.monotonic() - begun:.0f} s"
        show("hosts", "remote rank killed", words, ended, output[-600:])
        step = int(read_metrics(run_dir)[-1]["step"])
        finish = run_on(["emo-a"], [command], environment, timeout=90)
        wait_for_step(run_dir, step + 3)
        (run_dir / "STOP").touch()
        codes, output = finish()
        good = codes == [75] and "resumed from" in output
        show("hosts", "the same command, then STOP", "resumed; exit code 75", good, output[-600:])


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


def main() -> int:
    parts: Parts = {
        "hosts": (hosts, ["iproute2", "openssh-server", "openssh-client", "pdsh"]),
        "slurm": (slurm, SLURM),
        "scheduled": (scheduled, SLURM),
        "kubernetes": (kubernetes, []),
    }
    args = options(__doc__, parts).parse_args()
    show = Campaign("cluster")
    for part in args.parts:
        run, packages = parts[part]
        if packages and not can_install(show, part, packages):
            continue
        with tempfile.TemporaryDirectory() as directory:
            run(Path(directory), show)
    return show.finish(vars(args))


if __name__ == "__main__":
    sys.exit(main())
