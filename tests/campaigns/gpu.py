"""What a GPU has to show, in under 25 minutes on one: correctness, speed and memory beside their targets.

    python -m tests.campaigns.gpu [--parts 1 2 3] [--output_path DIR] [--quick]

1 kernels     Triton kernels beside PyTorch's and float64
2 speed       the fused loss beside its peers and beside bare matrix products; a whole step
3 waits       what makes the host wait for the device in a micro-batch; traces
4 compiler    AdamW on a host with a CUDA compiler and on one without
5 plan        a model of 1.1 billion parameters: step time and peak memory beside what `plan` predicts
6 attention   packed rows give what single documents give; memory at 4,096 tokens
7 stops       SIGTERM, resume, the stall of a save, the export
8 lora        adapters: dtype, step time and memory
9 compiled    `model.compile` under ZeRO-1

Needs no network, no pytest and no installation of the project: what the trainer imports is enough, and what
else is missing is left out with a line. Every part runs in a process of its own that is killed when its time
is over. Figures go to DIR/results.json as they come (runs/gpu unless set), traces and output beside it.
Weights, data and runs are in runs/gpu/work whatever DIR is. Parts that are run again replace their figures,
so that several commands can share the work. Exits 1 when a target is missed or a part failed.
`--quick` tries all of it in small on a CPU, where no target holds.
"""

from __future__ import annotations

import argparse
import gzip
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from emo.common.errors import ExitCode
from emo.pipeline.run_dir import EXPORT, PROFILE, read_metrics
from tests.bench import common
from tests.campaigns import gpu_kernels
from tests.campaigns import gpu_setting as setting
from tests.campaigns.gpu_setting import DEVICE, GIB, GPU, MILLI, WARM, Figures, MissingError, last_words

POLL = 0.2  # seconds between looks at the figures of a part
REPO = setting.REPO
RUNS = REPO / "runs"
RUN_SECONDS = 40  # that a measured run takes, as far as one can tell
TRACE_STEP = 6  # the one that is recorded: a trace is large
TRACE_MIB = 2.8  # of a packed trace that is kept beside the figures
SHARED = {"/bin", "/usr/bin"}  # where Triton's C compiler is, too
ALIKE = 2e-2  # relative difference of losses of the same steps, computed in another order in bfloat16
RESUMED = 1e-3  # the same of a resumed run and of one that was left alone
BYTES = 14  # of a checkpoint per parameter: float32 weights, two moments, weights
PATIENCE = 90.0  # seconds for a run to come to where it is wanted


def step_seconds(results: dict[str, Any]) -> float:
    return statistics.median(results["seconds"][WARM:])


def sizes(show: Figures, large: str = "220M") -> tuple[str, int, int]:
    """Return model, tokens a row and rows a step: as large as a GPU, or as small as a try on a CPU."""
    return ("toy", 64, 2) if show.quick else (large, 1024, 8)


def waits(show: Figures) -> None:
    """Part 3: how often the host waits for the device, and a trace to see where."""
    objectives = {"mle": ("mle", 0, 0), "EMO exact": ("emo", 0, 1), "EMO cached": ("emo", 512, 1)}
    for name, (objective, cache, most) in list(objectives.items())[: 1 if show.quick else None]:
        with show.attempt(name):
            options = [f"objective.name={objective}", f"objective.cost_cache_mb={cache}"]
            options += ["deepspeed=ds_configs/zero2.json", f"train.profile=[{TRACE_STEP},{TRACE_STEP}]"]
            run = f"waits-{objective}-{cache}"
            results = setting.measure(show, run, sizes(show), *options, "--waits", seconds=100)
            if GPU:
                show(f"{name}: waits of the head a micro-batch", max(results["head_waits"]), at_most=most)
                note = "with the engine's own: the norm of the gradient, the sums for the log"
                show(f"{name}: waits of a whole step", statistics.median(results["waits"]), note=note)
            else:
                show.skip(f"{name}: waits of the head a micro-batch", "needs a GPU")
            source = show.run_dir(run) / PROFILE
            trace = source.with_name(f"trace-{run}.json.gz")
            trace.write_bytes(gzip.compress(source.read_bytes()))
            size = trace.stat().st_size / 2**20
            if size <= TRACE_MIB:
                trace = Path(shutil.move(trace, show.directory / trace.name))
            show(f"{name}: size of the trace", size, "MiB", note=str(trace))


Settings = tuple[list[str], dict[str, Any]]  # overrides of the recipe, and keywords of `measure`


def _pair(
    show: Figures, cases: dict[str, Callable[[], Settings]],
    figure: tuple[str, Callable[[dict[str, Any]], float]], words: str, at_most: float | None = None,
) -> None:  # fmt: skip
    """Measure two runs of one recipe: the second's time of a step over the first's, and their losses.

    figure: seconds that each is shown with besides. words: both, the second first, with {} between them.
    """
    results = []
    for name, settings in cases.items():
        with show.attempt(name):
            options, keywords = settings()
            results.append(setting.measure(show, name.replace(" ", "-"), sizes(show), *options, **keywords))
            show(f"{name}: time of a step", step_seconds(results[-1]) * MILLI, "ms")
            show(f"{name}: {figure[0]}", figure[1](results[-1]), "s")
    if len(results) == 2:
        first, second = results
        ratio = step_seconds(second) / step_seconds(first)
        show(f"{words.format('/')}: time of a step", ratio, at_most=at_most)
        pairs = zip(first["losses"], second["losses"], strict=True)
        apart = max(abs(x - y) / abs(x) for x, y in pairs)
        show(f"{words.format('and')}: losses apart", apart, at_most=ALIKE, always=True)


def compiler(show: Figures) -> None:
    """Part 4: the optimizer where DeepSpeed can compile its own, and where it cannot."""
    path = os.environ.get("PATH", "").split(os.pathsep)
    places = [*path, f"{os.environ.get('CUDA_HOME', '/usr/local/cuda')}/bin"]
    compilers = {directory for directory in places if (Path(directory) / "nvcc").exists()}
    built, empty = show.work / "extensions", show.work / "no-toolkit"

    def present() -> Settings:
        """Everything has to be compiled anew."""
        if not compilers:
            raise MissingError("no nvcc here")
        shutil.rmtree(built, ignore_errors=True)
        return [], {"seconds": 100, "TORCH_EXTENSIONS_DIR": str(built)}

    def absent() -> Settings:
        """No CUDA compiler is found, nor anything that it has built before."""
        if shared := compilers & SHARED:
            raise MissingError(f"nvcc lies in {', '.join(shared)} with other programs and cannot be hidden")
        empty.mkdir(parents=True, exist_ok=True)
        hidden = {"CUDA_HOME": str(empty), "CUDA_PATH": None, "TORCH_EXTENSIONS_DIR": f"{built}-without"}
        hidden["PATH"] = os.pathsep.join(directory for directory in path if directory not in compilers)
        return [], {"seconds": 100, **hidden}

    cases = {"with a compiler": present, "without a compiler": absent}
    figure = ("from start to the last step", lambda results: results["total"])
    _pair(show, cases, figure, "AdamW without {} with a compiler")


def compiled(show: Figures) -> None:
    """Part 9: the model compiled under ZeRO-1, beside the same that is not."""
    options = ["deepspeed=ds_configs/zero1.json"]
    cases: dict[str, Callable[[], Settings]] = {
        "as it is": lambda: ([*options, "model.compile=false"], {"seconds": 80}),
        "compiled": lambda: ([*options, "model.compile=true"], {"seconds": 80}),
    }
    figure = ("first step", lambda results: results["seconds"][0])
    _pair(show, cases, figure, "compiled {} as it is", at_most=1.0)


def plan(show: Figures) -> None:
    """Part 5: 1.1 billion parameters under ZeRO-3 and 2, with and without checkpointing, 1k and 8k tokens.

    Not every combination: each differs from the first in one of the three.
    """
    size, block, _ = sizes(show, "1.1B")
    cases = [(3, False, 8), (2, False, 8), (3, True, 8), (3, False, 1)]
    for stage, checkpointing, rows in cases[-1:] if show.quick else cases:
        words = f"ZeRO-{stage}{', checkpointing' if checkpointing else ''}, {rows * block:,} tokens"
        with show.attempt(words):
            options = [f"deepspeed=ds_configs/zero{stage}.json"]
            options += [f"model.activation_checkpointing={str(checkpointing).lower()}"]
            name, shape = f"{stage}-{checkpointing}-{rows}", (size, block, rows)
            _beside_plan(show, words, setting.measure(show, name, shape, *options, least=RUN_SECONDS))


def lora(show: Figures) -> None:
    """Part 8: adapters under ZeRO-2 and 3."""
    size, block, micro = sizes(show, "1.1B")
    for stage in (3,) if show.quick else (3, 2):
        words = f"LoRA, ZeRO-{stage}, {micro * block:,} tokens"
        with show.attempt(words):
            setting.needs("peft")
            options = [f"deepspeed=ds_configs/zero{stage}.json", "model.lora={r: 16, alpha: 32}"]
            results = setting.measure(
                show, f"lora-{stage}", (size, block, micro), *options, least=RUN_SECONDS
            )
            float32 = sum("float32" in kind for kind in results["adapters"])
            kinds = ", ".join(results["adapters"])
            show(f"{words}: adapters in float32", float32, at_most=0, always=True, note=kinds)
            _beside_plan(show, words, results)


def _beside_plan(show: Figures, words: str, results: dict[str, Any]) -> None:
    seconds, predicted = step_seconds(results), results["predicted"]
    note = f"{seconds * MILLI:.0f} ms a step"
    show(f"{words}: speed", predicted["tokens"] / seconds, "tokens/s", note=note)
    if "seconds" in predicted:
        value = seconds / predicted["seconds"]
        show(f"{words}: time of a step / plan", value, at_least=0.9, at_most=1.1)
    else:
        show.skip(f"{words}: time of a step / plan", "plan does not know this device")
    if not results["peak"]:
        show.skip(f"{words}: peak memory / plan", "needs a GPU")
        return
    peak, reserved = results["peak"]["allocated"], results["peak"]["reserved"]
    note = f"{peak / GIB:.1f} GiB, plan {predicted['bytes'] / GIB:.1f}, reserved {reserved / GIB:.1f}"
    show(f"{words}: peak memory / plan", peak / predicted["bytes"], at_least=0.9, at_most=1.1, note=note)


def stops(show: Figures) -> None:
    """Part 7: one run left alone, with its saves timed; the same one stopped by SIGTERM and resumed."""
    steps = 60 if show.quick else 200
    options = [f"train.max_steps={steps}", f"train.save_steps={steps // 2}"]
    options += ["train.lr_scheduler_type=constant"]
    results: dict[str, Any] = {}
    alone, stopped = show.run_dir("alone"), show.run_dir("stopped")
    with show.attempt("a run left alone"):
        results = setting.measure(show, "alone", sizes(show), *options, "--whole", seconds=PATIENCE, least=20)
        written, stall = BYTES * results["predicted"]["parameters"] / 1e9, max(results["stalls"])
        note = f"{written:.1f} GB are copied, {written / stall:.1f} GB/s"
        show("stall of a save", stall, "s", note=note)
        if show.quick:
            show.skip("stall of a save / the steps", "the steps of a toy take no time")
        else:
            share = stall / (steps // 2) / statistics.mean(results["seconds"][WARM:])
            show(f"stall of a save every {steps // 2} steps / the steps", share, note="beside training")
    finished = False
    with show.attempt("SIGTERM and resume"):
        show.need_seconds(30)
        if not results:
            raise MissingError("the run left alone did not come about")
        path = setting.recipe(show, *sizes(show))
        shutil.rmtree(stopped, ignore_errors=True)
        finished = _stop_and_resume(show, [str(path), f"output_dir={stopped}", *options], stopped)
        resumed, whole = (
            [record["nll"] for record in read_metrics(run_dir) if "nll" in record]
            for run_dir in (stopped, alone)
        )
        if len(resumed) != len(whole):
            words = f"{len(resumed)} steps are logged, and {len(whole)} of the other"
            show.failed("losses after a resume", words)
        else:
            value = max(abs(a - b) / b for a, b in zip(resumed, whole, strict=True))
            note = "equal bit for bit" if value == 0 else "GPU kernels may add in another order"
            case = "losses of the resumed run and of the one left alone, apart"
            show(case, value, at_most=RESUMED, always=True, note=note)
    with show.attempt("export"):
        if not finished:
            raise MissingError("the stopped run has not come to its end")
        from transformers import AutoModelForCausalLM, AutoTokenizer

        model: Any = AutoModelForCausalLM.from_pretrained(stopped / EXPORT, dtype=torch.bfloat16)
        inputs = AutoTokenizer.from_pretrained(stopped / EXPORT)("The town of", return_tensors="pt")
        with torch.no_grad():
            logits = model.to(DEVICE)(inputs["input_ids"].to(DEVICE)).logits
        finite = float(torch.isfinite(logits).all())
        show("the export loads in transformers, and its logits are finite", finite, at_least=1, always=True)


def _stop_and_resume(show: Figures, arguments: list[str], run_dir: Path) -> bool:
    """SIGTERM while it trains, then the same command again; return whether all is done.

    The launch script runs as a user runs it; as one process where the `deepspeed` command is not there, or
    it only has to be tried: the launchers take longer than all else.
    """
    command, beside = [sys.executable, "launch/continual.sh", *arguments], Path(sys.executable).parent
    if not show.quick and ((beside / "deepspeed").exists() or shutil.which("deepspeed")):
        command[1:2] = ["launch/supervise.py", "launch/continual.sh", "--num_gpus=1", "--"]
    log, path = run_dir.with_suffix(".log"), f"{beside}:{os.environ['PATH']}"

    def life(stop: bool) -> tuple[int, str]:
        """Return exit code and output of the command; `stop` sends SIGTERM after some steps."""
        options: dict[str, Any] = {"cwd": REPO, "env": setting.environment(PATH=path)}
        options |= {"stderr": subprocess.STDOUT, "start_new_session": True}
        with log.open("w") as file:
            process = subprocess.Popen(command, stdout=file, **options)
            try:
                end = time.monotonic() + show.limit(PATIENCE)
                while stop and process.poll() is None and len(read_metrics(run_dir)) <= 10:
                    if time.monotonic() > end:
                        raise TimeoutError(f"the run has not trained after {PATIENCE:.0f} s")
                    time.sleep(0.02)
                began = time.monotonic()
                if stop:
                    process.send_signal(signal.SIGTERM)
                code = process.wait(timeout=show.limit(PATIENCE))
            finally:
                setting.kill_family(process)
        if stop:
            show("from SIGTERM to the end", time.monotonic() - began, "s")
        return code, log.read_text()

    code, output = life(stop=True)
    good = code == ExitCode.STOPPED
    note = f"{Path(command[1]).name}: {'saved' if good else last_words(output)}"
    show("SIGTERM ends with the code of a stopped run", float(good), at_least=1, always=True, note=note)
    code, output = life(stop=False)
    good = code == ExitCode.DONE and "resumed from" in output
    note = "" if good else f"exit code {code}: {last_words(output)}"
    show("the same command goes on and finishes", float(good), at_least=1, always=True, note=note)
    return good


FUNCTIONS = (gpu_kernels.kernels, gpu_kernels.speed, waits, compiler, plan, gpu_kernels.attention)
FUNCTIONS += (stops, lora, compiled)
SECONDS = (180, 300, 135, 150, 240, 120, 180, 75, 110)  # that each may take
PARTS = dict(enumerate(zip(FUNCTIONS, SECONDS, strict=True), start=1))
NEED_GPU = (compiler, compiled)


def run_part(number: int, work: Path, out: Path, quick: bool) -> None:
    """Run a part in a process of its own, for as long as it may take; print its figures as they come."""
    (function, seconds), printed = PARTS[number], len(setting.read(out)["records"])
    log, end = out / f"{function.__name__}.log", time.monotonic() + seconds
    command = [sys.executable, "-m", "tests.campaigns.gpu", "--output_path", str(out)]
    command += ["--part", str(number), str(end), str(work), *(["--quick"] if quick else [])]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment |= {"PIP_NO_INDEX": "1"}  # peers that are not installed are left out, not looked for
    if (
        not GPU
    ):  # Triton looks when it is first imported; a peer would be compiled for longer than all else takes
        environment |= {"TRITON_INTERPRET": "1", "TORCHDYNAMO_DISABLE": "1"}
    options: dict[str, Any] = {"cwd": REPO, "env": environment, "stderr": subprocess.STDOUT}
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, start_new_session=True, **options)
        try:
            while process.poll() is None and time.monotonic() < end:
                time.sleep(POLL)
                printed = setting.print_from(out, printed)
        finally:
            late = process.poll() is None
            setting.kill_family(process)
    show = Figures(out, function.__name__)
    show("the whole part, time", time.monotonic() - end + seconds, "s", note=f"at most {seconds}")
    if late:
        show.failed("the whole part", f"killed after {seconds} s; see {log}")
    elif process.returncode:
        words = last_words(log.read_text(errors="replace"))
        show.failed("the whole part", f"exit code {process.returncode}: {words}; see {log}")
    setting.print_from(out, printed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", type=int, default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--output_path", type=Path, metavar="DIR", help="runs/gpu, or runs/gpu-quick")
    parser.add_argument("--quick", action="store_true", help="small sizes, on a CPU too: does it run at all")
    parser.add_argument("--part", nargs=3, help=argparse.SUPPRESS)  # the child's: number, end, work
    given = parser.parse_args()
    usual = RUNS / ("gpu-quick" if given.quick else "gpu")
    out: Path = (given.output_path or usual).resolve()
    if given.part is not None:
        number, until, work = given.part
        function, _ = PARTS[int(number)]
        show = Figures(out, function.__name__, given.quick, float(until), Path(work))
        with show.attempt("the whole part"):
            function(show)
        return 0
    if not GPU and not given.quick:
        print("error: torch sees no GPU here; --quick tries the campaign on a CPU", file=sys.stderr)
        return 2
    names = {number: PARTS[number][0].__name__ for number in given.parts}
    setting.begin(out, list(names.values()), machine=common.machine(), quick=given.quick)
    for number in given.parts:
        if PARTS[number][0] in NEED_GPU and not GPU:
            printed = len(setting.read(out)["records"])
            Figures(out, names[number]).skip("all of it", "needs a GPU")
            setting.print_from(out, printed)
        else:
            run_part(number, usual / "work", out, given.quick)
    return setting.table(out)


if __name__ == "__main__":
    sys.exit(main())
