"""The ranks share a batch, and the rows are those that were prepared."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from emo.common.errors import UserError
from emo.common.labels import IGNORE
from emo.data_prep.config import DataConfig
from emo.data_prep.shards import open_prepared
from emo.pipeline.batches import Batches, Loader, check_content
from emo.pipeline.order import BatchOrder
from emo.pipeline.ranks import World
from emo.pipeline.run_dir import DATA_HASHES
from tests.helpers.corpus import data_config, run, texts, write_jsonl

CPU = torch.device("cpu")


@pytest.fixture
def config(tmp_path: Path) -> DataConfig:
    write_jsonl(tmp_path / "a.jsonl", ({"text": text} for text in texts(80)))
    config = data_config(tmp_path, sources=[{"files": "a.jsonl"}])
    run(config)
    return config


def test_micro_batches_cover_the_rows_in_order(config: DataConfig) -> None:
    """With the labels of the rows that are real, planned."""
    data, _ = open_prepared(config)
    rows = np.arange(len(data))[:7]
    real = np.arange(len(rows)) != 4
    micro = list(Batches(data, None, 3, CPU).read(rows, real))
    whole = data.batch(rows)
    whole["labels"][4] = IGNORE
    assert [len(part["input_ids"]) for part in micro] == [3, 3, 1]
    assert not any("domain" in part for part in micro)  # nobody sums their losses apart
    for name in ("input_ids", "position_ids"):
        assert np.array_equal(np.concatenate([part[name] for part in micro]), whole[name])
    labels = np.full(whole["labels"].shape, IGNORE)
    for start, part in zip((0, 3, 6), micro, strict=True):
        labels[start : start + 3].flat[part["labels"].positions] = part["labels"].labels
    assert np.array_equal(labels, whole["labels"])


def test_the_loader_reads_one_step_ahead(config: DataConfig) -> None:
    """While a step computes the next is read, after the last nothing; a step out of turn is right, too."""
    data, _ = open_prepared(config)
    steps_read: list[int] = []

    class Noting(BatchOrder):
        def step_rows(self, step: int) -> np.ndarray:
            steps_read.append(step)
            return super().step_rows(step)

    order = BatchOrder(len(data), 4, 0)
    loader = Loader(Noting(len(data), 4, 0), Batches(data, None, 2, CPU), 10**6, World(1, 2, CPU))
    for step in (5, 6, 9):
        result = loader.step(step, last=step == 9)
        rows = order.step_rows(step)
        assert np.array_equal(result.rows, rows)
        assert result.valid == data.valid[rows].sum()
        assert result.damage is None
        chosen = data.batch(rows[2:])["input_ids"]
        assert np.array_equal(np.concatenate([part["input_ids"] for part in result.micro]), chosen)
    loader.vocab_size = 2  # no row can be of so small a vocabulary
    result = loader.step(11, last=True)
    assert result.damage is not None and result.micro == []
    loader.close()
    assert steps_read == [5, 6, 7, 9, 11]


def test_a_shard_changed_in_place_stops_every_start(
    config: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the first start and, changed since, at a later one."""
    monkeypatch.setattr("emo.pipeline.batches.gather_objects", lambda value: [value])
    world, run_dir = World(0, 1, torch.device("cpu")), tmp_path / "run"
    run_dir.mkdir()
    data, _ = open_prepared(config)
    check_content(run_dir, [data], world)
    assert (run_dir / DATA_HASHES).is_file()
    check_content(run_dir, [data], world)
    shard = config.dir / "train" / data.manifest.shards[1].file
    changed = bytearray(shard.read_bytes())
    changed[len(changed) // 2] ^= 1
    shard.write_bytes(changed)
    for folder in (run_dir, tmp_path):
        with pytest.raises(UserError, match=rf"{shard.name} was changed after it was prepared; run: "):
            check_content(folder, [data], world)
