"""Parts 3, 4, 5, 8 and 9 of the GPU campaign: the trainer as it is, watched for some steps."""

from __future__ import annotations

import gzip
import os
import shutil
import statistics
from pathlib import Path
from typing import Any

from emo.pipeline.run_dir import PROFILE
from tests.campaigns.gpu_figures import Figures, MissingError
from tests.campaigns.gpu_setting import GPU, WARM, measure, needs, recipe

GIB = 2**30
MILLI = 1e3
BLOCK = 1024  # tokens a row
RUN_SECONDS = 40  # that a measured run takes, as far as one can tell
TRACE_STEP = 6  # the one that is recorded: a trace is large
TRACE_MIB = 2.8  # of a packed trace that is kept beside the figures
SHARED = {"/bin", "/usr/bin"}  # where Triton's C compiler is, too
ALIKE = 2e-2  # relative difference of losses of the same steps, computed in another order in bfloat16


def step_seconds(results: dict[str, Any]) -> float:
    """Median over the steps that count."""
    return statistics.median(results["seconds"][WARM:])


def apart(a: dict[str, Any], b: dict[str, Any]) -> float:
    """Largest relative difference between the losses of two runs, step by step."""
    return max(abs(x - y) / abs(x) for x, y in zip(a["losses"], b["losses"], strict=True))


def sizes(show: Figures) -> tuple[str, int, int]:
    """Model, tokens a row, rows a step: as large as a GPU, or as small as a try on a CPU."""
    return ("toy", 64, 2) if show.quick else ("220M", BLOCK, 8)


def waits(show: Figures) -> None:
    """Part 3: how often the host waits for the device, and a trace to see where."""
    size, block, micro = sizes(show)
    objectives = {"mle": ("mle", 0, 0), "EMO exact": ("emo", 0, 1), "EMO cached": ("emo", 512, 1)}
    for name, (objective, cache, most) in list(objectives.items())[: 1 if show.quick else None]:
        with show.attempt(name):
            show.need_seconds(30)
            path = recipe(show, size, block, micro)
            options = [f"objective.name={objective}", f"objective.cost_cache_mb={cache}"]
            options += ["deepspeed=ds_configs/zero2.json", f"train.profile=[{TRACE_STEP},{TRACE_STEP}]"]
            run = f"waits-{objective}-{cache}"
            results = measure(show, run, path, *options, "--waits", seconds=100)
            if GPU:
                show(f"{name}: waits of the head a micro-batch", max(results["head_waits"]), at_most=most)
                note = "with the engine's own: the norm of the gradient, the sums for the log"
                show(f"{name}: waits of a whole step", statistics.median(results["waits"]), note=note)
            else:
                show.skip(f"{name}: waits of the head a micro-batch", "needs a GPU")
            _keep_trace(show, name, run)


def _keep_trace(show: Figures, name: str, run: str) -> None:
    """The profile of a run, packed: beside the figures unless it is large."""
    source = show.work / "runs" / f"{show.part}-{run}" / PROFILE
    trace = source.with_name(f"trace-{run}.json.gz")
    with source.open("rb") as plain, gzip.open(trace, "wb") as packed:
        shutil.copyfileobj(plain, packed)
    size = trace.stat().st_size / 2**20
    if size <= TRACE_MIB:
        trace = Path(shutil.move(trace, show.directory / trace.name))
    show(f"{name}: size of the trace", size, "MiB", note=str(trace))


def compiler(show: Figures) -> None:
    """Part 4: the optimizer where DeepSpeed can compile its own, and where it cannot."""
    size, block, micro = sizes(show)
    results = {}
    for name, environment in (("with a compiler", _with_compiler), ("without a compiler", _without_compiler)):
        with show.attempt(name):
            show.need_seconds(30)
            path = recipe(show, size, block, micro)
            results[name] = measure(show, name.replace(" ", "-"), path, seconds=100, **environment(show))
            show(f"{name}: time of a step", step_seconds(results[name]) * MILLI, "ms")
            show(f"{name}: from start to the last step", results[name]["total"], "s")
    if len(results) == 2:
        own, other = results.values()
        show("AdamW without / with a compiler: time of a step", step_seconds(other) / step_seconds(own))
        show("AdamW without and with a compiler: losses apart", apart(own, other), at_most=ALIKE, always=True)


def _compilers() -> list[str]:
    """Directories on the path, or of a toolkit, that hold nvcc."""
    places = os.environ.get("PATH", "").split(os.pathsep)
    places += [f"{os.environ.get('CUDA_HOME', '/usr/local/cuda')}/bin"]
    return [directory for directory in places if (Path(directory) / "nvcc").exists()]


def _with_compiler(show: Figures) -> dict[str, Any]:
    """An environment in which everything has to be compiled anew."""
    if not _compilers():
        raise MissingError("no nvcc here")
    shutil.rmtree(show.work / "extensions", ignore_errors=True)
    return {"TORCH_EXTENSIONS_DIR": str(show.work / "extensions")}


def _without_compiler(show: Figures) -> dict[str, Any]:
    """An environment in which no CUDA compiler is found, nor anything that it has built before."""
    empty = show.work / "no-toolkit"
    empty.mkdir(parents=True, exist_ok=True)
    hidden = set(_compilers())
    if hidden & SHARED:
        raise MissingError(
            f"nvcc lies in {', '.join(hidden & SHARED)} with other programs and cannot be hidden"
        )
    path = [directory for directory in os.environ["PATH"].split(os.pathsep) if directory not in hidden]
    return {
        "PATH": os.pathsep.join(path),
        "CUDA_HOME": str(empty),
        "CUDA_PATH": None,
        "TORCH_EXTENSIONS_DIR": str(show.work / "extensions-without"),
    }


def plan(show: Figures) -> None:
    """Part 5: 1.1 billion parameters under ZeRO-3 and 2, with and without checkpointing, 1k and 8k tokens.

    Not every combination: each differs from the first in one of the three.
    """
    size, block, _ = sizes(show)
    size = size if show.quick else "1.1B"
    cases = [(3, False, 8), (2, False, 8), (3, True, 8), (3, False, 1)]
    for stage, checkpointing, rows in cases[-1:] if show.quick else cases:
        words = f"ZeRO-{stage}{', checkpointing' if checkpointing else ''}, {rows * block:,} tokens"
        with show.attempt(words):
            show.need_seconds(RUN_SECONDS)
            path = recipe(show, size, block, rows)
            options = [f"deepspeed=ds_configs/zero{stage}.json"]
            options += [f"model.activation_checkpointing={str(checkpointing).lower()}"]
            results = measure(show, f"{stage}-{checkpointing}-{rows}", path, *options)
            beside_plan(show, words, results)


def beside_plan(show: Figures, words: str, results: dict[str, Any]) -> None:
    """Step time and peak memory of a measured run, and each divided by what `plan` says."""
    seconds, output = step_seconds(results), results["predicted"]
    show(f"{words}: speed", output["tokens"] / seconds, "tokens/s", note=f"{seconds * MILLI:.0f} ms a step")
    if "seconds" in output:
        value = seconds / output["seconds"]
        show(f"{words}: time of a step / plan", value, at_least=0.9, at_most=1.1)
    else:
        show.skip(f"{words}: time of a step / plan", "plan does not know this device")
    if results["peak"]:
        peak, reserved = results["peak"]["allocated"], results["peak"]["reserved"]
        note = f"{peak / GIB:.1f} GiB, plan {output['bytes'] / GIB:.1f}, reserved {reserved / GIB:.1f}"
        show(f"{words}: peak memory / plan", peak / output["bytes"], at_least=0.9, at_most=1.1, note=note)
    else:
        show.skip(f"{words}: peak memory / plan", "needs a GPU")


def lora(show: Figures) -> None:
    """Part 8: adapters under ZeRO-2 and 3."""
    size, block, micro = sizes(show)
    size = size if show.quick else "1.1B"
    for stage in (3,) if show.quick else (3, 2):
        words = f"LoRA, ZeRO-{stage}, {micro * block:,} tokens"
        with show.attempt(words):
            show.need_seconds(RUN_SECONDS)
            needs("peft")
            path = recipe(show, size, block, micro)
            options = [f"deepspeed=ds_configs/zero{stage}.json", "model.lora={r: 16, alpha: 32}"]
            results = measure(show, f"lora-{stage}", path, *options)
            float32 = sum("float32" in kind for kind in results["adapters"])
            kinds = ", ".join(results["adapters"])
            show(f"{words}: adapters in float32", float32, at_most=0, always=True, note=kinds)
            beside_plan(show, words, results)


def compiled(show: Figures) -> None:
    """Part 9: the model compiled under ZeRO-1, beside the same that is not."""
    size, block, micro = sizes(show)
    results = {}
    for name, chosen in (("as it is", "false"), ("compiled", "true")):
        with show.attempt(name):
            show.need_seconds(30)
            path = recipe(show, size, block, micro)
            options = ["deepspeed=ds_configs/zero1.json", f"model.compile={chosen}"]
            results[name] = measure(show, f"compile-{chosen}", path, *options, seconds=80)
            show(f"{name}: time of a step", step_seconds(results[name]) * MILLI, "ms")
            show(f"{name}: first step", results[name]["seconds"][0], "s")
    if len(results) == 2:
        plain, other = results.values()
        show(
            "compiled / as it is: time of a step",
            step_seconds(other) / step_seconds(plain),
            at_most=1.0,
        )
        show("compiled and as it is: losses apart", apart(plain, other), at_most=ALIKE, always=True)
