"""Loss on responses and EOS only: for any dialogue, template, tokenizer and over-long policy."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from emo.data_prep.encode import EncodeSettings, RowEncoder
from emo.data_prep.templates import Conversation, Exchange, render
from emo.data_prep.tokenizer import tokenizer_facts
from tests.helpers.corpus import data_config, run, segments, tiny_tokenizer, train_set, write_jsonl

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
