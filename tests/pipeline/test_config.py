"""Recipes: what resolves, and the one line that each mistake gets."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emo.common.errors import UserError
from emo.common.recipe import parse_section
from emo.pipeline.config import ObjectiveConfig, TrainConfig, dump_config, load_config, lr_at, solve_batch

RECIPE = """
output_dir: runs/x
data: { dir: d, tokenizer: t, sources: [{ files: a.txt }] }
model: { architecture: { model_type: llama } }
train: { max_steps: 10, learning_rate: 1.0e-3 }
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    return path


def test_overrides_win_and_the_dump_reads_back(recipe: Path, tmp_path: Path) -> None:
    config = load_config(
        recipe, ["train.learning_rate=2e-5", "data.sequence_len=64", "objective.params.ratio_cap=3"]
    )
    assert config.train.learning_rate == 2e-5
    assert config.data.sequence_len == 64
    assert config.objective.params == {"ratio_cap": 3}
    dumped = tmp_path / "dumped.yaml"
    dumped.write_text(dump_config(config))
    assert load_config(dumped, []) == config


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("train.warmup_ration=0.1", "warmup_ratio"),
        ("trian.lr=1", "train"),
        ("train.learning_rate", "key.sub=value"),
        ("train.learning_rate=-1", "train.learning_rate"),
        (
            "train.num_train_epochs=2",
            "train.num_train_epochs=null, or train.num_train_epochs=2 train.max_steps=null",
        ),
        ("train.optimizer=muon", "muon_lr"),
        ("train.muon_lr=0.02", "adamw"),
        ("train.profile=[5,2]", "profile"),
        ("model.architecture={hidden_size: 8}", "model_type"),
        ("data.sources=[{files: a, hub: b}]", "hub, files, embedded"),
        ("objective={name: mle, sum: [{name: emo}]}", "not both"),
        ("objective.sum=[{name: emo, cost: live}, {name: mle}]", "cost"),
        ("objective.sum=[{name: emo, weight: {from: 1, to: 0}}]", "steps"),
        ("objective.sum=[{name: emo, nme: 1}]", "nme"),
        ("train.mixture={}", "shares and temperature"),
        ("train.mixture={shares: {home: -1, abroad: 1}}", "home"),
        ("train.mixture={temperature: 2, max_epochs: {home: 0}}", "max_epochs"),
    ],
)
def test_a_mistake_gets_one_line(recipe: Path, override: str, named: str) -> None:
    with pytest.raises(UserError) as caught:
        load_config(recipe, [override])
    assert named in str(caught.value) and "\n" not in str(caught.value)


@given(st.integers(1, 4096), st.integers(1, 64), st.integers(1, 64))
def test_batch_equation(batch: int, micro: int, ranks: int) -> None:
    for _ in range(3):  # whoever follows the advice arrives, in two rounds at most
        try:
            solved = solve_batch(batch, micro, ranks)
        except UserError as error:
            key, _, value = str(error).rpartition("; set ")[2].split(" ")[0].partition("=")
            assert key in ("train.global_batch_size", "train.micro_batch_size")
            batch, micro = (int(value), micro) if key == "train.global_batch_size" else (batch, int(value))
    assert solved.micro * solved.accumulation * solved.ranks == batch
    assert solved.micro <= micro


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_learning_rate_warms_up_peaks_and_falls(schedule: str) -> None:
    train = TrainConfig(max_steps=100, learning_rate=1.0, lr_scheduler_type=schedule, warmup_ratio=0.1)  # type: ignore[arg-type]
    rates = [lr_at(train, step, 100) for step in range(100)]
    assert rates[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert max(rates) == pytest.approx(1.0)
    falling = rates[10:]
    assert falling == sorted(falling, reverse=True)
    assert (rates[-1] < 0.02) == (schedule != "constant")
    assert min(rates) > 0


def test_sums_of_objectives() -> None:
    """A recipe's sum is what the loss library is given; schedules keep their YAML form when dumped."""
    parts = [{"name": "emo", "weight": 0.5}, {"name": "mle", "weight": {"from": 0.5, "to": 0, "steps": 9}}]
    config = parse_section(ObjectiveConfig, {"sum": parts}, "objective")
    assert config.label == "0.5 emo + (0.5 to 0) mle"
    dumped = config.model_dump(mode="json")
    assert dumped["sum"][1]["weight"] == {"from": 0.5, "to": 0.0, "steps": 9}
    assert parse_section(ObjectiveConfig, dumped, "objective") == config
