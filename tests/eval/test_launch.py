"""The evaluation's scheduler files, run as far as that goes without a scheduler."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from emo.common.errors import ExitCode
from emo.eval.cli import parser
from tests.conftest import REPO
from tests.helpers.evaluating import tiny_model, write_tasks

SCRIPT = REPO / "launch/slurm/evaluate.sbatch"


@pytest.fixture
def slurm(tmp_path: Path) -> Any:
    """Runs the batch script with stand-ins for Slurm's commands, which write down how they were called."""
    tools = tmp_path / "bin"
    tools.mkdir()
    calls = tmp_path / "calls"
    stubs = {
        "srun": 'shift; [ -n "${FAKE_CODE:-}" ] && exit "$FAKE_CODE"; exec "$@"',
        "scontrol": f'[ "$1" != show ] || exec echo "Command={SCRIPT} a"; echo "scontrol $*" >> {calls}',
        "sbatch": f'echo "sbatch $*" >> {calls}',
        "python": f'exec {sys.executable} "$@"',
    }
    for name, body in stubs.items():
        (tools / name).write_text(f"#!/bin/bash\n{body}\n")
        (tools / name).chmod(0o755)

    def run(*arguments: object, **environment: str) -> tuple[int, str, list[str]]:
        calls.unlink(missing_ok=True)
        path = f"{tools}{os.pathsep}{os.environ['PATH']}"
        verdicts = {"PATH": path, "SLURM_JOB_ID": "7", "EVAL_CACHE": str(tmp_path / "cache")}
        # The script puts the checkout's own environment first; the stand-ins must win.
        copy = tmp_path / "slurm_script"
        copy.write_text(SCRIPT.read_text().replace("PATH=$repository/.venv/bin:$PATH", "PATH=$PATH"))
        command, environment = ["bash", copy, *map(str, arguments)], os.environ | verdicts | environment
        done = subprocess.run(command, cwd=REPO, env=environment, capture_output=True, text=True)
        called = calls.read_text().splitlines() if calls.is_file() else []
        return done.returncode, done.stdout + done.stderr, called

    return run


@pytest.mark.slow
def test_slurm_evaluates_and_queues_the_next_pass(slurm: Any, tmp_path: Path) -> None:
    run, data = tmp_path / "run", write_tasks(tmp_path / "data", ["sst2"], train=20, test=8)
    model = tiny_model(tmp_path / "model")
    run.mkdir()
    code, out, calls = slurm(run, data, "--tasks", "sst2", EVERY="20", FAKE_CODE="0")
    assert code == 0, out
    assert calls == [f"sbatch --begin=now+20minutes {SCRIPT} {run} {data} --tasks sst2"]
    shutil.copytree(model, run / "export")
    code, out, calls = slurm(run, data, "--tasks", "sst2", EVERY="20")
    assert (code, calls) == (0, []), out  # the final export is done: no further pass
    assert json.loads((run / "eval/watch/done/run.json").read_text())["state"] == "evaluated"


def test_slurm_queues_again_only_what_may_pass(slurm: Any, tmp_path: Path) -> None:
    for ending, calls in ((ExitCode.FAILURE, ["scontrol requeue 7"]), (ExitCode.MISTAKE, [])):
        assert slurm(tmp_path, tmp_path, FAKE_CODE=str(ending))[::2] == (ending, calls)
    assert slurm(tmp_path, tmp_path, FAKE_CODE="1", SLURM_RESTART_COUNT="5")[2] == []  # not for ever
    assert slurm(tmp_path, tmp_path, FAKE_CODE="2", EVERY="20")[2] == []
    [call] = slurm(tmp_path, tmp_path, FAKE_CODE="1", EVERY="20")[2]  # the next pass tries again
    assert call.startswith("sbatch --begin=now+20minutes ")
    early = tmp_path / "not-yet"  # training has not begun: a pass without work, and another one after it
    code, _, calls = slurm(early, tmp_path, FAKE_CODE="2", EVERY="20")
    assert code == 0 and calls[0].startswith("sbatch --begin=now+20minutes ")


@pytest.mark.parametrize(("name", "once"), [("evaluate.yaml", True), ("watch.yaml", False)])
def test_kubernetes_runs_the_commands_there_are(name: str, once: bool) -> None:
    document = yaml.safe_load((REPO / "launch/k8s/base" / name).read_text())
    job = document["spec"].get("jobTemplate", document)["spec"]
    (container,) = job["template"]["spec"]["containers"]
    command = container["args"]
    if "command" in container:
        command = shlex.split(command[0].splitlines()[-1].removeprefix("exec launch/entrypoint.sh "))
    verb, *arguments = command
    assert verb == "watch"  # the image's, which is `emo watch`
    literals = yaml.safe_load((REPO / "launch/k8s/base/kustomization.yaml").read_text())
    for literal in literals["configMapGenerator"][0]["literals"]:
        setting, _, value = literal.partition("=")
        arguments = [re.sub(rf"\$\(?{setting}\b\)?", value, argument) for argument in arguments]
    parsed = parser().parse_args([verb, *arguments])
    assert (parsed.once, parsed.until_finished) == (once, not once)
    assert "$" not in f"{parsed.run_dir} {parsed.data}"
    codes = job["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"]
    assert codes == [ExitCode.MISTAKE, ExitCode.REGRESSION]  # everything else is tried again


def test_slurm_crontab_asks_for_what_the_batch_script_asks_for() -> None:
    """scrontab does not read the options of the script that it runs."""
    table = SCRIPT.with_suffix(".scron").read_text(encoding="utf-8")
    options = r"^#SBATCH (--(?:job|open|gpus|cpus|mem|time).*)$"
    batch = re.findall(options, SCRIPT.read_text(encoding="utf-8"), re.M)
    assert len(batch) == 6 and {*batch, "--ntasks=1"} <= set(re.findall(r"^#SCRON (.*)$", table, re.M))
    assert "bash launch/slurm/evaluate.sbatch runs/emo " in table.splitlines()[-1]
