"""Runs keep and export their best checkpoint, and stop early."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path

import pytest
from safetensors.torch import load_file

from emo.pipeline.checkpoint.export import export_checkpoint
from emo.pipeline.control.run_dir import (
    SELECTION,
    append_scores,
    checkpoint_digest,
    checkpoints,
    read_best,
    read_metrics,
    step_of,
)
from emo.pipeline.report.page import build_run_report
from emo.pipeline.report.runs import RecordedRun
from tests.helpers.launching import kill_ranks, run_alone, run_ranks, tiny_recipe

SETTINGS = (
    *("train.eval_steps=2", "train.keep_best=nll", "train.save_total_limit=1", "train.save_steps=3"),
    # the learning rate rises until the loss rises
    *("train.lr_scheduler_type=constant", "train.learning_rate=0.4", "train.warmup_steps=14"),
)


def curve(run_dir: Path) -> dict[int, float]:
    return {r["step"]: r["validation_nll"] for r in read_metrics(run_dir) if "validation_nll" in r}


def test_a_run_ends_early_and_exports_its_best_checkpoint_also_after_a_kill(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path, max_steps=40)
    stop = "train.early_stopping={metric: nll, patience: 3}"
    options = (*SETTINGS, stop, "train.load_best_at_end=true", "deepspeed=ds_configs/zero3.json")
    command = ("launch/continual.sh", str(recipe), *options)
    run_dir = tmp_path / "run"
    kill_ranks(run_dir, 7, *command)
    done = run_ranks(*command)
    assert not done.returncode, done.stdout
    values = {step: value for step, value in curve(run_dir).items() if step}
    best = min(values, key=lambda step: values[step])
    last = best + 6
    assert list(values) == list(range(2, last + 1, 2)) and best < 7 < last < 40, values
    assert "early_stopping" in done.stdout
    recorded = read_best(run_dir)
    assert recorded is not None and recorded[:2] == (best, "nll")
    assert recorded.value == pytest.approx(values[best], abs=1e-9)
    assert [step_of(directory) for directory in checkpoints(run_dir)] == [best, last]
    export_checkpoint(run_dir / f"step-{best:06d}", tmp_path / "expected")
    weights = load_file(run_dir / "export/model.safetensors")
    expected = load_file(tmp_path / "expected/model.safetensors")
    assert all(weights[name].equal(tensor) for name, tensor in expected.items())
    assert json.loads((run_dir / "export/export.json").read_text())["step"] == best


def watch(run_dir: Path, values: dict[int, float], done: threading.Event) -> None:
    """Append the score of each new checkpoint, as a watcher does."""
    seen = set[str]()
    while not done.wait(0.05):
        for directory in checkpoints(run_dir):
            digest = checkpoint_digest(directory)
            if digest not in seen and step_of(directory) in values:
                seen.add(digest)
                append_scores(run_dir, step_of(directory), digest, [("t", values[step_of(directory)], "")])


def test_scores_of_a_task_choose_the_export(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path, max_steps=12, async_save=False)
    run_dir = tmp_path / "run"
    options = ("train.keep_best=task:t", "train.load_best_at_end=true", "train.export_checkpoints=true")
    options += ("train.save_steps=2", "train.save_total_limit=1", "deepspeed=ds_configs/zero3.json")
    options += ("train.early_stopping={metric: task:t, patience: 1}", "train.eval_steps=0")
    command = ("-m", "tests.helpers.saving_worker", "inline", str(recipe), f"output_dir={run_dir}", *options)
    done = threading.Event()
    thread = threading.Thread(target=watch, args=(run_dir, {2: 0.9, 4: 0.5}, done), daemon=True)
    thread.start()
    try:
        kill_ranks(run_dir, 5, *command, ranks=1)
        decided = (run_dir / SELECTION).read_text()
        ended = run_ranks(*command, ranks=1)
    finally:
        done.set()
    assert not ended.returncode, ended.stdout
    assert (run_dir / SELECTION).read_text().startswith(decided)
    assert read_best(run_dir) == (2, "task:t", 0.9)
    assert {2, 6} <= {step_of(directory) for directory in checkpoints(run_dir)}
    # the score of step 4 ends the run when step 6 is saved, and its last step is validated
    assert [record["step"] for record in read_metrics(run_dir) if "set" in record][-1] == 6
    assert "resumed from" in ended.stdout and "without scores of step-000006" in ended.stdout
    assert json.loads((run_dir / "export/export.json").read_text())["step"] == 2
    page = build_run_report([RecordedRun(run_dir)], "step", tmp_path).markdown()
    assert re.search(r"\| t \| 2 \| 90.0% \| best", page), page


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (("train.keep_best=nll",), "train.eval_steps"),
        (("train.keep_best=other/nll", "train.eval_steps=2"), "names no validation set"),
        (("train.load_best_at_end=true",), "train.keep_best"),
        (("train.keep_best=divergence", "train.eval_steps=2"), "objective.teacher"),
        (("train.keep_best=task:sst2",), "train.export_checkpoints"),
        (("train.keep_best=accuracy", "train.eval_steps=2"), "train.keep_best"),
    ],
)
def test_a_metric_that_is_not_measured_is_rejected(
    tmp_path: Path, settings: tuple[str, ...], problem: str
) -> None:
    done = run_alone(str(tiny_recipe(tmp_path)), *settings)
    assert done.returncode == 2 and problem in done.stdout
