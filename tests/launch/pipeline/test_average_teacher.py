"""Runs whose teacher is a moving average of the trained weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from emo.common.errors import ExitCode
from emo.pipeline.checkpoint.export import export_checkpoint
from emo.pipeline.control.run_dir import EXPORT, EXPORT_INFO, read_metrics, step_directory
from emo.pipeline.engine.snapshots import read_weights
from tests.conftest import REPO
from tests.helpers import launching

DECAY = 0.6
OBJECTIVE = f'objective={{"sum": [{{"name": "mle"}}, {{"name": "kl", "teacher": {{"ema": {DECAY}}}}}]}}'
STEPS = 4
# Adapters start at zero, so small steps would give divergences as small as rounding errors.
LORA = ('model.lora={"r": 4, "dropout": 0}', "train.learning_rate=0.05")
CASES = {
    "weights": ("deepspeed={directory}/small.json",),  # also releases small parameters after each use
    "adapters": ("deepspeed=ds_configs/zero3.json", *LORA),
}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("average")
    settings = json.loads((REPO / "ds_configs/zero3.json").read_text())
    settings["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    (directory / "small.json").write_text(json.dumps(settings))
    return launching.tiny_recipe(directory, max_steps=STEPS, save_steps=1, save_total_limit=9)


def train(recipe: Path, name: str, *options: str) -> tuple[str, ...]:
    """Return the arguments of the run `name`."""
    options = tuple(option.replace("{directory}", str(recipe.parent)) for option in options)
    return (str(recipe), f"output_dir={recipe.parent / name}", OBJECTIVE, *options)


def records(recipe: Path, name: str) -> list[dict[str, Any]]:
    return [record for record in read_metrics(recipe.parent / name) if "nll" in record]


def averages(run_dir: Path, step: int) -> dict[str, Tensor]:
    """Return the averaged weights in a checkpoint."""
    files = sorted((step_directory(run_dir, step) / "state").glob("average_rank_*.pt"))
    parts = [torch.load(file, weights_only=True) for file in files]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


@pytest.fixture(scope="module")
def alone(recipe: Path) -> dict[str, list[dict[str, Any]]]:
    """Train on one rank, with and without adapters, and return the records."""
    runs = {}
    for name, options in (("alone", ()), ("alone-adapters", LORA)):
        done = launching.run_alone(*train(recipe, name, "deepspeed=ds_configs/zero1.json", *options))
        assert done.returncode == ExitCode.DONE, done.stdout
        runs[name] = records(recipe, name)
    return runs


@pytest.mark.parametrize("name", ["alone", "alone-adapters"])
def test_checkpoints_hold_the_average_of_the_weights(recipe: Path, alone: Any, name: str) -> None:
    """The stored average equals a float64 loop over the weights of all checkpoints."""
    assert alone[name][0]["divergence"] == pytest.approx(0, abs=1e-6)
    assert alone[name][-1]["divergence"] > alone[name][1]["divergence"] > 0
    run_dir = recipe.parent / name
    assert json.loads((run_dir / EXPORT / EXPORT_INFO).read_text())["teacher"] == f"ema {DECAY}"
    if name == "alone-adapters":  # the averaged adapters are not part of the base model
        export_checkpoint(step_directory(run_dir, STEPS), recipe.parent / "exported")
        files = (recipe.parent / "exported", run_dir / EXPORT)
        assert len({(file / "model.safetensors").read_bytes() for file in files}) == 1
    weights = [read_weights(step_directory(run_dir, step)) for step in range(1, STEPS + 1)]
    steps = [averages(run_dir, step) for step in range(1, STEPS + 1)]
    assert steps[0].keys() == {name for name in weights[0] if name in steps[0]} and steps[0]
    for name in steps[0]:
        want = steps[0][name].double()
        for held, after in zip(steps[1:], weights[1:], strict=True):
            want = DECAY * want + (1 - DECAY) * after[name].double().flatten()
            torch.testing.assert_close(held[name].double(), want, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("teacher", "options"), [({"ema": 0.5}, ()), ("base", LORA)])
def test_demonstrations_give_the_same_losses_on_two_ranks(
    recipe: Path, teacher: Any, options: tuple[str, ...]
) -> None:
    name = f"demonstration-{teacher}-{len(options)}".translate(dict.fromkeys(map(ord, "{}': "), "-"))
    objective = {"name": "reverse_kl", "teacher": teacher}
    objective |= {"on_policy": {"share": 1, "tokens": 6, "context": "demonstration"}}
    options = (f"objective={json.dumps(objective)}", "train.max_steps=2", *options)
    one = (f"output_dir={recipe.parent / name}-1", "deepspeed=ds_configs/zero1.json", *options)
    done = launching.run_alone(str(recipe), *one)
    assert done.returncode == ExitCode.DONE, done.stdout
    two = (f"output_dir={recipe.parent / name}-2", *options)
    done = launching.run_ranks("launch/continual.sh", str(recipe), *two)
    assert done.returncode == ExitCode.DONE, done.stdout
    pairs = zip(records(recipe, f"{name}-1"), records(recipe, f"{name}-2"), strict=True)
    for ours, want in pairs:
        assert ours["tokens"] == want["tokens"] > 0
        assert ours["loss"] == pytest.approx(want["loss"], rel=1e-3) and ours["loss"] > 1e-6


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_equal_one_also_after_a_kill(recipe: Path, alone: Any, case: str) -> None:
    """A resumed run equals an undisturbed run bit for bit, and one rank can resume it."""
    first, second, third = (f"{case}-{name}" for name in ("whole", "killed", "fewer"))
    done = launching.run_ranks("launch/continual.sh", *train(recipe, first, *CASES[case]))
    assert done.returncode == ExitCode.DONE, done.stdout
    expected = alone["alone-adapters" if case == "adapters" else "alone"]
    for ours, one in zip(records(recipe, first), expected, strict=True):
        assert ours["loss"] == pytest.approx(one["loss"], rel=1e-5)
        assert ours["divergence"] == pytest.approx(one["divergence"], rel=1e-3, abs=1e-8)
    if case == "adapters":  # checkpoints of adapters have the same format
        return
    want = averages(recipe.parent / first, STEPS)

    options = train(recipe, second, *CASES[case])
    launching.kill_ranks(recipe.parent / second, 2, "launch/continual.sh", *options)
    done = launching.run_ranks("launch/continual.sh", *options)
    assert done.returncode == ExitCode.DONE and "resumed from" in done.stdout, done.stdout
    resumed = averages(recipe.parent / second, STEPS)
    assert want.keys() == resumed.keys() and all(torch.equal(want[name], resumed[name]) for name in want)
    assert records(recipe, first)[-1]["divergence"] == records(recipe, second)[-1]["divergence"]

    fewer = recipe.parent / third
    shutil.copytree(recipe.parent / first, fewer)
    for removed in (fewer / EXPORT, *(step_directory(fewer, step) for step in (3, STEPS))):
        shutil.rmtree(removed)
    done = launching.run_alone(*train(recipe, third, *CASES[case]))
    assert done.returncode == ExitCode.DONE and "resumed from" in done.stdout, done.stdout
    for name, average in averages(fewer, STEPS).items():
        torch.testing.assert_close(average, want[name], rtol=1e-4, atol=1e-5)
