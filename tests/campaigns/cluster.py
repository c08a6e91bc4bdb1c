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
import os
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
from tests.campaigns.slurm import PACKAGES as SLURM
from tests.campaigns.slurm import scheduled, slurm
from tests.conftest import REPO
from tests.helpers import launching
from tests.helpers.launching import losses, wait_for_step

HOSTS = {"emo-a": "10.77.0.1", "emo-b": "10.77.0.2"}
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
        everywhere = {
            "GLOO_SOCKET_IFNAME": "eth0",
            "PATH": f"{wrapper.parent}:{launching.ENVIRONMENT['PATH']}",
        }
        everywhere = launching.CHANGES | everywhere
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
        command = [*pdsh, "--module", "pipeline", "preflight", str(recipe), f"output_dir={directory / 'one'}"]
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
