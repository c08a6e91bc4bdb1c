"""Nothing of the sources is lost without a word: columns, files and tokens that are not used are said."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from emo.common.errors import UserError
from emo.data_prep.inputs import open_text
from emo.data_prep.tokenizer import load_tokenizer, save_tokenizer
from tests.helpers.corpus import (
    alpaca_rows,
    data_config,
    run,
    segments,
    texts,
    tiny_tokenizer,
    train_set,
    write_jsonl,
)


def test_a_tokenizer_without_an_end_is_refused_for_instructions(tmp_path: Path) -> None:
    """Text is prepared, with a note."""
    write_jsonl(tmp_path / "a.jsonl", alpaca_rows(40))
    (tmp_path / "a.txt").write_text("\n".join(texts(99)))
    for name, special in (("bare", {}), ("other", {"eos_token": "<end>"})):
        place = tmp_path / name
        place.mkdir()
        (place / "tokenizer.json").write_bytes((tiny_tokenizer() / "tokenizer.json").read_bytes())
        (place / "tokenizer_config.json").write_text(json.dumps(special))
        common = {"tokenizer": name, "dir": str(tmp_path / f"out-{name}")}
        with pytest.raises(UserError, match=f"tokenizer {name} has no end-of-sequence token, so that"):
            run(data_config(tmp_path, kind="instruct", sources=[{"files": "a.jsonl"}], **common))
        said = run(data_config(tmp_path, sources=[{"files": "a.txt"}], **common))
        assert any("has no end-of-sequence token: nothing in the tokens" in line for line in said)


def test_windows_wikitext_is_wikitext(shared_data: Path, tmp_path: Path) -> None:
    """Line ends, and blanks at the ends of lines, change neither documents nor their number."""
    with open_text(shared_data / "lm/wikitext-2-v1/validation.txt.zst") as stream:
        lines = stream.read()[:300_000].split(b"\n")
    found = {}
    for name, content in {
        "unix": b"\n".join(lines),
        "windows": b"\r\n".join(lines),
        "stripped": b"\n".join(line.strip() for line in lines),
    }.items():
        (tmp_path / f"{name}.txt").write_bytes(content)
        config = data_config(tmp_path, dir=str(tmp_path / name), sources=[{"files": f"{name}.txt"}])
        run(config)
        found[name] = train_set(config)
    assert found["unix"].fingerprint == found["windows"].fingerprint
    assert found["unix"].manifest.documents == found["stripped"].manifest.documents > 10


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "latin-1"])
def test_a_file_of_another_encoding_beside_good_ones_is_an_error(tmp_path: Path, encoding: str) -> None:
    (tmp_path / "a.txt").write_text("\n".join(texts(50)))
    (tmp_path / "b.txt").write_bytes("\n".join(f"é {text}" for text in texts(50, seed=1)).encode(encoding))
    with pytest.raises(UserError, match=r"^b.txt (is UTF-16|has no usable row \(50 (bad utf8|control))"):
        run(data_config(tmp_path, sources=[{"files": "*.txt"}]))


def test_file_names_that_are_not_utf8_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\n".join(texts(50)))
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.txt")).write_bytes(b"some words\n")
    with pytest.raises(UserError, match=r"caf\\xe9.txt' is not UTF-8; rename it") as caught:
        run(data_config(tmp_path, sources=[{"files": "*.txt"}]))
    str(caught.value).encode()


def test_rows_are_read_from_saved_data_sets(tmp_path: Path) -> None:
    """Directories of save_to_disk, of a data set and of several splits."""
    import datasets

    made = datasets.Dataset.from_dict({"text": texts(100)})
    made.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": made, "test": made.select([1])}).save_to_disk(str(tmp_path / "two"))
    (tmp_path / "a.txt").write_text("\n".join(texts(100)))
    prints = set()
    for i, source in enumerate(({"files": "a.txt"}, {"files": "one"}, {"files": "t*"}, {"hub": "one"})):
        if "hub" in source:
            source = {"hub": str(tmp_path / "one")}
        config = data_config(tmp_path, dir=str(tmp_path / f"out{i}"), sources=[source])
        said = run(config)
        assert not any("not pinned" in line for line in said)
        prints.add(train_set(config).fingerprint)
    assert len(prints) == 1
    with pytest.raises(UserError, match="two has no split dev; it has train, test"):
        run(data_config(tmp_path, dir=str(tmp_path / "x"), sources=[{"files": "two", "split": "dev"}]))


def test_json_on_one_line(tmp_path: Path) -> None:
    """An object that holds the rows, on one line, longer than a read; one row is still a row."""
    made = texts(3000)
    (tmp_path / "a.json").write_text(json.dumps({"version": "1", "data": [{"text": t} for t in made]}))
    config = data_config(tmp_path, sources=[{"files": "a.json"}])
    run(config)
    assert train_set(config).manifest.documents == 3000
    talk = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a " * 99}]
    (tmp_path / "b.json").write_text(json.dumps({"messages": talk}))
    source = {"files": "b.json"}
    config = data_config(
        tmp_path, dir=str(tmp_path / "b"), kind="instruct", sequence_len=512, sources=[source]
    )
    run(config)
    assert train_set(config).manifest.documents == 1


def test_special_tokens_of_any_tokenizer_are_never_found_in_text(tmp_path: Path) -> None:
    """With ignore_merges a continuing "</s>" was the end of the sequence; in Unigram any was."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    from emo.data_prep.words import encoder

    tree = json.loads((tiny_tokenizer() / "tokenizer.json").read_text())
    tree["model"]["ignore_merges"] = True
    unigram = Tokenizer(models.Unigram([("<unk>", 0.0), ("</s>", 0.0), *((c, -3.0) for c in "</s>ab")], 0))
    unigram.pre_tokenizer = pre_tokenizers.Metaspace()
    unigram.add_special_tokens(["</s>"])
    for name, backend in (("bpe", Tokenizer.from_str(json.dumps(tree))), ("unigram", unigram)):
        backend.save(str(tmp_path / "tokenizer.json"))
        (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>", "unk_token": "<unk>"}')
        save_tokenizer(tmp_path, None, tmp_path / name)
        end = backend.token_to_id("</s>")
        for tokenizer in (tmp_path / name, load_tokenizer(tmp_path / name)):
            for continuing in (False, True):
                bare = encoder(tokenizer, continuing)
                assert all(end not in bare.encode(text).ids for text in ("</s>", "a</s>b", "a </s>"))


def test_a_tokenizer_that_draws_is_made_to_stop(tmp_path: Path) -> None:
    tree = json.loads((tiny_tokenizer() / "tokenizer.json").read_text())
    tree["model"]["dropout"] = 0.5
    (tmp_path / "drawing").mkdir()
    (tmp_path / "drawing" / "tokenizer.json").write_text(json.dumps(tree))
    text = "the same words have the same ids " * 5
    drawing, plain = load_tokenizer(tmp_path / "drawing"), load_tokenizer(tiny_tokenizer())
    assert {tuple(drawing(text).input_ids) for _ in range(5)} == {tuple(plain(text).input_ids)}


def test_tokens_are_used_as_they_are(tmp_path: Path) -> None:
    rows = [[1, 5, 6, 7], [1, 9, 1, 8], [1, 4, 4, 4]]
    write_jsonl(tmp_path / "t.jsonl", [{"ids": ids, "text": "not read"} for ids in rows])
    config = data_config(
        tmp_path, sequence_len=4, shards=1, sources=[{"files": "t.jsonl", "format": "tokens"}], dedup="none"
    )
    run(config)
    assert [ids for ids, _ in segments(train_set(config))] == rows


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"ids": "1 2"}, "column ids must be a list of token ids, not str"),
        ({"ids": [1, -2]}, "column ids must be a list of token ids, not list"),
        ({"ids": [1, True]}, "column ids must be a list of token ids, not list"),
        ({"text": "a"}, "no column ids or input_ids; there are: text"),
        ({"input_ids": [1, 10**6]}, "token 1000000 is not one of the tokenizer's"),
    ],
)
def test_tokens_that_are_none_are_told(row: dict[str, Any], said: str, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "t.jsonl", [{"ids": [1, 2]}, row])
    config = data_config(
        tmp_path, sequence_len=2, shards=1, sources=[{"files": "t.jsonl", "format": "tokens"}]
    )
    with pytest.raises(UserError, match=said):
        run(config)
