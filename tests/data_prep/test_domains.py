"""Domains of rows, and validation sets with names: from the recipe to the reader."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from emo.common.errors import UserError
from emo.data_prep.config import DataConfig
from emo.data_prep.shards import Manifest, manifest_text, open_prepared
from emo.data_prep.verify import verify
from tests.data_prep.test_prepare import rows_of
from tests.helpers.corpus import alpaca_rows, data_config, prepared, run, texts, train_set, write_jsonl

COLUMNS = {"text": ("input_ids", "segment_lengths", "valid")}
COLUMNS["instruct"] = (*COLUMNS["text"], "loss_spans")
# sha256 of those columns, as format 2 held them, which knew no domains.
FORMAT_2 = {
    ("text", None): "ef2f9b87776facca7998ce17b3ccd32cd568575c4714dbb422f80f48b6996093",
    ("text", 6000): "37143d5aa21fc5c818d5dc84dec0f82d689539cc0bfd3d8573fd60c715c126bc",
    ("instruct", None): "84456b9368cca2e0569fec90eacb5baa63b8ed5d5c4bf5d4408cdf73e986d755",
    ("instruct", 6000): "b3b55cd83b2141db9b54e89de3a8f8d1f69248877984303f68f4f794cf64d036",
}


def word_tokenizer(place: Path) -> str:
    """One whose ids depend on no library's training: the words of the tests' texts."""
    words = sorted({word.strip(".") for text in texts(300) for word in text.split()})
    vocab = {token: i for i, token in enumerate(("</s>", "?", ".", *words))}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>").save_pretrained(place / "words")
    return "words"


@pytest.mark.parametrize("kind", ["text", "instruct"])
@pytest.mark.parametrize("limit", [None, 6000])
def test_data_without_domains_hold_the_rows_of_format_2(tmp_path: Path, kind: str, limit: int | None) -> None:
    sources: list[dict[str, Any]] = [{"files": "a.jsonl", "weight": 2.5}, {"files": "b.jsonl"}]
    for seed, name in enumerate(("a.jsonl", "b.jsonl")):
        write_jsonl(tmp_path / name, texts(150, seed) if kind == "text" else alpaca_rows(90, seed))
    common = {"kind": kind, "sequence_len": 32 if kind == "text" else 128, "limit_tokens": limit, "shards": 3}
    tokenizer = word_tokenizer(tmp_path)
    config = prepared(tmp_path, sources=sources, validation_fraction=0.2, tokenizer=tokenizer, **common)
    digest = hashlib.sha256()
    for split in config.splits:
        for file in sorted((config.dir / split).glob("*.arrow")):
            table = pa.ipc.open_stream(file.read_bytes()).read_all()
            for name in COLUMNS[kind]:
                digest.update(repr(table.column(name).to_pylist()).encode())
    assert digest.hexdigest() == FORMAT_2[kind, limit]


MIXED: list[dict[str, Any]] = [
    {"files": "a.jsonl", "domain": "news"},
    {"files": "b.jsonl", "weight": 2},
    {"files": "c.jsonl", "domain": "news"},
    {"files": "d.jsonl", "domain": "law"},
]
SETS = {
    "some": [{"files": "e.jsonl", "domain": "law", "limit": 20}],
    "all": [{"files": "f.jsonl"}, {"files": "e.jsonl", "domain": "law"}],
}


def mixed(root: Path, **data: Any) -> DataConfig:
    """Four files of three domains, one of them in two, and two validation sets that share rows."""
    for seed, name in enumerate("abcdef"):
        write_jsonl(root / f"{name}.jsonl", texts(50 + 10 * seed, seed))
    return data_config(root, **({"sources": MIXED, "validation": SETS} | data))


def token_sources(root: Path) -> tuple[list[dict[str, Any]], int]:
    """Token ids whose hundreds say the domain, in two files each that do not lie together; how many."""
    rng, sources, count = np.random.default_rng(0), [], 0
    for number, domain in enumerate((*range(4), *range(4))):
        low = 100 * domain
        rows = [rng.integers(low, low + 100, rng.integers(1, 60)).tolist() for _ in range(40)]
        write_jsonl(root / f"{number}.jsonl", ({"ids": row} for row in rows))
        sources.append({"files": f"{number}.jsonl", "format": "tokens", "domain": f"d{domain}"})
        count += sum(map(len, rows))
    return sources, count


@pytest.mark.parametrize(("limit", "shards"), [(None, 3), (4_000, 3), (3_000, 1), (100, 5), (10**6, 2)])
def test_no_row_holds_two_domains_and_limits_stay_exact(
    tmp_path: Path, limit: int | None, shards: int
) -> None:
    sources, kept = token_sources(tmp_path)
    config = prepared(tmp_path, sources=sources, shards=shards, limit_tokens=limit, dedup="none")
    data = train_set(config)
    assert data.domains == ("d0", "d1", "d2", "d3")
    ids = data.batch(np.arange(len(data)))["input_ids"]
    assert (ids // 100 == data.domain[:, None]).all()
    assert [one.rows for one in data.manifest.domains] == np.bincount(data.domain, minlength=4).tolist()
    lost = data.manifest.counts.get("remainder_tokens_dropped", 0)
    if limit is None or limit > kept:
        assert data.manifest.tokens == kept - lost and lost < 32 * (shards + 8)
    else:
        assert data.manifest.tokens == limit // 32 * 32


def test_sets_are_read_by_name_in_the_order_of_the_recipe(tmp_path: Path) -> None:
    config = mixed(tmp_path)
    run(config)
    data, sets = open_prepared(config)
    assert list(sets) == ["some", "all"] == list(config.validation_sets)
    assert [one.domains for one in sets.values()] == [("law",), ("default", "law")]
    assert sets["some"].manifest.documents == 20 and sets["all"].manifest.documents == 90 + 100
    assert sets["all"].manifest.split == "validation-all" and len(data) > 100
    assert len(verify(config.dir)[0]) == 3 and verify(config.dir)[1] == []
    other = mixed(tmp_path, validation=dict(reversed(SETS.items())))
    for use in (run, open_prepared):
        with pytest.raises(UserError) as error:
            use(other)
        assert error.value.code == "settings-differ"
    shutil.rmtree(config.dir / "validation-all")
    with pytest.raises(UserError):
        open_prepared(config)
    assert any("validation-all does not exist" in fault for fault in verify(config.dir)[1])


def test_a_row_of_two_sets_is_in_both_and_one_that_is_trained_on_in_none(tmp_path: Path) -> None:
    train, held_out = texts(60, 1, 3), texts(60, 2, 3)
    write_jsonl(tmp_path / "a.jsonl", train)
    write_jsonl(tmp_path / "v.jsonl", [*held_out, *train[:30], *held_out[:9]])
    write_jsonl(tmp_path / "w.jsonl", ({"text": text.upper()} for text in [*held_out[:40], *train[30:]]))
    sets = {name: [{"files": f"{name}.jsonl"}] for name in "vw"} | {"both": [{"files": "[vw].jsonl"}]}
    for dedup, both in (("exact", 60 + 40 + 30), ("near", 60)):
        config = prepared(tmp_path, dir=str(tmp_path / dedup), validation=sets, dedup=dedup)
        assert rows_of(config) == train
        assert rows_of(config, 1) == held_out
        capitals = held_out[:40] if dedup == "near" else [*held_out[:40], *train[30:]]
        assert rows_of(config, 2) == [text.upper() for text in capitals]
        assert len(rows_of(config, 3)) == both


def test_verify_counts_domains_again(tmp_path: Path) -> None:
    """Also when the digest fits the change: whoever changes a manifest can do that."""
    config = mixed(tmp_path, validation=[], shards=1)
    run(config)
    train = config.dir / "train"
    (train / "shard-00000-of-00001.json").unlink()
    whole = (train / "manifest.json").read_text()
    for change in (
        lambda tree: tree["domains"].reverse(),
        lambda tree: tree["domains"][0].update(documents=3),
        lambda tree: tree["shards"][0]["domains"][1].update(rows=3),
        lambda tree: tree["shards"][0]["domains"].pop(),
    ):
        change(tree := json.loads(whole))
        (train / "manifest.json").write_text(manifest_text(Manifest.model_validate(tree)))
        assert verify(config.dir)[1]
