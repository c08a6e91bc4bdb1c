"""Loss on responses and EOS only, for any dialogue; packing loses nothing and trains as single documents."""

from __future__ import annotations

import json
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
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM as Models
from transformers import GPT2Config, LlamaConfig

from emo.data_prep.encode import Encoded, EncodeSettings, RowEncoder
from emo.data_prep.pack import BlockPacker, first_fit_decreasing, packed_rows
from emo.data_prep.shards import TokenDataset
from emo.data_prep.templates import Conversation, Exchange, render
from emo.data_prep.tokenizer import tokenizer_facts
from tests.helpers.corpus import (
    alpaca_rows,
    data_config,
    prepared,
    run,
    segments,
    texts,
    tiny_tokenizer,
    train_set,
    write_jsonl,
)

WORDS = st.sampled_from(
    ["river", "a bird", " ", "\n", "### Response:", "</s>", "é", "🙂", "\n\n", ":", "Anna"]
)
SAID = st.lists(WORDS, min_size=1, max_size=6).map("".join).filter(str.strip)
EXCHANGES = st.builds(Exchange, SAID, SAID, st.one_of(st.just(""), SAID))
DIALOGUES = st.builds(
    Conversation,
    st.lists(EXCHANGES, min_size=1, max_size=4).map(tuple),
    st.one_of(st.just(""), SAID),
    unsupervised=st.just(()),
)


@cache
def make_encoder(
    place: Path, template: str = "alpaca", block: int = 10_000, overlong: str = "drop"
) -> RowEncoder:
    return RowEncoder(EncodeSettings(place, tokenizer_facts(place), template, block, overlong, None))


def supervised(length: int, spans: np.ndarray) -> np.ndarray:
    mask = np.zeros(length, bool)
    for start, end in spans:
        mask[start:end] = True
    return mask


def sequences(encoded: Encoded) -> list[tuple[list[int], list[bool]]]:
    """Return the ids of each sequence, and which of them are supervised."""
    ids = np.split(encoded.ids.astype(int), np.cumsum(encoded.lengths)[:-1]) if len(encoded.lengths) else []
    return [(i.tolist(), supervised(len(i), s).tolist()) for i, s in zip(ids, encoded.spans, strict=True)]


@settings(max_examples=250, deadline=None)
@given(DIALOGUES, st.sampled_from(["alpaca", "chat"]))
def test_mask_is_where_sentencepiece_says_the_responses_are(dialogue: Conversation, template: str) -> None:
    """An independent account: sentencepiece itself. A line break joins with nothing, so that what follows
    one is encoded as text that continues, without a space before it."""
    original = sentencepiece.SentencePieceProcessor(
        model_file=str(tiny_tokenizer() / "model" / "tokenizer.model")
    )
    expected_ids, expected_mask = [original.bos_id()], [False]
    for text, start in render(dialogue, template):
        prompt = original.encode(text[:start])
        space, line_break, *response = original.encode("\n" + text[start:])
        assert original.id_to_piece([space, line_break]) == ["\u2581", "<0x0A>"]
        expected_ids += [*prompt, *response, original.eos_id()]
        expected_mask += [False] * len(prompt) + [True] * (len(response) + 1)

    encoded = make_encoder(tiny_tokenizer(), template).conversations([dialogue])
    assert sequences(encoded) == [(expected_ids, expected_mask)]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(DIALOGUES, min_size=1, max_size=8),
    st.sampled_from(["drop", "truncate", "split"]),
    st.integers(8, 200),
)
def test_overlong_policies_lose_nothing_unseen(
    dialogues: list[Conversation], policy: str, block: int
) -> None:
    whole = make_encoder(tiny_tokenizer()).conversations(dialogues)
    cut = make_encoder(tiny_tokenizer(), "alpaca", block, policy).conversations(dialogues)
    expected, counts = [], Counter(whole.counts)
    for ids, mask in sequences(whole):
        if len(ids) <= block:
            expected.append((ids, mask))
            continue
        starts = {"drop": [], "truncate": [0], "split": range(0, len(ids), block)}[policy]
        pieces = [(ids[a : a + block], mask[a : a + block]) for a in starts]
        kept = [piece for piece in pieces if any(piece[1][1:])]
        expected += kept
        fate = {"drop": "dropped", "truncate": "truncated", "split": "split"}[policy]
        fate = fate if kept or policy == "drop" else "without_response"
        counts.update(["overlong", f"overlong_{fate}"])
        counts["overlong_tokens_lost"] += len(ids) - sum(len(piece[0]) for piece in kept)
        if policy == "split":
            counts["overlong_pieces_without_response"] += len(pieces) - len(kept)
    assert sequences(cut) == expected
    assert +cut.counts == +counts
    assert all(any(mask[1:]) for _, mask in sequences(cut))


def as_messages(dialogue: Conversation) -> dict[str, Any]:
    turns = [{"role": "system", "content": dialogue.system}] if dialogue.system else []
    for e in dialogue.exchanges:
        turns += [{"role": "user", "content": e.prompt}, {"role": "assistant", "content": e.response}]
    return {"messages": turns}


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(st.lists(DIALOGUES, min_size=1, max_size=12, unique_by=lambda d: json.dumps(as_messages(d))))
def test_labels_that_training_reads_are_the_masks(dialogues: list[Conversation]) -> None:
    """From messages in a file to shifted labels of packed rows: each example as if it stood alone."""
    dialogues = [d._replace(exchanges=tuple(e._replace(input="") for e in d.exchanges)) for d in dialogues]
    with tempfile.TemporaryDirectory() as folder:
        write_jsonl(Path(folder) / "a.jsonl", map(as_messages, dialogues))
        config = data_config(
            Path(folder), kind="instruct", template="chat", sequence_len=256, overlong="drop", dedup="none"
        )
        encoded = make_encoder(tiny_tokenizer(), "chat", 256).conversations(dialogues)
        if not len(encoded.ids):
            return
        run(config)
        found = segments(train_set(config))
    expected = [(ids, [*np.where(mask, ids, -100)[1:].tolist(), -100]) for ids, mask in sequences(encoded)]
    assert sorted(found) == sorted(expected)


def test_alpaca_text_is_the_published_one() -> None:
    with_input = Conversation((Exchange("Add.", "3", "1 and 2"),))
    plain = Conversation((Exchange("Say hi.", "hi"), Exchange("Again.", "hi hi")))
    assert render(with_input, "alpaca")[0].text == (
        "Below is an instruction that describes a task, paired with an input that provides further context. "
        "Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nAdd.\n\n### Input:\n1 and 2\n\n### Response:3"
    )
    first, second = render(plain, "alpaca")
    assert first.text == (
        "Below is an instruction that describes a task. "
        "Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nSay hi.\n\n### Response:hi"
    )
    assert second.text == "### Instruction:\nAgain.\n\n### Response:hi hi"
    assert [turn.text[turn.start :] for turn in (first, second)] == ["hi", "hi hi"]


DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
SMALL: dict[str, Any] = {
    "llama": LlamaConfig(
        **{"vocab_size": 400, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "num_key_value_heads": 2},
    ),
    "gpt2": GPT2Config(vocab_size=400, n_embd=32, n_layer=2, n_head=4, n_positions=512, **DROPOUT),
}


def packed(tmp_path: Path, kind: str) -> TokenDataset:
    """Return rows that hold several documents or examples each."""
    rows = alpaca_rows(12) if kind == "instruct" else [{"text": text} for text in texts(40, sentences=2)]
    write_jsonl(tmp_path / "a.jsonl", rows)
    block = 512 if kind == "instruct" else 96
    config = prepared(tmp_path, kind=kind, sequence_len=block, shards=1)
    return train_set(config)


def loss_and_gradients(
    model: torch.nn.Module, batches: list[dict[str, torch.Tensor]]
) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
    """Return the summed loss, the logits of each batch and the gradients."""
    model.zero_grad()
    total, logits = torch.zeros(()), []
    for batch in batches:
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        logits.append(model(**inputs, use_cache=False).logits)
        flat, labels = logits[-1].flatten(0, 1), batch["labels"].flatten()
        total = total + torch.nn.functional.cross_entropy(flat, labels, ignore_index=-100, reduction="sum")
    total.backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return total.detach(), [batch.detach() for batch in logits], gradients


@pytest.mark.parametrize("kind", ["text", "instruct"])
@pytest.mark.parametrize("name", SMALL)
def test_packed_equals_unpacked(tmp_path: Path, name: str, kind: str) -> None:
    torch.manual_seed(0)
    model = Models.from_config(SMALL[name], attn_implementation="sdpa").eval()
    data = packed(tmp_path, kind)
    rows = {k: torch.from_numpy(v) for k, v in data.batch(np.arange(len(data))).items()}
    alone = [{"input_ids": torch.tensor([i]), "labels": torch.tensor([y])} for i, y in segments(data)]
    assert len(alone) > 2 * len(data), "rows must hold several segments"
    loss, (together,), gradients = loss_and_gradients(model, [rows])
    loss_alone, apart, gradients_alone = loss_and_gradients(model, alone)
    flat = torch.cat([row[: data.tokens_of(i)] for i, row in enumerate(together)])
    torch.testing.assert_close(flat, torch.cat([logits[0] for logits in apart]), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(loss, loss_alone, rtol=1e-5, atol=1e-5)
    for a, b in zip(gradients, gradients_alone, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * max(1.0, float(b.abs().max())))


def naive_first_fit_decreasing(lengths: list[int], capacity: int) -> list[list[int]]:
    """The textbook version."""
    bins: list[list[int]] = []
    for item in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        for members in bins:
            if sum(lengths[m] for m in members) + lengths[item] <= capacity:
                members.append(item)
                break
        else:
            bins.append([item])
    return bins


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(1, 50), max_size=60), st.integers(50, 120))
def test_bins_are_those_of_first_fit_decreasing(lengths: list[int], capacity: int) -> None:
    bins = first_fit_decreasing(np.array(lengths, np.int64), capacity)
    assert [b.tolist() for b in bins] == naive_first_fit_decreasing(lengths, capacity)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 60_000), max_size=40), max_size=30),
    st.integers(2, 16),
    st.lists(st.integers(0, 30), max_size=4),
)
def test_blocks_are_the_documents_cut(documents: list[list[int]], block: int, splits: list[int]) -> None:
    """Whatever portions the documents arrive in."""
    packer = BlockPacker(block)
    cuts = sorted({0, len(documents), *(s for s in splits if s < len(documents))})
    packed_columns: dict[str, list[int]] = {
        name: [] for name in ("ids", "segments", "segment_counts", "sources", "valid")
    }
    for a, b in pairwise(cuts):
        flat = np.array([t for d in documents[a:b] for t in d], np.uint16)
        lengths = np.array([len(d) for d in documents[a:b]], np.int64)
        rows = packer.add(flat, lengths, np.arange(a, b, dtype=np.uint64))
        assert rows.ids.dtype == np.uint16 and (rows.lengths == block).all()
        for name, values in packed_columns.items():
            values += getattr(rows, name).tolist()
    stream = [(t, d) for d, document in enumerate(documents) for t in document]
    full = len(stream) // block
    assert packer.remainder == len(stream) - full * block
    owners = [[d for _, d in stream[row * block : (row + 1) * block]] for row in range(full)]
    runs = [[row.count(d) for d in sorted(set(row))] for row in owners]
    assert packed_columns == {
        "ids": [t for t, _ in stream[: full * block]],
        "segments": [r for row in runs for r in row],
        "segment_counts": [len(row) for row in runs],
        "sources": [d for row in owners for d in sorted(set(row))],
        "valid": [sum(r - 1 for r in row) for row in runs],
    }


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(2, 20), st.sets(st.integers(0, 20), max_size=4)), min_size=1))
def test_packed_examples_keep_their_tokens_and_spans(drawn: list[tuple[int, set[int]]]) -> None:
    """Examples of some length, whose spans lie between pairs of edges; token i of example n is 100 n + i."""
    lengths = np.array([length for length, _ in drawn])
    edges = [sorted(min(edge, length) for edge in marks) for length, marks in drawn]
    spans = [np.array([(a, b) for a, b in zip(e[::2], e[1::2], strict=False) if a < b]) for e in edges]
    spans = [pairs.reshape(-1, 2).astype(np.int64) for pairs in spans]
    flat = np.concatenate([100 * n + np.arange(length) for n, length in enumerate(lengths)])
    numbers = np.arange(len(drawn), dtype=np.uint64)
    (rows,) = packed_rows(flat, np.cumsum(lengths) - lengths, lengths, spans, numbers // 2, 24)
    assert rows.lengths.max() <= 24 and sorted(rows.ids.tolist()) == sorted(flat.tolist())
    columns = ((rows.ids, rows.lengths), (rows.segments, rows.segment_counts))
    columns += ((rows.sources, rows.segment_counts), (rows.spans, rows.span_counts))
    cut = [np.split(values, np.cumsum(counts)[:-1]) for values, counts in columns]
    for ids, sizes, sources, marks, valid in zip(*cut, rows.valid, strict=True):
        first = np.cumsum(sizes) - sizes
        examples = ids[first] // 100
        assert sizes.tolist() == lengths[examples].tolist() and sources.tolist() == (examples // 2).tolist()
        assert ids.tolist() == [100 * n + i for n in examples for i in range(lengths[n])]
        mask = np.concatenate([supervised(lengths[n], spans[n]) for n in examples])
        assert supervised(len(ids), marks.reshape(-1, 2)).tolist() == mask.tolist()
        assert valid == mask.sum() - mask[first].sum()
