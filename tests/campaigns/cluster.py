"""Two hosts and a Slurm cluster on one machine: the launchers, really run. Needs root and Debian's packages.

    python -m tests.campaigns.cluster [--parts hosts slurm kubernetes]

hosts       two network namespaces with an address, a name and an sshd each. A ZeRO-3 run over them by pdsh,
            by torchrun and by DeepSpeed without ssh; each must give the losses of the run on one host. A
            remote rank is killed; preflight looks at both hosts.
slurm       controller, daemon and munge for a cluster of this one machine; launch/slurm/train.sbatch gets its
            warning signal, saves, is queued again, and goes on.
kubernetes  launch/k8s/*.yaml against the schemas of several Kubernetes versions.

Prints a table and exits 1 when something fails. Where it cannot run it says why and exits 0.
"""

from __future__ import annotations

import argparse
import contextlib
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

import yaml

from pipeline.run_dir import read_metrics
from tests.campaigns.campaign import Campaign
from tests.conftest import REPO
from tests.helpers import launching
from tests.helpers.launching import Losses, losses, wait_for_step

HOSTS = {"emo-a": "10.77.0.1", "emo-b": "10.77.0.2"}
PACKAGES = {
    "hosts": ["iproute2", "openssh-server", "openssh-client", "pdsh"],
    "slurm": ["slurmctld", "slurmd", "slurm-client", "munge"],
    "kubernetes": [],
}
SCHEMAS, VERSIONS = "kubernetes-validate==1.37.0", ("1.29", "1.32")


def install(packages: list[str]) -> None:
    """Install what is missing, without starting any service."""
    missing = [p for p in packages if subprocess.run(["dpkg", "-s", p], capture_output=True).returncode]
    if not missing:
        return
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
    for command in (["update", "-qq"], ["install", "-y", "-qq", "--no-install-recommends", *missing]):
        subprocess.run(["apt-get", *command], env=environment, check=True, stdout=subprocess.DEVNULL)


def call(*command: str | Path) -> str:
    return subprocess.run(list(map(str, command)), check=True, capture_output=True, text=True).stdout


# --- two hosts --------------------------------------------------------------------------------------------


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
        options = "-o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR"
        wrapper.write_text(f'#!/bin/sh\nexec /usr/bin/ssh -i {key} {options} "$@"\n')
        wrapper.chmod(0o755)
        everywhere = {
            "DS_ACCELERATOR": "cpu",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "PYTHONUNBUFFERED": "1",
            "GLOO_SOCKET_IFNAME": "eth0",
            "PATH": f"{wrapper.parent}:{launching.ENVIRONMENT['PATH']}",
        }
        # what other hosts get reaches them by this file (README: .deepspeed_env)
        environment = directory / "deepspeed_env"
        environment.write_text("".join(f"{key}={value}\n" for key, value in everywhere.items()))
        (directory / "hostfile").write_text("".join(f"{name} slots=1\n" for name in HOSTS))
        yield os.environ | everywhere | {"DS_ENV_FILE": str(environment), "PDSH_RCMD_TYPE": "ssh"}
    finally:
        for server in servers:
            server.terminate()
        for name in HOSTS:
            for pid in subprocess.run(
                ["ip", "netns", "pids", name], capture_output=True, text=True
            ).stdout.split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
            shutil.rmtree(Path("/etc/netns") / name, ignore_errors=True)


def inside(host: str, command: list[str]) -> list[str]:
    """`command` on one of the two hosts."""
    named = ["unshare", "--uts", "sh", "-c", f'hostname {host}; exec "$@"', "sh"]
    return ["ip", "netns", "exec", host, *named, *command]


def start_on(
    hosts: list[str], commands: list[list[str]], environment: dict[str, str]
) -> list[subprocess.Popen]:
    return [
        subprocess.Popen(
            inside(host, command),
            cwd=REPO,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for host, command in zip(hosts, commands, strict=True)
    ]


def finish(processes: list[subprocess.Popen], timeout: float = 240) -> tuple[list[int], str]:
    """Exit codes and all output; whatever still runs after `timeout` is killed and shows as -9."""
    output = ""
    for process in processes:
        try:
            output += process.communicate(timeout=timeout)[0]
        except subprocess.TimeoutExpired:
            process.kill()
            output += process.communicate()[0]
    return [process.returncode for process in processes], output


def hosts(directory: Path, show: Campaign) -> None:
    """Every way to start on two hosts, against one."""
    recipe = launching.tiny_recipe(directory)
    done = launching.run(2, str(recipe), f"run_dir={directory / 'one'}")
    assert done.returncode == 0, done.stdout
    expected = losses(directory / "one")
    address, port = HOSTS["emo-a"], "29511"
    script = ["launch/continual.sh", str(recipe)]
    deepspeed = [str(launching.BIN / "deepspeed"), "--hostfile", str(directory / "hostfile")]
    meeting = ["--master_addr", address, "--master_port", port]
    torchrun = [str(launching.BIN / "torchrun"), "--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d"]
    torchrun += [f"--rdzv-endpoint={address}:{port}", "--rdzv-id=emo"]
    local = [[*torchrun, f"--local-addr={ip}"] for ip in HOSTS.values()]
    without_ssh = [[*deepspeed, "--no_ssh", f"--node_rank={i}", *meeting] for i in range(2)]
    ways = {
        "deepspeed --hostfile (pdsh)": (["emo-a"], [[*deepspeed, "--launcher", "pdsh", *meeting]]),
        "torchrun, c10d rendezvous": (list(HOSTS), local),
        "deepspeed --no_ssh": (list(HOSTS), without_ssh),
    }
    with two_hosts(directory) as environment:
        time.sleep(1)
        for number, (way, (where, starts)) in enumerate(ways.items()):
            run_dir = directory / f"two-{number}"
            commands = [[*start, *script, f"run_dir={run_dir}"] for start in starts]
            codes, output = finish(start_on(where, commands, environment))
            _compare(show, way, codes, output, losses(run_dir), expected)
        command = [
            *ways["deepspeed --hostfile (pdsh)"][1][0],
            "--module",
            "pipeline",
            "preflight",
            str(recipe),
        ]
        command.append(f"run_dir={directory / 'one'}")
        codes, output = finish(start_on(["emo-a"], [command], environment))
        seen = all(name in output for name in HOSTS) and "2 ranks" in output and "all-reduce" in output
        show("hosts", "preflight on both", "both seen" if seen else output[-600:], seen and codes == [0])
        _lose_a_host(directory, recipe, ways, environment, show)


def _compare(
    show: Campaign, way: str, codes: list[int], output: str, found: Losses, expected: Losses
) -> None:
    good = not any(codes) and found == expected
    words = "losses equal those of one host" if good else f"exit codes {codes}: {output[-600:]}"
    show("hosts", way, words, good)


def _lose_a_host(
    directory: Path, recipe: Path, ways: dict, environment: dict[str, str], show: Campaign
) -> None:
    """Kill the remote rank of a pdsh run: all end soon, and the same command goes on."""
    run_dir = directory / "lost"
    where, (start,) = ways["deepspeed --hostfile (pdsh)"]
    more = [f"run_dir={run_dir}", "train.steps=3000", "train.save_every=2", "train.schedule=constant"]
    command = [*start, "launch/continual.sh", str(recipe), *more]
    processes = start_on(where, [command], environment)
    wait_for_step(run_dir, 5)
    remote = call("ip", "netns", "pids", "emo-b").split()
    for pid in remote:
        with contextlib.suppress(OSError):
            if b"--local_rank=" in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(int(pid), signal.SIGKILL)
    begun = time.monotonic()
    codes, output = finish(processes, timeout=90)
    took = time.monotonic() - begun
    ended = codes[0] not in (0, -9) and "lost another rank" in output
    show("hosts", "remote rank killed", f"all ended after {took:.0f} s" if ended else output[-600:], ended)
    step = int(read_metrics(run_dir)[-1]["step"])
    processes = start_on(where, [command], environment)
    wait_for_step(run_dir, step + 3)
    (run_dir / "STOP").touch()
    codes, output = finish(processes, timeout=90)
    good = codes == [75] and "resumed from" in output
    show("hosts", "the same command, then STOP", "went on; exit code 75" if good else output[-600:], good)


# --- Slurm ------------------------------------------------------------------------------------------------


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
        while "idle" not in _slurm(environment, "sinfo", "-h", "-o", "%t"):
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


def _slurm(environment: dict[str, str], *command: str) -> str:
    return subprocess.run(command, env=environment, capture_output=True, text=True, cwd=REPO).stdout.strip()


def slurm(directory: Path, show: Campaign) -> None:
    """train.sbatch: the warning before the time limit, the queue again, the end, and a mistake."""
    recipe = launching.tiny_recipe(directory)
    done = launching.run(2, str(recipe), f"run_dir={directory / 'plain'}")
    assert done.returncode == 0, done.stdout
    home = directory / "slurm"
    home.mkdir()
    shape = ["--nodes=1", "--ntasks-per-node=2", "--gpus-per-node=2", "--cpus-per-task=1", "--mem=2000"]
    with slurm_cluster(home) as environment:

        def submit(run_dir: Path, *options: str, slurm_options: tuple[str, ...] = ()) -> tuple[str, Path]:
            log = home / f"{run_dir.name}.log"
            command = ["sbatch", "--parsable", *shape, *slurm_options, f"--output={log}"]
            command += ["launch/slurm/train.sbatch", "continual", str(recipe), f"run_dir={run_dir}", *options]
            return _slurm(environment, *command), log

        def wait(job: str, until: Callable[[str], bool], timeout: float = 300) -> str:
            deadline = time.monotonic() + timeout
            last = ""
            while True:
                state = _slurm(environment, "scontrol", "show", "job", job)
                now = " ".join(re.findall(r"(?:JobState|Reason|Restarts|StartTime)=\S+", state))
                if now != last:
                    print(
                        time.strftime("%X"),
                        now,
                        _slurm(environment, "sinfo", "-h", "-o", "%t %E"),
                        flush=True,
                    )
                last = now
                if until(state) or time.monotonic() > deadline:
                    return state
                if "Reason=BeginTime" in state:  # Slurm holds a requeued job for two minutes
                    _slurm(environment, "scontrol", "update", f"jobid={job}", "StartTime=now")
                time.sleep(0.5)

        over = re.compile("JobState=(COMPLETED|FAILED|CANCELLED|TIMEOUT)")
        job, log = submit(directory / "by-slurm", "train.save_every=3")
        state = wait(job, lambda s: bool(over.search(s)))
        good = "COMPLETED" in state and losses(directory / "by-slurm") == losses(directory / "plain")
        show("slurm", "a whole run", "losses equal" if good else _tail(log) + state[-300:], good)

        run_dir = directory / "warned"
        more = ("train.steps=20000", "train.schedule=constant")
        # two minutes, warned 100 s before: within the first 20 to 80 seconds
        job, log = submit(run_dir, *more, slurm_options=("--time=2", "--signal=USR1@100"))
        state = wait(job, lambda s: "Restarts=1" in s and "JobState=RUNNING" in s)
        again = "exit code 75" in _tail(log) and "Restarts=1" in state
        show("slurm", "warned before the time limit", "saved, queued again" if again else _tail(log), again)
        deadline = time.monotonic() + 90
        while "resumed from" not in _tail(log) and time.monotonic() < deadline:
            time.sleep(0.5)
        went_on = "resumed from" in _tail(log)
        show("slurm", "the second life", "went on from the checkpoint" if went_on else _tail(log), went_on)
        _slurm(environment, "scancel", job)
        wait(job, lambda s: bool(over.search(s)), 90)

        job, log = submit(directory / "mistake", "train.lr=-1")
        state = wait(job, lambda s: bool(over.search(s)))
        good = "FAILED" in state and "ExitCode=2:0" in state and "Restarts=0" in state
        show("slurm", "a mistake is not tried again", "exit code 2" if good else _tail(log) + state, good)


def _tail(log: Path) -> str:
    return log.read_text()[-1500:] if log.is_file() else "no output"


# --- Kubernetes -------------------------------------------------------------------------------------------


def kubernetes(directory: Path, show: Campaign) -> None:
    """Every document of launch/k8s against the published schemas."""
    command = [sys.executable, "-m", "pip", "install", "-q", "--target", str(directory / "peer"), SCHEMAS]
    if subprocess.run(command, capture_output=True).returncode:
        show("kubernetes", SCHEMAS, "skipped: cannot be installed here", True)
        return
    sys.path.insert(0, str(directory / "peer"))
    import kubernetes_validate

    for path in sorted((REPO / "launch" / "k8s").glob("*.yaml")):
        for document in yaml.safe_load_all(path.read_text()):
            for version in VERSIONS:
                what = f"{path.name}: {document['kind']} {document['metadata']['name']}, {version}"
                try:
                    kubernetes_validate.validate(document, version, strict=True)
                    show("kubernetes", what, "valid", True)
                except Exception as error:
                    show("kubernetes", what, " ".join(str(error).split())[:300], False)


def main() -> int:
    """Run the parts; 0 when all is well or nothing can run here."""
    parts: dict[str, Callable[[Path, Campaign], None]] = {
        "hosts": hosts,
        "slurm": slurm,
        "kubernetes": kubernetes,
    }
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", default=list(parts), choices=list(parts))
    args = parser.parse_args()
    show = Campaign("cluster")
    for part in args.parts:
        if part != "kubernetes" and (os.geteuid() != 0 or shutil.which("apt-get") is None):
            show(part, "everything", "skipped: needs root on Debian", True)
            continue
        install(PACKAGES[part])
        with tempfile.TemporaryDirectory() as directory:
            parts[part](Path(directory), show)
    return show.finish(vars(args))


if __name__ == "__main__":
    sys.exit(main())
