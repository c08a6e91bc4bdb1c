"""Tokenizers keep their ids, only responses and EOS have a loss, and packing accounts for all tokens."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections import Counter
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import ByteLevelBPETokenizer, Tokenizer
from transformers import AutoTokenizer

from emo.common.errors import UserError
from emo.data_prep.encoding.pack import BlockPacker, first_fit_decreasing
from emo.data_prep.encoding.templates import Conversation, Exchange, render
from emo.data_prep.encoding.tokenizer import (
    load_tokenizer,
    save_tokenizer,
    tokenizer_facts,
    tokenizer_fingerprint,
    train_sentencepiece,
)
from emo.data_prep.encoding.weights import AnswerWeights, Part
from emo.data_prep.encoding.words import TextEncoder, encoder, word_rule
from emo.data_prep.shards.encode import Encoded, EncodeSettings, RowEncoder
from emo.data_prep.shards.verify import verify
from emo.data_prep.sources.files import open_text
from tests.helpers.corpus import (
    alpaca_rows,
    data_config,
    lasting_directory,
    prepared,
    segments,
    texts,
    tiny_tokenizer,
    train_set,
    write_jsonl,
)
from tests.helpers.families import tiny_llama
from tests.helpers.refusals import refused

# --- packing ----------------------------------------------------------------------------------------------


def naive_first_fit_decreasing(lengths: list[int], capacity: int) -> list[list[int]]:
    """Pack with the textbook algorithm."""
    bins: list[list[int]] = []
    for item in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        for members in bins:
            if sum(lengths[m] for m in members) + lengths[item] <= capacity:
                members.append(item)
                break
        else:
            bins.append([item])
    return bins


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(1, 50), max_size=60), st.integers(50, 120))
def test_bins_equal_first_fit_decreasing(lengths: list[int], capacity: int) -> None:
    bins = first_fit_decreasing(np.array(lengths, np.int64), capacity)
    assert [b.tolist() for b in bins] == naive_first_fit_decreasing(lengths, capacity)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 60_000), max_size=40), max_size=30),
    st.integers(2, 16),
    st.lists(st.integers(0, 30), max_size=4),
)
def test_blocks_are_the_concatenated_documents_cut(
    documents: list[list[int]], block: int, splits: list[int]
) -> None:
    """The blocks do not depend on the portions in which documents arrive."""
    packer = BlockPacker(block)
    cuts = sorted({0, len(documents), *(s for s in splits if s < len(documents))})
    columns: dict[str, list[int]] = {}
    for a, b in pairwise(cuts):
        flat = np.array([t for d in documents[a:b] for t in d], np.uint16)
        lengths = np.array([len(d) for d in documents[a:b]], np.int64)
        rows = packer.add(flat, lengths, np.arange(a, b, dtype=np.uint64))
        assert rows.ids.dtype == np.uint16 and (rows.lengths == block).all()
        for name in ("ids", "segments", "segment_counts", "sources", "valid"):
            columns.setdefault(name, []).extend(getattr(rows, name).tolist())
    stream = [(t, d) for d, document in enumerate(documents) for t in document]
    full = len(stream) // block
    assert packer.remainder == len(stream) - full * block
    owners = [[d for _, d in stream[row * block : (row + 1) * block]] for row in range(full)]
    runs = [[row.count(d) for d in sorted(set(row))] for row in owners]
    assert not documents or columns == {
        "ids": [t for t, _ in stream[: full * block]],
        "segments": [r for row in runs for r in row],
        "segment_counts": [len(row) for row in runs],
        "sources": [d for row in owners for d in sorted(set(row))],
        "valid": [sum(r - 1 for r in row) for row in runs],
    }


LIMIT = {"limit_tokens": 100}


@pytest.mark.parametrize("kind", ["text", "instruct"])
def test_without_packing_each_document_has_its_own_row(tmp_path: Path, kind: str) -> None:
    """The rows hold the same documents and labels as packed rows."""
    if kind == "text":
        write_jsonl(tmp_path / "a.jsonl", ({"text": text} for text in texts(60)))
    else:
        write_jsonl(tmp_path / "a.jsonl", alpaca_rows(60))
    found, amounts = [], []
    for number, packing in enumerate(["best_fit" if kind == "text" else "blocks", "none"]):
        options = {"dir": str(tmp_path / str(number)), "sequence_len": 128, "packing": packing}
        config = prepared(tmp_path, kind=kind, **options)
        assert verify(config.dir)[1] == []
        data = train_set(config)
        rows = range(len(data))
        found.append(Counter(tuple(part.tolist()) for row in rows for part in data.documents_of(row)))
        amounts.append((data.manifest.valid_tokens, data.manifest.documents))
    assert found[0] == found[1] and amounts[0] == amounts[1]
    assert len(data) == data.manifest.segments == found[1].total()


LIMIT = {"limit_tokens": 100}


def test_best_fit_cuts_only_documents_longer_than_a_row(tmp_path: Path) -> None:
    """Short documents are dropped, and long documents are in a separate domain."""
    rng = np.random.default_rng(0)
    documents = [rng.integers(9, 90, length).tolist() for length in rng.permutation(np.arange(4, 200))]
    write_jsonl(tmp_path / "a.jsonl", ({"ids": ids} for ids in documents))
    source = {"files": "a.jsonl", "format": "tokens", "weight": 2, "domain": "web"}
    options = {"packing": "best_fit", "min_doc_tokens": 10, "long_doc_tokens": 120, "sequence_len": 64}
    config = prepared(tmp_path, sources=[source], shards=1, **options)
    assert verify(config.dir)[1] == []
    data = train_set(config)
    assert data.domains == ("web", "web-long")
    used = [ids for ids in documents if len(ids) >= 10]
    pieces: list[Counter[tuple[int, ...]]] = [Counter(), Counter()]
    for ids in used:
        for start in range(0, len(ids), 64):
            pieces[len(ids) >= 120][tuple(ids[start : start + 64])] += 2
    written: list[Counter[tuple[int, ...]]] = [Counter(), Counter()]
    for row in range(len(data)):
        written[data.domain[row]].update(tuple(part.tolist()) for part in data.documents_of(row))
    assert written == pieces
    bins = [naive_first_fit_decreasing([len(piece) for piece in part.elements()], 64) for part in pieces]
    assert [domain.rows for domain in data.manifest.domains] == [len(part) for part in bins]
    manifest = data.manifest
    tokens = 2 * sum(map(len, used))
    assert (manifest.tokens, manifest.documents) == (tokens, 2 * len(used))
    assert manifest.waste == pytest.approx(1 - tokens / (64 * len(data)), abs=1e-6)
    short = [len(ids) for ids in documents if len(ids) < 10]
    counts = {"short_documents": len(short), "short_documents_tokens": sum(short)}
    counts["cut_documents"] = sum(len(ids) > 64 for ids in used)
    assert manifest.counts == {name: 2 * count for name, count in counts.items()}
    for packing, wrong in [("best_fit", {"kind": "instruct"}), ("best_fit", LIMIT), ("none", LIMIT)]:
        with pytest.raises(UserError, match=f"packing: {packing}"):
            data_config(tmp_path, packing=packing, **wrong)
    with pytest.raises(UserError, match="domain web-long"):
        data_config(tmp_path, sources=[source, source | {"domain": "web-long"}], long_doc_tokens=120)
    with refused("no-rows") as error:
        prepared(
            tmp_path,
            dir=str(tmp_path / "none"),
            sources=[source],
            shards=1,
            **options | {"min_doc_tokens": 999},
        )
    assert "min_doc_tokens" in str(error.value)


# --- masks ------------------------------------------------------------------------------------------------

WORDS = st.sampled_from(
    ["river", "a bird", " ", "\n", "### Response:", "</s>", "é", "🙂", "\n\n", ":", "Anna"]
)
CONTENT = st.lists(WORDS, min_size=1, max_size=6).map("".join).filter(str.strip)
EXCHANGES = st.builds(Exchange, CONTENT, CONTENT, st.one_of(st.just(""), CONTENT))
DIALOGUES = st.builds(
    Conversation,
    st.lists(EXCHANGES, min_size=1, max_size=4).map(tuple),
    st.one_of(st.just(""), CONTENT),
    unsupervised=st.just(()),
    weights=st.just(()),
)


@cache
def row_encoder(template: str = "alpaca", block: int = 10_000, overlong: str = "drop") -> RowEncoder:
    tokenizer = tiny_tokenizer()
    return RowEncoder(EncodeSettings(tokenizer, tokenizer_facts(tokenizer), template, block, overlong, None))


def sequences(encoded: Encoded) -> list[tuple[list[int], list[bool]]]:
    """Return the ids of each sequence, and a mask of the supervised ones."""
    ends = np.cumsum(encoded.lengths).tolist()
    results = []
    for length, end, spans in zip(encoded.lengths, ends, encoded.spans, strict=True):
        mask = [any(a <= i < b for a, b, _ in spans) for i in range(length)]
        results.append((encoded.ids[end - length : end].tolist(), mask))
    return results


@settings(max_examples=60, deadline=None)
@given(DIALOGUES, st.sampled_from(["alpaca", "chat"]))
def test_mask_matches_sentencepiece_offsets_of_responses(dialogue: Conversation, template: str) -> None:
    """SentencePiece gives the same ids if a line break, which never merges, precedes each response."""
    original = sentencepiece_of(tiny_tokenizer() / "model")
    expected_ids, expected_mask = [original.bos_id()], [False]
    for text, start in render(dialogue, template):
        prompt = original.encode(text[:start])
        space, line_break, *response = original.encode("\n" + text[start:])
        assert original.id_to_piece([space, line_break]) == ["\u2581", "<0x0A>"]
        expected_ids += [*prompt, *response, original.eos_id()]
        expected_mask += [False] * len(prompt) + [True] * (len(response) + 1)

    encoded = row_encoder(template).conversations([dialogue])
    assert sequences(encoded) == [(expected_ids, expected_mask)]


POLICIES = {"drop": "dropped", "truncate": "truncated", "split": "split"}


@settings(max_examples=30, deadline=None)
@given(st.lists(DIALOGUES, min_size=1, max_size=8), st.sampled_from([*POLICIES]), st.integers(8, 200))
def test_overlong_policies_count_all_losses(dialogues: list[Conversation], policy: str, block: int) -> None:
    whole = row_encoder().conversations(dialogues)
    cut = row_encoder("alpaca", block, policy).conversations(dialogues)
    expected, counts = [], Counter(whole.counts)
    for ids, mask in sequences(whole):
        if len(ids) <= block:
            expected.append((ids, mask))
            continue
        starts = {"drop": [], "truncate": [0], "split": range(0, len(ids), block)}[policy]
        pieces = [(ids[a : a + block], mask[a : a + block]) for a in starts]
        scored = [piece for piece in pieces if any(piece[1][1:])]
        expected += scored
        fate = POLICIES[policy] if scored or policy == "drop" else "without_response"
        counts.update(["overlong", f"overlong_{fate}"])
        counts["overlong_tokens_lost"] += len(ids) - sum(len(piece[0]) for piece in scored)
        if policy == "split":
            counts["overlong_pieces_without_response"] += len(pieces) - len(scored)
    assert sequences(cut) == expected
    assert +cut.counts == +counts
    assert all(any(mask[1:]) for _, mask in sequences(cut))


def as_messages(dialogue: Conversation) -> dict[str, Any]:
    turns = [{"role": "system", "content": dialogue.system}] if dialogue.system else []
    for e in dialogue.exchanges:
        turns += [{"role": "user", "content": e.prompt}, {"role": "assistant", "content": e.response}]
    return {"messages": turns}


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(st.lists(DIALOGUES, min_size=1, max_size=12, unique_by=lambda d: json.dumps(as_messages(d))))
def test_training_labels_equal_the_masks(dialogues: list[Conversation]) -> None:
    """Examples in packed rows, prepared from a file, have the same shifted labels as each example alone."""
    dialogues = [d._replace(exchanges=tuple(e._replace(input="") for e in d.exchanges)) for d in dialogues]
    with tempfile.TemporaryDirectory() as folder:
        write_jsonl(Path(folder) / "a.jsonl", map(as_messages, dialogues))
        options = {"kind": "instruct", "template": "chat", "sequence_len": 256, "overlong": "drop"}
        encoded = row_encoder("chat", 256).conversations(dialogues)
        if not len(encoded.ids):
            return
        packed = segments(train_set(prepared(Path(folder), dedup="none", **options)))
    expected = [(ids, [*np.where(mask, ids, -100)[1:].tolist(), -100]) for ids, mask in sequences(encoded)]
    assert sorted(packed) == sorted(expected)


def test_alpaca_text_equals_the_published_prompt() -> None:
    begins = "Below is an instruction that describes a task"
    asks = "Write a response that appropriately completes the request.\n\n### Instruction:\n"
    (turn,) = render(Conversation((Exchange("Add.", "3", "1 and 2"),)), "alpaca")
    paired = ", paired with an input that provides further context"
    assert turn.text == f"{begins}{paired}. {asks}Add.\n\n### Input:\n1 and 2\n\n### Response:3"
    turns = render(Conversation((Exchange("Say hi.", "hi"), Exchange("Again.", "hi hi"))), "alpaca")
    assert turns[0].text == f"{begins}. {asks}Say hi.\n\n### Response:hi"
    assert turns[1].text == "### Instruction:\nAgain.\n\n### Response:hi hi"
    assert [turn.text[turn.start :] for turn in turns] == ["hi", "hi hi"]


def loss_and_gradients(model: torch.nn.Module, batches: list[dict[str, torch.Tensor]]) -> list[torch.Tensor]:
    """Return the summed loss and the gradients."""
    model.zero_grad()
    total = torch.zeros(())
    for batch in batches:
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        logits, labels = model(**inputs).logits.flatten(0, 1), batch["labels"].flatten()
        total = total + torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
    total.backward()
    return [total.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("kind", ["text", "instruct"])
def test_packed_equals_unpacked(tmp_path: Path, kind: str) -> None:
    write_jsonl(tmp_path / "a.jsonl", alpaca_rows(12) if kind == "instruct" else texts(40, sentences=2))
    block = 512 if kind == "instruct" else 96
    data = train_set(prepared(tmp_path, kind=kind, sequence_len=block, shards=1))
    model = tiny_llama(400, num_hidden_layers=2)
    rows = {k: torch.from_numpy(v) for k, v in data.batch(np.arange(len(data))).items()}
    alone = [{"input_ids": torch.tensor([i]), "labels": torch.tensor([y])} for i, y in segments(data)]
    assert len(alone) > 2 * len(data), "rows must hold several segments"
    for a, b in zip(loss_and_gradients(model, [rows]), loss_and_gradients(model, alone), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * max(1.0, float(b.abs().max())))


# --- tokenizers -------------------------------------------------------------------------------------------

SPECIALS = ["</s>", "<s>", "<unk>", "<|endoftext|>", "<pad>"]
# All kinds of white space, characters that only Python treats as white space, and tokenizers' special cases.
HARD = [*" \n\t\x1c\x1f\x85\xa0\u2003\u2028\u3000\u200b\ufeff▁é🙂", "  ", "\n\n", "\r\n", "▁▁", *SPECIALS]
HARD += ["<0x0A>", "'s", "don't", "e\u0301", "river", "1,000"]
PARTS = st.lists(st.one_of(st.sampled_from(HARD), st.text(max_size=5)), max_size=12)
TEXT = PARTS.map(lambda parts: "".join(parts).encode("utf-8", "replace").decode())


@cache
def sentencepiece_of(directory: Path) -> Any:
    return sentencepiece.SentencePieceProcessor(model_file=str(directory / "tokenizer.model"))


@cache
def saved(original: Path) -> Path:
    """Save a published tokenizer and return the directory."""
    save_tokenizer(original, None, directory := lasting_directory())
    return directory


def real_texts(shared_data: Path) -> list[str]:
    """Return lines of WikiText (most begin with a space), web pages, Alpaca answers, and runs of spaces."""
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
    original = sentencepiece_of(shared_data / name)
    tokenizer, fast = load_tokenizer(shared_data / name), encoder(saved(shared_data / name))
    lines = real_texts(shared_data)
    assert len(lines) > 4000
    assert [line for line in lines if fast.encode(line).ids != original.encode(line)] == []
    assert [line for line in lines[::7] if tokenizer.decode(original.encode(line)) != line] == []
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (original.bos_id(), original.eos_id())


@settings(max_examples=100, deadline=None)
@given(TEXT)
def test_conversion_equals_sentencepiece_on_any_text(text: str) -> None:
    original = sentencepiece_of(tiny_tokenizer() / "model")
    assert encoder(tiny_tokenizer()).encode(text).ids == original.encode(text)


def test_gpt2_and_opt_ids_equal_the_published_ids(shared_data: Path) -> None:
    gpt2, opt = (load_tokenizer(shared_data / "tokenizers" / name) for name in ("gpt2", "opt"))
    assert encoder(saved(shared_data / "tokenizers/gpt2")).encode("Hello world").ids == [15496, 995]
    assert (gpt2.bos_token_id, gpt2.eos_token_id, len(gpt2)) == (50256, 50256, 50257)
    assert (opt.bos_token_id, opt.eos_token_id, opt.pad_token_id, len(opt)) == (2, 2, 1, 50265)
    assert opt("Hello world")["input_ids"] == [2, 31414, 232]


def test_weights_of_characters_reach_the_tokens_of_gpt2(shared_data: Path) -> None:
    """A token has the weight of the part with its first character, even if a character has several tokens."""
    directory = saved(shared_data / "tokenizers/gpt2")
    text, start, stop = "Say it: naïveté 🙂🙃 wins, twice.", 10, 17
    weights = AnswerWeights(1.0, (Part(0, start, 2.0), Part(start, stop, 5.0), Part(stop, len(text), 0.5)))
    row = Conversation((Exchange("q", text),), weights=(weights,))
    settings = EncodeSettings(directory, tokenizer_facts(directory), "chat", 99, "drop", None)
    encoded = RowEncoder(settings).conversations([row])
    spans = encoded.spans[0].tolist()
    backend = Tokenizer.from_file(str(directory / "tokenizer.json"))
    (before, _, high), (_, _, higher), (_, end, low), last = spans
    assert (high, higher, low, last[2]) == (2.0, 5.0, 0.5, 1.0) and last[1] - last[0] == 1
    sizes = [len(backend.id_to_token(i)) for i in encoded.ids[before:end].tolist()]  # one character per byte
    firsts = np.cumsum([0, *sizes[:-1]]).tolist()
    characters = [len(text.encode()[:byte].decode(errors="ignore")) for byte in firsts]
    want = [2.0 if c < start else 5.0 if c < stop else 0.5 for c in characters]
    assert [weight for a, b, weight in spans[:3] for _ in range(b - a)] == want


@pytest.mark.slow
def test_all_loaders_read_the_saved_tokenizer_identically(shared_data: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(shared_data / "tokenizers/opt")
    tokenizer.save_pretrained(tmp_path)
    light = AutoTokenizer.from_pretrained(saved(shared_data / "tokenizers/opt"))
    text = " A  line,\nwith <unk> and 日本語 🙂"
    for other in (load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path), light):
        assert (ids := other(text)["input_ids"]) == tokenizer(text)["input_ids"]
        assert other.decode(ids) == tokenizer.decode(ids)
        assert other.special_tokens_map == tokenizer.special_tokens_map
        assert tokenizer_fingerprint(other) == tokenizer_fingerprint(tokenizer)
    ends = (len(tokenizer), tokenizer.bos_token_id, tokenizer.eos_token_id)
    assert tokenizer_facts(tmp_path)[:4] == (*ends, tokenizer_fingerprint(tokenizer))


def test_tokenizer_training_is_deterministic_and_covers_every_byte(tmp_path: Path) -> None:
    for name in ("a", "b"):
        train_sentencepiece(texts(200), 350, tmp_path / name / "tokenizer.model")
    assert (tmp_path / "a/tokenizer.model").read_bytes() == (tmp_path / "b/tokenizer.model").read_bytes()
    tokenizer = load_tokenizer(tmp_path / "a")
    save_tokenizer(tmp_path / "a", None, tmp_path / "saved")
    assert tokenizer.decode(encoder(tmp_path / "saved").encode("Ünseen ☃ 123").ids) == "Ünseen ☃ 123"


def test_an_impossible_vocabulary_size_is_an_error(tmp_path: Path) -> None:
    many = ["".join(map(chr, range(0x4E00, 0x4E60)))]
    for size, lines, code in ((300, many, "vocabulary-too-small"), (5000, ["ab"], "vocabulary-too-large")):
        with refused(code):
            train_sentencepiece(lines, size, tmp_path / "tokenizer.model")


def test_an_invalid_tokenizer_is_an_error(tmp_path: Path) -> None:
    """A huge id is an error, because the library would allocate memory for all ids below it."""
    whole = json.loads((tiny_tokenizer() / "tokenizer.json").read_text())
    model, added = whole["model"], whole["added_tokens"]
    for wrong in (
        {"model": model | {"vocab": model["vocab"] | {"a": 4 * 10**9}}},
        {"added_tokens": [added[0] | {"id": -1}, *added[1:]]},
    ):
        (tmp_path / "tokenizer.json").write_text(json.dumps(whole | wrong))
        with pytest.raises(UserError):
            save_tokenizer(tmp_path, None, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("form", ["model/tokenizer.model", "tokenizer.json"])
def test_add_bos_token_false_removes_bos(tmp_path: Path, form: str) -> None:
    """A tokenizer_config.json like LLaMA's may set add_bos_token to false."""
    original = tmp_path / "tokenizer"
    original.mkdir()
    shutil.copy(tiny_tokenizer() / form, original)
    keys = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": False}
    (original / "tokenizer_config.json").write_text(json.dumps(keys), encoding="utf-8")
    write_jsonl(tmp_path / "a.jsonl", texts(80))
    config = prepared(tmp_path, tokenizer=str(original))
    data, copy = train_set(config), config.dir / "tokenizer"
    assert data.manifest.bos_id is None
    assert 1 not in data.batch(np.arange(len(data)))["input_ids"]
    auto = AutoTokenizer.from_pretrained(copy)
    auto.save_pretrained(tmp_path / "again")
    for tokenizer in (auto, *map(load_tokenizer, (copy, original, tmp_path / "again"))):
        assert tokenizer("a b").input_ids[0] != 1
        assert tokenizer.bos_token == "<s>"  # a chat_template may still write it
        assert tokenizer_fingerprint(tokenizer) == data.manifest.tokenizer_fingerprint
    assert not verify(config.dir)[1]


@cache
def byte_tokenizer() -> Path:
    """Train and save a small byte-level tokenizer like GPT-2's, and return its directory."""
    directory = lasting_directory()
    backend = ByteLevelBPETokenizer()
    content = [*texts(200), " \n\n  \t'' don't \x1c!\n  "] * 2
    backend.train_from_iterator(content, 600, special_tokens=["<|endoftext|>"], show_progress=False)
    backend.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    save_tokenizer(directory, None, directory / "saved")
    return directory / "saved"


@cache
def encoders(kind: str) -> tuple[TextEncoder, Tokenizer, Tokenizer]:
    """Return an encoder that caches words over all examples, and encoders of texts that begin or continue."""
    directory = {"sentencepiece": tiny_tokenizer, "bytes": byte_tokenizer}[kind]()
    return (
        TextEncoder(directory, np.dtype(np.uint16)),
        encoder(directory),
        encoder(directory, continuing=True),
    )


@pytest.mark.parametrize("kind", ["sentencepiece", "bytes"])
@settings(max_examples=300, deadline=None)
@given(st.lists(TEXT, max_size=4))
@example(["", " ", "\n  a", "a\n  b", " a", "▁a ▁ b"])
@example(["", " ", "\n  a", "a\n  b", "a \x1c b", "!\x1c!", "x\x85 y"])
def test_the_word_cache_gives_the_ids_of_the_tokenizer(kind: str, some_texts: list[str]) -> None:
    by_words, beginning, continuing = encoders(kind)
    assert by_words.words is not None
    for going_on, whole in ((False, beginning), (True, continuing)):
        ids = [np.frombuffer(each, np.uint16).tolist() for each in by_words.encode(some_texts, going_on)]
        assert ids == [each.ids for each in whole.encode_batch(some_texts)]


def test_only_proven_tokenizers_get_a_word_rule() -> None:
    """A tokenizer that may merge text across a cut between words must encode complete texts."""
    whole: dict[str, Any] = json.loads(encoder(tiny_tokenizer()).to_str())
    model, added = whole["model"], whole["added_tokens"]

    def joined_first(left: str, right: str) -> dict[str, Any]:
        """Return the model with an additional first merge of `left` and `right`."""
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
