#!/bin/sh
"exec" "env" "PATH=${0%/*}/../.venv/bin:$PATH" "deepspeed" "$0" "$@"
# For a shell this file ends above: it becomes `deepspeed launch/continual.sh ...`. The launcher then runs it
# with Python, to which the second line is a string.
"""Continual pre-training on text: deepspeed launch/continual.sh RECIPE.yaml [key=value ...] [--dry-run]"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pipeline.train import main

sys.exit(main(kind="text"))
