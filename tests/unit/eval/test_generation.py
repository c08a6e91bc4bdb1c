"""Sampled text follows the model's distribution in any batch. Records and measures equal naive ones."""

from __future__ import annotations

import gzip
import hashlib
import itertools
import json
import math
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import zstandard
from rouge_score.rouge_scorer import RougeScorer
from scipy import stats
from scipy.spatial import distance
from transformers import AutoModelForCausalLM

from emo.common.context_length import context_length
from emo.data_prep.config import context_of
from emo.data_prep.encoding.tokenizer import load_tokenizer, text_ids
from emo.eval.generation import commands, likelihood, prefixes, quality
from emo.eval.generation import distributions as d
from emo.eval.generation.decoding import (
    Beams,
    Decoding,
    Request,
    begins_in_thinking,
    hides_thinking,
    prompt_ids,
    split_ids,
    split_reasoning,
    text_after,
)
from emo.eval.generation.engines import Transformers, Vllm
from emo.eval.generation.records import Generation, read_generated
from emo.eval.generation.sampling import ROUNDING, Sampler
from emo.eval.models.model import EvaluatedModel
from emo.eval.results.rows import read_texts
from emo.eval.results.stats import ratio
from tests.helpers.evaluating import command, is_mistake, load, naive_nll, tiny_model
from tests.helpers.families import family
from tests.helpers.refusals import refused

GREEDY, TRUNCATED = Decoding(greedy=True), Decoding(0.7, 9, 0.9)


@pytest.fixture(scope="module")
def llama() -> Any:
    return family("llama", vocab_size=97)


def requests(count: int, vocabulary: int = 97, longest: int = 9) -> list[Request]:
    """Return prompts of different lengths, some of them twice."""
    random = np.random.default_rng(0)
    prompts = [random.integers(3, vocabulary, random.integers(1, longest + 1)).tolist() for _ in range(count)]
    return [Request(prompts[i - i % 2], [0, i]) for i in range(count)]


CASES = [(name, mode) for name in ("llama", "mistral", "gpt2", "bloom") for mode in (Decoding(), GREEDY)]


@pytest.mark.parametrize(("name", "decoding"), [*CASES, ("llama", TRUNCATED)])
def test_a_text_does_not_depend_on_its_batch(name: str, decoding: Decoding) -> None:
    """Greedy text equals that of a plain loop. The generation settings of the checkpoint are ignored."""
    model, prompts = family(name, vocab_size=97), requests(13)
    model.generation_config.repetition_penalty = 5.0
    texts = [Sampler(model, decoding, [2, 5, 8], batch).run(prompts, 12) for batch in (1, 5, 64)]
    assert texts[0] == texts[1] == texts[2]
    assert Sampler(model, decoding, [2, 5, 8]).run(prompts[::-1], 12) == texts[0][::-1]
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
    """Return the model's forward with changed logits whenever a cache is in use."""
    plain = model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        out = plain(*args, **kwargs)
        if kwargs.get("use_cache") is not False:
            out.logits = change(out.logits)
        return out

    return forward


def test_close_decisions_are_made_from_the_row_alone(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise in batched logits, as from other kernels, changes no text. Close decisions are recomputed."""
    prompts, noise = requests(24), torch.Generator().manual_seed(0)
    expected = Sampler(llama, batch=1).run(prompts, 12)
    noisy = with_cache(lambda x: x + 1e-4 * (2 * torch.rand(x.shape, generator=noise) - 1), llama)
    monkeypatch.setattr(llama, "forward", noisy)
    monkeypatch.setitem(ROUNDING, torch.float32, 1e-4)
    sampler = Sampler(llama)
    assert sampler.run(prompts, 12) == expected and sampler.redone > 0


def test_broken_caches_and_weights_are_rejected(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = family("llama", vocab_size=97)
    with torch.no_grad():
        broken.lm_head.weight[3] = float("nan")
    for decoding in (Decoding(), GREEDY, Decoding(top_k=3), Decoding(top_p=0.5)):
        with refused("not-numbers"):
            Sampler(broken, decoding).run(requests(3), 4)
    monkeypatch.setattr(llama, "forward", with_cache(lambda logits: logits * 1.5, llama))
    with refused("cache"):
        Sampler(llama).run(requests(3), 4)


# sha256 of the tokens of each decoding. They must not change, so that seeds stay reproducible.
SEEDED = {
    Decoding(): "2f1eddba9a653bd26e2c861aecbeb2a69816dd5f069db48f5f59064f9351ecdc",
    TRUNCATED: "05d66b42cd26e52358809b792cb8ad0f31e5dd6e44c85ce6c453c71870bbf68e",
    GREEDY: "a6144b228dd2335d396e0edd3f76aa9bec6fafd2245c59e348e544844e1cf998",
}


def test_a_seed_gives_the_recorded_tokens(shared_data: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(shared_data / "models" / "stories260K", dtype=torch.float32)
    for decoding, digest in SEEDED.items():
        texts = Sampler(model, decoding, [2]).run(requests(32, 512, 20), 30)
        tokens = json.dumps([text.tokens for text in texts])
        assert hashlib.sha256(tokens.encode()).hexdigest() == digest, decoding


@pytest.mark.parametrize("decoding", [Decoding(), Decoding(0.6, 7), Decoding(top_p=0.7)], ids=str)
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
    positive = expected > 0
    assert stats.chisquare(observed[positive], expected[positive]).pvalue > 1e-3


def test_every_text_has_its_own_limit(llama: Any) -> None:
    """A longer text begins like a shorter one. A prompt and its text can fill the context exactly."""
    whole, limits, done = Sampler(llama).run(requests(6), 10), (1, 3, 10, 20, None, 7), []
    limited = [r._replace(limit=limit) for r, limit in zip(requests(6), limits, strict=True)]
    texts = Sampler(llama, batch=4).run(limited, 10, done.append)
    assert [len(text.tokens) for text in texts] == [1, 3, 10, 10, 10, 7] and sum(done) == 6
    assert all(a.tokens == b.tokens[: len(a.tokens)] for a, b in zip(texts, whole, strict=True))
    for kind in ("gpt2", "mpt"):
        model = family(kind, vocab_size=97)
        prompts = [Request([3 + i % 90 for i in range(n)], n, 64 - n) for n in (63, 2, 60)]
        texts = Sampler(model).run(prompts, 9)
        assert [len(text.tokens) for text in texts] == [1, 9, 4]
        assert texts == Sampler(model, batch=1).run(prompts, 9)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mpt"])
def test_the_context_of_every_family_is_known(corpus: Path, tmp_path: Path, kind: str) -> None:
    """A prefix that exceeds the context is rejected. Longer texts are scored in windows."""
    tokenizer = load_tokenizer(corpus / "small")
    model = family(kind, vocab_size=len(tokenizer))
    model.save_pretrained(tmp_path / kind)
    tokenizer.save_pretrained(tmp_path / kind)
    evaluated = EvaluatedModel(str(tmp_path / kind))
    assert evaluated.context == 64 == context_of(tmp_path / kind) == context_length(model.config)
    with refused("context"):
        Generation(Transformers(evaluated), prefixes.from_texts(["the cat " * 40]), 4, 1, (0,), tmp_path)
    with refused("context"):
        likelihood.continuations(evaluated, [([1] * 60, [5] * 9)])
    assert likelihood.score_texts(evaluated, ["the cat " * 60]).tokens[0] > 64


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write two models with the same tokenizer, and a corpus."""
    root = tmp_path_factory.mktemp("generation")
    for name, seed in (("small", 1), ("oracle", 2)):
        tiny_model(root / name, seed, max_position_embeddings=96)
    lines = [f"the cat number {i} sat on the mat and looked at the door of the house again" for i in range(6)]
    (root / "data" / "ptb").mkdir(parents=True)
    (root / "data" / "ptb" / "test.txt").write_text("\n".join(["", " = A title = ", *lines, "too short"]))
    return root


def generate(corpus: Path, model: str, *prefixes: object, name: str | None = None) -> Path:
    """Sample after prefixes of the corpus or the given ones, and return the directory of the texts."""
    options = prefixes or ("--corpus", "ptb", "--data", corpus / "data")
    settings = ("--max_new_tokens", 9, "--samples", 2, "--seeds", "0,1", "--output_path", corpus / "out")
    assert (
        command("generate", "--model", corpus / model, "--name", name or model, *options, *settings)[0] == 0
    )
    (directory,) = (corpus / "out" / "models" / (name or model) / "generated").iterdir()
    return directory


def measured(corpus: Path, texts: list[Path], *options: object) -> list[dict[str, Any]]:
    """Return the results of `quality`."""
    code, _, err = command("quality", *texts, "--output_path", corpus / "out", *options)
    assert code == 0, err
    return [json.loads((directory / "quality.json").read_text()) for directory in texts]


@pytest.fixture(scope="module")
def sampled(corpus: Path) -> Path:
    return generate(corpus, "small")


def test_records_contain_the_texts_and_their_prefixes(corpus: Path, sampled: Path) -> None:
    about, actual = read_generated(sampled)
    model = EvaluatedModel(str(corpus / "small"))
    assert (about["corpus"], about["prefix_words"], about["tokens"], about["records"]) == ("ptb", 5, 9, 24)
    assert [r["prefix_number"] for r in actual[:4]] == [0, 0, 1, 1] and actual[12]["seed"] == 1
    for record in actual:
        assert record["prefix"] == f"the cat number {record['prefix_number']} sat"
        assert len(record["ids"]) == record["tokens"] <= 9
        assert record["reference"].startswith(" on the mat")
        assert record["reference"].startswith(record["human"])
        assert len(split_ids(model.tokenizer, record["prefix"], record["human"])[1]) == 9
    view = json.loads((sampled.parents[1] / "samples.json").read_text())
    assert view["samples"][0]["text"] == actual[0]["text"] and view["weights"] == model.digest


def test_chunks_do_not_change_records(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = EvaluatedModel(str(corpus / "small"))
    texts = (prefixes.from_texts(["the cat", "the", "the dog sat"]), 8, 4, (0,))
    whole = Generation(Transformers(model), *texts, tmp_path / "a").run()
    monkeypatch.setattr(Generation, "chunk", 5)
    for computed in (12, 0):
        again = Generation(Transformers(model, batch=3), *texts, tmp_path / "b")
        assert again.run() == whole and again.computed == computed


def naive_per_token(path: Path, pairs: list[tuple[list[int], list[int]]]) -> float:
    model, _ = load(path)
    nll = [naive_nll(model, [*start, *tail])[len(start) - 1 :] for start, tail in pairs]
    return float(np.concatenate(nll).mean())


def test_as_many_beams_as_tokens_find_the_most_likely_text(corpus: Path, tmp_path: Path) -> None:
    model = EvaluatedModel(str(corpus / "small"))
    size = model.model.config.vocab_size
    options = ["--prefix", "the cat", "--max_new_tokens", 2, "--beams", size, "--output_path", tmp_path]
    assert command("generate", "--model", corpus / "small", *options)[0] == 0
    (directory,) = (tmp_path / "models/small/generated").iterdir()
    about, (record,) = read_generated(directory)
    assert about["decoding"] == {"beams": size, "penalty": 1.0, "name": f"beam{size}"}
    prompt = prompt_ids(model, "the cat")
    pairs = torch.tensor([[*prompt, token] for token in range(size)])
    with torch.no_grad():
        logits = model.model(pairs).logits.log_softmax(-1)
    means = {}  # log-probability per token, of one token if it ends the text, otherwise of two
    for first in range(size):
        if first in model.ends:
            means[first,] = float(logits[0, -2, first])
        else:
            second = int(logits[first, -1].argmax())
            means[first, second] = float(logits[0, -2, first] + logits[first, -1, second]) / 2
    assert record["ids"] == list(max(means, key=means.__getitem__))

    def tokens() -> list[int]:
        ((ids, _),) = Transformers(model, Beams(2))._ids([Request(prompt, [0])], 2, lambda _: None)
        return ids

    chosen = tokens()
    model.model.generation_config.suppress_tokens = [chosen[0]]  # the checkpoint's settings do not count
    assert tokens() == chosen


def test_perplexities_equal_naive_ones(corpus: Path, sampled: Path) -> None:
    """Perplexities and cross-entropies agree to 1e-6. The oracle's own samples are at its floor.

    The reference may have another end-of-text token, like a model before tuning.
    """
    paths = {name: corpus / name for name in ("small", "oracle")}
    shutil.copytree(paths["oracle"], corpus / "untuned")
    settings = json.loads((corpus / "untuned/tokenizer_config.json").read_text())
    (corpus / "untuned/tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": "<unk>"}))
    (result,) = measured(corpus, [sampled], "--oracle", paths["oracle"], "--reference", corpus / "untuned")
    records, tokenizer = read_generated(sampled)[1], EvaluatedModel(str(paths["oracle"])).tokenizer
    without_end = [r["ids"][: len(r["ids"]) - r["ended"]] for r in records]
    starts = [split_ids(tokenizer, r["prefix"], "")[0] for r in records]
    pairs = [pair for pair in zip(starts, without_end, strict=True) if pair[1]]
    exact, oracle = naive_per_token(paths["oracle"], pairs), result["ppl_oracle"]
    assert oracle["nats_per_token"]["mean"] == pytest.approx(exact, abs=1e-6)
    assert oracle["perplexity"]["mean"] == pytest.approx(math.exp(exact), rel=1e-6)
    assert oracle["perplexity"]["low"] < math.exp(exact) < oracle["perplexity"]["high"]
    assert (oracle["perplexity"]["n"], oracle["perplexity"]["unit"]) == (6, "prefixes")
    human = [split_ids(tokenizer, r["prefix"], r["human"]) for r in records[:12:2]]
    exact = naive_per_token(paths["oracle"], human)
    assert result["ppl_oracle_human"]["nats_per_token"]["mean"] == pytest.approx(exact, abs=1e-6)
    human = [split_ids(tokenizer, "", r["prefix"] + r["reference"]) for r in records[:12:2]]
    exact = naive_per_token(paths["small"], human)
    assert result["ppl_test"]["nats_per_token"] == pytest.approx(exact, abs=1e-6)
    (p, _), (q, _) = load(paths["oracle"]), load(paths["small"])
    both = []
    for start, tail in human:
        with torch.no_grad():
            logits = [model(input_ids=torch.tensor([[*start, *tail]])).logits[0, :-1] for model in (p, q)]
        lp, lq = (x.double().log_softmax(-1) for x in logits)
        both.append([float(-(a.exp() * b).sum(-1).mean()) for a, b in ((lp, lq), (lq, lp))])
    actual = [result["cross_entropy"][way] for way in ("forward", "reverse")]
    assert actual == pytest.approx(np.mean(both, axis=0), abs=1e-6)
    (result,) = measured(corpus, [generate(corpus, "oracle")], "--oracle", paths["oracle"])
    assert result["ppl_oracle"] == result["ppl_oracle_floor"]


def test_measures_of_earlier_commands_are_kept(corpus: Path, sampled: Path) -> None:
    """They are lost neither to another measure, nor to a directory that cannot have the measure."""
    (first,) = measured(corpus, [sampled], "--oracle", corpus / "oracle")
    (second,) = measured(corpus, [sampled], "--reference", corpus / "small")
    assert second["ppl_oracle"] == first["ppl_oracle"] and "cross_entropy" in second
    (sampled / "quality.json").unlink()
    bare = generate(corpus, "oracle", "--prefix", "the cat", name="bare")
    assert is_mistake(
        "quality", sampled, bare, "--output_path", corpus / "out", "--reference", corpus / "small"
    )
    assert not (sampled / "quality.json").exists()


def test_human_continuations_begin_where_the_prefix_ends(corpus: Path, tmp_path: Path) -> None:
    """A token may span the end of the prefix. Special tokens in texts are plain text, as in training."""
    model = EvaluatedModel(str(corpus / "small"))
    texts = prefixes.Prefixes("cut", ["the c", "the cat sat", ""], ["at sat on", " on <unk> mat", "the cat"])
    records = Generation(Transformers(model), texts, 30, 1, (0,), tmp_path).run()
    for record in records:
        assert record["human"] == record["reference"] or "<" not in model.tokenizer.get_vocab()
    special = {*model.tokenizer.all_special_ids} - {model.tokenizer.bos_token_id}
    ids = text_ids(model.tokenizer, "the </s> cat")
    assert model.tokenizer.eos_token_id not in ids and not special & {*ids} - {model.tokenizer.unk_token_id}


class Channels:
    """A tokenizer of letters with GPT-OSS's special tokens."""

    special = ("<|start|>", "<|end|>", "<|channel|>", "<|message|>")
    all_special_ids = [0, 1, 2, 3]

    def get_added_vocab(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.special)}

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return "".join(chr(i) for i in ids if i > 3)

    def encode(self, text: str) -> list[int]:
        parts = re.split("(" + "|".join(map(re.escape, self.special)) + ")", text)
        return [i for p in parts for i in ([self.special.index(p)] if p in self.special else map(ord, p))]


def test_the_channels_of_a_reply_become_reasoning_and_answer() -> None:
    tokenizer, prompt = Channels(), [97]
    reply = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes."
    shown = [text_after(tokenizer, prompt, tokenizer.encode(reply)[:n]) for n in range(1, 200)]
    assert shown[-1] == "<think>Hm.</think>Yes." and split_reasoning(shown[-1]) == ("Hm.", "Yes.")
    assert all(after.startswith(before) for before, after in itertools.pairwise(shown))
    assert text_after(tokenizer, prompt, tokenizer.encode("Plain")) == "Plain"
    for text, parts in {
        "<think>\nhm\n</think>\n\nYes.": ("hm", "Yes."), "hm</think>Yes.": ("hm", "Yes."), " So": ("", " So"),
        "<think>cut": ("cut", ""), "<think></think>": ("", ""),
    }.items():  # fmt: skip
        assert split_reasoning(text) == parts


class Thinking(Channels):
    """A tokenizer of letters with Magistral's tokens around reasoning, which are special."""

    special = ("[THINK]", "[/THINK]", "</s>", "<s>")


def test_reasoning_between_special_tokens_is_kept_apart() -> None:
    tokenizer, prompt = Thinking(), [97]
    tokens = tokenizer.encode("[THINK]Hm.[/THINK]Yes.")
    shown = [text_after(tokenizer, prompt, tokens[:n]) for n in range(len(tokens) + 1)]
    assert shown[-1] == "<think>Hm.</think>Yes." and split_reasoning(shown[-1]) == ("Hm.", "Yes.")
    assert all(after.startswith(before) for before, after in itertools.pairwise(shown))
    assert hides_thinking(tokenizer) and not hides_thinking(Channels())
    for text, opened in {"a[THINK]": True, "a[THINK]b[/THINK]": False, "a": False}.items():
        assert begins_in_thinking(tokenizer, tokenizer.encode(text)) == opened


def test_texts_of_other_weights_are_rejected(sampled: Path) -> None:
    texts = quality.Sampled(sampled)
    texts.about["weights"] = "0" * 64
    with refused("other-weights"):
        texts._measure_ppl(["the cat sat"], "float32", print)


def test_models_are_compared_on_the_same_prefixes(corpus: Path, sampled: Path) -> None:
    """Each difference is that of the means. There is none after different prefixes."""
    others = [generate(corpus, "oracle", name="other")]
    others += [generate(corpus, "oracle", "--prefix", "the cat", "--prefix", "a dog", name="given")]
    first, same, other = measured(corpus, [sampled, *others])
    assert "differences" not in first and isinstance(other["differences"], str)
    for name in ("tokens", "repetition_2", "ended"):
        actual = same["differences"][name]
        assert actual["mean"] == pytest.approx(same["text"][name]["mean"] - first["text"][name]["mean"])
        assert actual["low"] <= actual["mean"] <= actual["high"]
        assert (actual["n"], actual["unit"]) == (6, "prefixes")


def test_likelihoods_of_empty_and_of_long_texts(corpus: Path) -> None:
    """Continuations may be empty, even all of them. Texts beyond the context are scored in windows."""
    model = EvaluatedModel(str(corpus / "small"))
    actual = likelihood.continuations(model, [([5, 6, 7], []), ([5, 6, 7], []), ([8, 9], [10])])
    assert actual.nll[:2].tolist() == [0, 0] and actual.tokens.tolist() == [0, 0, 1]
    assert math.isfinite(actual.per_token)
    assert math.isnan(likelihood.continuations(model, [([5, 6], []), ([5, 6], [])]).per_token)
    text = "the cat sat on the mat " * 40
    actual = likelihood.score_texts(model, [text, "the cat"])
    first, tail = split_ids(model.tokenizer, "", text)
    bos = model.tokenizer.bos_token_id
    assert first == [bos]
    pairs = [(first, tail[:95])]
    pairs += [([bos, tail[i - 1]], tail[i : i + 94]) for i in range(95, len(tail), 94)]
    assert len(pairs) > 2 and actual.tokens[0] == len(tail) and actual.split == 1
    assert actual.nll[0] / len(tail) == pytest.approx(naive_per_token(corpus / "small", pairs), abs=1e-6)


def test_text_metrics_equal_values_computed_by_hand() -> None:
    """The released protocol reproduces the flaws of the authors' scripts."""
    texts = ["a b a b a", "c d", "c"]
    assert quality.distinct(texts, 1) == 4 / 8 and quality.distinct(texts, 2) == 3 / 5
    assert [quality.repetition(text, 2) for text in texts] == [2 / 4, 0.0, None]
    record = {"prefix": "a b", "text": " x y", "human": " c", "reference": " c d  e f g"}
    assert quality.pair(record, "paper", 2, 3) == ("x y", "c")
    assert quality.pair(record, "released", 2, 3) == ("a b  x y", "a b c d e")
    actual = quality.by_seed([0, 0, 1, 1, 2, 2], [0.1, 0.3, 0.2, 0.4, 0.3, 0.5])
    assert (actual["mean"], actual["n"]) == (pytest.approx(0.3), 3)
    assert actual["low"] == pytest.approx(0.3 - 0.4302653 / math.sqrt(3))


def test_intervals_stay_in_the_range_of_their_measure() -> None:
    few = ratio([0.0, 0.0, 0.9], None, range(3))
    free = few.interval()
    assert free is not None and free.low < 0 and free.high > 1
    limits = {
        name: quality.summarise(few, "texts", high=quality.maximum(name)) for name in ("rougeL", "tokens")
    }
    assert [limits["rougeL"][key] for key in ("low", "high")] == [0.0, 1.0]
    assert [limits["tokens"][key] for key in ("low", "high")] == [0.0, free.high]
    assert quality.summarise(few, "texts", quality.perplexity)["low"] == 1.0
    wide = quality.by_seed([0, 1], [0.1, 0.9])
    assert (wide["low"], wide["high"]) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("text", "words", "prefix"),
    [
        ("the  old town sleeps", 2, "the  old"),
        ("the old", 2, "the old"),
        ("caf\u00e9 na\u0308iv oui", 2, "caf\u00e9 na\u0308iv"),
        ("\u4eca\u5929\u5929\u6c14\u5f88\u597d", 3, "\u4eca\u5929\u5929"),
        ("\u304b\u3099\u304f\u305b\u3044", 2, "\u304b\u3099\u304f"),
        ("\u0e17\u0e35\u0e48\u0e19\u0e35\u0e48", 1, "\u0e17\u0e35\u0e48"),
        ("Python \u5f88\u597d\u7528", 2, "Python \u5f88"),
    ],
)
def test_prefixes_of_any_script_have_as_many_words_as_asked(
    text: str, words: int, prefix: str, tmp_path: Path
) -> None:
    """In scripts without spaces each character is a word, as in ROUGE. Marks stay with their letter."""
    file = tmp_path / "texts.txt"
    file.write_text(f"{text}\n" + "one two three four five\n", encoding="utf-8")
    cut = prefixes.from_file(file, words)
    if text == prefix:
        assert cut.short == 1
    else:
        assert (cut.texts[0], cut.references[0]) == (prefix, text[len(prefix) :])  # type: ignore[index]


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.NDJSON", "a.json.zst"])
def test_the_ending_decides_how_texts_are_read(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    pack = {".gz": gzip.compress, ".zst": zstandard.compress}.get(path.suffix, bytes)
    path.write_bytes(pack(b'{"text": "two\\nlines"}\n'))
    assert read_texts(path) == ["two\nlines"]
    with refused("unknown-ending"):
        read_texts(tmp_path / "a.csv")


def test_rouge_of_english_text_equals_rouge_score() -> None:
    scorer = RougeScorer(["rouge1", "rougeL"])
    text, other = "The U.S.'s co-op paid 3.5% — “don't” a_b X2", "the co op won't pay 3 or 5 (A_B, x2)!"
    expected = {name: [score.fmeasure] for name, score in scorer.score(other, text).items()}
    assert quality.rouge([(text, other)]) == expected


def test_mauve_reports_its_range_over_cluster_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quality, "mauve", lambda human, sampled, seed=25: 0.9 + (seed - 25) / 50)
    features = np.zeros((8, 2))
    result = quality.mauve_with_ceiling(features, [features, features], 2)
    assert result["score"] == [0.9, 0.9] and result["kmeans"] == {"low": 0.9, "high": 0.98, "seeds": 5}


@pytest.mark.slow
def test_mauve_between_floor_and_ceiling(shared_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text scores the ceiling against itself, and shuffled words are far below GPT-2 XL."""
    monkeypatch.setattr(quality, "KMEANS", 1)
    path = shared_data / "lm" / "human_vs_gpt2xl" / "xsum.jsonl.zst"
    fields = ("text", "sampled_gpt2_xl")
    human, machine = ([t[-300:] for t in read_texts(path, field)][:100] for field in fields)
    words = np.random.default_rng(0).permutation([word for text in human for word in text.split()])
    parts = np.split(words, np.cumsum([len(text.split()) for text in human])[:-1])
    encoder = quality.featurizer("minilm")
    features = [encoder(texts) for texts in (human, machine, [" ".join(part) for part in parts])]
    actual = quality.mauve_with_ceiling(features[0], features, splits=2)
    itself, gpt2, floor = actual["half"]
    assert actual["ceiling"] > 0.8 and itself == pytest.approx(actual["ceiling"], abs=1e-9)
    assert floor < gpt2 - 0.2 and gpt2 <= actual["ceiling"] + 0.02


WRONG = (
    "--max_new_tokens 0", "--samples 0", "--corpus pbt", "--corpus webtext --data data", "--corpus ptb",
    "--corpus ptb --data nowhere", "--prefixes nothing.txt", "--prefixes long.txt", "--max_new_tokens 96",
    "--seeds 1,x", "--seeds 1,1", "--greedy --samples 2", "--greedy --top_k 3", "--beams 1",
    "--beams 2 --samples 2", "--beams 2 --top_p 0.9", "--temperature 0",
    "--top_p 1.1", "--batch_size 0",
)  # fmt: skip


def test_mistakes_are_one_line(
    corpus: Path, tmp_path: Path, sampled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is written for wrong options or for models with NaN weights."""
    (corpus / "long.txt").write_text("the cat sat on the mat " * 40)  # longer than the context
    model, _ = load(tiny_model(corpus / "broken", 5, max_position_embeddings=96))
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = float("nan")
    model.save_pretrained(corpus / "broken")
    (sampled / "quality.json").unlink(missing_ok=True)
    monkeypatch.chdir(corpus)
    monkeypatch.setattr(commands, "find_spec", lambda name: None)
    sampling, measuring = ("generate", "--model", "small", "--output_path", tmp_path), ("quality", sampled)
    for options in WRONG:
        assert is_mistake(*sampling, *options.split()), options
    for options in ("--protocol released!", "--mauve minilm", "--oracle broken", "--reference broken"):
        assert is_mistake(*measuring, "--output_path", tmp_path, *options.split()), options
    assert is_mistake("quality", sampled.parent)
    assert not list(tmp_path.rglob("records.jsonl")) and not (sampled / "quality.json").exists()


RAGGED = [torch.tensor([p]).double().log() for p in ((0.5, 0.5, 0.0), (0.0, 0.5, 0.5))]
NORMAL = [d.log_probs(3 * torch.randn(4, 700, generator=torch.Generator().manual_seed(s))) for s in (0, 1)]


@pytest.mark.parametrize(("log_p", "log_q"), [NORMAL, RAGGED], ids=["normal", "ragged"])
def test_measures_equal_those_of_scipy(log_p: torch.Tensor, log_q: torch.Tensor) -> None:
    p, q = log_p.exp().numpy(), log_q.exp().numpy()
    entropy_p, entropy_q, kl_pq, kl_qp = (
        stats.entropy(*pair, axis=-1) for pair in ((p, None), (q, None), (p, q), (q, p))
    )
    expected = {
        "kl_pq": kl_pq, "kl_qp": kl_qp, "js": distance.jensenshannon(p, q, axis=-1) ** 2,
        "tv": np.abs(p - q).sum(axis=-1) / 2, "tail_mass": np.where(p < d.RARE, q, 0).sum(axis=-1),
        "entropy_p": entropy_p, "entropy_q": entropy_q,
        "forward_ce": kl_pq + entropy_p, "reverse_ce": kl_qp + entropy_q,
    }  # fmt: skip
    actual = d.measures(log_p, log_q)
    assert actual.keys() == expected.keys()
    for name, values in expected.items():
        assert actual[name].numpy() == pytest.approx(values, abs=1e-9), name


def test_the_fast_cross_entropies_and_the_temperature_of_an_entropy_are_exact() -> None:
    generator = torch.Generator().manual_seed(1)
    p, q = (6 * torch.randn(16, 32000, generator=generator) + 30 for _ in range(2))
    exact = d.measures(d.log_probs(p), d.log_probs(q))
    fast = likelihood.cross_entropies(p, q)
    for name, values in zip(("forward_ce", "reverse_ce"), fast, strict=True):
        assert (values - exact[name]).abs().max() < 1e-6, name
    logits = 3 * torch.randn(40, 60, generator=generator)
    for temperature in (0.3, 1.0, 2.5):
        target = float(d.entropy(d.log_probs(logits, temperature)).mean())
        assert d.matching_temperature(logits, target) == pytest.approx(temperature, rel=1e-9)
    with pytest.raises(ValueError):
        d.matching_temperature(logits, math.log(61))


class FakeVllm:
    """A stand-in for vLLM that continues after end tokens."""

    def __init__(self, model: EvaluatedModel) -> None:
        self.model = model
        self.asked: list[Any] = []

    def SamplingParams(self, **settings: Any) -> SimpleNamespace:  # noqa: N802 - vLLM's name
        return SimpleNamespace(**settings)

    def LLM(self, *_: Any, **__: Any) -> Any:  # noqa: N802
        return self

    def generate(self, prompts: list[dict[str, list[int]]], settings: list[Any], **_: Any) -> list[Any]:
        self.asked += settings
        requests = [Request(prompt["prompt_token_ids"], 0) for prompt in prompts]
        texts = Sampler(self.model.model, GREEDY).run(requests, settings[0].max_tokens)
        return [
            SimpleNamespace(outputs=[SimpleNamespace(token_ids=t.tokens, finish_reason="stop")])
            for t in texts
        ]


@pytest.mark.parametrize("place", ["generation_config.json", "config.json", "text_config", "tokenizer"])
@pytest.mark.parametrize("engine", [Transformers, Vllm])
def test_a_text_stops_at_every_end_token_without_containing_it(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, engine: type[Transformers]
) -> None:
    """End tokens of all files count, whether or not the tokenizer marks them as special."""
    shutil.copytree(corpus / "small", tmp_path / "model")
    request, path = [Request([1, 5, 6], 0)], tmp_path / "model"
    model = EvaluatedModel(str(path))
    written = Sampler(model.model, GREEDY).run(request, 8)[0].tokens
    end = next(token for token in written[2:] if token not in written[:2])
    files = {
        name: json.loads((path / name).read_text()) for name in ("generation_config.json", "config.json")
    }
    if place == "tokenizer":
        name = model.tokenizer.convert_ids_to_tokens(end)
        config = json.loads((path / "tokenizer_config.json").read_text()) | {"eos_token": name}
        (path / "tokenizer_config.json").write_text(json.dumps(config))
    else:
        tree = files["config.json" if place == "text_config" else place]
        (tree.setdefault("text_config", {}) if place == "text_config" else tree)["eos_token_id"] = [end, 0]
    for name, tree in files.items():
        (path / name).write_text(json.dumps(tree))
    model = EvaluatedModel(str(path))
    model.model = EvaluatedModel(str(corpus / "small")).model
    fake = FakeVllm(model)
    monkeypatch.setitem(sys.modules, "vllm", fake)
    monkeypatch.setattr("emo.eval.generation.engines.find_spec", lambda _: True)
    monkeypatch.setattr("emo.eval.generation.engines.version", lambda _: "1")
    ((ids, reply),) = engine(model, GREEDY).reply(request, 8, lambda _: None)
    stop = written.index(end)
    assert (ids, reply["ended"]) == (written[: stop + 1], True)
    assert (
        reply["text"]
        == model.tokenizer.decode([1, 5, 6, *written[:stop]], skip_special_tokens=True)[
            len(model.tokenizer.decode([1, 5, 6], skip_special_tokens=True)) :
        ]
    )
    assert end in engine(model, GREEDY).identity["ends"] == model.ends
    assert all(settings.stop_token_ids == model.ends for settings in fake.asked)
