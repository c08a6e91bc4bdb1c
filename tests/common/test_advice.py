"""What the messages that are met most advise is executed: with the advised setting the error is gone."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from emo.common.errors import UserError
from emo.data_prep.config import load_data_config
from emo.pipeline.config import load_config
from emo.pipeline.planning.checks import check
from tests.helpers.corpus import alpaca_rows, run, texts, write_jsonl

Attempt = Callable[[Path, list[str]], None]
TINY = "vocab_size: 96, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1, num_attention_heads: 2"
LLAMA, GPT2 = f"{{model_type: llama, {TINY}}}", "{model_type: gpt2, n_embd: 16, n_layer: 1, n_head: 2}"


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A recipe with sources of text and instructions, one of them broken, and a file of DeepSpeed."""
    (tmp_path / "text.txt").write_text("\n".join(texts(200)))
    write_jsonl(tmp_path / "text.jsonl", [{"text": text} for text in texts(200)])
    write_jsonl(tmp_path / "chats.jsonl", alpaca_rows(40))
    write_jsonl(tmp_path / "broken.jsonl", [*({"text": text} for text in texts(200)), {"text": 3}])
    (tmp_path / "empty.txt").touch()
    for stage in (0, 1):
        (tmp_path / f"stage{stage}.json").write_text(json.dumps({"zero_optimization": {"stage": stage}}))
    tree = {
        "output_dir": str(tmp_path / "run"),
        "data": {
            "dir": str(tmp_path / "data"),
            "root": str(tmp_path),
            "train_tokenizer": 384,
            "sequence_len": 32,
            "shards": 1,
            "sources": [{"files": "text.txt", "format": "lines"}],
        },
        "model": {"architecture": yaml.safe_load(LLAMA)},
        "train": {"max_steps": 3, "global_batch_size": 8},
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(tree))
    return tmp_path / "recipe.yaml"


def trains(recipe: Path, overrides: list[str]) -> None:
    check(load_config(recipe, overrides), ranks=2, local=False)


def prepares(recipe: Path, overrides: list[str]) -> None:
    run(load_data_config(recipe, overrides), force=True)


def cured(attempt: Attempt, recipe: Path, mistake: list[str], advice: str, cure: list[str]) -> None:
    """Check that the message of a mistake has the advice, and that the cure is one; NUMBER: what it names."""
    with pytest.raises(UserError) as error:
        attempt(recipe, mistake)
    assert advice in str(error.value), error.value
    number = re.search(rf"{re.escape(advice)}(\d+)", str(error.value))
    cure = [override.replace("NUMBER", number[1] if number else "") for override in cure]
    keys = {override.partition("=")[0] for override in cure}
    attempt(recipe, [*(override for override in mistake if override.partition("=")[0] not in keys), *cure])


@pytest.mark.parametrize(
    ("mistake", "advice", "cure"),
    [
        (["train.global_batch_size=7"], "set train.global_batch_size=6", ["train.global_batch_size=6"]),
        (
            ["train.global_batch_size=10", "train.micro_batch_size=4"],
            "set train.micro_batch_size=1",
            ["train.micro_batch_size=1"],
        ),
        (
            ["model.compile=true", "deepspeed=ds_configs/zero3.json"],
            "set deepspeed=ds_configs/zero1.json",
            ["deepspeed=ds_configs/zero1.json"],
        ),
        (
            ["train.optimizer=muon", "train.muon_lr=0.02", "train.max_grad_norm=0", "model.lora={r: 2}"],
            "set train.optimizer=adamw without muon_lr",
            ["train.optimizer=adamw", "train.muon_lr=null"],
        ),
        (
            [
                "train.optimizer=muon",
                "train.muon_lr=0.02",
                "train.max_grad_norm=0",
                f"model.architecture={GPT2}",
            ],
            "set train.optimizer=adamw without muon_lr",
            ["train.optimizer=adamw", "train.muon_lr=null"],
        ),
        (
            [
                "train.optimizer=muon",
                "train.muon_lr=0.02",
                "train.max_grad_norm=0",
                "deepspeed=ds_configs/zero3_offload.json",
            ],
            "set deepspeed=ds_configs/zero2.json",
            ["deepspeed=ds_configs/zero2.json"],
        ),
        (["objective.name=emoo"], "did you mean emo?", ["objective.name=emo"]),
    ],
)
def test_advice_on_training(recipe: Path, mistake: list[str], advice: str, cure: list[str]) -> None:
    cured(trains, recipe, mistake, advice, cure)


@pytest.mark.parametrize(
    ("mistake", "advice", "cure"),
    [
        (["data.train_tokenizer=270"], "set data.train_tokenizer=", ["data.train_tokenizer=NUMBER"]),
        (["data.train_tokenizer=90000"], "smaller data.train_tokenizer", ["data.train_tokenizer=384"]),
        (
            ["data.validation_fraction=0.9999"],
            "data.validation_fraction",
            ["data.validation_fraction=0.2"],
        ),
        (
            ["data.validation_fraction=0.00001"],
            "set a larger one",
            ["data.validation_fraction=0.2"],
        ),
        (
            ["data.sequence_len=8192", "data.shards=4"],
            "set a smaller data.sequence_len",
            ["data.sequence_len=32"],
        ),
        (
            ["data.sources=[{files: chats.jsonl}]"],
            "set data.kind=instruct",
            ["data.kind=instruct", "data.sequence_len=256"],
        ),
        (
            ["data.kind=instruct", "data.sources=[{files: text.jsonl}]"],
            "set data.kind=text",
            ["data.kind=text"],
        ),
        (["data.sources=[{files: broken.jsonl}]"], "set data.strict=false", ["data.strict=false"]),
        (["data.sources=[{files: '*.txt'}]"], "set data.strict=false", ["data.strict=false"]),
    ],
)
def test_advice_on_preparing(recipe: Path, mistake: list[str], advice: str, cure: list[str]) -> None:
    cured(prepares, recipe, mistake, advice, cure)
