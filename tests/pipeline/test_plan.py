"""Dry runs: every recipe plans without network or data, and mistakes stop it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from common.errors import UserError
from pipeline.config import load_config
from pipeline.planning.plan import model_sizes, print_plan
from tests.conftest import REPO

RECIPES = sorted((REPO / "launch" / "recipes").glob("*.yaml"))
OFFLINE = [p for p in RECIPES if not p.stem.startswith("stories260k")]  # those need the checkpoint itself


@pytest.mark.parametrize("path", OFFLINE, ids=lambda p: p.stem)
def test_every_recipe_plans(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = load_config(path, [f"run_dir={tmp_path / 'run'}"])  # the recipe's own may hold a run
    if config.model.architecture is None:  # continues an export that `make quickstart` writes
        config = config.model_copy(
            update={"model": load_config(REPO / "launch/recipes/quickstart-pretrain.yaml", []).model}
        )
    print_plan(config, ranks=4)
    printed = capsys.readouterr().out
    assert "rows per step" in printed
    assert "states per rank" in printed


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("llama-7b-wikitext103", 6_738_415_616),
        ("llama-13b-wikitext103", 13_015_864_320),
        ("gpt2-wikitext2", 124_439_808),
        ("opt-125m-wikitext2", 125_239_296),
    ],
)
def test_published_parameter_counts(name: str, parameters: int) -> None:
    config = load_config(REPO / "launch" / "recipes" / f"{name}.yaml", [])
    sizes = model_sizes(config)
    assert (sizes.parameters, sizes.trainable) == (parameters, parameters)


def test_lora_trains_only_the_adapters() -> None:
    config = load_config(REPO / "launch/recipes/llama-7b-wikitext103-lora.yaml", [])
    sizes = model_sizes(config)
    total, trainable = sizes.parameters, sizes.trainable
    # r (in + out) for q, k, v, o of 4096 x 4096 and gate, up, down of 4096 x 11008, in 32 layers
    assert trainable == 32 * 32 * (4 * 2 * 4096 + 3 * (4096 + 11008))
    assert total == 6_738_415_616 + trainable


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.batch=6", "does not divide over 4 ranks"),
        ("objective.name=emoo", "emo"),
        ("deepspeed=ds_configs/zero4.json", "zero4.json is not a file"),
        ("model.architecture.model_type=lama", "model.architecture"),
    ],
)
def test_a_mistake_stops_the_plan(override: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        print_plan(load_config(REPO / "launch/recipes/llama-7b-wikitext103.yaml", [override]), ranks=4)


@pytest.mark.parametrize(
    ("zero", "override", "message"),
    [
        ({"stage": 3, "offload_optimizer": {"device": "nvme"}}, "train.clip=1", "optimizer on NVMe"),
        ({"stage": 3}, "model.compile=true", "does not help under ZeRO-3"),
    ],
)
def test_what_does_not_go_together(tmp_path: Path, zero: dict, override: str, message: str) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"zero_optimization": zero}))
    overrides = [f"deepspeed={path}", override]
    config = load_config(REPO / "launch/recipes/llama-7b-wikitext103.yaml", overrides)
    with pytest.raises(UserError, match=message):
        print_plan(config, ranks=4)


def test_a_deepspeed_file_must_not_own_what_the_recipe_owns(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"train_batch_size": 4, "zero_optimization": {"stage": 2}}')
    config = load_config(REPO / "launch/recipes/llama-7b-wikitext103.yaml", [f"deepspeed={path}"])
    with pytest.raises(UserError, match=r"sets train_batch_size; remove it and set train.batch"):
        print_plan(config, ranks=4)
