"""The file map of docs/architecture.md, made from the files' own first lines.

python -m tests.helpers.file_map     write it anew
"""

from __future__ import annotations

import ast
import fnmatch
import subprocess
from pathlib import Path

from tests.conftest import REPO

DOCUMENT = REPO / "docs" / "architecture.md"
HEADING = "## Files\n"
# Files that are no Python modules, and folders whose files one line describes.
DESCRIBED = {
    "Makefile": "every command of a developer: setup, quickstart, tests, benches, campaigns",
    "pyproject.toml": "the package: what it needs, its commands and files; lint, type and test rules",
    "requirements.lock": "exact versions and hashes of everything, made by `make lock`",
    "MANIFEST.in": "what a source distribution does not get",
    "LICENSE": "Apache-2.0",
    "CHANGELOG.md": "what changed from version to version",
    "CONTRIBUTING.md": "how to add an objective, a task, a source; what is stable",
    "CITATION.cff": "how to cite the project and the paper",
    ".pre-commit-config.yaml": "lint and types before a commit",
    ".github/workflows/*.yml": "the same as .ci/run on the public forge, and a weekly audit",
    ".github/ISSUE_TEMPLATE/*": "what a report of a fault and a wish have to say",
    "*/py.typed": "its package has type hints",
    "Dockerfile": "the image, for GPUs or CPUs; runs as any user, on a root file system that is only read",
    ".dockerignore": "what the image does not get",
    ".gitignore": "what git does not get",
    ".ci/run": "what runs on every change: make test",
    "README.md": "what it is and how it is used",
    "SECURITY.md": "what may come from others, what it could do, and what is done against it",
    "docs/*.md": "one page each: README.md says which has what; architecture is this one",
    "docs/objectives.svg": "how hard every objective pulls, over the probability of the target",
    "experiments/paper/dev/*.yaml": "the eight tasks on development rows, for what is chosen there",
    "experiments/paper/*.yaml": "the paper's tables and figures at full size; docs/paper.md lists them",
    "experiments/*.yaml": "experiments: a base recipe or study, axes, measures, questions with their rules",
    "ds_configs/*.json": "ZeRO-1, 2, 3, 3 with copies in each host, with offload, and with weights on NVMe",
    "launch/continual.sh": "continual pre-training: a shell command and a Python script in one",
    "launch/instruct.sh": "instruction tuning, likewise",
    "launch/entrypoint.sh": "the image's verbs and its health check",
    "launch/recipes/*.yaml": "the paper's runs, the quickstart's, and small runs on real files",
    "launch/slurm/*.sbatch": "preparation as an array, training that queues itself again, evaluation",
    "launch/slurm/evaluate.scron": "evaluation as a line of Slurm's crontab",
    "launch/k8s/base/*.yaml": "the same as Kubernetes jobs, with claim and network policy, for kustomize",
    "launch/k8s/overlays/*.yaml": "what a site sets: nodes, GPUs, storage, image",
    "launch/k8s/rdma/*.yaml": "InfiniBand or RoCE for the pods that train, as a component",
    "eval/icl/tasks/*.yaml": "the eight tasks: data, labels, prompts, shots",
    "eval/icl/tasks/README.md": "how to add a task",
    "common/page/page.css": "the style of reports",
    "tests/bench/*.py": "side-by-side measurements",
    "tests/campaigns/*.py": "soak, sweep, cluster, GPU and more: long tests, each a command of its own",
    "tests/helpers/*.py": "what tests share: corpora, launches, naive references",
    "tests/helpers/fuzz_corpus.json": "damaged files that once crashed their parser",
    "tests/loss/golden*.json": "values of the objectives computed elsewhere",
    "tests/*/test_*.py": "one per module or promise, in folders that mirror the rooms",
    "tests/test_*.py": "rules of the repository itself",
    "tests/conftest.py": "fixtures: real data where it is present, one thread per process",
}


def tracked() -> list[str]:
    """Files that git knows or would take."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=True)
    return sorted(f for f in set(listed.stdout.splitlines()) if (REPO / f).exists())


def headline(path: Path) -> str:
    """First line of a module's docstring, as a phrase."""
    line = (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]
    return line.removesuffix(".")


def entries() -> dict[str, str]:
    """Every file, or the pattern that covers it, with its one line."""
    found: dict[str, str] = {}
    for file in tracked():
        if file.endswith("__init__.py") and not headline(REPO / file):
            continue
        pattern = next((p for p in DESCRIBED if file == p or fnmatch.fnmatchcase(file, p)), None)
        if pattern is not None:
            found[pattern] = DESCRIBED[pattern]
        elif file.endswith(".py"):
            found[file] = headline(REPO / file)
        else:
            raise ValueError(f"{file}: give it a line in {Path(__file__).name}")
    return found


def render() -> str:
    """The section as text: a block per folder."""
    blocks: dict[str, list[tuple[str, str]]] = {}
    for file, line in entries().items():
        folder = file.split("/", 1)[0] if "/" in file and not file.startswith(".") else ""
        blocks.setdefault("" if folder in ("docs", "ds_configs") else folder, []).append((file, line))
    names = ["", "launch", "common", "data_prep", "pipeline", "eval", "experiments", "tests"]
    names += sorted(blocks.keys() - set(names))
    width = max(len(file) for block in blocks.values() for file, _ in block)
    texts = ["\n".join(f"    {f:<{width}}  {line}" for f, line in blocks[n]) for n in names if n in blocks]
    return HEADING + "\n" + "\n\n".join(texts) + "\n"


def main() -> None:
    """Put the section at the end of the document."""
    DOCUMENT.write_text(DOCUMENT.read_text().split(HEADING)[0] + render())


if __name__ == "__main__":
    main()
