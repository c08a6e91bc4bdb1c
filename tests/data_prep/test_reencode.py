"""A shard whose ids are not the tokenizer's own is not sealed, and `verify` sees one that was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from emo.common.errors import UserError
from emo.data_prep import write
from emo.data_prep.encode import RowEncoder
from emo.data_prep.reencode import PlainEncoder, ShardCheck, _same_within
from emo.data_prep.tokenizer import read_tokenizer, save_tokenizer
from emo.data_prep.verify import verify
from emo.data_prep.words import encoder
from tests.helpers.corpus import alpaca_rows, data_config, run, texts, tiny_tokenizer, write_jsonl

CHATML = (
    "{% for m in messages %}<s>{{ m['role'] }}\n{{ m['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
# Settings of what is prepared, and whether verify can tell anything of it.
SORTS: dict[str, tuple[dict[str, Any], bool]] = {
    "text": ({"validation_fraction": 0.3}, True),
    "domains and copies": (
        {"sources": [{"files": "a.jsonl", "weight": 2.5}, {"files": "b.jsonl", "domain": "other"}]},
        True,
    ),
    "long texts": ({"sources": [{"files": "long.txt", "format": "document"}]}, True),
    "instructions": ({"kind": "instruct", "sources": [{"files": "i.jsonl"}], "sequence_len": 400}, True),
    "split": (
        {"kind": "instruct", "sources": [{"files": "i.jsonl"}], "sequence_len": 60, "overlong": "split"},
        False,
    ),
    "a chat_template": (
        {
            "kind": "instruct",
            "sources": [{"files": "i.jsonl"}],
            "sequence_len": 300,
            "template": "chat_template",
        },
        False,
    ),
    "ids": ({"sources": [{"files": "ids.jsonl", "format": "tokens"}]}, False),
}


@pytest.fixture
def files(tmp_path: Path) -> Path:
    write_jsonl(
        tmp_path / "a.jsonl", ({"text": f" {text}\n\n </s> naïve 日本 {text}"} for text in texts(200))
    )
    write_jsonl(tmp_path / "b.jsonl", texts(200, seed=4))
    write_jsonl(tmp_path / "i.jsonl", alpaca_rows(120))
    write_jsonl(tmp_path / "ids.jsonl", ({"ids": [7 + i % 90] * (20 + i)} for i in range(60)))
    (tmp_path / "long.txt").write_text("\n".join(texts(900)), encoding="utf-8")
    save_tokenizer(tiny_tokenizer(), None, tmp_path / "chat")
    (tmp_path / "chat" / "chat_template.jinja").write_text(CHATML, encoding="utf-8")
    return tmp_path


def config_of(files: Path, sort: str) -> Any:
    more = {"sources": [{"files": "b.jsonl"}]} | SORTS[sort][0]
    if sort == "long texts":
        more["shards"] = 1
    if sort == "a chat_template":
        more["tokenizer"] = str(files / "chat")
    return data_config(files, **more)


@pytest.mark.parametrize("sort", SORTS)
def test_what_is_right_is_sealed(files: Path, sort: str) -> None:
    config = config_of(files, sort)
    run(config)
    right, faults = verify(config.dir)
    assert not faults and len(right) == len(config.splits)
    if SORTS[sort][1]:
        assert all("same: none" not in line for line in right)


@pytest.mark.parametrize("sort", SORTS)
def test_what_differs_is_not_sealed(files: Path, sort: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids that are wrong as they leave a worker, and rows that are wrong as they are packed."""
    config = config_of(files, sort)
    encode = RowEncoder.encode

    def shifted(self: RowEncoder, part: Any) -> Any:
        done = encode(self, part)
        return done._replace(ids=done.ids ^ 1)

    with monkeypatch.context() as broken:
        broken.setattr(RowEncoder, "encode", shifted)
        with pytest.raises(UserError) as error:
            run(config)
    assert error.value.code == "not-as-tokenized"
    assert not list(config.dir.rglob("*.arrow")) and not list(config.dir.rglob("manifest.json"))
    assert not list(config.dir.rglob("*.part"))
    lists = write._lists
    with monkeypatch.context() as broken:
        broken.setattr(write, "_lists", lambda values, lengths: lists(values[::-1].copy(), lengths))
        with pytest.raises(UserError):
            run(config)
    run(config)
    assert not verify(config.dir)[1]


@pytest.mark.parametrize("sort", [sort for sort, (_, told) in SORTS.items() if told])
def test_verify_notices_what_was_sealed_wrong(
    files: Path, sort: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(files, sort)
    encode = RowEncoder.encode

    def shifted(self: RowEncoder, part: Any) -> Any:
        encoded = encode(self, part)
        return encoded._replace(ids=encoded.ids ^ 1)

    monkeypatch.setattr(RowEncoder, "encode", shifted)
    monkeypatch.setattr(ShardCheck, "compare", lambda *_: None)
    run(config)
    assert verify(config.dir)[1]


def test_the_plain_way_is_that_of_words(tmp_path: Path) -> None:
    """For tokenizers that put a space before a text in every way that there is."""
    lines = [*texts(50), " x\n\n y", "naïve 日本"]
    for number, (normalizer, splitter) in enumerate(
        [
            (normalizers.Prepend("▁"), None),
            (normalizers.Sequence([normalizers.NFC(), normalizers.Prepend("▁")]), None),
            (None, pre_tokenizers.Metaspace()),
            (None, pre_tokenizers.ByteLevel(add_prefix_space=True)),
            (None, pre_tokenizers.Sequence([pre_tokenizers.Digits(), pre_tokenizers.ByteLevel()])),
            (None, None),
        ]
    ):
        backend = Tokenizer(models.BPE(unk_token="<unk>"))
        backend.decoder = decoders.ByteLevel()
        if normalizer is not None:
            backend.normalizer = normalizer
        if splitter is not None:
            backend.pre_tokenizer = splitter
        specials = ["<unk>", "</s>"]
        backend.train_from_iterator(lines, trainers.BpeTrainer(vocab_size=300, special_tokens=specials))
        place = tmp_path / str(number)
        place.mkdir()
        backend.save(str(place / "tokenizer.json"))
        (place / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}), encoding="utf-8")
        plain = PlainEncoder(*read_tokenizer(place))
        for line in lines:
            for continuing in (False, True, False):
                expected = encoder(place, continuing).encode(line, add_special_tokens=False).ids
                assert plain.ids(line, continuing) == expected


PARTS = st.sampled_from(
    ["dog ", "6. ", "日本語", "🙂🙂🙂", "солнце ", "▁", "e\u0301", "\ufffd", "\u2028", "\n", " "]
)


@given(st.lists(PARTS, min_size=20, max_size=200), st.integers(0, 400), st.sampled_from([40, 64, 512]))
def test_any_stretch_of_right_ids_passes(parts: list[str], start: int, length: int) -> None:
    """Also where it begins or ends within a run of bytes, and where the text has replacement characters."""
    plain = PlainEncoder(*read_tokenizer(tiny_tokenizer()))
    ids = plain.ids("".join(parts))[start : start + length]
    assert _same_within(plain, ids) is not False
    wrong = [number ^ 1 for number in ids]
    assert len(ids) < 100 or _same_within(plain, wrong) is not True
