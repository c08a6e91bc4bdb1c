"""The format: what training reads, what `datasets` reads, scores beside it, what `verify` catches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from emo.common.errors import UserError
from emo.common.files import Hashes, sha256
from emo.data_prep import inspect as look
from emo.data_prep import scores
from emo.data_prep.config import DataConfig
from emo.data_prep.scores import Scores
from emo.data_prep.shards import TokenDataset, content_fingerprint, manifest_text, read_manifest
from emo.data_prep.tokenizer import load_tokenizer
from emo.data_prep.verify import verify
from tests.helpers.corpus import alpaca_rows, prepared, texts, train_set, write_jsonl


@pytest.fixture
def instruct_config(tmp_path: Path) -> DataConfig:
    write_jsonl(tmp_path / "a.jsonl", alpaca_rows(60))
    return prepared(tmp_path, kind="instruct", sequence_len=512, shards=1)


def plain_batch(row: dict[str, Any], block: int) -> list[list[int]]:
    """ids, shifted labels and positions of a row, one token at a time."""
    ids, labels, positions = list(row["input_ids"]), [], []
    spans = row.get("loss_spans", [0, len(ids)])
    learned = {i for a, b in zip(spans[::2], spans[1::2], strict=True) for i in range(a, b)}
    for length in row["segment_lengths"]:
        at = len(positions)
        positions += range(length)
        labels += [ids[i] if i in learned else -100 for i in range(at + 1, at + length)] + [-100]
    padding = block - len(positions)
    return [ids + [0] * padding, labels + [-100] * padding, positions + list(range(padding))]


@pytest.mark.parametrize("overlong", ["text", "split"])
def test_a_segment_names_its_source_document(tmp_path: Path, overlong: str) -> None:
    """Parts of a long text or example in several rows, and its copies, are of one document."""
    if overlong == "text":
        wholes, options = texts(40), {}
        write_jsonl(tmp_path / "a.jsonl", wholes)
    else:
        wholes = texts(40, sentences=30)
        write_jsonl(tmp_path / "a.jsonl", ({"instruction": "Say it.", "output": text} for text in wholes))
        options = {"kind": "instruct", "overlong": "split", "sequence_len": 100}
    config = prepared(tmp_path, sources=[{"files": "a.jsonl", "weight": 2}], **options)
    data, tokenizer = train_set(config), load_tokenizer(config.dir / "tokenizer")
    fits: dict[int, set[int]] = {}  # of each source: the rows whose text its segments can all be parts of
    for row in range(len(data)):
        ids, segments = data._row(row)[:2]
        for end, length, source in zip(np.cumsum(segments), segments, data.sources_of(row), strict=True):
            text = tokenizer.decode(ids[end - length : end], skip_special_tokens=True)
            text = text.rpartition("### Response:")[2].strip()
            near = {i for i, whole in enumerate(wholes) if text in whole}
            fits[int(source)] = fits.get(int(source), near) & near
    assert len(fits) == 40 < data.manifest.segments / 2
    assert sorted(row for rows in fits.values() for row in rows) == list(range(40))


@pytest.mark.parametrize("overlong", [None, "drop", "split"])
def test_batches_are_what_the_columns_say(tmp_path: Path, overlong: str | None) -> None:
    """`datasets` maps the same files; plain Python derives the batch from its columns."""
    write_jsonl(tmp_path / "a.jsonl", alpaca_rows(60) if overlong else texts(120))
    more = {"kind": "instruct", "sequence_len": 180, "overlong": overlong} if overlong else {"shards": 3}
    config = prepared(tmp_path, **more)
    data = train_set(config)
    rows, files = [], []
    for info in data.manifest.shards:
        table = datasets.Dataset.from_file(str(config.dir / "train" / info.file))
        assert table.features["input_ids"].feature.dtype == "uint16"
        rows += list(table)
        files += [(info.file, i) for i in range(len(table))]
    assert len(rows) == len(data) == data.manifest.rows > 10
    chosen = np.random.default_rng(0).permutation(len(data))
    batch = data.batch(chosen)
    assert {name: (array.dtype, array.shape) for name, array in batch.items()} == dict.fromkeys(
        ("input_ids", "labels", "position_ids"), (np.dtype(np.int64), (len(rows), config.sequence_len))
    )
    for i, row in enumerate(chosen):
        expected = plain_batch(rows[row], config.sequence_len)
        found = [batch[name][i].tolist() for name in ("input_ids", "labels", "position_ids")]
        assert found == expected
        assert data.valid[row] == rows[row]["valid"] == sum(label != -100 for label in expected[1])
    assert data.provenance(chosen) == [files[row] for row in chosen]
    assert data.valid.dtype == np.int64 and data.valid.sum() == data.manifest.valid_tokens


def test_a_large_vocabulary_keeps_its_ids(tmp_path: Path) -> None:
    vocab = {"</s>": 0, "?": 1} | {f"w{i}": i for i in range(2, 70_000)}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>").save_pretrained(tmp_path / "large")
    write_jsonl(tmp_path / "a.jsonl", ({"text": f"w{69_000 + i} w{i + 2} w66000"} for i in range(60)))
    config = prepared(tmp_path, tokenizer="large")
    data = train_set(config)
    ids = data.batch(np.arange(len(data)))["input_ids"].ravel().tolist()
    assert ids[:8] == [69_000, 2, 66_000, 0, 69_001, 3, 66_000, 0]
    assert data.manifest.bos_id is None and data.manifest.eos_id == 0


def test_verify_counts_targets_again(instruct_config: DataConfig) -> None:
    """Counts that agree with each other but not with the rows are a fault too."""
    assert verify(instruct_config.dir)[1] == []
    train = instruct_config.dir / "train"
    manifest = read_manifest(train)
    shard = train / manifest.shards[0].file
    table = pa.ipc.open_stream(shard.read_bytes()).read_all()
    counts = table.column("valid").to_numpy().copy()
    counts[3] += 1
    counts[4] -= 1
    with pa.OSFile(str(shard), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as out:
        out.write_table(table.set_column(4, "valid", pa.array(counts)))
    changes = {"sha256": sha256(shard), "bytes": shard.stat().st_size}
    shards = [manifest.shards[0].model_copy(update=changes)]
    identity = content_fingerprint(manifest.kind, manifest.block, manifest.tokenizer_fingerprint, shards)
    changed = manifest.model_copy(update={"shards": shards, "fingerprint": identity})
    (train / "manifest.json").write_text(manifest_text(changed))
    (train / "shard-00000-of-00001.json").unlink()
    (fault,) = verify(instruct_config.dir)[1]
    assert "row 3 supervises" in fault


def test_inspect_colours_exactly_what_is_supervised(instruct_config: DataConfig) -> None:
    data = train_set(instruct_config)
    tokenizer = load_tokenizer(instruct_config.dir / "tokenizer")
    shown = ""
    for row in range(len(data)):
        text = look.coloured(data, row, tokenizer)
        shown += "".join(text.plain[s.start : s.end] for s in text.spans if s.style == look.SUPERVISED)
        rest = "".join(text.plain[s.start : s.end] for s in text.spans if s.style == look.CONTEXT)
        assert "### Instruction:" in rest and rest.count("<s>") == rest.count("### Response:")
    outputs = {row["output"] for row in alpaca_rows(60)}
    assert sorted(shown.split("</s>")[:-1]) == sorted(outputs)


MODEL = {"path": "somewhere", "weights": "0" * 64}


@pytest.fixture
def data(tmp_path: Path) -> TokenDataset:
    """Two shards of packed documents."""
    write_jsonl(tmp_path / "a.jsonl", texts(60))
    config = prepared(tmp_path, sources=[{"files": "a.jsonl", "format": "text"}])
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
            stored, n = found.batch(np.array([row]))[0], data.tokens_of(int(row))
            assert stored[: n - 1].tolist() == [-1e6 * shard - at - i for i in range(1, n)]
            assert not stored[n - 1 :].any()
            at += n


def test_scores_that_are_missing_or_damaged_are_refused(data: TokenDataset, tmp_path: Path) -> None:
    def refused(name: str = "ref") -> None:
        with pytest.raises(UserError):
            Scores(data, name)

    refused()
    scores.begin(data, "ref", MODEL)
    assert not scores.seal(data, "ref", MODEL)
    refused()
    written(data)
    refused("../ref")
    path = scores.shard_file(data, "ref", 1)
    content = path.read_bytes()
    path.write_bytes(content[:-4])
    refused()
    for last, faults in ((b"\0\0\0\0", 1), (content[-4:], 0)):
        path.write_bytes(content[:-4] + last)
        assert len(list(Scores(data, "ref").faults(Hashes(tmp_path / "hashes.json")))) == faults
        assert scores.seal(data, "ref", MODEL) == (not faults)
    about = scores.directory(data, "ref") / scores.ABOUT
    about.write_text(json.dumps(json.loads(about.read_text()) | {"data": "other"}))
    refused()


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
    other = MODEL | {"weights": "1" * 64}
    with pytest.raises(UserError):
        scores.begin(data, "ref", other)
    (mine := data.directory / "scores/ref/mine.txt").write_text("keep me")
    scores.clear(data, "ref")
    scores.begin(data, "ref", other)
    assert mine.is_file()
