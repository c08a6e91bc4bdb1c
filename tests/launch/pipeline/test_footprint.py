"""The predicted memory matches measurements of DeepSpeed."""

from __future__ import annotations

import json

import pytest

from tests.helpers import launching, zero_worker


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, float]]:
    """Measure the memory of rank 0 of several ranks in each case."""
    path = tmp_path_factory.mktemp("zero") / "results.json"
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(zero_worker.RANKS)}
    done = launching.run_forked([rank], "-m", "tests.helpers.zero_worker", str(path))
    assert done.returncode == 0, done.stdout[-5000:]
    return json.loads(path.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("case", [zero_worker.name(*case) for case in zero_worker.CASES])
def test_predicted_memory_is_that_of_deepspeed(measured: dict[str, dict[str, float]], case: str) -> None:
    """The plan predicts the peak of a step, and the memory between steps, when gradients may be freed."""
    memory = measured[case]
    assert memory["planned"] == pytest.approx(memory["peak"], rel=0.05)
    state = memory["parameters"] + memory["optimizer"]
    assert 0.99 * state < memory["between"] < 1.05 * (state + memory["gradients"])
