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
from emo.data_prep.pack import BlockPacker, first_fit_decreasing
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
CONTENT = st.lists(WORDS, min_size=1, max_size=6).map("".join).filter(str.strip)
EXCHANGES = st.builds(Exchange, CONTENT, CONTENT, st.one_of(st.just(""), CONTENT))
DIALOGUES = st.builds(
    Conversation,
    st.lists(EXCHANGES, min_size=1, max_size=4).map(tuple),
    st.one_of(st.just(""), CONTENT),
    unsupervised=st.just(()),
)


@cache
def encoder(template: str = "alpaca", block: int = 10_000, overlong: str = "drop") -> RowEncoder:
    tokenizer = tiny_tokenizer()
    return RowEncoder(EncodeSettings(tokenizer, tokenizer_facts(tokenizer), template, block, overlong, None))


def sequences(encoded: Encoded) -> list[tuple[list[int], list[bool]]]:
    """The ids of each sequence, and which of them are supervised."""
    ends = np.cumsum(encoded.lengths).tolist()
    results = []
    for length, end, spans in zip(encoded.lengths, ends, encoded.spans, strict=True):
        mask = [any(a <= i < b for a, b in spans) for i in range(length)]
        results.append((encoded.ids[end - length : end].tolist(), mask))
    return results


@settings(max_examples=150, deadline=None)
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

    encoded = encoder(template).conversations([dialogue])
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
    whole = encoder().conversations(dialogues)
    cut = encoder("alpaca", block, policy).conversations(dialogues)
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
        encoded = encoder("chat", 256).conversations(dialogues)
        if not len(encoded.ids):
            return
        run(config)
        found = segments(train_set(config))
    expected = [(ids, [*np.where(mask, ids, -100)[1:].tolist(), -100]) for ids, mask in sequences(encoded)]
    assert sorted(found) == sorted(expected)


def test_alpaca_text_is_the_published_one() -> None:
    begins = "Below is an instruction that describes a task"
    asks = "Write a response that appropriately completes the request.\n\n### Instruction:\n"
    (turn,) = render(Conversation((Exchange("Add.", "3", "1 and 2"),)), "alpaca")
    paired = ", paired with an input that provides further context"
    assert turn.text == f"{begins}{paired}. {asks}Add.\n\n### Input:\n1 and 2\n\n### Response:3"
    turns = render(Conversation((Exchange("Say hi.", "hi"), Exchange("Again.", "hi hi"))), "alpaca")
    assert turns[0].text == f"{begins}. {asks}Say hi.\n\n### Response:hi"
    assert turns[1].text == "### Instruction:\nAgain.\n\n### Response:hi hi"
    assert [turn.text[turn.start :] for turn in turns] == ["hi", "hi hi"]


SMALL: dict[str, Any] = {
    "llama": LlamaConfig(
        **{"vocab_size": 400, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "num_key_value_heads": 2},
    ),
    "gpt2": GPT2Config(vocab_size=400, n_embd=32, n_layer=2, n_head=4, n_positions=512),
}


def loss_and_gradients(
    model: torch.nn.Module, batches: list[dict[str, torch.Tensor]]
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The summed loss, and the gradients."""
    model.zero_grad()
    total = torch.zeros(())
    for batch in batches:
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        logits, labels = model(**inputs, use_cache=False).logits.flatten(0, 1), batch["labels"].flatten()
        total = total + torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
    total.backward()
    return total.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize(("name", "kind"), [("llama", "instruct"), ("gpt2", "text")])
def test_packed_equals_unpacked(tmp_path: Path, name: str, kind: str) -> None:
    write_jsonl(tmp_path / "a.jsonl", alpaca_rows(12) if kind == "instruct" else texts(40, sentences=2))
    block = 512 if kind == "instruct" else 96
    data = train_set(prepared(tmp_path, kind=kind, sequence_len=block, shards=1))
    torch.manual_seed(0)
    model = Models.from_config(SMALL[name], attn_implementation="sdpa").eval()
    rows = {k: torch.from_numpy(v) for k, v in data.batch(np.arange(len(data))).items()}
    alone = [{"input_ids": torch.tensor([i]), "labels": torch.tensor([y])} for i, y in segments(data)]
    assert len(alone) > 2 * len(data), "rows must hold several segments"
    loss, gradients = loss_and_gradients(model, [rows])
    loss_alone, gradients_alone = loss_and_gradients(model, alone)
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


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(1, 50), max_size=60), st.integers(50, 120))
def test_bins_are_those_of_first_fit_decreasing(lengths: list[int], capacity: int) -> None:
    bins = first_fit_decreasing(np.array(lengths, np.int64), capacity)
    assert [b.tolist() for b in bins] == naive_first_fit_decreasing(lengths, capacity)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 60_000), max_size=40), max_size=30),
    st.integers(2, 16),
    st.lists(st.integers(0, 30), max_size=4),
)
def test_blocks_are_the_documents_cut(documents: list[list[int]], block: int, splits: list[int]) -> None:
    """Whatever portions the documents arrive in."""
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
