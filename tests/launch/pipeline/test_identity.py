"""Checks before weights are loaded, of a launch alone and against earlier launches of its run."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from emo.common.config.recipe import FREE, marked
from emo.common.errors import ExitCode, FailureError, UserError
from emo.data_prep.encoding.tokenizer import load_tokenizer
from emo.launch import supervise
from emo.pipeline.batches.order import MixtureStart
from emo.pipeline.checkpoint import copies, identity
from emo.pipeline.checkpoint import saver as checkpoint
from emo.pipeline.config import RunConfig, dump_config, load_config
from emo.pipeline.control.run_dir import (
    COMPLETE,
    CONFIG,
    STATE,
    TRUNK,
    checkpoint_files,
    hash_files,
    partial_directory,
)
from emo.pipeline.engine.snapshots import STATE_CLASSES, only_data
from emo.pipeline.model.export import _model_card
from emo.pipeline.planning.checks import check_plan, check_run, encode_sample_prompts
from tests.conftest import REPO
from tests.helpers import launching
from tests.helpers.families import family
from tests.helpers.refusals import refused
from tests.unit.common.test_untrusted import Harmful

DATA = {"data": "f" * 64}  # an identity
RECIPE = REPO / "launch/recipes/quickstart-pretrain.yaml"


def config(run_dir: Path, *overrides: str) -> RunConfig:
    return load_config(RECIPE, [f"output_dir={run_dir}", "objective.name=emo", *overrides])


def test_added_and_removed_keys_and_other_data_are_rejected(tmp_path: Path) -> None:
    identity.claim_run_dir(config(tmp_path, "objective.params.ratio_cap=3"), DATA)
    for changed in ([], ["objective.params.ratio_cap=3", "model.lora.r=8"]):
        with refused("changed-key"):
            identity.check_run_dir(config(tmp_path, *changed), DATA)
    with pytest.raises(UserError, match=r"'f{12}' and is 'e{12}'") as caught:
        identity.check_run_dir(config(tmp_path, "objective.params.ratio_cap=3"), {"data": "e" * 64})
    assert caught.value.code == "changed-data"


def test_every_changed_key_is_named_before_any_rank_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    identity.claim_run_dir(config(tmp_path), DATA)
    changed = ["train.global_batch_size=4", "train.num_train_epochs=3", "train.logging_steps=7"]
    monkeypatch.setattr(supervise, "Supervisor", lambda *_: pytest.fail("a launcher was started"))
    argv = [str(RECIPE), f"output_dir={tmp_path}", "objective.name=emo"]
    assert supervise.launch(["launch/continual.sh"], [*argv, *changed]) == ExitCode.MISTAKE
    lines = capsys.readouterr().err.splitlines()
    named = [next(key for key in changed if key.split("=")[0] in line) for line in lines]
    assert sorted(named) == changed[:2]
    monkeypatch.setattr(supervise, "Supervisor", lambda *_: SimpleNamespace(run=lambda _: 0))
    assert supervise.launch(["launch/continual.sh"], [*argv, changed[2]]) == ExitCode.DONE
    with refused("changed-data") as error:
        identity.check_run_dir(config(tmp_path), {"data": "e" * 64, "validation": {"validation": "a"}})
    assert len(error.value.lines) == 2


def test_another_run_in_the_copy_is_rejected(tmp_path: Path) -> None:
    """It is rejected in new and claimed run directories. An unknown address is a mistake, not a failure."""
    target = tmp_path / "copies"
    (target / "step-000003").mkdir(parents=True)
    identity.claim_run_dir(config(target), DATA)
    (target / "step-000003" / COMPLETE).touch()
    copied = f"train.copy_to={target}"
    run_dir, other = tmp_path / "run", config(tmp_path / "run", copied, "train.learning_rate=0.5")
    run_dir.mkdir()
    for claimed in (False, True):
        with refused("changed-key"):
            copies.fetch_records(other, DATA)
        assert (run_dir / CONFIG).is_file() == claimed
        identity.claim_run_dir(other, DATA)
    (run_dir / CONFIG).unlink()
    copies.fetch_records(config(run_dir, copied), DATA)
    identity.check_run_dir(config(run_dir, copied), DATA)
    for step in (2, 3):  # the copy has step 3
        (run_dir / f"step-{step:06}").mkdir()
        (run_dir / f"step-{step:06}" / COMPLETE).touch()
        if step == 2:
            with refused("older-than-copy"):
                copies.fetch_records(config(run_dir, copied), DATA)
        else:
            copies.fetch_records(config(run_dir, copied), DATA)
    unknown = config(tmp_path / "new", "train.copy_to=nowhere://x")
    with pytest.raises(UserError) as caught:
        copies.fetch_records(unknown, DATA)
    assert not isinstance(caught.value, FailureError)


MIXED = "train.mixture={shares: {home: 0.5, abroad: 0.5}}"
OTHER = "train.mixture={shares: {home: 0.9, abroad: 0.1}, by: rows}"


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """Return the directory of a run with the mixture MIXED and a checkpoint of step 3."""
    identity.claim_run_dir(config(tmp_path, MIXED), DATA)
    write_checkpoint(tmp_path, STATE_NOW)
    return tmp_path


def test_a_mixture_may_only_change_with_its_key_at_the_newest_checkpoint(mixed: Path) -> None:
    identity.check_run_dir(config(mixed, MIXED), DATA)
    for overrides, code in (
        ([OTHER], "changed-mixture"),
        (["train.mixture_from=3"], "mixture-gone"),
        ([OTHER, "train.mixture_from=3", "train.learning_rate=1"], "changed-key"),
    ):
        with refused(code):
            identity.check_run_dir(config(mixed, *overrides), DATA)
    for start, step in ((2, 3), (3, 0)):
        with refused("mixture-step"):
            identity.check_mixture(config(mixed, OTHER, f"train.mixture_from={start}"), step)
    identity.check_mixture(config(mixed, OTHER, "train.mixture_from=3"), 3)
    identity.check_mixture(config(mixed, MIXED, "train.mixture_from=2"), 3)  # the mixture is the same


def test_a_branch_that_failed_before_its_first_step_needs_the_key_too(mixed: Path) -> None:
    """Only trunk.yaml has the mixture of the run that it branches off."""
    (mixed / CONFIG).rename(mixed / TRUNK)
    branch = [f"train.decay_from={mixed}/step-000003", "train.lr_scheduler_type=warmup_stable_decay", OTHER]
    with refused("changed-mixture"):
        identity.mixture_history(config(mixed, *branch))
    assert len(identity.mixture_history(config(mixed, *branch, "train.mixture_from=3"))) == 2


def test_a_changed_mixture_is_recorded_and_then_needs_no_key(
    mixed: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The record is also kept if only a copy of the run is left."""
    first, other = config(mixed, MIXED), config(mixed, OTHER, "train.mixture_from=3")
    history = [MixtureStart(0, first.train.mixture), MixtureStart(3, other.train.mixture)]
    assert identity.mixture_history(other) == history
    identity.claim_run_dir(other, DATA)
    restored = [f"train.copy_to={mixed}", OTHER, "train.mixture_from=3"]
    copies.fetch_records(new := config(tmp_path_factory.mktemp("new"), *restored), DATA)
    assert identity.mixture_history(new) == history
    for again in (other, config(mixed, OTHER)):
        identity.check_run_dir(again, DATA)
        assert identity.mixture_history(again) == history
        identity.check_mixture(again, 0)  # an older checkpoint uses the recorded mixture
    back = config(mixed, MIXED, "train.mixture_from=5")
    assert identity.mixture_history(back) == [*history, MixtureStart(5, first.train.mixture)]
    assert identity.mixture_history(config(mixed, MIXED, "train.mixture_from=3")) == history[:1]


def test_a_run_without_a_mixture_may_start_one(tmp_path: Path) -> None:
    identity.claim_run_dir(config(tmp_path), DATA)
    later = config(tmp_path, MIXED, "train.mixture_from=3")
    identity.check_run_dir(later, DATA)
    assert identity.mixture_history(later) == [MixtureStart(0, None), MixtureStart(3, later.train.mixture)]


def test_free_fields_may_change(tmp_path: Path) -> None:
    identity.claim_run_dir(config(tmp_path), DATA)
    changed = ["train.logging_steps=3", "train.project=x", "train.profile.steps=[1,2]", "data.root=/x"]
    identity.check_run_dir(config(tmp_path, *changed, "model.attn_implementation=eager"), DATA)
    free = marked(RunConfig, FREE)
    assert {"output_dir", "data", "train.micro_batch_size", "train.save_steps", "train.copy_to"} <= free
    assert not free & {"train.learning_rate", "train.global_batch_size", "train.seed", "train.max_steps"}
    assert not free & {"objective.params", "model.dtype"}


def test_checkpoints_without_config_yaml_are_rejected(tmp_path: Path) -> None:
    identity.check_run_dir(config(tmp_path), DATA)
    write_checkpoint(tmp_path, {})
    with refused("config-missing"):
        identity.check_run_dir(config(tmp_path), DATA)
    for damaged in ("", "data: {", "- 1"):
        (tmp_path / CONFIG).write_text(damaged)
        with refused("run-config"):
            identity.check_run_dir(config(tmp_path), DATA)


def write_checkpoint(run_dir: Path, state: dict) -> Path:
    partial = partial_directory(run_dir, 3)
    partial.mkdir(parents=True)
    (partial / STATE).write_text(json.dumps(state))
    checkpoint.write_complete(partial, hash_files(partial, checkpoint_files(partial)))
    return checkpoint.publish(run_dir, 3)


STATE_NOW = {"step": 3, "tokens": 9, "ranks": 1, "groups": [4, 2], "frozen": 0, "progress": {}}
STATE_NOW["identity"] = {"data": "f", "cost": None}


def test_checkpoints_of_other_models_ranks_and_versions_are_rejected(tmp_path: Path) -> None:
    saved = checkpoint.read_saved(write_checkpoint(tmp_path, STATE_NOW))
    engine: Any = SimpleNamespace(groups=[4, 2], frozen=0)
    checkpoint.check_engine(saved, engine)
    for other in (saved._replace(groups=[6]), saved._replace(frozen=1)):
        with refused("changed-base"):
            checkpoint.check_engine(other, engine)
    assert checkpoint.choose_source(saved, saved.ranks, "Muon") == (saved.directory, False)
    with refused("optimizer-ranks"):
        checkpoint.choose_source(saved, saved.ranks + 1, "Muon")
    old = write_checkpoint(tmp_path, {key: value for key, value in STATE_NOW.items() if key != "groups"})
    with refused("other-version"):
        checkpoint.read_saved(old)


PLUGIN = """
from torch import Tensor
import helper_of_objective


def mine(m: Tensor, *, strength: float = 1.0) -> Tensor:
    return strength * helper_of_objective.weight(m)
"""
HELPER = "def weight(m):\n    return 1 + 0 * m\n"


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return launching.tiny_recipe(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def folder(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a directory with a recipe, its data, an objective file, and a module that the file imports."""
    shutil.copytree(prepared.parent, tmp_path, dirs_exist_ok=True)
    tree = yaml.safe_load(prepared.read_text(encoding="utf-8"))
    tree["output_dir"], tree["data"]["dir"] = str(tmp_path / "run"), str(tmp_path / "data")
    tree["data"]["root"] = str(tmp_path)
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(tree))
    (tmp_path / "mine.py").write_text(PLUGIN)
    (tmp_path / "helper_of_objective.py").write_text(HELPER)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    monkeypatch.delitem(sys.modules, "helper_of_objective", raising=False)
    return tmp_path


def recipe(folder: Path, *overrides: str) -> RunConfig:
    return load_config(folder / "recipe.yaml", list(overrides))


def claim(config: RunConfig) -> None:
    """Check and claim the run directory as a first launch does."""
    config.output_dir.mkdir(exist_ok=True)
    identity.claim_run_dir(config, check_run(config, 1).identity)
    check_run(config, 1)


def assert_rejected(config: RunConfig, code: str) -> None:
    with refused(code):
        check_run(config, 1)


@pytest.mark.parametrize(
    ("file", "old", "new", "code"),
    [
        ("mine.py", "return strength", "return 2 * strength", "changed-program"),
        ("mine.py", "1.0", "0.5", "changed-objective"),
        ("helper_of_objective.py", "1 +", "2 +", "changed-program"),
    ],
)
def test_a_changed_program_is_rejected(folder: Path, file: str, old: str, new: str, code: str) -> None:
    config = recipe(folder, f"objective.name={folder / 'mine.py'}:mine")
    claim(config)
    (folder / file).write_text((folder / file).read_text().replace(old, new))
    assert_rejected(config, code)


def test_a_deepspeed_file_that_changes_numbers_is_rejected(folder: Path) -> None:
    file, other = folder / "a.json", folder / "b.json"
    tree: dict[str, Any] = {"zero_optimization": {"stage": 1}}
    file.write_text(json.dumps(tree))
    claim(recipe(folder, f"deepspeed={file}"))
    tree["zero_optimization"] |= {"reduce_bucket_size": 1000, "reduce_scatter": True, "overlap_comm": True}
    other.write_text(json.dumps(tree))
    check_run(recipe(folder, f"deepspeed={other}"), 1)
    for change in ({"communication_data_type": "fp32"}, {"zero_optimization": {"stage": 2}}):
        other.write_text(json.dumps(tree | change))
        assert_rejected(recipe(folder, f"deepspeed={other}"), "changed-deepspeed")


def test_other_micro_batches_are_rejected_if_weights_are_normalised(folder: Path) -> None:
    """`mile` divides weights by their mean over a micro-batch, so the rows of a pass must not change."""
    for name, micro in (("emo", 2), ("mile", 2), ("mile", 8)):
        settings = (f"objective.name={name}", f"output_dir={folder / f'{name}-{micro}'}")
        claim(recipe(folder, *settings, f"train.micro_batch_size={micro}"))
        smaller = recipe(folder, *settings, f"train.micro_batch_size={micro // 2}")
        if name == "emo" or micro == 8:  # the same rows per pass, on twice as many ranks
            check_run(smaller, 2)
        else:
            assert_rejected(smaller, "changed-normalisation")


def test_costs_of_another_tokenizer_are_rejected(folder: Path) -> None:
    """A tokenizer with other token ids is rejected. Changes that keep the ids are accepted."""
    model = folder / "model"
    family("llama", vocab_size=384).save_pretrained(model)
    shutil.copytree(folder / "data/tokenizer", model, dirs_exist_ok=True)
    file, config = model / "tokenizer.json", recipe(folder, f"objective.cost={model}")
    tree = json.loads(file.read_text()) | {"normalizer": None, "post_processor": None}
    file.write_text(json.dumps(tree, indent=3))
    check_run(config, 1)
    pieces = list(tree["model"]["vocab"])
    tree["model"]["vocab"] = dict(zip(pieces, [*range(200), *range(383, 199, -1)], strict=True))
    file.write_text(json.dumps(tree))
    assert_rejected(config, "cost-tokenizer")
    shutil.copy(file, folder / "data/tokenizer/tokenizer.json")  # the copy that is exported
    assert_rejected(recipe(folder), "changed-tokenizer")


OWN = "examples/my_objective.py:unsure"


def test_optimizer_states_may_contain_only_data(tmp_path: Path) -> None:
    state = tmp_path / "a.pt"
    torch.save({"x": torch.ones(2), "scale": STATE_CLASSES[0](1.0)}, state)
    with only_data(tmp_path):
        assert torch.load(state, weights_only=False)["x"].tolist() == [1, 1]
    torch.save({"x": Harmful(tmp_path / "ran")}, state)
    with pytest.raises(UserError, match=r"more than data \(posix.system\)"), only_data(tmp_path):
        torch.load(state, weights_only=False)
    assert not (tmp_path / "ran").exists()


def test_a_recipe_cannot_name_a_program(tmp_path: Path) -> None:
    """Only the command line may name a custom objective."""
    recipe, parts = tmp_path / "r.yaml", f"[{{name: mle}}, {{name: '{OWN}'}}]"
    for objective in (f"name: '{OWN}'", f"sum: {parts}"):
        recipe.write_text(RECIPE.read_text().replace("{ name: mle }", f"{{ {objective} }}"))
        with refused("objective-program"):
            load_config(recipe, [f"output_dir=runs/{OWN}"])
    assert load_config(recipe, [f"objective.sum={parts}"]).objective.sum


def test_secrets_are_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for override in ("train.copy_to=https://me:hunter2@host/x", "model.path=hf_" + "hunter2" * 5):
        with pytest.raises(UserError) as caught:
            config(tmp_path, override)
        assert caught.value.code == "secret" and "hunter2" not in str(caught.value)
    monkeypatch.setenv("HF_TOKEN", "hf_" + "s3cret" * 6)
    written = config(tmp_path)
    identity.claim_run_dir(written, {"data": "f"})
    text = (tmp_path / CONFIG).read_text() + dump_config(written) + _model_card(written, {"step": 1})
    assert "s3cret" not in text


def test_a_model_card_has_no_local_paths(tmp_path: Path) -> None:
    sources = f"data.sources=[{{files: {tmp_path}/mine/*.jsonl}}]"
    names = config(tmp_path / "emo", sources, "model.path=/m/base")
    card = _model_card(names, {"run": str(tmp_path / "emo"), "params": {"cost": "/mnt/x/cost.pt"}})
    assert str(tmp_path) not in card and "/mnt" not in card and "/m/" not in card
    assert "| run | emo |" in card and "Trained from base with" in card and ".jsonl" in card


def test_a_logger_that_is_not_installed_is_rejected_only_here(
    prepared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(prepared, ["train.report_to=[wandb]"])
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if not installed
    assert_rejected(config, "missing-extra")
    assert check_plan(config, 1).steps == 8  # planned here, trained elsewhere


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("deepspeed=none.json", "none.json"),
        ("objective.name=demd_dense", "teacher"),
        ("objective.cost=none.safetensors", "objective.cost=none.safetensors"),
        ("train.profile.steps=[3,9]", "train.profile.steps"),
        ("train.profile={steps: [1, 2], ranks: [0, 2]}", "train.profile.ranks"),
        ("model.architecture.vocab_size=100", "100"),
        ("model.architecture.max_position_embeddings=16", "data.sequence_len=16"),
        ("model.architecture.hidden_size=33", "model.architecture"),
        ("model.lora={targets: [q_porj]}", "model.lora.targets"),
        ("model.architecture={model_type: rwkv, vocab_size: 384, num_hidden_layers: 2}", "rwkv"),
    ],
)
def test_mistakes_that_need_the_model_or_data_are_found(prepared: Path, override: str, expected: str) -> None:
    config = load_config(prepared, [override])
    with pytest.raises(UserError) as caught:
        check_run(config, 1)
    assert expected in str(caught.value)
    assert not config.output_dir.exists()


def test_missing_files_are_rejected_by_training_but_not_by_a_plan(folder: Path) -> None:
    for override in (f"data.dir={folder / 'none'}", "objective.cost=./none"):
        with pytest.raises(UserError, match="exist"):
            check_run(recipe(folder, override), 1)
        check_plan(recipe(folder, override), 1)
    shutil.rmtree(folder / "data/validation")
    with pytest.raises(UserError, match="exist"):
        check_run(recipe(folder), 1)


def test_sample_prompts_start_with_bos_and_must_fit(prepared: Path) -> None:
    def prompts(*texts: str, tokens: int = 4) -> list[list[int]]:
        overrides = [f"train.sample_prompts={json.dumps(texts)}", f"train.sample_tokens={tokens}"]
        return encode_sample_prompts(load_config(prepared, overrides))

    bos = load_tokenizer(prepared.parent / "data" / "tokenizer").bos_token_id
    assert prompts("", "The man")[0] == [bos] == prompts("The man")[0][:1]
    for texts, tokens in ((["The", "The man saw a fish on day 3. " * 5], 4), (["The"], 99)):
        with refused("sample-prompts"):
            prompts(*texts, tokens=tokens)
