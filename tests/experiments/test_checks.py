"""A mistake in a late combination is told before the first run is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from common.errors import UserError
from experiments.checks import check
from experiments.design import read_experiment
from experiments.work import Work
from tests.helpers.sweeping import sweep

RECIPE = """
run_dir: {here}/run
data:
  {{ dir: {here}/data, root: {here}, train_tokenizer: 384, sources: [{{ files: text.txt, format: lines }}] }}
model:
  architecture: {{ model_type: llama, vocab_size: 384, hidden_size: 32, intermediate_size: 64,
    num_hidden_layers: 2, num_attention_heads: 2 }}
train: {{ steps: 3 }}
"""


def opened(here: Path, late: dict[str, Any] | None = None, **changes: Any) -> Work:
    """A sweep whose second label has the overrides `late`."""
    (here / "recipe.yaml").write_text(RECIPE.format(here=here))
    (here / "text.txt").write_text("A line.\n")
    axes = {
        "objective": {"mle": {"objective.name": "mle"}, "late": {"objective.name": "emo"} | (late or {})},
        "seed": {"train.seed": [1, 2]},
    }
    questions = {"questions": {}} | changes
    return Work(read_experiment(sweep(here, here / "recipe.yaml", axes=axes, **questions), []))


@pytest.mark.parametrize(
    ("late", "message"),
    [
        ({"objective.name": "emoo"}, "did you mean emo?"),
        ({"objective.params.gama": 1}, "gama"),
        ({"objective.sum": [{"name": "mel"}], "objective.name": "emo"}, "did you mean mle?"),
        ({"deepspeed": "ds_configs/zero9.json"}, "zero9.json"),
    ],
)
def test_what_needs_no_files_is_told_wherever_the_runs_will_be(
    tmp_path: Path, late: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=r"late-1: .*") as told:
        check(opened(tmp_path, late), here=False)
    assert message in str(told.value)


@pytest.mark.parametrize(
    ("late", "message"),
    [
        ({"objective.cost": "./pretraind"}, "objective.cost=./pretraind"),
        ({"model.path": "{out}/nowhere"}, "nowhere"),
        ({"data.root": "{out}/nowhere"}, "nowhere/text.txt; check files and data.root"),
        ({"data.validation": [{"files": "other.txt"}]}, "no file matches"),
    ],
)
def test_files_must_be_there_where_the_runs_are(tmp_path: Path, late: dict[str, Any], message: str) -> None:
    work = opened(tmp_path, late)
    check(work, here=False)
    with pytest.raises(UserError, match=r"late-1: .*") as told:
        check(work, here=True)
    assert message in str(told.value)


def test_what_is_made_first_need_not_be_there(tmp_path: Path) -> None:
    late = {"model.path": "{out}/model", "data.root": "{out}/corpus"}
    check(opened(tmp_path, late, before={"corpus": "python -c pass"}), here=True)


def test_an_experiment_without_mistakes_passes(tmp_path: Path) -> None:
    check(opened(tmp_path), here=True)
    assert not (tmp_path / "out").exists()
