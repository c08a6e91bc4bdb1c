"""Tokenizers: equal to sentencepiece, saved and loaded unchanged, and the same by words as by texts."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoTokenizer

from emo.common.errors import UserError
from emo.data_prep.inputs import open_text
from emo.data_prep.shards import TokenDataset
from emo.data_prep.tokenizer import (
    load_tokenizer,
    save_tokenizer,
    tokenizer_facts,
    tokenizer_fingerprint,
    train_sentencepiece,
)
from emo.data_prep.verify import verify
from emo.data_prep.words import TextEncoder, encoder, word_rule
from tests.helpers.corpus import prepared, texts, tiny_tokenizer, write_jsonl

SPECIALS = ["</s>", "<s>", "<unk>", "<|endoftext|>", "<pad>"]


@cache
def saved(original: Path) -> Path:
    """Return the saved tokenizer of a published one."""
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
    tokenizer = load_tokenizer(shared_data / name)
    fast = encoder(saved(shared_data / name))
    lines = real_texts(shared_data)
    assert len(lines) > 4000
    wrong = [line for line in lines if fast.encode(line).ids != original.encode(line)]
    assert wrong == []
    back = [line for line in lines[::7] if tokenizer.decode(original.encode(line)) != line]
    assert back == []
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (original.bos_id(), original.eos_id())


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.one_of(st.text(max_size=8), st.sampled_from([*SPECIALS, " ", "  ", "▁", "river", "\n"])),
        max_size=8,
    )
)
def test_conversion_equals_sentencepiece_on_any_text(parts: list[str]) -> None:
    text = "".join(parts).encode("utf-8", "replace").decode()
    original = sentencepiece.SentencePieceProcessor(
        model_file=str(tiny_tokenizer() / "model" / "tokenizer.model")
    )
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
    save_tokenizer(shared_data / name, None, tmp_path / "light")
    own, auto = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    text = " A  line,\nwith <unk> and 日本語 🙂"
    for other in (own, auto, AutoTokenizer.from_pretrained(tmp_path / "light")):
        assert (ids := other(text)["input_ids"]) == tokenizer(text)["input_ids"]
        assert other.decode(ids) == tokenizer.decode(ids)
        assert other.special_tokens_map == tokenizer.special_tokens_map
        assert tokenizer_fingerprint(other) == tokenizer_fingerprint(tokenizer)
    assert tokenizer_facts(tmp_path).fingerprint == tokenizer_fingerprint(tokenizer)
    ends = (len(tokenizer), tokenizer.bos_token_id, tokenizer.eos_token_id)
    assert tokenizer_facts(tmp_path)[:3] == ends


def test_fingerprint_is_of_the_content(tmp_path: Path) -> None:
    same = tokenizer_fingerprint(load_tokenizer(tiny_tokenizer()))
    assert same == tokenizer_fingerprint(load_tokenizer(tiny_tokenizer() / "model" / "tokenizer.model"))
    tree = json.loads((tiny_tokenizer() / "tokenizer.json").read_text())
    vocab = tree["model"]["vocab"]
    first, second = sorted(vocab, key=vocab.get)[-2:]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    shutil.copy(tiny_tokenizer() / "tokenizer_config.json", tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps(tree))
    assert tokenizer_fingerprint(load_tokenizer(tmp_path)) != same
    other_end = load_tokenizer(tiny_tokenizer())
    other_end.eos_token = "<s>"
    assert tokenizer_fingerprint(other_end) != same


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
        with pytest.raises(UserError) as error:
            train_sentencepiece(lines, size, tmp_path / "tokenizer.model")
        assert error.value.code == code


@pytest.mark.parametrize("form", ["model/tokenizer.model", "tokenizer.json"])
@pytest.mark.parametrize("begins", [True, False])
def test_no_bos_where_the_configuration_says_so(tmp_path: Path, form: str, begins: bool) -> None:
    """add_bos_token: false, as LLaMA's kind of tokenizer_config.json has it."""
    place = tmp_path / "tokenizer"
    place.mkdir()
    shutil.copy(tiny_tokenizer() / form, place)
    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": begins}
    (place / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    write_jsonl(tmp_path / "a.jsonl", texts(80))
    directory = prepared(tmp_path, tokenizer=str(place)).dir
    data = TokenDataset(directory / "train")
    assert (data.manifest.bos_id is not None) == begins
    assert (1 in data.batch(np.arange(len(data)))["input_ids"]) == begins
    auto = AutoTokenizer.from_pretrained(directory / "tokenizer")
    auto.save_pretrained(tmp_path / "again")
    for tokenizer in (auto, *map(load_tokenizer, (directory / "tokenizer", place, tmp_path / "again"))):
        assert (tokenizer("a b").input_ids[0] == 1) == begins
        assert tokenizer.bos_token == "<s>"  # a chat_template may write it
        assert tokenizer_fingerprint(tokenizer) == data.manifest.tokenizer_fingerprint
    assert not verify(directory)[1]


# White space of every sort, what Python alone takes for white space, and what tokenizers treat apart.
HARD = [" ", "  ", "\n", "\n\n", "\r\n", "\t", "\x1c", "\x1f", "\x85", "\xa0", "\u2003", "\u2028", "\u3000"]
HARD += [
    *("\u200b", "\ufeff", "▁", "▁▁", "</s>", "<0x0A>", "'s", "don't", "é", "e\u0301", "🙂", "river", "1,000")
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


def tree_of(tokenizer: Tokenizer) -> dict:
    return json.loads(tokenizer.to_str())


def changed(**changes: object) -> Tokenizer:
    """The small sentencepiece tokenizer, otherwise."""
    tree = tree_of(encoder(tiny_tokenizer()))
    for key, value in changes.items():
        (tree["model"] if key in tree["model"] else tree)[key] = value
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
    joining = (("e", "▁"), ("a", "▁b"), ("\n", "▁"), ("a", "\n"), ("\n", "a"), ("▁", "\n"), ("<0x0A>", "a"))
    others = {"dropout": 0.1, "ignore_merges": True, "byte_fallback": False, "normalizer": {"type": "NFKC"}}
    digits, added = changed(), changed()
    digits.pre_tokenizer = pre_tokenizers.Digits()
    added.add_tokens(["a b"])
    unigram = Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0)], 0))
    made = [*(with_merge(*pair) for pair in joining), *(changed(**{key: others[key]}) for key in others)]
    for tokenizer in (*made, digits, added, unigram):
        assert word_rule(tree_of(tokenizer)) is None
