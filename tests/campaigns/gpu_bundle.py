"""Pack the GPU check for a machine that has Python and PyTorch but no package index.

    python -m tests.campaigns.gpu_bundle [--python 3.12] [--output_path DIR]

Writes to DIR (build/gpu-bundle) the wheels that the machine may lack in the versions of this environment, the
code, prepared data, and run.sh. run.sh installs the wheels next to the machine's packages and runs the check.
The machine must have PyTorch, NumPy, PyArrow and SciPy. Copy DIR there and run `sh DIR/run.sh`.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.campaigns import gpu_setting
from tests.conftest import REPO

# Imports of the check. Their dependencies are added unless the machine has them or they are unused (ABSENT).
WHEELS = (
    "transformers",
    "pydantic",
    "hjson",
    "sentencepiece",
    "nvidia-ml-py",
    "protobuf",
    "psutil",
    "rich",
    "peft",
    "jinja2",
)
WHEELS += ("pyyaml", "einops", "msgpack", "py-cpuinfo", "packaging", "tqdm", "fsspec", "tokenizers")
ABSENT = {"torch", "numpy", "pyarrow", "scipy", "triton", "setuptools", "hf-xet"}
MOST = 60e6  # largest bundle in bytes
CODE = ("common", "data_prep", "pipeline", "eval", "experiments", "emo", "launch", "ds_configs", "tests")
RUN = """#!/bin/sh
# Install the wheels next to the packages of this machine's Python (PYTHON, else python3), not into them,
# and run the GPU check for WITHIN seconds from now. Figures go to emo/runs/gpu/results.json as they come.
set -eu
began=$(date +%s)
cd "$(dirname "$0")"
python=${PYTHON:-python3}
if [ ! -d site ]; then
    "$python" -m pip install -q --no-index --no-deps --no-compile --target site.new wheels/*.whl
    mv site.new site
fi
tar -xzf code.tar.gz
for size in gpu gpu-quick; do
    [ -d "emo/runs/$size/work" ] || { mkdir -p "emo/runs/$size"; cp -r "work/$size" "emo/runs/$size/work"; }
done
cd emo
export PYTHONPATH="$PWD:$PWD/../site"
left=$((${WITHIN:-465} - $(date +%s) + began))
exec "$python" -m tests.campaigns.gpu --within "$left" "$@"
"""


def pip(*words: str, **environment: str) -> None:
    command = [sys.executable, "-m", "pip", *words, "--quiet", "--no-deps"]
    subprocess.run(command, check=True, env=os.environ | environment)


def download(wheels: Path, python: str) -> None:
    """Download wheels for a version of Python on Linux, and build DeepSpeed's wheel without kernels."""
    names, pending = dict[str, str](), list(WHEELS)
    while pending:
        name = canonicalize_name(pending.pop())
        if name not in names and name not in ABSENT:
            distribution = importlib.metadata.distribution(name)
            names[name] = f"{name}=={distribution.version}"
            needed = map(Requirement, distribution.requires or ())
            pending += [r.name for r in needed if r.marker is None or r.marker.evaluate({"extra": ""})]
    tags = ("2014", "_2_17", "_2_24", "_2_26", "_2_28", "_2_34")
    platforms = [f"--platform=manylinux{tag}_x86_64" for tag in tags]
    target = ["--only-binary=:all:", f"--python-version={python}", *platforms, "--dest", str(wheels)]
    pip("download", *target, *names.values())
    deepspeed = f"deepspeed=={importlib.metadata.version('deepspeed')}"
    pip("wheel", "--no-build-isolation", "--wheel-dir", str(wheels), deepspeed, DS_BUILD_OPS="0")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", default="3.12", help="the machine's version (%(default)s)")
    parser.add_argument("--output_path", type=Path, default=REPO / "build" / "gpu-bundle", metavar="DIR")
    args = parser.parse_args()
    out: Path = args.output_path
    shutil.rmtree(out, ignore_errors=True)
    (out / "wheels").mkdir(parents=True)
    download(out / "wheels", args.python)
    for name, quick, block in (("gpu", False, 1024), ("gpu-quick", True, 64)):
        gpu_setting.prepared(gpu_setting.Figures(out, "bundle", quick, out / "work" / name), "toy", block, 1)
        shutil.rmtree(out / "work" / name / "recipes")
    command = ["git", "ls-files", "-z", *CODE]
    files = subprocess.run(command, cwd=REPO, stdout=subprocess.PIPE, check=True).stdout
    with tarfile.open(out / "code.tar.gz", "w:gz") as archive:
        for name in sorted(filter(None, files.decode().split("\0"))):
            archive.add(REPO / name, f"emo/{name}", recursive=False)
    (out / "run.sh").write_text(RUN)
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    print(f"{out}: {size / 1e6:.1f} MB, for Python {args.python}")
    return int(size > MOST)


if __name__ == "__main__":
    sys.exit(main())
