"""Check that ranks that share rows train as one process does: python -m tests.campaigns.sequence_parallel

matrix    Packed rows train under ZeRO-1 and ZeRO-3 on 1, 2 and 4 ranks, with 1, 2 or 4 ranks per row. The
          loss of every step must equal the loss of a plain optimizer on complete rows, within 1e-6.
recipes   Recipes train on one rank, and on four ranks with two per row. They cover LoRA, teachers, Muon,
          tiled MLPs, checkpointing of activations and two validation sets.
memory    A row of 32k tokens is on one rank, or shared by four. A rank must hold a quarter of the activations
          within 10 %, and the planned memory within 5 %, with and without tiled MLPs.

Prints a table, and exits with code 1 if a result is outside its bound.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from pathlib import Path

import torch

from emo.pipeline.control.run_dir import read_metrics
from emo.pipeline.loss.models.varlen import VARLEN
from tests.campaigns.campaign import Campaign, conduct
from tests.helpers import launching
from tests.helpers.sequence_worker import FAMILIES, Case, train_plain

BOUND = 1e-6
SMALL = 0.05  # smallest reference of a relative difference, as a KL is a small difference of large numbers
OBJECTIVES = ["mle", "emo", "tailr", "sum", "teacher"]
LORA = ('model.lora={"r": 4, "dropout": 0}', "train.learning_rate=0.01")
RECIPES: dict[str, tuple[str, ...]] = {
    "emo": (),
    "lora": (*LORA, "train.kl_from_base=8"),
    "teacher": ('objective={"sum": [{"name": "mle"}, {"name": "kl", "teacher": "base", "weight": 0.3}]}',),
    "average": ('objective={"sum": [{"name": "mle"}, {"name": "kl", "teacher": {"ema": 0.9}}]}',),
    "muon": ("train.optimizer=muon", "train.muon_lr=0.02", "train.max_grad_norm=0"),
    "tiled": ("model.tiled_mlp=true", "model.activation_checkpointing=offload"),
    "checkpointing": ("model.activation_checkpointing=true", "deepspeed=ds_configs/zero2.json"),
}
KEYS = ("nll", "loss", "validation_nll", "validation_kl_from_base")


def run_matrix(directory: Path, args: argparse.Namespace, show: Campaign) -> None:
    plain: dict[tuple[str, str], list[float]] = {}
    for ranks, family, stage in itertools.product(map(int, args.ranks), args.families, map(int, args.stages)):
        groups = [n for n in (1, 2, 4) if ranks % n == 0]
        cases = [Case(family, *rest) for rest in itertools.product(args.objectives, [stage], groups)]
        file = directory / f"{ranks}-{family}-{stage}.json"
        sizes = (str(args.block), str(args.steps))
        command = ("-m", "tests.helpers.sequence_worker", str(file), *sizes, *map(str, cases))
        done = launching.run_ranks(*command, ranks=ranks, timeout=7200)
        assert done.returncode == 0, done.stdout[-5000:]
        measured = json.loads(file.read_text(encoding="utf-8"))
        for case in cases:
            key = (case.family, case.objective)
            if key not in plain:
                attention = "sdpa" if case.objective == "mle" else VARLEN  # a mask of long rows is slow
                plain[key] = train_plain(case, args.block, args.steps, attention)
            error = difference(measured[str(case)], plain[key])
            what = f"{case.family}, {case.objective}, ZeRO-{case.stage}, {ranks} ranks"
            show("matrix", f"{what}, {case.sequence} share a row", f"{error:.1e}", error <= BOUND)


def difference(actual: list[float], expected: list[float]) -> float:
    """Return the largest relative difference, infinite if the lengths differ."""
    if len(actual) != len(expected):
        return float("inf")
    pairs = zip(actual, expected, strict=True)
    return max((abs(a - b) / max(abs(b), SMALL) for a, b in pairs), default=0.0)


def run_recipes(directory: Path, args: argparse.Namespace, show: Campaign) -> None:
    settings = {"eval_steps": 4, "max_steps": 12, "eps": 1e-3}  # a tiny eps would amplify rounding
    recipe = launching.tiny_recipe(directory, ("home", "abroad"), **settings)
    for name in args.recipes:
        results = []
        for ranks in (1, 4):
            run_dir = directory / f"{name}-{ranks}"
            sharing = f"train.sequence_parallel={min(ranks, 2)}"
            command = ("launch/continual.sh", str(recipe), f"output_dir={run_dir}", *RECIPES[name], sharing)
            done = launching.run_ranks(*command, ranks=ranks)
            assert done.returncode == 0, done.stdout[-5000:]
            records = read_metrics(run_dir)
            results.append([record[key] for record in records for key in KEYS if key in record])
        error = difference(results[1], results[0])
        bound = 50 * BOUND if name == "muon" else BOUND  # Muon amplifies rounding, also with complete rows
        show("recipes", name, f"{error:.1e} in {len(results[0])} measurements", error <= bound)


def run_memory(directory: Path, args: argparse.Namespace, show: Campaign) -> None:
    """Compare a rank's peak memory with the plan, and its activations with a rank that has the whole row."""
    for name, settings in (("plain", ()), ("tiled", ("model.tiled_mlp=true",))):
        measured = {}
        for n in (1, 4):
            file = directory / f"{name}-{n}.json"
            command = ("-m", "tests.helpers.long_row_worker", str(file), str(n), *settings)
            done = launching.run_ranks(*command, ranks=n)
            assert done.returncode == 0, done.stdout[-5000:]
            measured[n] = found = json.loads(file.read_text(encoding="utf-8"))
            error = found["planned"] / found["peak"] - 1
            what = f"{name}, {n} ranks: {found['peak'] / 2**20:.1f} MiB, loss {found['loss']:.6f}"
            show("memory", what, f"{error:+.1%} planned", abs(error) <= 0.05)
        held = [found["peak"] - found["between"] for found in measured.values()]
        error = 4 * held[1] / held[0] - 1
        show("memory", f"{name}, activations", f"{error:+.1%} of a quarter", abs(error) <= 0.1)


PARTS = {"matrix": run_matrix, "recipes": run_recipes, "memory": run_memory}


def run(directory: Path, args: argparse.Namespace, show: Campaign) -> None:
    torch.set_num_threads(1)
    for part in args.parts:
        started = time.monotonic()
        (directory / part).mkdir()
        PARTS[part](directory / part, args, show)
        print(f"{part}: {time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    options = {"parts": [*PARTS], "families": [*FAMILIES], "objectives": OBJECTIVES, "recipes": [*RECIPES]}
    numbers = {"ranks": ["1", "2", "4"], "stages": ["1", "3"], "block": 4096, "steps": 20}
    sys.exit(conduct("sequence_parallel", run, __doc__, **options, **numbers))
