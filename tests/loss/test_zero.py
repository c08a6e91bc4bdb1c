"""Two real ranks under DeepSpeed against one unsharded process, for every set-up and every objective."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from emo.pipeline.loss.objectives import OBJECTIVES
from tests.helpers.launching import run_module
from tests.helpers.loss_reference import relative_error
from tests.helpers.zero_worker import CASES, Case, objectives_unsharded, run_unsharded

Tensors = dict[str, torch.Tensor]
ByName = dict[str, Tensors]
Results = tuple[list[tuple[dict[str, Any], Tensors]], ByName]  # of cases, and of objectives


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Results of all cases and objectives, computed by one pair of ranks."""
    path = tmp_path_factory.mktemp("zero") / "results.pt"
    run_module(2, "tests.helpers.zero_worker", str(path))
    return torch.load(path)


@pytest.fixture(scope="module")
def sharded(results: Results) -> dict[Case, Tensors]:
    return {Case(**case): result for case, result in results[0]}


@pytest.fixture(scope="module")
def unsharded() -> ByName:
    return objectives_unsharded()


@pytest.mark.slow
@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_under_zero_3(name: str, results: Results, unsharded: ByName) -> None:
    """Losses and gradients of two batches; one rank has nothing to learn from in the second."""
    want, got = unsharded[name], results[1][name]
    assert want.keys() == got.keys()
    assert len(want) > 40
    for key, value in want.items():
        assert value.abs().max() > 0
        assert relative_error(got[key], value) <= 1e-5, key


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", CASES, ids=lambda c: "-".join(f"{k}={v}" for k, v in asdict(c).items() if v != getattr(Case, k))
)  # fmt: skip
def test_sharded_training_equals_one_process(case: Case, sharded: dict[Case, Tensors]) -> None:
    """Losses, first gradients and the parameters after three AdamW steps."""
    want, got = run_unsharded(case), sharded[case]
    torch.testing.assert_close(got["losses"], want["losses"], rtol=1e-5, atol=0)
    compared = 0
    for name, value in want.items():
        if name.startswith("grad.") and case.stage == 0:
            continue  # stage 0 does not expose averaged gradients before the step
        if name.startswith(("grad.", "param.")):
            assert relative_error(got[name], value) <= 1e-5, name
            compared += 1
    assert compared > 10
    if case.frozen_head:
        assert "grad.model.lm_head.weight" not in want


@pytest.mark.slow
def test_the_probe_works_on_partitioned_weights(tmp_path: Path) -> None:
    """Two ranks under ZeRO-3 decide as one process does, and train afterwards."""
    path = tmp_path / "results"
    run_module(2, "tests.helpers.probe_worker", str(path))
    llama, opt, bloom, granite, opt_varlen = path.read_text().splitlines()
    assert (llama, opt, bloom, opt_varlen) == ("positions", "mask", "refused", "positions")
    assert granite == "head-differs"
