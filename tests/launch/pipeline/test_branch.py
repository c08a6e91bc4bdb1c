"""Runs that start the learning rate decay from a checkpoint of another run."""

from __future__ import annotations

import shutil
from pathlib import Path

from safetensors.torch import load_file

from emo.pipeline.control.run_dir import CONFIG, TRUNK, read_metrics
from tests.helpers.launching import losses, run_alone, tiny_recipe

WSD = ("train.lr_scheduler_type=warmup_stable_decay", "train.warmup_steps=2", "train.kl_from_base=8")


def train(recipe: Path, run_dir: Path, *settings: str) -> None:
    done = run_alone(str(recipe), f"output_dir={run_dir}", *WSD, *settings)
    assert not done.returncode, done.stdout


def validations(run_dir: Path) -> list[tuple[float, float]]:
    records = [record for record in read_metrics(run_dir) if "set" in record]
    return [(record["validation_kl_from_base"], record.get("validation_change", 0.0)) for record in records]


def test_a_decay_from_a_trunk_equals_a_complete_run(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path, save_steps=2, save_total_limit=9)
    trunk, complete, branch = (tmp_path / name for name in ("trunk", "complete", "branch"))
    train(recipe, trunk, "train.max_steps=8", "train.decay_steps=1")
    train(recipe, complete, "train.max_steps=7", "train.decay_steps=3")
    train(recipe, branch, "train.max_steps=7", f"train.decay_from={trunk}/step-4")
    assert losses(branch) == losses(complete)[4:]
    assert validations(branch) == validations(complete)[1:]
    weights, expected = (load_file(run / "export/model.safetensors") for run in (branch, complete))
    assert all(weights[name].equal(tensor) for name, tensor in expected.items())


def test_a_branch_needs_a_checkpoint_at_the_peak_of_the_same_run(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path, save_steps=2, save_total_limit=9, max_steps=8)
    trunk = tmp_path / "trunk"
    done = run_alone(str(recipe), f"output_dir={trunk}", *WSD, "train.decay_steps=4")
    assert not done.returncode, done.stdout
    for settings, problem in (
        (["train.decay_from=" + f"{trunk}/step-3"], "step-000002"),
        (["train.decay_from=" + f"{trunk}/step-6"], "below its peak"),
        (["train.decay_from=" + f"{trunk}/step-4", "train.max_steps=4"], "has 4 steps"),
        (["train.decay_from=" + f"{trunk}/step-4", "train.learning_rate=0.1"], "learning_rate"),
        (["train.decay_from=" + f"{trunk}/step-4", "train.seed=2"], "seed"),
        (["train.decay_from=" + f"{trunk}/step-4", "train.mixture={temperature: 1}"], "mixture_from=4"),
        (["train.decay_from=" + f"{tmp_path}/nothing/step-4"], "not a complete checkpoint"),
    ):
        done = run_alone(str(recipe), f"output_dir={tmp_path / 'branch'}", *WSD, *settings)
        assert done.returncode == 2 and problem in done.stdout, done.stdout
    assert not list((tmp_path / "branch").glob("step-*"))
    # A launch that was killed before it claimed the run leaves these files.
    shutil.copytree(trunk / "step-000002", tmp_path / "branch/step-000002")
    shutil.copyfile(trunk / CONFIG, tmp_path / "branch" / TRUNK)
    mixture = ["train.mixture={temperature: 1}", "train.mixture_from=4"]
    settings = [f"train.decay_from={trunk}/step-4", f"output_dir={tmp_path / 'branch'}", *mixture]
    done = run_alone(str(recipe), *WSD, *settings)
    assert not done.returncode and [step for step, *_ in losses(tmp_path / "branch")] == [5, 6, 7, 8], (
        done.stdout
    )


def test_a_branch_has_a_selection_of_its_own(tmp_path: Path) -> None:
    """A branch ignores the best checkpoint and the early stop of its trunk."""
    recipe = tiny_recipe(tmp_path, save_steps=2, save_total_limit=9, max_steps=8, eval_steps=2)
    trunk = tmp_path / "trunk"
    rising = ("train.learning_rate=1.5", "train.keep_best=nll", "train.load_best_at_end=true")
    stop = "train.early_stopping={metric: nll, patience: 1}"
    done = run_alone(str(recipe), f"output_dir={trunk}", *WSD, *rising, stop, "train.decay_steps=1")
    assert not done.returncode, done.stdout
    last = max(step for step, *_ in losses(trunk))
    assert last < 8, "it did not end early"
    options = (
        f"output_dir={tmp_path / 'branch'}",
        *WSD,
        *rising,
        stop,
        f"train.decay_from={trunk}/step-{last}",
    )
    done = run_alone(str(recipe), *options, f"train.max_steps={last + 2}")
    assert not done.returncode, done.stdout
    assert [step for step, *_ in losses(tmp_path / "branch")] == [last + 1, last + 2]
    assert (tmp_path / "branch/export").is_dir()
