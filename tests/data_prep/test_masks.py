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

from emo.data_prep.encode import EncodeSettings, RowEncoder
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
    assert encoded.ids.tolist() == expected_ids
    assert supervised(len(expected_ids), encoded.spans[0]).tolist() == expected_mask


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
    ends = np.cumsum(whole.lengths)
    expected, counts = [], Counter(whole.counts)
    for end, length, spans in zip(ends, whole.lengths, whole.spans, strict=True):
        ids, mask = whole.ids[end - length : end].tolist(), supervised(length, spans).tolist()
        if length <= block:
            expected.append((ids, mask))
            continue
        counts["overlong"] += 1
        starts = {"drop": [], "truncate": [0], "split": range(0, length, block)}[policy]
        pieces = [(ids[a : a + block], mask[a : a + block]) for a in starts]
        kept = [piece for piece in pieces if any(piece[1][1:])]
        expected += kept
        counts["overlong_tokens_lost"] += length - sum(len(piece[0]) for piece in kept)
        if policy == "drop":
            counts["overlong_dropped"] += 1
        elif not kept:
            counts["overlong_without_response"] += 1
        else:
            counts[{"truncate": "overlong_truncated", "split": "overlong_split"}[policy]] += 1
        if policy == "split":
            counts["overlong_pieces_without_response"] += len(pieces) - len(kept)
    ends = np.cumsum(cut.lengths)
    found = [
        (cut.ids[end - n : end].tolist(), supervised(n, spans).tolist())
        for end, n, spans in zip(ends, cut.lengths, cut.spans, strict=True)
    ]
    assert found == expected
    assert +cut.counts == +counts
    assert all(any(mask[1:]) for _, mask in found)


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
    ends = np.cumsum(encoded.lengths)
    expected = []
    for end, length, spans in zip(ends, encoded.lengths, encoded.spans, strict=True):
        ids = encoded.ids[end - length : end].astype(int)
        mask = supervised(length, spans)
        labels = np.append(np.where(mask, ids, -100)[1:], -100)
        expected.append((ids.tolist(), labels.tolist()))
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


Documents = list[list[int]]


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 60_000), max_size=40), max_size=30),
    st.integers(2, 16),
    st.lists(st.integers(0, 30), max_size=4),
)
def test_blocks_are_the_documents_cut(documents: Documents, block: int, splits: list[int]) -> None:
    """Whatever portions the documents arrive in."""
    packer = BlockPacker(block)
    cuts = sorted({0, len(documents), *(s for s in splits if s < len(documents))})
    found: dict[str, list[int]] = {
        name: [] for name in ("ids", "segments", "segment_counts", "sources", "valid")
    }
    for a, b in pairwise(cuts):
        flat = np.array([t for d in documents[a:b] for t in d], np.uint16)
        lengths = np.array([len(d) for d in documents[a:b]], np.int64)
        rows = packer.add(flat, lengths, np.arange(a, b, dtype=np.uint64))
        assert rows.ids.dtype == np.uint16
        assert (rows.lengths == block).all() and rows.lengths.sum() == len(rows.ids)
        for name, values in found.items():
            values += getattr(rows, name).tolist()
    stream = [(t, d) for d, document in enumerate(documents) for t in document]
    full = len(stream) // block
    assert packer.remainder == len(stream) - full * block
    owners = [[d for _, d in stream[row * block : (row + 1) * block]] for row in range(full)]
    runs = [[row.count(d) for d in sorted(set(row))] for row in owners]
    assert found == {
        "ids": [t for t, _ in stream[: full * block]],
        "segments": [r for row in runs for r in row],
        "segment_counts": [len(row) for row in runs],
        "sources": [d for row in owners for d in sorted(set(row))],
        "valid": [sum(r - 1 for r in row) for row in runs],
    }


Example = tuple[list[int], list[tuple[int, int]]]


@st.composite
def examples(draw: st.DrawFn) -> list[Example]:
    """Token sequences of at most 20, each with disjoint supervised spans."""
    found = []
    for number in range(draw(st.integers(1, 25))):
        length = draw(st.integers(2, 20))
        edges = sorted(draw(st.sets(st.integers(0, length), min_size=2, max_size=4)))
        spans = list(zip(edges[::2], edges[1::2], strict=False))
        found.append(([number * 100 + i for i in range(length)], spans))
    return found


@settings(max_examples=200, deadline=None)
@given(examples())
def test_packed_examples_keep_their_tokens_and_spans(made: list[Example]) -> None:
    lengths = np.array([len(ids) for ids, _ in made], np.int64)
    flat = np.array([t for ids, _ in made for t in ids], np.uint16)
    starts = np.cumsum(lengths) - lengths
    spans = [np.array(s, np.int64).reshape(-1, 2) for _, s in made]
    found = {}
    (rows,) = packed_rows(flat, starts, lengths, spans, np.arange(len(made), dtype=np.uint64) // 2, 24)
    ends = [np.cumsum(counts) for counts in (rows.lengths, rows.segment_counts, rows.span_counts)]
    for number_of_row in range(len(rows.lengths)):
        ids, segments, row_spans = (
            np.split(values, end[:-1])[number_of_row]
            for values, end in zip((rows.ids, rows.segments, rows.spans), ends, strict=True)
        )
        sources = np.split(rows.sources, ends[1][:-1])[number_of_row]
        assert rows.lengths[number_of_row] == segments.sum() <= 24
        supervised = np.zeros(len(ids), bool)
        for a, b in row_spans.reshape(-1, 2):
            supervised[a:b] = True
        at = targets = 0
        for source, length in zip(sources, segments, strict=True):
            own = slice(at, at + length)
            number = int(ids[at]) // 100
            assert source == number // 2
            found[number] = (ids[own].tolist(), supervised[own].tolist())
            targets += int(supervised[at + 1 : at + length].sum())
            at += length
        assert rows.valid[number_of_row] == targets
    assert len(found) == len(made)
    for number, (ids, given_spans) in enumerate(made):
        mask = [any(a <= i < b for a, b in given_spans) for i in range(len(ids))]
        assert found[number] == (ids, mask)
