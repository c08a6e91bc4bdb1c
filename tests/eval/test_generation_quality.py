"""Records and their measures: resumed, shared, exact, between floor and ceiling; mistakes are one line."""

from __future__ import annotations

import json
import math
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from emo.common.errors import UserError
from emo.eval.generation import closeness, likelihood, prefixes, quality, records
from emo.eval.generation.decoding import Decoding
from emo.eval.generation.records import Generation, Plan, read_records
from emo.eval.generation.tokens import split_ids
from emo.eval.model import EvaluatedModel
from tests.helpers.evaluating import command, load, naive_nll, tiny_model
from tests.helpers.said import lines


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Two models of one tokenizer, a corpus, and sampled text of both."""
    root = tmp_path_factory.mktemp("generation")
    os.environ["EVAL_CACHE"] = str(root / "cache")
    for name, seed in (("small", 1), ("oracle", 2)):
        tiny_model(root / name, seed, max_position_embeddings=96)
    lines = [f"the cat number {i} sat on the mat and looked at the door of the house again" for i in range(6)]
    (root / "data" / "ptb").mkdir(parents=True)
    (root / "data" / "ptb" / "test.txt").write_text("\n".join(["", " = A title = ", *lines, "too short"]))
    arguments = [
        "--corpus",
        "ptb",
        "--data",
        root / "data",
        "--max_new_tokens",
        9,
        "--samples",
        2,
        "--seeds",
        "0,1",
    ]
    code, out, _ = command("generate", "--model", root / "small", "--output_path", root / "out", *arguments)
    assert code == 0 and "24 texts" in out and "1 texts left out" in out
    yield root
    del os.environ["EVAL_CACHE"]


@pytest.fixture(scope="module")
def sampled(world: Path) -> Path:
    return world / "out" / "models" / "small" / "generated" / "ptb-unbiased"


def test_records_hold_what_was_written(world: Path, sampled: Path) -> None:
    about, actual = read_records(sampled)
    model = EvaluatedModel(str(world / "small"))
    assert (about["corpus"], about["prefix_words"], about["tokens"], about["records"]) == ("ptb", 5, 9, 24)
    assert [r["prefix_number"] for r in actual[:4]] == [0, 0, 1, 1] and actual[12]["seed"] == 1
    for record in actual:
        assert record["prefix"].split() == ["the", "cat", "number", str(record["prefix_number"]), "sat"]
        assert record["reference"].startswith(" on the mat")
        assert len(record["ids"]) == record["tokens"] <= 9
        assert record["reference"].startswith(record["human"])
        whole = split_ids(model.tokenizer, record["prefix"], record["human"])
        assert len(whole[1]) == 9
    view = json.loads((sampled.parents[1] / "samples.json").read_text())
    assert view["samples"][0]["text"] == actual[0]["text"] and view["weights"] == model.digest


def test_a_killed_run_loses_one_chunk(world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks and batches of other sizes, an interruption between: the same file."""
    model = EvaluatedModel(str(world / "small"))
    begins = prefixes.given(["the cat", "the", "the dog sat"])
    whole = Generation(model, Plan(begins, Decoding(), 8, 4), tmp_path / "a").run()
    monkeypatch.setattr(records, "CHUNK", 5)
    again = Generation(model, Plan(begins, Decoding(), 8, 4, batch=2), tmp_path / "b")
    sample, count = again._sample, 0

    def killed(*args: Any) -> Any:
        nonlocal count
        count += 1
        if count == 2:
            raise KeyboardInterrupt
        return sample(*args)

    monkeypatch.setattr(again, "_sample", killed)
    with pytest.raises(KeyboardInterrupt):
        again.run()
    for computed in (12 - 5, 0):
        later = Generation(model, Plan(begins, Decoding(), 8, 4, batch=3), tmp_path / "b")
        assert later.run() == whole and later.computed == computed
    few = Generation(model, Plan(begins, Decoding(), 8, 2), tmp_path / "b").run()
    assert [r["text"] for r in few] == [r["text"] for r in whole if r["sample"] < 2]


def naive_per_token(path: Path, pairs: list[tuple[list[int], list[int]]]) -> float:
    model, _ = load(path)
    nll = [naive_nll(model, [*start, *tail])[len(start) - 1 :] for start, tail in pairs]
    return float(np.concatenate(nll).mean())


def test_perplexities_equal_naive_ones(world: Path, sampled: Path) -> None:
    """PPL_oracle, its floor, PPL_test and cross-entropies, to 1e-6."""
    options = ["--oracle", world / "oracle", "--reference", world / "oracle"]
    assert command("quality", sampled, "--output_path", world / "out", *options)[0] == 0
    result = json.loads((sampled / "quality.json").read_text())
    _, actual = read_records(sampled)
    model = EvaluatedModel(str(world / "oracle"))
    exact = naive_per_token(
        world / "oracle", [(split_ids(model.tokenizer, r["prefix"], "")[0], r["ids"]) for r in actual]
    )
    oracle = result["ppl_oracle"]
    assert oracle["nats_per_token"]["mean"] == pytest.approx(exact, abs=1e-6)
    assert oracle["perplexity"]["mean"] == pytest.approx(math.exp(exact), rel=1e-6)
    assert oracle["perplexity"]["low"] < math.exp(exact) < oracle["perplexity"]["high"]
    assert (oracle["perplexity"]["n"], oracle["perplexity"]["unit"]) == (6, "prefixes")
    human = [split_ids(model.tokenizer, "", r["prefix"] + r["reference"]) for r in actual[:12:2]]
    assert result["ppl_test"]["nats_per_token"] == pytest.approx(
        naive_per_token(world / "small", human), abs=1e-6
    )
    (p, _), (q, _) = load(world / "oracle"), load(world / "small")
    forward, reverse = [], []
    for start, tail in human:
        ids = torch.tensor([[*start, *tail]])
        with torch.no_grad():
            lp, lq = (m(input_ids=ids).logits[0, :-1].double().log_softmax(-1) for m in (p, q))
        forward.append(float(-(lp.exp() * lq).sum(-1).mean()))
        reverse.append(float(-(lq.exp() * lp).sum(-1).mean()))
    assert result["cross_entropy"]["forward"] == pytest.approx(np.mean(forward), abs=1e-6)
    assert result["cross_entropy"]["reverse"] == pytest.approx(np.mean(reverse), abs=1e-6)


def test_the_oracle_of_its_own_samples_is_at_its_floor(world: Path, sampled: Path) -> None:
    arguments = [
        "--corpus",
        "ptb",
        "--data",
        world / "data",
        "--max_new_tokens",
        9,
        "--samples",
        2,
        "--seeds",
        "0,1",
    ]
    assert (
        command("generate", "--model", world / "oracle", "--output_path", world / "out", *arguments)[0] == 0
    )
    self_score = sampled.parents[2] / "oracle" / "generated" / "ptb-unbiased"
    assert (
        command("quality", self_score, "--output_path", world / "out", "--oracle", world / "oracle")[0] == 0
    )
    result = json.loads((self_score / "quality.json").read_text())
    assert result["ppl_oracle"] == result["ppl_oracle_floor"]


def test_models_are_compared_on_the_same_prefixes(world: Path, sampled: Path) -> None:
    """The difference of each measure is that of the means; other prefixes are said, not paired."""
    arguments = ["--data", world / "data", "--max_new_tokens", 9, "--samples", 2, "--seeds", "0,1"]
    directories = [sampled]
    for number, options in enumerate((["--corpus", "ptb"], ["--prefix", "the cat", "--prefix", "a dog"])):
        name = f"other-{number}"
        common = ["--model", world / "oracle", "--name", name, "--output_path", world / "out"]
        assert command("generate", *common, *options, *arguments[number and 2 :])[0] == 0
        directories += (world / "out/models" / name / "generated").iterdir()
    code, out, _ = command(
        "quality", *directories, "--output_path", world / "out", "--oracle", world / "oracle"
    )
    assert code == 0 and "prefixes are not the same" in out and "(6 prefixes)" in out
    first, same, other = (json.loads((d / "quality.json").read_text()) for d in directories)
    assert "differences" not in first and isinstance(other["differences"], str)
    for name in ("tokens", "repetition_2", "ended"):
        actual = same["differences"][name]
        assert actual["mean"] == pytest.approx(same["text"][name]["mean"] - first["text"][name]["mean"])
        assert actual["low"] <= actual["mean"] <= actual["high"] and actual["unit"] == "prefixes"
    nats = [result["ppl_oracle"]["nats_per_token"]["mean"] for result in (first, same)]
    assert same["differences"]["nats_per_token"]["mean"] == pytest.approx(nats[1] - nats[0])


def test_texts_that_are_all_empty_have_no_perplexity(world: Path) -> None:
    """After a prefix every continuation may be empty; so may all of them."""
    model = EvaluatedModel(str(world / "small"))
    actual = likelihood.continuations(model, [([5, 6, 7], []), ([5, 6, 7], []), ([8, 9], [10])])
    assert actual.nll[:2].tolist() == [0, 0] and actual.tokens.tolist() == [0, 0, 1]
    assert math.isfinite(actual.per_token)
    assert math.isnan(likelihood.continuations(model, [([5, 6], []), ([5, 6], [])]).per_token)


def test_a_text_longer_than_the_context_is_cut_into_windows(world: Path) -> None:
    model = EvaluatedModel(str(world / "small"))
    text = "the cat sat on the mat " * 40
    actual = likelihood.texts(model, [text, "the cat"])
    first, tail = split_ids(model.tokenizer, "", text)
    pairs = [(first if i == 0 else [tail[i - 1]], tail[i : i + 95]) for i in range(0, len(tail), 95)]
    assert len(pairs) > 2 and actual.tokens[0] == len(tail)
    assert actual.nll[0] / len(tail) == pytest.approx(naive_per_token(world / "small", pairs), abs=1e-6)


# --- texts ------------------------------------------------------------------------------------------------


def test_text_metrics_by_hand() -> None:
    texts = ["a b a b a", "c d", "c"]
    assert quality.distinct(texts, 1) == 4 / 8
    assert quality.distinct(texts, 2) == 3 / 5
    assert [quality.repetition(text, 2) for text in texts] == [2 / 4, 0.0, None]
    assert quality.distinct(["a"], 2) == 0.0


def test_the_released_protocol_repeats_its_flaws() -> None:
    record = {"prefix": "a b", "text": " x y", "human": " c", "reference": " c d  e f g"}
    assert quality.pair(record, "paper", 2, 3) == ("x y", "c")
    assert quality.pair(record, "released", 2, 3) == ("a b  x y", "a b c d e")


def test_intervals() -> None:
    actual = quality.by_seed([0, 0, 1, 1, 2, 2], [1, 3, 2, 4, 3, 5])
    assert (actual["mean"], actual["n"]) == (3.0, 3) and actual["low"] == pytest.approx(
        3 - 4.302653 / math.sqrt(3)
    )
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
    encoder = closeness.featurizer("minilm")
    features = [encoder(texts) for texts in (human, machine, shuffled)]
    actual = closeness.beside_ceiling(features[0], features, splits=2)
    self_score, gpt2, floor = actual["half"]
    assert actual["ceiling"] > 0.8 and self_score == pytest.approx(actual["ceiling"], abs=1e-9)
    assert floor < gpt2 - 0.2 and gpt2 <= actual["ceiling"] + 0.02


# --- mistakes ---------------------------------------------------------------------------------------------


def test_mistakes_are_one_line(
    world: Path, tmp_path: Path, sampled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (world / "empty.txt").write_text("\n")
    (world / "plain.jsonl").write_text('{"txt": "a"}\n')
    (world / "long.txt").write_text("the cat sat on the mat " * 40)
    for arguments in (
        ["--max_new_tokens", 0],
        ["--samples", 0],
        ["--corpus", "pbt"],
        ["--corpus", "webtext", "--data", world / "data"],
        ["--corpus", "ptb", "--data", world / "nowhere"],
        ["--corpus", "ptb"],  # not on the hub
        ["--prefixes", world / "nothing.txt"],
        ["--prefixes", world / "empty.txt"],
        ["--prefixes", world / "plain.jsonl"],
        ["--prefixes", world / "long.txt"],  # longer than the context
        ["--max_new_tokens", 96],
        ["--seeds", "1,x"],
        ["--seeds", "1,1"],
        ["--greedy", "--samples", 2],
        ["--temperature", 0],
    ):
        code, _, err = command("generate", "--model", world / "small", "--output_path", tmp_path, *arguments)
        assert code == 2 and len(lines(err)) == 1, (arguments, err)
    assert not list(tmp_path.rglob("records.jsonl"))
    for options in (["--protocol", "releasd"], ["--oracle", world / "nowhere"]):
        assert command("quality", sampled, "--output_path", tmp_path, *options)[0] == 2
    assert command("quality", sampled.parent, "--output_path", tmp_path)[0] == 2
    with pytest.raises(UserError):
        closeness.require_texts(60, 200)
    monkeypatch.setattr(closeness.importlib.util, "find_spec", lambda name: None)
    assert command("quality", sampled, "--mauve", "minilm")[0] == 2


def test_weights_that_are_not_numbers_give_no_number(world: Path, sampled: Path, tmp_path: Path) -> None:
    broken = tiny_model(world / "broken", 5, max_position_embeddings=96)
    model, _ = load(broken)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = float("nan")
    model.save_pretrained(broken)
    code, _, err = command("generate", "--model", broken, "--output_path", tmp_path, "--max_new_tokens", 4)
    assert code == 2 and len(lines(err)) == 1
    assert not list(tmp_path.rglob("records.jsonl")) and not list(tmp_path.rglob("chunks/*.json"))
    content = tmp_path / "out"
    for option in ("--oracle", "--reference"):
        (sampled / "quality.json").unlink(missing_ok=True)
        code, _, err = command("quality", sampled, "--output_path", content, option, broken)
        assert code == 2, err
        assert not (sampled / "quality.json").exists()
