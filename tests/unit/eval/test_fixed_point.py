"""Decoding from the fixed point of an objective: its equation, and the sampled texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from emo.eval.generation.decoding import Decoding
from emo.eval.generation.fixed_point import FixedPoint
from emo.eval.generation.records import read_generated
from emo.eval.generation.sampling import Sampler
from emo.eval.models.model import EvaluatedModel
from tests.helpers.evaluating import command, tiny_model
from tests.helpers.refusals import refused
from tests.unit.eval.test_generation import requests


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("settled")
    for name, seed in (("small", 1), ("other", 2)):
        tiny_model(root / name, seed, max_position_embeddings=96)
    return root


def cosine_costs(path: Path) -> Tensor:
    rows = EvaluatedModel(str(path)).model.get_output_embeddings().weight.detach().double()
    return 1 - nn.functional.cosine_similarity(rows[:, None], rows[None], dim=-1)


@pytest.mark.parametrize("cost", ["", "constant", "other"])
def test_the_distribution_solves_emo_s_equation(models: Path, cost: str) -> None:
    """q_i sum_y P_y (1 - m_y + w_y c_yi) = P_i, with m = -log q_y, w = m / D and D_y = sum_i q_i c_yi."""
    model = EvaluatedModel(str(models / "small"))
    V = model.model.config.vocab_size
    c = 1 - torch.eye(V, dtype=torch.float64)
    if cost != "constant":
        c = cosine_costs(models / (cost or "small")).fill_diagonal_(0)
    source = str(models / cost) if cost == "other" else cost
    logits = 3 * torch.randn(20, V, generator=torch.Generator().manual_seed(0))
    P = logits.double().softmax(-1)
    q = FixedPoint(model, Decoding(objective="emo", cost=source))(logits).double().exp()
    m, D = -q.log(), q @ c.T
    for row in range(len(P)):
        weights = P[row] * (1 - m[row] + m[row] / D[row] * c.T)  # [i, y]
        assert torch.allclose(q[row] * weights.sum(-1), P[row], atol=1e-6)
    assert (P - q).abs().amax(-1).min() > 1e-3


@pytest.mark.parametrize("decoding", [Decoding(objective="emo"), Decoding(0.7, 9, 0.9, objective="emo")])
def test_a_text_does_not_depend_on_its_batch(models: Path, decoding: Decoding) -> None:
    model = EvaluatedModel(str(models / "small"))
    prompts = requests(7, model.model.config.vocab_size)
    settled = FixedPoint(model, decoding)
    texts = [Sampler(model.model, decoding, [2], batch, settled).run(prompts, 12) for batch in (1, 4)]
    assert texts[0] == texts[1]


def test_ended_texts_do_not_affect_the_others(models: Path) -> None:
    """No fixed point is computed for a text that has ended, because it may not exist there."""
    model, rows = EvaluatedModel(str(models / "small")).model, []

    def settled(logits: Tensor) -> Tensor:
        rows.append(len(logits))
        return logits

    prompts = [r._replace(limit=limit) for r, limit in zip(requests(3), (1, 4, 2), strict=True)]
    texts = Sampler(model, Decoding(objective="emo"), (), 3, settled).run(prompts, 9)
    assert [len(text.tokens) for text in texts] == [1, 4, 2] and rows == [3, 2, 1, 1]


def test_texts_of_different_objectives_and_costs_are_stored_separately(models: Path, tmp_path: Path) -> None:
    """Texts also depend on the content of a cost. Decoding with `mle` gives the same texts as sampling."""
    written: dict[str, Any] = {}
    (tmp_path / "cost").symlink_to(models / "small")
    choices: dict[str, tuple[Any, ...]] = {
        "unbiased": (),
        "mle": ("--decode", "mle"),
        "emo-constant": ("--decode", "emo", "--cost", "constant"),
    }
    foreign = f"emo-{tmp_path.name}-cost-t0.9"
    choices[foreign] = ("--decode", "emo", "--cost", tmp_path / "cost", "--temperature", 0.9)
    settings = ["--prefix", "the cat", "--max_new_tokens", 20, "--samples", 4, "--output_path", tmp_path]
    for name, options in choices.items():
        assert command("generate", "--model", models / "small", *settings, *options)[0] == 0
        about, written[name] = read_generated(tmp_path / "models/small/generated" / f"given-{name}")
        assert about["decoding"]["name"] == name
    ids = {name: [record["ids"] for record in records] for name, records in written.items()}
    assert ids["unbiased"] == ids["mle"]
    (tmp_path / "cost").unlink()
    (tmp_path / "cost").symlink_to(models / "other")
    code, out, _ = command("generate", "--model", models / "small", *settings, *choices[foreign])
    assert code == 0 and "(0 already known)" in out


@pytest.mark.parametrize(
    ("objective", "cost", "code"),
    [
        ("dft", "", "no-fixed-point"),  # a corner of the simplex
        ("tailr", "", "no-fixed-point"),
        ("examples/my_objective.py:unsure", "", "unknown-objective"),
        ("mixce", "constant", "cost-alone"),
        ("kl", "", "no-fixed-point"),  # needs a teacher
        ("psft", "", "no-fixed-point"),  # needs scores of another model
        ("smoothed", "", "no-fixed-point"),  # would need costs between all tokens
        ("mile", "", "no-fixed-point"),  # weights depend on the batch
        ("emo", "nowhere.pt", "cost-missing"),
    ],
)
def test_missing_fixed_points_are_rejected(models: Path, objective: str, cost: str, code: str) -> None:
    model = EvaluatedModel(str(models / "small"))
    logits = torch.randn(3, model.model.config.vocab_size, generator=torch.Generator().manual_seed(0))
    logits[0] *= 10  # so sharp that gradients vanish near a corner
    with refused(code):
        FixedPoint(model, Decoding(objective=objective, cost=cost))(logits)


def test_costs_need_an_objective() -> None:
    with refused("cost-alone"):
        Decoding(cost="constant")
