"""Build the image without Docker and run it without privileges. Needs root and Debian's packages.

    python -m tests.campaigns.image [--parts verbs cuda stops evaluation quickstart] [--torch-args TORCH_ARGS]

buildah builds the Dockerfile (chroot isolation) on a base made by debootstrap, with this machine's pip
configuration, which decides whether PyTorch is built for CUDA. podman then runs everything as an ordinary
user, with a read-only root file system, without capabilities and network, and with one volume.

verbs       the image's configuration, its subcommands, and an invalid one
cuda        imports and sizes, and the libraries if PyTorch is built for CUDA
stops       prepare, a run that is stopped, killed and resumed with the losses of an undisturbed run, health
evaluation  evaluate and watch, by a user that the image does not know
quickstart  raw text to report

Prints a table and exits with code 1 if something fails. If it cannot run, it is skipped with the reason.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.campaigns.campaign import Campaign, call, can_install, conduct
from tests.campaigns.cluster import evaluated
from tests.conftest import REPO
from tests.helpers.evaluating import tiny_model, write_tasks
from tests.helpers.launching import PIPED, losses, tiny_recipe, wait_for, wait_for_step

PACKAGES = ["debootstrap", "buildah", "podman", "runc"]
SUITE, NEEDED = "bookworm", 30  # Debian release as in the Dockerfile, GiB of free disk
UNKNOWN = 4321  # a user without an entry in the image
# A driver provides the first two. The others belong to unused features: cuFile over RDMA, and NVSHMEM over
# MPI, UCX, PMIx and libfabric.
ABSENT = {"libcuda.so.1", "libnvidia-ml.so.1", "librdmacm.so.1", "libucs.so.0", "libucp.so.0"}
ABSENT |= {"libpmix.so.2", "libfabric.so.1", "liboshmem.so.40", "libmpi.so.40"}
CONSTANT = "train.lr_scheduler_type=constant"
CONFINED = [
    *("--read-only", "--read-only-tmpfs=false", "--tmpfs", "/tmp:rw,exec,mode=1777", "--network", "none"),
    *("--cap-drop", "all", "--security-opt", "no-new-privileges", "--health-interval", "disable"),
    # podman's defaults are above the allowed limits
    *("--ulimit", "nofile=4096:4096", "--ulimit", "nproc=4096:4096"),
]


class Image:
    """The image and its containers. `directory` contains the storage and the volume."""

    NAME = "localhost/emo-test"

    def __init__(self, directory: Path) -> None:
        self.directory, self.volume = directory, directory / "volume"
        self.volume.mkdir()
        self.volume.chmod(0o777)
        self.storage = ["--root", str(directory / "storage"), "--runroot", str(directory / "run")]
        self.storage += ["--storage-driver", "overlay"]
        # podman logs an error if systemd cannot run health checks. runc works with both versions of cgroups.
        self.podman = ["podman", *self.storage, "--log-level", "fatal", "--runtime", "runc"]

    def ask(self, *arguments: str) -> str:
        return call(*self.podman, *arguments)

    def build(self, torch_args: str) -> None:
        base, secrets = self.directory / "base", self.directory / "pip"
        call("debootstrap", "--variant=minbase", SUITE, base)
        call("tar", "-C", base, "-cf", self.directory / "base.tar", ".")
        self.ask("import", "--quiet", str(self.directory / "base.tar"), "emo-base")
        command = ["buildah", *self.storage, "bud", "--isolation", "chroot", "--format", "docker"]
        command += [f"--volume={mount}:{mount}:ro" for mount in pip_configuration(secrets)]
        command += ["--secret", f"id=pip,src={secrets / 'pip.conf'}", "--tag", self.NAME]
        for setting in ("BASE=localhost/emo-base", f"TORCH_ARGS={torch_args}", "REVISION=tested"):
            command += ["--build-arg", setting]
        subprocess.run([*command, "."], cwd=REPO, check=True)

    def command(self, *arguments: str, user: int = 1001, options: tuple[str, ...] = ()) -> list[str]:
        where = ["--volume", f"{self.volume}:/emo/runs", "--user", f"{user}:{user}"]
        return [*self.podman, "run", "--rm", *CONFINED, *where, *options, self.NAME, *arguments]

    def run(self, *arguments: str, user: int = 1001, entry: str = "") -> tuple[int, str]:
        """Run a container and return its exit code and output. `entry` replaces the image's entry point."""
        options = ("--entrypoint", entry) if entry else ()
        done = subprocess.run(self.command(*arguments, user=user, options=options), **PIPED)
        return done.returncode, done.stdout

    def remove(self) -> None:
        for kind in ("rm", "rmi"):
            subprocess.run([*self.podman, kind, "--all", "--force"], capture_output=True)


def pip_configuration(directory: Path) -> list[Path]:
    """Write this machine's pip.conf, and return the directories that it needs under the same paths."""
    directory.mkdir()
    settings = {}
    for line in call(sys.executable, "-m", "pip", "config", "list").splitlines():
        name, _, value = line.partition("=")
        settings[name.rpartition(".")[2]] = str(ast.literal_eval(value))
    mounts = {Path(url).parent for url in re.findall(r"file://(\S+)", " ".join(settings.values()))}
    if Path(settings.get("find-links", "none")).is_dir():
        mounts.add(Path(settings["find-links"]))
    if "cert" in settings:  # copied, because the base has its own file at this path
        settings["cert"] = str(shutil.copy(settings["cert"], directory / "certificates"))
        mounts.add(directory)
    lines = [f"{key} = {value}\n" for key, value in settings.items()]
    (directory / "pip.conf").write_text("[global]\n" + "".join(lines))
    return sorted(mounts)


def verbs(image: Image, show: Campaign) -> None:
    """Check the image's configuration, its content and its subcommands."""
    inspected = json.loads(image.ask("image", "inspect", image.NAME))[0]
    config = inspected["Config"]
    labels = {key.rpartition(".")[2]: value for key, value in (config.get("Labels") or {}).items()}
    show("verbs", "size", f"{inspected['Size'] / 2**30:.2f} GiB", True)
    user = config.get("User")
    health = (config.get("Healthcheck") or inspected.get("Healthcheck") or {}).get("Test")
    show("verbs", "user, stop signal", f"{user}, {config.get('StopSignal')}", user == "1001")
    show("verbs", "health check", str(health), bool(health) and health[-1] == "health")
    show("verbs", "labels", ", ".join(sorted(labels)), labels.get("revision") == "tested")
    configured = (image.directory / "pip" / "pip.conf").read_text().splitlines()[1:]
    values = [line.partition(" = ")[2] for line in configured if "/" in line]
    _, inside = image.run("-c", "cat /etc/pip.conf; true", entry="sh")
    inside += image.ask("history", "--no-trunc", image.NAME) + json.dumps(inspected)
    remaining = [value for value in values if value in inside]
    words = f"{len(remaining)} of {len(values)} settings"
    show("verbs", "pip's configuration in the image", words, not remaining)
    code, out = image.run("-c", "id -u; touch /emo/x || touch /tmp/x", entry="sh")
    good = code == 0 and out.startswith("1001") and "Read-only file system" in out
    show("verbs", "who writes where", "1001; /emo is read only, /tmp is not", good, out)
    code, out = image.run("train")
    show("verbs", "a wrong verb", f"{code}: {out.strip()}", code == 2 and out.count("\n") == 1)
    for arguments in (["help"], ["plan", "launch/recipes/paper/llama-7b-wikitext103.yaml", "--help"]):
        code, out = image.run(*arguments)
        show("verbs", " ".join(arguments[:2]), out.strip().splitlines()[0], code == 0 and "usage" in out)


def cuda(image: Image, show: Campaign) -> None:
    """Check the content of a CUDA image as far as possible without a GPU."""
    code, out = image.run("-m", "tests.helpers.libraries", entry="python")
    if code:
        show("cuda", "imports", out[-800:], False)
        return
    info = json.loads(out.splitlines()[-1])
    show("cuda", "imports", f"torch {info['torch']}, triton, deepspeed, the rooms", True)
    bad = {name: why for name, why in info["verbs"].items() if why}
    show(
        "cuda",
        "InfiniBand's libraries",
        str(bad or f"{len(info['verbs'])} load"),
        not bad and len(info["verbs"]) > 2,
    )
    sizes = {name: f"{size / 2**30:.2f}" for name, size in info["sizes"].items()}
    show("cuda", "sizes", ", ".join(f"{name} {size}" for name, size in sizes.items()) + " GiB", True)
    if info["cuda"] is None:
        show("cuda", "CUDA", "skipped: pip's configuration here gives a PyTorch for CPUs", True)
        return
    needed = {name: users for name, users in info["missing"].items() if name not in ABSENT}
    absent = ", ".join(sorted(set(info["missing"]) & ABSENT))
    words = f"of {info['libraries']} all but {absent}"
    show("cuda", "libraries that ldd finds", words, not needed, str(needed))
    show("cuda", "NCCL, ptxas", f"{info['nccl']}, {info['ptxas']}", info["nccl"] > 0 and bool(info["ptxas"]))
    show("cuda", "not shown without a GPU", "driver, kernels, NCCL between GPUs, adapters", True)


class Training:
    def __init__(self, image: Image, run: str, *extra: str, hang_seconds: int = 600) -> None:
        self.image, self.name, self.run_dir = image, f"emo-test-{run}", image.volume / run
        self.log = image.directory / f"{run}.log"
        arguments = ("continual", "--num_gpus", "2", "--", "/emo/runs/recipe.yaml", CONSTANT, *extra)
        options = ("--name", self.name, "--env=OMP_NUM_THREADS=1", f"--env=HANG_SECONDS={hang_seconds}")
        command = image.command(*arguments, f"output_dir=/emo/runs/{run}", options=options)
        with self.log.open("a") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)

    def end(self, *command: str) -> int:
        """Run a podman command on the container, if any, and return the exit code once it has ended."""
        if command:
            self.image.ask(*command, self.name)
        return self.process.wait(600)

    def stop(self) -> int:
        return self.end("stop", "--time", "120")

    def healthy(self) -> bool:
        command = [*self.image.podman, "healthcheck", "run", self.name]
        return subprocess.run(command, capture_output=True).returncode == 0

    def last_step(self) -> int:
        return int(losses(self.run_dir)[-1][0])


def stops(image: Image, show: Campaign) -> None:
    """Prepare data, then stop, kill and finish a run, and check the health of a run."""
    host = image.directory / "recipe"
    host.mkdir()
    text = tiny_recipe(host).read_text()
    shutil.copy(host / "text.txt", image.volume)
    (image.volume / "recipe.yaml").write_text(text.replace(str(host), "/emo/runs"))
    code, out = image.run("prepare", "/emo/runs/recipe.yaml")
    show("stops", "prepare", out.strip().splitlines()[-1][:70], code == 0, out[-800:])
    long = ("train.max_steps=120", "train.save_steps=5")
    alone = Training(image, "alone", *long)
    show("stops", "a run left alone", "exit code 0", alone.end() == 0, alone.log.read_text()[-800:])

    run = Training(image, "disturbed", *long)
    wait_for_step(run.run_dir, 7)
    code = run.stop()
    show("stops", "podman stop", f"exit code {code}", code == 75)
    stopped = run.last_step()
    run = Training(image, "disturbed", *long)
    wait_for_step(run.run_dir, stopped + 6)
    code = run.end("kill", "--signal", "KILL")  # kills the container, as the kernel does when memory is full
    show("stops", "then killed", f"exit code {code} at step {run.last_step()}", code == 137)
    run = Training(image, "disturbed", *long)
    good = run.end() == 0 and losses(run.run_dir) == losses(alone.run_dir)
    output = run.log.read_text()
    good = good and output.count("resumed from") == 2
    words = "finished; losses equal those of the run left alone"
    show("stops", "the same command again", words, good, output[-800:])

    # A hung rank makes the container unhealthy. Once the rank continues, the container is healthy again.
    run = Training(image, "hangs", "train.max_steps=200000", "train.save_steps=100000", hang_seconds=15)
    wait_for_step(run.run_dir, 3)
    show("stops", "health of a run", "healthy", run.healthy())
    listed = image.ask("top", run.name, "hpid", "args").splitlines()[1:]
    ranks = [line for line in listed if "--local_rank=" in line and "launch.py" not in line]
    rank = int(ranks[-1].split()[0])
    os.kill(rank, signal.SIGSTOP)
    began = time.monotonic()
    wait_for(lambda: not run.healthy(), "bad health", 60)
    show("stops", "one rank hangs", f"unhealthy after {time.monotonic() - began:.0f} s", True)
    os.kill(rank, signal.SIGCONT)
    wait_for(run.healthy, "health", 60)
    code = run.stop()
    show("stops", "it goes on", f"healthy; stopped with {code}", code == 75)


def evaluation(image: Image, show: Campaign) -> None:
    """Evaluate a model and a run's export as an unknown user, and stop a watcher by SIGTERM."""
    run = image.volume / "evaluated"
    tiny_model(run / "export")
    write_tasks(image.volume / "tasks", ["sst2"], train=20, test=8)
    (image.volume / "empty").mkdir()
    for path in (image.volume, *image.volume.rglob("*")):
        os.chown(path, UNKNOWN, UNKNOWN)
    tasks = ("--data", "/emo/runs/tasks", "--tasks", "sst2")
    model = ("--model", "/emo/runs/evaluated/export", "--name", "tiny", "--output_path", "/emo/runs/results")
    code, out = image.run("evaluate", *model, *tasks, user=UNKNOWN)
    show("evaluation", "evaluate", "exit code 0", code == 0, out[-800:])
    code, out = image.run("watch", "/emo/runs/evaluated", "--once", *tasks, user=UNKNOWN)
    show("evaluation", "watch --once", "evaluated", code == 0 and evaluated(run), out[-800:])
    report = run / "eval" / "report.html"
    good = report.is_file() and report.stat().st_uid == UNKNOWN
    show("evaluation", "report.html", f"written by user {UNKNOWN}", good, out[-800:])
    options = ("--name", "emo-test-watch")
    waiting = subprocess.Popen(
        image.command("watch", "/emo/runs/empty", *tasks, user=UNKNOWN, options=options)
    )
    wait_for(lambda: "emo-test-watch" in image.ask("ps", "--format", "{{.Names}}"), "container")
    time.sleep(5)
    began = time.monotonic()
    image.ask("stop", "--time", "60", "emo-test-watch")
    took, code = time.monotonic() - began, waiting.wait(60)
    show("evaluation", "stop of a watcher", f"exit code {code} after {took:.0f} s", took < 30 and code != 137)


def quickstart(image: Image, show: Campaign) -> None:
    began = time.monotonic()
    code, out = image.run("quickstart", user=UNKNOWN)
    good = code == 0 and (image.volume / "quickstart" / "report.html").is_file()
    words = f"report.html after {(time.monotonic() - began) / 60:.1f} minutes"
    show("quickstart", "raw text to report", words, good, out[-1200:])


PARTS = {"verbs": verbs, "cuda": cuda, "stops": stops, "evaluation": evaluation, "quickstart": quickstart}


def run(directory: Path, args: argparse.Namespace, show: Campaign) -> None:
    free = shutil.disk_usage(directory).free / 2**30
    if free < NEEDED:
        show("image", "everything", f"skipped: needs {NEEDED} GiB of disk, {free:.0f} are free", True)
    elif can_install(show, "image", PACKAGES):
        image, began = Image(directory), time.monotonic()
        try:
            image.build(args.torch_args)
            show("image", "built", f"{(time.monotonic() - began) / 60:.1f} minutes", True)
            for part in args.parts:
                PARTS[part](image, show)
        finally:
            image.remove()


if __name__ == "__main__":
    sys.exit(conduct("image", run, __doc__, parts=[*PARTS], torch_args=""))
