"""Settings that need less memory, for a run that does not fit."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

from emo.common.config.recipe import apply_override, parse_section
from emo.common.errors import UserError

from ..batches.config import solve_batch
from ..config import RunConfig
from ..engine.activations import find_mlps
from ..engine.device.devices import usable_attention
from ..engine.device.hardware import GIB, NODE, Cluster
from ..engine.sequence import check_sequence_parallel
from ..model.teacher import check_teacher
from . import footprint
from .checks import PlannedRun, resolve_deepspeed
from .footprint import Setup, Sizes
from .setup import setup_of

EQUAL_SPEED = 0.01  # settings whose speeds differ by less are ranked by memory

Settings = dict[str, str | bool | int]  # of a recipe, by key


def join_settings(settings: Settings) -> str:
    """Return settings as they are written on a command line."""
    pairs = (
        (key, str(value).lower() if isinstance(value, bool) else value) for key, value in settings.items()
    )
    return " ".join(f"{key}={value}" for key, value in pairs)


@dataclasses.dataclass(frozen=True)
class Alternatives:
    """Other settings of a planned recipe, as far as training accepts them."""

    config: RunConfig
    run: PlannedRun
    sizes: Sizes
    setup: Setup
    cluster: Cluster

    def change(self, settings: Settings, gpus: int | None = None) -> Setup | None:
        """Return the setup with these settings on so many GPUs, or None if training rejects it."""
        tree = self.config.model_dump(mode="json")
        try:
            for key, value in settings.items():
                apply_override(tree, f"{key}={value}")
            config = parse_section(RunConfig, tree, "")
            train = config.train
            counts = (train.global_batch_size, train.micro_batch_size, gpus or self.setup.ranks)
            batch = solve_batch(*counts, train.sequence_parallel)
            ds_config = self.run.ds_config
            if config.deepspeed != self.config.deepspeed:
                ds_config = resolve_deepspeed(config, batch)
            if batch.sequence != self.setup.sequence:
                self._check_sharing(config)
            if config.model.tiled_mlp:
                find_mlps(self.run.model)
        except UserError:
            return None
        run, setup = self.run, self.setup
        return setup_of(config, batch, ds_config, run.objective, setup.attended, run.attention, setup)

    def _check_sharing(self, config: RunConfig) -> None:
        """Raise UserError if ranks cannot share rows as a recipe sets it."""
        check_sequence_parallel(config, self.run.hf_config)
        usable_attention(config.model, self.run.hf_config, shared=True, gpus=True)
        if self.setup.teacher is not None:
            check_teacher(config, self.run.hf_config, [], local=False, gpus=True)

    def fitting(self, settings: Settings, certain: bool, gpus: int | None = None) -> Setup | None:
        """Return the setup with these settings if it fits, or with `certain` if it is certain to fit."""
        setup = self.change(settings, gpus)
        if setup is None:
            return None
        memory = footprint.memory(self.sizes, setup)
        return setup if (memory.upper_bound if certain else memory.total) <= self.cluster.memory else None

    @property
    def checkpointing(self) -> list[bool | str]:
        """Return the values of model.activation_checkpointing that need less memory than the recipe's."""
        values: list[bool | str] = [False, True, "offload"]
        return values[values.index(self.config.model.activation_checkpointing) + 1 :]

    @property
    def shares(self) -> list[int]:
        """Return the larger values of train.sequence_parallel that training accepts."""
        numbers = (n for n in range(self.setup.sequence + 1, NODE + 1) if self.setup.ranks % n == 0)
        compiled: Settings = {"model.compile": False}  # compiled layers cannot share rows
        return [n for n in numbers if self.change({"train.sequence_parallel": n, **compiled}) is not None]

    def combine(self, certain: bool) -> Settings | None:
        """Return the fastest settings that fit, of all that need less memory, without those of the recipe."""
        options: dict[str, Sequence[str | bool | int]] = {
            "train.micro_batch_size": [1],
            "deepspeed": [f"ds_configs/{name}" for name in ("zero3.json", "zero3_offload.json")],
            "model.activation_checkpointing": self.checkpointing,
            "model.tiled_mlp": [True],
            "model.compile": [False] if self.config.model.compile else [],
            "train.sequence_parallel": self.shares,
        }
        rows = itertools.product(*([None, *values] for values in options.values()))
        best: Settings | None = None
        least = (0, 0)
        for row in rows:
            settings = {key: value for key, value in zip(options, row, strict=True) if value is not None}
            if (setup := self.fitting(settings, certain)) is None:
                continue
            time = footprint.step_time(self.sizes, setup, self.cluster.gpu, self.cluster.network_gb)
            rank = round(math.log(time.total) / EQUAL_SPEED), len(settings)
            if best is None or rank < least:
                best, least = settings, rank
        return best


def describe_fit(alternatives: Alternatives) -> str:
    """Return whether the run fits, and changes that make it fit, cheapest first."""
    setup = alternatives.setup
    usable = alternatives.cluster.memory
    memory = footprint.memory(alternatives.sizes, setup)
    certain = memory.total <= usable
    rows = setup.micro * setup.accumulation
    micros = (m for m in range(rows, 0, -1) if rows % m == 0)
    largest = next((m for m in micros if alternatives.fitting({"train.micro_batch_size": m}, certain)), 0)
    if memory.upper_bound <= usable:
        limit = (
            " (all rows of a GPU; for more set a larger train.global_batch_size)" if largest == rows else ""
        )
        return f"yes; largest train.micro_batch_size that is certain to fit: {largest}{limit}"
    kinds: list[list[Settings]] = [
        [{"train.micro_batch_size": largest}] if largest else [],
        [{"model.activation_checkpointing": value} for value in alternatives.checkpointing],
        [{"deepspeed": "ds_configs/zero3.json"}],
        [{"train.sequence_parallel": n} for n in alternatives.shares],
    ]
    fitting = (next((s for s in kind if alternatives.fitting(s, certain)), None) for kind in kinds)
    changes = [settings for settings in fitting if settings]
    if not changes and (settings := alternatives.combine(certain)):
        changes = [settings]
    remedies = [f"set {join_settings(settings)}" for settings in changes]
    counts = (alternatives.cluster.gpus * 2**i for i in range(1, 8))
    enough = next((n for n in counts if alternatives.fitting({}, certain, n)), None)
    remedies += [f"take {enough} GPUs"] if enough else []
    remedy = "; or ".join(remedies or ["no other settings help: take GPUs with more memory, or model.lora"])
    if memory.total > usable:
        return f"NO; {remedy}"
    predicted = f"tight: {memory.total / GIB:.1f} of {usable / GIB:.1f} GiB, and all memory except states may"
    return f"{predicted} be {footprint.MEMORY_ERROR:.0%} higher; to be safe {remedy}"
