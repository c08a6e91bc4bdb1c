"""Words encoded once give the ids of the whole text, for any text and any tokenizer."""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from emo.data_prep import words
from emo.data_prep.tokenizer import save_tokenizer
from emo.data_prep.words import TextEncoder, encoder, word_rule
from tests.helpers.corpus import texts, tiny_tokenizer

# White space of every sort, what Python alone takes for white space, and what tokenizers treat apart.
HARD = [" ", "  ", "\n", "\n\n", "\r\n", "\t", "\x1c", "\x1f", "\x85", "\xa0", "\u2003", "\u2028", "\u3000"]
HARD += [
    "\u200b",
    "\ufeff",
    "▁",
    "▁▁",
    "</s>",
    "<0x0A>",
    "'s",
    "don't",
    "é",
    "e\u0301",
    "🙂",
    "river",
    "Anna,",
    "1,000",
]
TEXT = st.lists(st.one_of(st.sampled_from(HARD), st.text(max_size=5)), max_size=12).map("".join)
ANY = st.lists(TEXT.map(lambda text: text.encode("utf-8", "replace").decode()), max_size=4)


@pytest.fixture(scope="module")
def bytes_place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small tokenizer of GPT-2's kind, saved."""
    place = tmp_path_factory.mktemp("bytes")
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator([*texts(200), " \n\n  \t'' don't \x1c!\n  "] * 2, trainer)
    backend.save(str(place / "tokenizer.json"))
    (place / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    save_tokenizer(place, None, place / "saved")
    return place / "saved"


@cache
def kept(place: Path) -> tuple[TextEncoder, Tokenizer, Tokenizer]:
    """One that remembers over all examples, and the tokenizer itself."""
    return TextEncoder(place, np.dtype(np.uint16)), encoder(place), encoder(place, continuing=True)


def same(place: Path, given_texts: list[str]) -> bool:
    ours, beginning, continuing = kept(place)
    for going_on, bare in ((False, beginning), (True, continuing)):
        found = [np.frombuffer(ids, np.uint16).tolist() for ids in ours.encode(given_texts, going_on)]
        if found != [one.ids for one in bare.encode_batch(given_texts)]:
            return False
    return True


@settings(max_examples=500, deadline=None)
@given(ANY)
@example(["", " ", "\n  a", "a\n  b", " a", "▁a ▁ b"])
def test_sentencepiece_words_give_the_ids_of_the_text(given_texts: list[str]) -> None:
    assert kept(tiny_tokenizer())[0].words is not None
    assert same(tiny_tokenizer(), given_texts)


@settings(max_examples=500, deadline=None)
@given(ANY)
@example(["", " ", "\n  a", "a\n  b", "a \x1c b", "!\x1c!", "x\x85 y"])
def test_byte_words_give_the_ids_of_the_text(bytes_place: Path, given_texts: list[str]) -> None:
    assert kept(bytes_place)[0].words is not None
    assert same(bytes_place, given_texts)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt2", "opt"])
@settings(max_examples=150, deadline=None)
@given(ANY)
def test_real_tokenizers(shared_data: Path, name: str, given_texts: list[str]) -> None:
    assert same(saved(shared_data / "tokenizers" / name, tiny_tokenizer().parent / name), given_texts)


@cache
def saved(source: Path, place: Path) -> Path:
    save_tokenizer(source, None, place)
    assert kept(place)[0].words is not None
    return place


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounded in bytes, also by words that are long."""
    monkeypatch.setattr(words, "REMEMBERED", 20_000)
    ours, bare = TextEncoder(tiny_tokenizer(), np.dtype(np.uint32)), encoder(tiny_tokenizer())
    many = [f"word{i} river{i % 7} {i} {'longer' * (i % 40)}" for i in range(400)]
    found = [np.frombuffer(ids, np.uint32).tolist() for ids in ours.encode(many)]
    assert found == [one.ids for one in bare.encode_batch(many)]
    held = sum(sys.getsizeof(word) + sys.getsizeof(ids) for word, ids in ours.known.items())
    assert 0 < held < ours.known.bytes <= 20_000
    assert max(map(len, ours.known)) <= words.LONGEST


def tree_of(tokenizer: Tokenizer) -> dict:
    return json.loads(tokenizer.to_str())


def changed(**changes: object) -> Tokenizer:
    """The small sentencepiece tokenizer, otherwise."""
    tree = tree_of(encoder(tiny_tokenizer()))
    for key, value in changes.items():
        if key in tree["model"]:
            tree["model"][key] = value
        else:
            tree[key] = value
    return Tokenizer.from_str(json.dumps(tree))


def with_merge(left: str, right: str) -> Tokenizer:
    """... and with a piece that joins `left` and `right` before all others are made."""
    tree = tree_of(encoder(tiny_tokenizer()))
    model = tree["model"]
    for piece in (left, right, left + right):
        model["vocab"].setdefault(piece, len(model["vocab"]))
    model["merges"].insert(0, [left, right])
    return Tokenizer.from_str(json.dumps(tree))


def test_only_what_is_proven_is_cut() -> None:
    """Each of these may join what is on the two sides of a cut: they get whole texts."""
    assert word_rule(tree_of(changed())) is not None
    assert word_rule(tree_of(with_merge("e", "x"))) is not None
    for left, right in (("e", "▁"), ("a", "▁b"), ("\n", "▁"), ("a", "\n"), ("\n", "a"), ("▁", "\n")):
        assert word_rule(tree_of(with_merge(left, right))) is None, (left, right)
    assert word_rule(tree_of(changed(dropout=0.1))) is None
    assert word_rule(tree_of(changed(ignore_merges=True))) is None
    assert word_rule(tree_of(changed(byte_fallback=False))) is None
    assert word_rule(tree_of(with_merge("<0x0A>", "a"))) is None
    tree = tree_of(changed())
    del tree["model"]["vocab"]["<0xE6>"]
    assert word_rule(tree) is None
    assert word_rule(tree_of(changed(normalizer={"type": "NFKC"}))) is None
    tokenizer = changed()
    tokenizer.pre_tokenizer = pre_tokenizers.Digits()
    assert word_rule(tree_of(tokenizer)) is None
    tokenizer = changed()
    tokenizer.add_tokens(["a b"])
    assert word_rule(tree_of(tokenizer)) is None
    unigram = Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0)], 0))
    unigram.normalizer = normalizers.NFC()
    assert word_rule(tree_of(unigram)) is None


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_without_bytes_is_encoded_whole(tmp_path: Path, prefix: bool) -> None:
    """It joins unknown characters of neighbouring words."""
    model = tmp_path / "tokenizer.model"
    with model.open("wb") as sink:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts(300)),
            model_writer=sink,
            vocab_size=200,
            model_type="bpe",
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=prefix,
            minloglevel=2,
        )
    original = sentencepiece.SentencePieceProcessor(model_file=str(model))
    save_tokenizer(model, None, tmp_path / "saved")
    ours = TextEncoder(tmp_path / "saved", np.dtype(np.uint16))
    assert ours.words is None
    hard = ["日\n本 語\n\né", "river \t\n x", "é é", "a\u00a0\u2003b", *texts(20)]
    found = [np.frombuffer(ids, np.uint16).tolist() for ids in ours.encode(hard)]
    assert found == [original.encode(text) for text in hard]
