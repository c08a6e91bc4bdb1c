"""A mistake in a late combination is told before the first run is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from emo.common.errors import UserError
from emo.experiments.checks import check
from emo.experiments.design import read_experiment
from emo.experiments.sweep import Sweep
from tests.helpers.sweeping import sweep

RECIPE = """
output_dir: {root}/run
data:
  {{ dir: {root}/data, root: {root}, train_tokenizer: 384, sources: [{{ files: text.txt, format: lines }}] }}
model:
  architecture: {{ model_type: llama, vocab_size: 384, hidden_size: 32, intermediate_size: 64,
    num_hidden_layers: 2, num_attention_heads: 2 }}
train: {{ max_steps: 3 }}
"""


def opened(root: Path, late: dict[str, Any] | None = None, **changes: Any) -> Sweep:
    """Return a sweep whose second label has the overrides `late`."""
    (root / "recipe.yaml").write_text(RECIPE.format(root=root))
    (root / "text.txt").write_text("A line.\n")
    axes = {
        "objective": {"mle": {"objective.name": "mle"}, "late": {"objective.name": "emo"} | (late or {})},
        "seed": {"train.seed": [1, 2]},
    }
    path = sweep(root, root / "recipe.yaml", axes=axes, **{"questions": {}} | changes)
    return Sweep(read_experiment(path, []))


@pytest.mark.parametrize(
    ("late", "local"),
    [
        ({"objective.name": "emoo"}, False),
        ({"deepspeed": "ds_configs/zero9.json"}, False),
        ({"objective.cost": "./pretraind"}, True),
        ({"model.path": "{out}/nowhere"}, True),
        ({"data.root": "{out}/nowhere"}, True),
    ],
)
def test_mistakes_of_late_runs(tmp_path: Path, late: dict[str, Any], local: bool) -> None:
    """Files must be there only where the runs are."""
    if local:
        check(opened(tmp_path, late), local=False)
    with pytest.raises(UserError, match=r"late-1: .*"):
        check(opened(tmp_path, late), local=local)


def test_files_that_are_made_first_may_be_missing(tmp_path: Path) -> None:
    late = {"model.path": "{out}/model", "data.root": "{out}/corpus"}
    check(opened(tmp_path, late, before={"corpus": "python -c pass"}), local=True)
    assert not (tmp_path / "out").exists()
