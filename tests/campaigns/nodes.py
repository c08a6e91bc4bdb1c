"""A cluster of many nodes on one machine, in which one is slow, one hangs, and some die.

Every node is a network namespace on a bridge, with a name, a torchrun and one rank (tests/helpers/nodes.py).
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from emo.pipeline.control.heartbeat import read_ranks
from emo.pipeline.control.run_dir import EXPORT, LAUNCHES, read_metrics, read_records
from tests.campaigns.campaign import Campaign, call
from tests.conftest import REPO
from tests.helpers import launching
from tests.helpers.launching import losses, wait_for

BRIDGE, NETWORK, PORT = "emo-nodes", "10.78.0", 29500
WINDOW = 6  # steps between two records
PATIENCE = 3600.0  # seconds


def inside(host: str, command: list[str]) -> list[str]:
    """Return a command that runs another command in a namespace, with its name as the hostname."""
    names = ["unshare", "--uts", "sh", "-c", f'hostname {host}; exec "$@"', "sh"]
    return ["ip", "netns", "exec", host, *names, *command]


def kill(host: str, word: bytes = b"") -> None:
    """Kill the processes in a namespace whose command line contains `word`."""
    listed = subprocess.run(["ip", "netns", "pids", host], capture_output=True, text=True).stdout
    for pid in listed.split():
        with contextlib.suppress(OSError):
            if word in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(int(pid), signal.SIGKILL)


class Cluster:
    """Nodes on a bridge, and a directory for the files of their runs."""

    def __init__(self, directory: Path, count: int) -> None:
        """count: number of nodes that train. There is also a spare."""
        self.directory, self.count = directory, count
        self.few = count - max(1, count // 8)
        self.late = max(0.7, count / 16)  # seconds, because steps of many ranks on few cores are long
        self.names = [f"node-{number:02d}" for number in range(count + 1)]
        train = {"max_steps": 4 * WINDOW, "save_steps": WINDOW - 1, "logging_steps": WINDOW}
        train |= {"global_batch_size": count, "micro_batch_size": 1, "timeout_minutes": max(1, count // 16)}
        self.recipe = str(launching.tiny_recipe(directory, **train))

    @contextlib.contextmanager
    def up(self) -> Iterator[None]:
        """Create the nodes' networks for the block."""
        try:
            call("ip", "link", "add", BRIDGE, "type", "bridge")
            call("ip", "link", "set", BRIDGE, "up")
            for number, name in enumerate(self.names):
                call("ip", "netns", "add", name)
                link = ("ip", "link", "add", f"{BRIDGE}{number}", "type", "veth", "peer", "name", "eth0")
                call(*link, "netns", name)
                call("ip", "link", "set", f"{BRIDGE}{number}", "master", BRIDGE, "up")
                call("ip", "-n", name, "addr", "add", f"{NETWORK}.{number + 1}/24", "dev", "eth0")
                for link_name in ("lo", "eth0"):
                    call("ip", "-n", name, "link", "set", link_name, "up")
            lines = (f"{NETWORK}.{number + 1} {name}\n" for number, name in enumerate(self.names))
            (self.directory / "hosts").write_text("127.0.0.1 localhost\n" + "".join(lines))
            yield
        finally:
            for number, name in enumerate(self.names):
                kill(name)
                for words in (["link", "del", f"{BRIDGE}{number}"], ["netns", "del", name]):
                    subprocess.run(["ip", *words], capture_output=True)
            subprocess.run(["ip", "link", "del", BRIDGE], capture_output=True)

    def start(self, name: str, names: list[str], *words: str, **environment: str) -> Torchruns:
        """Start torchrun with the same arguments on all nodes. The last node hosts the rendezvous."""
        logs = self.directory / f"{name}-logs"
        logs.mkdir()
        least = self.few if len(names) > self.count else self.count
        # many nodes on few cores send keep-alives late
        patience = f"--rdzv-conf=join_timeout={PATIENCE:.0f},keep_alive_max_attempt={max(3, self.count // 2)}"
        meeting = [patience, "--rdzv-backend=emo", f"--rdzv-endpoint={names[-1]}:{PORT}", "--rdzv-id=emo"]
        shape = [f"--nnodes={least}:{self.count}", "--nproc-per-node=1", *meeting]
        mount = f'mount --bind {self.directory}/hosts /etc/hosts; exec "$@"'
        command = ["unshare", "--mount", "sh", "-c", mount, "sh", sys.executable, "-m", "tests.helpers.nodes"]
        command += ["torchrun", ",".join(names), str(logs), *shape, *words]
        settings = {"GLOO_SOCKET_IFNAME": "eth0"}
        options = launching.PIPED | {"cwd": REPO, "env": launching.ENVIRONMENT | settings | environment}
        return Torchruns(logs, subprocess.Popen(command, **options))


class Torchruns:
    """The torchrun processes of a start, one per node."""

    def __init__(self, logs: Path, process: subprocess.Popen[str]) -> None:
        self.logs, self.process, self.began = logs, process, time.monotonic()

    def until(self, condition: Callable[[], object], event: str) -> None:
        """Wait for a condition. Fail if all processes end before."""
        wait_for(lambda: condition() or self.process.poll() is not None, event, PATIENCE)
        assert condition(), f"all ended without {event}: {self.said()[-3000:]}"

    def until_step(self, run_dir: Path, step: int) -> None:
        """Wait until a run has logged a step."""
        self.until(lambda: any(r["step"] >= step for r in read_metrics(run_dir)), f"step {step}")

    def wait(self) -> dict[str, int]:
        """Wait until all processes have ended, and return their exit codes by node."""
        output, _ = self.process.communicate(timeout=PATIENCE)
        return {name: int(code) for name, code in re.findall(r"^(\S+) (-?\d+)$", output, re.M)}

    def said(self) -> str:
        """Return the output of all processes and their ranks."""
        return "\n".join(path.read_text(errors="replace") for path in sorted(self.logs.glob("*.log")))


def nodes(directory: Path, show: Campaign, count: int) -> None:
    """Check a slow rank, preflight, and a run with a hung rank and with dead nodes."""
    cluster = Cluster(directory, count)
    with cluster.up():
        undisturbed = slow(cluster, show)
        preflight(cluster, show)
        faults(cluster, undisturbed, show)  # comes last, because dead nodes stay dead


def slow(cluster: Cluster, show: Campaign) -> Path:
    """Run to the end with a slow rank, check that it is named, and return the run directory."""
    run_dir, names = cluster.directory / "slow", cluster.names[: cluster.count]
    late = names[len(names) // 3]
    command = ("launch/continual.sh", cluster.recipe, f"output_dir={run_dir}", "--json")
    running = cluster.start("slow", names, *command, SLOW_HOST=late, SLOW_SECONDS=str(cluster.late))
    running.until_step(run_dir, 2 * WINDOW)
    top = call(sys.executable, "-m", "emo", "top", run_dir, cwd=REPO)
    codes, seconds = running.wait(), time.monotonic() - running.began
    # each window has a record, which is an event, and its warning comes before this event
    events = re.findall(r'"event": "(train)"|"text": "(rank \d+ on (\S+) is slow[^"]*)"', running.said())
    warnings, window = [], 1
    for record, text, host in events:
        window += record == "train"
        warnings += [(host, f"{text}, in window {window}", window <= 2)] if host else []
    good = [(host, soon) for host, _, soon in warnings] == [(late, True)] and not any(codes.values())
    words = "; ".join(text for _, text, _ in warnings)
    otherwise = f"{late} is late: {words}; {codes}; {running.said()[-2000:]}"
    show("nodes", "a slow rank", f"{words}; all took {seconds:.0f} s", good, otherwise)
    rows = [re.split("  +", line) for line in top.splitlines() if re.match(r"\d+ +node", line)]
    slowest = max(rows, key=lambda row: float(row[5].split()[0]))  # time of working alone
    good = slowest[1] == late and len(rows) == cluster.count
    show("nodes", "emo top", f"rank {slowest[0]} on {slowest[1]} works alone for {slowest[5]}", good, top)
    return run_dir


def faults(cluster: Cluster, undisturbed: Path, show: Campaign) -> None:
    """Check that a run with a spare node survives faults without being started again."""
    run_dir, names, count = cluster.directory / "faults", cluster.names, cluster.count
    command = ("--max-restarts=9", "launch/continual.sh", cluster.recipe, f"output_dir={run_dir}")
    running = cluster.start("faults", names, *command)

    def launches(event: str) -> list[dict[str, Any]]:
        return [r for r in read_records(run_dir / LAUNCHES)[0] if r["event"] == event]

    def trained(step: int) -> dict[int, dict[str, Any]]:
        running.until_step(run_dir, step)
        return read_ranks(run_dir)

    def again(launch: int) -> str:
        began = time.monotonic()
        running.until(lambda: len(launches("begin")) >= launch, f"launch {launch}")
        return f"trains again after {time.monotonic() - began:.0f} s"

    def die(hosts: list[str]) -> None:
        for host in hosts:
            call("ip", "-n", host, "link", "set", "eth0", "down")  # first, to hide the kill
            kill(host)

    def finding(case: str, words: str, good: bool) -> None:
        show("nodes", case, words, good, f"{words}; {launches('end')}; {running.said()[-2000:]}")

    hung = trained(WINDOW)[count // 2]
    os.kill(hung["pid"], signal.SIGSTOP)
    back = again(2)
    reason = launches("end")[0]["reason"] or ""
    culprit = f"late: rank {hung['rank']} on {hung['host']} (training); others waited in "
    finding("a hung rank", f"{reason.partition('; ')[2]}; {back}", culprit in reason)

    ranks = trained(2 * WINDOW)
    first, spare = ranks[0]["host"], set(names) - {state["host"] for state in ranks.values()}
    die([first])
    back = again(3)
    ranks = trained(3 * WINDOW)
    hosts = [state["host"] for state in ranks.values()]
    words = f"{first}, which had rank 0, is replaced by {', '.join(spare)}; {back}"
    finding("a dead node, and a spare", words, {*hosts, first} == {*names} and first not in hosts)

    gone = [host for host in hosts if host != names[-1]][1::8][: count - cluster.few]
    die(gone)
    back = again(4)
    codes, begun = running.wait(), launches("begin")
    sizes = [record["ranks"] for record in begun]
    words = f"{len(gone)} of {count} are gone: launches on {sizes} ranks, batch {begun[-1]['batch']}; {back}"
    good = sizes == [count] * 3 + [cluster.few] and {record["batch"] for record in begun} == {count}
    finding("dead nodes without a spare", words, good and {codes[h] for h in names if codes[h] >= 0} == {0})

    expected, actual = losses(undisturbed), losses(run_dir)
    same = actual[:2] == expected[:2]  # on the same number of ranks
    apart = max(abs(np.subtract(a, b)).max() for a, b in zip(actual, expected, strict=True))
    before, after = (load_file(path / EXPORT / "model.safetensors") for path in (undisturbed, run_dir))
    off = max(abs(before[name] - after[name]).max() for name in before)
    words = f"losses {'equal' if same else 'NOT equal'}, on fewer nodes within {apart:.1g}"
    words += f"; weights within {off:.1g}"
    finding("the same batches in the same order", words, same and apart < 1e-5 and off < 1e-5)


def preflight(cluster: Cluster, show: Campaign) -> None:
    """Check that preflight names a bad node."""
    names = cluster.names[: cluster.count]
    bad = names[len(names) // 2]
    command = ("emo/__main__.py", "preflight", cluster.recipe, f"output_dir={cluster.directory / 'none'}")
    running = cluster.start(
        "preflight", names, *command, SLOW_HOST=bad, SLOW_SECONDS=str(cluster.late), COLUMNS="200"
    )
    running.wait()
    seconds, output = time.monotonic() - running.began, running.said()
    unfit = re.findall("^unfit: (.*)$", output, re.M)
    good = len(unfit) == 1 and bad in unfit[0].split(",")  # on shared cores, more nodes may be slow
    show(
        "nodes",
        "preflight with a bad node",
        f"{bad} is bad; unfit: {unfit}; {seconds:.0f} s",
        good,
        output[-3000:],
    )
