"""Prepared data, tokenizers and packed files that somebody made to do harm: one line each, and no harm."""

from __future__ import annotations

import contextlib
import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import zstandard

from emo.common.errors import UserError
from emo.data_prep import inputs
from emo.data_prep.cli import main
from emo.data_prep.inputs import read_text
from emo.data_prep.shards import MANIFEST, Manifest, TokenDataset, manifest_text, read_manifest
from emo.data_prep.tokenizer import save_tokenizer
from tests.helpers.corpus import alpaca_rows, data_config, run, texts, tiny_tokenizer, write_jsonl


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    """Instructions, prepared in one shard."""
    write_jsonl(tmp_path / "a.jsonl", alpaca_rows(12))
    config = data_config(
        tmp_path, kind="instruct", sources=[{"files": "a.jsonl"}], shards=1, sequence_len=512
    )
    run(config)
    return config.dir


def resealed(place: Path, **changes: Any) -> None:
    """Change a manifest and its digest, as whoever made it can."""
    tree = json.loads((place / MANIFEST).read_text()) | changes
    (place / MANIFEST).write_text(json.dumps(tree))
    with contextlib.suppress(ValueError):  # what cannot be a manifest needs no digest
        (place / MANIFEST).write_text(manifest_text(Manifest.model_validate(tree)))


def rewritten(place: Path, change: Any) -> None:
    """Change the bytes of the shard, and the manifest accordingly."""
    (path,) = place.glob("*.arrow")
    path.write_bytes(change(path.read_bytes()))
    shard = json.loads((place / MANIFEST).read_text())["shards"][0]
    resealed(place, shards=[shard | {"bytes": path.stat().st_size}])


@pytest.mark.parametrize("name", ["../../a.jsonl", "/etc/hostname", "..", "train/shard.arrow", ""])
def test_a_manifest_names_no_file_elsewhere(prepared: Path, name: str) -> None:
    place = prepared / "train"
    shard = json.loads((place / MANIFEST).read_text())["shards"][0]
    resealed(place, shards=[shard | {"file": name}])
    with pytest.raises(UserError, match=r"shards.0.file"):
        TokenDataset(place)


@pytest.mark.parametrize(
    "changes", [{"rows": 10**400}, {"rows": -1}, {"block": 1 << 40}, {"vocab_size": -5}, {"tokens": 2**54}]
)
def test_numbers_of_a_manifest_are_counts(prepared: Path, changes: dict[str, int]) -> None:
    resealed(prepared / "train", **changes)
    with pytest.raises(UserError, match=f"is not a manifest of this version .*{next(iter(changes))}"):
        read_manifest(prepared / "train")


def test_a_shard_that_points_beyond_itself_is_damaged(prepared: Path) -> None:
    """Arrow believes the lengths in a file; reading such a row reads other memory, or ends the process."""
    place = prepared / "train"
    rows = read_manifest(place).rows.to_bytes(8, "little")

    def longer(content: bytes) -> bytes:
        assert content.count(rows) >= 2
        return content.replace(rows, (10**7).to_bytes(8, "little"))

    rewritten(place, longer)
    with pytest.raises(UserError, match="is damaged"):
        TokenDataset(place)


def test_a_shard_of_other_columns_is_damaged(prepared: Path) -> None:
    place = prepared / "train"
    (path,) = place.glob("*.arrow")
    table = pa.table({"input_ids": ["a"], "segment_lengths": [[1]], "loss_spans": [[0]], "valid": [1]})
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    rewritten(place, lambda content: content)
    with pytest.raises(UserError, match="its columns are not those"):
        TokenDataset(place)


def test_spans_that_are_no_stretch_are_damage(prepared: Path) -> None:
    data = TokenDataset(prepared / "train")
    assert data.damage(np.arange(len(data)), 400) is None
    shard = data._shards[0]
    offsets, values = shard.columns["loss_spans"][0]
    start, end = values[:2].tolist()
    for wrong in ([end, start], [start, 4000], [start, start]):
        shard.columns["loss_spans"][0] = offsets, np.array([*wrong, *values[2:]], np.uint32)
        assert "supervised spans" in (data.damage(np.array([0]), 400) or "")


@pytest.mark.parametrize("ending", [".zst", ".gz"])
def test_a_small_file_does_not_unpack_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    pack = {".zst": zstandard.compress, ".gz": gzip.compress}[ending]
    path = tmp_path / f"test.jsonl{ending}"
    monkeypatch.setattr(inputs, "TEXT_LIMIT", 10 << 20)
    path.write_bytes(pack(bytes(9 << 20)))
    assert len(read_text(path)) == 9 << 20
    path.write_bytes(pack(bytes(64 << 20)))
    assert path.stat().st_size < 1 << 20
    with pytest.raises(UserError, match="holds more than 10 MiB"):
        read_text(path)


TOKENIZERS: dict[str, tuple[str, Any, str]] = {
    "a huge id": (
        "tokenizer.json",
        lambda t: t["model"]["vocab"].update({"a": 4 * 10**9}),
        "token ids is no",
    ),
    "an id below zero": ("tokenizer.json", lambda t: t["added_tokens"][0].update(id=-1), "token ids is no"),
    "no model": ("tokenizer.json", lambda t: t.pop("model"), "cannot be read: 'model'"),
    "a name that is a number": (
        "tokenizer_config.json",
        lambda t: t.update(eos_token=5),
        "eos_token must be text, not int",
    ),
}


@pytest.mark.parametrize("case", TOKENIZERS)
def test_a_tokenizer_of_nonsense_is_one_line(tmp_path: Path, case: str) -> None:
    """A huge id ended the process: the library makes room for all ids below it."""
    file, change, message = TOKENIZERS[case]
    place = tmp_path / "own"
    place.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        tree = json.loads((tiny_tokenizer() / name).read_text())
        if name == file:
            change(tree)
        (place / name).write_text(json.dumps(tree))
    with pytest.raises(UserError, match=message):
        save_tokenizer(place, None, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_names_of_files_cannot_act_on_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "\x1b]0;owned\a.jsonl"
    write_jsonl(tmp_path / name, [{"text": text} for text in texts(9)])
    (tmp_path / name).write_bytes(b"{broken\n" + (tmp_path / name).read_bytes())
    recipe = {
        "data": {
            "dir": str(tmp_path / "out"), "root": str(tmp_path), "tokenizer": str(tiny_tokenizer()),
            "sources": [{"files": "*.jsonl"}], "sequence_len": 32,
        }
    }  # fmt: skip
    (tmp_path / "r.yaml").write_text(json.dumps(recipe))
    assert main(["prepare", str(tmp_path / "r.yaml"), "--workers", "1"]) == 2
    said = "".join(capsys.readouterr())
    assert "\x1b" not in said and "line 1: broken json" in said
    assert not (tmp_path / "out/train" / MANIFEST).exists()
