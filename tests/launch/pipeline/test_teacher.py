"""Runs whose teacher is a separate model, the model before training, or stored scores."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from emo.common.errors import ExitCode, UserError
from emo.pipeline.cli import main
from emo.pipeline.config import load_config
from emo.pipeline.control.run_dir import EXPORT, read_metrics
from emo.pipeline.planning.checks import check_run
from tests.helpers import launching
from tests.helpers.families import tiny_llama
from tests.helpers.refusals import refused

ANCHOR = 'objective={"sum": [{"name": "mle"}, {"name": "kl", "teacher": "base", "weight": 0.3}]}'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a recipe, its data and start model, and a teacher with a padded vocabulary."""
    directory = tmp_path_factory.mktemp("teacher")
    recipe = launching.tiny_recipe(directory, max_steps=4, save_steps=2, logging_steps=1)
    tree = yaml.safe_load(recipe.read_text())
    shape = tree["model"]["architecture"]
    del shape["model_type"]
    torch.manual_seed(0)
    for name, changes in (
        ("model", {}),
        ("teacher", {"vocab_size": shape["vocab_size"] + 8, "num_hidden_layers": 1}),
    ):
        tiny_llama(**shape | changes, initializer_range=0.2).save_pretrained(directory / name)
    for file in (directory / "data/tokenizer").glob("*"):
        shutil.copy(file, directory / "teacher")
    tree["model"] = {"path": str(directory / "model"), "dtype": "float32"}
    recipe.write_text(yaml.safe_dump(tree))
    return directory


def training_records(run_dir: Path) -> list[dict[str, Any]]:
    return [record for record in read_metrics(run_dir) if "nll" in record]


def train_alone(folder: Path, name: str, *options: str) -> list[dict[str, Any]]:
    """Train on one rank and return the records."""
    done = launching.run_alone(str(folder / "recipe.yaml"), f"output_dir={folder / name}", *options)
    assert done.returncode == ExitCode.DONE, done.stdout
    return training_records(folder / name)


@pytest.fixture(scope="module")
def anchored(folder: Path) -> list[dict[str, Any]]:
    return train_alone(folder, "anchored", ANCHOR, "deepspeed=ds_configs/zero1.json")


def test_an_anchor_starts_at_zero_and_limits_the_divergence(
    folder: Path, anchored: list[dict[str, Any]]
) -> None:
    assert anchored[0]["divergence"] == pytest.approx(0, abs=1e-6)
    assert all(r["loss"] == pytest.approx(r["nll"] + 0.3 * r["divergence"], rel=1e-5) for r in anchored)
    loose = train_alone(folder, "loose", ANCHOR.replace("0.3", "3"))
    assert 0 < loose[-1]["divergence"] < anchored[-1]["divergence"]


def test_a_partitioned_teacher_gives_the_same_losses_also_after_a_kill(
    folder: Path, anchored: list[dict[str, Any]]
) -> None:
    """A killed and resumed run on two ranks under ZeRO-3 has the losses of one rank under ZeRO-1."""
    options = (str(folder / "recipe.yaml"), f"output_dir={folder / 'sharded'}", ANCHOR)
    launching.kill_ranks(folder / "sharded", 2, "launch/continual.sh", *options)
    done = launching.run_ranks("launch/continual.sh", *options)
    assert done.returncode == ExitCode.DONE, done.stdout
    for ours, want in zip(training_records(folder / "sharded"), anchored, strict=True):
        assert ours["divergence"] == pytest.approx(want["divergence"], rel=1e-4, abs=1e-6)
        assert ours["loss"] == pytest.approx(want["loss"], rel=1e-5)


def test_on_policy_batches_do_not_depend_on_ranks_or_a_kill(folder: Path) -> None:
    """Two ranks under ZeRO-3, killed and resumed, write as many tokens as one rank, with the same loss."""
    teacher = json.dumps({"model": str(folder / "teacher"), "temperature": 2.0})
    objective = f'{{"sum": [{{"name": "mle"}}, {{"name": "jsd", "teacher": {teacher}}}]'
    written = f'objective={objective}, "on_policy": {{"share": 0.5, "tokens": 12}}}}'
    expected = train_alone(folder, "writes", written, "deepspeed=ds_configs/zero1.json")
    options = (str(folder / "recipe.yaml"), f"output_dir={folder / 'write'}", written)
    launching.kill_ranks(folder / "write", 2, "launch/continual.sh", *options)
    done = launching.run_ranks("launch/continual.sh", *options)
    assert done.returncode == ExitCode.DONE, done.stdout
    for ours, want in zip(training_records(folder / "write"), expected, strict=True):
        on_policy = want["step"] % 2 == 0
        assert ("written_tokens" in want) == on_policy
        assert ours["tokens"] == want["tokens"] and ours.get("written_tokens") == want.get("written_tokens")
        assert ours["divergence"] == pytest.approx(want["divergence"], rel=1e-3)
        assert want["loss"] == pytest.approx(want["divergence"] + (0 if on_policy else want["nll"]), rel=1e-5)
    assert expected[3]["tokens"] - expected[2]["tokens"] <= expected[3]["written_tokens"]


def test_a_model_without_its_adapters_is_its_teacher(folder: Path) -> None:
    """Two ranks whose teacher is the base under the adapters match one rank with a copy of the base."""
    lora = 'model.lora={"r": 4, "dropout": 0}'
    copy = json.dumps({"name": "kl", "teacher": {"model": str(folder / "model")}})
    expected = train_alone(folder, "copy", lora, f'objective={{"sum": [{{"name": "mle"}}, {copy}]}}')
    run_dir = folder / "adapters"
    options = (f"output_dir={run_dir}", lora, ANCHOR.replace(', "weight": 0.3', ""))
    done = launching.run_ranks("launch/continual.sh", str(folder / "recipe.yaml"), *options)
    assert done.returncode == ExitCode.DONE, done.stdout
    for ours, want in zip(training_records(run_dir), expected, strict=True):
        assert ours["divergence"] == pytest.approx(want["divergence"], rel=1e-3, abs=1e-7)
    assert expected[-1]["divergence"] > 0


def test_stored_scores_approximate_the_live_teacher(folder: Path) -> None:
    """The divergence from stored scores is too low, and approaches the live one with more entries."""
    teacher = str(folder / "teacher")
    live = f'objective={{"name": "kl", "teacher": {{"model": "{teacher}"}}}}'
    want = train_alone(folder, "live", live, "train.max_steps=1")[0]["divergence"]
    gaps = []
    for k in (8, 256):
        command = ["score", str(folder / "recipe.yaml"), "--model", teacher, "--name", f"top{k}"]
        assert main([*command, "--top_k", str(k)]) == 0
        stored = f'objective={{"name": "kl", "teacher": {{"scores": "top{k}"}}}}'
        (record,) = train_alone(folder, f"top{k}", stored, "train.max_steps=1")
        gaps.append(1 - record["divergence"] / want)
    assert 0.0005 < gaps[1] + 0.001 < gaps[0]


@pytest.mark.parametrize(
    ("objective", "code"),
    [
        ({"name": "kl"}, "needs-teacher"),
        ({"name": "mle", "teacher": "base"}, "needs-teacher"),
        ({"name": "demd_dense", "teacher": {"scores": "plain"}}, "needs-teacher"),
        ({"name": "kl", "teacher": {"scores": "plain"}}, "scores-kind"),
        ({"name": "kl", "teacher": {"model": "{folder}/small"}}, "teacher-vocabulary"),
        ({"name": "kl", "teacher": {"model": "{folder}/short"}}, "teacher-context"),
        ({"name": "kl", "teacher": {"model": "{folder}/words"}}, "teacher-tokenizer"),
    ],
)
def test_unsuitable_teachers_are_rejected(folder: Path, objective: dict[str, Any], code: str) -> None:
    if code == "scores-kind" and not (folder / "data/train/scores/plain").is_dir():
        command = ["score", str(folder / "recipe.yaml"), "--model", str(folder / "model")]
        assert main([*command, "--name", "plain"]) == 0
    for name, key, value in (
        ("small", "vocab_size", 100),
        ("short", "max_position_embeddings", 8),
        ("words", "", 0),
    ):
        if name in str(objective) and not (folder / name).is_dir():
            shutil.copytree(folder / "teacher", folder / name)
            if key:
                config = json.loads((folder / name / "config.json").read_text())
                (folder / name / "config.json").write_text(json.dumps(config | {key: value}))
            else:
                tree = json.loads((folder / name / "tokenizer.json").read_text())
                vocabulary = tree["model"]["vocab"]
                first, second = sorted(vocabulary)[-2:]
                vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
                (folder / name / "tokenizer.json").write_text(json.dumps(tree))
    text = json.dumps(objective).replace("{folder}", str(folder))
    with refused(code):
        check_run(load_config(folder / "recipe.yaml", [f"objective={text}"]), 1)


def test_a_run_does_not_resume_with_another_teacher(folder: Path) -> None:
    moved = folder / "moved"
    shutil.copytree(folder / "teacher", moved)
    teacher = json.dumps({"name": "kl", "teacher": {"model": str(moved)}})
    options = (str(folder / "recipe.yaml"), f"output_dir={folder / 'changed'}", f"objective={teacher}")
    options += ("train.max_steps=1",)
    done = launching.run_alone(*options)
    assert done.returncode == ExitCode.DONE, done.stdout
    shutil.rmtree(folder / "changed" / EXPORT)
    model = AutoModelForCausalLM.from_pretrained(moved)
    model.get_output_embeddings().weight.data.mul_(2)
    model.save_pretrained(moved)
    done = launching.run_alone(*options)
    assert done.returncode == ExitCode.MISTAKE and "teacher" in done.stdout, done.stdout


@pytest.mark.parametrize(
    ("teacher", "expected"),
    [
        ("bse", "objective.teacher:"),
        ({"modle": "x"}, "model"),
        ({"model": "x", "scores": "y"}, "scores"),
        ({"model": "x", "temperature": 0}, "temperature"),
        ({"scores": "x", "temperature": 2}, "temperature"),
        ({"ema": 1.0}, "ema: Input should be less than 1"),
        ({"ema": -0.1}, "ema: Input should be greater than or equal to 0"),
        ({"ema": 0.9, "model": "x"}, "exactly one of model, scores and ema"),
        ({"ema": 0.9, "dtype": "float32"}, "remove revision and dtype"),
    ],
)
def test_mistakes_in_the_teacher_section_are_found(folder: Path, teacher: Any, expected: str) -> None:
    objective = json.dumps({"name": "kl", "teacher": teacher})
    with pytest.raises(UserError) as caught:
        load_config(folder / "recipe.yaml", [f"objective={objective}"])
    assert expected in str(caught.value) and "TeacherConfig" not in str(caught.value)


def test_the_parts_of_a_sum_must_share_a_teacher(folder: Path) -> None:
    parts = [{"name": "kl", "teacher": "base"}, {"name": "tv", "teacher": {"model": "x"}}]
    with pytest.raises(UserError, match="one teacher"):
        load_config(folder / "recipe.yaml", [f"objective={json.dumps({'sum': parts})}"])
