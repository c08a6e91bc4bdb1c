"""Submission of a command to Slurm or Kubernetes, as the jobs in `launch/` describe it."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from ..errors import FailureError, UserError, one_line

LAUNCH = Path(__file__).resolve().parents[2] / "launch"
COMPONENT = "app.kubernetes.io/component"
RECIPE_FILE = "recipe.yaml"


def submit_array(script: str, words: list[str], jobs: int, cpus: int | None) -> tuple[str, str]:
    """Submit an array of jobs to Slurm, and the job that checks and completes their work.

    Args:
        script: the job file below `launch/slurm`.
        words: its arguments.
        jobs: number of jobs of the array.
        cpus: CPUs of each job, instead of the number in the job file.

    Returns the ids of both. Options of the site come from the environment, such as SBATCH_ACCOUNT.
    """
    file = str(LAUNCH / "slurm" / script)
    size = [] if cpus is None else ["--cpus-per-task", str(cpus)]
    environment = {name: value for name, value in os.environ.items() if name != "JOBS"}  # the file reads it

    def submit(*options: str) -> str:
        done = _call(["sbatch", "--parsable", *options], environment)
        return done.strip().partition(";")[0]  # a cluster may follow

    array = submit("--array", f"0-{jobs - 1}", *size, file, *words)
    after = ["--dependency", f"afterok:{array}", "--kill-on-invalid-dep=yes", "--array", "0"]
    return array, submit(*after, "--cpus-per-task", "1", file, *words, "--finish")


def submit_file(scheduler: str, file: Path) -> str:
    """Submit a complete job file to "slurm" or "kubernetes". Return what the client prints about it."""
    if scheduler == "slurm":
        return f"job {_call(['sbatch', '--parsable', str(file)]).strip()}"
    return _call(["kubectl", "apply", "-f", str(file)]).strip()


def apply_job(overlay: Path, component: str, recipe: str, jobs: int) -> str:
    """Apply a job of a kustomize directory to Kubernetes, with the resources that all jobs share.

    Args:
        overlay: a directory like those in `launch/k8s/overlays`.
        component: the component of the job in its labels.
        recipe: the text of the recipe. The pods read it from a config map.
        jobs: number of pods.

    Returns the name of the job.
    """
    import yaml

    rendered = _call(["kubectl", "kustomize", str(overlay)])
    documents: list[dict[str, Any]] = [tree for tree in yaml.safe_load_all(rendered) if tree]
    chosen = [tree for tree in documents if _component(tree) in ("common", component)]
    job = next((t for t in chosen if t["kind"] == "Job" and _component(t) == component), None)
    if job is None:
        raise UserError(f"{overlay} has no job with the label {COMPONENT}={component}", code="submission")
    metadata = job["metadata"]
    name = f"{metadata['name']}-recipe"
    settings = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata | {"name": name}}
    settings["data"] = {RECIPE_FILE: recipe}
    set_job(job, name, jobs)
    text = "\n---\n".join(json.dumps(tree) for tree in (settings, *chosen))
    _call(["kubectl", "apply", "-f", "-"], text=text)
    return str(metadata["name"])


def set_job(job: dict[str, Any], recipe: str, jobs: int) -> None:
    """Let `jobs` pods of a rendered job read their recipe from the config map `recipe`."""
    job["spec"] |= {"completions": jobs, "parallelism": jobs}
    pod = job["spec"]["template"]["spec"]
    pod["volumes"].append({"name": "recipe", "configMap": {"name": recipe}})
    (container,) = pod["containers"]
    container["volumeMounts"].append({"name": "recipe", "mountPath": "/recipe", "readOnly": True})
    values = {"RECIPE": f"/recipe/{RECIPE_FILE}", "OVERRIDES": "", "JOBS": str(jobs)}
    container["env"] += [{"name": name, "value": value} for name, value in values.items()]


def _component(tree: dict[str, Any]) -> str | None:
    return tree["metadata"].get("labels", {}).get(COMPONENT)


def _call(command: list[str], environment: dict[str, str] | None = None, text: str | None = None) -> str:
    """Return the output of a scheduler's client. Raises UserError if it is missing or rejects the job."""
    try:
        done = subprocess.run(command, env=environment, input=text, capture_output=True, encoding="utf-8")
    except FileNotFoundError:
        problem = f"{command[0]} is not on PATH. Install it, or run on a host that has it"
        raise UserError(problem, code="submission") from None
    if done.returncode:
        problem = f"`{command[0]} {command[1]}` failed: {one_line(done.stderr or done.stdout)}"
        raise FailureError(problem, code="submission")
    return done.stdout
