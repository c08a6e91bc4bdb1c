"""What a GPU has to show, the most important first: correctness, speed and memory next to their targets.

    python -m tests.campaigns.gpu [--parts 1 2 3] [--within SECONDS] [--output_path DIR] [--quick]

Parts, targets and what they need: docs/performance.md, On a GPU. Every part runs in a process of its own that
is killed when its time is over. Figures go to DIR/results.json as they come (runs/gpu unless set), traces and
output beside it; weights, data and runs are in runs/gpu/work whatever DIR is. Parts that run again replace
their figures, so that several commands can share the work. Exits 1 when a target is missed or a part failed.
`--within` starts no part later and ends the last one then: parts 1 to 3 take at most 7 minutes, all 26.
`--quick` tries all of it in small on a CPU, where no target holds.
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

TRACE_STEP = 6  # the one that is recorded: a trace is large
TRACE_MIB = 2.8  # of a packed trace that is kept beside the figures
SHARED = {"/bin", "/usr/bin"}  # where Triton's C compiler is, too
ALIKE = 2e-2  # relative difference of losses of the same steps, computed in another order in bfloat16
RESUMED = 1e-3  # the same of a resumed run and of one that was left alone
PATIENCE = 90.0  # seconds for a run to come to where it is wanted


def step_seconds(results: dict[str, Any]) -> float:
    return statistics.median(results["seconds"][WARM:])


def sizes(show: Figures, large: str = "220M") -> tuple[str, int, int]:
    """Return model, tokens a row and rows a step: as large as a GPU, or as small as a try on a CPU."""
    return ("toy", 64, 2) if show.quick else (large, 1024, 8)


def waits(show: Figures) -> None:
    """Part 8: how often the host waits for the device, and a trace to see where."""
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
    """Measure two runs of one recipe: the second's time of a step over the first's, and their losses.

    cases: overrides of the recipe, and changes of the environment. at_most: bound of the ratio.
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
    """Part 11: the optimizer where DeepSpeed can compile its own, and where no CUDA compiler is found."""
    path = os.environ.get("PATH", "").split(os.pathsep)
    candidates = {*path, f"{os.environ.get('CUDA_HOME', '/usr/local/cuda')}/bin"}
    compilers = {directory for directory in candidates if (Path(directory) / "nvcc").exists()}
    if not compilers:
        raise MissingError("no nvcc here")
    if shared := compilers & SHARED:
        raise MissingError(f"nvcc lies in {', '.join(shared)} with other programs and cannot be hidden")
    built, empty = show.work / "extensions", show.work / "no-toolkit"
    shutil.rmtree(built, ignore_errors=True)  # everything is compiled anew
    empty.mkdir(parents=True, exist_ok=True)
    hidden = {"CUDA_HOME": str(empty), "CUDA_PATH": None, "TORCH_EXTENSIONS_DIR": f"{built}-without"}
    hidden["PATH"] = os.pathsep.join(directory for directory in path if directory not in compilers)
    present = {"TORCH_EXTENSIONS_DIR": str(built)}
    _pair(show, {"AdamW with a compiler": ([], present), "AdamW without": ([], hidden)}, at_most=None)


def compiled(show: Figures) -> None:
    """Part 10: the model compiled under ZeRO-1, beside the same that is not."""
    zero1 = "deepspeed=ds_configs/zero1.json"
    cases: dict[str, tuple[list[str], dict[str, Any]]] = {
        "as it is": ([zero1, "model.compile=false"], {}),
        "compiled": ([zero1, "model.compile=true"], {}),
    }
    _pair(show, cases, at_most=1.0)


def plan(show: Figures) -> None:
    """Part 3: 1.1 billion parameters and 8k tokens under ZeRO-2 and 3."""
    _plan_cases(show, [(2, False, 8), (3, False, 8)])


def plan_more(show: Figures) -> None:
    """Part 7: the same under ZeRO-3 with checkpointing, and with 1k tokens."""
    _plan_cases(show, [(3, True, 8), (3, False, 1)])


def _plan_cases(show: Figures, cases: list[tuple[int, bool, int]]) -> None:
    """cases: ZeRO stage, checkpointing, rows."""
    size, block, _ = sizes(show, "1.1B")
    for stage, checkpointing, rows in cases:
        words = f"ZeRO-{stage}{', checkpointing' if checkpointing else ''}, {rows * block:,} tokens"
        with show.attempt(words):
            option = f"model.activation_checkpointing={str(checkpointing).lower()}"
            _beside_plan(show, words, f"{stage}-{checkpointing}-{rows}", (size, block, rows), stage, option)


def lora(show: Figures) -> None:
    """Part 9: adapters under ZeRO-2 and 3."""
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
    """Measure a run, and show its time and memory beside what `plan` predicts; return what was measured."""
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
    """Part 5: one run left alone, with its saves timed; the same one stopped by SIGTERM and resumed."""
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
    """SIGTERM while it trains, then the same command again; as one process: launchers are slow."""
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


# In order of value: a short booking has the first.
FUNCTIONS = (gpu_kernels.kernels, gpu_kernels.speed, plan, gpu_kernels.attention, stops)
FUNCTIONS += (gpu_kernels.vocabularies, plan_more, waits, lora, compiled, compiler)
SECONDS = (100, 150, 160, 120, 180, 240, 120, 135, 75, 110, 150)  # that each may take on a GPU
PARTS = dict(enumerate(zip(FUNCTIONS, SECONDS, strict=True), start=1))
NEED_GPU = (compiler, compiled)


def run_part(number: int, work: Path, out: Path, quick: bool, left: float) -> None:
    """Run a part in a process of its own, which prints its figures, for as long as it may take.

    left: seconds until all must be over.
    """
    function, seconds = PARTS[number]
    log, began = out / f"{function.__name__}.log", time.monotonic()
    command = [sys.executable, "-m", "tests.campaigns.gpu", "--output_path", str(out)]
    command += ["--part", str(number), str(work), *(["--quick"] if quick else [])]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment |= {"PIP_NO_INDEX": "1"}  # peers that are not installed are left out, not looked for
    if not GPU:
        # Triton looks when it is first imported; a peer would be compiled for longer than all else takes
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
    parser.add_argument("--part", nargs=2, help=argparse.SUPPRESS)  # the child's: number, work
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
