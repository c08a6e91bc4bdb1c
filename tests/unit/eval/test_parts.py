"""`eval --on`: the jobs for Slurm, Kubernetes and Ray, whose parts give the results of one command."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import REPO
from tests.helpers.evaluating import command
from tests.helpers.schedulers import OVERLAY, applied, stand_in, stand_in_kubectl

SBATCH = '#!/bin/sh\necho "$@" >> "$STAND_IN_CALLS"\nwc -l < "$STAND_IN_CALLS"\n'


def options(world: Path, out: Path, *more: str) -> list[str]:
    """Return a command line without demonstrations, because they need a sentence model."""
    words = ["eval", "--model", f"{world}/model", "--tasks", "trec,sst2", "--data", f"{world}/data"]
    return [*words, "--num_fewshot", "0", "--output_path", str(out), *more]


def results(out: Path) -> dict[str, Any]:
    views = [json.loads(path.read_text()) for path in (out / "models/model").glob("*.json")]
    return {view["result"]["task"]: view for view in views if "result" in view}


@pytest.fixture(scope="module")
def alone(world: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the results of a single command."""
    out = tmp_path_factory.mktemp("alone")
    assert command(*options(world, out))[0] == 0
    assert len(results(out)) == 2 and not (out / "report.html").exists()
    one = tmp_path_factory.mktemp("one")
    assert command(*options(world, one, "--tasks", "sst2", "--shard", "0/1"))[0] == 0
    assert (one / "report.html").exists()
    return results(out)


def test_the_jobs_of_slurm_give_the_same_results(
    world: Path, alone: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(tmp_path, monkeypatch, sbatch=SBATCH)
    out = tmp_path / "out"
    assert command(*options(world, out, "--on", "slurm"))[0] == 0
    first, second = (line.split("eval.sbatch ") for line in (tmp_path / "calls").read_text().splitlines())
    assert first[0].startswith("--parsable --array 0-1 --gpus-per-task 1 /")
    assert "--dependency afterok:1 " in second[0] and "gpus" not in second[0]
    words = shlex.split(first[1])
    assert second[1] == f"{first[1]} --finish"
    assert command("eval", *words, "--shard", "1/2")[0] == 0
    assert not (out / "report.html").exists()
    code, _, error = command("eval", *words, "--finish")
    assert code == 2 and "[not-shared]" in error
    assert command("eval", *words, "--shard", "0/2")[0] == 0
    code, _, error = command("eval", *words, "--limit", "4", "--finish")  # other settings
    assert code == 2 and "[not-shared]" in error
    (out / "report.html").unlink()  # written by the last part
    slurm = {"SLURM_ARRAY_TASK_ID": "0", "SLURM_ARRAY_TASK_COUNT": "1", "SLURM_SUBMIT_DIR": str(tmp_path)}
    job = ["bash", "launch/slurm/eval.sbatch", *words, "--finish"]
    subprocess.run(job, cwd=REPO, env=os.environ | slurm, check=True, capture_output=True)
    assert results(out) == alone and (out / "report.html").exists()
    gate = ("--fail_on_regression", "model", "--max_drop", "1")
    assert command(*options(world, out, *gate, "--on", "slurm"))[0] == 0
    *_, array, last = (tmp_path / "calls").read_text().splitlines()
    assert "regression" not in array and last.endswith("--fail_on_regression=model --max_drop=1.0 --finish")


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (("--data", "nowhere"), "no-task-data"),
        (("--retriever", "./nowhere"), "no-model"),
        (("--retriever", "topk", "--encoder", "./nowhere"), "no-model"),
        (("--retriever", ""), "no-model"),
        (("--num_fewshot", "100000"), "too-few-rows"),
        (("--tasks", "positions:nowhere.jsonl"), "no-text"),
    ],
)
def test_inputs_are_checked_before_jobs_are_submitted(
    more: tuple[str, ...], reason: str, world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(tmp_path, monkeypatch, sbatch=SBATCH)
    code, _, error = command(*options(world, tmp_path / "out", "--on", "slurm", *more))
    assert code == 2 and f"[{reason}]" in error and not (tmp_path / "calls").exists()


def test_kubernetes_gets_a_pod_for_each_task(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in_kubectl(tmp_path, monkeypatch)
    on = ("--on", "kubernetes", "--overlay", str(OVERLAY), "--model", "/emo/runs/model", "--data", "hub")
    code, _, error = command(*options(world, Path("results/eval"), *on))
    assert code == 2 and "/emo/runs [not-shared]" in error and not (tmp_path / "applied").exists()
    for unshared in (("--model", "/models/mine"), ("--tasks", "trec,/mine.yaml"), ("--tasks", "passkey:/a")):
        code, _, error = command(*options(world, Path("/emo/runs/out"), *on, *unshared))
        path = unshared[1].split(",")[-1].removeprefix("passkey:")
        assert code == 2 and f"{path} is not on the volume" in error
    for wrong, code in (
        (("--tasks", "trec,/emo/runs/trec.yaml"), "task"),
        (("--tasks", "/emo/runs/a.yaml,/emo/runs/a.yaml"), "task"),
        (("--tasks", "nonsense:/emo/runs/a"), "task"),
        (("--model", ""), "no-model"),
    ):
        status, _, error = command(*options(world, Path("/emo/runs/out"), *on, *wrong))
        assert status == 2 and f"[{code}]" in error
    on = (*on, "--tasks", "trec, /emo/runs/mine.yaml,")  # which only the pods can read
    assert command(*options(world, Path("/emo/runs/out"), *on))[0] == 0
    job, values, _ = applied(tmp_path)
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == 2 and values["JOBS"] == "2"
    assert job["metadata"]["name"].startswith("emo-eval-")
    expected = ["--model=/emo/runs/model", "--output_path=/emo/runs/out", "--num_fewshot=0"]
    assert {*expected} < {*shlex.split(values["ARGUMENTS"])} and "overlay" not in values["ARGUMENTS"]


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (("--on", "ray", "--shard", "0/2"), "options-clash"),
        (("--on", "slurm", "--finish"), "options-clash"),
        (("--on", "kubernetes"), "option-needs"),
        (("--overlay", "."), "option-needs"),
        (("--shard", "0/2", "--fail_on_regression", "model"), "options-clash"),
        (("--on", "slurm"), "submission"),
    ],
)
def test_mistakes_are_one_line(
    more: tuple[str, ...], reason: str, world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    code, _, error = command(*options(world, tmp_path / "out", *more))
    assert code == 2 and f"[{reason}]" in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_tasks_of_ray_give_the_same_results(world: Path, alone: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs ray")
    code, printed, _ = command(*options(world, tmp_path / "out", "--on", "ray"))
    assert code == 0 and printed.count("  n 12") == 2 and (tmp_path / "out/report.html").exists()
    assert results(tmp_path / "out") == alone
