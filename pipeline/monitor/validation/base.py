"""The model before training as the reference of validation: KL(base, model) on every validation set.

A run with adapters or with `objective.teacher: base` has the base in memory. Any other run computes the
base's most likely tokens before step 0, while the model still is the base. It stores them for the rows that
validation reads:

    validation/SET/base-000000-000128.npy    rows 0 to 127, a `top_dtype` per supervised token

Each rank writes its rows. A resumed run reads them on any number of ranks.
"""

from __future__ import annotations

import bisect
import contextlib
import logging
import re
from pathlib import Path

import numpy as np
import torch

from emo.common.io.files import write_atomically
from emo.common.io.untrusted import numpy_value_errors
from emo.data_prep.shards.scores import top_dtype

from ...batches.loader import Batches, rank_rows
from ...config import RunConfig
from ...control.run_dir import VALIDATION
from ...control.world import World, gather_objects, raise_on_all_ranks, run_on_main
from ...engine.engine import Engine
from ...loss.models.head import BASE_IDS, BASE_LOG_P, FROM_BASE, MicroBatch
from .evaluation import Base

log = logging.getLogger(__name__)

NAME = re.compile(r"base-(\d+)-(\d+)\.npy")


def find_bases(config: RunConfig, engine: Engine, sets: dict[str, Batches], step: int) -> dict[str, Base]:
    """Return the base's inputs for each validation set that has them; all ranks must call.

    At step 0 the model is the base. If the base is not kept in memory, its predictions are stored then.
    """
    if not config.measures_kl:
        return {}
    if config.holds_base:
        return dict.fromkeys(sets, lambda rows: {FROM_BASE: True})
    bases: dict[str, Base] = {}
    for name, validation in sets.items():
        scores = BaseScores(config.output_dir / VALIDATION / name, validation)
        if step == 0:
            scores.store(engine, config.train.kl_from_base or 0, config.train.eval_rows)
        if scores.open(engine.world, config.train.eval_rows):
            bases[name] = scores.inputs
        else:
            problem = f"{scores.folder} lacks predictions of the base model, which are stored before step 0"
            log.warning("train.kl_from_base is not measured: %s", problem)
    return bases


class BaseScores:
    """The stored predictions of the base for one validation set."""

    def __init__(self, folder: Path, validation: Batches) -> None:
        self.folder = folder
        self._validation = validation
        # of each row's first supervised token in the set
        self._starts = np.concatenate(([0], np.cumsum(validation.data.valid, dtype=np.int64)))
        self._files: list[tuple[int, int]] = []  # first row, and the row after the last
        self._opened: dict[tuple[int, int], np.ndarray] = {}

    def store(self, engine: Engine, k: int, max_rows: int) -> None:
        """Compute and write the k most likely tokens of the first rows; all ranks must call."""
        world = engine.world
        run_on_main(world, self._clear)
        rows = np.arange(min(len(self._validation.data), max_rows))
        local, real = rank_rows(rows, world.rank, world.ranks, self._validation.micro)
        vocab_size = engine.model.get_output_embeddings().out_features  # type: ignore[operator]
        dtype = top_dtype(min(k, vocab_size - 1), vocab_size, "<f4")
        parts = []
        for best in engine.most_likely(self._validation.read(local, real), dtype["ids"].shape[0]):
            parts.append(np.empty(len(best.ids), dtype))
            parts[-1]["ids"] = best.ids.cpu().numpy()
            parts[-1]["log_p"] = best.log_p.cpu().numpy()

        def write() -> None:
            if own := local[real].tolist():
                path = self._path(own[0], own[-1] + 1)
                write_atomically(path, lambda sink: np.save(sink, np.concatenate(parts)))

        raise_on_all_ranks(write)

    def open(self, world: World, max_rows: int) -> bool:
        """Return whether the stored predictions cover the first rows; all ranks must call."""
        files = gather_objects(self._find() if world.is_main else [])[0]
        self._files = files
        return bool(files) and files[-1][1] >= min(len(self._validation.data), max_rows)

    def inputs(self, rows: np.ndarray) -> MicroBatch:
        """Return the predictions for the supervised tokens of `rows` as inputs of the model."""
        parts = [self._read(self._files[0])[:0], *map(self._read_row, rows.tolist())]
        entries = np.concatenate(parts)
        ids = torch.from_numpy(entries["ids"].astype(np.int64))
        return {BASE_IDS: ids, BASE_LOG_P: torch.from_numpy(entries["log_p"].copy())}

    def _path(self, start: int, stop: int) -> Path:
        return self.folder / f"base-{start:06d}-{stop:06d}.npy"

    def _clear(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in self.folder.glob("base-*.npy"):
            path.unlink()

    def _find(self) -> list[tuple[int, int]]:
        """Return the rows of each file, from row 0 to the first that no readable file holds."""
        matches = (NAME.fullmatch(path.name) for path in self.folder.glob("base-*.npy"))
        found: list[tuple[int, int]] = []
        for file in sorted((int(match[1]), int(match[2])) for match in matches if match):
            if file[0] != (found[-1][1] if found else 0) or not self._is_readable(file):
                break
            found.append(file)
        return found

    def _is_readable(self, file: tuple[int, int]) -> bool:
        with contextlib.suppress(OSError, ValueError, IndexError), numpy_value_errors():
            entries = self._read(file)
            names = entries.dtype.names
            return names == ("ids", "log_p") and len(entries) == self._starts[file[1]] - self._starts[file[0]]
        return False

    def _read(self, file: tuple[int, int]) -> np.ndarray:
        if file not in self._opened:
            self._opened[file] = np.load(self._path(*file), mmap_mode="r")
        return self._opened[file]

    def _read_row(self, row: int) -> np.ndarray:
        file = self._files[bisect.bisect_right(self._files, (row, len(self._starts))) - 1]
        first = self._starts[file[0]]
        return self._read(file)[self._starts[row] - first : self._starts[row + 1] - first]
