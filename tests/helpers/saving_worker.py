"""A rank of a run that is disturbed: python -m ... WHAT RECIPE [key=value ...], output_dir among them.

late      a checkpoint's export is not written before a later step was taken
damaged   a weight of rank 0 is not finite after the second step
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from emo.eval.watch import targets
from emo.pipeline import export
from emo.pipeline.cli import leave, run_recipe
from emo.pipeline.engine import Engine
from emo.pipeline.run_dir import checkpoints, read_metrics, step_of
from emo.pipeline.stop import Watch
from tests.helpers.launching import wait_for

LAST = 4  # the last step of the run
SEEN = "seen.jsonl"  # beside the run: what was there while an export was about to be written


def late(run_dir: Path) -> None:
    write = export.save_file

    def disturbed(tensors: Any, path: str, **options: Any) -> None:
        name = Path(path).relative_to(run_dir).parts[0]
        if name.startswith("step-"):
            step = int(name.removesuffix(".partial").removeprefix("step-"))
            if step < LAST:
                wait_for(lambda: read_metrics(run_dir)[-1]["step"] > step, f"step after {step}")
            seen = {"step": step, "checkpoints": [step_of(d) for d in checkpoints(run_dir)]}
            seen["targets"] = [target.name for target in targets(run_dir)]
            with (run_dir.parent / SEEN).open("a") as file:
                file.write(json.dumps(seen) + "\n")
        write(tensors, path, **options)

    export.save_file = disturbed


def damaged(run_dir: Path) -> None:
    step = Engine.train_step

    def stepped(self: Engine, *args: Any, **options: Any) -> Any:
        sums = step(self, *args, **options)
        if os.environ["RANK"] == "0" and self.ds.global_steps == 2:
            self.ds.optimizer.fp32_partitioned_groups_flat[0].data[7] = float("inf")
        return sums

    Engine.train_step = stepped  # type: ignore[method-assign]


if __name__ == "__main__":
    what, arguments = sys.argv[1], sys.argv[2:]
    (run_dir,) = (a.removeprefix("output_dir=") for a in arguments if a.startswith("output_dir="))
    {"late": late, "damaged": damaged}[what](Path(run_dir))
    leave(run_recipe(Watch(), arguments))
