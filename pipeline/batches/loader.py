"""The rows that a run trains on: that they are what was prepared, each rank's part of them, their batches.

Which rows a step consumes depends on nothing but the step (`planning/order.py`): the topology may change at
any restart, and the data order does not.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from emo.common.errors import UserError
from emo.common.io.files import Hashes
from emo.common.labels import IGNORE
from emo.data_prep.shards.format import TokenDataset
from emo.data_prep.shards.scores import Scores

from ..control.run_dir import DATA_HASHES
from ..control.world import World, gather_objects
from ..loss import plan_tokens
from ..loss.models.head import BOUNDS, DOMAIN, LONGEST, segments
from .order import BatchOrder, MixedOrder


def check_content(run_dir: Path, sets: Sequence[TokenDataset | Scores], world: World) -> None:
    """Raise UserError on all ranks when a file is not what was written; all ranks must call.

    Every rank hashes its share of the files at a run's first start, and later those that were touched
    since: the run directory remembers which were found right.
    """
    hashes = Hashes(run_dir / DATA_HASHES)
    faults = [fault for data in sets for fault in data.faults(hashes, world.rank, world.ranks)]
    every = gather_objects((faults, hashes.new()))
    for rank_faults, _ in every:
        if rank_faults:
            raise UserError(rank_faults[0])
    if world.is_main:
        hashes.save(new for _, new in every)


def rank_rows(rows: np.ndarray, rank: int, ranks: int, micro: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Return the contiguous slice of a global batch that `rank` of `ranks` takes, and which rows are real.

    All ranks take as many, whole micro-batches; the last places are filled with rows that are not real.
    """
    each = -(-len(rows) // (ranks * micro)) * micro
    part = slice(rank * each, (rank + 1) * each)
    return np.resize(rows, ranks * each)[part], (np.arange(ranks * each) < len(rows))[part]


class Batches:
    """Reads rows as micro-batches for this rank's device."""

    def __init__(self, data: TokenDataset, scores: Scores | None, micro: int, device: torch.device) -> None:
        self.data, self.scores, self.micro, self.device = data, scores, micro, device

    def read(
        self, rows: np.ndarray, real: np.ndarray | None = None, apart: bool = False
    ) -> Iterator[dict[str, Any]]:
        """Yield micro-batches of `rows`, with their scores; those that are not `real` supervise nothing.

        Labels come as the plan by which the loss goes through them, and where documents begin is beside the
        positions. For a GPU all is in pinned memory. `apart`: with the rows' domains.
        """
        pin = self.device.type == "cuda"
        for start in range(0, len(rows), self.micro):
            part = slice(start, start + self.micro)
            arrays = self.data.batch(rows[part])
            labels = arrays.pop("labels")
            if real is not None:
                labels[~real[part]] = IGNORE
            if self.scores is not None:
                arrays |= self.scores.columns(rows[part])
            if apart:
                arrays[DOMAIN] = self.data.domain[rows[part]].astype(np.int64)
            tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
            tensors[BOUNDS], longest = segments(tensors["position_ids"])
            if pin:
                tensors = {name: tensor.pin_memory() for name, tensor in tensors.items()}
            yield tensors | {LONGEST: longest, "labels": plan_tokens(torch.from_numpy(labels), pin)}


class Writing(NamedTuple):
    """What the model wrote for an on-policy step."""

    tokens: int  # of all ranks
    seconds: float  # on this rank


class StepBatch(NamedTuple):
    """The rows and micro-batches of one step."""

    rows: np.ndarray  # of the global batch, int64 [batch]
    valid: int  # supervised tokens of the global batch
    domains: list[int]  # supervised tokens of each domain; empty with a single domain
    micro: list[dict[str, Any]]  # this rank's part
    written: Writing | None = None  # set if the model wrote the batch itself


class Loader:
    """The batches of a run, each read while the step before it computes."""

    def __init__(self, order: BatchOrder | MixedOrder, batches: Batches, world: World) -> None:
        self.order, self.batches, self.world = order, batches, world
        # A thread that pins memory would open a context on the first GPU otherwise.
        use = functools.partial(torch.cuda.set_device, world.device) if world.device.type == "cuda" else None
        self._thread = ThreadPoolExecutor(1, "loader", initializer=use)
        self._ahead: tuple[int, Future[StepBatch]] | None = None

    def step(self, step: int, last: bool) -> StepBatch:
        """Return the batch of `step`; unless it is the `last` one, that of the next is begun."""
        if self._ahead is None or self._ahead[0] != step:
            self._ahead = step, self._thread.submit(self._read, step)
        batch = self._ahead[1].result()
        self._ahead = None if last else (step + 1, self._thread.submit(self._read, step + 1))
        return batch

    def close(self) -> None:
        """Read no more."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _read(self, step: int) -> StepBatch:
        data, rows = self.batches.data, self.order.step_rows(step)
        local, real = rank_rows(rows, self.world.rank, self.world.ranks, self.batches.micro)
        apart, valid = len(data.domains) > 1, data.valid[rows]
        micro = list(self.batches.read(local, None if real.all() else real, apart))
        counts = np.bincount(data.domain[rows], valid, len(data.domains)).astype(np.int64).tolist()
        return StepBatch(rows, int(valid.sum()), counts if apart else [], micro)
