"""Sampling: the same text whatever the batch, the model's own distribution, transformers' greedy text."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from transformers import AutoModelForCausalLM

from emo.common.errors import UserError
from emo.eval.generation import sampling
from emo.eval.generation.decoding import Decoding, Request
from emo.eval.generation.sampling import Sampler
from tests.helpers.families import family

FAMILIES = ("llama", "mistral", "opt", "gpt2", "bloom")
GREEDY, TRUNCATED = Decoding(greedy=True), Decoding(0.7, 9, 0.9)


@pytest.fixture(scope="module")
def llama() -> Any:
    return family("llama", vocab_size=97)


def requests(count: int, vocabulary: int = 97, longest: int = 9) -> list[Request]:
    """Ragged prompts, some twice."""
    random = np.random.default_rng(0)
    prompts = [random.integers(3, vocabulary, random.integers(1, longest + 1)).tolist() for _ in range(count)]
    return [Request(prompts[i - i % 2], [0, i]) for i in range(count)]


CASES = [(name, decoding) for name in FAMILIES for decoding in (Decoding(), GREEDY)]


@pytest.mark.parametrize(("name", "decoding"), [*CASES, ("llama", TRUNCATED)])
def test_a_text_does_not_depend_on_its_batch(name: str, decoding: Decoding) -> None:
    """Greedy text is that of a plain loop; the checkpoint's own settings decide nothing."""
    model, prompts = family(name, vocab_size=97), requests(13)
    model.generation_config.repetition_penalty = 5.0
    texts = [Sampler(model, decoding, [2, 5, 8], batch).run(prompts, 12) for batch in (1, 5, 64)]
    assert texts[0] == texts[1] == texts[2]
    assert Sampler(model, decoding, [2, 5, 8]).run(prompts[::-1], 12) == texts[0][::-1]
    assert model.generation_config.repetition_penalty == 5.0
    if decoding != GREEDY:
        assert len({len(text.tokens) for text in texts[0]}) > 1, "rows should end at different times"
        return
    for request, text in zip(prompts, texts[0], strict=True):
        ids, ended = list(request.prompt), False
        while len(ids) < len(request.prompt) + 12 and not ended:
            with torch.no_grad():
                ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
            ended = ids[-1] in (2, 5, 8)
        assert (ids[len(request.prompt) :], ended) == text


def with_cache(change: Any, model: Any) -> Any:
    """Return the model's forward with its logits changed wherever a cache is in use."""
    plain = model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        out = plain(*args, **kwargs)
        if kwargs.get("use_cache") is not False:
            out.logits = change(out.logits)
        return out

    return forward


def test_close_calls_are_decided_by_the_row_alone(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With noise on the batch's logits, as other kernels would make it, the text stays the same."""
    prompts, noise = requests(24), torch.Generator().manual_seed(0)
    expected = Sampler(llama, batch=1).run(prompts, 12)
    noisy = with_cache(lambda x: x + 1e-4 * (2 * torch.rand(x.shape, generator=noise) - 1), llama)
    monkeypatch.setattr(llama, "forward", noisy)
    monkeypatch.setitem(sampling.ROUNDING, torch.float32, 1e-4)
    sampler = Sampler(llama)
    assert sampler.run(prompts, 12) == expected and sampler.redone > 0


def test_a_cache_that_is_not_honoured_and_weights_that_are_no_numbers_are_refused(
    llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = family("llama", vocab_size=97)
    with torch.no_grad():
        broken.lm_head.weight[3] = float("nan")
    monkeypatch.setattr(llama, "forward", with_cache(lambda logits: logits * 1.5, llama))
    cases = [(broken, d, "not-numbers") for d in (Decoding(), GREEDY, Decoding(top_k=3), Decoding(top_p=0.5))]
    for model, decoding, code in [(llama, Decoding(), "cache"), *cases]:
        with pytest.raises(UserError) as error:
            Sampler(model, decoding).run(requests(3), 4)
        assert error.value.code == code


# sha256 of the tokens that seeds have given since texts are sampled; they stay.
SEEDED = {
    "unbiased": "2f1eddba9a653bd26e2c861aecbeb2a69816dd5f069db48f5f59064f9351ecdc",
    "t0.7-k9-p0.9": "05d66b42cd26e52358809b792cb8ad0f31e5dd6e44c85ce6c453c71870bbf68e",
    "greedy": "a6144b228dd2335d396e0edd3f76aa9bec6fafd2245c59e348e544844e1cf998",
}


@pytest.mark.parametrize("decoding", [Decoding(), TRUNCATED, GREEDY], ids=lambda d: d.name)
def test_real_text_stays_whatever_the_batch(shared_data: Path, decoding: Decoding) -> None:
    model = AutoModelForCausalLM.from_pretrained(shared_data / "models" / "stories260K", dtype=torch.float32)
    prompts = requests(32, 512, 20)
    texts = [Sampler(model, decoding, [2], b).run(prompts[:n], 30) for b, n in ((1, 3), (64, 32), (15, 32))]
    assert texts[1] == texts[2] and texts[1][:3] == texts[0]
    digest = hashlib.sha256(json.dumps([text.tokens for text in texts[1]]).encode()).hexdigest()
    assert digest == SEEDED[decoding.name]


@pytest.mark.parametrize(
    "decoding", [Decoding(), Decoding(0.6), Decoding(top_k=7), Decoding(top_p=0.7)], ids=lambda d: d.name
)
def test_tokens_follow_the_distribution(llama: Any, decoding: Decoding) -> None:
    with torch.no_grad():
        logits = llama(input_ids=torch.tensor([[5, 6, 7]])).logits[0, -1].double() / decoding.temperature
    p, n = logits.softmax(0), 4000
    if decoding.top_k:
        p[p < p.topk(decoding.top_k).values[-1]] = 0
    ordered, order = p.sort(descending=True)
    p[order[ordered.cumsum(0) - ordered >= decoding.top_p]] = 0
    expected = (n * p / p.sum()).numpy()
    texts = Sampler(llama, decoding, batch=1000).run([Request([5, 6, 7], i) for i in range(n)], 1)
    counts = np.bincount([text.tokens[0] for text in texts], minlength=len(p))
    assert counts[expected == 0].sum() == 0
    likely = expected >= 5
    observed, expected = (np.append(x[likely], x[~likely].sum()) for x in (counts, expected))
    kept = expected > 0
    assert stats.chisquare(observed[kept], expected[kept]).pvalue > 1e-3


def test_every_text_has_its_own_limit(llama: Any) -> None:
    """A longer one begins like a shorter one."""
    whole, limits, done = Sampler(llama).run(requests(6), 10), (1, 3, 10, 20, None, 7), []
    limited = [r._replace(limit=limit) for r, limit in zip(requests(6), limits, strict=True)]
    texts = Sampler(llama, batch=4).run(limited, 10, done.append)
    assert [len(text.tokens) for text in texts] == [1, 3, 10, 10, 10, 7] and sum(done) == 6
    assert all(a.tokens == b.tokens[: len(a.tokens)] for a, b in zip(texts, whole, strict=True))


@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_a_prompt_that_nearly_fills_the_context_shares_no_batch_that_runs_past_it(name: str) -> None:
    """Learned positions end with the context."""
    model = family(name, vocab_size=97)
    context = model.config.max_position_embeddings
    prompts = [
        Request([3 + i % 90 for i in range(length)], length) for length in (context - 1, 2, context - 4)
    ]
    prompts = [prompt._replace(limit=min(9, context - len(prompt.prompt))) for prompt in prompts]
    texts = Sampler(model).run(prompts, 9)
    assert [len(text.tokens) for text in texts] == [1, 9, 4]
    assert texts == Sampler(model, batch=1).run(prompts, 9)
