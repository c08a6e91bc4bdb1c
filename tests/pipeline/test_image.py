"""The image as far as it can be seen unbuilt: its verbs, its health, what the Dockerfile promises."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
import tomllib
from pathlib import Path

import pytest

from common import __version__
from pipeline.stop import REQUESTS
from tests.conftest import REPO

DOCKERFILE = (REPO / "Dockerfile").read_text()
VERBS = ["prepare", "continual", "instruct", "evaluate", "watch", "plan", "quickstart"]


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """The image's entry point beside stand-ins that say how they were called."""
    shutil.copy(REPO / "launch/entrypoint.sh", tmp_path)
    for name in ("continual.sh", "instruct.sh", "python"):
        (tmp_path / name).write_text(f'#!/bin/sh\necho "{name} $*"\n')
        (tmp_path / name).chmod(0o755)
    return tmp_path


def call(image: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    given = os.environ | {"PATH": f"{image}:{os.environ['PATH']}"} | environment
    return subprocess.run([image / "entrypoint.sh", *arguments], env=given, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("verb", "command"),
    [
        ("prepare", "python -m data_prep prepare"),
        ("continual", "continual.sh"),
        ("instruct", "instruct.sh"),
        ("evaluate", "python -m eval run"),
        ("watch", "python -m eval watch"),
        ("plan", "python -m pipeline plan"),
    ],
)
def test_verbs(image: Path, verb: str, command: str) -> None:
    done = call(image, verb, "recipe.yaml", "data.note=two words")
    assert (done.returncode, done.stdout) == (0, f"{command} recipe.yaml data.note=two words\n")


def test_quickstart(image: Path) -> None:
    assert call(image, "quickstart").stdout.strip() == f"python {image}/quickstart.py"


def test_a_wrong_verb_is_one_line(image: Path) -> None:
    done = call(image, "train", "recipe.yaml")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == f"error: no verb train; there are {' | '.join(VERBS)}\n"
    assert call(image).stdout == call(image, "help").stdout
    assert " | ".join(VERBS) in call(image).stdout


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


def test_a_start_that_hangs_before_its_first_heartbeat_is_not_healthy(image: Path) -> None:
    beat = image / "heartbeat.json"
    given = {"PIPELINE_HEARTBEAT": str(beat), "HANG_SECONDS": "1"}
    assert call(image, "prepare", "recipe.yaml", **given).returncode == 0 and not beat.exists()
    assert call(image, "continual", "recipe.yaml", **given).returncode == 0
    assert call(image, "health", PIPELINE_HEARTBEAT=str(beat)).returncode == 0
    time.sleep(2.1)
    assert call(image, "health", **given).returncode == 1


def argument(name: str) -> str:
    """What an ARG of the Dockerfile is unless given."""
    found = re.search(rf"^ARG {name}=(.*)$", DOCKERFILE, re.MULTILINE)
    assert found
    return found[1].strip('"')


def locked(package: str) -> str:
    found = re.search(rf"^{package}==([^\s;+]+)", (REPO / "requirements.lock").read_text(), re.MULTILINE)
    assert found
    return found[1]


def test_what_the_dockerfile_says_of_the_packages_is_what_is_locked() -> None:
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    assert argument("BASE") == "debian:bookworm-slim"  # whose Python is 3.11, as the Dockerfile says
    assert project["requires-python"] == ">=3.11"
    assert f"torch {'.'.join(locked('torch').split('.')[:2])} " in DOCKERFILE
    assert f'image.version="{__version__}"' in DOCKERFILE
    assert f'image.licenses="{project["license"]}"' in DOCKERFILE
    assert "flash" not in (REPO / "requirements.lock").read_text()


def test_what_runs_in_the_image_needs_is_installed() -> None:
    found = re.search(r"--no-install-recommends((?:[^&])+)&&", DOCKERFILE)
    assert found
    packages = set(found[1].replace("\\", "").split())
    assert {"libibverbs1", "ibverbs-providers"} <= packages  # what NCCL loads for InfiniBand
    assert {"tini", "g++", "python3-dev", "libaio-dev", "openssh-client", "pdsh", "make"} <= packages


def test_stopping_it_is_a_request_to_stop() -> None:
    (name,) = re.findall(r"^STOPSIGNAL (\w+)$", DOCKERFILE, re.MULTILINE)
    assert name in {request.name for request in REQUESTS}


def test_nothing_runs_as_root_and_a_user_is_a_number() -> None:
    """Kubernetes refuses an image with runAsNonRoot whose user is a name."""
    assert re.findall(r"^USER (.*)$", DOCKERFILE, re.MULTILINE) == ["1001"]
    assert "--uid 1001" in DOCKERFILE
