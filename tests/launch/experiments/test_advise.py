"""`emo advise` finds the position of a recipe on the map, and reports the verdict there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from emo.experiments import advise
from emo.experiments.advise import (
    MapPosition,
    compute_truth_fit,
    describe_cell,
    find_nearest_cell,
    find_share,
    is_on_map,
    measure_cost_fit,
)
from emo.experiments.cli import main
from emo.experiments.known_truth import bigram
from emo.pipeline.loss.expected import CostOperator
from tests.helpers.evaluating import tiny_model
from tests.helpers.launching import tiny_recipe


def truth(share: float, V: int = 40, seed: int = 3) -> bigram.Truth:
    return bigram.geometric_truth(V, share, torch.Generator().manual_seed(seed))


def test_the_fit_of_a_truth_is_the_limit_of_its_samples() -> None:
    language, generator = truth(1.0), torch.Generator().manual_seed(0)
    contexts = torch.multinomial(language.contexts, 40_000, True, generator=generator)
    targets = torch.multinomial(language.rows[contexts], 1, generator=generator)[:, 0]
    costs = CostOperator(language.embedding).apply(torch.eye(40, dtype=torch.float64))
    fit = measure_cost_fit(language.rows[contexts], targets, lambda tokens: costs[tokens])
    assert fit == pytest.approx(compute_truth_fit(language), abs=0.005)


def test_the_fit_of_costs_without_geometry_is_zero() -> None:
    language = truth(1.0)
    constant = 1 - torch.eye(40, dtype=torch.float64)
    targets = language.rows.argmax(-1)
    assert measure_cost_fit(language.rows, targets, lambda tokens: constant[tokens]) == pytest.approx(
        0, abs=1e-9
    )
    assert abs(compute_truth_fit(truth(0.0))) < 0.05 < 0.1 < compute_truth_fit(language)


@pytest.mark.parametrize("share", [0.3, 0.7])
def test_the_share_is_found_from_the_fit(share: float) -> None:
    fit = sum(compute_truth_fit(truth(share, seed=seed)) for seed in range(8)) / 8
    assert find_share(fit, 40) == pytest.approx(share, abs=0.1)
    assert find_share(-1.0, 40) == 0 and find_share(1.0, 40) == 1


def rows() -> list[dict[str, Any]]:
    verdict = {"answer": "yes", "effect": 0.01, "low": 0.005, "high": 0.015, "outcome": "js"}
    verdicts = dict.fromkeys(("geometry", "beyond-sharpening"), verdict)
    verdicts["begins"] = verdict | {"answer": "no", "effect": -0.01}
    axes = [(V, share, draws) for V in (50, 400) for share in (0.0, 1.0) for draws in (5, 500)]
    return [{"V": V, "share": share, "draws": draws, "verdicts": verdicts} for V, share, draws in axes]


@pytest.mark.parametrize(
    ("position", "cell"),
    [
        (MapPosition(384, 40, 0.2), (400, 0.0, 5)),
        (MapPosition(60, 60, 0.9), (50, 1.0, 500)),
        (MapPosition(512, 700, 0.9), (400, 1.0, 500)),
        (MapPosition(32_000, 60, 0.9), None),
        (MapPosition(400, 5_000, 0.9), None),
        (MapPosition(400, 0.5, 0.9), None),
        (MapPosition(20, 60, 0.9), None),
    ],
)
def test_the_nearest_cell_is_found_within_the_map(position: MapPosition, cell: Any) -> None:
    assert is_on_map(rows(), position.V, position.draws) == (cell is not None)
    if cell is not None:
        row = find_nearest_cell(rows(), position)
        assert cell == (row["V"], row["share"], row["draws"])


def test_a_head_initialised_from_the_costs_has_a_separate_verdict() -> None:
    free, pretrained = ("\n".join(describe_cell(rows()[-1], begins)) for begins in (False, True))
    assert "entropy: yes" in free and "entropy: no" in pretrained


def test_advice_for_a_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tiny_recipe(tmp_path)
    monkeypatch.setattr(advise, "MAP", tmp_path / "map.json")
    (tmp_path / "map.json").write_text(json.dumps({"code": "c0de", "level": 0.95, "rows": rows()}))
    assert main(["advise", str(recipe)]) == 2
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "data" / "tokenizer")
    tiny_model(tmp_path / "model", 1, tokenizer, vocab_size=384)
    model = [f"model.path={tmp_path / 'model'}", "model.architecture=null"]
    assert main(["advise", str(recipe), *model]) == 0
    first, *others = capsys.readouterr().out.splitlines()
    assert first.startswith("EMO is not expected") and any("cell   400 tokens" in line for line in others)
    (tmp_path / "map.json").write_text(json.dumps({"rows": [row for row in rows() if row["V"] == 50]}))
    monkeypatch.setattr(advise, "measure_recipe_fit", lambda *_: pytest.fail("no model is read in vain"))
    assert main(["advise", str(recipe), *model]) == 0
    assert "not known" in capsys.readouterr().out
    (tmp_path / "map.json").write_text(json.dumps({"code": "c0de", "level": 0.95, "rows": rows()}))
    monkeypatch.undo()
    monkeypatch.setattr(advise, "MAP", tmp_path / "map.json")
    assert main(["advise", str(recipe), *model, "objective.cost=live"]) == 2


def test_the_shipped_map_has_the_needed_verdicts() -> None:
    shipped = json.loads(advise.MAP.read_text())
    assert {"geometry", "beyond-sharpening", "begins"} <= set(shipped["rows"][0]["verdicts"])
    assert shipped["rows"] and shipped["code"]
