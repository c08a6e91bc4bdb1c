"""Two real ranks under DeepSpeed against one unsharded process, for every objective and set-up."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from tests.conftest import REPO
from tests.helpers.loss_reference import relative_error
from tests.helpers.zero_worker import CASES, Case, run_unsharded


def run_ranks(module: str, *arguments: str, ranks: int = 2, timeout: float = 300) -> None:
    """Run `python -m module arguments` as `ranks` processes of one group; fail with their output."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes, logs = [], []
    for rank in range(ranks):
        environment = os.environ | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "DS_ACCELERATOR": "cpu",
            "OMP_NUM_THREADS": "1",
            # DeepSpeed's just-in-time build looks for ninja beside the interpreter
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        }
        log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (read after the process has ended)
        command = [sys.executable, "-m", module, *arguments]
        processes.append(
            subprocess.Popen(command, cwd=REPO, env=environment, stdout=log, stderr=subprocess.STDOUT)
        )
        logs.append(log)
    end = time.monotonic() + timeout
    while any(p.poll() is None for p in processes) and time.monotonic() < end:
        if any(p.poll() for p in processes):  # the other rank would wait for it in vain
            break
        time.sleep(0.1)
    finished = [p.poll() for p in processes]
    for process in processes:
        process.kill()
        process.wait()
    for rank, (code, log) in sorted(enumerate(zip(finished, logs, strict=True)), key=lambda r: not r[1][0]):
        log.seek(0)
        assert code == 0, f"rank {rank} failed ({code}):\n{log.read()[-3000:]}"


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> dict[Case, dict[str, torch.Tensor]]:
    """Results of all cases, trained by one pair of ranks."""
    path = tmp_path_factory.mktemp("zero") / "results.pt"
    run_ranks("tests.helpers.zero_worker", str(path))
    return {Case(**case): result for case, result in torch.load(path)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", CASES, ids=lambda c: "-".join(f"{k}={v}" for k, v in asdict(c).items() if v != getattr(Case, k))
)  # fmt: skip
def test_sharded_training_equals_one_process(
    case: Case, sharded: dict[Case, dict[str, torch.Tensor]]
) -> None:
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
    """Two ranks under ZeRO-3 find what one process finds, and train afterwards."""
    # defects A1, A2
    path = tmp_path / "found"
    run_ranks("tests.helpers.probe_worker", str(path))
    llama, opt, bloom, granite = path.read_text().splitlines()
    assert (llama, opt, bloom) == ("positions", "mask", "refused")
    assert "does something to its logits that the fused head does not know" in granite
