"""What the runs of the GPU campaign are made of: data, models, recipes, and processes of their own.

There is no network and nothing to download: the text is the embedded corpus, whose short documents fill
packed rows, and weights are random. Vocabularies are as large as real ones; the text uses their first pieces.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import torch
import yaml

from tests.campaigns.gpu_figures import OWN, Figures, MissingError

# tests.bench.common is not for this module: it sets the number of threads, which the trainer does itself.
REPO = Path(__file__).resolve().parents[2]
TRAINER = ("pydantic", "deepspeed", "hjson")  # what a run needs and a host with PyTorch may lack
GPU = torch.cuda.is_available()
STEPS, WARM = 10, 3  # steps of a run that is measured, and the first of them, which do not count
CONTEXT = 8192  # tokens, at most
SIZES: dict[str, dict[str, int]] = {
    "1.1B": {
        "vocab_size": 32000,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
    },
    "220M": {
        "vocab_size": 32000,
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 12,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
    },
    "toy": {
        "vocab_size": 1024,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}
WORKER = "tests.campaigns.gpu_worker"


def needs(*packages: str) -> None:
    """Raises MissingError for a package that is not installed."""
    for name in packages:
        if importlib.util.find_spec(name) is None:
            raise MissingError(f"{name} is not installed")


def architecture(size: str) -> dict[str, Any]:
    """The configuration keys of a LLaMA of that size."""
    return {"model_type": "llama", "max_position_embeddings": CONTEXT, **SIZES[size]}


def model_directory(work: Path, size: str) -> Path:
    """Random weights of a LLaMA of that size in bfloat16, written once."""
    from transformers import AutoConfig, AutoModelForCausalLM

    target = work / "models" / size
    if (target / "config.json").is_file():
        return target
    torch.manual_seed(0)
    keys = architecture(size)
    config = AutoConfig.for_model(keys.pop("model_type"), tie_word_embeddings=False, **keys)
    with torch.device("cuda" if GPU else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    partial = target.with_name(f"{size}.partial")
    model.save_pretrained(partial)
    partial.rename(target)
    return target


def recipe(show: Figures, size: str, block: int, micro: int, **sections: dict[str, Any]) -> Path:
    """A recipe on prepared data: rows of `block` tokens, `micro` of them a step; `sections` complete it.

    Raises MissingError where a run of it could not start.
    """
    needs(*TRAINER)
    out = show.work
    content: dict[str, Any] = {
        "output_dir": str(out / "runs" / "unnamed"),
        "data": {
            "dir": str(out / f"data-{block}"),
            "train_tokenizer": 600 if show.quick else 1600,
            "sequence_len": block,
            "shards": 1,
            "sources": [{"embedded": "world", "limit": 400 if show.quick else 3000}],
            "validation_fraction": 0.02,
        },
        "model": {"path": str(model_directory(out, size)), "dtype": "bfloat16"},
        "objective": {"name": "emo"},
        "train": {
            "max_steps": 1000,
            "global_batch_size": micro,
            "micro_batch_size": micro,
            "learning_rate": 1e-5,
            "lr_scheduler_type": "constant",
            "logging_steps": 1,
            "eval_rows": micro,
        },
        "deepspeed": "ds_configs/zero3.json",
    }
    for name, section in sections.items():
        content[name] |= section
    path = out / "recipes" / f"{size}-{block}-{micro}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(content))
    prepared = out / f"data-{block}.prepared"
    if not prepared.exists():
        run(["-m", "emo", "prepare", str(path)], show.limit(60))
        prepared.touch()
    return path


def environment(**changes: Any) -> dict[str, str]:
    """What processes of the campaign inherit; None takes a variable away."""
    results = os.environ | {"PYTHONUNBUFFERED": "1"}
    if GPU:  # tests.bench.common has set it for the benches; the trainer chooses for itself
        results.pop("OMP_NUM_THREADS", None)
    else:
        results |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    for name, value in changes.items():
        results.pop(name, None)
        if value is not None:
            results[name] = value
    return results


def run(arguments: list[str], seconds: float, **changes: Any) -> str:
    """Output of a Python process. Raises RuntimeError with its last words where it fails or takes longer.

    Raises MissingError where a package that it imports is not installed.
    """
    try:
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=REPO,
            env=environment(**changes),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{' '.join(arguments[:3])} was killed after {seconds:.0f} s") from None
    print(done.stdout, flush=True)
    if done.returncode:
        absent = re.search(r"ModuleNotFoundError: No module named '([\w]+)", last_words(done.stdout))
        if absent and absent[1] not in OWN:
            raise MissingError(f"{absent[1]} is not installed")
        raise RuntimeError(f"exit code {done.returncode}: {last_words(done.stdout)}")
    return done.stdout


def kill_family(process: subprocess.Popen[Any]) -> None:
    """End a process that was started in a session of its own, and all that it has started."""
    family = []
    with contextlib.suppress(psutil.NoSuchProcess):
        family = psutil.Process(process.pid).children(recursive=True)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # those, too, whose parents have ended before
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    process.wait()


def last_words(output: str) -> str:
    """The line that says why a process failed, as far as one can tell."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    telling = [line for line in lines if line.startswith("error: ") or "Error" in line]
    return (telling or lines or ["no output"])[-1][:300]


def measure(
    show: Figures, name: str, path: Path, *options: str, seconds: float = 90, **changes: Any
) -> dict[str, Any]:
    """What the worker finds in STEPS steps of the recipe at `path`, with `options` as overrides.

    The run may take `seconds`, and no longer than the part has left.
    """
    run_dir = fresh(show, name)
    results = run_dir.with_suffix(".json")
    results.unlink(missing_ok=True)
    arguments = ["-m", WORKER, "--to", str(results), "--steps", str(STEPS), str(path)]
    run([*arguments, f"output_dir={run_dir}", *options], show.limit(seconds), **changes)
    return json.loads(results.read_text())


def fresh(show: Figures, name: str) -> Path:
    """A run directory that nobody has used; what another campaign left there is removed."""
    run_dir = show.work / "runs" / f"{show.part}-{name}"
    shutil.rmtree(run_dir, ignore_errors=True)
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    return run_dir
