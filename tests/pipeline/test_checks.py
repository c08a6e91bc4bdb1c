"""What can be refused before weights are loaded is refused by every command alike."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save

from emo.common.errors import UserError
from emo.pipeline import identity
from emo.pipeline.config import load_config
from emo.pipeline.planning.checks import check
from emo.pipeline.planning.plan import print_plan
from tests.helpers import launching


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return launching.tiny_recipe(tmp_path_factory.mktemp("tiny"))


def test_an_extra_that_is_not_installed(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(recipe, ["train.report_to=[wandb]"])
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it could not be found
    with pytest.raises(UserError) as error:
        check(config, ranks=2, local=True)
    assert error.value.code == "missing-extra"
    assert check(config, ranks=2, local=False).steps == 8  # planned here, trained elsewhere


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("deepspeed=none.json", "none.json"),
        ("objective.name=emoo", "emo"),
        ("objective.params.ratio_cup=3", "ratio_cap"),
        ("objective.name=demd_dense", "teacher"),
        ("objective.cost=none.safetensors", "objective.cost=none.safetensors"),
        ("train.global_batch_size=7", "does not divide"),
        ("train.profile=[3,9]", "train.profile"),
        ("model.architecture.vocab_size=100", "100"),
        ("model.architecture.max_position_embeddings=16", "data.sequence_len=16"),
        ("model.architecture.hidden_size=33", "model.architecture"),
        ("model.architecture.num_hidden_layers=two", "model.architecture"),
        ("model.lora={targets: [q_porj]}", "model.lora.targets"),
    ],
)
def test_every_command_refuses_it(recipe: Path, override: str, named: str) -> None:
    config = load_config(recipe, [override])
    for refuse in (lambda: check(config, ranks=1, local=True), lambda: print_plan(config, ranks=1)):
        with pytest.raises(UserError) as caught:
            refuse()
        assert named in str(caught.value)
    assert not config.output_dir.exists()


def test_a_damaged_cost_file(recipe: Path, tmp_path: Path) -> None:
    path, weight = tmp_path / "cost.safetensors", torch.randn(384, 8)
    wrong = weight.clone()
    wrong[3, 3] = torch.nan
    contents = [save({"w": weight})[:100], save({"w": weight[:100].clone()}), save({"w": wrong}), b""]
    for content in contents:
        path.write_bytes(content)
        with pytest.raises(UserError, match=r"cost.safetensors"):
            check(load_config(recipe, [f"objective.cost={path}"]), ranks=1, local=True)


def test_what_is_absent_is_passed_over_elsewhere_and_refused_here(recipe: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    shutil.copytree(recipe.parent / "data", data)
    shutil.rmtree(data / "validation")
    for override in (f"data.dir={tmp_path / 'none'}", "objective.cost=./none", f"data.dir={data}"):
        config = load_config(recipe, [override])
        with pytest.raises(UserError, match="exist"):
            check(config, ranks=1, local=True)
        if override != f"data.dir={data}":
            check(config, ranks=1, local=False)


def test_a_run_directory_of_another_configuration(recipe: Path, tmp_path: Path) -> None:
    config = load_config(recipe, [f"output_dir={tmp_path}"])
    identity.claim(config, check(config, ranks=1, local=True).identity)
    check(config, ranks=1, local=True)
    with pytest.raises(UserError, match=r"train\.learning_rate=0\.001"):
        check(load_config(recipe, [f"output_dir={tmp_path}", "train.learning_rate=0.5"]), ranks=1, local=True)


def changed(recipe: Path, path: Path, **architecture: Any) -> Path:
    """Write the recipe with another architecture to `path`."""
    tree = yaml.safe_load(recipe.read_text(encoding="utf-8"))
    tree["model"]["architecture"] = architecture
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return path


@pytest.mark.parametrize("family", ["mamba2", "rwkv"])
def test_what_is_no_transformer_is_refused(recipe: Path, tmp_path: Path, family: str) -> None:
    """By the plan as by training: all is counted in heads and layers."""
    shape = {"model_type": family, "vocab_size": 384, "num_hidden_layers": 2, "hidden_size": 32}
    if family == "mamba2":
        shape |= {"num_heads": 4, "head_dim": 16, "state_size": 4, "n_groups": 1}
    config = load_config(changed(recipe, tmp_path / "recipe.yaml", **shape), [])
    with pytest.raises(UserError) as error:
        print_plan(config, 1)
    assert error.value.code == "architecture"


def test_a_model_of_text_within_another_is_planned(recipe: Path, tmp_path: Path) -> None:
    """Its vocabulary and context stand in a section of their own."""
    both = {"hidden_size": 32, "num_attention_heads": 2}
    text = both | {"vocab_size": 384, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
    text |= {"num_key_value_heads": 1, "max_position_embeddings": 64}
    vision = both | {"intermediate_size": 32, "num_hidden_layers": 1, "image_size": 28, "patch_size": 14}
    shape = {"model_type": "gemma3", "text_config": text, "vision_config": vision}
    assert print_plan(load_config(changed(recipe, tmp_path / "recipe.yaml", **shape), []), 1)
