"""Ranks that share rows train as one process does: python -m tests.campaigns.sequence_parallel

matrix    packed rows under ZeRO-1 and ZeRO-3, on 1, 2 and 4 ranks of which 1, 2 or 4 share a row. The loss of every
          step must be that of a plain optimizer on complete rows, within 1e-6.
recipes   runs of a recipe on one rank, and on four of which two share a row: LoRA, a teacher, Muon,
          checkpointing of activations and mixed sets.
resume    a run that is killed again and again continues with other groups.

Prints a table, and exits 1 if a loss differs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from pathlib import Path

import torch
import yaml

from emo.pipeline.control.run_dir import read_metrics
from tests.campaigns.campaign import Campaign, conduct
from tests.helpers import launching
from tests.helpers.sequence_worker import FAMILIES, Case, train_plain

BOUND = 1e-6
OBJECTIVES = ["mle", "emo", "tailr", "sum", "teacher"]
LORA = ('model.lora={"r": 4, "dropout": 0}', "train.learning_rate=0.01")
RECIPES: dict[str, tuple[str, ...]] = {
    "emo": (),
    "lora": (*LORA, "train.kl_from_base=8"),
    "teacher": ('objective={"sum": [{"name": "mle"}, {"name": "kl", "teacher": "base", "weight": 0.3}]}',),
    "average": ('objective={"sum": [{"name": "mle"}, {"name": "kl", "teacher": {"ema": 0.9}}]}',),
    "muon": ("train.optimizer=muon", "train.muon_lr=0.02", "train.max_grad_norm=0"),
    "checkpointing": ("model.activation_checkpointing=true", "deepspeed=ds_configs/zero2.json"),
}
KEYS = ("nll", "loss", "validation_nll", "validation_kl_from_base")
KILLS = ((2, 2), (4, 4), (4, 2), (2, 1))  # ranks, and how many share a row; a kill after each


def run_matrix(directory: Path, args: argparse.Namespace, show: Campaign) -> None:
    plain: dict[tuple[str, str], list[float]] = {}
    for ranks in map(int, args.ranks):
        groups = [n for n in (1, 2, 4) if ranks % n == 0]
        names = itertools.product(args.families, args.objectives, map(int, args.stages), groups)
        cases = [Case(*name) for name in names]
        file = directory / f"{ranks}.json"
        sizes = (str(args.block), str(args.steps))
        command = ("-m", "tests.helpers.sequence_worker", str(file), *sizes, *map(str, cases))
        done = launching.run_ranks(*command, ranks=ranks)
        assert done.returncode == 0, done.stdout[-5000:]
        measured = json.loads(file.read_text(encoding="utf-8"))
        for case in cases:
            key = (case.family, case.objective)
            if key not in plain:
                plain[key] = train_plain(case, args.block, args.steps)
            error = difference(measured[str(case)], plain[key])
            what = f"{case.family}, {case.objective}, ZeRO-{case.stage}, {ranks} ranks"
            show("matrix", f"{what}, {case.sequence} share a row", f"{error:.1e}", error <= BOUND)


def difference(actual: list[float], expected: list[float]) -> float:
    """Return the largest relative difference, infinite if the lengths differ."""
    if len(actual) != len(expected):
        return float("inf")
    return max((abs(a - b) / max(abs(b), 1e-3) for a, b in zip(actual, expected, strict=True)), default=0.0)


def measured(run_dir: Path) -> dict[tuple[int, str, str], float]:
    """Return every measurement by step, set and name, of the last launch that took it."""
    records = read_metrics(run_dir)
    return {(r["step"], r.get("set", ""), key): r[key] for r in records for key in KEYS if key in r}


def compare(part: str, name: str, alone: Path, shared: Path, show: Campaign) -> None:
    expected, actual = measured(alone), measured(shared)
    error = difference([actual[key] for key in expected if key in actual], list(expected.values()))
    show(part, name, f"{error:.1e} in {len(expected)} measurements", error <= BOUND)


def write_recipe(directory: Path) -> Path:
    saves = {"save_steps": 2, "eval_steps": 4, "save_total_limit": 9, "max_steps": 12}
    path = launching.tiny_recipe(directory, ("home", "abroad"), **saves)
    recipe = yaml.safe_load(path.read_text(encoding="utf-8"))
    recipe["model"]["architecture"]["num_attention_heads"] = 4
    recipe["train"]["eps"] = 1e-3  # a tiny one would amplify rounding
    path.write_text(yaml.safe_dump(recipe, sort_keys=False), encoding="utf-8")
    return path


def train(recipe: Path, run_dir: Path, *options: str, ranks: int, share: int, kill: int = 0) -> None:
    command = ("launch/continual.sh", str(recipe), f"output_dir={run_dir}", *options)
    command += (f"train.sequence_parallel={share}",)
    if kill:
        launching.kill_ranks(run_dir, kill, *command, ranks=ranks)
        return
    done = launching.run_ranks(*command, ranks=ranks)
    assert done.returncode == 0, done.stdout[-5000:]


def run_recipes(directory: Path, args: argparse.Namespace, show: Campaign) -> None:
    recipe = write_recipe(directory)
    for name in args.recipes:
        alone, shared = directory / f"{name}-alone", directory / f"{name}-shared"
        train(recipe, alone, *RECIPES[name], ranks=1, share=1)
        train(recipe, shared, *RECIPES[name], ranks=4, share=2)
        compare("recipes", name, alone, shared, show)


def resume(directory: Path, args: argparse.Namespace, show: Campaign) -> None:
    recipe = write_recipe(directory)
    train(recipe, directory / "alone", ranks=1, share=1)
    for i, (ranks, share) in enumerate(KILLS):
        train(recipe, directory / "shared", ranks=ranks, share=share, kill=3 + 2 * i)
    train(recipe, directory / "shared", ranks=4, share=4)
    compare("resume", f"{len(KILLS)} kills", directory / "alone", directory / "shared", show)


PARTS = {"matrix": run_matrix, "recipes": run_recipes, "resume": resume}


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
