"""Submission of a command to Slurm or Kubernetes, as the jobs in `launch/` describe it."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..errors import FailureError, UserError, one_line
from ..text import counted

LAUNCH = Path(__file__).resolve().parents[2] / "launch"
COMPONENT = "app.kubernetes.io/component"
RECIPE_FILE = "recipe.yaml"
CHECKOUT = Path("/emo")  # the working directory in the image
KUBERNETES = "kubernetes"
SCHEDULERS = ("ray", "slurm", KUBERNETES)


def add_schedulers(add: Callable[..., Any]) -> None:
    """Add the options --on and --overlay to a command that has --shard and --finish."""
    text = "run as tasks of Ray, at RAY_ADDRESS or on this machine, or submit a Slurm or Kubernetes job"
    add("--on", choices=SCHEDULERS, help=text)
    text = "kustomize directory of --on kubernetes, for example a copy of launch/k8s/overlays/cluster"
    add("--overlay", type=Path, metavar="DIR", help=text)


def check_schedulers(args: argparse.Namespace) -> None:
    """Raise UserError if these options do not go together."""
    if args.on is not None and (args.shard not in (None, (0, 1)) or args.finish):
        raise UserError("--on cannot be combined with --shard or --finish. Remove them", code="options-clash")
    if (args.on == KUBERNETES) != (args.overlay is not None):
        raise UserError("--on kubernetes and --overlay DIR need each other", code="option-needs")
    if args.overlay is not None and not args.overlay.is_dir():
        cure = "Name a kustomize directory, such as a copy of launch/k8s/overlays/cluster"
        raise UserError(f"--overlay {args.overlay} is not a directory. {cure}", code="submission")


def submit_array(
    script: str, words: list[str], jobs: int, options: Sequence[str] = (), last: Sequence[str] = ()
) -> tuple[str, str]:
    """Submit an array of jobs to Slurm, and the job that checks and completes their work.

    Args:
        script: The job file below `launch/slurm`.
        words: Its arguments.
        jobs: Number of jobs of the array.
        options: Options of `sbatch` for the array, besides those in the job file.
        last: Further arguments of the job that completes the work.

    Returns the ids of both. Options of the site come from the environment, such as SBATCH_ACCOUNT.
    """
    file = str(LAUNCH / "slurm" / script)
    environment = {name: value for name, value in os.environ.items() if name != "JOBS"}  # the file reads it

    def submit(*arguments: str) -> str:
        done = _call(["sbatch", "--parsable", *arguments], environment)
        return done.strip().partition(";")[0]  # a cluster may follow

    array = submit("--array", f"0-{jobs - 1}", *options, file, *words)
    after = ["--dependency", f"afterok:{array}", "--kill-on-invalid-dep=yes", "--array", "0"]
    try:
        return array, submit(*after, "--cpus-per-task", "1", file, *words, *last, "--finish")
    except FailureError:  # for example, the limit of submitted jobs is reached
        _call(["scancel", array])
        raise


def submit_file(scheduler: str, file: Path) -> list[str]:
    """Submit a complete job file to "slurm" or "kubernetes". Return lines for the user."""
    import yaml

    if scheduler == "slurm":
        return [f"submitted: job {_call(['sbatch', '--parsable', str(file)]).strip()}"]
    job = yaml.safe_load(file.read_text(encoding="utf-8"))
    return _apply([job], job)


def apply_job(
    overlay: Path, component: str, jobs: int, values: dict[str, str],
    recipe: str | None = None, shared: Sequence[Path] = (), cpus: int | None = None,
) -> list[str]:  # fmt: skip
    """Apply a job of a kustomize directory to Kubernetes, with the resources that all jobs share.

    Args:
        overlay: A directory like those in `launch/k8s/overlays`.
        component: The component of the job in its labels.
        jobs: Number of pods.
        values: Variables of the pods' environment.
        recipe: The text of a recipe, which the pods read from a config map.
        shared: Files and directories that the pods must share.
        cpus: CPUs of a pod, by default those in the overlay.

    Returns lines for the user. Jobs cannot be changed, so they are named by what is submitted.
    """
    trees, job = _render(overlay, component)
    job["spec"] |= {"completions": jobs, "parallelism": jobs}
    metadata = job["metadata"]
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    _check_shared(pod, container, shared)
    if cpus is not None:
        container["resources"]["requests"]["cpu"] = str(cpus)
    submitted = json.dumps(values if recipe is None else [values, recipe, jobs, cpus])
    metadata["name"] += f"-{hashlib.sha256(submitted.encode()).hexdigest()[:8]}"
    if recipe is not None:
        trees.insert(0, _mount_recipe(recipe, metadata, pod, container))
        values = {"RECIPE": f"/recipe/{RECIPE_FILE}", "OVERRIDES": ""} | values
    values = values | {"JOBS": str(jobs)}
    container["env"] += [{"name": name, "value": value} for name, value in values.items()]
    return _apply(trees, job)


def _apply(trees: list[dict[str, Any]], job: dict[str, Any]) -> list[str]:
    """Apply resources to Kubernetes, among them a job. Return lines for the user."""
    metadata = job["metadata"]
    done = _call(["kubectl", "apply", "-f", "-"], text="\n---\n".join(map(json.dumps, trees)))
    namespace = f"-n {metadata['namespace']} " if "namespace" in metadata else ""
    if f"job.batch/{metadata['name']} unchanged" in done:
        again = f"kubectl {namespace}delete job/{metadata['name']}"
        return [f"job {metadata['name']} exists already. To run it again, first run: {again}"]
    wait = f"kubectl {namespace}wait --for condition=complete --timeout=-1s job/{metadata['name']}"
    return [
        f"applied: job {metadata['name']}, {counted(job['spec']['completions'], 'pod')}",
        f"wait for it: {wait}",
    ]


def _render(overlay: Path, component: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the resources of a kustomize directory that a job needs, and the job, which is one of them."""
    import yaml

    rendered = _call(["kubectl", "kustomize", str(overlay)])
    documents: list[dict[str, Any]] = [tree for tree in yaml.safe_load_all(rendered) if tree]
    trees = [tree for tree in documents if _component(tree) in ("common", component)]
    job = next((t for t in trees if t["kind"] == "Job" and _component(t) == component), None)
    if job is None:
        raise UserError(f"{overlay} has no job with the label {COMPONENT}={component}", code="submission")
    return trees, job


def _mount_recipe(
    recipe: str, metadata: dict[str, Any], pod: dict[str, Any], container: dict[str, Any]
) -> dict[str, Any]:
    """Return a config map with a recipe, after mounting it in the pods of a job."""
    about = metadata | {"name": f"{metadata['name']}-recipe"}
    pod["volumes"].append({"name": "recipe", "configMap": {"name": about["name"]}})
    container["volumeMounts"].append({"name": "recipe", "mountPath": "/recipe", "readOnly": True})
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": about, "data": {RECIPE_FILE: recipe}}


def _check_shared(pod: dict[str, Any], container: dict[str, Any], paths: Sequence[Path]) -> None:
    """Raise UserError unless all paths are on a volume that the pods share."""
    claims = [volume["name"] for volume in pod["volumes"] if "persistentVolumeClaim" in volume]
    mounts = [mount["mountPath"] for mount in container["volumeMounts"] if mount["name"] in claims]
    for path in paths:
        if not any(Path(os.path.normpath(CHECKOUT / path)).is_relative_to(mount) for mount in mounts):
            problem = f"{path} is not on the volume that the pods share"
            raise UserError(f"{problem}. Use a path below {' or '.join(mounts)}", code="not-shared")


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
