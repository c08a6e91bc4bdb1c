"""What can be refused before weights are loaded is refused by every command alike; prompts of samples."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from emo.common.errors import UserError
from emo.data_prep.tokenizer import load_tokenizer
from emo.pipeline.config import ModelConfig, RunConfig, load_config
from emo.pipeline.planning.checks import check
from emo.pipeline.planning.plan import print_plan
from emo.pipeline.report.samples import prompt_ids
from tests.helpers import launching
from tests.helpers.refusals import refused


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return launching.tiny_recipe(tmp_path_factory.mktemp("tiny"))


def test_an_extra_that_is_not_installed(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(recipe, ["train.report_to=[wandb]"])
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it could not be found
    with refused("missing-extra"):
        check(config, ranks=2, local=True)
    assert check(config, ranks=2, local=False).steps == 8  # planned here, trained elsewhere


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("deepspeed=none.json", "none.json"),
        ("objective.params.ratio_cup=3", "ratio_cap"),
        ("objective.name=demd_dense", "teacher"),
        ("objective.cost=none.safetensors", "objective.cost=none.safetensors"),
        ("train.profile=[3,9]", "train.profile"),
        ("model.architecture.vocab_size=100", "100"),
        ("model.architecture.max_position_embeddings=16", "data.sequence_len=16"),
        ("model.architecture.hidden_size=33", "model.architecture"),
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


def test_text_within_another_model_is_planned_and_what_is_no_transformer_refused(recipe: Path) -> None:
    """The vocabulary of the one stands in a section of its own; all is counted in heads and layers."""

    def plan(shape: dict[str, object]) -> object:
        config = load_config(recipe, [])
        return print_plan(config.model_copy(update={"model": ModelConfig(architecture=shape)}), 1)

    rwkv = {"model_type": "rwkv", "vocab_size": 384, "num_hidden_layers": 2, "hidden_size": 32}
    with refused("architecture"):
        plan(rwkv)
    both = {"hidden_size": 32, "num_attention_heads": 2}
    text = both | {"vocab_size": 384, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
    text |= {"num_key_value_heads": 1, "max_position_embeddings": 64}
    vision = both | {"intermediate_size": 32, "num_hidden_layers": 1, "image_size": 28, "patch_size": 14}
    shape = {"model_type": "gemma3", "text_config": text, "vision_config": vision}
    assert plan(shape)


def config(recipe: Path, *prompts: str, tokens: int = 4, **settings: object) -> RunConfig:
    overrides = [f"train.sample_prompts={json.dumps(prompts)}", f"train.sample_tokens={tokens}"]
    return load_config(recipe, [*overrides, *(f"{key}={value}" for key, value in settings.items())])


def test_prompts_begin_as_documents_do_and_fit(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are of 32 tokens, and the model has seen no longer ones."""
    tokenizer = load_tokenizer(recipe.parent / "data" / "tokenizer")
    (ids,) = prompt_ids(config(recipe, "The man"))
    assert ids[0] == tokenizer.bos_token_id and tokenizer.decode(ids[1:]) == "The man"
    assert prompt_ids(config(recipe, "")) == [[tokenizer.bos_token_id]], "a document from its beginning"
    assert prompt_ids(config(recipe)) == []
    tokenizer.bos_token = None
    monkeypatch.setattr("emo.pipeline.report.samples.load_tokenizer", lambda _: tokenizer)
    long = "The man saw a fish on day 3. " * 5
    for mistake in (config(recipe, "The", long), config(recipe, "The", tokens=99), config(recipe, "")):
        with refused("sample-prompts"):
            prompt_ids(mistake)
