"""Recipes are read, or quickly rejected with one line."""

from __future__ import annotations

import inspect
import time
from pathlib import Path

import pytest

from emo.__main__ import main
from emo.common.config.objective_names import parse_objectives
from emo.common.config.recipe import dump_recipe, read_recipe, read_written
from emo.common.errors import ExitCode, UserError
from emo.data_prep.config import load_data_config
from emo.pipeline.config import RunConfig, load_config
from emo.pipeline.loss import get_objective
from emo.pipeline.loss.divergences import DIVERGENCES
from emo.pipeline.loss.objectives import BUILT_IN
from tests.conftest import REPO
from tests.helpers.refusals import refused

GOOD = (
    "output_dir: runs/x\n"
    "data: { dir: d, tokenizer: t, sources: [{ files: a.txt }] }\n"
    "model: { architecture: { model_type: llama } }\n"
    "train: { max_steps: 10, learning_rate: 1.0e-3 }\n"
)
MISTAKES: dict[str, list[bytes | str]] = {  # recipes by error code
    "recipe-unreadable": [
        GOOD.encode("utf-16"),
        "- 1\n- 2\n",
        "train: !!python/object:os.system {}\n",
        GOOD + "output_dir: runs/y\n",
        "train: " + "[" * 5000 + "]" * 5000,
        GOOD + "# " + "x" * 300_000,
    ],
    "unknown-key": [GOOD + "trian: {lr: 1}\n"],
    "bad-value": [GOOD + "objective: 5\n"],
    "extends": [GOOD + "extends: ../../x.yaml\n"],
    "no-recipe": [GOOD + "extends: nowhere.yaml\n"],
    "recipe-circle": [GOOD + "extends: recipe.yaml\n"],
    "secret": [GOOD.replace("max_steps", "copy_to: 'https://me:hunter2@host/x', max_steps")],
}
OVERRIDES = {
    "bad-override": ["train.learning_rate=[", "data.sources.0.files=x", "train.learning_rate=" + "9" * 5000],
    "bad-value": [
        *("train.betas=[2,3]", "data.sequence_len=1.5", "train.learning_rate=.inf", "train.max_steps=true"),
        "train.seed=100000000000000000",
    ],
    "unknown-key": ["trian.lr=1"],
}


def load(tmp_path: Path, content: bytes | str, *overrides: str) -> RunConfig:
    path = tmp_path / "recipe.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return load_config(path, list(overrides))


def test_a_recipe_elsewhere_extends_one_that_ships_with_the_code(tmp_path: Path) -> None:
    config = load(tmp_path, "extends: launch/recipes/llama3.1-8b-lora.yaml\noutput_dir: runs/mine\n")
    assert (config.model.path, str(config.output_dir)) == ("meta-llama/Llama-3.1-8B-Instruct", "runs/mine")


@pytest.mark.parametrize(
    ("content", "overrides", "code"),
    [
        *((content, [], code) for code, contents in MISTAKES.items() for content in contents),
        *((GOOD, [override], code) for code, several in OVERRIDES.items() for override in several),
    ],
)
def test_invalid_recipes_are_rejected_quickly_in_one_line(
    tmp_path: Path, content: bytes | str, overrides: list[str], code: str
) -> None:
    began = time.process_time()
    with refused(code) as error:
        load(tmp_path, content, *overrides)
    assert "hunter2" not in str(error.value) and len(str(error.value)) < 400
    assert time.process_time() - began < 3


def test_yaml_features_are_supported(tmp_path: Path) -> None:
    """Recipes may use anchors, merges, a byte order mark, and exponents without a decimal point."""
    text = (
        "data: { dir: d, tokenizer: t, sources: [&s {files: a.txt, weight: 2}, {<<: *s, files: b.txt}] }\n"
        "output_dir: runs/x\nmodel: { architecture: { model_type: llama } }\ntrain: "
        "{ max_steps: 10, learning_rate: 2e-5 }\n"
    )
    config = load(tmp_path, text.encode("utf-8-sig"), "train.eps=1e-7")
    assert [source.weight for source in config.data.sources] == [2, 2]
    assert (config.train.learning_rate, config.train.eps) == (2e-5, 1e-7)


def test_a_misspelt_key_in_a_list_gets_a_suggestion(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data\.sources\.0\.fiels; did you mean files"):
        load(tmp_path, GOOD.replace("files", "fiels"))


TYPOS = {  # misspelt keys and their suggestions, by section
    "train": {
        "learing_rate": "learning_rate", "global_batchsize": "global_batch_size",
        "micro_batch": "micro_batch_size", "max_stpes": "max_steps", "num_train_epoch": "num_train_epochs",
        "warmup_ration": "warmup_ratio", "wheight_decay": "weight_decay", "seeds": "seed",
        "loging_steps": "logging_steps", "eval_step": "eval_steps", "save_step": "save_steps",
        "copy_too": "copy_to", "lr": "train.learning_rate",
    },
    "model": {"dtpye": "dtype", "base_model": "path", "lora_r": "model.lora.r",
              "atn_implementation": "attn_impl"},
    "objective": {"nmae": "name", "parms": "params", "csot": "cost"},
}  # fmt: skip


def test_prepare_reports_all_errors_of_the_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`emo prepare` reports errors in all sections, also unused ones, before it reads data."""
    path = tmp_path / "recipe.yaml"
    path.write_text(GOOD)
    wrong = [f"{section}.{key}=1" for section, keys in TYPOS.items() for key in keys]
    wrong += [
        "train.betas=[2, .5]",
        "train.save_steps=-1",
        "data.shards=true",
        "model.lora.r=x",
        "evel.shots=8",
    ]
    assert main(["prepare", str(path), *wrong]) == ExitCode.MISTAKE
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(wrong)
    for section, keys in TYPOS.items():
        for key, meant in keys.items():
            assert any(f" {section}.{key};" in line and meant in line for line in lines), key
    for key in ("train.betas.0", "train.save_steps", "data.shards", "model.lora.r", " evel"):
        assert sum(f"{key}:" in line or f"{key};" in line for line in lines) == 1


def test_prepare_needs_only_the_data_section(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(GOOD.partition("model")[0])
    assert load_data_config(path, [], RunConfig).sequence_len == 256
    with refused("bad-value") as error:
        load_config(path, [])
    assert all(key in str(error.value) for key in ("model", "train"))


SUGGESTIONS = {  # for keys of other trainers
    "base_model": "model.path", "gradient_accumulation_steps": "train.global_batch_size",
    "per_device_train_batch_size": "train.micro_batch_size", "sample_packing": "data.packing=none",
    "max_seq_length": "data.sequence_len", "datasets": "data.sources", "wandb_project": "train.project",
    "bf16": "model.dtype", "lora_r": "model.lora.r", "lora_alpha": "model.lora.alpha",
    "load_in_4bit": "base_dtype=nf4", "neftune_noise_alpha": "model.neftune_noise_alpha", "rl": "use TRL",
    "flash_attention": "model.attn_implementation", "val_set_size": "data.validation_fraction",
    "trust_remote_code": "never run", "seed": "train.seed or data.seed",
    "weight_decay": "train.weight_decay", "dedup": "data.dedup", "dataset_dir": "data.root",
    "roles_to_train": "each with the token that ends it", "neat_packing": "data.packing=none",
    "liger_rms_norm": "model.kernels", "enable_thinking": "data.template_variables",
    "preprocessing_num_workers": "--workers", "num_warmup_steps": "warmup_steps",
    "ddp_timeout": "minutes instead of seconds",
}  # fmt: skip


@pytest.mark.parametrize(("key", "part"), SUGGESTIONS.items())
def test_keys_of_other_trainers_get_suggestions(tmp_path: Path, key: str, part: str) -> None:
    with refused("unknown-key") as error:
        load(tmp_path, GOOD + f"{key}: 1\n")
    assert f"unknown key {key}; " in str(error.value) and part in str(error.value)


def test_the_nearest_key_of_the_same_section_comes_first(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"train\.profile\.rank; did you mean ranks\?"):
        load(tmp_path, GOOD, "train.profile={steps: [1, 2], rank: [0]}")
    with pytest.raises(UserError, match=r"data\.sources\.0\.type; remove it"):
        load(tmp_path, GOOD.replace("files:", "type: alpaca, files:"))


def test_a_recipe_of_another_trainer_gets_a_suggestion_per_key(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("base_model: x\nlora_r: 8\nnobody_knows: 1\n")
    with refused("no-data-section") as error:
        load_data_config(path, [], RunConfig)
    _, *lines = error.value.lines
    assert [line.split(";")[0] for line in lines] == ["unknown key base_model", "unknown key lora_r"]


def test_conflicts_between_keys_are_reported_next_to_invalid_values(tmp_path: Path) -> None:
    """Conflicts that involve an invalid value are not reported."""
    both = ("train.num_train_epochs=1", "train.save_steps=x", "objective={name: emoo, z_loss: x}")
    with refused("bad-value") as error:
        load(tmp_path, GOOD, *both)
    lines = " ".join(error.value.lines)
    assert len(error.value.lines) == 4 and "emoo" in lines and "exactly one of" in lines
    with refused("bad-value") as error:
        load(tmp_path, GOOD, "train.max_steps=x", "train.save_steps=-1")
    assert len(error.value.lines) == 2


def test_objectives_are_known_before_pytorch_is_loaded() -> None:
    """Names and options parsed from the source equal the names and options of the functions."""
    written = parse_objectives(REPO / "pipeline/loss")
    functions = {**BUILT_IN, **DIVERGENCES}
    assert written.keys() == functions.keys()
    for name, function in functions.items():
        parameters = inspect.signature(function).parameters.values()
        options = {parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}
        assert written[name] == options | ({"temperature"} if name in DIVERGENCES else set())


@pytest.mark.parametrize(
    ("objective", "meant"),
    [
        ("{name: emoo}", "did you mean emo"),
        ("{name: cross_entropy}", "did you mean mle"),
        ("{params: {ratio_cpa: 3}}", "did you mean ratio_cap"),
        ("{sum: [{name: mle}, {name: focla}]}", "did you mean focal"),
        ("{sum: [{name: focal, params: {gama: 2}}]}", "did you mean gamma"),
    ],
)
def test_a_misspelt_objective_is_found_by_prepare(tmp_path: Path, objective: str, meant: str) -> None:
    (tmp_path / "recipe.yaml").write_text(GOOD)
    with refused("bad-value") as error:
        load_data_config(tmp_path / "recipe.yaml", [f"objective={objective}"], RunConfig)
    assert meant in str(error.value)


def test_unsupported_features_are_reported(tmp_path: Path) -> None:
    def dpo() -> None:
        load(tmp_path, GOOD, "objective.name=dpo")

    with refused("bad-value") as error:
        load(tmp_path, GOOD, "train.optimizer=adamw_bnb_8bit")
    assert "adamw_8bit and paged_adamw_8bit" in str(error.value)
    for wrong, code in ((lambda: get_objective("dpo"), "unknown-objective"), (dpo, "bad-value")):
        with refused(code) as unknown:
            wrong()
        assert "power" not in str(unknown.value) and "use TRL" in str(unknown.value)
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter/adapter_config.json").write_text('{"base_model_name_or_path": "owner/base"}')
    (tmp_path / "recipe.yaml").write_text(GOOD)
    with refused("adapter") as adapter:
        load_data_config(tmp_path / "recipe.yaml", [f"model.path={tmp_path}/adapter"], RunConfig)
    assert "owner/base" in str(adapter.value)


def test_lora_alpha_is_twice_the_rank_by_default(tmp_path: Path) -> None:
    for lora, alpha in (("{}", 64), ("{r: 8}", 16), ("{r: 8, alpha: 8}", 8)):
        config = load(tmp_path, GOOD, f"model.lora={lora}").model.lora
        assert config is not None and config.alpha == alpha


def test_an_override_changes_one_of_two_sections_with_an_anchor(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("objective: { params: &p { a: 1 } }\nmodel: { architecture: *p }\n")
    tree = read_recipe(path, ["objective.params.a=2"])
    assert tree == {"objective": {"params": {"a": 2}}, "model": {"architecture": {"a": 1}}}


def test_a_written_recipe_has_the_same_values(tmp_path: Path) -> None:
    """Names that look like numbers are texts, also in exponents without a dot."""
    tree = {"revision": "12e4567", "name": "1e5", "rate": 2e-5, "steps": 7, "on": "on", "null": "null"}
    (tmp_path / "a.yaml").write_text(dump_recipe(tree))
    assert read_written(tmp_path / "a.yaml") == tree
