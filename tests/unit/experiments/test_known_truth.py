"""Known truths: fixed points in closed form, a learner that finds them, and the corpus of an oracle."""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from scipy import optimize, stats
from scipy.spatial.distance import jensenshannon
from torch import Tensor, nn

from emo.common.config.recipe import load_section
from emo.common.errors import UserError
from emo.eval.generation import distributions
from emo.eval.models.model import EvaluatedModel
from emo.experiments.known_truth import bigram, contestants, corpus, learner, oracle, study
from emo.experiments.known_truth.contestants import Contestant, kernel_gradient
from emo.pipeline.loss import get_objective
from emo.pipeline.loss.expected import CostOperator, expected_gradient, settle
from tests.helpers.evaluating import tiny_model

V = 30


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def truths(n: int = 4) -> Tensor:
    return bigram.draw_dirichlet(n, V, 2.0, generator())


@pytest.mark.parametrize(("share", "low", "high"), [(0.0, 0.97, 1.03), (0.5, 0.9, 0.97), (1.0, 0.7, 0.9)])
def test_a_geometric_truth_has_the_expected_entropy_and_geometry(
    share: float, low: float, high: float
) -> None:
    truth = bigram.geometric_truth(60, share, generator())
    entropy = -torch.special.xlogy(truth.rows, truth.rows).sum(-1)
    assert (entropy - 0.5 * math.log(60)).abs().max() < 1e-6
    assert torch.allclose(truth.contexts @ truth.rows, truth.contexts, atol=1e-9)
    # expected cost between draws of the same context, relative to draws of any context
    costs = CostOperator(truth.embedding)
    within = (truth.rows * costs.apply(truth.rows)).sum(-1) @ truth.contexts
    marginal = truth.contexts @ truth.rows
    across = marginal @ costs.apply(marginal)
    spread = within / (1 - (truth.rows**2).sum(-1) @ truth.contexts)  # given two different tokens
    assert low < spread / across < high


def test_the_proper_score_has_the_gradient_of_its_definition_and_its_fixed_point_is_the_truth() -> None:
    """The score is m + 5 |E'q - e_y|^2, averaged over targets and differentiated by autograd."""
    truth, q = truths(2)
    embedding = nn.functional.normalize(
        torch.randn(V, 6, dtype=torch.float64, generator=generator(1)), dim=-1
    )
    z = q.log().requires_grad_()
    distances = (torch.softmax(z, -1) @ embedding - embedding).square().sum(-1)
    (truth * (5 * distances - torch.log_softmax(z, -1))).sum().backward()
    costs = CostOperator(embedding)
    assert torch.allclose(kernel_gradient(q, truth, costs, 10.0), z.grad, atol=1e-12)
    settled, _ = settle(truths(), lambda q, truth: kernel_gradient(q, truth, costs, 10.0))
    assert torch.allclose(settled, truths(), atol=1e-8)


def sample(size: int, draws: int, runs: int = 4) -> tuple[list[bigram.Truth], bigram.BigramSample]:
    return study.draw_truths(study.MapCell(size, 1.0, draws), "test", runs)


def test_mle_converges_to_the_truth_at_the_rate_of_counts() -> None:
    """Counts have an error of (parameters) / (2 N) nats. The learner stays within five times that."""
    errors = []
    for draws in (160, 1_600, 16_000):
        languages, counts = sample(12, draws)
        log_q = Contestant(name="mle").fit(counts, 1e-2, 800, patient=False).stopped.double().log_softmax(-1)
        pairs = zip(languages, log_q, strict=True)
        losses = [float(distributions.kl(p.rows.log(), q) @ p.contexts) for p, q in pairs]
        errors.append(sum(losses) / len(losses))
    assert errors[0] > 4 * errors[1] > 16 * errors[2]
    assert errors[2] < 5 * 12 * 11 / (2 * 12 * 16_000)


@pytest.mark.slow
def test_compiled_gradients_equal_uncompiled_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler only traces the gradient, because generating code would take most of the time."""
    compile_gradient = functools.partial(torch.compile, backend="aot_eager")
    monkeypatch.setattr(torch, "compile", compile_gradient)
    monkeypatch.setattr(contestants, "_gradient", functools.cache(contestants._gradient.__wrapped__))
    contestant, (_, counts) = Contestant(name="emo"), sample(12, 50)
    plain, after = (contestant.fit(counts, 1e-2, steps).logits for steps in (40, 41))
    monkeypatch.setattr(contestants, "COMPILED", 12)
    assert torch.allclose(contestant.fit(counts, 1e-2, 40).logits, plain, atol=1e-4)
    assert not torch.allclose(after, plain, atol=1e-4)


def test_learning_rates_are_extended_until_the_best_is_inside() -> None:
    tried = []

    def score(rate: float) -> dict[str, float]:
        tried.append(rate)
        return {"js": abs(math.log(rate / 0.3)), "nll": abs(math.log(rate / 1e-4))}

    scores = study.search_rates(score, [3e-3, 9e-3])
    chosen = study.best_rates(scores)
    assert chosen["js"] == pytest.approx(0.243) and chosen["nll"] == pytest.approx(1.11e-4, rel=1e-2)
    assert min(scores) < chosen["nll"] and max(scores) > chosen["js"] and len(tried) == len(scores)


@pytest.mark.parametrize(
    "override", ["shares=[1.5]", "draws=[0]", "rates=[]", "outcome=entropy_q", "vocabularies=[1]"]
)
def test_values_out_of_range_are_rejected(override: str) -> None:
    with pytest.raises(UserError, match=override.partition("=")[0]):
        load_section(
            study.Study, Path("experiments/configs/known-truth-quick.yaml"), [override], "experiment"
        )


PLUGIN = "import torch\n\ndef scaled(m):\n    return torch.full_like(m, {})\n"


def test_cells_are_repeated_if_code_or_parameters_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each change of the study's code, a plug-in, a parameter or a share repeats its cell."""
    plugin, measured = tmp_path / "plugin.py", []
    plugin.write_text(PLUGIN.format(1.0))
    contestants = {"mle": {"name": "mle"}, "mine": {"name": f"{plugin}:scaled"}}
    tree = {"out": str(tmp_path / "out"), "contestants": contestants, "truths": 2, "steps": 20}
    tree |= {"vocabularies": [6], "draws": [30], "shares": [0.12345678]}
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(tree))
    values = {name: {"js": [0.0, 0.0]} for name in contestants}
    cell = {"values": values, "rates": {}, "tried": {}, "steps": {}, "at_end": []}
    monkeypatch.setattr(study, "find_fixed_points", lambda _: [])
    monkeypatch.setattr(study, "measure_cell", lambda *arguments: measured.append(arguments) or cell)

    def run(*overrides: str) -> int:
        study.run_study(load_section(study.Study, tmp_path / "study.yaml", overrides))
        return len(measured)

    assert [run(), run()] == [1, 1]
    assert [run("shares=[0.12345679]"), run("steps=40"), run()] == [2, 3, 3]
    plugin.write_text(PLUGIN.format(2.0))
    assert [run(), run()] == [4, 4]
    monkeypatch.setattr(study, "code_digest", lambda _: "other")
    assert [run(), run()] == [5, 5]


TOKENS = "12"  # limit of each text


def sampled(root: Path, texts: int) -> int:
    counts = ["--train", str(texts), "--dev", "5", "--test", "4", "--max_new_tokens", TOKENS]
    return corpus.main(["--oracle", str(root / "oracle"), "--output_path", str(root / "corpus"), *counts])


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write two models with the same tokenizer, and a corpus of the first."""
    root = tmp_path_factory.mktemp("oracle")
    tiny_model(root / "oracle", seed=1)
    tiny_model(root / "learner", seed=2)
    assert sampled(root, 6) == 0
    return root


def rows(path: Path) -> list[list[int]]:
    return [json.loads(line)["ids"] for line in path.read_text(encoding="utf-8").splitlines()]


def measured(root: Path, *arguments: str | Path) -> dict[str, Any]:
    """Return the measurements of the learner on the test texts. Later arguments replace the defaults."""
    paths = {"oracle": "oracle", "model": "learner", "texts": "corpus/test.jsonl", "output_path": "out.json"}
    options = [word for name, path in paths.items() for word in (f"--{name}", str(root / path))]
    assert oracle.main([*options, *map(str, arguments)]) == 0
    return json.loads((root / "out.json").read_text())


def test_corpora_are_disjoint_and_larger_ones_extend_smaller_ones(root: Path) -> None:
    train = rows(root / "corpus/train.jsonl")
    assert len(train) == 6 and all(1 < len(row) <= 13 for row in train)
    splits = [rows(root / f"corpus/{split}.jsonl") for split in ("train", "dev", "test")]
    assert not {tuple(row) for row in splits[0]} & {tuple(row) for row in (*splits[1], *splits[2])}
    assert sampled(root, 9) == 0
    assert rows(root / "corpus/train.jsonl")[:6] == train


@torch.no_grad()
def log_probs(directory: Path, texts: list[list[int]]) -> Tensor:
    """Return log-probabilities [n, V] of the next token in every context, from a plain forward pass."""
    model = EvaluatedModel(str(directory)).model
    logits = [model(input_ids=torch.tensor([text])).logits[0, :-1] for text in texts]
    return torch.cat(logits).double().log_softmax(-1)


def targets(texts: list[list[int]]) -> Tensor:
    return torch.tensor([token for text in texts for token in text[1:]])[:, None]


def test_a_learner_keeps_only_the_oracles_embedding(root: Path) -> None:
    out = root / "begins"
    assert learner.main(["--model", str(root / "oracle"), "--output_path", str(out)]) == 0
    fresh, expected = (EvaluatedModel(str(path)).model.state_dict() for path in (out, root / "oracle"))
    equal = {
        name for name, value in fresh.items() if torch.equal(value, expected[name]) and "norm" not in name
    }
    assert equal == {"model.embed_tokens.weight", "lm_head.weight"}


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


def test_decodings_and_halves_equal_a_naive_computation(root: Path) -> None:
    results, texts = measured(root), rows(root / "corpus/test.jsonl")
    log_p, log_q = (log_probs(root / name, texts) for name in ("oracle", "learner"))
    p = log_p.exp().numpy()

    def js(q: np.ndarray) -> np.ndarray:
        return jensenshannon(p, q, axis=1) ** 2

    plain, order = js(log_q.exp().numpy()), stats.entropy(p, axis=1).argsort()
    half = (len(order) + 1) // 2
    assert results["locks_js"] == pytest.approx(plain[order[:half]].mean(), abs=1e-6)
    assert results["forks_js"] == pytest.approx(plain[order[half:]].mean(), abs=1e-6)
    tempered = [js(torch.softmax(log_q / way.temperature, -1).numpy()) for way in oracle.TEMPERED]
    assert results["bound_js"] == pytest.approx(np.min(tempered, axis=0).mean(), abs=1e-6)
    nuclei = []
    for row in log_q.exp().numpy():
        likeliest, nucleus = np.argsort(-row), np.zeros_like(row)
        size = int(np.searchsorted(np.cumsum(row[likeliest]), 0.9)) + 1
        nucleus[likeliest[:size]] = row[likeliest[:size]]
        nuclei.append(nucleus / nucleus.sum())
    assert results["decoded"]["p0_9"]["js"] == pytest.approx(js(np.array(nuclei)).mean(), abs=1e-6)


def test_training_is_compared_with_decoding(root: Path) -> None:
    decode = ("--baseline", root / "learner", "--decode", "emo", "--cost", "constant")
    assert set(measured(root, *decode)["over_decoded_baseline"].values()) == {0.0}
    results, texts = measured(root, "--model", root / "oracle", *decode), rows(root / "corpus/test.jsonl")
    log_p, log_q = (log_probs(root / name, texts) for name in ("oracle", "learner"))
    costs, emo = CostOperator(None), get_objective("emo")
    q, _ = settle(log_q.exp(), lambda q, truth: expected_gradient(q, truth, emo, costs))
    js = jensenshannon(log_p.exp().numpy(), q.numpy(), axis=1) ** 2
    assert results["over_decoded_baseline"]["js"] == pytest.approx(-js.mean(), abs=1e-6)


def test_the_best_temperature_is_exact(root: Path) -> None:
    """There the derivative of the nats by log T is zero, which is the scaled mean of E_q[z] - z_target."""
    dev = root / "corpus/dev.jsonl"
    results, texts = measured(root, "--dev", str(dev)), rows(dev)
    z = log_probs(root / "learner", texts) / results["temperature"]
    slopes = (z.softmax(-1) * z).sum(-1) - z.gather(-1, targets(texts))[:, 0]
    assert abs(float(slopes.mean())) < 1e-6


def test_questions_by_nats_are_answered_without_the_truth(tmp_path: Path) -> None:
    """Learners use the rate and steps that fit the sample of each truth best, also with a temperature."""
    contestants = {name: Contestant(name=name) for name in ("mle", "emo")}
    chosen = study.Study(
        out=tmp_path, contestants=contestants, vocabularies=[12], shares=[1.0], draws=[20],
        truths=2, selection=2, steps=60, rates=[1e-2, 3e-2],
        questions={"nats": study.StudyQuestion(better="emo", than=["mle"], tempered=True, by_nll=True)},
    )  # fmt: skip
    cell = study.MapCell(12, 1.0, 20)
    result = study.measure_cell(chosen, cell)
    truths, sample = study.draw_truths(cell, "measured", 2)

    def liked(name: str, truth: int) -> Tensor:
        rates = result["tried"][name]
        fits = [contestants[name].fit(sample, rate, 60, patient=False) for rate in rates]
        return min(fits, key=lambda fitted: float(fitted.nll[truth])).stopped[truth].double()

    mle, emo = ([liked(name, truth) for truth in range(2)] for name in contestants)
    gaps = []
    for truth, base, learned in zip(truths, mle, emo, strict=True):
        entropy = study.measure_truth(truth, learned)["entropy_q"]
        t = optimize.brentq(lambda t: study.measure_truth(truth, base, t)["entropy_q"] - entropy, 0.1, 10)  # noqa: B023
        gaps.append(study.measure_truth(truth, learned)["js"] - study.measure_truth(truth, base, t)["js"])
    assert result["values"]["emo"]["gap_js_by_nll"] == pytest.approx(gaps, abs=1e-6)
    assert study.answer_cell(chosen, "nats", result, 1)["effect"] == pytest.approx(-np.mean(gaps), abs=1e-6)
