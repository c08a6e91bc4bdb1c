"""Exports of every family, read by transformers 4 in its own environment; vocabularies by llama.cpp's reader.

    python -m tests.campaigns.exports [--families mixtral gpt_neox] [--release 4.57.6]

The older release is downloaded into build/readers, which stands before the environment's packages. A family
passes when that release misses no tensor and its loss on fixed ids is within 1e-3.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from transformers import logging

from tests.campaigns.campaign import Campaign, conduct
from tests.conftest import REPO
from tests.helpers.exporting import loss, write
from tests.helpers.families import EXPORTED, FAMILIES, family

READERS = REPO / "build" / "readers"
OTHERS = ["tokenizers>=0.22,<0.23", "huggingface_hub<1", "gguf"]
NEAR = 1e-3  # of the loss, and of the largest logit
# transformers 5 too writes experts for LongCat's "zero experts"; nothing reads them.
UNREAD = {"longcat_flash": ".experts.4."}


def install(release: str) -> Path:
    """Return a directory with that release of transformers and the readers of OTHERS."""
    target = READERS / release
    if not (target / "ready").is_file():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", "--no-deps"]
        subprocess.run([*pip, "--target", target, f"transformers=={release}", *OTHERS], check=True)
        (target / "ready").touch()
    return target


def run(directory: Path, args: argparse.Namespace, show: Campaign) -> None:
    logging.disable_progress_bar()
    here, written = {}, []
    for name in args.families or (FAMILIES | EXPORTED):
        model = family(name)
        written.append(write(model, directory / name))
        here[name] = loss(model)
    environment = os.environ | {"PYTHONPATH": str(install(args.release)), "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-P", REPO / "tests/helpers/exporting.py", *written]
    read = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    for found in map(json.loads, read.stdout.splitlines()):
        name = Path(found["name"]).name
        expected, logits = here[name]
        part = f"transformers {args.release}"
        if problem := found.get("error") or found.get("unknown"):
            show(part, name, problem, "error" not in found)
            continue
        value, others = found["loss"]
        error = max(abs(a - b) for a, b in zip(logits, others, strict=True)) / max(map(abs, logits))
        keys = [key for key in found["keys"] if UNREAD.get(name, "\0") not in key]
        near = abs(value - expected) < NEAR and error < NEAR and not keys
        show(part, name, f"loss {value:.4f} of {expected:.4f}, logits within {error:.0e}; {keys[:3]}", near)


if __name__ == "__main__":
    sys.exit(conduct("exports", run, __doc__, families=[], release="4.57.6"))
