"""Check that jobs with failing servers and killed processes prepare the same bytes.

    PYTHONPATH=DIRECTORY python -m tests.campaigns.stores [--parts posix s3 slurm ray] [--kills 9]

DIRECTORY contains s3fs and ray, and also moto to test its server. Missing packages are skipped. Each part
kills --kills processes at random moments.

posix Two commands share a directory, and are killed and started again.
s3    Two commands on separate hosts share a bucket. Its server works, fails, drops connections, lists slowly,
      or is killed and started again. Then the commands are killed and started again. moto's server is another
      implementation. A third host trains from the bucket.
slurm An array of `emo prepare --on slurm`, of which a job is queued again while it runs.
ray   Local clusters have 2 and 4 workers, some of which are killed. A cluster has two nodes, one of which is
      killed. Ray uses a bucket.

Prints a table and exits with code 1 if something fails.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import psutil
import yaml

from tests.campaigns.campaign import Campaign, can_install, conduct
from tests.campaigns.cluster import SLURM, Job, ask, slurm_cluster, tail
from tests.conftest import REPO
from tests.helpers import launching
from tests.helpers.corpus import texts, tiny_tokenizer, write_jsonl
from tests.helpers.s3_server import S3Server, s3_server

UNITS = 12
SMALL_UNITS = """
import runpy
import emo.common.packages
from emo.data_prep.selection import row_units, scan
scan.GROUP_ROWS, row_units.UNIT_ROWS = 200, 400
runpy.run_module("emo", run_name="__main__", alter_sys=True)
"""
Environment = dict[str, str]


def has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def write_recipe(directory: Path) -> Path:
    """Write sources and a recipe of two splits. Each source is one unit, because it has a limit."""
    for i in range(UNITS):
        write_jsonl(directory / f"{i}.jsonl", texts(400, seed=i, sentences=20))
    sources = [{"files": f"{i}.jsonl", "limit": 350} for i in range(UNITS)]
    data: dict[str, Any] = {"root": str(directory), "tokenizer": str(tiny_tokenizer()), "sources": sources}
    data |= {"dir": str(directory / "none"), "sequence_len": 64, "shards": 6, "validation_fraction": 0.1}
    data |= {"limit_tokens": 200_000}
    recipe = directory / "recipe.yaml"
    recipe.write_text(yaml.safe_dump({"data": data | {"dedup": "near"}}))
    return recipe


def start(recipe: Path, target: str, environment: Environment, *options: str) -> subprocess.Popen[str]:
    """Start `emo prepare`. Jobs with --shard use small units, so that they share the selection."""
    program = ["-c", SMALL_UNITS] if "--shard" in options else ["-m", "emo"]
    command = [sys.executable, *program, "prepare", str(recipe), f"data.dir={target}", *options]
    out = (recipe.parent / "log").open("a")
    piped: dict[str, Any] = {"text": True, "stdout": out, "stderr": out}
    return subprocess.Popen(command, cwd=REPO, env=os.environ | environment, **piped)


def content(directory: Path) -> dict[str, bytes]:
    """Return the files of all splits of a directory by their relative path."""
    paths = (p for p in directory.rglob("*") if p.is_file() and p.relative_to(directory).parts[0] != ".new")
    files = {p.relative_to(directory).as_posix(): p for p in paths}
    return {name: p.read_bytes() for name, p in files.items() if name.startswith(("train/", "validation/"))}


def fetched(directory: Path, target: str, environment: Environment) -> dict[str, bytes]:
    """Verify prepared data on a host without copies, and return the files that it copies from the store."""
    mirrors = directory / f"reader-{time.monotonic_ns()}"
    changes = environment | {"EMO_MIRRORS": str(mirrors)}
    command = [sys.executable, "-m", "emo", "verify", target]
    done = subprocess.run(command, cwd=REPO, env=os.environ | changes, capture_output=True, text=True)
    if done.returncode:
        print(done.stderr)
    return content(mirrors / target.replace("://", "/"))


def same(made: dict[str, bytes], expected: dict[str, bytes]) -> bool:
    """Return whether shards and manifests are the same. Notes are not copied to readers."""
    wanted = {n: c for n, c in expected.items() if n.endswith((".arrow", "manifest.json"))}
    return {n: made.get(n) for n in wanted} == wanted


# --- jobs -------------------------------------------------------------------------------------------------


def share(
    recipe: Path, target: str, environment: Environment, kills: int = 0, server: S3Server | None = None
) -> tuple[str, int, bool]:
    """Let two hosts share a preparation. Return a summary, the number of kills, and whether both succeeded.

    kills: number of commands to kill and start again. server: a server to kill and start again.
    """
    mirrors = [recipe.parent / f"host-{time.monotonic_ns()}-{i}" for i in range(2)]

    def begin(host: int) -> subprocess.Popen[str]:
        changes = environment | {"EMO_MIRRORS": str(mirrors[host])}
        return start(recipe, target, changes, "--shard", f"{host}/2", "--workers", "1")

    began = time.monotonic()
    jobs = [begin(host) for host in range(2)]
    killed = 0
    while killed < kills and None in [job.poll() for job in jobs]:
        time.sleep(random.uniform(4, 9))
        host = random.randrange(2)
        if jobs[host].poll() is None:
            jobs[host].kill()
            jobs[host].wait()
            killed += 1
            jobs[host] = begin(host)
    if server is not None:
        time.sleep(random.uniform(4, 9))
        server.kill()
        time.sleep(3)
        server.start()
    codes = [job.wait(900) for job in jobs]
    went = f"exit codes {codes}, {killed} killed, {time.monotonic() - began:.0f} s"
    return went, killed, not any(codes)


def repeat(kills: int, most: int, run: Callable[[int], int]) -> None:
    """Call `run` until `kills` processes are killed. It gets how many to kill, and returns how many were."""
    while kills > 0:
        kills -= max(1, run(min(most, kills)))


def prepare_alone(directory: Path) -> tuple[Path, dict[str, bytes]]:
    """Return a recipe, and the files that a single job prepares from it in a file system."""
    recipe = write_recipe(directory)
    assert start(recipe, str(directory / "alone"), {}).wait() == 0
    return recipe, content(directory / "alone")


def posix(directory: Path, args: argparse.Namespace, show: Campaign) -> None:
    recipe, expected = prepare_alone(directory)

    def run(kills: int) -> int:
        target = directory / f"shared-{time.monotonic_ns()}"
        went, killed, done = share(recipe, str(target), {}, kills)
        good = done and content(target) == expected
        show("posix", "jobs are killed", went, good, f"{went}; other bytes, or failed")
        return killed

    repeat(args.kills, 5, run)


# --- S3 ---------------------------------------------------------------------------------------------------


def s3(directory: Path, args: argparse.Namespace, show: Campaign) -> None:
    if not has("s3fs"):
        show("s3", "everything", "skipped: needs s3fs", True)
        return
    recipe, expected = prepare_alone(directory)

    def run(name: str, faults: tuple[float, ...], kills: int = 0, restart: bool = False) -> int:
        files = directory / f"s3-{time.monotonic_ns()}"
        with s3_server(files, launching.free_port(), *faults) as server:
            environment = server.environment
            restarted = server if restart else None
            went, killed, done = share(recipe, "s3://data/made", environment, kills, restarted)
            good = done and same(fetched(directory, "s3://data/made", environment), expected)
            show("s3", name, went, good, f"{went}; other bytes, or failed")
            if not faults:
                train(directory, environment, show)
        return killed

    run("a good server", ())
    run("5 % of requests fail", (0.05,))
    run("5 % of connections are dropped", (0.0, 0.05))
    run("listings take 1 s", (0.0, 0.0, 1.0))
    run("the server is killed and started again", (0.01, 0.01), restart=True)
    repeat(args.kills, 5, lambda kills: run("jobs are killed", (0.01, 0.01), kills))
    if not has("moto"):
        show("s3", "moto's server", "skipped: needs moto", True)
        return
    with moto() as environment:
        went, *_ = share(recipe, "s3://data/made", environment, 1)
        made = fetched(directory, "s3://data/made", environment)
        show("s3", "moto's server", went, same(made, expected), f"{went}; other bytes")


@contextlib.contextmanager
def moto() -> Iterator[Environment]:
    """Run moto's server with one bucket."""
    port = launching.free_port()
    command = [sys.executable, "-m", "moto.server", "-p", str(port)]
    server = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            with contextlib.suppress(OSError):
                urlopen(Request(f"{url}/data", method="PUT"), timeout=5).close()
                break
            time.sleep(0.1)
        keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
        yield keys | {"AWS_ENDPOINT_URL": url, "AWS_DEFAULT_REGION": "us-east-1"}
    finally:
        server.kill()


def train(directory: Path, environment: Environment, show: Campaign) -> None:
    """Compare the losses of a run from the bucket, on a host without copies, with a run from a disk."""
    directory /= "training"
    directory.mkdir()
    recipe = launching.tiny_recipe(directory)
    runs = {"disk": (), "bucket": ("data.dir=s3://data/tiny",)}
    results = {}
    for name, overrides in runs.items():
        run_dir = directory / f"trained-{name}"
        changes = environment | {"EMO_MIRRORS": str(directory / "prepares")}
        if overrides:
            command = [sys.executable, "-m", "emo", "prepare", str(recipe), *overrides]
            subprocess.run(command, cwd=REPO, env=os.environ | changes, check=True, capture_output=True)
            changes["EMO_MIRRORS"] = str(directory / "trains")
        options = [f"output_dir={run_dir}", "train.max_steps=3", *overrides]
        command = launching.train_command(2, str(recipe), *options)
        output, _ = launching.popen(command, **changes).communicate(timeout=600)
        if not launching.losses(run_dir):
            show("s3", f"training from a {name}", output[-1000:], False)
        results[name] = launching.losses(run_dir)
    show("s3", "training from the bucket", "the same losses", results["disk"] == results["bucket"], "others")


# --- Ray --------------------------------------------------------------------------------------------------


def kill_workers(job: subprocess.Popen[str], count: int) -> int:
    """Kill up to `count` Ray tasks at random moments until the job ends, and return the number of kills."""
    killed = 0
    while job.poll() is None:
        processes = [p for p in psutil.process_iter(["cmdline"]) if _is_task(p)] if killed < count else []
        if processes and random.random() < 0.3:
            with contextlib.suppress(psutil.Error):
                random.choice(processes).send_signal(signal.SIGKILL)
                killed += 1
        time.sleep(0.05)
    return killed


def _is_task(process: psutil.Process) -> bool:
    return (process.info["cmdline"] or [""])[0].startswith("ray::_make_")


def ray(directory: Path, args: argparse.Namespace, show: Campaign) -> None:
    if not has("ray"):
        show("ray", "everything", "skipped: needs ray", True)
        return
    recipe, expected = prepare_alone(directory)

    def run(workers: int, kills: int) -> int:
        target = directory / f"ray-{time.monotonic_ns()}"
        job = start(recipe, str(target), {}, "--on", "ray", "--workers", str(workers))
        killed = kill_workers(job, kills)
        good = job.wait(900) == 0 and content(target) == expected
        show("ray", f"{workers} workers", f"{killed} killed, the same bytes", good, "other bytes, or failed")
        return killed

    run(2, 0)
    repeat(args.kills, 10, lambda kills: run(4, kills))
    two_nodes(directory, recipe, expected, show)
    if has("s3fs"):
        with s3_server(directory / "s3-ray", launching.free_port(), 0.01, 0.01) as server:
            environment = server.environment | {"EMO_MIRRORS": str(directory / "ray-mirrors")}
            job = start(recipe, "s3://data/made", environment, "--on", "ray", "--workers", "2")
            killed = kill_workers(job, 1)
            good = job.wait(900) == 0 and same(fetched(directory, "s3://data/made", environment), expected)
            show("ray", "a bucket", f"{killed} killed, the same bytes", good, "other bytes, or failed")


def two_nodes(directory: Path, recipe: Path, expected: dict[str, bytes], show: Campaign) -> None:
    """Run a cluster of two nodes on this machine, and kill the second once the first parts exist."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        node = cluster.add_node(num_cpus=1)
        cluster.wait_for_nodes()
        target = directory / "two-nodes"
        job = start(recipe, str(target), {"RAY_ADDRESS": cluster.address}, "--on", "ray")
        while not list((target / ".new/scan").glob("0*.parquet")) and job.poll() is None:
            time.sleep(0.01)
        at = len(list((target / ".new/scan").glob("0*.parquet")))
        cluster.remove_node(node, allow_graceful=False)
        good = job.wait(900) == 0 and content(target) == expected
        case = f"two nodes, one killed after {at} of {UNITS} units"
        show("ray", case, "the same bytes", good, "other bytes, or failed")
    finally:
        cluster.shutdown()


# --- Slurm ------------------------------------------------------------------------------------------------


def slurm(directory: Path, args: argparse.Namespace, show: Campaign) -> None:
    if not can_install(show, "slurm", SLURM):
        return
    recipe, expected = prepare_alone(directory)
    target = directory / "by-slurm"
    with slurm_cluster(directory / "cluster") as environment:
        environment |= {"SBATCH_MEM_PER_NODE": "1000", "SBATCH_OUTPUT": f"{directory}/%j.log"}
        command = [sys.executable, "-m", "emo", "prepare", str(recipe), f"data.dir={target}"]
        command += ["--on", "slurm", "--jobs", "3", "--workers", "1"]
        said = ask(environment, *command)
        array, last = re.findall(r"job (\d+)", said)[:2]
        launching.wait_for(lambda: list((target / ".new/scan").glob("0*.parquet")), "part of the scan", 300)
        ask(environment, "scontrol", "requeue", f"{array}_0")
        jobs = [Job(environment, directory / f"{number}.log", number) for number in (array, last)]
        states = [job.wait() for job in jobs]
        again = states[0].count("Restarts=1")
        good = all("COMPLETED" in state for state in states) and content(target) == expected
        words = f"{again} queued again, the same bytes"
        logs = [tail(log) for log in directory.glob("*.log")]
        show("slurm", "three jobs", words, good and again == 1, "\n".join([said, *states, *logs]))


PARTS = {"posix": posix, "s3": s3, "slurm": slurm, "ray": ray}


def campaign(directory: Path, args: argparse.Namespace, show: Campaign) -> None:
    random.seed(args.seed)
    for part in args.parts:
        (directory / part).mkdir()
        PARTS[part](directory / part, args, show)


if __name__ == "__main__":
    sys.exit(conduct("stores", campaign, __doc__, parts=[*PARTS], kills=9, seed=0))
