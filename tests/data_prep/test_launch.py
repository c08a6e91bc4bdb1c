"""The cluster files start `prepare` with one command per index; together the jobs make the data set."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from emo.data_prep.shards import TokenDataset
from emo.data_prep.verify import verify
from tests.conftest import REPO
from tests.helpers.corpus import texts, tiny_tokenizer, write_jsonl


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    write_jsonl(tmp_path / "a.jsonl", ({"text": text} for text in texts(300)))
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"data: {{dir: {tmp_path / 'out'}, root: {tmp_path}, tokenizer: {tiny_tokenizer()}, "
        "sources: [{files: a.jsonl}], sequence_len: 32, shards: 5}"
    )
    return path


def together(commands: list[tuple[list[str], dict[str, str]]]) -> None:
    """Run them at the same time; all must succeed."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    running = [
        subprocess.Popen(
            command,
            cwd=REPO,
            env=os.environ | {"PATH": path} | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for command, environment in commands
    ]
    said = [process.communicate(timeout=120)[0] for process in running]
    assert [process.returncode for process in running] == [0] * len(running), said


def whole(recipe: Path) -> bool:
    out = recipe.parent / "out"
    return len(TokenDataset(out / "train").manifest.shards) == 5 and verify(out)[1] == []


def test_slurm_array(recipe: Path) -> None:
    """An array that starts at 1, as some sites like it."""
    script = ["bash", "launch/slurm/prepare.sbatch", str(recipe), "data.seed=0"]
    slurm = {"SLURM_ARRAY_TASK_COUNT": "3", "SLURM_ARRAY_TASK_MIN": "1", "SLURM_CPUS_PER_TASK": "1"}
    together([(script, slurm | {"SLURM_ARRAY_TASK_ID": str(i)}) for i in (1, 2, 3)])
    assert whole(recipe)


def test_kubernetes_indexed_job(recipe: Path, tmp_path: Path) -> None:
    base = REPO / "launch/k8s/base"
    spec = yaml.safe_load((base / "prepare.yaml").read_text())["spec"]
    literals = yaml.safe_load((base / "kustomization.yaml").read_text())["configMapGenerator"][0]["literals"]
    settings = dict(literal.split("=") for literal in literals)
    (container,) = spec["template"]["spec"]["containers"]
    assert spec["completionMode"] == "Indexed"
    assert settings["JOBS"] == str(spec["completions"])
    assert (REPO / settings["RECIPE"]).is_file()
    tini = tmp_path / "tini"
    tini.write_text('#!/bin/sh\nshift\nexec "$@"\n')
    tini.chmod(0o755)
    command = [str(tini), *container["command"][1:], *container["args"]]
    given = {"RECIPE": str(recipe), "JOBS": "3", "CPUS": "1"}
    together([(command, given | {"JOB_COMPLETION_INDEX": str(i)}) for i in range(3)])
    assert whole(recipe)
