"""A run that extends a model's context is killed, resumes, and exports the longer context."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from emo.common.io.weights import load_model_config
from emo.data_prep.encoding.tokenizer import load_tokenizer
from emo.pipeline.checkpoint.claims import check_keys
from emo.pipeline.checkpoint.export import export_checkpoint
from emo.pipeline.config import load_config
from emo.pipeline.control.run_dir import read_metrics
from tests.helpers.families import tiny_llama
from tests.helpers.launching import kill_ranks, run_ranks, tiny_recipe
from tests.helpers.refusals import refused

YARN = ("model.rope.type=yarn", "model.rope.factor=4")
PROBE = torch.arange(128)[None]


def test_a_model_with_a_longer_context_trains_resumes_and_exports(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path, data={"sequence_len": 128}, save_steps=2, max_steps=4, async_save=False)
    base = tmp_path / "base"
    tiny_llama(384, num_hidden_layers=2, max_position_embeddings=32).save_pretrained(base)
    shutil.copytree(tmp_path / "data/tokenizer", base, dirs_exist_ok=True)
    teacher = ("objective.name=kl", "objective.teacher=base", "deepspeed=ds_configs/zero3.json")
    command = (str(recipe), "model.architecture=null", f"model.path={base}", *teacher, *YARN)
    kill_ranks(tmp_path / "run", 3, "launch/continual.sh", *command)
    with refused("changed-key"):
        check_keys(load_config(recipe, [*command[1:], "model.rope.factor=8"]))
    done = run_ranks("launch/continual.sh", *command)
    assert not done.returncode and "resum" in done.stdout, done.stdout
    steps = [record for record in read_metrics(tmp_path / "run") if "loss" in record]
    assert [record["step"] for record in steps] == [1, 2, 3, 4]
    assert steps[0]["loss"] < 1e-6 < steps[-1]["loss"]  # the teacher is a copy with the same RoPE
    export_checkpoint(tmp_path / "run", tmp_path / "exported")
    read = []
    for directory in (tmp_path / "run/export", tmp_path / "exported"):
        config = load_model_config(directory)
        assert config.max_position_embeddings == 128 and config.rope_parameters["factor"] == 4.0
        assert config.rope_parameters["original_max_position_embeddings"] == 32
        assert load_tokenizer(directory).model_max_length >= 128
        read.append(AutoModelForCausalLM.from_pretrained(directory)(PROBE).logits)
    assert torch.equal(*read)
