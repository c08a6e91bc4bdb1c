"""Scores beside the shards: read as tokens are, and refused when they belong to something else."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from emo.common.errors import UserError
from emo.common.files import Hashes
from emo.data_prep import scores
from emo.data_prep.scores import Scores
from emo.data_prep.shards import TokenDataset
from tests.helpers.corpus import data_config, run, texts, train_set, write_jsonl

MODEL = {"path": "somewhere", "weights": "0" * 64}


@pytest.fixture
def data(tmp_path: Path) -> TokenDataset:
    """Two shards of packed documents."""
    write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in texts(60)])
    config = data_config(tmp_path, sources=[{"files": "a.jsonl", "format": "text"}])
    run(config)
    return train_set(config)


def written(data: TokenDataset, name: str = "ref") -> None:
    """A number for every token that says which one it is."""
    scores.begin(data, name, MODEL)
    for shard, info in enumerate(data.manifest.shards):
        scores.write_shard(scores.shard_file(data, name, shard), -np.arange(info.tokens) - 1e6 * shard)
    assert scores.seal(data, name, MODEL)


def test_a_score_stands_where_its_label_stands(data: TokenDataset) -> None:
    """Every label of every row gets the number of the very token in its shard."""
    written(data)
    found = Scores(data, "ref")
    for shard in range(2):
        at = 0
        for row in data.rows_of(shard):
            batch, stored = data.batch(np.array([row])), found.batch(np.array([row]))[0]
            n = data.tokens_of(int(row))
            assert stored[: n - 1].tolist() == [-1e6 * shard - at - i for i in range(1, n)]
            assert not stored[n - 1 :].any()
            labels = batch["labels"][0]
            assert all(labels[i] in (-100, batch["input_ids"][0][i + 1]) for i in range(n - 1))
            at += n


def test_what_is_missing_or_damaged(data: TokenDataset, tmp_path: Path) -> None:
    with pytest.raises(UserError):
        Scores(data, "ref")
    scores.begin(data, "ref", MODEL)
    assert not scores.seal(data, "ref", MODEL)
    with pytest.raises(UserError):
        Scores(data, "ref")
    written(data)
    with pytest.raises(UserError):
        Scores(data, "reff")
    path = scores.shard_file(data, "ref", 1)
    content = path.read_bytes()
    path.write_bytes(content[:-4])
    with pytest.raises(UserError):
        Scores(data, "ref")
    path.write_bytes(content[:-4] + b"\0\0\0\0")
    (fault,) = Scores(data, "ref").faults(Hashes(tmp_path / "hashes.json"))
    assert "was changed after it was written" in fault
    assert not scores.seal(data, "ref", MODEL)
    path.write_bytes(content)
    assert not list(Scores(data, "ref").faults(Hashes(tmp_path / "hashes.json")))
    about = scores.directory(data, "ref") / scores.ABOUT
    about.write_text(json.dumps(json.loads(about.read_text()) | {"data": "other"}))
    with pytest.raises(UserError):
        Scores(data, "ref")
    with pytest.raises(UserError):
        Scores(data, "../ref")


@pytest.mark.parametrize("bad", [float("nan"), float("-inf"), 0.5])
def test_only_log_probabilities_are_written(data: TokenDataset, bad: float) -> None:
    scores.begin(data, "ref", MODEL)
    path = scores.shard_file(data, "ref", 0)
    with pytest.raises(UserError):
        scores.write_shard(path, np.array([-1.0, bad]))
    assert not path.exists()


def test_another_models_scores_are_not_completed(data: TokenDataset) -> None:
    scores.begin(data, "ref", MODEL)
    scores.begin(data, "ref", MODEL)
    with pytest.raises(UserError):
        scores.begin(data, "ref", MODEL | {"weights": "1" * 64})
    (data.directory / "scores" / "ref" / "mine.txt").write_text("keep me")
    scores.clear(data, "ref")
    scores.begin(data, "ref", MODEL | {"weights": "1" * 64})
    assert (data.directory / "scores" / "ref" / "mine.txt").is_file()


def test_preparing_again_takes_them_away(data: TokenDataset, tmp_path: Path) -> None:
    """They belong to the old shards."""
    written(data)
    config = data_config(tmp_path, sources=[{"files": "a.jsonl", "format": "text"}], seed=9)
    run(config, force=True)
    assert not (config.dir / "train" / "scores").exists()
