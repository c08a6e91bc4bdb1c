"""Print JSON about the CUDA libraries of an image: python -m tests.helpers.libraries inside the image

A host without a GPU cannot open a device. It can import the packages, resolve every shared library, and load
the libraries that NCCL looks for when it starts.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import re
import subprocess
import sysconfig
from pathlib import Path

PACKAGES = Path(sysconfig.get_paths()["purelib"])
IMPORTED = [
    "torch",
    "triton",
    "deepspeed",
    "emo.pipeline.trainer",
    "emo.pipeline.loss.kernels.objectives",
    "emo.eval.cli",
]
VERBS = ["libibverbs.so.1", "libmlx5.so.1"]  # NCCL loads these by name
PROVIDERS = Path("/usr/lib/x86_64-linux-gnu/libibverbs")  # libibverbs loads files in it by device


def unresolved(libraries: list[Path]) -> dict[str, list[str]]:
    """Return the names of missing libraries, each with the libraries that need it."""
    paths = ":".join(sorted({str(path.parent) for path in libraries}))
    missing: dict[str, list[str]] = {}
    for path in libraries:
        command, environment = ["ldd", str(path)], os.environ | {"LD_LIBRARY_PATH": paths}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, encoding="utf-8")
        for name in re.findall(r"(\S+) => not found", done.stdout):
            missing.setdefault(name, []).append(path.name)
    return missing


def loads(name: str) -> str:
    """Return why a library cannot be loaded, or an empty string."""
    try:
        ctypes.CDLL(name)
    except OSError as error:
        return str(error)
    return ""


def size(path: Path) -> int:
    """Return the size on disk in bytes, or 0 if the path does not exist."""
    done = subprocess.run(["du", "-skx", str(path)], capture_output=True, text=True, encoding="utf-8")
    return int(done.stdout.split()[0]) * 1024 if done.stdout else 0


def main() -> None:
    import torch

    for name in IMPORTED:
        importlib.import_module(name)
    version = ctypes.c_int()
    results: dict[str, object] = {"torch": torch.__version__, "cuda": torch.version.cuda}
    if torch.version.cuda is not None:
        libraries = [*PACKAGES.glob("nvidia/**/*.so*"), *PACKAGES.glob("torch/**/*.so*")]
        libraries += PACKAGES.glob("triton/**/*.so*")
        results |= {"libraries": len(libraries), "missing": unresolved(libraries)}
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(version))  # torch has loaded it
        ptxas = PACKAGES / "triton/backends/nvidia/bin/ptxas"
        output = subprocess.run([ptxas, "--version"], capture_output=True, text=True, encoding="utf-8").stdout
        results |= {"nccl": version.value, "ptxas": re.findall(r"\bV(\d\S+)", output)}
    results["verbs"] = {name: loads(name) for name in (*VERBS, *map(str, PROVIDERS.glob("libmlx5*")))}
    parts = {"nvidia": PACKAGES / "nvidia", "torch": PACKAGES / "torch", "triton": PACKAGES / "triton"}
    sizes = {name: size(path) for name, path in parts.items()}
    sizes["other packages"] = size(PACKAGES) - sum(sizes.values())
    sizes["system"] = size(Path("/usr")) + size(Path("/var")) + size(Path("/etc"))
    print(json.dumps(results | {"sizes": sizes}))


if __name__ == "__main__":
    main()
