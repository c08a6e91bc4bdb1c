"""Records of texts and their measures, against naive ones: resumed, exact, between floor and ceiling."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.spatial import distance

from emo.eval.generation import commands, likelihood, prefixes, quality
from emo.eval.generation import distributions as d
from emo.eval.generation.decoding import split_ids
from emo.eval.generation.engines import Transformers
from emo.eval.generation.likelihood import cross_entropies
from emo.eval.generation.records import Generation, read_records
from emo.eval.model import EvaluatedModel
from tests.helpers.evaluating import command, load, naive_nll, tiny_model
from tests.helpers.said import lines

SETTINGS = ("--max_new_tokens", 9, "--samples", 2, "--seeds", "0,1")


def generate(world: Path, model: str, *options: object, name: str | None = None) -> Path:
    """Sample with a model of the world; return the directory of its only set of texts."""
    name, arguments = name or model, ("--output_path", world / "out", *options, *SETTINGS)
    code, out, _ = command("generate", "--model", world / model, "--name", name, *arguments)
    assert code == 0 and ("--corpus" not in options or ("24 texts" in out and "1 texts left out" in out))
    (directory,) = (world / "out" / "models" / name / "generated").iterdir()
    return directory


def measured(world: Path, texts: list[Path], *options: object) -> tuple[str, list[dict[str, Any]]]:
    """Return what `quality` prints, and its results."""
    code, out, err = command("quality", *texts, "--output_path", world / "out", *options)
    assert code == 0, err
    return out, [json.loads((directory / "quality.json").read_text()) for directory in texts]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Two models of one tokenizer, and a corpus."""
    root = tmp_path_factory.mktemp("generation")
    for name, seed in (("small", 1), ("oracle", 2)):
        tiny_model(root / name, seed, max_position_embeddings=96)
    lines = [f"the cat number {i} sat on the mat and looked at the door of the house again" for i in range(6)]
    (root / "data" / "ptb").mkdir(parents=True)
    (root / "data" / "ptb" / "test.txt").write_text("\n".join(["", " = A title = ", *lines, "too short"]))
    return root


@pytest.fixture(scope="module")
def sampled(world: Path) -> Path:
    return generate(world, "small", "--corpus", "ptb", "--data", world / "data")


def test_records_hold_what_was_written(world: Path, sampled: Path) -> None:
    about, actual = read_records(sampled)
    model = EvaluatedModel(str(world / "small"))
    assert (about["corpus"], about["prefix_words"], about["tokens"], about["records"]) == ("ptb", 5, 9, 24)
    assert [r["prefix_number"] for r in actual[:4]] == [0, 0, 1, 1] and actual[12]["seed"] == 1
    for record in actual:
        assert record["prefix"] == f"the cat number {record['prefix_number']} sat"
        assert record["reference"].startswith(" on the mat")
        assert len(record["ids"]) == record["tokens"] <= 9
        assert record["reference"].startswith(record["human"])
        assert len(split_ids(model.tokenizer, record["prefix"], record["human"])[1]) == 9
    view = json.loads((sampled.parents[1] / "samples.json").read_text())
    assert view["samples"][0]["text"] == actual[0]["text"] and view["weights"] == model.digest


def test_a_killed_run_loses_one_chunk(world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks and batches of other sizes, an interruption between: the same file."""
    model = EvaluatedModel(str(world / "small"))
    texts = (prefixes.from_texts(["the cat", "the", "the dog sat"]), 8, 4, (0,))
    whole = Generation(Transformers(model), *texts, tmp_path / "a").run()
    monkeypatch.setattr(Generation, "chunk", 5)
    again = Generation(Transformers(model), *texts, tmp_path / "b")
    reply = again.engine.reply

    def killed(*args: Any) -> Any:
        if again.computed:
            raise KeyboardInterrupt
        return reply(*args)

    monkeypatch.setattr(again.engine, "reply", killed)
    with pytest.raises(KeyboardInterrupt):
        again.run()
    for computed in (12 - 5, 0):
        later = Generation(Transformers(model, batch=3), *texts, tmp_path / "b")
        assert later.run() == whole and later.computed == computed


def naive_per_token(path: Path, pairs: list[tuple[list[int], list[int]]]) -> float:
    model, _ = load(path)
    nll = [naive_nll(model, [*start, *tail])[len(start) - 1 :] for start, tail in pairs]
    return float(np.concatenate(nll).mean())


def test_perplexities_equal_naive_ones(world: Path, sampled: Path) -> None:
    """PPL_oracle, PPL_test and cross-entropies, to 1e-6; the oracle of its own samples is at its floor."""
    _, (result,) = measured(world, [sampled], "--oracle", world / "oracle", "--reference", world / "oracle")
    actual, tokenizer = read_records(sampled)[1], EvaluatedModel(str(world / "oracle")).tokenizer
    pairs = [(split_ids(tokenizer, r["prefix"], "")[0], r["ids"]) for r in actual]
    exact, oracle = naive_per_token(world / "oracle", pairs), result["ppl_oracle"]
    assert oracle["nats_per_token"]["mean"] == pytest.approx(exact, abs=1e-6)
    assert oracle["perplexity"]["mean"] == pytest.approx(math.exp(exact), rel=1e-6)
    assert oracle["perplexity"]["low"] < math.exp(exact) < oracle["perplexity"]["high"]
    assert (oracle["perplexity"]["n"], oracle["perplexity"]["unit"]) == (6, "prefixes")
    human = [split_ids(tokenizer, "", r["prefix"] + r["reference"]) for r in actual[:12:2]]
    exact = naive_per_token(world / "small", human)
    assert result["ppl_test"]["nats_per_token"] == pytest.approx(exact, abs=1e-6)
    (p, _), (q, _) = load(world / "oracle"), load(world / "small")
    both = []
    for start, tail in human:
        with torch.no_grad():
            logits = [model(input_ids=torch.tensor([[*start, *tail]])).logits[0, :-1] for model in (p, q)]
        lp, lq = (x.double().log_softmax(-1) for x in logits)
        both.append([float(-(a.exp() * b).sum(-1).mean()) for a, b in ((lp, lq), (lq, lp))])
    actual = [result["cross_entropy"][way] for way in ("forward", "reverse")]
    assert actual == pytest.approx(np.mean(both, axis=0), abs=1e-6)
    own = generate(world, "oracle", "--corpus", "ptb", "--data", world / "data")
    _, (result,) = measured(world, [own], "--oracle", world / "oracle")
    assert result["ppl_oracle"] == result["ppl_oracle_floor"]


def test_models_are_compared_on_the_same_prefixes(world: Path, sampled: Path) -> None:
    """The difference of each measure is that of the means; other prefixes are said, not paired."""
    corpus = ("--corpus", "ptb", "--data", world / "data")
    others = [generate(world, "oracle", *corpus, name="other")]
    others += [generate(world, "oracle", "--prefix", "the cat", "--prefix", "a dog", name="given")]
    out, (first, same, other) = measured(world, [sampled, *others])
    assert "prefixes are not the same" in out and "(6 prefixes)" in out
    assert "differences" not in first and isinstance(other["differences"], str)
    for name in ("tokens", "repetition_2", "ended"):
        actual = same["differences"][name]
        assert actual["mean"] == pytest.approx(same["text"][name]["mean"] - first["text"][name]["mean"])
        assert actual["low"] <= actual["mean"] <= actual["high"] and actual["unit"] == "prefixes"


def test_likelihoods_of_empty_and_of_long_texts(world: Path) -> None:
    """Continuations may be empty, even all of them; what is longer than the context is cut into windows."""
    model = EvaluatedModel(str(world / "small"))
    actual = likelihood.continuations(model, [([5, 6, 7], []), ([5, 6, 7], []), ([8, 9], [10])])
    assert actual.nll[:2].tolist() == [0, 0] and actual.tokens.tolist() == [0, 0, 1]
    assert math.isfinite(actual.per_token)
    assert math.isnan(likelihood.continuations(model, [([5, 6], []), ([5, 6], [])]).per_token)
    text = "the cat sat on the mat " * 40
    actual = likelihood.texts(model, [text, "the cat"])
    first, tail = split_ids(model.tokenizer, "", text)
    pairs = [(first if i == 0 else [tail[i - 1]], tail[i : i + 95]) for i in range(0, len(tail), 95)]
    assert len(pairs) > 2 and actual.tokens[0] == len(tail)
    assert actual.nll[0] / len(tail) == pytest.approx(naive_per_token(world / "small", pairs), abs=1e-6)


def test_text_metrics_by_hand() -> None:
    """The released protocol repeats the flaws of the authors' scripts."""
    texts = ["a b a b a", "c d", "c"]
    assert quality.distinct(texts, 1) == 4 / 8 and quality.distinct(texts, 2) == 3 / 5
    assert [quality.repetition(text, 2) for text in texts] == [2 / 4, 0.0, None]
    assert quality.distinct(["a"], 2) == 0.0
    record = {"prefix": "a b", "text": " x y", "human": " c", "reference": " c d  e f g"}
    assert quality.pair(record, "paper", 2, 3) == ("x y", "c")
    assert quality.pair(record, "released", 2, 3) == ("a b  x y", "a b c d e")
    actual = quality.by_seed([0, 0, 1, 1, 2, 2], [1, 3, 2, 4, 3, 5])
    assert (actual["mean"], actual["n"]) == (3.0, 3)
    assert actual["low"] == pytest.approx(3 - 4.302653 / math.sqrt(3))
    assert quality.by_seed([0], [2.0])["low"] is None


def test_mauve_between_floor_and_ceiling(shared_data: Path) -> None:
    """A text against itself at the ceiling, GPT-2 XL between, the corpus's words shuffled near the floor."""
    path = shared_data / "lm" / "human_vs_gpt2xl" / "xsum.jsonl.zst"
    fields = ("text", "sampled_gpt2_xl")
    human, machine = ([t[-300:] for t in prefixes.read_texts(path, field)][:200] for field in fields)
    words = [word for text in human for word in text.split()]
    random.Random(0).shuffle(words)
    taken = iter(words)
    shuffled = [" ".join(next(taken) for _ in text.split()) for text in human]
    encoder = quality.featurizer("minilm")
    features = [encoder(texts) for texts in (human, machine, shuffled)]
    actual = quality.beside_ceiling(features[0], features, splits=2)
    itself, gpt2, floor = actual["half"]
    assert actual["ceiling"] > 0.8 and itself == pytest.approx(actual["ceiling"], abs=1e-9)
    assert floor < gpt2 - 0.2 and gpt2 <= actual["ceiling"] + 0.02


def test_mistakes_are_one_line(
    world: Path, tmp_path: Path, sampled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (world / "empty.txt").write_text("\n")
    (world / "plain.jsonl").write_text('{"txt": "a"}\n')
    (world / "long.txt").write_text("the cat sat on the mat " * 40)  # longer than the context
    for options in (
        "--max_new_tokens 0", "--samples 0", "--corpus pbt", "--corpus webtext --data data",
        "--corpus ptb --data nowhere", "--corpus ptb", "--prefixes nothing.txt", "--prefixes empty.txt",
        "--prefixes plain.jsonl", "--prefixes long.txt", "--max_new_tokens 96", "--seeds 1,x", "--seeds 1,1",
        "--greedy --samples 2", "--greedy --top_k 3", "--temperature 0", "--top_p 1.1", "--batch_size 0",
    ):  # fmt: skip
        monkeypatch.chdir(world)
        code, _, err = command("generate", "--model", "small", "--output_path", tmp_path, *options.split())
        assert code == 2 and len(lines(err)) == 1, (options, err)
    assert not list(tmp_path.rglob("records.jsonl"))
    monkeypatch.setattr(commands, "find_spec", lambda name: None)
    for texts, *options in (
        (sampled, "--protocol", "releasd"), (sampled, "--oracle", world / "nowhere"), (sampled.parent,),
        (sampled, "--mauve", "minilm"),
    ):  # fmt: skip
        assert command("quality", texts, "--output_path", tmp_path, *options)[0] == 2


def test_weights_that_are_not_numbers_give_no_number(world: Path, sampled: Path, tmp_path: Path) -> None:
    model, _ = load(tiny_model(world / "broken", 5, max_position_embeddings=96))
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = float("nan")
    model.save_pretrained(world / "broken")
    (sampled / "quality.json").unlink(missing_ok=True)
    for option in ("--oracle", "--reference"):
        assert command("quality", sampled, "--output_path", tmp_path, option, world / "broken")[0] == 2
        assert not (sampled / "quality.json").exists()


@pytest.mark.parametrize("spread", [0.1, 3.0, math.inf])
def test_measures_equal_scipys(spread: float) -> None:
    """Also where each has tokens of probability zero that the other has not."""
    generator = torch.Generator().manual_seed(0)
    log_p, log_q = (d.log_probs(min(spread, 3) * torch.randn(4, 700, generator=generator)) for _ in range(2))
    if spread == math.inf:
        log_p, log_q = (torch.tensor([x]).double().log() for x in ((0.5, 0.5, 0.0), (0.0, 0.5, 0.5)))
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


def test_the_fast_cross_entropies_are_exact_to_1e_6() -> None:
    generator = torch.Generator().manual_seed(1)
    p, q = (6 * torch.randn(16, 32000, generator=generator) + 30 for _ in range(2))
    exact = d.measures(d.log_probs(p), d.log_probs(q))
    for name, values in zip(("forward_ce", "reverse_ce"), cross_entropies(p, q), strict=True):
        assert (values - exact[name]).abs().max() < 1e-6, name


def test_the_temperature_of_an_entropy_is_found() -> None:
    logits = 3 * torch.randn(40, 60, generator=torch.Generator().manual_seed(3))
    for temperature in (0.3, 1.0, 2.5):
        target = float(d.entropy(d.log_probs(logits, temperature)).mean())
        assert d.matching_temperature(logits, target) == pytest.approx(temperature, rel=1e-9)
    with pytest.raises(ValueError):
        d.matching_temperature(logits, math.log(61))
