"""Measure one run of the unmodified trainer, and stop it without saving after enough steps.

    python -m tests.campaigns.gpu_worker --to FILE.json --steps N [--whole] [--waits] RECIPE [key=value ...]

Writes the seconds and the loss of every step, the peak memory, and the prediction of `plan`.
--whole: run to the end, time every save and write the export.
--waits: also count how often the host waits for the device, in a step and in the head.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from emo.pipeline.checkpoint.saver import Saver
from emo.pipeline.cli import leave
from emo.pipeline.config import RunConfig, load_config
from emo.pipeline.control.stop import SignalWatch
from emo.pipeline.control.world import end_world
from emo.pipeline.engine.device import hardware
from emo.pipeline.engine.engine import Engine
from emo.pipeline.engine.start import start_world
from emo.pipeline.loss import FusedHead
from emo.pipeline.monitor.console import Console
from emo.pipeline.planning import footprint
from emo.pipeline.planning.checks import check_run
from emo.pipeline.planning.setup import setup_of, sizes_of
from emo.pipeline.trainer import Trainer
from tests.campaigns.gpu_setting import GPU, WARM
from tests.helpers.waits import waits


class EnoughError(Exception):
    """The run has been measured for long enough."""


class Watcher:
    """Wraps the trainer's steps, head and saves. The public attributes are the results."""

    def __init__(self, steps: int | None, counts: bool) -> None:
        """steps: number of steps, None for all. counts: count waits of the host, which costs some time."""
        self.seconds: list[float] = []
        self.losses: list[float] = []
        self.waits: list[int] = []  # per step
        self.head_waits: list[int] = []  # per call of the fused head
        self.stalls: list[float] = []  # seconds that each save delays the steps
        self.peak: dict[str, int] = {}
        self.adapters: list[str] = []  # types of the trainable weights
        self._steps, self._counts = steps, counts
        for owner, name, around in (
            (Engine, "train_step", self._step),
            (FusedHead, "forward", self._head),
            (Saver, "save", self._save),
        ):
            setattr(owner, name, self._standing(getattr(owner, name), around))

    @staticmethod
    def _standing(original: Callable[..., Any], around: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *a, **k: around(lambda: original(*a, **k), a[0])

    def _step(self, original: Callable[[], Any], trainer: Engine) -> Any:
        if len(self.seconds) == self._steps:
            raise EnoughError
        if len(self.seconds) == WARM:
            if GPU:
                torch.cuda.reset_peak_memory_stats()
            self.adapters = sorted({str(p.dtype) for p in trainer.model.parameters() if p.requires_grad})
        inside = len(self.head_waits)
        _settle()
        began = time.perf_counter()
        with waits() if self._counts else contextlib.nullcontext([]) as outside:
            sums = original()
        _settle()
        self.seconds.append(time.perf_counter() - began)
        self.waits.append(len(outside) + sum(self.head_waits[inside:]))
        self.losses.append(sums.loss / max(1, sums.tokens))
        if GPU:
            self.peak = {"allocated": torch.cuda.max_memory_allocated()}
            self.peak["reserved"] = torch.cuda.max_memory_reserved()
        return sums

    def _head(self, original: Callable[[], Any], head: FusedHead) -> Any:
        with waits() if self._counts else contextlib.nullcontext([]) as names:
            results = original()
        self.head_waits.append(len(names))
        return results

    def _save(self, original: Callable[[], Any], saver: Saver) -> None:
        _settle()
        began = time.perf_counter()
        original()
        self.stalls.append(time.perf_counter() - began)


def _settle() -> None:
    if GPU:
        torch.cuda.synchronize()


def predicted(config: RunConfig) -> dict[str, float]:
    """Return the bytes, tokens and seconds that `plan` predicts for a step. An unknown GPU has no seconds."""
    ready = check_run(config, 1)
    sizes = sizes_of(ready.model, ready.hf_config)
    attended = ready.data.mean_context()
    setup = setup_of(config, ready.batch, ready.ds_config, ready.objective, attended, ready.attention)
    results = {"bytes": footprint.memory(sizes, setup).total}
    gpu = hardware.accelerator(torch.cuda.get_device_name()) if GPU else None
    if gpu is not None:
        results["seconds"] = footprint.step_time(sizes, setup, gpu).total
    return results | {"tokens": setup.tokens * setup.accumulation}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=10)
    for option in ("--whole", "--waits"):
        parser.add_argument(option, action="store_true")
    parser.add_argument("recipe", type=Path)
    parser.add_argument("options", nargs="*")
    args = parser.parse_args()
    config = load_config(args.recipe, args.options)
    world = start_world()
    prediction = predicted(config)
    watcher = Watcher(None if args.whole else args.steps, args.waits and GPU)
    began = time.perf_counter()
    with contextlib.suppress(EnoughError):
        Trainer(config, world, SignalWatch(), Console("lines" if world.is_main else "quiet")).run()
    results = {key: value for key, value in vars(watcher).items() if not key.startswith("_")}
    results |= {"predicted": prediction, "total": time.perf_counter() - began}
    args.to.write_text(json.dumps(results, indent=1) + "\n")
    end_world()
    return 0


if __name__ == "__main__":
    leave(main())
