"""Shared parts of the GPU campaign: figures with their targets, recipes, and measured runs.

The campaign downloads nothing. The text is the embedded corpus, whose short documents fill packed rows.
Weights are random. Vocabularies are as large as real ones, but the text uses only their first tokens.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.table import Table

from emo.common.errors import one_line
from emo.common.io.files import write_text

# Do not import tests.bench.common here. It sets the number of threads, which the trainer sets itself.
REPO = Path(__file__).resolve().parents[2]
RESULTS = "results.json"
GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
GIB, MILLI = 2**30, 1e3
STEPS, WARM = 10, 3  # steps of a measured run, and its first steps, which do not count
CONTEXT = 8192  # longest row in tokens
SHAPE = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
SHAPE += ("num_attention_heads", "num_key_value_heads")
SIZES = {
    "1.1B": (32000, 2048, 5632, 22, 32, 4),
    "220M": (32000, 1024, 2816, 12, 16, 16),
    "toy": (1024, 64, 128, 2, 4, 2),
}
RECIPE = """
output_dir: {work}/runs/unnamed
model: {{path: {model}, dtype: bfloat16}}
data:
  {{dir: {data}, sequence_len: {block}, shards: 1, validation_fraction: 0.02, train_tokenizer: {pieces},
  sources: [{{embedded: world, limit: {limit}}}]}}
objective: {{name: emo}}
train:
  {{max_steps: 1000, learning_rate: 0.00001, lr_scheduler_type: constant, logging_steps: 1,
  global_batch_size: {micro}, micro_batch_size: {micro}, eval_rows: {micro}}}
deepspeed: ds_configs/zero3.json
"""
PREPARING, RUNNING = 60, 100  # time limits of `prepare` and the trainer on a GPU host, in seconds
UNHURRIED = 3  # factor of all time limits with --quick, because the cores may be shared


class MissingError(Exception):
    """A figure cannot be measured because something is missing. It is reported, and misses no target."""


@dataclass
class Figures:
    """The records of one part, which are written immediately. Only one process writes at a time."""

    directory: Path  # for figures, logs and small traces
    part: str
    quick: bool = False  # small sizes, where only targets for correctness apply
    work: Path = Path()  # for weights, data and runs, which are large

    def limit(self, seconds: float) -> float:
        """Return the time limit for something that may take `seconds` on a GPU."""
        return seconds * (UNHURRIED if self.quick else 1)

    def __call__(
        self, case: str, value: float | None, unit: str = "", *,
        at_most: float | None = None, at_least: float | None = None, always: bool = False, note: str = "",
    ) -> None:  # fmt: skip
        """Record a figure with its target, which is one or two bounds. None and NaN miss every target.

        always: the target is for correctness and also applies with --quick.
        """
        if value is not None and value != value:
            value, note = None, f"not a number; {note}"
        bounds = [(">=", at_least), ("<=", at_most)] if always or not self.quick else []
        target = " and ".join(f"{sign} {bound:g}" for sign, bound in bounds if bound is not None)
        low = -float("inf") if at_least is None else at_least
        high = float("inf") if at_most is None else at_most
        met = value is not None and low <= value <= high if target else None
        self._keep(case, value, unit, target, met, note)

    def skip(self, case: str, why: object) -> None:
        """Record that something could not be measured here."""
        self._keep(case, None, "", "", None, f"left out: {why}")

    def failed(self, case: str, why: object) -> None:
        """Record that something did not work."""
        self._keep(case, None, "", "works", False, str(why))

    @contextlib.contextmanager
    def attempt(self, case: str) -> Iterator[None]:
        """Record an error in the block as a failure of `case`, and something missing as left out."""
        try:
            yield
        except MissingError as error:
            self.skip(case, error)
        except Exception as error:
            package = ((isinstance(error, ModuleNotFoundError) and error.name) or "emo").partition(".")[0]
            if package not in ("emo", "tests"):
                self.skip(case, f"{package} is not installed")
                return
            traceback.print_exc()
            self.failed(case, f"{type(error).__name__}: {one_line(error)}")

    def run_dir(self, name: str) -> Path:
        return self.work / "runs" / f"{self.part}-{name}"

    def _keep(self, case: str, value: Any, unit: str, target: str, met: bool | None, note: str) -> None:
        results = read(self.directory)
        record = {"part": self.part, "what": case, "value": value, "unit": unit, "target": target}
        results["records"].append(record | {"met": met, "note": note})
        write_text(self.directory / RESULTS, json.dumps(results, indent=1) + "\n")
        print(", ".join(filter(None, cells(results["records"][-1]))), flush=True)


def read(directory: Path) -> dict[str, Any]:
    """Return the results so far: `records`, and `about` with the session of each part."""
    path = directory / RESULTS
    return json.loads(path.read_text()) if path.is_file() else {"records": []}


def begin(directory: Path, parts: list[str], **about: Any) -> None:
    """Delete the records of parts that are about to run again, and record `about`, this session."""
    results = read(directory)
    results["about"] = results.get("about", {}) | dict.fromkeys(parts, about)
    results["records"] = [record for record in results["records"] if record["part"] not in parts]
    directory.mkdir(parents=True, exist_ok=True)
    write_text(directory / RESULTS, json.dumps(results, indent=1) + "\n")


def cells(record: dict[str, Any]) -> list[str]:
    """Return the part, figure, value, target, verdict and note of a record as texts."""
    value = "" if record["value"] is None else f"{record['value']:,.4g} {record['unit']}".rstrip()
    mark = {True: "met", False: "MISSED", None: ""}[record["met"]]
    return [record["part"], record["what"], value, record["target"], mark, record["note"]]


def table(directory: Path) -> int:
    """Print all results. Return 1 if a target is missed or something failed, else 0."""
    records = read(directory)["records"]
    grid = Table("part", "figure", "value", "target", "", "note")
    for record in records:
        grid.add_row(*(cell[:200] for cell in cells(record)))
    Console(width=190).print(grid)
    missed = [record for record in records if record["met"] is False]
    print(f"{len(records)} figures, {len(missed)} missed; {directory / RESULTS}", flush=True)
    return int(bool(missed))


def needs(*packages: str) -> None:
    for name in packages:
        if importlib.util.find_spec(name) is None:
            raise MissingError(f"{name} is not installed")


def random_model(size: str, dtype: torch.dtype, attention: str = "sdpa", **changes: Any) -> Any:
    """Return a LLaMA of a size with random weights. `changes` are changes of its configuration."""
    from transformers import AutoConfig, AutoModelForCausalLM

    keys = dict(zip(SHAPE, SIZES[size], strict=True)) | {"max_position_embeddings": CONTEXT} | changes
    config = AutoConfig.for_model("llama", tie_word_embeddings=False, **keys)
    torch.manual_seed(0)
    with DEVICE:
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)


def recipe(show: Figures, size: str, block: int, micro: int) -> Path:
    """Return a recipe on prepared data, with rows of `block` tokens and `micro` rows per step.

    Raises MissingError if a package that its run needs is missing.
    """
    needs("pydantic", "deepspeed", "hjson", "pynvml")  # packages that a run needs and a PyTorch host may lack
    model = show.work / "models" / size
    if not model.is_dir():
        random_model(size, torch.bfloat16).save_pretrained(model.with_name(f"{size}.partial"))
        model.with_name(f"{size}.partial").rename(model)
    return prepared(show, size, block, micro)


def prepared(show: Figures, size: str, block: int, micro: int) -> Path:
    """Write a recipe, prepare its data and return its path. The model may be absent."""
    model, data = show.work / "models" / size, show.work / f"data-{block}"
    texts = {"pieces": 600, "limit": 400} if show.quick else {"pieces": 1600, "limit": 3000}
    path = show.work / "recipes" / f"{size}-{block}-{micro}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(RECIPE.format(work=show.work, model=model, data=data, block=block, micro=micro, **texts))
    done = data.with_suffix(".prepared")
    if not done.exists():
        run(["-m", "emo", "prepare", str(path)], show.limit(PREPARING))
        done.touch()
    return path


def environment(**changes: Any) -> dict[str, str]:
    # tests.bench.common has set the number of threads, which the trainer chooses itself on a GPU
    usual = {"OMP_NUM_THREADS": None} if GPU else {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    merged = os.environ | {"PYTHONUNBUFFERED": "1"} | usual | changes
    return {name: value for name, value in merged.items() if value is not None}


def run(arguments: list[str], seconds: float, **changes: Any) -> None:
    """Run a Python process. Raises RuntimeError if it fails or takes longer than `seconds`."""
    options: dict[str, Any] = {"cwd": REPO, "env": environment(**changes), "timeout": seconds, "text": True}
    options |= {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    try:
        done = subprocess.run([sys.executable, *arguments], **options)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{' '.join(arguments[:3])} was killed after {seconds:.0f} s") from None
    print(done.stdout, file=sys.stderr, flush=True)  # into the part's log
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode}: {last_words(done.stdout)}")


def kill_family(process: subprocess.Popen[Any]) -> None:
    """Kill a process that leads a session, and all processes that it has started."""
    family = []
    with contextlib.suppress(psutil.NoSuchProcess):
        family = psutil.Process(process.pid).children(recursive=True)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # also processes whose parents have ended
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    process.wait()


def last_words(output: str) -> str:
    """Return the line of the output that most likely explains why a process failed."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    telling = [line for line in lines if line.startswith("error: ") or "Error" in line]
    return (telling or lines or ["no output"])[-1][:300]


def measure(
    show: Figures, name: str, shape: tuple[str, int, int], *options: str, **changes: Any
) -> dict[str, Any]:
    """Run the worker for STEPS steps on the recipe of a shape, and return its results.

    options: overrides of the recipe, and flags of the worker. changes: changes of the environment.
    """
    path, run_dir = recipe(show, *shape), show.run_dir(name)
    shutil.rmtree(run_dir, ignore_errors=True)  # left by an earlier campaign
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    results = run_dir.with_suffix(".json")
    arguments = ["-m", "tests.campaigns.gpu_worker", "--to", str(results), "--steps", str(STEPS), str(path)]
    run([*arguments, f"output_dir={run_dir}", *options], show.limit(RUNNING), **changes)
    return json.loads(results.read_text())
