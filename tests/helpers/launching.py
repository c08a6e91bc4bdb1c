"""Real runs for tests. They use a tiny prepared recipe and the product's launch command on CPU ranks."""

from __future__ import annotations

import contextlib
import functools
import gc
import multiprocessing
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from multiprocessing import forkserver
from pathlib import Path
from typing import IO, Any
from unittest import mock

import psutil
import yaml

from emo.data_prep.cli import main as prepare
from emo.pipeline.control.run_dir import read_metrics
from emo.pipeline.report import glossary
from tests.conftest import REPO
from tests.helpers.killing import wait_for

BIN = Path(sys.executable).parent
PATIENCE = 60  # seconds that other ranks have to end after one failed
CHANGES = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
ENVIRONMENT = os.environ | CHANGES | {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
PIPED: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}


RECIPE = """
data:
  {train_tokenizer: 384, sequence_len: 32, shards: 1, sources: [{files: text.txt, format: lines}],
   validation: [], validation_fraction: 0.1}
model:
  architecture:
    {model_type: llama, vocab_size: 384, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 1,
     num_attention_heads: 2, max_position_embeddings: 64}
  dtype: float32
objective: {name: emo}
train:
  {max_steps: 8, global_batch_size: 8, micro_batch_size: 4, learning_rate: 0.001, logging_steps: 1,
   eval_rows: 6}
"""


def tiny_recipe(
    directory: Path, sets: tuple[str, ...] = (), data: dict[str, Any] | None = None, **train: object
) -> Path:
    """Write the recipe of a tiny new LLaMA on simple sentences, prepare its data, and return its path.

    sets: names of validation sets. If empty, one is split off. data, train: settings that override the
    sections of RECIPE.
    """
    rng = random.Random(3)
    actors = ["man", "woman", "cat", "dog", "child", "king"]
    did = ["saw", "took", "lost", "ate"]
    objects = ["a fish", "the red ball", "it"]
    subjects = [(rng.choice(actors), rng.choice(did), rng.choice(objects)) for _ in range(600)]
    sentences = [f"The {a} {b} {c} on day {n}." for n, (a, b, c) in enumerate(subjects)]
    texts = [" ".join(sentences[i : i + 4]) for i in range(0, 600, 4)]
    (directory / "text.txt").write_text("\n".join(texts))
    recipe = yaml.safe_load(RECIPE) | {"output_dir": str(directory / "run")}
    recipe["data"] |= {"dir": str(directory / "data"), "root": str(directory)}
    for i, name in enumerate(sets):
        lines = [f"A {rng.choice(actors)} {rng.choice(did)} {n} of {name}." for n in range(20 + 20 * i)]
        (directory / f"{name}.txt").write_text("\n".join(lines))
    if sets:
        held_out = {name: [{"files": f"{name}.txt", "format": "lines"}] for name in sets}
        recipe["data"] |= {"validation": held_out, "validation_fraction": 0.0}
    recipe["data"] |= data or {}
    recipe["train"] |= train
    path = directory / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe, sort_keys=False))
    with contextlib.redirect_stdout(None):
        assert prepare(["prepare", str(path), "--workers", "1"]) == 0
    return path


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def launch_command(ranks: int, *arguments: str, script: str = "continual") -> list[str]:
    """Return the command `deepspeed launch/SCRIPT.sh ARGUMENTS` on `ranks` CPU ranks."""
    options = [f"--num_gpus={ranks}", f"--master_port={free_port()}"]
    return [str(BIN / "deepspeed"), *options, f"launch/{script}.sh", *arguments]


def train_command(ranks: int, *arguments: str) -> list[str]:
    """Return the command `emo train ARGUMENTS` on `ranks` CPU ranks."""
    options = [f"--num_gpus={ranks}", f"--master_port={free_port()}"]
    return [sys.executable, "-m", "emo", "train", *options, "--", *arguments]


def popen(
    command: list[str], stdout: int | IO[str] = subprocess.PIPE, **environment: str
) -> subprocess.Popen[str]:
    """Start a command in a separate process group, as a terminal does."""
    # children of a shell that runs the tests in the background ignore Ctrl-C
    options: dict[str, Any] = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}
    options |= PIPED | {"stdout": stdout, "start_new_session": True}
    return subprocess.Popen(command, cwd=REPO, env=ENVIRONMENT | environment, **options)


def start(ranks: int, *arguments: str) -> subprocess.Popen[str]:
    return popen(train_command(ranks, *arguments))


def run(ranks: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the launch command to its end. `.stdout` has both stdout and stderr."""
    command = launch_command(ranks, *arguments)
    return subprocess.run(command, cwd=REPO, env=ENVIRONMENT, timeout=600, **PIPED)


def run_alone(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the launch script as one process without the launcher, to reach its errors quickly."""
    return run_forked([{}], "launch/continual.sh", *arguments)


def run_ranks(
    *command: str, ranks: int = 2, timeout: float = 600, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run `python COMMAND` as the ranks of a group, without a launcher. See `run_forked`."""
    return run_forked(_group(environment, ranks), *command, timeout=timeout)


def kill_ranks(run_dir: Path, step: int, *command: str, ranks: int = 2) -> None:
    """Run `python COMMAND` as the ranks of a group, and kill them once a step is logged."""
    with tempfile.NamedTemporaryFile("w+", encoding="utf-8") as output:
        processes = _forked(_group({}, ranks), command, output.name)
        try:
            wait_for_step(run_dir, step)
        finally:
            for process in processes:
                process.kill()
                process.join()


def run_forked(
    environments: list[dict[str, str]], *command: str, timeout: float = 600
) -> subprocess.CompletedProcess[str]:
    """Run `python COMMAND` in each of `environments` at the same time, in separate processes.

    The processes are forked from one that has imported the libraries, because imports take most of a short
    run's time. The result has the exit code of the first process that fails and the output of all. Processes
    that still run PATIENCE seconds after a failure, or `timeout` seconds after the start, are killed.
    """
    with tempfile.NamedTemporaryFile("w+", encoding="utf-8") as output:
        processes = _forked(environments, command, output.name)
        code, end = 0, time.monotonic() + timeout
        while any(process.is_alive() for process in processes) and time.monotonic() < end:
            time.sleep(0.05)
            failed = next((process.exitcode for process in processes if process.exitcode), 0)
            if failed and not code:
                code, end = failed, min(end, time.monotonic() + PATIENCE)
        for process in processes:
            process.kill()
            process.join()
        code = code or next((process.exitcode for process in processes if process.exitcode), 0)
        return subprocess.CompletedProcess(command, code, output.read())


def _group(environment: dict[str, str], ranks: int) -> list[dict[str, str]]:
    """Return the environments of the ranks of a group."""
    group = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)} | environment
    group |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [group | {"RANK": rank, "LOCAL_RANK": rank} for rank in map(str, range(ranks))]


def _forked(environments: list[dict[str, str]], command: Sequence[str], output: str) -> list[Any]:
    """Start `python COMMAND` in each environment, and return the processes."""
    calls = [(command, ENVIRONMENT | environment, output) for environment in environments]
    processes = [_imported().Process(target=_become, args=call) for call in calls]
    for process in processes:
        process.start()
    return processes


@functools.cache
def _imported() -> Any:
    """Start a new interpreter in the ranks' environment, and return the context that forks ranks from it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.helpers.preloaded", __name__])
    with mock.patch.dict(os.environ, ENVIRONMENT):
        forkserver.ensure_running()
    return context


def _become(arguments: Sequence[str], environment: dict[str, str], output: str) -> None:
    """Run `python ARGUMENTS` in this new process, with this environment."""
    gc.freeze()  # skip imported objects in collections, which DeepSpeed requests often
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(REPO)
    file = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.argv = list(arguments[arguments[0] == "-m" :])
    if arguments[0] == "-m":
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(arguments[0], run_name="__main__")


Losses = list[tuple[float, float, float]]


def losses(run_dir: Path) -> Losses:
    records = read_metrics(run_dir)
    assert not metric_names(records) - (glossary.TRAINING.keys() | glossary.VALIDATION.keys())
    return [(r["step"], r["nll"], r["demd"]) for r in records if "nll" in r]


def metric_names(records: Iterable[dict[str, Any]]) -> set[str]:
    """Return the keys of records as in the glossary, which has NAME for the names of domains."""
    names = {key for record in records for key in record if key != "domains"}
    parts = (part for record in records for part in record.get("domains", {}).values())
    return names | {f"domains.NAME.{key}" for part in parts for key in part}


def wait_for_step(run_dir: Path, step: int, timeout: float = 300) -> None:
    wait_for(lambda: any(r["step"] >= step for r in read_metrics(run_dir)), f"step {step}", timeout)


def processes_of(run_dir: Path) -> list[psutil.Process]:
    """Return the living processes that have this run directory among their arguments."""
    living = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            ours = f"output_dir={run_dir}" in process.cmdline()
            if ours and process.status() != psutil.STATUS_ZOMBIE:
                living.append(process)
    return living


def wait_until_gone(run_dir: Path, timeout: float = 300) -> None:
    """Wait until all processes of a run have ended. After the timeout, kill the rest and fail the test."""
    try:
        wait_for(lambda: not processes_of(run_dir), "end of all processes", timeout)
    except AssertionError:
        for process in processes_of(run_dir):
            process.kill()
        raise


def member(run_dir: Path, name: str) -> psutil.Process | None:
    """Return a process of a run (`deepspeed`, `launch.py` or `rank N`), or None if it does not exist."""
    for process in processes_of(run_dir):
        with contextlib.suppress(psutil.Error):
            command = process.cmdline()
            if name == "launch.py" and "deepspeed.launcher.launch" in command:
                return process
            if name == "deepspeed" and any(Path(part).name == name for part in command[:2]):
                return process
            if name.startswith("rank ") and process.environ().get("RANK") == name.split()[1]:
                return process
    return None


@contextlib.contextmanager
def slow_step(run_dir: Path, seconds: float = 40) -> Iterator[None]:
    """Run the block while rank 1 is suspended. Resume the rank `seconds` after the block.

    Launchers kill ranks that have not ended 30 seconds after a signal.
    """
    late = member(run_dir, "rank 1")
    assert late is not None
    late.suspend()
    try:
        yield
        time.sleep(seconds)
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            late.resume()
