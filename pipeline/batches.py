"""The rows that a run trains on: that they are what was prepared, and their global, rank-free order.

Step s of a run consumes positions [s*B, (s+1)*B) of an endless sequence: one seeded permutation of the
rows per epoch, one epoch after the other. Nothing of it depends on the number of ranks, the micro-batch or
the accumulation, so the topology may change at any restart and the data order does not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from common.errors import UserError
from common.files import Hashes
from data_prep.scores import Scores
from data_prep.shards import TokenDataset
from pipeline.ranks import World, gather_objects
from pipeline.run_dir import DATA_HASHES


def check_content(run_dir: Path, sets: Sequence[TokenDataset | Scores], world: World) -> None:
    """Raise UserError on all ranks when a file is not what was written; all ranks must call.

    Every rank hashes its share of the files at a run's first start, and later those that were touched
    since: the run directory remembers which were found right.
    """
    hashes = Hashes(run_dir / DATA_HASHES)
    faults = [fault for data in sets for fault in data.faults(hashes, world.rank, world.ranks)]
    every = gather_objects((faults, hashes.new()))
    found = [fault for theirs, _ in every for fault in theirs]
    if found:
        more = f" (and {len(found) - 1} more files)" if len(found) > 1 else ""
        raise UserError(found[0] + more)
    if world.is_main:
        hashes.save(new for _, new in every)


class BatchOrder:
    """Which rows each step consumes, and which of them a rank takes."""

    def __init__(self, rows: int, batch: int, seed: int) -> None:
        self.rows, self.batch, self.seed = rows, batch, seed
        self._epochs: dict[int, np.ndarray] = {}

    def step_rows(self, step: int) -> np.ndarray:
        """Rows of the global batch of `step`, int64 [batch]."""
        positions = np.arange(step * self.batch, (step + 1) * self.batch)
        epochs, offsets = np.divmod(positions, self.rows)
        self._epochs = {e: self._permutation(e) for e in np.unique(epochs).tolist()}
        return np.array([self._epochs[e][o] for e, o in zip(epochs, offsets, strict=True)])

    def _permutation(self, epoch: int) -> np.ndarray:
        cached = self._epochs.get(epoch)
        if cached is not None:
            return cached
        return np.random.default_rng([self.seed, epoch]).permutation(self.rows)


def rank_rows(rows: np.ndarray, rank: int, ranks: int) -> np.ndarray:
    """The contiguous slice of a global batch that `rank` of `ranks` takes, [batch / ranks]."""
    return np.split(rows, ranks)[rank]


def micro_batches(rows: np.ndarray, micro: int) -> Iterator[np.ndarray]:
    """Cut a rank's rows into micro-batches of `micro` rows."""
    for start in range(0, len(rows), micro):
        yield rows[start : start + micro]
