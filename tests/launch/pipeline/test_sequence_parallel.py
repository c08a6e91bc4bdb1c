"""Ranks that share rows train like one process, and a run may change how many ranks share a row."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from emo.common.errors import ExitCode
from emo.pipeline.control.run_dir import read_metrics
from emo.pipeline.monitor.documents import read_documents
from tests.helpers import launching
from tests.helpers.sequence_worker import Case, train_plain

pytestmark = pytest.mark.slow

BLOCK, STEPS, BOUND = 32, 3, 1e-6
CASES = [
    Case("llama", "emo", 1, 2),
    Case("llama", "emo", 3, 4),
    Case("qwen3", "tailr", 1, 2),
    Case("qwen3", "mile", 3, 4),
    Case("gemma3_text", "sum", 3, 2),
    Case("gemma3_text", "mle", 1, 4),
    Case("llama", "teacher", 3, 4),
]
SETS = ("home", "abroad")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """Return the losses of four ranks by case."""
    file = tmp_path_factory.mktemp("shared") / "losses.json"
    command = ("-m", "tests.helpers.sequence_worker", str(file), str(BLOCK), str(STEPS), *map(str, CASES))
    done = launching.run_ranks(*command, ranks=4)
    assert done.returncode == 0, done.stdout[-5000:]
    return json.loads(file.read_text(encoding="utf-8"))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_shared_rows_train_as_complete_rows(results: dict[str, list[float]], case: Case) -> None:
    assert results[str(case)] == pytest.approx(train_plain(case, BLOCK, STEPS), rel=BOUND)


def test_a_wrong_attention_is_found_before_training(results: dict[str, list[float]]) -> None:
    assert results["wrong"] == "sequence-differs"


def test_a_run_resumes_with_other_groups(tmp_path: Path) -> None:
    """A killed run on two ranks resumes on two that share rows, and matches a run on one rank."""
    saves = {"save_steps": 3, "eval_steps": 3, "save_total_limit": 5}
    path = launching.tiny_recipe(tmp_path, SETS, max_steps=6, **saves)
    alone, shared = tmp_path / "alone", tmp_path / "shared"
    done = launching.run_alone(str(path), f"output_dir={alone}")
    assert done.returncode == ExitCode.DONE, done.stdout
    command = ("launch/continual.sh", str(path), f"output_dir={shared}")
    launching.kill_ranks(shared, 4, *command)
    done = launching.run_ranks(*command, "train.sequence_parallel=2")
    assert done.returncode == ExitCode.DONE, done.stdout
    keys = ("step", "tokens", "loss", "demd", "validation_nll")
    expected, actual = ([[r.get(key) for key in keys] for r in read_metrics(d)] for d in (alone, shared))
    assert len(expected) == 12 and np.array(actual, float) == pytest.approx(
        np.array(expected, float), rel=BOUND, nan_ok=True
    )
    for name in SETS:
        documents = [read_documents(run_dir, name, 6) for run_dir in (alone, shared)]
        assert None not in documents
        assert np.array_equal(documents[0].tokens, documents[1].tokens)
        assert documents[1].nll == pytest.approx(documents[0].nll, rel=1e-5)
