"""Check correctness, speed and memory on a GPU against their targets, the most important parts first.

    python -m tests.campaigns.gpu [--parts 1 2 3] [--within SECONDS] [--output_path DIR] [--quick]

tests/bench/README.md lists the parts and their targets. Each part runs in a separate process, which is
killed when its time is over. Results go to DIR/results.json (runs/gpu by default), next to traces and
output. Weights, data and runs are always in runs/gpu/work. Parts that run again replace their results, so
that several commands can share the work. The exit code is 1 if a target is missed or a part fails. With
`--within` no part starts after that time, and the last one ends then. Parts 1 to 3 take at most 7 minutes,
all of them 26. `--quick` runs small sizes, also on a CPU, where only the targets for correctness apply.

Parts 1, 2, 4 and 6 need PyTorch 2.11 with Triton 3.6 or later, the imports of emo.loss, psutil and rich.
The others also need pydantic, DeepSpeed, hjson and nvidia-ml-py. A part that lacks something is skipped.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from emo.common.errors import ExitCode
from emo.pipeline.control.run_dir import EXPORT, PROFILE, read_metrics
from tests.bench import common
from tests.campaigns import gpu_kernels
from tests.campaigns import gpu_setting as setting
from tests.campaigns.gpu_setting import DEVICE, GIB, GPU, MILLI, REPO, WARM, Figures, MissingError, last_words

TRACE_STEP = 6  # the only recorded step, because a trace is large
TRACE_MIB = 2.8  # largest packed trace that is kept with the figures
SHARED = {"/bin", "/usr/bin"}  # these also contain Triton's C compiler
ALIKE = 2e-2  # relative difference between losses of the same steps, if bfloat16 sums change their order
RESUMED = 1e-3  # relative difference between losses of a resumed and an uninterrupted run
PATIENCE = 90.0  # seconds for a run to reach the awaited state


def step_seconds(results: dict[str, Any]) -> float:
    return statistics.median(results["seconds"][WARM:])


def sizes(show: Figures, large: str = "220M") -> tuple[str, int, int]:
    """Return the model, tokens per row and rows per step. They are small with --quick."""
    return ("toy", 64, 2) if show.quick else (large, 1024, 8)


def waits(show: Figures) -> None:
    """Part 8: count how often the host waits for the device, and record a trace that shows where."""
    objectives = {"mle": ("mle", 0, 0), "EMO exact": ("emo", 0, 1), "EMO cached": ("emo", 512, 1)}
    for name, (objective, cache, most) in objectives.items():
        with show.attempt(name):
            options = [f"objective.name={objective}", f"objective.cost_cache_mb={cache}"]
            options += ["deepspeed=ds_configs/zero2.json", f"train.profile.steps=[{TRACE_STEP},{TRACE_STEP}]"]
            run = f"waits-{objective}-{cache}"
            results = setting.measure(show, run, sizes(show), *options, "--waits")
            if GPU:
                worst = max(results["head_waits"][WARM:])
                show(f"{name}: waits of the head a micro-batch", worst, at_most=most)
                note = "with the engine's own: the norm of the gradient, the sums for the log"
                show(f"{name}: waits of a whole step", statistics.median(results["waits"][WARM:]), note=note)
            else:
                show.skip(f"{name}: waits of the head a micro-batch", "needs a GPU")
            packed = (show.run_dir(run) / PROFILE / "rank-0.json.gz").read_bytes()
            size = len(packed) / 2**20
            trace = (show.directory if size <= TRACE_MIB else show.run_dir(run)) / f"trace-{run}.json.gz"
            trace.write_bytes(packed)
            show(f"{name}: size of the trace", size, "MiB", note=str(trace))


def _pair(show: Figures, cases: dict[str, tuple[list[str], dict[str, Any]]], at_most: float | None) -> None:
    """Measure two runs of one recipe, and compare the second with the first in step time and losses.

    cases: overrides of the recipe and changes of the environment. at_most: bound of the step time's ratio.
    """
    results = []
    for name, (options, changes) in cases.items():
        with show.attempt(name):
            run = name.replace(" ", "-")
            results.append(setting.measure(show, run, sizes(show), *options, **changes))
            show(f"{name}: time of a step", step_seconds(results[-1]) * MILLI, "ms")
            show(f"{name}: first step", results[-1]["seconds"][0], "s")
            show(f"{name}: from start to the last step", results[-1]["total"], "s")
    if len(results) == 2:
        (first, second), (base, other) = cases, results
        ratio = step_seconds(other) / step_seconds(base)
        show(f"{second} / {first}: time of a step", ratio, at_most=at_most)
        pairs = zip(base["losses"], other["losses"], strict=True)
        apart = max(abs(x - y) / abs(x) for x, y in pairs)
        show(f"{second} and {first}: losses apart", apart, at_most=ALIKE, always=True)


def compiler(show: Figures) -> None:
    """Part 11: compare the optimizer with a CUDA compiler, where DeepSpeed compiles its own, and without."""
    path = os.environ.get("PATH", "").split(os.pathsep)
    candidates = {*path, f"{os.environ.get('CUDA_HOME', '/usr/local/cuda')}/bin"}
    compilers = {directory for directory in candidates if (Path(directory) / "nvcc").exists()}
    if not compilers:
        raise MissingError("no nvcc here")
    if shared := compilers & SHARED:
        raise MissingError(f"nvcc lies in {', '.join(shared)} with other programs and cannot be hidden")
    built, empty = show.work / "extensions", show.work / "no-toolkit"
    shutil.rmtree(built, ignore_errors=True)  # DeepSpeed must compile everything again
    empty.mkdir(parents=True, exist_ok=True)
    hidden = {"CUDA_HOME": str(empty), "CUDA_PATH": None, "TORCH_EXTENSIONS_DIR": f"{built}-without"}
    hidden["PATH"] = os.pathsep.join(directory for directory in path if directory not in compilers)
    present = {"TORCH_EXTENSIONS_DIR": str(built)}
    _pair(show, {"AdamW with a compiler": ([], present), "AdamW without": ([], hidden)}, at_most=None)


def compiled(show: Figures) -> None:
    """Part 10: compare a compiled model with an uncompiled one under ZeRO-1."""
    zero1 = "deepspeed=ds_configs/zero1.json"
    cases: dict[str, tuple[list[str], dict[str, Any]]] = {
        "as it is": ([zero1, "model.compile=false"], {}),
        "compiled": ([zero1, "model.compile=true"], {}),
    }
    _pair(show, cases, at_most=1.0)


def plan(show: Figures) -> None:
    """Part 3: compare 1.1 billion parameters and 8k tokens under ZeRO-2 and ZeRO-3 with `plan`."""
    _plan_cases(show, [(2, False, 8), (3, False, 8)])


def plan_more(show: Figures) -> None:
    """Part 7: compare ZeRO-3 with checkpointing, and with 1k tokens, with `plan`."""
    _plan_cases(show, [(3, True, 8), (3, False, 1)])


def _plan_cases(show: Figures, cases: list[tuple[int, bool, int]]) -> None:
    """Compare runs with `plan`. cases: ZeRO stage, checkpointing and rows of each run."""
    size, block, _ = sizes(show, "1.1B")
    for stage, checkpointing, rows in cases:
        words = f"ZeRO-{stage}{', checkpointing' if checkpointing else ''}, {rows * block:,} tokens"
        with show.attempt(words):
            option = f"model.activation_checkpointing={str(checkpointing).lower()}"
            _beside_plan(show, words, f"{stage}-{checkpointing}-{rows}", (size, block, rows), stage, option)


def lora(show: Figures) -> None:
    """Part 9: check the type of adapters, and compare ZeRO-2 and ZeRO-3 with `plan`."""
    setting.needs("peft")
    size, block, micro = sizes(show, "1.1B")
    for stage in (3, 2):
        words = f"LoRA, ZeRO-{stage}, {micro * block:,} tokens"
        with show.attempt(words):
            option = "model.lora={r: 16, alpha: 32}"
            results = _beside_plan(show, words, f"lora-{stage}", (size, block, micro), stage, option)
            kinds = results["adapters"]
            float32 = sum("float32" in kind for kind in kinds)
            show(f"{words}: adapters in float32", float32, at_most=0, always=True, note=", ".join(kinds))


def _beside_plan(
    show: Figures, words: str, name: str, shape: tuple[str, int, int], stage: int, option: str
) -> dict[str, Any]:
    """Measure a run, compare its time and memory with the prediction of `plan`, and return the results."""
    zero = f"deepspeed=ds_configs/zero{stage}.json"
    results = setting.measure(show, name, shape, zero, option)
    seconds, predicted, peak = step_seconds(results), results["predicted"], results["peak"]
    note = f"{seconds * MILLI:.0f} ms a step"
    show(f"{words}: speed", predicted["tokens"] / seconds, "tokens/s", note=note)
    if "seconds" in predicted:
        value = seconds / predicted["seconds"]
        show(f"{words}: time of a step / plan", value, at_least=0.9, at_most=1.1)
    else:
        show.skip(f"{words}: time of a step / plan", "plan does not know this device")
    if peak:
        value, note = peak["allocated"] / predicted["bytes"], f"plan {predicted['bytes'] / GIB:.1f} GiB"
        note += "".join(f", {key} {size / GIB:.1f}" for key, size in peak.items())
        show(f"{words}: peak memory / plan", value, at_least=0.9, at_most=1.1, note=note)
    else:
        show.skip(f"{words}: peak memory / plan", "needs a GPU")
    return results


def stops(show: Figures) -> None:
    """Part 5: time the saves of a run, and compare its losses with a run stopped by SIGTERM and resumed."""
    steps = 60 if show.quick else 200
    options = [f"train.max_steps={steps}", f"train.save_steps={steps // 2}"]
    options += ["train.lr_scheduler_type=constant"]
    alone, stopped = show.run_dir("alone"), show.run_dir("stopped")
    results = setting.measure(show, "alone", sizes(show), *options, "--whole")
    stall = max(results["stalls"])
    show("stall of a save", stall, "s")
    share = stall / (steps // 2) / statistics.mean(results["seconds"][WARM:])
    show(f"stall of a save every {steps // 2} steps / the steps", share, note="beside training")
    shutil.rmtree(stopped, ignore_errors=True)
    recipe = setting.recipe(show, *sizes(show))
    _stop_and_resume(show, [str(recipe), f"output_dir={stopped}", *options], stopped)
    with show.attempt("losses after a resume"):
        logged = ([r["nll"] for r in read_metrics(run) if "nll" in r] for run in (stopped, alone))
        value = max(abs(a - b) / b for a, b in zip(*logged, strict=True))
        note = "equal bit for bit" if value == 0 else "GPU kernels may add in another order"
        case = "losses of the resumed run and of the one left alone, apart"
        show(case, value, at_most=RESUMED, always=True, note=note)
    with show.attempt("export"):
        from transformers import AutoModelForCausalLM, AutoTokenizer

        model: Any = AutoModelForCausalLM.from_pretrained(stopped / EXPORT, dtype=torch.bfloat16)
        inputs = AutoTokenizer.from_pretrained(stopped / EXPORT)("The town of", return_tensors="pt")
        with torch.no_grad():
            logits = model.to(DEVICE)(inputs["input_ids"].to(DEVICE)).logits
        finite = float(torch.isfinite(logits).all())
        show("the export loads in transformers, and its logits are finite", finite, at_least=1, always=True)


def _stop_and_resume(show: Figures, arguments: list[str], run_dir: Path) -> None:
    """Stop a training run by SIGTERM, and resume it. It has no launcher, because launchers are slow."""
    command, log = [sys.executable, "launch/continual.sh", *arguments], run_dir.with_suffix(".log")
    options: dict[str, Any] = {"cwd": REPO, "env": setting.environment()}
    options |= {"stderr": subprocess.STDOUT, "start_new_session": True}
    lives = {
        "SIGTERM ends with the code of a stopped run": (ExitCode.STOPPED, ""),
        "the same command goes on and finishes": (ExitCode.DONE, "resumed from"),
    }
    for case, (expected, words) in lives.items():
        with log.open("w") as file:
            process = subprocess.Popen(command, stdout=file, **options)
            try:
                end = time.monotonic() + show.limit(PATIENCE)
                while not words and process.poll() is None and len(read_metrics(run_dir)) <= 10:
                    if time.monotonic() > end:
                        raise TimeoutError(f"the run has not trained after {show.limit(PATIENCE):.0f} s")
                    time.sleep(0.02)
                began = time.monotonic()
                if not words:
                    process.send_signal(signal.SIGTERM)
                code = process.wait(timeout=show.limit(PATIENCE))
            finally:
                setting.kill_family(process)
        output = log.read_text()
        good = code == expected and words in output
        note = f"{time.monotonic() - began:.1f} s" if good else f"exit code {code}: {last_words(output)}"
        show(case, float(good), at_least=1, always=True, note=note)


# In order of value, because a short booking of a GPU runs only the first.
FUNCTIONS = (gpu_kernels.kernels, gpu_kernels.speed, plan, gpu_kernels.attention, stops)
FUNCTIONS += (gpu_kernels.vocabularies, plan_more, waits, lora, compiled, compiler)
SECONDS = (100, 150, 160, 120, 180, 240, 120, 135, 75, 110, 150)  # time limit of each part on a GPU
PARTS = dict(enumerate(zip(FUNCTIONS, SECONDS, strict=True), start=1))
NEED_GPU = (compiler, compiled)


def run_part(number: int, work: Path, out: Path, quick: bool, left: float) -> None:
    """Run a part in a separate process, which prints its figures, with a time limit.

    left: seconds until the campaign must end.
    """
    function, seconds = PARTS[number]
    log, began = out / f"{function.__name__}.log", time.monotonic()
    command = [sys.executable, "-m", "tests.campaigns.gpu", "--output_path", str(out)]
    command += ["--part", str(number), str(work), *(["--quick"] if quick else [])]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment |= {"PIP_NO_INDEX": "1"}  # peers that are not installed are skipped, not downloaded
    if not GPU:
        # Triton reads this at import. Compiling a peer would take longer than everything else.
        environment |= {"TRITON_INTERPRET": "1", "TORCHDYNAMO_DISABLE": "1"}
    show, code = Figures(out, function.__name__, quick), None
    with log.open("w") as file, contextlib.suppress(subprocess.TimeoutExpired):
        process = subprocess.Popen(command, cwd=REPO, env=environment, stderr=file, start_new_session=True)
        try:
            code = process.wait(timeout=(most := min(show.limit(seconds), left)))
        finally:
            setting.kill_family(process)
    show("the whole part, time", time.monotonic() - began, "s", note=f"at most {most:.0f}")
    if code is None and most == left:
        show.skip("the rest of the part", f"the time is over (--within); see {log}")
    elif code is None:
        show.failed("the whole part", f"killed after {most:.0f} s; see {log}")
    elif code:
        words = last_words(log.read_text(errors="replace"))
        show.failed("the whole part", f"exit code {code}: {words}; see {log}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", type=int, default=list(PARTS), choices=list(PARTS))
    about = "start no part later than this and end the last one then"
    parser.add_argument("--within", type=float, default=float("inf"), metavar="SECONDS", help=about)
    parser.add_argument("--output_path", type=Path, metavar="DIR", help="runs/gpu, or runs/gpu-quick")
    parser.add_argument("--quick", action="store_true", help="small sizes, on a CPU too: does it run at all")
    parser.add_argument("--part", nargs=2, help=argparse.SUPPRESS)  # for the child process: number, work
    args = parser.parse_args()
    usual = REPO / "runs" / ("gpu-quick" if args.quick else "gpu")
    out: Path = (args.output_path or usual).resolve()
    if args.part is not None:
        number, work = args.part
        function, _ = PARTS[int(number)]
        show = Figures(out, function.__name__, args.quick, Path(work))
        with show.attempt("the whole part"):
            function(show)
        return 0
    if not GPU and not args.quick:
        print("error: torch sees no GPU here; --quick tries the campaign on a CPU", file=sys.stderr)
        return 2
    end = time.monotonic() + args.within
    for number in args.parts:
        function, _ = PARTS[number]
        if (left := end - time.monotonic()) <= 0:
            print(f"the time is over (--within) before part {number}, {function.__name__}", flush=True)
            break
        setting.begin(out, [function.__name__], machine=common.machine(), quick=args.quick)
        if function in NEED_GPU and not GPU:
            Figures(out, function.__name__).skip("all of it", "needs a GPU")
        else:
            run_part(number, usual / "work", out, args.quick, left)
    return setting.table(out)


if __name__ == "__main__":
    sys.exit(main())
