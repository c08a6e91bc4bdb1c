"""Sampling: the same text whatever the batch, the model's own distribution, transformers' greedy text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    BloomForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
)

from common.errors import UserError
from eval.generation import choice
from eval.generation.decoding import Decoding
from eval.generation.sampling import Request, Sampler

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
FAMILIES = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, intermediate_size=64)),
    "mistral": lambda: MistralForCausalLM(
        MistralConfig(**SIZES, intermediate_size=64, num_key_value_heads=2, sliding_window=6)
    ),
    "opt": lambda: OPTForCausalLM(
        OPTConfig(**SIZES, ffn_dim=64, word_embed_proj_dim=32, max_position_embeddings=64)
    ),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    ),
    "bloom": lambda: BloomForCausalLM(BloomConfig(vocab_size=97, hidden_size=32, n_layer=2, n_head=4)),
}


def sharpened(model: Any, scale: float = 3.0) -> Any:
    """Weights larger than at initialisation, so that distributions are neither flat nor alike."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale if parameter.ndim > 1 else 1.0)
    return model.eval()


@pytest.fixture(scope="module")
def llama() -> Any:
    torch.manual_seed(0)
    return sharpened(FAMILIES["llama"]())


def requests(count: int, vocabulary: int = 97, longest: int = 9, seed: int = 0) -> list[Request]:
    """Ragged prompts, some twice."""
    random = np.random.default_rng(seed)
    prompts = [random.integers(3, vocabulary, random.integers(1, longest + 1)).tolist() for _ in range(count)]
    return [Request(prompts[i - i % 2], [seed, i]) for i in range(count)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("decoding", [Decoding(), Decoding(greedy=True)], ids=["unbiased", "greedy"])
def test_a_text_does_not_depend_on_its_batch(family: str, decoding: Decoding) -> None:
    torch.manual_seed(0)
    model, wanted = sharpened(FAMILIES[family]()), requests(13)
    texts = [Sampler(model, decoding, ends=[2, 5, 8], batch=b).run(wanted, 12) for b in (1, 5, 64)]
    assert texts[0] == texts[1] == texts[2]
    assert Sampler(model, decoding, ends=[2, 5, 8]).run(wanted[::-1], 12) == texts[0][::-1]
    if not decoding.greedy:
        assert len({len(text.tokens) for text in texts[0]}) > 1, "rows should end at different times"


@pytest.mark.parametrize("decoding", [Decoding(temperature=0.7, top_k=9), Decoding(top_p=0.8, top_k=40)])
def test_truncated_sampling_does_not_depend_on_the_batch_either(llama: Any, decoding: Decoding) -> None:
    wanted = requests(9)
    assert Sampler(llama, decoding, batch=1).run(wanted, 8) == Sampler(llama, decoding).run(wanted, 8)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_transformers(family: str) -> None:
    torch.manual_seed(1)
    model, wanted = sharpened(FAMILIES[family]()), requests(6)
    found = Sampler(model, Decoding(greedy=True), ends=[2]).run(wanted, 10)
    for request, text in zip(wanted, found, strict=True):
        ids = torch.tensor([request.prompt])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=10,
            eos_token_id=2,
            pad_token_id=0,
        )
        assert out[0, ids.shape[1] :].tolist() == text.tokens


def test_close_calls_are_decided_by_the_row_alone(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With noise on the batch's logits, as other kernels would make it, the text stays the same."""
    wanted = requests(24)
    expected = Sampler(llama, batch=1).run(wanted, 12)
    noise = torch.Generator().manual_seed(0)
    plain = Sampler._forward

    def noisy(self: Sampler, *args: Any) -> Any:
        logits = plain(self, *args)
        return logits + 1e-4 * (2 * torch.rand(logits.shape, generator=noise) - 1)

    monkeypatch.setattr(Sampler, "_forward", noisy)
    monkeypatch.setitem(choice.ROUNDING, torch.float32, 1e-4)
    sampler = Sampler(llama)
    assert sampler.run(wanted, 12) == expected
    assert sampler.redone > 0


def test_real_text_does_not_depend_on_the_batch(shared_data: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(shared_data / "models" / "stories260K", dtype=torch.float32)
    wanted = requests(32, 512, 20)
    texts = [Sampler(model, ends=[2], batch=b).run(wanted[:n], 30) for b, n in ((1, 3), (64, 32), (15, 32))]
    assert texts[1] == texts[2] and texts[1][:3] == texts[0]


def test_a_large_flat_vocabulary_does_not_depend_on_the_batch() -> None:
    """32,000 tokens that are almost equally likely: the hardest case for an inverse of the cumulated sum."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**(SIZES | {"vocab_size": 32000}), intermediate_size=64)).eval()
    wanted = requests(16, 32000)
    sampler = Sampler(model)
    texts = sampler.run(wanted, 20)
    assert texts == Sampler(model, batch=9).run(wanted, 20)
    assert sampler.redone < 16, "close calls must stay rare"


def test_longer_texts_begin_like_shorter_ones(llama: Any) -> None:
    wanted = requests(5)
    short, long = (Sampler(llama, ends=[2]).run(wanted, tokens) for tokens in (5, 15))
    assert [text.tokens[:5] for text in long] == [text.tokens for text in short]


@pytest.mark.parametrize(
    "decoding", [Decoding(), Decoding(0.6), Decoding(top_k=7), Decoding(top_p=0.7)], ids=lambda d: d.name
)
def test_tokens_follow_the_distribution(llama: Any, decoding: Decoding) -> None:
    with torch.no_grad():
        logits = llama(input_ids=torch.tensor([[5, 6, 7]])).logits[0, -1].double() / decoding.temperature
    p = logits.softmax(0)
    if decoding.top_k:
        p[p < p.topk(decoding.top_k).values[-1]] = 0
    if decoding.top_p < 1:
        ordered, order = p.sort(descending=True)
        p[order[ordered.cumsum(0) - ordered >= decoding.top_p]] = 0
    p = (p / p.sum()).numpy()
    n = 4000
    found = Sampler(llama, decoding, batch=1000).run([Request([5, 6, 7], i) for i in range(n)], 1)
    counts = np.bincount([text.tokens[0] for text in found], minlength=len(p))
    assert counts[p == 0].sum() == 0
    likely = p * n >= 5
    observed, expected = counts[likely], p[likely] * n
    if (p[~likely] > 0).any():
        observed, expected = (np.append(a, b) for a, b in
                              ((observed, n - observed.sum()), (expected, n - expected.sum())))  # fmt: skip
    assert stats.chisquare(observed, expected).pvalue > 1e-3


def test_rows_leave_and_others_take_their_place(llama: Any) -> None:
    """The work is that of the texts: a batch is refilled while texts wait."""
    fed = []
    plain, sampler = llama.forward, Sampler(llama, ends=range(2, 40), batch=8)
    llama.forward = lambda *args, **kwargs: fed.append(kwargs["input_ids"].shape) or plain(*args, **kwargs)
    done: list[int] = []
    try:
        texts = sampler.run(requests(64), 30, done.append)
    finally:
        del llama.forward
    assert sum(done) == 64
    steps = sum(rows for rows, width in fed if width == 1)
    needed = sum(len(text.tokens) - 1 for text in texts)
    assert all(rows <= 8 for rows, _ in fed) and steps < 2.0 * needed + 64


def test_weights_that_are_not_numbers_are_refused(llama: Any) -> None:
    broken = sharpened(FAMILIES["llama"]())
    with torch.no_grad():
        broken.lm_head.weight[3] = float("nan")
    for decoding in (Decoding(), Decoding(greedy=True), Decoding(top_k=3), Decoding(top_p=0.5)):
        with pytest.raises(UserError, match="not numbers"):
            Sampler(broken, decoding).run(requests(3), 4)


def test_a_cache_that_is_not_honoured_is_refused(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Sampler._forward

    def wrong(self: Sampler, ids: Any, lengths: Any, cache: Any) -> Any:
        return plain(self, ids, lengths, cache) * 1.5

    monkeypatch.setattr(Sampler, "_forward", wrong)
    with pytest.raises(UserError, match="plain forward"):
        Sampler(llama).run(requests(3), 4)


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0},
        {"temperature": float("nan")},
        {"top_k": -1},
        {"top_p": 0},
        {"top_p": 1.1},
        {"greedy": True, "top_k": 3},
    ],
)
def test_senseless_decodings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="--"):
        Decoding(**settings)
