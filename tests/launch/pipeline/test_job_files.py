"""Tests of the job files for Slurm and Kubernetes, the image's health check, and the quickstart."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

import emo.launch.quickstart as quickstart
from emo.common.errors import ExitCode
from emo.launch.supervise import read_reports, run_exit_code
from emo.pipeline.config import load_config
from tests.campaigns.kubernetes import Document, installed_kustomize, problems, render, targets
from tests.conftest import REPO
from tests.helpers import launching

# Stand-ins for Slurm's commands. STAND_IN_REPORTS has the ranks' reports, such as "rank-0=2 rank-1=".
SRUN = """#!/bin/bash
if [[ $* = *" preflight "* ]]; then
    echo "$STAND_IN_TABLE"
    [ -z "$STAND_IN_TABLE" ]
    exit
fi
for one in $STAND_IN_REPORTS; do
    words=${one#*=}
    echo "4711 ${words/@/ }" > "$PIPELINE_RANK_REPORTS/${one%%=*}"
done
exit "$STAND_IN_CODE"
"""
SCONTROL = """#!/bin/bash
case $1 in
    show) [ "$2" = hostnames ] && printf 'node-1\nnode-2\n' && exit
        printf '   ReqNodeList=(null) ExcNodeList=%s\n' "$STAND_IN_EXCLUDED"
        printf '   Command=%s a b\n' "$STAND_IN_COMMAND" "another task" ;;
    requeue) touch "$SLURM_SUBMIT_DIR/requeued" ;;
    update) echo "$@" > "$SLURM_SUBMIT_DIR/updated" ;;
esac
"""


def run_job(directory: Path, code: int, reports: str = "", **environment: str) -> int:
    """Run train.sbatch with the stand-ins, which write files to `directory`, and return the exit code."""
    for command, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (directory / command).write_text(text)
        (directory / command).chmod(0o755)
    job = REPO / "launch/slurm/train.sbatch"
    settings = {"SLURM_SUBMIT_DIR": str(directory), "SLURM_JOB_ID": "17", "SLURM_CPUS_PER_TASK": "12"}
    settings |= {"SLURM_NTASKS": "16", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "node-[1-2]"}
    settings |= {"STAND_IN_CODE": str(code), "STAND_IN_REPORTS": reports, "STAND_IN_COMMAND": str(job)}
    settings |= {"STAND_IN_EXCLUDED": "(null)", "PATH": f"{directory}:{os.environ['PATH']}"}
    spooled = shutil.copy(job, directory / "slurm_script")  # slurmd runs a copy
    command = ["bash", spooled, "continual", "recipe.yaml"]
    return subprocess.run(command, env=os.environ | settings | environment, timeout=60).returncode


@pytest.mark.parametrize(
    ("srun", "reports", "expected", "again"),
    [
        (0, "rank-0=0 rank-1=0", 0, False),
        (134, "rank-0=2 rank-1=", 2, False),  # rank 1 was aborted after the mistake of rank 0
        (137, "rank-0= rank-1=", 137, True),  # killed with its node, or for its memory
        (75, "rank-0=75 rank-1=75", 75, True),
        (1, "", 1, True),  # no rank could write a report
        (134, "rank-0=1@node-2 rank-1=", 134, True),  # a GPU of node-2 failed
        (2, "rank-0=2 rank-1=1@node-2", 1, True),  # rank 0 took the failure of rank 1 for a mistake
    ],
)
def test_which_ends_of_training_are_queued_again(
    tmp_path: Path, srun: int, reports: str, expected: int, again: bool
) -> None:
    assert run_job(tmp_path, srun, reports) == expected
    assert (tmp_path / "requeued").exists() == again
    updated = tmp_path / "updated"
    assert updated.exists() == ("@" in reports)
    if updated.exists():
        assert updated.read_text().strip() == "update JobId=17 ExcNodeList=node-2"
    assert not list((tmp_path / "runs").glob(".ranks-*"))


@pytest.mark.parametrize(
    ("table", "expected", "excluded"),
    [("", 0, ""), ("a host is slow\nunfit: node-2,node-7", 1, "node-2,node-7"), ("the disk is full", 2, "")],
)
def test_nodes_that_preflight_calls_unfit_are_left_out(
    tmp_path: Path, table: str, expected: int, excluded: str
) -> None:
    job = {"PREFLIGHT": "1", "STAND_IN_TABLE": table}
    assert run_job(tmp_path, 0, "rank-0=0 rank-1=0", **job) == expected
    assert (tmp_path / "requeued").exists() == bool(excluded)
    updated = tmp_path / "updated"
    assert (updated.read_text().rpartition("=")[2].strip() if updated.exists() else "") == excluded


def test_failures_in_a_row_are_queued_again_so_many_times(tmp_path: Path) -> None:
    """A job that was stopped to make room is queued again however often that happens."""
    again = []
    for code in (1, 75, 1, 1, 1):
        (tmp_path / "requeued").unlink(missing_ok=True)
        assert run_job(tmp_path, code, SLURM_RESTART_COUNT="30", RETRIES="2") == code
        again.append((tmp_path / "requeued").exists())
    assert again == [True, True, True, True, False] and not list((tmp_path / "runs").iterdir())


def test_evaluation_comes_back_with_the_options_it_was_given(tmp_path: Path) -> None:
    """The options come from the job's environment and from scontrol, and missing ones are omitted."""
    shown = "   Account=team QOS=(null) Partition=a100\n   NumNodes=2-2 TimeLimit=02:30:00 Features=(null)\n"
    shown += f"   ExcNodeList=node-9\n   Command={REPO}/launch/slurm/evaluate.sbatch a b\n"
    for command, text in (
        ("srun", "exit 0"),
        ("scontrol", 'printf "%s" "$STAND_IN_SHOWN"'),
        ("sbatch", 'printf "%s\\n" "$@" > "$SLURM_SUBMIT_DIR/submitted"'),
    ):
        (tmp_path / command).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / command).chmod(0o755)
    job = {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_ID": "17", "EVERY": "20", "STAND_IN_SHOWN": shown}
    job |= {"SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_QOS": "high", "SLURM_MEM_PER_CPU": "4096"}
    job |= {
        "SLURM_GPUS_PER_TASK": "1",
        "SLURM_CPUS_PER_TASK": "8",
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
    }
    spooled = shutil.copy(REPO / "launch/slurm/evaluate.sbatch", tmp_path / "slurm_script")
    command = ["bash", spooled, "runs/emo", "/data", "--tasks", "sst2,my task"]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("SLURM")}
    assert subprocess.run(command, env=environment | job, timeout=60).returncode == 0
    words = (tmp_path / "submitted").read_text().splitlines()
    script = words.index(f"{REPO}/launch/slurm/evaluate.sbatch")
    given = ["account=team", "partition=a100", "qos=high", "exclude=node-9", "time=02:30:00", "nodes=2"]
    given += ["gpus-per-task=1", "cpus-per-task=8", "mem-per-cpu=4096", "begin=now+20minutes"]
    assert sorted(words[:script]) == sorted(f"--{option}" for option in given)
    assert words[script + 1 :] == ["runs/emo", "/data", "--tasks", "sst2,my task"]


@pytest.mark.parametrize("has_python", [True, False])
def test_without_the_packages_the_launch_script_says_so(tmp_path: Path, has_python: bool) -> None:
    """The script prints one line that names `make setup`, and no traceback."""
    for name in ("sh", "env"):
        (tmp_path / name).symlink_to(str(shutil.which(name)))
    if has_python:  # without its packages
        (tmp_path / "python").write_text(f'#!/bin/sh\nexec "{sys.base_exec_prefix}/bin/python3" -S "$@"\n')
        (tmp_path / "python").chmod(0o755)
    (tmp_path / "launch").mkdir()
    for name in ("continual.sh", "python.sh", "supervise.py"):
        shutil.copy(REPO / "launch" / name, tmp_path / "launch" / name)
    for name in ("emo", "common", "pipeline", "data_prep"):
        (tmp_path / name).symlink_to(REPO / name)
    (tmp_path / "launch/__init__.py").touch()
    environment = {"PATH": str(tmp_path), "PYTHONNOUSERSITE": "1"}
    command = ["sh", "launch/continual.sh", "recipe.yaml"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == ExitCode.MISTAKE and len(done.stderr.splitlines()) == 1
    assert "make setup" in done.stderr


def under_kubernetes(code: int, file: str = "launch/k8s/base/train.yaml") -> str:
    """Return the action of the first rule of the job in a file that matches an exit code."""
    documents = yaml.safe_load_all((REPO / file).read_text())
    (job,) = (entry for entry in documents if entry["kind"] == "Job")
    rules = job["spec"]["podFailurePolicy"]["rules"]
    fitting = (rule for rule in rules if code in rule.get("onExitCodes", {}).get("values", []))
    return str(next(fitting, {"action": "Count"})["action"])


def test_kubernetes_starts_again_what_may_pass() -> None:
    expected = {1: "Count", 2: "FailJob", 75: "Ignore", 134: "Count", 137: "Count"}
    for file in ("launch/k8s/base/train.yaml", "experiments/jobs/kubernetes.yaml"):
        assert {code: under_kubernetes(code, file) for code in expected} == expected


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return launching.tiny_recipe(tmp_path_factory.mktemp("faults"))


FAULTS = {"device": (1, "node-7"), "nccl": (1, ""), "mistake": (2, "")}  # exit code and node, if known
TRIED = [("device", "starting")]
TRIED += [("device", "step"), ("mistake", "step"), ("nccl", "loading"), ("nccl", "saving")]


@pytest.mark.parametrize(("fault", "phase"), TRIED)
def test_a_fault_of_every_class_under_every_launcher(
    recipe: Path, tmp_path: Path, fault: str, phase: str
) -> None:
    """The supervisor and the job files of Slurm and Kubernetes retry hardware faults, but not mistakes.

    If the faulty node is known, Slurm excludes it.
    """
    expected, node = FAULTS[fault]
    (reports := tmp_path / "reports").mkdir()
    options = [str(recipe), f"output_dir={tmp_path / 'run'}", "train.max_steps=3", "train.save_steps=2"]
    command = ["-m", "tests.helpers.saving_worker", f"{fault}@{phase}", *options]
    done = launching.run_ranks(*command, PIPELINE_RANK_REPORTS=str(reports), SLURMD_NODENAME="node-7")
    ranks = read_reports(reports)
    codes = [rank.code for rank in ranks]
    assert max(code or 0 for code in codes) == codes[1] == expected, done.stdout
    assert {rank.node for rank in ranks} - {""} == {node} - {""}, done.stdout
    code = run_exit_code(1, codes, requested=False)
    assert code == expected
    assert under_kubernetes(code) == ("Count" if expected == 1 else "FailJob")
    lines = " ".join(f"{r.file.name}={r.code}" + f"@{r.node}" * bool(r.node) for r in ranks)
    assert run_job(tmp_path, expected, lines) == expected
    assert (tmp_path / "requeued").exists() == (expected == 1)
    updated = tmp_path / "updated"
    assert (updated.read_text().split("=")[-1].strip() if updated.exists() else "") == node


@pytest.mark.parametrize("target", targets(), ids=lambda path: path.name)
def test_kustomize_renders_what_agrees(target: Path, tmp_path: Path) -> None:
    command = installed_kustomize()
    if command is None:
        pytest.skip("needs the network: make cluster-test fetches kustomize")
    assert problems(render(target, command)) == []
    base = os.path.relpath(REPO / "launch/k8s", tmp_path.resolve())
    elsewhere = (target / "kustomization.yaml").read_text().replace("../..", base)
    if target.parent.name == "overlays":  # as in a site's separate repository
        (tmp_path / "kustomization.yaml").write_text(elsewhere)
        assert render(tmp_path, command) == render(target, command)


@pytest.fixture(scope="module")
def rendered() -> dict[str, list[Document]]:
    """Return the documents of every target by its name."""
    if (command := installed_kustomize()) is None:
        pytest.skip("needs kustomize or kubectl")
    return {target.name: render(target, command) for target in targets()}


def test_two_runs_share_a_namespace(rendered: dict[str, list[Document]]) -> None:
    """Two runs share only the volume claim, and neither's service or policy selects the other's pods."""
    first, second = (
        {(d["kind"], d["metadata"]["name"]): d for d in rendered[name]} for name in ("cluster", "second-run")
    )
    assert not first.keys() & second.keys()
    assert {d["metadata"]["namespace"] for d in (*first.values(), *second.values())} == {"emo"}
    assert [kind for kind, _ in first if kind == "PersistentVolumeClaim"] == ["PersistentVolumeClaim"]
    assert "PersistentVolumeClaim" not in {kind for kind, _ in second}
    for documents, other in ((first, second), (second, first)):
        text = yaml.safe_dump_all(documents.values())
        (train,) = (name for kind, name in documents if kind == "Job" and name.endswith("train"))
        (stranger,) = (name for kind, name in other if kind == "Job" and name.endswith("train"))
        assert f"job-name: {train}" in text and f"job-name: {stranger}\n" not in text
        assert "claimName: emo-runs" in text
    instances = [
        d["spec"]["podSelector"]["matchLabels"]["app.kubernetes.io/instance"]
        for documents in (first, second)
        for (kind, name), d in documents.items()
        if kind == "NetworkPolicy" and not name.endswith("train")
    ]
    assert instances == ["emo", "second-emo"]


@pytest.mark.parametrize("kind", ["emo-prepare", "emo-train", "emo-evaluate", "emo-eval"])
def test_pods_get_the_options_of_their_settings(
    rendered: dict[str, list[Document]], tmp_path: Path, kind: str
) -> None:
    """Preparation and training get key=value, and evaluation gets options, quoted as in a shell."""
    documents = rendered["second-run"]
    (settings,) = (d["data"] for d in documents if d["kind"] == "ConfigMap")
    (job,) = (d for d in documents if d["metadata"]["name"].endswith(kind) and "Job" in d["kind"])
    pod = job["spec"].get("jobTemplate", job)["spec"]["template"]["spec"]
    (tmp_path / "launch").mkdir()
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    for name, text in (("launch/entrypoint.sh", 'printf "%s\\n" "$@"'), ("getent", "exit 0")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    environment = settings | {"RUN_DIR": str(run_dir), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    environment |= {
        "ARGUMENTS": settings["EVALUATE"],
        "JOB_NAME": job["metadata"]["name"],
        "JOB_COMPLETION_INDEX": "0",
        "CPUS": "8",
    }
    command = ["sh", "-c", *pod["containers"][0]["args"]]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    words = done.stdout.splitlines()
    expected = ["--tasks", "sst2,ag_news", "--limit", "500"]
    if kind in ("emo-prepare", "emo-train"):
        expected = ["train.seed=7", "train.sample_prompts=[The man saw]"]
    assert words[-len(expected) :] == expected
    assert kind != "emo-train" or words[words.index("--master_addr") + 1] == "second-emo-train"
    assert "tolerations" in pod and "imagePullSecrets" in pod


def test_health_is_how_long_a_run_has_been_at_what_it_does(tmp_path: Path) -> None:
    beat = tmp_path / "heartbeat.json"
    settings = {"PIPELINE_HEARTBEAT": str(beat), "HANG_SECONDS": "100"}

    def health() -> int:
        command = [REPO / "launch/entrypoint.sh", "health"]
        return subprocess.run(command, env=os.environ | settings).returncode

    assert health() == 0  # no run trains here
    for idle, code in ((10, 0), (200, 1)):
        now = time.time()
        beat.write_text(json.dumps({"time": now, "step": 7, "doing": "saving", "since": now - idle}))
        assert health() == code


TRAIN = ["train", "--num_gpus", "2", "--"]


def test_the_quickstart_continues_what_it_trained_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both continuations start from one model, with its tokenizer and the same data."""
    monkeypatch.chdir(REPO)
    commands = (command for _, side_by_side in quickstart.steps() for command in side_by_side)
    settings = [command[7:] for command in commands if command[3:7] == TRAIN]
    base, *others = (load_config(Path(recipe), overrides) for recipe, *overrides in settings)
    for config in others:
        assert config.model.path == str(base.output_dir / "export")
        assert config.data.tokenizer == str(base.data.dir / "tokenizer") and config.data == others[0].data
    assert {config.objective.name for config in others} == {"mle", "emo"}
