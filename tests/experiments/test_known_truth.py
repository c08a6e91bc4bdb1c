"""Known truths: fixed points in closed form, a learner that finds them, a small study; an oracle's corpus."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import Tensor

from emo.common.errors import UserError
from emo.common.recipe import load_section
from emo.eval.generation import distributions
from emo.eval.model import EvaluatedModel
from emo.experiments.known_truth import bigram, corpus, oracle, study
from emo.experiments.known_truth.expected import Costs, expected_gradient, settle
from emo.pipeline.loss import Objective, get_objective
from emo.pipeline.loss.objectives import Rows, gradient, scalars_of
from tests.conftest import REPO
from tests.helpers.evaluating import tiny_model, tiny_tokenizer

V = 30


def truths(n: int = 4) -> Tensor:
    torch.manual_seed(0)
    rows = torch.distributions.Dirichlet(torch.full((V,), 0.7, dtype=torch.float64)).sample((n,))
    return (rows + 1e-4) / (rows + 1e-4).sum(-1, keepdim=True)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def geometry() -> Costs:
    return Costs(torch.randn(V, 6, dtype=torch.float64, generator=generator(1)))


def matrix(costs: Costs) -> Tensor:
    return costs.apply(torch.eye(V, dtype=torch.float64))


def entropy(q: Tensor) -> Tensor:
    return -(q * q.log()).sum(-1)


@pytest.mark.parametrize(
    "costs", [geometry(), Costs(torch.eye(V, dtype=torch.float64))], ids=["cosine", "constant"]
)
@pytest.mark.parametrize(
    "name", ["mle", "emo", "emo2", "demd", "tailr", "mixce", "dft", "mile", "deft", "neg_entropy", "gem"]
)
def test_the_gradient_is_the_mean_over_targets(name: str, costs: Costs) -> None:
    objective, c = get_objective(name), matrix(costs)
    truth, q = truths(1)[0], truths(2)[1]
    assert torch.allclose(
        expected_gradient(q, truth, objective, costs), by_hand(q, truth, objective, c), atol=1e-14
    )


def by_hand(q: torch.Tensor, truth: torch.Tensor, objective: Objective, c: torch.Tensor) -> torch.Tensor:
    """The mean over targets of what the loss library's own check says is the gradient for one."""
    total = torch.zeros(V, dtype=torch.float64)
    for y in range(V):
        target = torch.tensor([y])
        rows = Rows(q.log()[None], target, c[target], torch.zeros(1, dtype=torch.float64))
        scalars = scalars_of(rows.z, rows, objective.logit_scale)
        results = objective.coefficients(scalars)
        total += truth[y] * gradient(results, scalars, rows, objective.logit_scale)[0]
    return total


def test_emo_settles_where_its_closed_form_says() -> None:
    truth, costs = truths(), geometry()
    q, residual = settle(truth, get_objective("emo"), costs)
    assert residual.max() < 1e-11
    m, D = -q.log(), costs.apply(q)
    w = m / D
    shared = (truth * (1 - m)).sum(-1, keepdim=True) + costs.apply(truth * w)
    assert torch.allclose(q * shared, truth, atol=1e-10)
    assert (entropy(q) < entropy(truth)).all()


def test_gem_settles_at_the_tempered_truth() -> None:
    """softmax(z / beta) = P, so the model is the truth at temperature 1 / beta: broader."""
    truth = truths()
    want = torch.softmax(0.7 * truth.log(), -1)
    assert torch.allclose(settle(truth, get_objective("gem", beta=0.7), geometry())[0], want, atol=1e-9)


SEEDS = [0, 1, 2, 3]


@pytest.mark.parametrize(("share", "low", "high"), [(0.0, 0.97, 1.03), (0.5, 0.9, 0.97), (1.0, 0.7, 0.9)])
def test_a_geometric_truth_has_its_entropy_and_its_geometry(share: float, low: float, high: float) -> None:
    truth = bigram.geometric_truth(60, share, generator())
    entropy = -torch.special.xlogy(truth.rows, truth.rows).sum(-1)
    assert torch.allclose(entropy, torch.full_like(entropy, 0.5 * math.log(60)), atol=1e-6)
    assert torch.allclose(truth.contexts @ truth.rows, truth.contexts, atol=1e-9)
    # expected cost between two draws of the same context, against draws of any context
    costs = Costs(truth.embedding)
    within = (truth.rows * costs.apply(truth.rows)).sum(-1) @ truth.contexts
    marginal = truth.contexts @ truth.rows
    across = marginal @ costs.apply(marginal)
    spread = within / (1 - (truth.rows**2).sum(-1) @ truth.contexts)  # draws of two different tokens
    assert low < spread / across < high


def test_mle_converges_to_the_truth_at_the_rate_of_counts() -> None:
    """The error of counts is (parameters) / (2 N) nats; the learner stays within a factor of it."""
    truth = bigram.geometric_truth(12, 1.0, generator())
    errors = []
    for tokens in (2_000, 20_000, 200_000):
        train = bigram.sample_counts(truth, tokens, SEEDS)
        dev = bigram.sample_counts(truth, tokens, [s + 100 for s in SEEDS])
        fitted = bigram.fit(train, dev, get_objective("mle"), Costs(torch.eye(12)), SEEDS, 1e-2, 800)
        log_q = fitted.logits.double().log_softmax(-1)
        errors.append(float((distributions.kl(truth.rows.log(), log_q) @ truth.contexts).mean()))
    assert errors[0] > 4 * errors[1] > 16 * errors[2]
    assert errors[2] < 5 * 12 * 11 / (2 * 200_000)


FILE = str(REPO / "experiments/known-truth.yaml")
SMALL = ["vocabularies=[12]", "shares=[1.0]", "tokens=[400]", "truths=3", "steps=60", "rates=[3e-3]"]


def test_a_small_study(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert study.main([FILE, f"out={tmp_path}", *SMALL]) == 0
    results = json.loads((tmp_path / "results.json").read_text())
    points = {point["contestant"]: point for point in results["fixed_points"]}
    assert points["mle"]["kl_pq"] < 1e-9
    assert points["mle"]["temperature"] == pytest.approx(1.0, abs=1e-6)
    assert 0.8 < points["emo"]["temperature"] < 0.97
    assert points["emo-constant"]["kl_from_tempered_truth"] < points["emo"]["kl_from_tempered_truth"]
    assert points["tailr"]["settled"] < 1
    (row,) = results["rows"]
    assert row["contestants"]["mle"]["gap_js"]["mean"] == pytest.approx(0.0, abs=1e-9)
    assert set(row["verdicts"]) == set(results["verdicts"])
    assert row["at_end"] == []  # a single rate is no choice
    assert row["contestants"]["emo"]["temperature"]["mean"] > row["contestants"]["mle"]["temperature"]["mean"]
    assert set(results["verdicts"]) == {"geometry", "beyond-sharpening"}
    assert results["verdicts"]["geometry"]["n"] == 3
    (cell,) = (tmp_path / "cells").iterdir()
    before = cell.stat().st_mtime_ns
    assert study.main([FILE, f"out={tmp_path}", *SMALL]) == 0
    assert cell.stat().st_mtime_ns == before
    capsys.readouterr()


PLUGIN = "import torch\n\ndef scaled(m):\n    return torch.full_like(m, {})\n"


def test_cells_are_made_again_by_other_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each change of the study's code, a plug-in, a parameter or a share makes its cell anew."""
    plugin, measured = tmp_path / "plugin.py", []
    plugin.write_text(PLUGIN.format(1.0))
    contestants = {"mle": {"name": "mle"}, "mine": {"name": f"{plugin}:scaled"}}
    tree = {"out": str(tmp_path / "out"), "contestants": contestants, "truths": 2}
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(tree | {"vocabularies": [6], "tokens": [200]}))
    cell = {"values": {name: {"js": [0.0, 0.0]} for name in contestants}, "rates": {}}
    monkeypatch.setattr(study, "fixed_points", lambda _: [])
    monkeypatch.setattr(study, "measure_cell", lambda *what: measured.append(what) or cell)

    def run(*overrides: str) -> int:
        small = ["shares=[0.12345678]", "steps=20", *overrides]
        study.run(load_section(study.Study, tmp_path / "study.yaml", small))
        return len(measured)

    assert [run(), run()] == [1, 1]
    assert [run("shares=[0.12345679]"), run("steps=40"), run()] == [2, 3, 3]
    plugin.write_text(PLUGIN.format(2.0))
    assert [run(), run()] == [4, 4]
    monkeypatch.setattr(study, "code_digest", lambda _: "other")
    assert [run(), run()] == [5, 5]


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


def measured(root: Path, *arguments: str | Path) -> dict[str, Any]:
    """Return what is measured of the learner on the test texts; later arguments win."""
    paths = {"oracle": "oracle", "model": "learner", "texts": "corpus/test.jsonl", "output_path": "out.json"}
    options = [word for name, path in paths.items() for word in (f"--{name}", str(root / path))]
    assert oracle.main([*options, *map(str, arguments)]) == 0
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
