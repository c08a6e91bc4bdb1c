"""Preflight on this host: what is well, and what is not."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.helpers import launching


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return launching.tiny_recipe(tmp_path_factory.mktemp("tiny"))


def preflight(ranks: int, *arguments: str, limit: str = "") -> subprocess.CompletedProcess[str]:
    launcher = [f"{launching.BIN}/deepspeed", f"--num_gpus={ranks}", f"--master_port={launching.free_port()}"]
    command = [*launcher, "--module"] if ranks > 1 else [f"{launching.BIN}/python", "-m"]
    return subprocess.run(
        ["bash", "-c", f'{limit} exec "$@"', "sh", *command, "pipeline", "preflight", *arguments],
        cwd=launching.REPO,
        env=launching.ENVIRONMENT | {"COLUMNS": "200"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )


def test_a_fit_host(recipe: Path, tmp_path: Path) -> None:
    done = preflight(2, str(recipe), f"run_dir={tmp_path / 'run'}")
    assert done.returncode == 0, done.stdout
    for check in (
        "GPUs",
        "C compiler",
        "threads",
        "2 ranks",
        "/dev/shm",
        "open files",
        "run directory",
        "versions",
        "clock",
        "all-reduce",
    ):
        assert check in done.stdout, done.stdout
    assert not (tmp_path / "run").exists()  # nothing stays behind


def test_an_unfit_host(recipe: Path, tmp_path: Path) -> None:
    arguments = [str(recipe), f"run_dir={tmp_path / 'run'}", f"data.dir={tmp_path / 'none'}"]
    done = preflight(1, *arguments, limit="ulimit -n 1000;")
    assert done.returncode == 1, done.stdout
    assert "ulimit -n" in done.stdout
    assert "cannot start" in done.stdout and "python -m data_prep prepare" in done.stdout


def test_a_recipe_that_cannot_start(recipe: Path, tmp_path: Path) -> None:
    """defects D4: preflight passed recipes that training refused."""
    done = preflight(1, str(recipe), f"run_dir={tmp_path / 'run'}", "objective.name=emoo")
    assert done.returncode == 1, done.stdout
    assert "cannot start" in done.stdout and "did you mean emo" in done.stdout


def test_a_run_directory_that_cannot_be(recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = preflight(1, str(recipe), f"run_dir={tmp_path / 'file' / 'run'}")
    assert done.returncode == 1, done.stdout
    assert "set run_dir to where you may write" in done.stdout
