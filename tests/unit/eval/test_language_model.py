"""A model that is not from Hugging Face can be scored on the tasks, as described in CONTRIBUTING."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from emo.eval.icl.job import run_all
from emo.eval.icl.settings import Settings
from emo.eval.icl.tasks import load_task, select_tasks
from emo.eval.results.directory import find_model, read_models
from tests.helpers.evaluating import command
from tests.helpers.examples import load_example
from tests.helpers.refusals import refused

Bigrams = load_example("my_model.py").Bigrams


def test_a_custom_model_is_scored_stored_and_reported(world: Path, tmp_path: Path) -> None:
    model, lines = Bigrams("It is great. It is terrible. " * 20), list[str]()
    settings = Settings(str(world / "data"), retriever="bm25", shots=2, score="calibrated")
    (result,) = run_all(model, select_tasks("sst2"), settings, tmp_path, lines.append)
    assert result["n"] == 12 and "already known" not in lines[-1]
    task = load_task("sst2")
    for record in find_model(read_models([tmp_path]), "bigrams").read_records("sst2"):
        tails = [task.words(label) for label in task.labels]
        assert record["prediction"] in task.labels and len(record["scores"]["suffix_sum"]) == len(tails)
        assert record["prediction"] == task.labels[int(np.argmin(record["scores"]["calibrated"]))]
    run_all(model, select_tasks("sst2"), settings, tmp_path, lines.append)
    assert "already known" in lines[-1]
    code, out, _ = command("report", tmp_path)
    assert code == 0 and "bigrams" in out


@pytest.mark.parametrize(
    "settings", [{"faithful": True}, {"inferencer": "ppl"}, {"score": "channel"}, {"retriever": "topk"}]
)
def test_settings_that_need_a_hugging_face_model_are_rejected(settings: Any, tmp_path: Path) -> None:
    with refused("model"):
        run_all(Bigrams("a"), select_tasks("sst2"), Settings("data", **settings), tmp_path, print)
