"""A shard whose ids are not the tokenizer's own is not sealed, and `verify` sees one that was."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emo.common.errors import UserError
from emo.data_prep import write
from emo.data_prep.encode import RowEncoder
from emo.data_prep.reencode import PlainEncoder, ShardCheck, _same
from emo.data_prep.tokenizer import read_tokenizer, save_tokenizer
from emo.data_prep.verify import verify
from tests.helpers.corpus import alpaca_rows, data_config, run, texts, tiny_tokenizer, write_jsonl

CHATML = (
    "{% for m in messages %}<s>{{ m['role'] }}\n{{ m['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
EXAMPLES = {"kind": "instruct", "sources": [{"files": "i.jsonl"}]}
SORTS: dict[str, tuple[dict[str, Any], bool]] = {
    "text": ({"validation_fraction": 0.3}, True),
    "copies": ({"sources": [{"files": "a.jsonl", "weight": 2.5}, {"files": "b.jsonl", "domain": "b"}]}, True),
    "long texts": ({"sources": [{"files": "long.txt", "format": "document"}], "shards": 1}, True),
    "instructions": (EXAMPLES | {"sequence_len": 400}, True),
    "split": (EXAMPLES | {"sequence_len": 60, "overlong": "split"}, False),
    "chat": (EXAMPLES | {"sequence_len": 300, "template": "chat_template", "tokenizer": "chat"}, False),
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
    return data_config(files, **({"sources": [{"files": "b.jsonl"}]} | SORTS[sort][0]))


def shifted(self: RowEncoder, part: Any, encode: Any = RowEncoder.encode) -> Any:
    """Ids that are wrong as they leave a worker."""
    done = encode(self, part)
    return done._replace(ids=done.ids ^ 1)


@pytest.mark.parametrize("sort", SORTS)
def test_what_differs_is_not_sealed(files: Path, sort: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong as it leaves a worker, or as it is packed; what is right is sealed, and verified."""
    config = config_of(files, sort)
    with monkeypatch.context() as broken:
        broken.setattr(RowEncoder, "encode", shifted)
        with pytest.raises(UserError) as error:
            run(config)
    assert error.value.code == "not-as-tokenized"
    assert not [p for name in ("*.arrow", "manifest.json", "*.part") for p in config.dir.rglob(name)]
    lists = write._lists
    with monkeypatch.context() as broken:
        broken.setattr(write, "_lists", lambda values, lengths: lists(values[::-1].copy(), lengths))
        with pytest.raises(UserError):
            run(config)
    run(config)
    right, faults = verify(config.dir)
    assert not faults and len(right) == len(config.splits)
    assert not SORTS[sort][1] or all("same: none" not in line for line in right)


@pytest.mark.parametrize("sort", [sort for sort, (_, told) in SORTS.items() if told])
def test_verify_notices_what_is_wrong(files: Path, sort: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(files, sort)
    monkeypatch.setattr(RowEncoder, "encode", shifted)
    monkeypatch.setattr(ShardCheck, "compare", lambda *_: None)
    run(config)
    assert verify(config.dir)[1]


PARTS = st.sampled_from(
    ["dog ", "6. ", "日本語", "🙂🙂🙂", "солнце ", "▁", "e\u0301", "\ufffd", "\u2028", "\n", " "]
)


@cache
def plain_encoder() -> PlainEncoder:
    return PlainEncoder(*read_tokenizer(tiny_tokenizer()))


@given(st.lists(PARTS, min_size=20, max_size=200), st.integers(40, 600))
def test_the_beginning_of_right_ids_passes(parts: list[str], length: int) -> None:
    """Also where it ends within a run of bytes, and where the text has replacement characters."""
    plain = plain_encoder()
    ids = plain.ids("".join(parts))
    assert _same(plain, [], ids[:length], len(ids) <= length) is not False
    wrong = [number ^ 1 for number in ids[:length]]
    assert len(wrong) < 40 or _same(plain, [], wrong, False) is not True
