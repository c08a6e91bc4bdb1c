"""What CONTRIBUTING.md, the workflow and the hooks say is so."""

from __future__ import annotations

import importlib
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from emo.data_prep.config import load_data_config
from emo.eval.icl.tasks import load_task
from emo.pipeline.loss.objectives import get_objective
from tests.conftest import REPO

TEXT = (REPO / "CONTRIBUTING.md").read_text()
TARGETS = set(re.findall(r"^([a-z-]+(?: [a-z-]+)*):", (REPO / "Makefile").read_text(), re.MULTILINE))


def example(name: str, directory: Path) -> Path:
    """An example, written to the file that its first line names."""
    blocks = re.findall(r"```\w+\n(# (\S+?\.\w+)[:\n].*?)```", TEXT, re.DOTALL)
    (path,) = [directory / file for _, file in blocks if file == name]
    path.write_text(next(text for text, file in blocks if file == name))
    assert len(path.read_text().strip().splitlines()) <= 10
    return path


def test_the_objective_can_be_trained_with(tmp_path: Path) -> None:
    path = example("my_objective.py", tmp_path)
    assert get_objective(f"{path}:unsure", strength=1.0).needs == {"H"}  # after a check against autograd


def test_the_task_is_one(tmp_path: Path) -> None:
    task = load_task(str(example("my_task.yaml", tmp_path)))
    assert task.labels == ["German", "French"]


def test_the_source_is_understood(tmp_path: Path) -> None:
    config = load_data_config(example("my_recipe.yaml", tmp_path), [])
    assert [source.weight for source in config.sources] == [2, 1]


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`((?:\w+\.)+[A-Z_]+|[a-z_.]+\.__all__)`", TEXT))))
def test_every_named_number_has_that_owner(name: str) -> None:
    module, _, constant = name.rpartition(".")
    assert hasattr(importlib.import_module(module), constant)


def test_every_make_target_exists() -> None:
    workflow = (REPO / ".github/workflows/test.yml").read_text()
    names = set(re.findall(r"\bmake ([a-z-]+)", TEXT + workflow)) - {"it"}
    assert names and names <= {word for line in TARGETS for word in line.split()}


def test_every_link_leads_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", TEXT + (REPO / "CHANGELOG.md").read_text()):
        assert target.startswith("https://") or (REPO / target).exists(), target


def test_workflow_and_templates_are_whole() -> None:
    files = [*(REPO / ".github").rglob("*.yml"), REPO / ".pre-commit-config.yaml", REPO / "CITATION.cff"]
    trees: dict[str, Any] = {path.name: yaml.safe_load(path.read_text()) for path in files}
    steps = [s for job in trees["test.yml"]["jobs"].values() for s in job["steps"]]
    assert any(step.get("run") == ".ci/run" for step in steps)
    for name in ("fault.yml", "wish.yml"):
        assert {"name", "description", "body"} <= trees[name].keys()
        assert all("label" in part["attributes"] for part in trees[name]["body"])
    assert trees["CITATION.cff"]["cff-version"] == "1.2.0"


def test_the_hooks_can_be_run() -> None:
    for hook in yaml.safe_load((REPO / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]:
        command = hook["entry"].split()
        assert command[0].startswith(".venv/bin/")
        if (REPO / command[0]).exists():
            done = subprocess.run([REPO / command[0], "--version"], cwd=REPO, capture_output=True)
            assert done.returncode == 0, hook["id"]
