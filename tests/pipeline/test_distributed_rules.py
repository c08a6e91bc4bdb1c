"""Real runs: adapters reach their export and stay with their base, losses that are not finite, Muon."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from emo.common.errors import ExitCode
from emo.pipeline.run_dir import BAD_BATCHES, HEARTBEAT
from tests.helpers import launching
from tests.helpers.launching import losses

# An objective whose loss is not finite although its gradient is, for tokens as a new model predicts them.
LOST = """
import torch
from emo.pipeline.loss.objectives import Coefficients


def lost(m):
    new = (m > 5.945) & (m < 5.955)
    return Coefficients(torch.where(new, float("nan"), m), A=torch.ones_like(m))
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return launching.tiny_recipe(tmp_path_factory.mktemp("tiny"))


def test_adapters_on_gpt2_reach_their_export_on_a_host_without_git(recipe: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    shape = "{model_type: gpt2, vocab_size: 384, n_embd: 32, n_layer: 2, n_head: 2, n_positions: 64}"
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("gcc", "cc", "uname", "sh"):  # torch asks for these
        result = subprocess.run(["which", name], capture_output=True, text=True).stdout.strip()
        if result:
            (tools / name).symlink_to(result)
    done = subprocess.run(
        [str(launching.BIN / "python"), "launch/continual.sh", str(recipe), f"output_dir={run_dir}",
         f"model.architecture={shape}", "model.lora.r=4", "train.max_steps=2", "train.learning_rate=0.1"],
        cwd=launching.REPO,
        env=launching.ENVIRONMENT | {"PATH": f"{launching.BIN}:{tools}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert json.loads((run_dir / "export" / "export.json").read_text())["git"] == "unknown"
    exported = AutoModelForCausalLM.from_pretrained(run_dir / "export")
    first = AutoModelForCausalLM.from_pretrained(run_dir / "initial")
    name = "transformer.h.1.mlp.c_fc.weight"
    assert (exported.get_parameter(name) - first.get_parameter(name)).abs().max() > 1e-4
    assert json.loads((run_dir / HEARTBEAT).read_text())["doing"] == "finished"


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_loss_that_is_not_finite_changes_no_weight(recipe: Path, tmp_path: Path, stage: int) -> None:
    run_dir, objective = tmp_path / "run", tmp_path / "lost.py"
    objective.write_text(LOST)
    options = [
        "train.max_steps=2",
        f"deepspeed=ds_configs/zero{stage}.json",
        f"objective.name={objective}:lost",
    ]
    done = launching.run_alone(str(recipe), f"output_dir={run_dir}", *options)
    assert done.returncode == ExitCode.DONE, done.stdout
    assert len((run_dir / BAD_BATCHES).read_text(encoding="utf-8").splitlines()) == 2
    first, last = (load_file(run_dir / name / "model.safetensors") for name in ("initial", "export"))
    assert all(torch.equal(first[name], last[name]) for name in first)


def test_adapters_stay_with_their_base(recipe: Path, tmp_path: Path) -> None:
    """No checkpoint holds the frozen weights, so they are known again by a sum; also on other ranks."""
    base, run_dir = tmp_path / "base", tmp_path / "run"
    keys = yaml.safe_load(recipe.read_text(encoding="utf-8"))["model"]["architecture"]
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**keys)).save_pretrained(base)
    options = [str(recipe), f"output_dir={run_dir}", f"model.path={base}", "model.architecture=null"]
    options += ["model.lora.r=2", "train.max_steps=3", "train.save_steps=1", "objective.name=mle"]
    done = launching.run_ranks(2, *options)
    assert done.returncode == 0, done.stdout
    for name in ("step-000003", "export"):
        subprocess.run(["rm", "-r", str(run_dir / name)], check=True)
    weights = load_file(base / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"] *= 1.1
    (base / "model.safetensors").rename(tmp_path / "right")
    save_file(weights, base / "model.safetensors", {"format": "pt"})
    wrong = launching.run_alone(*options)
    assert wrong.returncode == 2, wrong.stdout
    assert "adapters of another base model" in wrong.stdout
    (tmp_path / "right").rename(base / "model.safetensors")
    again = launching.run_alone(*options)
    assert again.returncode == 0, again.stdout
    assert "resumed from" in again.stdout


def test_muon_with_copies_of_weights_in_each_host(recipe: Path, tmp_path: Path) -> None:
    """Muon and hpZ by recipe; `test_distributed_optimizers.py` compares them with others and resumes them."""
    run_dir, file = tmp_path / "run", tmp_path / "hpz.json"
    tree = json.loads((launching.REPO / "ds_configs/zero3_hpz.json").read_text())
    # as in a model of real size, no parameter is small enough to stay whole
    tree["zero_optimization"] |= {"zero_hpz_partition_size": 2, "stage3_param_persistence_threshold": 0}
    file.write_text(json.dumps(tree))
    options = [str(recipe), f"output_dir={run_dir}", f"deepspeed={file}", "train.optimizer=muon"]
    options += ["train.muon_lr=0.02", "train.max_grad_norm=0", "train.weight_decay=0.1"]
    done = launching.run_ranks(2, *options)
    assert done.returncode == 0, done.stdout
    nll = [result for _, result, _ in losses(run_dir)]
    assert nll[-1] < nll[0] - 0.1
