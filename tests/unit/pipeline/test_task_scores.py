"""Scores of tasks choose the best checkpoint."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch

from emo.pipeline.checkpoint.config import SavingConfig
from emo.pipeline.checkpoint.saver import prune
from emo.pipeline.control.run_dir import SELECTION, append_scores, checkpoint_digest, checkpoints, step_of
from emo.pipeline.control.world import World
from emo.pipeline.monitor.validation import task_scores
from emo.pipeline.monitor.validation.selection import Selection

ALONE = World(0, 1, torch.device("cpu"))
TRAIN = SavingConfig.model_validate(
    {"keep_best": "task:sst2", "early_stopping": {"metric": "task:sst2", "patience": 2}}
)


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(task_scores, "gather_objects", lambda value: [value])
    monkeypatch.setattr(task_scores, "raise_on_all_ranks", lambda work: work())
    return tmp_path


def complete(run_dir: Path, *steps: int) -> None:
    for step in steps:
        (run_dir / f"step-{step:06d}").mkdir()
        (run_dir / f"step-{step:06d}/COMPLETE").write_text(json.dumps({"files": {"step": step}}))


def score(run_dir: Path, step: int, value: float, setting: str = "a", task: str = "sst2") -> None:
    digest = checkpoint_digest(run_dir / f"step-{step:06d}")
    append_scores(run_dir, step, digest, [(task, value, setting)])


def test_a_resumed_run_decides_as_before(run_dir: Path) -> None:
    selection = Selection(TRAIN, run_dir, ALONE)
    complete(run_dir, 2, 4, 6)
    score(run_dir, 2, 0.5)
    selection.take_scores(4)
    saved = json.loads(json.dumps(selection.state_dict()))
    score(run_dir, 4, 0.7)
    score(run_dir, 6, 0.6, task="other")
    selection.take_scores(6)
    assert selection.best == (4, "task:sst2", 0.7)
    score(run_dir, 6, 0.9)  # arrives before the run resumes from step 4
    resumed = Selection(TRAIN, run_dir, ALONE)
    resumed.load_state_dict(saved)
    assert resumed.best == (2, "task:sst2", 0.5)
    resumed.take_scores(6)
    assert resumed.state_dict() == selection.state_dict()
    assert len((run_dir / SELECTION).read_text().splitlines()) == 2
    complete(run_dir, 8, 10)
    score(run_dir, 8, 0.9)  # a tie, so the earlier one stays
    resumed.take_scores(10)
    assert resumed.best == (6, "task:sst2", 0.9) and not resumed.exhausted
    score(run_dir, 10, 0.1)
    resumed.take_scores(10, final=True)
    assert resumed.exhausted


def test_only_comparable_scores_of_existing_weights_count(run_dir: Path) -> None:
    selection = Selection(TRAIN, run_dir, ALONE)
    complete(run_dir, 2, 4)
    score(run_dir, 2, 0.5)
    score(run_dir, 4, 0.9)
    with (run_dir / "task_scores.jsonl").open("a") as file:
        file.write('{"step": 4, "checkpoint": "", "task": "sst2", "value": NaN, "setting": "a"}\n')
        file.write('{"step": 2, "task": "sst2", "val')
    (run_dir / "step-000004/COMPLETE").write_text('{"files": {"other": 4}}')  # trained again
    selection.take_scores(4)
    assert selection.best == (2, "task:sst2", 0.5)
    (run_dir / "task_scores.jsonl").write_text("")
    score(run_dir, 4, 0.2, setting="b")  # the watcher has other settings
    selection.take_scores(6)
    assert selection.best == (4, "task:sst2", 0.2)


def test_checkpoints_that_wait_are_kept_within_the_limit(
    run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    scores = Selection(TRAIN, run_dir, ALONE).scores
    kept = []
    with caplog.at_level(logging.WARNING):
        for step in range(1, 8):
            waiting = scores.choose_waiting(2, keep_every=3)
            complete(run_dir, step)
            prune(run_dir, step, 2, 3, *(run_dir / f"step-{step:06d}" for step in waiting))
            kept.append([step_of(path) for path in checkpoints(run_dir)])
            if step == 4:
                score(run_dir, 2, 0.5)
                scores.take(4, final=False)
    assert kept[3] == [1, 2, 3, 4] and kept[4] == [1, 3, 4, 5] and kept[6] == [3, 4, 5, 6, 7]
    assert [record.message.split(" is ")[0] for record in caplog.records] == ["step-000001"]
