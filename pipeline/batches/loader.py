"""Reading of the rows of a run: each rank's part of a global batch, as micro-batches.

The rows of a step depend only on the step (order.py), so the number of ranks may change at any restart.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from emo.common.causal_lm import IGNORE
from emo.common.errors import UserError
from emo.common.io.files import Hashes
from emo.data_prep.shards.format import TokenDataset
from emo.data_prep.shards.scores import Scores

from ..control.run_dir import DATA_HASHES
from ..control.world import World, gather_objects
from ..loss import plan_tokens
from ..loss.models.head import BOUNDS, DOMAIN, LONGEST, SHARED, MicroBatch, segments
from .order import BatchOrder, MixedOrder


def check_content(run_dir: Path, sets: Sequence[TokenDataset | Scores], world: World) -> None:
    """Raise UserError on all ranks if a data file has changed since it was written. All ranks must call.

    Every rank hashes a part of the files. The run directory stores the hashes, so that later launches only
    hash files that were touched since.
    """
    hashes = Hashes(run_dir / DATA_HASHES)
    faults = [fault for data in sets for fault in data.faults(hashes, world.rank, world.ranks)]
    gathered = gather_objects((faults, hashes.new()))
    for rank_faults, _ in gathered:
        if rank_faults:
            raise UserError(rank_faults[0], code="damaged-data")
    if world.is_main:
        hashes.save(new for _, new in gathered)


def rank_rows(rows: np.ndarray, rank: int, ranks: int, micro: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Return the contiguous part of a global batch that a rank reads, and a mask of its real rows.

    All ranks read equally many complete micro-batches. Rows that are not real fill up the last slots.
    """
    per_rank = -(-len(rows) // (ranks * micro)) * micro
    part = slice(rank * per_rank, (rank + 1) * per_rank)
    return np.resize(rows, ranks * per_rank)[part], (np.arange(ranks * per_rank) < len(rows))[part]


def make_micro_batch(
    arrays: dict[str, np.ndarray], part: int = 0, parts: int = 1, pin: bool = False
) -> MicroBatch:
    """Return arrays [b, L, ...] with shifted `labels` as arguments of the model.

    Instead of labels they have the plan of the loss. They also have the bounds of the documents in complete
    rows. Everything else is of part number `part` of the positions, if `parts` ranks share the rows.
    """
    bounds, longest = segments(torch.from_numpy(arrays["position_ids"]))
    size = arrays["labels"].shape[1] // parts
    if parts > 1:
        columns = slice(part * size, (part + 1) * size)
        arrays = {name: np.ascontiguousarray(array[:, columns]) for name, array in arrays.items()}
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    labels = tensors.pop("labels")
    tensors[BOUNDS] = bounds
    if pin:
        tensors = {name: tensor.pin_memory() for name, tensor in tensors.items()}
    micro = tensors | {LONGEST: longest, "labels": plan_tokens(labels, pin)}
    return micro | {SHARED: True} if parts > 1 else micro


@dataclass(frozen=True)
class Batches:
    """Reads rows as micro-batches for this rank's device."""

    data: TokenDataset
    scores: Scores | None
    micro: int  # rows of a micro-batch
    device: torch.device
    part: int = 0  # of every row, which this rank computes
    parts: int = 1  # ranks that share a row

    def read(
        self, rows: np.ndarray, real: np.ndarray | None = None, with_domains: bool = False
    ) -> Iterator[MicroBatch]:
        """Yield micro-batches as arguments of the model, in pinned memory if the device is a GPU.

        They include any weights of the labels and any stored scores.

        Args:
            rows: Numbers of the rows, int64 [n].
            real: Mask of the rows that are supervised, bool [n]. None: all.
            with_domains: Whether to add the domain of each row.
        """
        pin = self.device.type == "cuda"
        for start in range(0, len(rows), self.micro):
            part = slice(start, start + self.micro)
            arrays = self.data.batch(rows[part])
            if real is not None:
                arrays["labels"][~real[part]] = IGNORE
            if self.scores is not None:
                arrays |= self.scores.columns(rows[part])
            micro = make_micro_batch(arrays, self.part, self.parts, pin)
            if with_domains:
                domain = torch.from_numpy(self.data.domain[rows[part]].astype(np.int64))
                micro[DOMAIN] = domain.pin_memory() if pin else domain
            yield micro


class Writing(NamedTuple):
    """The amount of text that the model wrote for an on-policy step."""

    tokens: int  # of all ranks
    seconds: float  # on this rank


class StepBatch(NamedTuple):
    """The rows and micro-batches of one step."""

    rows: np.ndarray  # of the global batch, int64 [batch]
    valid: float  # supervised tokens of the global batch, in data with weights the sum of their weights
    domains: list[float]  # the part of each domain in it; empty with a single domain
    micro: list[MicroBatch]  # this rank's part, as arguments of the model
    written: Writing | None = None  # set if the model wrote the batch itself


class Loader:
    """Reads the batches of a run, each while the previous step computes."""

    def __init__(self, order: BatchOrder | MixedOrder, batches: Batches, world: World) -> None:
        self.order = order
        self.batches = batches
        self.world = world
        # Without its device, a thread that pins memory would open a context on the first GPU.
        use = functools.partial(torch.cuda.set_device, world.device) if world.device.type == "cuda" else None
        self._thread = ThreadPoolExecutor(1, "loader", initializer=use)
        self._ahead: tuple[int, Future[StepBatch]] | None = None

    def step(self, step: int, last: bool) -> StepBatch:
        """Return the batch of `step`, and start to read the next one unless this is the last."""
        if self._ahead is None or self._ahead[0] != step:
            self._ahead = step, self._thread.submit(self._read, step)
        batch = self._ahead[1].result()
        self._ahead = None if last else (step + 1, self._thread.submit(self._read, step + 1))
        return batch

    def close(self) -> None:
        """Stop the thread."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _read(self, step: int) -> StepBatch:
        data = self.batches.data
        rows = self.order.step_rows(step)
        local, real = rank_rows(rows, self.world.replica, self.world.replicas, self.batches.micro)
        several = len(data.domains) > 1
        valid = data.weight[rows]
        micro = list(self.batches.read(local, None if real.all() else real, several))
        counts = np.bincount(data.domain[rows], valid, len(data.domains)).astype(valid.dtype).tolist()
        return StepBatch(rows, valid.sum().item(), counts if several else [], micro)
