"""`prepare --on` submits jobs to Slurm and Kubernetes, and tasks of Ray make the same bytes."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import yaml

from emo.data_prep.cli import main
from emo.data_prep.config import DataConfig
from emo.data_prep.on_ray import RayPreparation, prepare_on_ray
from emo.data_prep.prepare import prepare
from emo.data_prep.selection import row_units
from emo.data_prep.shards.costs import read_costs
from emo.data_prep.shards.format import TokenDataset
from tests.campaigns.kubernetes import problems
from tests.conftest import REPO
from tests.helpers.corpus import data_config, file_bytes, run, texts, tiny_tokenizer, write_jsonl
from tests.helpers.refusals import refused
from tests.helpers.schedulers import OVERLAY, applied, stand_in, stand_in_kubectl

# A stand-in for sbatch that runs the tasks of an array at once, as this user, and prints a job number. It
# counts tasks from 1, as some sites prefer.
SBATCH = """#!/bin/bash
echo "$@" >> "$STAND_IN_CALLS"
while [ $# -gt 0 ]; do
    case $1 in
        --array) array=$2; shift ;;
        --dependency | --cpus-per-task) shift ;;
        --*) ;;
        *) break ;;
    esac
    shift
done
export SLURM_ARRAY_TASK_MIN=1 SLURM_CPUS_PER_TASK=1 SLURM_SUBMIT_DIR=$PWD
export SLURM_ARRAY_TASK_COUNT=$((${array#*-} - ${array%-*} + 1))
for ((i = 1; i <= SLURM_ARRAY_TASK_COUNT; i++)); do
    SLURM_ARRAY_TASK_ID=$i bash "$@" > /dev/null || exit
done
echo "$((16 + $(wc -l < "$STAND_IN_CALLS")));cluster"
"""


def recipe_in(root: Path) -> Path:
    recipe = root / "recipe.yaml"
    data = {"dir": str(root / "out"), "root": str(root), "tokenizer": str(tiny_tokenizer())}
    data |= {"sequence_len": 64, "sources": [{"files": "a.jsonl"}]}
    recipe.write_text(yaml.safe_dump({"data": data}))
    return recipe


def test_slurm_gets_an_array_and_the_job_that_completes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_jsonl(tmp_path / "a.jsonl", texts(60))
    stand_in(tmp_path, monkeypatch, sbatch=SBATCH)
    recipe = str(recipe_in(tmp_path))
    options = ["prepare", recipe, "data.shards=2", "--on", "slurm", "--jobs", "2", "--workers", "3"]
    assert main(options) == 0
    first, second = (tmp_path / "calls").read_text().splitlines()
    script = f"{REPO}/launch/slurm/prepare.sbatch {recipe} data.shards=2"
    assert first == f"--parsable --array 0-1 --cpus-per-task 3 {script}"
    after = "--parsable --dependency afterok:17 --kill-on-invalid-dep=yes --array 0 --cpus-per-task 1"
    assert second == f"{after} {script} --finish"
    assert "job 17 of 2 tasks, then job 18" in capsys.readouterr().out
    assert len(TokenDataset(tmp_path / "out/train").manifest.shards) == 2


def test_what_slurm_rejects_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["prepare", str(recipe_in(tmp_path)), "--on", "slurm"]
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(command) == 2
    stand_in(tmp_path, monkeypatch, sbatch="#!/bin/sh\necho 'invalid account' >&2\nexit 1\n")
    assert main(command) == 1
    full = "#!/bin/sh\ncase $* in *--finish*) echo 'limit of jobs' >&2; exit 1;; *) echo 17;; esac\n"
    stand_in(tmp_path, monkeypatch, sbatch=full, scancel='#!/bin/sh\necho "$@" > "$STAND_IN_CALLS"\n')
    assert main(command) == 1 and (tmp_path / "calls").read_text() == "17\n"  # no array without an end
    for options, code in (
        (["--force"], "options-clash"),
        (["--shard", "0/2"], "options-clash"),
        (["--finish"], "options-clash"),
    ):
        assert main([*command, *options]) == 2
        assert f"[{code}]" in capsys.readouterr().err.splitlines()[-1]
    assert main([*command[:2], "--on", "kubernetes"]) == main([*command[:2], "--jobs", "3"]) == 2


def test_kubernetes_gets_a_job_with_the_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The job has the pods of the overlay, as many as --jobs, and a config map with recipe and overrides."""
    documents = stand_in_kubectl(tmp_path, monkeypatch)
    options = ["--on", "kubernetes", "--jobs", "3", "--workers", "5", "--overlay", str(OVERLAY)]
    command = ["prepare", str(recipe_in(tmp_path)), "data.shards=6", *options]
    assert main(command) == 2 and "[not-shared]" in capsys.readouterr().err
    assert main([*command, "data.dir=runs/data"]) == 0
    job, values, everything = applied(tmp_path)
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["requests"]["cpu"] == "5"
    name = job["metadata"]["name"]
    (settings,) = (tree for tree in everything if tree["metadata"]["name"] == f"{name}-recipe")
    assert yaml.safe_load(settings["data"]["recipe.yaml"])["data"]["shards"] == 6
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == 3
    assert {"ConfigMap", "PersistentVolumeClaim", "NetworkPolicy"} <= {tree["kind"] for tree in everything}
    others = [tree for tree in documents if tree["metadata"]["name"] != "emo-prepare"]
    (common,) = (tree for tree in others if tree["metadata"]["name"] == "emo-settings")
    common["data"]["JOBS"] = "3"
    plain = job | {"metadata": job["metadata"] | {"name": "emo-prepare"}}
    assert problems([*others, plain]) == []
    assert values["RECIPE"] == "/recipe/recipe.yaml" and values["JOBS"] == "3" and values["OVERRIDES"] == ""
    assert main([*command, "data.dir=runs/data", "data.shards=7"]) == 0
    assert applied(tmp_path)[0]["metadata"]["name"] != name  # the first job may still read its recipe


# --- Ray --------------------------------------------------------------------------------------------------


def many_units(root: Path, name: str, **data: Any) -> DataConfig:
    """Return a configuration of eight sources, which are separate units because each has a limit."""
    for i in range(8):
        write_jsonl(root / f"{i}.jsonl", texts(300, seed=i, sentences=20))
    sources = [{"files": f"{i}.jsonl", "limit": 250} for i in range(8)]
    common = {"sources": sources, "shards": 4, "validation_fraction": 0.2, "dedup": "near"}
    return data_config(root, **(common | {"dir": str(root / name)} | data))


def kill_one(prefix: str, killed: list[int]) -> None:
    """Send SIGKILL to the first child of this process whose title begins with `prefix`."""
    deadline = time.monotonic() + 60
    while not killed and time.monotonic() < deadline:
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):  # it has just ended
                if (process.cmdline() or [""])[0].startswith(prefix):
                    process.send_signal(signal.SIGKILL)
                    killed.append(process.pid)
                    break
        time.sleep(0.005)


def test_tasks_share_the_selection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tasks are called in this process instead of by Ray."""
    config = many_units(tmp_path, "tasks", limit_tokens=50_000)
    run(config.model_copy(update={"dir": tmp_path / "alone"}))
    monkeypatch.setattr(row_units, "UNIT_ROWS", 200)
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(cluster_resources=lambda: {"CPU": 3.0}))
    calls: list[str] = []

    def run_tasks(
        job: RayPreparation, function: Callable[..., Any], numbers: Iterable[int], *arguments: Any
    ) -> Iterator[tuple[int, Any]]:
        for number in numbers:
            calls.append(function.__name__)
            yield number, function(job.config.model_dump_json(), number, *arguments)

    monkeypatch.setattr(RayPreparation, "_run_tasks", run_tasks)
    prepare(config, (0, 1), 1, False, False, lambda line: None, RayPreparation)
    assert calls.count("_select") == 2 * 3 and file_bytes(config.dir) == file_bytes(tmp_path / "alone")
    assert read_costs(config.dir)


def test_tasks_of_ray_make_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of two workers is killed while it reads. The command reports the error of a task."""
    pytest.importorskip("ray", reason="needs ray")
    run(many_units(tmp_path, "alone"))
    killed: list[int] = []
    thread = threading.Thread(target=kill_one, args=("ray::_make_part", killed))
    thread.start()
    config = many_units(tmp_path, "ray")
    messages: list[str] = []
    prepare_on_ray(config, 2, False, messages.append)
    thread.join()
    assert len(killed) == 1 and file_bytes(config.dir) == file_bytes(tmp_path / "alone")
    assert not (config.dir / ".new").exists()
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with refused("unreachable"):
        prepare_on_ray(config, 2, False, messages.append)
    monkeypatch.delenv("RAY_ADDRESS")
    (tmp_path / "3.jsonl").write_text("{\n")
    with refused("broken-row"):
        prepare_on_ray(config.model_copy(update={"dir": tmp_path / "broken"}), 2, False, messages.append)
