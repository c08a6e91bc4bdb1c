"""What a run reports while it trains: metrics.jsonl, TensorBoard, W&B, a heartbeat, and lines for a human."""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import time
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from common.errors import UserError, one_line
from common.files import write_text
from pipeline.config import RunConfig
from pipeline.engine import Sums
from pipeline.run_dir import HEARTBEAT, METRICS, PROFILE, read_metrics

BEAT = 5.0  # seconds between heartbeats


class Metrics:
    """The reporter of rank 0; on other ranks every method does nothing.

    On resume at `step` the lines of later steps are dropped: those steps are about to be taken again.
    """

    def __init__(
        self, config: RunConfig, step: int, steps: int, active: bool, peak_share: float | None = None
    ) -> None:
        """peak_share: share of the hardware's peak that one step per second would be (for MFU)."""
        self.active = active
        self._window: list[Sums] = []
        self._since = time.perf_counter()
        self._peak_share = peak_share
        self._beaten = -math.inf
        if not active:
            return
        self._run_dir = run_dir = config.run_dir
        path = run_dir / METRICS
        kept = [r for r in read_metrics(run_dir) if r["step"] <= step]
        path.write_text("".join(json.dumps(r) + "\n" for r in kept))
        self._file = path.open("a")
        self._board = self._wandb = None
        if config.train.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(run_dir / "tensorboard"), purge_step=step + 1)
        if config.train.wandb is not None:
            self._wandb = _wandb_run(config)
        self._profiler = Profiler(run_dir, *config.train.profile) if config.train.profile else None
        # disable=None: a bar on a terminal, only the lines of `line` elsewhere.
        self._bar = tqdm(total=steps, initial=step, desc=run_dir.name, unit="step", disable=None)

    def starts(self, step: int) -> None:
        """Step `step` (from 1) is about to be taken."""
        if self.active and self._profiler is not None:
            self._profiler.starts(step)

    def step(self, step: int, sums: Sums) -> None:
        """Count one optimizer step."""
        if self.active:
            self.beat(step, "training")
            if self._profiler is not None:
                self._profiler.ends(step)
            self._window.append(sums)
            self._bar.update()
            self._bar.set_postfix(nll=f"{_mean(sums.nll, sums.tokens):.3f}")

    def log(self, step: int, tokens: int, lr: float, grad_norm: float) -> None:
        """Record the steps since the last call as one line. tokens: supervised tokens so far."""
        if not self.active or not self._window:
            return
        now = time.perf_counter()
        done = [s for s in self._window if s.applied]
        count = sum(s.tokens for s in done)
        nll = _mean(sum(s.nll for s in done), count)
        record = {
            "step": step,
            "tokens": tokens,
            "loss": _mean(sum(s.loss for s in done), count),
            "nll": nll,
            "perplexity": math.exp(min(nll, 100.0)),
            "demd": _mean(sum(s.demd for s in done), count),
            "lr": lr,
            "grad_norm": grad_norm,
            "skipped": len(self._window) - len(done),
            "tokens_per_s": count / (now - self._since),
        }
        if self._peak_share is not None:
            record["mfu"] = self._peak_share * len(self._window) / (now - self._since)
        self._window, self._since = [], now
        self._write("train", record)

    def validation(self, step: int, tokens: int, sums: Sums) -> None:
        """Record a validation pass."""
        if not self.active:
            return
        nll = _mean(sums.nll, sums.tokens)
        record = {
            "step": step,
            "tokens": tokens,
            "validation_loss": _mean(sums.loss, sums.tokens),
            "validation_nll": nll,
            "validation_perplexity": math.exp(min(nll, 100.0)),
            "validation_demd": _mean(sums.demd, sums.tokens),
        }
        self._write("validation", record)

    def beat(self, step: int, doing: str) -> None:
        """Renew heartbeat.json, at most every few seconds."""
        if self.active and time.monotonic() - self._beaten > BEAT:
            self._beaten = time.monotonic()
            beat = {"time": time.time(), "step": step, "doing": doing}
            beat |= {"host": socket.gethostname(), "pid": os.getpid()}
            with contextlib.suppress(OSError):  # a full disk is told by what must be written
                write_text(self._run_dir / HEARTBEAT, json.dumps(beat))

    def pause(self) -> None:
        """Time since the last record that was no training does not count: saving, validation."""
        self._since = time.perf_counter()

    def say(self, text: str) -> None:
        """A line for the human, above the bar."""
        if self.active:
            tqdm.write(text)

    def close(self) -> None:
        """End the bar and flush the files."""
        if self.active:
            self._bar.close()
            self._file.close()
            if self._board is not None:
                self._board.close()
            if self._wandb is not None:
                self._wandb.finish()

    def _write(self, group: str, record: dict[str, float]) -> None:
        shown = {k: (None if isinstance(v, float) and math.isnan(v) else v) for k, v in record.items()}
        self._file.write(json.dumps(shown) + "\n")
        self._file.flush()
        if self._board is not None:
            for key, value in record.items():
                if key not in ("step", "tokens") and not math.isnan(value):
                    self._board.add_scalar(f"{group}/{key}", value, int(record["step"]))
        if self._wandb is not None:
            self._wandb.log({f"{group}/{k}": v for k, v in shown.items()}, step=int(record["step"]))
        parts = [f"step {record['step']}/{self._bar.total}"]
        hidden = {"step"} | ({"skipped"} if not record.get("skipped") else set())
        parts += [f"{k} {_short(v)}" for k, v in shown.items() if k not in hidden and v is not None]
        self.say("  ".join(parts))


class Profiler:
    """Records steps `first` to `last` of this process with torch.profiler."""

    def __init__(self, run_dir: Path, first: int, last: int) -> None:
        self._path, self._first, self._last = run_dir / PROFILE, first, last
        self._profile: Any = None

    def starts(self, step: int) -> None:
        """Begin to record when the window begins."""
        if step == self._first:
            self._profile = torch.profiler.profile()
            self._profile.start()

    def ends(self, step: int) -> None:
        """Write the trace when the window ends."""
        if step == self._last and self._profile is not None:
            self._profile.stop()
            self._profile.export_chrome_trace(str(self._path))
            self._profile = None


def _wandb_run(config: RunConfig) -> Any:
    """The W&B run that belongs to the run directory, gone on with after a restart."""
    import wandb

    name = config.run_dir.name
    try:
        return wandb.init(
            project=config.train.wandb,
            name=name,
            id=name,
            resume="allow",
            dir=config.run_dir,
            config=config.model_dump(mode="json"),
        )
    except wandb.errors.Error as error:
        line = one_line(error, 200)
        raise UserError(
            f"train.wandb={config.train.wandb}: {line}; set WANDB_API_KEY, or WANDB_MODE=offline"
        ) from None


def _mean(total: float, count: int) -> float:
    return total / count if count else math.nan


def _short(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
