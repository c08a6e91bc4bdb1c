"""The recipe keys of the learning rate, and the rate of each step."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

from pydantic import Field, model_validator

from emo.common.config.recipe import Section
from emo.common.errors import UserError
from emo.common.text import counted

INVERSE_SQRT_STEPS = 10_000  # its time scale without a warm-up, as in transformers


class ScheduleConfig(Section):
    """The keys of `train` for the learning rate."""

    learning_rate: float = Field(2e-5, gt=0, le=1e6)
    """Peak learning rate of AdamW."""
    lr_scheduler_type: Literal[
        "cosine", "linear", "constant", "cosine_with_restarts", "inverse_sqrt", "warmup_stable_decay"
    ] = "cosine"
    """Learning rate after the warm-up, with the names of transformers."""
    warmup_ratio: float = Field(0.03, ge=0, lt=1)
    """Share of the steps (rounded up) over which the learning rate rises."""
    warmup_steps: int | None = Field(None, ge=0)
    """Steps over which the learning rate rises, instead of `warmup_ratio`."""
    min_lr_ratio: float = Field(0.0, ge=0, lt=1)
    """Lowest learning rate after the warm-up, as a share of the peak."""
    decay_ratio: float = Field(0.1, gt=0, le=1)
    """Share of the steps over which `warmup_stable_decay` decays."""
    decay_steps: int | None = Field(None, gt=0)
    """Steps over which `warmup_stable_decay` decays, instead of `decay_ratio`."""
    decay_type: Literal["linear", "cosine", "1-sqrt"] = "linear"
    """Shape of the decay of `warmup_stable_decay`."""
    decay_from: str | None = None
    """Checkpoint RUN_DIR/step-N, or its copy in a store, with the learning rate still at its peak. The new
    run continues from this checkpoint and decays until the last step."""
    num_cycles: int = Field(1, gt=0)
    """Cycles of `cosine_with_restarts`."""
    restart_warmup_ratio: float = Field(0.0, ge=0, lt=1)
    """Share of each later cycle of `cosine_with_restarts` over which the rate rises again."""

    @model_validator(mode="after")
    def _check_schedule(self) -> ScheduleConfig:
        schedule = self.lr_scheduler_type
        needs = {
            "warmup_stable_decay": ("decay_ratio", "decay_steps", "decay_type", "decay_from"),
            "cosine_with_restarts": ("num_cycles", "restart_warmup_ratio"),
        }
        for name, keys in needs.items():
            for key in keys:
                default = ScheduleConfig.model_fields[key].default
                if schedule != name and getattr(self, key) != default:
                    raise ValueError(
                        f"{key} belongs to lr_scheduler_type={name}, and the recipe has {schedule}"
                    )
        if schedule == "constant" and self.min_lr_ratio:
            raise ValueError("min_lr_ratio does not apply to lr_scheduler_type=constant, which never decays")
        if self.decay_from is not None and self.decay_steps is not None:
            raise ValueError("remove decay_steps: with decay_from, the decay lasts until the last step")
        if self.decay_from is not None and self.branch_step is None:
            raise ValueError(f"decay_from must be a checkpoint RUN_DIR/step-N (given: {self.decay_from})")
        return self

    @property
    def branch_step(self) -> int | None:
        """Return the step at which `decay_from` begins the decay, or None."""
        name = (self.decay_from or "").rstrip("/").rpartition("/")[2]
        number = name.removeprefix("step-")
        return int(number) if number != name and number.isdecimal() else None


class Phases(NamedTuple):
    """The steps at which a schedule changes, counted from 0."""

    warmup: int  # the first step after the warm-up
    decay: int  # the first step of the decay
    steps: int


def phases(train: ScheduleConfig, steps: int) -> Phases:
    """Return the phases of a run of `steps` steps. Only `warmup_stable_decay` has steps between them."""
    warmup = (
        math.ceil(train.warmup_ratio * steps)
        if train.warmup_steps is None
        else min(train.warmup_steps, steps)
    )
    decay = warmup
    if train.lr_scheduler_type == "warmup_stable_decay":
        length = math.ceil(train.decay_ratio * steps) if train.decay_steps is None else train.decay_steps
        decay = max(warmup, steps - length)
    if train.branch_step is not None:
        decay = train.branch_step
    return Phases(min(warmup, decay), decay, steps)


def check_branch_steps(train: ScheduleConfig, steps: int) -> None:
    """Raise UserError if a run ends before the step at which `decay_from` begins its decay."""
    if train.branch_step is not None and steps <= train.branch_step:
        problem = f"train.decay_from={train.decay_from}: the run has {steps:,} steps, and its decay begins at"
        cure = "Set train.max_steps to the last step of the decay"
        raise UserError(f"{problem} step {train.branch_step:,}. {cure}", code="decay-from")


def lr_at(train: ScheduleConfig, step: int, steps: int) -> float:
    """Return the learning rate of `step` (from 0) of `steps`.

    A linear warm-up precedes the schedule. Its first step has a rate above 0: the rates of the warm-up are
    those of transformers, one step earlier. All later rates are those of transformers.
    """
    warmup, decay, _ = phases(train, steps)
    if step < warmup:
        return train.learning_rate * (step + 1) / warmup
    if step < decay or train.lr_scheduler_type == "constant":
        return train.learning_rate
    if train.lr_scheduler_type == "inverse_sqrt":
        scale = warmup or INVERSE_SQRT_STEPS
        return train.learning_rate * max(train.min_lr_ratio, 1 / math.sqrt((step - warmup + scale) / scale))
    factor = _decayed(train, (step - decay) / max(1, steps - decay))
    return train.learning_rate * (factor * (1 - train.min_lr_ratio) + train.min_lr_ratio)


def _decayed(train: ScheduleConfig, progress: float) -> float:
    """Return the rate over its peak, between 1 and 0, at a part of the decay from 0 to 1."""
    shape: str = train.lr_scheduler_type
    if shape == "warmup_stable_decay":
        shape = train.decay_type
    if shape == "linear":
        return 1 - progress
    if shape == "1-sqrt":
        return 1 - math.sqrt(progress)
    if shape == "cosine_with_restarts":
        cycle, progress = divmod(progress * train.num_cycles, 1.0)
        rise = train.restart_warmup_ratio
        if cycle and progress < rise:
            return progress / rise
        if cycle:
            progress = (progress - rise) / (1 - rise)
    return 0.5 * (1 + math.cos(math.pi * progress))


def describe_schedule(train: ScheduleConfig, steps: int) -> str:
    """Return the schedule of a run in words."""
    warmup, decay, _ = phases(train, steps)
    parts = [f"{train.learning_rate:g} after {counted(warmup, 'step')}"]
    if train.lr_scheduler_type == "warmup_stable_decay":
        parts = [f"{train.learning_rate:g} until step {decay:,}"]
    if train.lr_scheduler_type != "constant":
        parts.append(f"{lr_at(train, steps - 1, steps):.2g} at the last step")
    return ", ".join(parts)
