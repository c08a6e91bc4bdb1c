"""What the messages that are met most advise is executed: with the advised setting the error is gone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from emo.common.errors import UserError
from emo.data_prep.config import load_data_config
from emo.pipeline.config import load_config
from emo.pipeline.planning.checks import check
from tests.helpers.corpus import alpaca_rows, run, texts, write_jsonl

TINY = "vocab_size: 96, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1, num_attention_heads: 2"
LLAMA, GPT2 = f"{{model_type: llama, {TINY}}}", "{model_type: gpt2, n_embd: 16, n_layer: 1, n_head: 2}"


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """Return a recipe beside sources of text and instructions, one of them broken."""
    (tmp_path / "text.txt").write_text("\n".join(texts(200)))
    write_jsonl(tmp_path / "text.jsonl", [{"text": text} for text in texts(200)])
    write_jsonl(tmp_path / "chats.jsonl", alpaca_rows(40))
    write_jsonl(tmp_path / "broken.jsonl", [*({"text": text} for text in texts(200)), {"text": 3}])
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


MUON = "train.optimizer=muon; train.muon_lr=0.02; train.max_grad_norm=0"
ADAMW = "train.optimizer=adamw; train.muon_lr=null"
CASES = [  # overrides that are a mistake, the advice, and overrides that follow it
    ("train.global_batch_size=7", "global_batch_size=6", "train.global_batch_size=6"),
    ("model.compile=true; deepspeed=ds_configs/zero3.json", "zero1.json", "deepspeed=ds_configs/zero1.json"),
    (f"{MUON}; model.lora={{r: 2}}", "optimizer=adamw", ADAMW),
    (f"{MUON}; model.architecture={GPT2}", "optimizer=adamw", ADAMW),
    (f"{MUON}; deepspeed=ds_configs/zero3_offload.json", "zero2.json", "deepspeed=ds_configs/zero2.json"),
    ("objective.name=emoo", "mean emo?", "objective.name=emo"),
    ("data.train_tokenizer=270", "set data.train_tokenizer=", "data.train_tokenizer=NUMBER"),
    ("data.validation_fraction=0.9999", "fraction", "data.validation_fraction=0.2"),
    ("data.sequence_len=8192; data.shards=4", "sequence_len", "data.sequence_len=32"),
    ("data.sources=[{files: chats.jsonl}]", "kind=instruct", "data.kind=instruct; data.sequence_len=256"),
    ("data.kind=instruct; data.sources=[{files: text.jsonl}]", "data.kind=text", "data.kind=text"),
    ("data.sources=[{files: broken.jsonl}]", "strict=false", "data.strict=false"),
]


@pytest.mark.parametrize(("mistake", "advice", "cure"), CASES)
def test_advice_is_a_cure(recipe: Path, mistake: str, advice: str, cure: str) -> None:
    """NUMBER in a cure is the one that the message names."""
    attempt = prepares if mistake.startswith("data.") else trains
    with pytest.raises(UserError) as error:
        attempt(recipe, mistake.split("; "))
    assert advice in str(error.value), error.value
    number = re.search(rf"{re.escape(advice)}(\d+)", str(error.value))
    cures = cure.replace("NUMBER", number[1] if number else "").split("; ")
    keys = {override.partition("=")[0] for override in cures}
    rest = [override for override in mistake.split("; ") if override.partition("=")[0] not in keys]
    attempt(recipe, [*rest, *cures])
