"""Part 7 of the GPU campaign: a run that is asked to stop, goes on, saves meanwhile, and is exported."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from emo.common.errors import ExitCode
from emo.pipeline.run_dir import EXPORT, read_metrics
from tests.campaigns.gpu_figures import Figures, MissingError
from tests.campaigns.gpu_setting import (
    GPU,
    REPO,
    environment,
    fresh,
    kill_family,
    last_words,
    measure,
    recipe,
)

BYTES = 14  # of a checkpoint per parameter: float32 weights, two moments, weights
ALIKE = 1e-3  # relative difference of losses between a resumed run and one that was left alone
PATIENCE = 90.0  # seconds for a run to come to where it is wanted


def stops(show: Figures) -> None:
    """Part 7: one run left alone, with its saves timed; the same one stopped by SIGTERM and resumed."""
    size, block, micro, steps = ("toy", 64, 2, 60) if show.quick else ("220M", 1024, 8, 200)
    options = [
        f"train.max_steps={steps}",
        f"train.save_steps={steps // 2}",
        "train.lr_scheduler_type=constant",
    ]
    path, finished = None, False
    with show.attempt("a run left alone"):
        show.need_seconds(20)
        path = recipe(show, size, block, micro)
        results = measure(show, "alone", path, *options, "--whole", seconds=PATIENCE)
        parameters = results["predicted"]["parameters"]
        stall = max(results["stalls"])
        rate = f"{BYTES * parameters / stall / 1e9:.1f} GB/s"
        show("stall of a save", stall, "s", note=f"{BYTES * parameters / 1e9:.1f} GB are copied, {rate}")
        if show.quick:
            show.skip("stall of a save / the steps", "the steps of a toy take no time")
        else:
            share = stall / (steps // 2) / (sum(results["seconds"][3:]) / len(results["seconds"][3:]))
            show(f"stall of a save every {steps // 2} steps / the steps", share, note="beside training")
    with show.attempt("SIGTERM and resume"):
        show.need_seconds(30)
        if path is None:
            raise MissingError("the run left alone did not come about")
        run_dir = fresh(show, "stopped")
        finished = _stop_and_resume(show, path, run_dir, options)
        _compare(show, run_dir, run_dir.with_name(f"{show.part}-alone"))
    with show.attempt("export"):
        if not finished:
            raise MissingError("the stopped run has not come to its end")
        _load(show, show.work / "runs" / f"{show.part}-stopped" / EXPORT)


def _command(show: Figures, path: Path, run_dir: Path, options: list[str]) -> list[str]:
    """The launch script as a user runs it; as one process where the `deepspeed` command is not there.

    So it is, too, where it only has to be tried: the launchers take longer than all else.
    """
    arguments = [str(path), f"output_dir={run_dir}", *options]
    beside = Path(sys.executable).parent / "deepspeed"
    if show.quick or not (beside.exists() or shutil.which("deepspeed")):
        return [sys.executable, "launch/continual.sh", *arguments]
    return [sys.executable, "launch/supervise.py", "launch/continual.sh", "--num_gpus=1", "--", *arguments]


def _stop_and_resume(show: Figures, path: Path, run_dir: Path, options: list[str]) -> bool:
    """SIGTERM while it trains, then the same command again; what each life ends with. Whether all is done."""
    beside = f"{Path(sys.executable).parent}:{environment()['PATH']}"
    start = {"cwd": REPO, "env": environment(PATH=beside), "stderr": subprocess.STDOUT}
    log = run_dir.with_suffix(".log")
    with log.open("w") as file:
        command = _command(show, path, run_dir, options)
        process: Any = subprocess.Popen(command, stdout=file, start_new_session=True, **start)  # type: ignore[call-overload]
        try:
            _wait(show, lambda: process.poll() is not None or len(read_metrics(run_dir)) > 10)
            began = time.monotonic()
            process.send_signal(signal.SIGTERM)
            code = process.wait(timeout=show.limit(PATIENCE))
        finally:
            kill_family(process)
    note = f"{Path(command[1]).name}: {last_words(log.read_text()) if code != ExitCode.STOPPED else 'saved'}"
    stopped = float(code == ExitCode.STOPPED)
    show("SIGTERM ends with the code of a stopped run", stopped, at_least=1, always=True, note=note)
    show("from SIGTERM to the end", time.monotonic() - began, "s")
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, start_new_session=True, **start)  # type: ignore[call-overload]
        try:
            code = process.wait(timeout=show.limit(PATIENCE))
        finally:
            kill_family(process)
    output = log.read_text()
    resumed = float(code == ExitCode.DONE and "resumed from" in output)
    note = "" if resumed else f"exit code {code}: {last_words(output)}"
    show("the same command goes on and finishes", resumed, at_least=1, always=True, note=note)
    return bool(resumed)


def _wait(show: Figures, condition: Any) -> None:
    patience = show.limit(PATIENCE)
    end = time.monotonic() + patience
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"the run has not trained after {patience:.0f} s")
        time.sleep(0.02)


def _compare(show: Figures, resumed: Path, alone: Path) -> None:
    """Losses of both runs, step by step."""
    pairs = [
        [record["nll"] for record in read_metrics(run_dir) if "nll" in record] for run_dir in (resumed, alone)
    ]
    if len(pairs[0]) != len(pairs[1]):
        show.failed(
            "losses after a resume", f"{len(pairs[0])} steps are logged, and {len(pairs[1])} of the other"
        )
        return
    value = max(abs(a - b) / b for a, b in zip(*pairs, strict=True))
    note = "equal bit for bit" if value == 0 else "GPU kernels may add in another order"
    case = "losses of the resumed run and of the one left alone, apart"
    show(case, value, at_most=ALIKE, always=True, note=note)


def _load(show: Figures, export: Path) -> None:
    """The export as anybody would use it."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(export, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(export)
    inputs = tokenizer("The town of", return_tensors="pt")
    device = torch.device("cuda" if GPU else "cpu")
    with torch.no_grad():
        logits = model.to(device)(inputs["input_ids"].to(device)).logits
    finite = float(torch.isfinite(logits).all())
    show("the export loads in transformers, and its logits are finite", finite, at_least=1, always=True)
