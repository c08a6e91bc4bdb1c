"""The same experiment on a cluster: an array of workers that share its runs."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from common.files import write_text

SLURM = """#!/bin/bash
# {workers} workers share the runs of {file}; sbatch it again after a failure: what is done stays done.
#SBATCH --job-name={name}
#SBATCH --array=0-{last}
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=8
#SBATCH --gpus={ranks}
#SBATCH --time=24:00:00
#SBATCH --requeue
cd {directory}
exec {command}
"""

KUBERNETES = """# {workers} workers share the runs of {file}. All mount the claim emo-runs (ReadWriteMany).
apiVersion: batch/v1
kind: Job
metadata:
  name: {name}
spec:
  completionMode: Indexed
  completions: {workers}
  parallelism: {workers}
  backoffLimit: 20
  template:
    spec:
      restartPolicy: Never
      automountServiceAccountToken: false
      securityContext:
        runAsNonRoot: true
        runAsUser: 1001
        fsGroup: 1001
        fsGroupChangePolicy: OnRootMismatch
        seccompProfile: {{ type: RuntimeDefault }}
      containers:
        - name: work
          image: emo:latest
          securityContext:
            allowPrivilegeEscalation: false
            readOnlyRootFilesystem: true
            capabilities: {{ drop: [ALL] }}
          command: [sh, -c, {command}]
          resources:
            requests: {{ cpu: "8", memory: 64Gi, nvidia.com/gpu: {ranks} }}
            limits: {{ memory: 128Gi, nvidia.com/gpu: {ranks} }}
          volumeMounts:
            - {{ name: runs, mountPath: /emo/runs }}
            - {{ name: tmp, mountPath: /tmp }}
      volumes:
        - name: runs
          persistentVolumeClaim: {{ claimName: emo-runs }}
        - name: tmp
          emptyDir: {{}}
"""


def _words(python: str, file: Path, overrides: list[str]) -> str:
    return shlex.join([python, "-m", "experiments", "run", str(file), *overrides])


def _name(file: Path) -> str:
    return file.stem.lower().replace("_", "-")


def slurm(file: Path, overrides: list[str], workers: int, ranks: int, target: Path) -> None:
    """Write the batch script of an array of `workers` with `ranks` GPUs each.

    It runs in this directory, with this Python.
    """
    text = SLURM.format(
        workers=workers,
        ranks=ranks,
        last=workers - 1,
        file=file,
        name=_name(file),
        directory=shlex.quote(str(Path.cwd())),
        command=_words(sys.executable, file, overrides),
    )
    write_text(target, text)


def kubernetes(file: Path, overrides: list[str], workers: int, ranks: int, target: Path) -> None:
    """Write the Indexed Job of `workers` pods with `ranks` GPUs each."""
    import json

    command = json.dumps(_words("python", file, overrides))
    write_text(
        target, KUBERNETES.format(workers=workers, ranks=ranks, file=file, name=_name(file), command=command)
    )
