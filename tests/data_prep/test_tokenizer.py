"""Tokenizers: equal to sentencepiece, saved and loaded unchanged, and the same by words as by texts."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoTokenizer

from emo.common.errors import UserError
from emo.data_prep.inputs import open_text
from emo.data_prep.tokenizer import (
    load_tokenizer,
    save_tokenizer,
    tokenizer_facts,
    tokenizer_fingerprint,
    train_sentencepiece,
)
from emo.data_prep.verify import verify
from emo.data_prep.words import TextEncoder, encoder, word_rule
from tests.helpers.corpus import prepared, texts, tiny_tokenizer, train_set, write_jsonl
from tests.helpers.refusals import refused

SPECIALS = ["</s>", "<s>", "<unk>", "<|endoftext|>", "<pad>"]


@cache
def saved(original: Path) -> Path:
    """The saved tokenizer of a published one."""
    directory = tiny_tokenizer() / original.name
    save_tokenizer(original, None, directory)
    return directory


def real_texts(shared_data: Path) -> list[str]:
    """Lines of WikiText (most begin with a space), web pages, Alpaca answers, and runs of spaces."""
    with open_text(shared_data / "lm/wikitext-2-v1/validation.txt.zst") as stream:
        lines = stream.read().decode().split("\n")
    for name, column in (("lm/openwebtext-sample", "text"), ("instruct/alpaca_gpt4", "output")):
        with open_text(shared_data / name / "train.jsonl.zst") as stream:
            rows = stream.read().decode().splitlines()[:150]
        lines += [json.loads(row)[column] for row in rows]
    spaces = [" " * a + "x" + " " * b + "\ty\n" + " " * a for a in range(20) for b in range(20)]
    return lines + spaces + SPECIALS


def test_sentencepiece_conversion_equals_sentencepiece_on_real_text(shared_data: Path) -> None:
    name = "tokenizers/llama"
    original = sentencepiece.SentencePieceProcessor(model_file=str(shared_data / name / "tokenizer.model"))
    tokenizer, fast = load_tokenizer(shared_data / name), encoder(saved(shared_data / name))
    lines = real_texts(shared_data)
    assert len(lines) > 4000
    assert [line for line in lines if fast.encode(line).ids != original.encode(line)] == []
    assert [line for line in lines[::7] if tokenizer.decode(original.encode(line)) != line] == []
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (original.bos_id(), original.eos_id())


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.one_of(st.text(max_size=8), st.sampled_from([*SPECIALS, " ", "  ", "▁", "river", "\n"])),
        max_size=8,
    )
)
def test_conversion_equals_sentencepiece_on_any_text(parts: list[str]) -> None:
    text = "".join(parts).encode("utf-8", "replace").decode()
    model = tiny_tokenizer() / "model" / "tokenizer.model"
    original = sentencepiece.SentencePieceProcessor(model_file=str(model))
    assert encoder(tiny_tokenizer()).encode(text).ids == original.encode(text)


def test_gpt2_and_opt_ids_are_the_published_ones(shared_data: Path) -> None:
    gpt2 = load_tokenizer(shared_data / "tokenizers/gpt2")
    opt = load_tokenizer(shared_data / "tokenizers/opt")
    assert encoder(saved(shared_data / "tokenizers/gpt2")).encode("Hello world").ids == [15496, 995]
    assert (gpt2.bos_token_id, gpt2.eos_token_id, len(gpt2)) == (50256, 50256, 50257)
    assert encoder(saved(shared_data / "tokenizers/opt")).encode("Hello world").ids == [31414, 232]
    assert (opt.bos_token_id, opt.eos_token_id, opt.pad_token_id, len(opt)) == (2, 2, 1, 50265)
    assert opt("Hello world")["input_ids"] == [2, 31414, 232]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tokenizers/llama", "tokenizers/opt"])
def test_saved_tokenizer_is_the_same_for_everybody(shared_data: Path, tmp_path: Path, name: str) -> None:
    tokenizer = load_tokenizer(shared_data / name)
    tokenizer.save_pretrained(tmp_path)
    light = AutoTokenizer.from_pretrained(saved(shared_data / name))
    text = " A  line,\nwith <unk> and 日本語 🙂"
    for other in (load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path), light):
        assert (ids := other(text)["input_ids"]) == tokenizer(text)["input_ids"]
        assert other.decode(ids) == tokenizer.decode(ids)
        assert other.special_tokens_map == tokenizer.special_tokens_map
        assert tokenizer_fingerprint(other) == tokenizer_fingerprint(tokenizer)
    ends = (len(tokenizer), tokenizer.bos_token_id, tokenizer.eos_token_id)
    assert tokenizer_facts(tmp_path) == (*ends, tokenizer_fingerprint(tokenizer))


def test_training_is_deterministic_and_knows_every_byte(tmp_path: Path) -> None:
    for name in ("a", "b"):
        train_sentencepiece(texts(200), 350, tmp_path / name / "tokenizer.model")
    assert (tmp_path / "a/tokenizer.model").read_bytes() == (tmp_path / "b/tokenizer.model").read_bytes()
    tokenizer = load_tokenizer(tmp_path / "a")
    save_tokenizer(tmp_path / "a", None, tmp_path / "saved")
    assert tokenizer.decode(encoder(tmp_path / "saved").encode("Ünseen ☃ 123").ids) == "Ünseen ☃ 123"
    assert len(tokenizer) == 350


def test_a_vocabulary_of_the_wrong_size_is_refused(tmp_path: Path) -> None:
    many = ["".join(map(chr, range(0x4E00, 0x4E60)))]
    for size, lines, code in ((300, many, "vocabulary-too-small"), (5000, ["ab"], "vocabulary-too-large")):
        with refused(code):
            train_sentencepiece(lines, size, tmp_path / "tokenizer.model")


def test_a_tokenizer_of_nonsense_is_refused(tmp_path: Path) -> None:
    """A huge id ended the process: the library makes room for all ids below it."""
    whole = json.loads((tiny_tokenizer() / "tokenizer.json").read_text())
    model, added = whole["model"], whole["added_tokens"]
    for wrong in (
        {"model": model | {"vocab": model["vocab"] | {"a": 4 * 10**9}}},
        {"added_tokens": [added[0] | {"id": -1}, *added[1:]]},
        {"model": None},
    ):
        (tmp_path / "tokenizer.json").write_text(json.dumps(whole | wrong))
        with pytest.raises(UserError):
            save_tokenizer(tmp_path, None, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("form", ["model/tokenizer.model", "tokenizer.json"])
def test_no_bos_where_the_configuration_says_so(tmp_path: Path, form: str) -> None:
    """add_bos_token: false, as LLaMA's kind of tokenizer_config.json has it."""
    original = tmp_path / "tokenizer"
    original.mkdir()
    shutil.copy(tiny_tokenizer() / form, original)
    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": False}
    (original / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    write_jsonl(tmp_path / "a.jsonl", texts(80))
    prepared_config = prepared(tmp_path, tokenizer=str(original))
    data = train_set(prepared_config)
    assert data.manifest.bos_id is None
    assert 1 not in data.batch(np.arange(len(data)))["input_ids"]
    auto = AutoTokenizer.from_pretrained(prepared_config.dir / "tokenizer")
    auto.save_pretrained(tmp_path / "again")
    directories = (prepared_config.dir / "tokenizer", original, tmp_path / "again")
    for tokenizer in (auto, *map(load_tokenizer, directories)):
        assert tokenizer("a b").input_ids[0] != 1
        assert tokenizer.bos_token == "<s>"  # a chat_template may write it
        assert tokenizer_fingerprint(tokenizer) == data.manifest.tokenizer_fingerprint
    assert not verify(prepared_config.dir)[1]


# White space of every sort, what Python alone takes for white space, and what tokenizers treat apart.
HARD = [" ", "  ", "\n", "\n\n", "\r\n", "\t", "\x1c", "\x1f", "\x85", "\xa0", "\u2003", "\u2028", "\u3000"]
HARD += [
    *("\u200b", "\ufeff", "▁", "▁▁", "</s>", "<0x0A>", "'s", "don't", "é", "e\u0301", "🙂", "river", "1,000")
]
TEXT = st.lists(st.one_of(st.sampled_from(HARD), st.text(max_size=5)), max_size=12).map("".join)
ANY = st.lists(TEXT.map(lambda text: text.encode("utf-8", "replace").decode()), max_size=4)


@cache
def byte_tokenizer() -> Path:
    """A small saved tokenizer of GPT-2's kind."""
    directory = tiny_tokenizer() / "bytes"
    directory.mkdir()
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator([*texts(200), " \n\n  \t'' don't \x1c!\n  "] * 2, trainer)
    backend.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    save_tokenizer(directory, None, directory / "saved")
    return directory / "saved"


@cache
def encoders(kind: str) -> tuple[TextEncoder, Tokenizer, Tokenizer]:
    """By words, which it remembers over all examples, and by whole texts that begin or continue."""
    directory = {"sentencepiece": tiny_tokenizer, "bytes": byte_tokenizer}[kind]()
    return (
        TextEncoder(directory, np.dtype(np.uint16)),
        encoder(directory),
        encoder(directory, continuing=True),
    )


@pytest.mark.parametrize("kind", ["sentencepiece", "bytes"])
@settings(max_examples=300, deadline=None)
@given(ANY)
@example(["", " ", "\n  a", "a\n  b", " a", "▁a ▁ b"])
@example(["", " ", "\n  a", "a\n  b", "a \x1c b", "!\x1c!", "x\x85 y"])
def test_words_have_the_ids_of_the_text(kind: str, some_texts: list[str]) -> None:
    by_words, beginning, continuing = encoders(kind)
    assert by_words.words is not None
    for going_on, whole in ((False, beginning), (True, continuing)):
        ids = [np.frombuffer(each, np.uint16).tolist() for each in by_words.encode(some_texts, going_on)]
        assert ids == [each.ids for each in whole.encode_batch(some_texts)]


def test_only_what_is_proven_is_cut() -> None:
    """Each of these may join what is on the two sides of a cut: they get whole texts."""
    whole: dict[str, Any] = json.loads(encoder(tiny_tokenizer()).to_str())
    model, added = whole["model"], whole["added_tokens"]

    def joined_first(left: str, right: str) -> dict[str, Any]:
        """The model with a piece that joins `left` and `right` before all others are made."""
        pieces = [piece for piece in (left, right, left + right) if piece not in model["vocab"]]
        vocab = model["vocab"] | {piece: len(model["vocab"]) + i for i, piece in enumerate(pieces)}
        return {"model": model | {"vocab": vocab, "merges": [[left, right], *model["merges"]]}}

    assert word_rule(whole) is not None
    assert word_rule(whole | joined_first("e", "x")) is not None
    joining = (("e", "▁"), ("a", "▁b"), ("\n", "▁"), ("a", "\n"), ("\n", "a"), ("▁", "\n"), ("<0x0A>", "a"))
    for change in (
        *(joined_first(*pair) for pair in joining),
        *({"model": model | {key: value}} for key, value in (("dropout", 0.1), ("byte_fallback", False))),
        {"model": model | {"ignore_merges": True}},
        {"model": {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["a", -1.0]]}},
        {"normalizer": {"type": "NFKC"}},
        {"pre_tokenizer": {"type": "Digits", "individual_digits": False}},
        {"added_tokens": [*added, added[0] | {"id": 400, "content": "a b", "special": False}]},
    ):
        assert word_rule(whole | change) is None, change
