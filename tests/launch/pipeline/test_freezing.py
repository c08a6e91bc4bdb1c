"""Runs that train only the embeddings and the head at first."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from emo.pipeline.control.run_dir import step_directory
from emo.pipeline.engine.snapshots import only_data, read_weights
from tests.helpers.launching import kill_ranks, losses, run_alone, run_ranks, tiny_recipe

FREE = {"model.embed_tokens.weight", "lm_head.weight"}
FROZEN_STEPS, STEPS = 3, 10
SETTINGS = ("train.only=embeddings", f"train.only_steps={FROZEN_STEPS}", "train.weight_decay=0.1")


def moments(checkpoint: Path) -> list[tuple[float, bool]]:
    """Return the distinct step counts in the optimizer's state, and whether their moments are zero."""

    def find(tree: Any) -> Iterator[dict[str, Any]]:
        if isinstance(tree, dict) and "exp_avg" in tree:
            yield tree
        elif isinstance(tree, dict | list | tuple):
            for inner in tree.values() if isinstance(tree, dict) else tree:
                yield from find(inner)

    found = set()
    for path in sorted((checkpoint / "state").glob("*optim_states.pt")):
        with only_data(checkpoint):
            states = list(find(torch.load(path, weights_only=True)))
        found |= {(float(s["step"]), not (s["exp_avg"].any() or s["exp_avg_sq"].any())) for s in states}
    return sorted(found)


@pytest.mark.parametrize(("stage", "dtype"), [(2, "bfloat16"), (3, "float32")])
def test_other_weights_and_their_moments_do_not_move(stage: int, dtype: str, tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path, max_steps=STEPS, save_steps=3, save_total_limit=9)
    run_dir = tmp_path / "run"
    command = ("launch/continual.sh", str(recipe), *SETTINGS, f"deepspeed=ds_configs/zero{stage}.json")
    command += (f"model.dtype={dtype}", "train.learning_rate=0.01", "train.async_save=false")
    kill_ranks(run_dir, 5, *command)
    done = run_ranks(*command)
    assert not done.returncode and "resumed from" in done.stdout, done.stdout
    base = load_file(run_dir / "initial/model.safetensors")
    exact = getattr(torch, dtype)
    frozen, last = (read_weights(step_directory(run_dir, step)) for step in (FROZEN_STEPS, STEPS))
    changed = [
        {name for name, tensor in base.items() if not weights[name].contiguous().equal(tensor.to(exact))}
        for weights in (frozen, last)
    ]
    assert changed == [FREE, set(base)]
    assert moments(step_directory(run_dir, FROZEN_STEPS)) == [(FROZEN_STEPS, False), (FROZEN_STEPS, True)]
    assert moments(step_directory(run_dir, STEPS)) == [(STEPS - FROZEN_STEPS, False), (STEPS, False)]
    # A resume on another number of ranks gives the same counts.
    expected = losses(run_dir)
    for step in (9, STEPS):
        shutil.rmtree(step_directory(run_dir, step))
    shutil.rmtree(run_dir / "export")
    done = run_alone(str(recipe), *command[2:])
    assert not done.returncode and "resumed from" in done.stdout, done.stdout
    assert moments(step_directory(run_dir, STEPS)) == [(STEPS - FROZEN_STEPS, False), (STEPS, False)]
    np.testing.assert_allclose(losses(run_dir), expected, rtol=1e-4 if dtype == "float32" else 1e-2)
