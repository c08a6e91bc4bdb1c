"""The keys of a recipe for the rows of each step."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

from pydantic import Field, model_validator

from emo.common.config.recipe import FREE, Section, mark
from emo.common.errors import UserError
from emo.common.text import counted

from ..model.objective.config import Weight, ends, label_of

ROUNDING = 1e-9  # of products such as 0.29 epochs x 100 rows


class MixtureConfig(Section):
    """The shares of the domains in the training data, over time.

    Every domain has a separate order, in which each row is seen once before any is seen twice.
    """

    shares: dict[str, Weight] = {}
    """Share of each domain, with any sum: a number, or a ramp {from: 0.3, to: 0.1, steps: 1000} that begins
    when the mixture does."""
    temperature: float | None = Field(None, gt=0)
    """Instead of `shares`: the share of a domain is proportional to its amount ** (1 / temperature)."""
    by: Literal["tokens", "rows"] = "tokens"
    """Unit of shares and amounts: supervised tokens or rows."""
    max_epochs: dict[str, int] = {}
    """Largest number of passes over a domain. After that, the other domains get its share."""

    @model_validator(mode="after")
    def _check_shares(self) -> MixtureConfig:
        if bool(self.shares) == (self.temperature is not None):
            raise ValueError("set exactly one of shares and temperature")
        for shares in zip(*map(ends, self.shares.values()), strict=True):  # at the start, at the end
            if min(shares) < 0 or not any(shares):
                raise ValueError("shares must not be negative, and not all of them 0")
        if min(self.max_epochs.values(), default=1) < 1:
            raise ValueError("max_epochs must be above 0. Set the share to 0 to leave a domain out")
        return self

    @property
    def label(self) -> str:
        """Return a text such as `(0.3 to 0.1) general + 0.7 abroad, by tokens`."""
        parts = " + ".join(label_of(share, name) for name, share in self.shares.items())
        limits = ", ".join(f"{counted(n, 'epoch')} of {name}" for name, n in self.max_epochs.items())
        text = f"{parts or f'temperature {self.temperature:g}'}, by {self.by}"
        return f"{text}; at most {limits}" if limits else text


class BatchConfig(Section):
    """The keys of `train` that set how long to train, on how many rows a step, and in which order."""

    num_train_epochs: float | None = Field(None, gt=0)
    """Passes over the data. Set either this or max_steps. An incomplete last step is filled up with rows of
    the next pass, or with a mixture, left out."""
    max_steps: int | None = Field(None, gt=0)
    """Optimizer steps. Set either this or num_train_epochs."""
    global_batch_size: int = Field(16, gt=0)
    """Rows per optimizer step over all ranks."""
    micro_batch_size: int = mark(FREE, 4, gt=0)
    """Rows per forward pass and rank."""
    sequence_parallel: int = mark(FREE, 1, gt=0)
    """Number of ranks that share each row, so that activations of long rows fit into memory. It must divide
    the number of ranks and data.sequence_len."""
    mixture: MixtureConfig | None = None
    """Shares of the domains. To change the mixture during a run, set mixture_from."""
    mixture_from: int | None = mark(FREE, None, ge=0)
    """Step of the checkpoint from which a changed mixture is used."""
    seed: int = Field(42, ge=0)
    """Seed of the data order, dropout, adapters and the weights of a new model."""

    @model_validator(mode="after")
    def _check_length(self) -> BatchConfig:
        if (self.num_train_epochs is None) == (self.max_steps is None):
            cure = "train.num_train_epochs=null or train.max_steps=null removes one"
            raise ValueError(f"set exactly one of num_train_epochs and max_steps: {cure}")
        return self


class Batch(NamedTuple):
    """The rows of a step: batch <= micro * accumulation * replicas. The last slots may be empty."""

    batch: int
    micro: int
    accumulation: int
    ranks: int
    sequence: int = 1  # ranks that share every row

    @property
    def replicas(self) -> int:
        """Return the number of groups of ranks that read different rows."""
        return self.ranks // self.sequence

    @property
    def slots(self) -> int:
        """Return the number of rows that the passes of a step can hold."""
        return self.micro * self.accumulation * self.replicas

    def __str__(self) -> str:
        ranks = counted(self.ranks, "rank")
        if self.sequence > 1:
            ranks = f"{counted(self.replicas, 'group')} of {self.sequence} ranks"
        passes = f"{self.micro} per pass x {self.accumulation} accumulated x {ranks}"
        empty = f", {counted(self.slots - self.batch, 'slot')} empty" if self.slots > self.batch else ""
        return f"{self.batch} rows per step = {passes}{empty}"


def solve_batch(batch: int, micro: int, ranks: int, sequence: int = 1) -> Batch:
    """Split a batch into the fewest passes of at most `micro` rows, and make these as small as possible.

    Groups of `sequence` ranks share their rows. Raises UserError if these groups do not divide the ranks, or
    if the batch has fewer rows than groups.
    """
    if ranks % sequence:
        works = ", ".join(str(n) for n in range(1, ranks + 1) if ranks % n == 0)
        problem = f"train.sequence_parallel={sequence} does not divide {counted(ranks, 'rank')}"
        raise UserError(f"{problem}. Set it to one of {works}", code="sequence-parallel")
    replicas = ranks // sequence
    if batch < replicas:
        unit = "ranks" if sequence == 1 else f"groups of {sequence} ranks"
        problem = f"train.global_batch_size={batch} is less than one row for each of {replicas} {unit}"
        raise UserError(f"{problem}. Set it to {replicas} or more, or start fewer ranks", code="batch-ranks")
    rows = math.ceil(batch / replicas)  # per group
    accumulation = math.ceil(rows / micro)
    return Batch(batch, math.ceil(rows / accumulation), accumulation, ranks, sequence)


def count_steps(train: BatchConfig, rows: int) -> int:
    """Return the number of steps of a run. Raises UserError if `rows` of the epochs are less than a batch."""
    if train.max_steps is not None:
        return train.max_steps
    epochs = train.num_train_epochs or 0
    batches = epochs * rows / train.global_batch_size
    if batches < 1 - ROUNDING:
        amount = f"{counted(rows, 'row')} x {counted(epochs, 'epoch')}"
        raise UserError(
            f"{amount} are less than a batch. Set a smaller train.global_batch_size", code="batch-size"
        )
    # Without a mixture, the last step has rows of the next epoch if needed, so that every row is seen.
    return math.ceil(batches - ROUNDING) if train.mixture is None else int(batches + ROUNDING)
