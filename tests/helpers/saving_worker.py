"""Run a rank of a disturbed run: python -m ... WHAT RECIPE output_dir=DIR [key=value ...]

late      a checkpoint's export is not written until a later step is complete
damaged   a weight of rank 0 is infinite after the second step
full      after the third step no file can exceed 50 KiB, as if the disk were full
inline    exports are checked in this process, which is faster than in a new one
hanging   rank 1 sleeps after its second step for longer than other ranks wait
slow      rank 1 needs 0.1 s more to load a step, and for each pass of the head
KIND@PHASE   rank 1 raises FAULTS[KIND] in the PHASE `loading`, `step` or `saving`, or all ranks in `starting`
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import AcceleratorError
from torch.distributed import DistBackendError

from emo.common.errors import UserError
from emo.eval.watch import find_targets
from emo.launch.rank import leave, run_recipe
from emo.pipeline import trainer as train
from emo.pipeline.batches.loader import Loader
from emo.pipeline.checkpoint import saver
from emo.pipeline.control.run_dir import checkpoints, read_metrics, step_of
from emo.pipeline.control.stop import SignalWatch
from emo.pipeline.engine import start
from emo.pipeline.engine.engine import Engine
from emo.pipeline.model import build as model
from emo.pipeline.model import export
from tests.helpers.launching import wait_for

LAST = 4  # the last step of the run
SEEN = "seen.jsonl"  # next to the run: checkpoints and targets at the start of each export


def late(run_dir: Path) -> None:
    write = export.save_file

    def disturbed(tensors: Any, path: str, **options: Any) -> None:
        name = Path(path).relative_to(run_dir).parts[0]
        if name.startswith("step-"):
            step = int(name.removesuffix(".partial").removeprefix("step-"))
            if step < LAST:
                wait_for(lambda: read_metrics(run_dir)[-1]["step"] > step, f"step after {step}")
            record = {"step": step, "checkpoints": [step_of(d) for d in checkpoints(run_dir)]}
            record["targets"] = [target.name for target in find_targets(run_dir)]
            with (run_dir.parent / SEEN).open("a") as file:
                file.write(json.dumps(record) + "\n")
        write(tensors, path, **options)

    export.save_file = disturbed


def after_step(rank: str, step: int, disturb: Callable[[Engine], object]) -> None:
    take = Engine.train_step

    def stepped(self: Engine, *args: Any, **options: Any) -> Any:
        sums = take(self, *args, **options)
        if os.environ["RANK"] == rank and self.ds.global_steps == step:
            disturb(self)
        return sums

    Engine.train_step = stepped  # type: ignore[method-assign]


def fill() -> None:
    for rank in ("0", "1"):
        after_step(rank, 3, lambda _: resource.setrlimit(resource.RLIMIT_FSIZE, (50 * 1024, 50 * 1024)))


def slow() -> None:
    def late(*_: Any) -> None:
        time.sleep(0.1 * (os.environ["RANK"] == "1"))

    read, build = Loader.step, model.build_model

    def built(*args: Any) -> Any:
        result = build(*args)
        head = result.get_output_embeddings()
        compute = head.forward
        head.forward = lambda *args, **options: (late(), compute(*args, **options))[1]
        return result

    Loader.step = lambda *args, **options: (late(), read(*args, **options))[1]  # type: ignore[method-assign]
    train.build_model = built


FAULTS = {
    "device": AcceleratorError("CUDA error: uncorrectable ECC error encountered"),
    "nccl": DistBackendError("NCCL error: ncclSystemError: unhandled system error"),
    "mistake": UserError("a mistake", code="test"),
}


def fault(kind: str, phase: str) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise FAULTS[kind]

    if phase == "starting":
        start.check_gpus = fail
    elif phase == "step":
        after_step("1", 2, fail)
    elif os.environ["RANK"] == "1":
        where: Any = {"loading": train, "saving": Engine}[phase]
        setattr(where, {"loading": "check_model", "saving": "snapshot"}[phase], fail)


def damage(engine: Engine) -> None:
    engine.ds.optimizer.fp32_partitioned_groups_flat[0].data[7] = float("inf")


def inline() -> None:
    saver.check_export_in_subprocess = export.check_export


DISTURBANCES: dict[str, Callable[[Path], object]] = {
    "inline": lambda _: inline(),
    "late": late,
    "damaged": lambda _: after_step("0", 2, damage),
    "full": lambda _: fill(),
    "slow": lambda _: slow(),
    "hanging": lambda _: after_step("1", 2, lambda _: time.sleep(12)),
}

if __name__ == "__main__":
    disturbance, arguments = sys.argv[1], sys.argv[2:]
    (run_dir,) = (a.removeprefix("output_dir=") for a in arguments if a.startswith("output_dir="))
    if "@" in disturbance:
        fault(*disturbance.split("@"))
    else:
        DISTURBANCES[disturbance](Path(run_dir))
    leave(run_recipe(SignalWatch(), arguments))
