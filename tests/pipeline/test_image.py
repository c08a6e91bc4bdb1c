"""The image as far as it can be seen unbuilt: its verbs, its health, what the Dockerfile promises."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from tests.conftest import REPO


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """The image's entry point beside stand-ins that say how they were called."""
    shutil.copy(REPO / "launch/entrypoint.sh", tmp_path)
    for name in ("continual.sh", "instruct.sh", "python"):
        (tmp_path / name).write_text(f'#!/bin/sh\necho "{name} $*"\n')
        (tmp_path / name).chmod(0o755)
    return tmp_path


def call(image: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    settings = os.environ | {"PATH": f"{image}:{os.environ['PATH']}"} | environment
    return subprocess.run([image / "entrypoint.sh", *arguments], env=settings, capture_output=True, text=True)


def test_verbs(image: Path) -> None:
    emo = "python -m emo "
    verbs = {
        "prepare": f"{emo}prepare",
        "evaluate": f"{emo}eval",
        "watch": f"{emo}watch",
        "plan": f"{emo}plan",
    }
    for verb, command in {**verbs, "continual": "continual.sh", "instruct": "instruct.sh"}.items():
        done = call(image, verb, "recipe.yaml", "data.note=two words")
        assert (done.returncode, done.stdout) == (0, f"{command} recipe.yaml data.note=two words\n")
    assert call(image, "trian").returncode == 2


def test_health_is_how_long_a_run_has_been_at_what_it_does(image: Path) -> None:
    beat = image / "heartbeat.json"

    def health() -> subprocess.CompletedProcess[str]:
        return call(image, "health", PIPELINE_HEARTBEAT=str(beat), HANG_SECONDS="100")

    assert health().returncode == 0  # nothing trains here
    for idle, code in ((10, 0), (200, 1)):
        beat.write_text(
            f'{{"time": {time.time()}, "step": 7, "doing": "saving", "since": {time.time() - idle}}}'
        )
        assert health().returncode == code
    assert re.fullmatch(r"no progress for 20\d s\n", health().stdout)
