"""Stand-ins for the command-line clients of schedulers."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.campaigns.kubernetes import Document, installed_kustomize, render
from tests.conftest import REPO

OVERLAY = REPO / "launch/k8s/overlays/cluster"


def stand_in(directory: Path, monkeypatch: pytest.MonkeyPatch, **commands: str) -> None:
    """Write executable commands to `directory`, and put it first on PATH."""
    for name, text in commands.items():
        (directory / name).write_text(text)
        (directory / name).chmod(0o755)
    path = f"{directory}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    monkeypatch.setenv("PATH", path)
    monkeypatch.setenv("STAND_IN_CALLS", str(directory / "calls"))


def stand_in_kubectl(directory: Path, monkeypatch: pytest.MonkeyPatch) -> list[Document]:
    """Let `kubectl apply` write the file `applied`. Return the documents of OVERLAY, or skip the test."""
    kustomize = installed_kustomize()
    if kustomize is None:
        pytest.skip("needs kustomize or kubectl")
    documents = render(OVERLAY, kustomize)
    (directory / "rendered.yaml").write_text(yaml.safe_dump_all(documents))
    text = f"[ $1 = kustomize ] && exec cat {directory}/rendered.yaml\ncat > {directory}/applied\n"
    stand_in(directory, monkeypatch, kubectl=f"#!/bin/sh\n{text}")
    return documents


def applied(directory: Path) -> tuple[Document, dict[str, Any], list[Document]]:
    """Return the applied job, the environment of its pods, and all applied documents."""
    documents: list[Document] = list(yaml.safe_load_all((directory / "applied").read_text()))
    (job,) = (tree for tree in documents if tree["kind"] == "Job")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    return job, {entry["name"]: entry.get("value") for entry in container["env"]}, documents
