"""An oracle's corpus, and learners measured beside it: exact, and right where the answer is known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from emo.common.errors import UserError
from emo.eval.model import EvaluatedModel
from emo.experiments.known_truth import corpus, oracle
from tests.helpers.evaluating import tiny_model, tiny_tokenizer

TOKENS = 12


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models with one tokenizer, and a corpus of the first."""
    root = tmp_path_factory.mktemp("oracle")
    tiny_model(root / "oracle", seed=1)
    tiny_model(root / "learner", seed=2)
    assert sampled(root, 6) == 0
    return root


def sampled(root: Path, texts: int) -> int:
    counts = ["--train", str(texts), "--dev", "5", "--test", "4", "--max_new_tokens", str(TOKENS)]
    return corpus.main(["--oracle", str(root / "oracle"), "--output_path", str(root / "corpus"), *counts])


def rows(path: Path) -> list[list[int]]:
    return [json.loads(line)["ids"] for line in path.read_text(encoding="utf-8").splitlines()]


def run(root: Path, *arguments: str | Path) -> int:
    """Return the exit code for the learner on the test texts; later arguments win."""
    paths = {"oracle": "oracle", "model": "learner", "texts": "corpus/test.jsonl", "output_path": "out.json"}
    options = [word for name, path in paths.items() for word in (f"--{name}", str(root / path))]
    return oracle.main([*options, *map(str, arguments)])


def measured(root: Path, *arguments: str | Path) -> dict[str, Any]:
    assert run(root, *arguments) == 0
    return json.loads((root / "out.json").read_text())


def test_the_texts_are_the_tokens_that_were_drawn(root: Path) -> None:
    train = rows(root / "corpus/train.jsonl")
    assert len(train) == 6 and all(1 < len(row) <= TOKENS + 1 for row in train)
    splits = [rows(root / f"corpus/{split}.jsonl") for split in ("train", "dev", "test")]
    assert not {tuple(row) for row in splits[0]} & {tuple(row) for row in (*splits[1], *splits[2])}
    assert sampled(root, 9) == 0
    assert rows(root / "corpus/train.jsonl")[:6] == train


def test_measures_equal_a_naive_computation(root: Path) -> None:
    same = ["--model", str(root / "oracle"), "--samples", "7", "--max_new_tokens", str(TOKENS)]
    results = measured(root, *same)
    assert results["at_1"]["js"] == results["at_1"]["kl_pq"] == 0
    assert results["samples"]["oracle_nats"] == results["samples"]["floor_nats"]
    results = measured(root)
    models = [EvaluatedModel(str(root / name)).model for name in ("oracle", "learner")]
    kl, js, nats, count = 0.0, 0.0, 0.0, 0
    for row in rows(root / "corpus/test.jsonl"):
        with torch.no_grad():
            logits = [m(input_ids=torch.tensor([row])).logits[0, :-1].double().numpy() for m in models]
        p, q = (np.exp(x) / np.exp(x).sum(-1, keepdims=True) for x in logits)
        middle = (p + q) / 2
        kl += (p * np.log(p / q)).sum()
        js += ((p * np.log(p / middle)).sum() + (q * np.log(q / middle)).sum()) / 2
        nats -= np.log(q[np.arange(len(row) - 1), row[1:]]).sum()
        count += len(row) - 1
    assert results["contexts"] == count
    for name, value in (("kl_pq", kl), ("js", js), ("test_nats", nats)):
        assert results["at_1"][name] == pytest.approx(value / count, abs=1e-6)


def test_tempering_explains_a_tempered_model(root: Path) -> None:
    """A baseline that is the model at another temperature leaves no gap: sharpening is taken away whole."""
    model = EvaluatedModel(str(root / "learner"))
    sharp = root / "sharp"
    model.model.lm_head.weight.data *= 2.0
    model.model.save_pretrained(sharp)
    model.tokenizer.save_pretrained(sharp)
    results = measured(root, "--model", str(sharp), "--baseline", str(root / "learner"))
    assert results["baseline_temperature"] == pytest.approx(0.5, abs=1e-4)
    assert abs(results["over_tempered_baseline"]["kl_pq"]) < 1e-6


def test_the_best_temperature_is_exact(root: Path) -> None:
    """There the derivative of the nats by log T vanishes: sum over contexts of E_q[z] - z_target, scaled."""
    dev = root / "corpus/dev.jsonl"
    results = measured(root, "--dev", str(dev))
    model, slope = EvaluatedModel(str(root / "learner")).model, 0.0
    for row in rows(dev):
        with torch.no_grad():
            z = model(input_ids=torch.tensor([row])).logits[0, :-1].double() / results["temperature"]
        slope += float((z.softmax(-1) * z).sum() - z.gather(-1, torch.tensor(row[1:])[:, None]).sum())
    assert abs(slope / sum(len(row) - 1 for row in rows(dev))) < 1e-6


@pytest.mark.parametrize("line", ["{", "{}", '{"ids": [1, 99999]}'])
def test_what_is_no_row_is_refused(line: str, root: Path) -> None:
    (root / "bad.jsonl").write_text('{"ids": [1, 2]}\n' + line + "\n")
    with pytest.raises(UserError) as error:
        oracle.token_rows(tiny_tokenizer(root / "tokenizer"), root / "bad.jsonl")
    assert error.value.code == "no-row"
