"""Real runs: adapters reach their export, one launch per run directory, and what decays."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from common.errors import ExitCode
from pipeline import identity
from pipeline.run_dir import BAD_BATCHES, HEARTBEAT, STATE, checkpoints
from tests.helpers import launching
from tests.helpers.launching import wait_for_step

# An objective whose loss is not finite although its gradient is, for tokens as a new model predicts them.
LOST = """
import torch
from pipeline.loss.objectives import Coefficients


def lost(m):
    new = (m > 5.945) & (m < 5.955)
    return Coefficients(torch.where(new, float("nan"), m), A=torch.ones_like(m))
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return launching.tiny_recipe(tmp_path_factory.mktemp("tiny"))


def test_adapters_on_gpt2_reach_their_export_on_a_host_without_git(recipe: Path, tmp_path: Path) -> None:
    """defects B2 and B6"""
    run_dir = tmp_path / "run"
    shape = "{model_type: gpt2, vocab_size: 384, n_embd: 32, n_layer: 2, n_head: 2, n_positions: 64}"
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("gcc", "cc", "uname", "sh"):  # torch asks for these
        found = subprocess.run(["which", name], capture_output=True, text=True).stdout.strip()
        if found:
            (tools / name).symlink_to(found)
    done = subprocess.run(
        [str(launching.BIN / "python"), "launch/continual.sh", str(recipe), f"run_dir={run_dir}",
         f"model.architecture={shape}", "model.lora.r=4", "train.steps=2", "train.lr=0.1"],
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


def test_a_run_does_not_go_on_with_another_program(recipe: Path, tmp_path: Path) -> None:
    """Edited between two launches: one line, exit code 2, and the run stays as it was."""
    run_dir, objective = tmp_path / "run", tmp_path / "mine.py"
    objective.write_text("def mine(m, *, strength=1.0):\n    return strength + 0 * m\n")
    options = [str(recipe), f"run_dir={run_dir}", f"objective.name={objective}:mine"]
    options += ["train.steps=3", "train.save_every=1"]
    done = launching.run_alone(*options)
    assert done.returncode == ExitCode.DONE, done.stdout
    shutil.rmtree(run_dir / "export")
    objective.write_text("def mine(m, *, strength=1.0):\n    return strength + 0 * m  # !\n")
    done = launching.run_alone(*options)
    assert done.returncode == ExitCode.MISTAKE and "Traceback" not in done.stdout, done.stdout
    assert len([line for line in done.stdout.splitlines() if line.startswith("error: ")]) == 1
    state = json.loads((checkpoints(run_dir)[-1] / STATE).read_text(encoding="utf-8"))
    assert state["identity"].keys() == identity.PARTS.keys()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_loss_that_is_not_finite_changes_no_weight(recipe: Path, tmp_path: Path, stage: int) -> None:
    run_dir, objective = tmp_path / "run", tmp_path / "lost.py"
    objective.write_text(LOST)
    options = ["train.steps=2", f"deepspeed=ds_configs/zero{stage}.json", f"objective.name={objective}:lost"]
    done = launching.run_alone(str(recipe), f"run_dir={run_dir}", *options)
    assert done.returncode == ExitCode.DONE, done.stdout
    assert len((run_dir / BAD_BATCHES).read_text(encoding="utf-8").splitlines()) == 2
    first, last = (load_file(run_dir / name / "model.safetensors") for name in ("initial", "export"))
    assert all(torch.equal(first[name], last[name]) for name in first)


def test_adapters_stay_with_their_base(recipe: Path, tmp_path: Path) -> None:
    """No checkpoint holds the frozen weights, so they are known again by a sum; also on other ranks."""
    base, run_dir = tmp_path / "base", tmp_path / "run"
    keys = yaml.safe_load(recipe.read_text(encoding="utf-8"))["model"]["architecture"]
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**keys)).save_pretrained(base)
    options = [str(recipe), f"run_dir={run_dir}", f"model.path={base}", "model.architecture=null"]
    options += ["model.lora.r=2", "train.steps=3", "train.save_every=1", "objective.name=mle"]
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


def test_a_second_launch_is_refused_and_a_resumed_one_is_not(recipe: Path, tmp_path: Path) -> None:
    """defects B4"""
    run_dir = tmp_path / "run"
    arguments = [str(recipe), f"run_dir={run_dir}", "train.steps=100000", "train.save_every=3"]
    arguments += ["train.schedule=constant", "train.max_skipped=9"]
    command = [str(launching.BIN / "python"), "launch/continual.sh", *arguments]
    first = subprocess.Popen(
        command,
        cwd=launching.REPO,
        env=launching.ENVIRONMENT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.STDOUT,
    )
    try:
        wait_for_step(run_dir, 4)
        second = launching.run_alone(*arguments)
        assert second.returncode == 2, second.stdout
        errors = [line for line in second.stdout.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1 and f"is in use by process {first.pid} on " in errors[0]
        assert first.poll() is None
    finally:
        first.kill()
        first.wait()
    began = time.monotonic()
    third = launching.run_alone(*arguments, "train.max_minutes=0.001")
    assert third.returncode == 75, third.stdout
    assert time.monotonic() - began < 100  # less than a lock on another host would have to be watched
    assert checkpoints(run_dir)


@pytest.mark.parametrize(("stage", "ranks"), [(1, 1), (3, 2)])
def test_gains_of_norms_do_not_decay(recipe: Path, tmp_path: Path, stage: int, ranks: int) -> None:
    """defects A18: with a rate of nothing and a decay of a hundredth per step, also across a resume."""
    run_dir = tmp_path / "run"
    options = ["train.lr=1e-12", "train.weight_decay=1e10", "train.schedule=constant", "train.warmup_ratio=0"]
    options += [f"run_dir={run_dir}", f"deepspeed=ds_configs/zero{stage}.json", "train.steps=2"]
    done = launching.run_ranks(ranks, str(recipe), *options, "train.save_every=1")
    assert done.returncode == 0, done.stdout
    assert len(json.loads((checkpoints(run_dir)[-1] / STATE).read_text())["groups"]) == 2
    first, last = (
        load_file(run_dir / "initial/model.safetensors"),
        load_file(run_dir / "export/model.safetensors"),
    )
    for name, before in first.items():
        expected = before if before.dim() < 2 else before * 0.99**2
        assert (last[name] - expected).abs().max() < 1e-6, name
    for name in ("step-000002", "export"):
        subprocess.run(["rm", "-r", str(run_dir / name)], check=True)
    again = launching.run_alone(str(recipe), *options)  # another number of ranks where there were two
    assert again.returncode == 0, again.stdout
    resumed = load_file(run_dir / "export/model.safetensors")
    assert "resumed from" in again.stdout
    assert all((resumed[name] - last[name]).abs().max() < 1e-6 for name in last)
