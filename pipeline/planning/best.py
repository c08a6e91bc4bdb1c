"""The settings under which a recipe trains fastest on given GPUs: what `plan --best` searches and writes.

Only what surely fits is considered: memory as predicted, with the prediction's error on top. What changes
what is learned (batch, rows, objective, optimizer) stays as the recipe has it: the choices differ in speed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from rich.console import Console
from rich.table import Table

from emo.common.errors import FailureError, UserError
from emo.common.files import part_file
from emo.common.provenance import shipped
from emo.common.recipe import apply_override
from emo.pipeline.config import Batch, RunConfig, load_config, solve_batch
from emo.pipeline.loss.objectives import Objective
from emo.pipeline.planning import footprint
from emo.pipeline.planning.checks import check
from emo.pipeline.planning.ds_file import deepspeed_config
from emo.pipeline.planning.footprint import GIB, NODE, Memory, Setup, Sizes, Time
from emo.pipeline.planning.plan import TRUST, Cluster, setup_of, sizes_of

FILES = ("zero1.json", "zero2.json", "zero3.json", "zero3_hpz.json", "zero3_offload.json")  # of ds_configs/
SHOWN = 3
ALIKE = 0.01  # speeds this close are equal, and the one that needs less memory is better


class Choice(NamedTuple):
    """One way to train, and what is predicted of it."""

    file: Path  # of DeepSpeed
    setup: Setup
    memory: Memory
    time: Time

    @property
    def sets(self) -> dict[str, Any]:
        """Return the settings of a recipe that trains this way."""
        return {
            "deepspeed": str(self.file),
            "model.activation_checkpointing": self.setup.checkpointing,
            "model.compile": self.setup.compiled,
            "train.micro_batch_size": self.setup.micro,
        }

    @property
    def speed(self) -> float:
        """Return tokens/s of one GPU."""
        return self.setup.tokens * self.setup.accumulation / self.time.total

    @property
    def rank(self) -> tuple[int, float]:
        """Return a key that sorts the fastest first, and of those alike the smallest."""
        return -round(math.log(self.speed) / ALIKE), self.memory.total


def print_best(config: RunConfig, cluster: Cluster) -> Choice:
    """Print the fastest settings that surely fit, and return the best of them.

    Raises UserError for a recipe that could not start, FailureError when nothing fits.
    """
    ready = check(_changed(config, Path("ds_configs/zero2.json")), cluster.gpus, local=False)
    sizes, room = sizes_of(ready.model, ready.hf_config), cluster.room
    every = list(choices(config, sizes, ready.objective, cluster))
    fitting = [c for c in every if c.memory.surely <= room]
    if not fitting:
        least = min(every, key=lambda c: c.memory.surely)
        checkpointing = "with" if least.setup.checkpointing else "without"
        settings = f"{least.file.name} {checkpointing} checkpointing, micro_batch_size {least.setup.micro}"
        raise FailureError(
            f"nothing surely fits on {cluster.gpus} x {cluster.kind}: of each {room / GIB:.1f} GiB are free, "
            f"and {settings} may need {least.memory.surely / GIB:.1f}; take more or larger GPUs, or set "
            "model.lora",
            code="nothing-fits",
        )
    best: dict[tuple[Any, ...], Choice] = {}
    for choice in sorted(fitting, key=lambda c: c.rank):  # one of every kind, with its best micro-batch
        best.setdefault((choice.file, choice.setup.checkpointing, choice.setup.compiled), choice)
    shown = list(best.values())[:SHOWN]
    title = (
        f"{cluster.gpus} x {cluster.kind}: what surely fits into {room / GIB:.1f} GiB of each, "
        f"if all but states takes {footprint.MEMORY_ERROR:.0%} more than predicted"
    )
    table = Table(title=title, padding=(0, 0))
    for name in ("", "deepspeed", "check- points", "compile", "micro batch"):
        table.add_column(name, no_wrap=name == "deepspeed")
    for name in ("GiB", "tok/s /GPU", "MFU", "step", "host"):
        table.add_column(name, justify="right")
    for i, choice in enumerate(shown, 1):
        table.add_row(str(i), *_cells(choice, sizes, cluster))
    with contextlib.suppress(UserError):  # the recipe as it stands may not go with these GPUs
        batch = solve_batch(config.train.global_batch_size, config.train.micro_batch_size, cluster.gpus)
        setup = setup_of(config, batch, deepspeed_config(config, batch), ready.objective)
        table.add_section()
        table.add_row("recipe", *_cells(_choice(config.deepspeed, setup, sizes, cluster), sizes, cluster))
    console = Console()
    console.print(table)
    console.print(
        f"set: {', '.join(shown[0].sets)}. step: seconds; host: the share of it that is the host's. "
        "Compiling pays off in runs much longer than the minutes that it takes."
    )
    if any(choice.setup.offload_parameters for choice in shown):
        states = 18 * sizes.parameters / GIB * min(1, NODE / cluster.gpus)
        console.print(f"zero3_offload.json takes about {states:,.0f} GiB of the memory of every host")
    console.print(f"trust: {TRUST}")
    return shown[0]


def choices(config: RunConfig, sizes: Sizes, objective: Objective, cluster: Cluster) -> Iterator[Choice]:
    """Yield all settings on these GPUs, whether they fit or not.

    Compiling is tried where it is allowed, under ZeRO-1 and 2, hpZ where the ranks fill several nodes. A file
    that does not go with the recipe is passed over. Raises UserError when none does.
    """
    rows = solve_batch(config.train.global_batch_size, 1, cluster.gpus).accumulation
    batch = Batch(config.train.global_batch_size, 1, rows, cluster.gpus)
    refused: UserError | None = None
    accepted = False
    for name in FILES:
        if name == "zero3_hpz.json" and (cluster.gpus <= NODE or cluster.gpus % NODE):
            continue
        file = Path("ds_configs") / name
        plain = _changed(config, file)
        try:
            first = setup_of(plain, batch, deepspeed_config(plain, batch), objective)
        except UserError as error:
            refused = error
            continue
        accepted = True
        micros = [m for m in range(1, rows + 1) if rows % m == 0]
        compiling = (False, True) if first.stage < 3 else (False,)
        for checkpointing, compiled, micro in itertools.product((False, True), compiling, micros):
            changes: dict[str, Any] = {"micro": micro, "accumulation": rows // micro, "compiled": compiled}
            setup = dataclasses.replace(first, checkpointing=checkpointing, **changes)
            yield _choice(file, setup, sizes, cluster)
    if not accepted and refused is not None:
        raise refused


def _choice(file: Path, setup: Setup, sizes: Sizes, cluster: Cluster) -> Choice:
    time = footprint.step_time(sizes, setup, cluster.gpu, cluster.network_gb)
    return Choice(file, setup, footprint.memory(sizes, setup), time)


def _changed(config: RunConfig, file: Path) -> RunConfig:
    """Return the recipe with a DeepSpeed file, passes of one row, and nothing that a file could refuse."""
    train = config.train.model_copy(update={"micro_batch_size": 1})
    model = config.model.model_copy(update={"compile": False})
    return config.model_copy(update={"deepspeed": file, "train": train, "model": model})


def _cells(choice: Choice, sizes: Sizes, cluster: Cluster) -> list[str]:
    """Return a row of the table: what is set, and what comes of it."""
    time, setup, total = choice.time, choice.setup, choice.memory.total
    used = footprint.utilisation(sizes, setup, time.total, cluster.gpu)
    return [
        choice.file.name,
        str(setup.checkpointing).lower(),
        str(setup.compiled).lower(),
        str(setup.micro),
        f"{total / GIB:.1f}" + (" NO" if total > cluster.room else ""),
        f"{choice.speed:,.0f}",
        f"{used:.0%}",
        f"{time.total:.3g}",
        f"{time.host / time.total:.0%}",
    ]


def check_target(path: Path) -> None:
    """Raises UserError when no recipe can be written to `path`: a file is there, or no directory."""
    if path.exists():
        problem = f"--write {path}: the file is there already; give another name or remove it"
        raise UserError(problem, code="write-target")
    if not path.parent.is_dir():
        problem = f"--write {path}: {path.parent} is not a directory; make it first"
        raise UserError(problem, code="write-target")


def write_recipe(
    path: Path, recipe: Path, overrides: Sequence[str], choice: Choice, cluster: Cluster
) -> None:
    """Write a recipe that extends `recipe` and sets the overrides and the choice.

    Raises UserError when the file is there already, or would not say what the command said.
    """
    check_target(path)
    tree: dict[str, Any] = {}
    settings = [*overrides, *(f"{key}={value}" for key, value in choice.sets.items())]
    for setting in settings:
        apply_override(tree, setting)
    base = os.path.relpath(shipped(recipe).resolve(), path.parent.resolve())
    text = (
        f"# {recipe.name} as `plan --best` would train it on {cluster.gpus} x {cluster.kind}: "
        f"{choice.speed:,.0f} tokens/s/GPU predicted,\n"
        f"# {choice.memory.total / GIB:.1f} GiB on each.\n"
    ) + yaml.safe_dump({"extends": base, **tree}, sort_keys=False)
    expected = load_config(recipe, settings)
    with part_file(path) as file:
        file.write(text.encode())
        file.flush()
        if load_config(Path(file.name), []) != expected:
            raise UserError(
                "--write: an override replaces a whole section, and a recipe that extends another can only "
                "complete it; write the override into the recipe first"
            )
