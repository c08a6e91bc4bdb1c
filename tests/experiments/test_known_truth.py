"""Known truths: fixed points in closed form, a learner that finds them; an oracle's corpus."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from scipy import stats
from scipy.spatial.distance import jensenshannon
from torch import Tensor

from emo.common.recipe import load_section
from emo.eval.generation import distributions
from emo.eval.model import EvaluatedModel
from emo.experiments.known_truth import bigram, corpus, oracle, study
from emo.experiments.known_truth.expected import Costs, expected_gradient, settle
from emo.pipeline.loss import get_objective
from emo.pipeline.loss.objectives import Rows, gradient, scalars_of
from tests.helpers.evaluating import tiny_model

V = 30


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def truths(n: int = 4) -> Tensor:
    return bigram.dirichlet(n, V, 2.0, generator())


def geometry() -> Costs:
    return Costs(torch.randn(V, 6, dtype=torch.float64, generator=generator(1)))


@pytest.mark.parametrize(
    "name", ["mle", "emo", "emo2", "demd", "tailr", "mixce", "dft", "mile", "deft", "neg_entropy", "gem"]
)
def test_the_gradient_is_the_mean_over_targets(name: str) -> None:
    """... of what the loss library's own check says is the gradient for one."""
    objective, costs, (truth, q) = get_objective(name), geometry(), truths(2)
    cost, zero = costs.apply(torch.eye(V, dtype=torch.float64)), torch.zeros(1, dtype=torch.float64)
    expected = torch.zeros_like(q)
    for y in range(V):
        target = torch.tensor([y])
        rows = Rows(q.log()[None], target, cost[target], zero)
        scalars = scalars_of(rows.z, rows, objective.logit_scale)
        weights = objective.coefficients(scalars)
        expected += truth[y] * gradient(weights, scalars, rows, objective.logit_scale)[0]
    assert torch.allclose(expected_gradient(q, truth, objective, costs), expected, atol=1e-14)


def test_emo_settles_where_its_closed_form_says() -> None:
    truth, costs = truths(), geometry()
    q, residual = settle(truth, get_objective("emo"), costs)
    assert residual.max() < 1e-11
    m = -q.log()
    shared = (truth * (1 - m)).sum(-1, keepdim=True) + costs.apply(truth * m / costs.apply(q))
    assert torch.allclose(q * shared, truth, atol=1e-10)
    assert (distributions.entropy(q.log()) < distributions.entropy(truth.log())).all()


@pytest.mark.parametrize(("share", "low", "high"), [(0.0, 0.97, 1.03), (0.5, 0.9, 0.97), (1.0, 0.7, 0.9)])
def test_a_geometric_truth_has_its_entropy_and_its_geometry(share: float, low: float, high: float) -> None:
    truth = bigram.geometric_truth(60, share, generator())
    entropy = -torch.special.xlogy(truth.rows, truth.rows).sum(-1)
    assert (entropy - 0.5 * math.log(60)).abs().max() < 1e-6
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
    truth, seeds, errors = bigram.geometric_truth(12, 1.0, generator()), [0, 1, 2, 3], []
    for tokens in (2_000, 20_000, 200_000):
        train = bigram.sample_counts(truth, tokens, seeds)
        dev = bigram.sample_counts(truth, tokens, [s + 100 for s in seeds])
        fitted = bigram.fit(train, dev, get_objective("mle"), Costs(torch.eye(12)), seeds, 1e-2, 800)
        log_q = fitted.logits.double().log_softmax(-1)
        errors.append(float((distributions.kl(truth.rows.log(), log_q) @ truth.contexts).mean()))
    assert errors[0] > 4 * errors[1] > 16 * errors[2]
    assert errors[2] < 5 * 12 * 11 / (2 * 200_000)


PLUGIN = "import torch\n\ndef scaled(m):\n    return torch.full_like(m, {})\n"


def test_cells_are_made_again_by_other_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each change of the study's code, a plug-in, a parameter or a share makes its cell anew."""
    plugin, measured = tmp_path / "plugin.py", []
    plugin.write_text(PLUGIN.format(1.0))
    contestants = {"mle": {"name": "mle"}, "mine": {"name": f"{plugin}:scaled"}}
    tree = {"out": str(tmp_path / "out"), "contestants": contestants, "truths": 2, "steps": 20}
    tree |= {"vocabularies": [6], "tokens": [200], "shares": [0.12345678]}
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(tree))
    cell = {"values": {name: {"js": [0.0, 0.0]} for name in contestants}, "rates": {}}
    monkeypatch.setattr(study, "fixed_points", lambda _: [])
    monkeypatch.setattr(study, "measure_cell", lambda *what: measured.append(what) or cell)

    def run(*overrides: str) -> int:
        study.run(load_section(study.Study, tmp_path / "study.yaml", overrides))
        return len(measured)

    assert [run(), run()] == [1, 1]
    assert [run("shares=[0.12345679]"), run("steps=40"), run()] == [2, 3, 3]
    plugin.write_text(PLUGIN.format(2.0))
    assert [run(), run()] == [4, 4]
    monkeypatch.setattr(study, "code_digest", lambda _: "other")
    assert [run(), run()] == [5, 5]


TOKENS = "12"  # of a text at most


def sampled(root: Path, texts: int) -> int:
    counts = ["--train", str(texts), "--dev", "5", "--test", "4", "--max_new_tokens", TOKENS]
    return corpus.main(["--oracle", str(root / "oracle"), "--output_path", str(root / "corpus"), *counts])


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models with one tokenizer, and a corpus of the first."""
    root = tmp_path_factory.mktemp("oracle")
    tiny_model(root / "oracle", seed=1)
    tiny_model(root / "learner", seed=2)
    assert sampled(root, 6) == 0
    return root


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
    assert len(train) == 6 and all(1 < len(row) <= 13 for row in train)
    splits = [rows(root / f"corpus/{split}.jsonl") for split in ("train", "dev", "test")]
    assert not {tuple(row) for row in splits[0]} & {tuple(row) for row in (*splits[1], *splits[2])}
    assert sampled(root, 9) == 0
    assert rows(root / "corpus/train.jsonl")[:6] == train


@torch.no_grad()
def log_probs(directory: Path, texts: list[list[int]]) -> Tensor:
    """Next-token distributions [n, V] at every context of the texts, by the plainest forward there is."""
    model = EvaluatedModel(str(directory)).model
    logits = [model(input_ids=torch.tensor([text])).logits[0, :-1] for text in texts]
    return torch.cat(logits).double().log_softmax(-1)


def targets(texts: list[list[int]]) -> Tensor:
    return torch.tensor([token for text in texts for token in text[1:]])[:, None]


def test_measures_equal_a_naive_computation(root: Path) -> None:
    same = ["--model", str(root / "oracle"), "--samples", "7", "--max_new_tokens", TOKENS]
    results = measured(root, *same)
    assert results["at_1"]["js"] == results["at_1"]["kl_pq"] == 0
    assert results["samples"]["oracle_nats"] == results["samples"]["floor_nats"]
    results, texts = measured(root), rows(root / "corpus/test.jsonl")
    log_p, log_q = (log_probs(root / name, texts) for name in ("oracle", "learner"))
    p, q = log_p.exp().numpy(), log_q.exp().numpy()
    assert results["contexts"] == len(p)
    for name, values in (
        ("kl_pq", stats.entropy(p, q, axis=1)),
        ("js", jensenshannon(p, q, axis=1) ** 2),
        ("test_nats", -log_q.gather(-1, targets(texts))),
    ):
        assert results["at_1"][name] == pytest.approx(float(values.mean()), abs=1e-6)


def test_tempering_explains_a_tempered_model(root: Path) -> None:
    """A baseline that is the model at another temperature leaves no gap: sharpening is taken away whole."""
    model, sharp = EvaluatedModel(str(root / "learner")), root / "sharp"
    model.model.lm_head.weight.data *= 2.0
    model.model.save_pretrained(sharp)
    model.tokenizer.save_pretrained(sharp)
    results = measured(root, "--model", str(sharp), "--baseline", str(root / "learner"))
    assert results["baseline_temperature"] == pytest.approx(0.5, abs=1e-4)
    assert abs(results["over_tempered_baseline"]["kl_pq"]) < 1e-6


def test_the_best_temperature_is_exact(root: Path) -> None:
    """There the derivative of the nats by log T vanishes: sum over contexts of E_q[z] - z_target, scaled."""
    dev = root / "corpus/dev.jsonl"
    results, texts = measured(root, "--dev", str(dev)), rows(dev)
    z = log_probs(root / "learner", texts) / results["temperature"]
    slopes = (z.softmax(-1) * z).sum(-1) - z.gather(-1, targets(texts))[:, 0]
    assert abs(float(slopes.mean())) < 1e-6
