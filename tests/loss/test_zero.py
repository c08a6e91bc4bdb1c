"""Two real ranks under DeepSpeed against one unsharded process, for every set-up and every objective."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.helpers.launching import run_module
from tests.helpers.loss_reference import relative_error
from tests.helpers.zero_worker import CASES, run_unsharded


@pytest.mark.slow
def test_sharded_training_equals_one_process(tmp_path: Path) -> None:
    """Losses, first gradients and parameters after three AdamW steps; in the second a rank has no labels."""
    run_module(2, "tests.helpers.zero_worker", str(tmp_path / "results.pt"))
    for case, got in zip(CASES, torch.load(tmp_path / "results.pt"), strict=True):
        want = run_unsharded(case)
        torch.testing.assert_close(got["losses"], want["losses"], rtol=1e-5, atol=0)
        # stage 0 does not expose averaged gradients before the step
        compared = [n for n in want if n.startswith("param.") or (n.startswith("grad.") and case.stage)]
        assert len(compared) > 10 and ("grad.model.lm_head.weight" in want) != (case.frozen_head or case.tied)
        for name in compared:
            assert relative_error(got[name], want[name]) <= 1e-5, (case, name)


@pytest.mark.slow
def test_the_probe_works_on_partitioned_weights(tmp_path: Path) -> None:
    """Two ranks under ZeRO-3 decide as one process does, and train afterwards."""
    path = tmp_path / "results"
    run_module(2, "tests.helpers.zero_worker", str(path), "probe")
    assert torch.load(path) == ["positions", "mask", "refused", "head-differs", "positions"]
