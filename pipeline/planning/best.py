"""`emo plan --best`: find the fastest settings that fit and do not change what is learned.

These are ZeRO stage, checkpointing, compiling and the micro-batch. The results fit even if the memory
prediction is too low by its known error.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.table import Table

from emo.common.cli.progress import make_console
from emo.common.config.recipe import apply_override, dump_recipe
from emo.common.errors import FailureError, UserError
from emo.common.io.files import part_file
from emo.common.provenance import shipped

from ..batches.config import solve_batch
from ..config import RunConfig, load_config
from ..engine.device.hardware import GIB, NODE, Cluster, describe_time_source
from ..loss.objectives import Objective
from . import footprint
from .alternatives import EQUAL_SPEED, Alternatives, Settings, join_settings
from .checks import check_plan, resolve_deepspeed
from .describe import TRUST
from .footprint import Memory, Setup, Sizes, Time
from .setup import attention_span, setup_of, sizes_of

FILES = ("zero1.json", "zero2.json", "zero3.json", "zero3_hpz.json", "zero3_offload.json")  # in ds_configs/


class Choice(NamedTuple):
    """Settings that `--best` considers, with their predicted memory and time."""

    file: Path  # of DeepSpeed
    setup: Setup
    memory: Memory
    time: Time

    @property
    def settings(self) -> Settings:
        """Return the recipe's keys for this choice."""
        checkpoints = "offload" if self.setup.offload_activations else True
        return {
            "deepspeed": str(self.file),
            "model.activation_checkpointing": self.setup.checkpointing and checkpoints,
            "model.compile": self.setup.compiled,
            "train.micro_batch_size": self.setup.micro,
        }

    @property
    def speed(self) -> float:
        """Return the tokens/s of one GPU."""
        return self.setup.tokens * self.setup.accumulation / self.time.total

    @classmethod
    def predict(cls, file: Path, setup: Setup, sizes: Sizes, cluster: Cluster) -> Choice:
        """Predict memory and time of a DeepSpeed file and a setup on these GPUs."""
        time = footprint.step_time(sizes, setup, cluster.gpu, cluster.network_gb)
        return cls(file, setup, footprint.memory(sizes, setup), time)


def print_best(config: RunConfig, cluster: Cluster, document_tokens: int | None = None) -> Choice:
    """Print the fastest settings that are certain to fit, and return the best of them."""
    plain = _without_choice(config, Path("ds_configs/zero2.json"))
    run = check_plan(plain, cluster.gpus, gpus=True)
    sizes = sizes_of(run.model, run.hf_config, config.model.linear_dtype)
    attended, span = attention_span(config, run, document_tokens)
    candidates = list(choices(config, sizes, run.objective, cluster, attended, run.attention))
    best = _rank_choices(candidates, cluster)[:3]
    if not best:
        setup = setup_of(plain, run.batch, run.ds_config, run.objective, attended, run.attention)
        settings = Alternatives(plain, run, sizes, setup, cluster).combine(certain=True) or {}
        chosen = candidates[0].settings  # by this search, except an offload
        others = {key: v for key, v in settings.items() if key not in chosen or v == "offload"}
        if others and config.model.compile:  # which excludes tiles
            others["model.compile"] = False
        raise _nothing_fits(candidates, cluster, others)
    fitting = f"settings that are certain to fit into {cluster.memory / GIB:.1f} GiB of each"
    error = f"even if all memory except states is {footprint.MEMORY_ERROR:.0%} higher than predicted"
    table = Table(title=f"{cluster.gpus} x {cluster.kind}: {fitting}, {error}", padding=(0, 0))
    for name in ("", "deepspeed", "check- points", "compile", "micro batch"):
        table.add_column(name, no_wrap=name == "deepspeed")
    for name in ("GiB", "tok/s /GPU", "MFU", "step", "host"):
        table.add_column(name, justify="right")
    for i, choice in enumerate(best, 1):
        table.add_row(str(i), *_choice_cells(choice, sizes, cluster))
    with contextlib.suppress(UserError):  # the recipe as it is may not be valid on these GPUs
        train = config.train
        counts = (train.global_batch_size, train.micro_batch_size, cluster.gpus)
        batch = solve_batch(*counts, train.sequence_parallel)
        setup = setup_of(
            config, batch, resolve_deepspeed(config, batch), run.objective, attended, run.attention
        )
        current = Choice.predict(config.deepspeed, setup, sizes, cluster)
        table.add_section()
        table.add_row("recipe", *_choice_cells(current, sizes, cluster))
    console = make_console()
    console.print(table)
    console.print(
        f"set: {', '.join(best[0].settings)}. step: seconds, host: share of a step that waits for the host. "
        "Compiling pays off in runs that are much longer than the minutes it takes."
    )
    console.print(f"the first is based on {describe_time_source(best[0].setup.stage, cluster.gpu)}")
    if any(choice.setup.offload_parameters for choice in best):
        states = 18 * sizes.parameters / GIB * min(1, NODE / cluster.gpus)
        console.print(f"zero3_offload.json takes about {states:,.0f} GiB of host memory on every host")
    console.print(f"documents: {span}")
    console.print(f"trust: {TRUST}")
    return best[0]


def _rank_choices(candidates: list[Choice], cluster: Cluster) -> list[Choice]:
    """Return the choices that are certain to fit, best first, with the best micro-batch of every kind."""
    fitting = [choice for choice in candidates if choice.memory.upper_bound <= cluster.memory]
    fitting.sort(key=lambda choice: (-round(math.log(choice.speed) / EQUAL_SPEED), choice.memory.total))
    best: dict[tuple[Path, bool, bool], Choice] = {}
    for choice in fitting:
        best.setdefault((choice.file, choice.setup.checkpointing, choice.setup.compiled), choice)
    return list(best.values())


def _nothing_fits(candidates: list[Choice], cluster: Cluster, settings: Settings) -> FailureError:
    """Return the error if no choice is certain to fit. With `settings` the recipe would be."""
    smallest = min(candidates, key=lambda choice: choice.memory.upper_bound)
    size = f"{smallest.memory.upper_bound / GIB:.1f} GiB of {cluster.memory / GIB:.1f}"
    needs = f"{smallest.file.name} may need {size}"
    problem = f"no configuration is certain to fit on {cluster.gpus} x {cluster.kind} ({needs})"
    cure = f"Set {join_settings(settings)}" if settings else "Take more or larger GPUs, or set model.lora"
    return FailureError(f"{problem}. {cure}.", code="nothing-fits")


def _choice_cells(choice: Choice, sizes: Sizes, cluster: Cluster) -> list[str]:
    """Return the cells of a row of the table of choices, after its name."""
    setup = choice.setup
    time = choice.time
    total = choice.memory.total
    mfu = footprint.utilisation(sizes, setup, time.total, cluster.gpu)
    flags = str(setup.checkpointing).lower(), str(setup.compiled).lower()
    size = f"{total / GIB:.1f}" + (" NO" if total > cluster.memory else "")
    speed = f"{choice.speed:,.0f}", f"{mfu:.0%}", f"{time.total:.3g}", f"{time.host / time.total:.0%}"
    return [choice.file.name, *flags, str(setup.micro), size, *speed]


def choices(
    config: RunConfig,
    sizes: Sizes,
    objective: Objective,
    cluster: Cluster,
    attended: float | None = None,
    attention: str | None = None,
) -> Iterator[Choice]:
    """Yield all candidate settings on these GPUs, whether they fit or not.

    Compiling is tried under ZeRO-1 and 2 only, since no published run shows what compiled layers gain. hpZ is
    tried if the ranks fill several nodes. DeepSpeed files that the recipe excludes are skipped. Raises
    UserError if the recipe excludes all of them.

    Args:
        config: The recipe.
        sizes: The model.
        objective: The objective of the recipe.
        cluster: The GPUs.
        attended: Mean tokens that a token attends to; None if one document fills each row.
        attention: The implementation of attention. None: the one that the recipe names.
    """
    gpus = cluster.gpus
    batch = solve_batch(config.train.global_batch_size, 1, gpus, config.train.sequence_parallel)
    rows = batch.accumulation
    errors: list[UserError] = []
    files = [name for name in FILES if name != "zero3_hpz.json" or (gpus > NODE and gpus % NODE == 0)]
    for file in (Path("ds_configs") / name for name in files):
        plain = _without_choice(config, file)
        try:
            base = setup_of(plain, batch, resolve_deepspeed(plain, batch), objective, attended, attention)
        except UserError as error:
            errors.append(error)
            continue
        micros = [m for m in range(1, rows + 1) if rows % m == 0]
        compiles = base.stage < 3 and not (base.kernels or base.tiled) and base.sequence == 1
        compiling = (False, True) if compiles else (False,)
        for checkpointing, compiled, micro in itertools.product((False, True), compiling, micros):
            setup = dataclasses.replace(
                base, checkpointing=checkpointing, compiled=compiled, micro=micro, accumulation=rows // micro
            )
            yield Choice.predict(file, setup, sizes, cluster)
    if len(errors) == len(files):
        raise errors[-1]


def _without_choice(config: RunConfig, file: Path) -> RunConfig:
    """Return the recipe with this DeepSpeed file, one row per pass and no compiling."""
    train = config.train.model_copy(update={"micro_batch_size": 1})
    model = config.model.model_copy(update={"compile": False})
    return config.model_copy(update={"deepspeed": file, "train": train, "model": model})


def write_recipe(
    path: Path, recipe: Path, overrides: Sequence[str], choice: Choice, cluster: Cluster
) -> None:
    """Write a recipe that extends another one and sets the overrides and the choice.

    Raises UserError if a recipe cannot express the overrides.

    Args:
        path: File to write.
        recipe: File to extend.
        overrides: `key=value` settings of the command line.
        choice: The settings to use.
        cluster: The GPUs, for the comment at the top.
    """
    settings = [*overrides, *(f"{key}={value}" for key, value in choice.settings.items())]
    tree: dict[str, object] = {}
    for setting in settings:
        apply_override(tree, setting)
    base = os.path.relpath(shipped(recipe).resolve(), path.parent.resolve())
    text = (
        f"# The fastest settings of `plan --best` for {recipe.name} on {cluster.gpus} x {cluster.kind}.\n"
        f"# Predicted: {choice.speed:,.0f} tokens/s per GPU, {choice.memory.total / GIB:.1f} GiB on each.\n"
    ) + dump_recipe({"extends": base, **tree})
    with part_file(path) as file:
        file.write(text.encode())
        file.flush()
        if load_config(Path(file.name), []) != load_config(recipe, settings):
            problem = "--write: an override replaces a whole section, which an extending recipe cannot do"
            raise UserError(f"{problem}. Write it into the recipe first.", code="write-section")
