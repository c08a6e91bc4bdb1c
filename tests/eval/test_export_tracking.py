"""Results in Weights & Biases: what it has written, read back by its own messages."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from emo.common.lease import Lease, held
from emo.eval import store
from emo.eval.export import tracking
from emo.pipeline.run_dir import CONFIG, LOCK, LOCK_SECONDS, WANDB_ID
from tests.helpers.evaluating import command
from tests.helpers.results import RIGHT, finish, finished, write_model, write_result


def training_run(directory: Path, project: str | None = "emo-test") -> Path:
    directory.mkdir(parents=True)
    (directory / CONFIG).write_text(
        json.dumps({"train": {"report_to": ["wandb"] if project else [], "project": project}})
    )
    (directory / WANDB_ID).write_text("0123456789abcdef")
    return directory


def logged(path: Path) -> Iterator[Any]:
    """The records of a .wandb file, by W&B's own messages: LevelDB's log in blocks of 32 KiB."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, directory, text = path.read_bytes(), 7, b""
    while directory + 7 <= len(data):
        left = 32768 - directory % 32768
        if left < 7:
            directory += left
            continue
        length, kind = int.from_bytes(data[directory + 4 : directory + 6], "little"), data[directory + 6]
        text += data[directory + 7 : directory + 7 + length]
        directory += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(text)
            text = b""


@pytest.mark.slow
def test_wandb_gets_every_model_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Points of the training run over its tokens, in their order, whatever the order of evaluation."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    run, out = training_run(tmp_path / "emo"), tmp_path / "out"
    for name, tokens in (("emo-step-2", 200), ("emo-step-1", 100), ("emo", 200)):
        write_model(out, name, step=tokens // 100, tokens=tokens, run=str(run))
        write_result(out, name, "sst2", [*RIGHT, tokens == 200])
    write_model(out, "another", tokens=5, run="/runs/another")
    write_result(out, "another", "sst2", RIGHT)
    finish(out)
    # An export that was killed while it sent: what W&B would send of it goes.
    unsent = run / "wandb" / "offline-run-1-0123456789abcdef"
    unsent.mkdir(parents=True)
    (run / tracking.SENT).write_text(json.dumps({"sent": {}, "sending": unsent.name}))
    code, _, err = command("export", out, "--format", "wandb", "--output_path", run)
    assert code == 0 and not unsent.exists(), err
    (written,) = run.glob("wandb/offline-run-*/*.wandb")
    records = list(logged(written))
    assert {r.run.run_id for r in records if r.HasField("run")} == {"0123456789abcdef"}
    assert {r.run.project for r in records if r.HasField("run")} == {"emo-test"}
    axes = {r.metric.glob_name: r.metric.step_metric for r in records if r.HasField("metric")}
    assert axes["eval/*"] == "eval/tokens"
    points = [
        {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in r.history.item}
        for r in records if r.HasField("history")
    ]  # fmt: skip
    assert [point["eval/tokens"] for point in points] == [100, 200]
    assert [point["eval/step"] for point in points] == [1, 2]
    assert [point["eval/sst2/accuracy"] for point in points] == pytest.approx([4 / 7, 5 / 7])
    assert points[0]["eval/sst2/accuracy_stderr"] == pytest.approx(math.sqrt(4 / 7 * 3 / 7 / 6))
    assert points[0]["eval/mean_accuracy"] == points[0]["eval/sst2/accuracy"]
    assert command("export", out, "--format", "wandb", "--output_path", run)[0] == 0
    assert len(list(run.glob("wandb/offline-run-*"))) == 1


def test_wandb_says_what_it_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, out = training_run(tmp_path / "emo"), tmp_path / "out"
    finished(out, tokens=5, run=str(run))
    arguments = ["export", out, "--format", "wandb", "--output_path"]

    def refused(directory: Path) -> bool:
        return command(*arguments, directory)[0] == 2 and not (run / tracking.SENT).exists()

    with held(Lease(run, LOCK, LOCK_SECONDS)):  # it trains
        assert refused(run)
    with held(store.lease(run, tracking.SENDING)):
        assert refused(run)
    assert refused(training_run(tmp_path / "no" / "emo", None)) and refused(tmp_path / "nowhere")
    assert refused(training_run(tmp_path / "mle"))  # none of these results is of it
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "wandb", None)  # as if it could not be found
        assert refused(run)
    finished(out, run=str(run))  # after how many tokens?
    assert refused(run)
