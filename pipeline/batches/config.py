"""The keys of a recipe that say which rows each step trains on."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

from pydantic import Field, model_validator

from emo.common.config.recipe import FREE, Section, mark
from emo.common.errors import UserError
from emo.common.text import counted

from ..model.objective_config import Weight, ends, label_of


class MixtureConfig(Section):
    """The shares of the domains in what a run trains on, over time.

    Every domain keeps an order of its own: each of its rows is seen once before any is seen twice.
    """

    shares: dict[str, Weight] = {}
    """Share of each domain: a number, or a ramp {from: 0.3, to: 0.1, steps: 1000} that begins where the
    mixture begins to hold. Shares need not add up to 1."""
    temperature: float | None = Field(None, gt=0)
    """Instead of shares: each domain in proportion to amount ** (1 / temperature)."""
    by: Literal["tokens", "rows"] = "tokens"
    """What shares and amounts count: supervised tokens or rows."""
    max_epochs: dict[str, int] = {}
    """Passes over a domain at most; afterwards the other domains share its part in proportion."""

    @model_validator(mode="after")
    def _possible(self) -> MixtureConfig:
        if bool(self.shares) == (self.temperature is not None):
            raise ValueError("give exactly one of shares and temperature")
        for end in zip(*map(ends, self.shares.values()), strict=True):  # in the beginning, in the end
            if min(end) < 0 or not any(end):
                raise ValueError("shares must not be negative, and not all of them 0")
        if min(self.max_epochs.values(), default=1) < 1:
            raise ValueError("max_epochs must be above 0; a share of 0 leaves a domain out")
        return self

    @property
    def label(self) -> str:
        """Return words such as `(0.3 to 0.1) general + 0.7 abroad, by tokens`."""
        parts = " + ".join(label_of(share, name) for name, share in self.shares.items())
        most = ", ".join(f"{counted(epochs, 'epoch')} of {name}" for name, epochs in self.max_epochs.items())
        text = f"{parts or f'temperature {self.temperature:g}'}, by {self.by}"
        return f"{text}; at most {most}" if most else text


class BatchConfig(Section):
    """The keys of `train` that set how long to train, on how many rows a step, and in which order."""

    num_train_epochs: float | None = Field(None, gt=0)
    """Passes over the data; give this or max_steps. The last step is filled up with rows of the next pass, so
    that every row is seen. With a mixture it is left out."""
    max_steps: int | None = Field(None, gt=0)
    """Optimizer steps; give this or num_train_epochs."""
    global_batch_size: int = Field(16, gt=0)
    """Rows per optimizer step over all ranks."""
    micro_batch_size: int = mark(FREE, 4, gt=0)
    """Rows per forward pass and rank."""
    mixture: MixtureConfig | None = None
    """Shares of the data's domains. Without one, each epoch is one permutation of all rows. A run keeps its
    mixture; a new one may hold from a checkpoint on, see mixture_from."""
    mixture_from: int | None = mark(FREE, None, ge=0)
    """Step of the checkpoint from which a changed mixture holds."""
    seed: int = Field(42, ge=0)
    """Seed of the data order, dropout, adapters and the weights of a new model."""

    @model_validator(mode="after")
    def _one_length(self) -> BatchConfig:
        if (self.num_train_epochs is None) == (self.max_steps is None):
            either = "train.num_train_epochs=null or train.max_steps=null sets one aside"
            raise ValueError(f"give exactly one of num_train_epochs and max_steps: {either}")
        return self


class Batch(NamedTuple):
    """The rows of a step: batch <= micro * accumulation * ranks, of which the last places may be empty."""

    batch: int
    micro: int
    accumulation: int
    ranks: int

    @property
    def places(self) -> int:
        """Return how many rows the passes of a step have room for."""
        return self.micro * self.accumulation * self.ranks

    def __str__(self) -> str:
        passes = f"{self.micro} per pass x {self.accumulation} accumulated x {counted(self.ranks, 'rank')}"
        empty = f", {counted(self.places - self.batch, 'place')} empty" if self.places > self.batch else ""
        return f"{self.batch} rows per step = {passes}{empty}"


def solve_batch(batch: int, micro: int, ranks: int) -> Batch:
    """Return the fewest passes of at most `micro` rows that hold a batch, and the fewest rows for them.

    Raises UserError for a batch of fewer rows than ranks.
    """
    if batch < ranks:
        problem = f"train.global_batch_size={batch} leaves some of {ranks} ranks without a row"
        raise UserError(f"{problem}; set it to {ranks} or more, or start fewer ranks", code="batch-ranks")
    rows = math.ceil(batch / ranks)  # of a rank
    accumulation = math.ceil(rows / micro)
    return Batch(batch, math.ceil(rows / accumulation), accumulation, ranks)
