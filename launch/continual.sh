#!/bin/sh
"exec" "env" "PATH=${0%/*}/../.venv/bin:$PATH" "sh" "${0%/*}/python.sh" "${0%/*}/supervise.py" "$0" "$@"
# For a shell this file, which is instruct.sh as well, ends above: supervise.py runs it under `deepspeed` and returns
# the run's exit code.
# DeepSpeed's launcher runs this file with Python, to which the second line is a string.
"""Continual pre-training on text, or instruction tuning: the recipe decides.

launch/continual.sh [options of deepspeed --] RECIPE.yaml [key=value ...] [--dry_run]
deepspeed launch/continual.sh RECIPE.yaml [key=value ...] [--dry_run]
"""

import sys
from pathlib import Path

sys.path.insert(0, str(next(d for d in Path(__file__).resolve().parents if (d / "emo").is_dir())))

from emo.pipeline.control.stop import SignalWatch

watch = SignalWatch()  # before the heavy imports: a request to stop may arrive while they take their time

from emo.launch.rank import leave, run_recipe

leave(run_recipe(watch))
