"""What a run reports while it trains: metrics.jsonl, TensorBoard, and lines for a human."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

from tqdm import tqdm

from pipeline.engine import Sums

METRICS = "metrics.jsonl"


class Metrics:
    """The reporter of rank 0; on other ranks every method does nothing.

    On resume at `step` the lines of later steps are dropped: those steps are about to be taken again.
    """

    def __init__(
        self, run_dir: Path, step: int, steps: int, active: bool, tensorboard: bool, label: str
    ) -> None:
        self.active = active
        self._window: list[Sums] = []
        self._since = time.perf_counter()
        if not active:
            return
        path = run_dir / METRICS
        kept = [r for r in read_metrics(run_dir) if r["step"] <= step]
        path.write_text("".join(json.dumps(r) + "\n" for r in kept))
        self._file = path.open("a")
        self._board = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(run_dir / "tensorboard"), purge_step=step + 1)
        # disable=None: a bar on a terminal, only the lines of `line` elsewhere.
        self._bar = tqdm(total=steps, initial=step, desc=label, unit="step", disable=None)

    def step(self, sums: Sums) -> None:
        """Count one optimizer step."""
        if self.active:
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
        self._since = time.perf_counter()  # validation is not training time

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

    def _write(self, group: str, record: dict[str, float]) -> None:
        shown = {k: (None if isinstance(v, float) and math.isnan(v) else v) for k, v in record.items()}
        self._file.write(json.dumps(shown) + "\n")
        self._file.flush()
        if self._board is not None:
            for key, value in record.items():
                if key not in ("step", "tokens") and not math.isnan(value):
                    self._board.add_scalar(f"{group}/{key}", value, int(record["step"]))
        parts = [f"step {record['step']}/{self._bar.total}"]
        hidden = {"step"} | ({"skipped"} if not record.get("skipped") else set())
        parts += [f"{k} {_short(v)}" for k, v in shown.items() if k not in hidden and v is not None]
        self.say("  ".join(parts))


def read_metrics(run_dir: Path) -> list[dict[str, float]]:
    """The records of a run, a torn last line left out; empty when there are none."""
    path = run_dir / METRICS
    records = []
    for line in path.read_text().splitlines() if path.is_file() else []:
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records


def _mean(total: float, count: int) -> float:
    return total / count if count else math.nan


def _short(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
