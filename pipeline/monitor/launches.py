"""launches.jsonl: time, hardware, predictions and outcome of each launch of a run.

A launch adds a line when it starts to train and another when it ends. Without the second line, it was killed
or is still running.
"""

from __future__ import annotations

import contextlib
import logging
import time
from pathlib import Path

from emo.common.errors import one_line
from emo.common.provenance import code_version, library_versions
from emo.common.text import counted

from ..config import RunConfig
from ..control.events import log_event
from ..control.heartbeat import find_late_rank, read_ranks
from ..control.run_dir import EXPORT, LAUNCHES, append_records, read_records
from ..control.stop import RESUME
from ..engine.device.devices import device_name, on_gpu
from ..engine.ds_config import zero_stage
from ..planning.checks import TrainingRun
from ..planning.describe import collect_warnings, domain_rows
from ..planning.setup import StepPrediction
from .console import Console

log = logging.getLogger(__name__)


class Launch:
    """Logs and records this launch. Ranks other than 0 write nothing."""

    def __init__(self, run_dir: Path, console: Console, main: bool) -> None:
        self.console = console
        self.reason: str | None = None  # for an end before the run is finished
        self._run_dir = run_dir
        self._main = main
        self._step: int | None = None  # last step, None before training

    def report_previous_failure(self) -> None:
        """Report why the previous launch failed if its ranks could not, as when NCCL aborts at a timeout."""
        records = read_records(self._run_dir / LAUNCHES)[0]
        if not records or records[-1].get("event") != "begin":
            return
        if (reason := find_late_rank(self._run_dir)) is not None:
            log_event(f"the previous launch failed: {reason}", "failed", reason=reason)
            steps = [state.get("step") for state in read_ranks(self._run_dir).values()]
            step = max([records[-1]["step"], *(step for step in steps if isinstance(step, int))])
            self._append("end", step=step, how="failed", reason=reason)

    def log_start(
        self,
        config: RunConfig,
        run: TrainingRun,
        predicted: StepPrediction | None,
        step: int,
        tokens: int,
        hosts: int,
    ) -> None:
        """Log what is about to be trained, and record the launch.

        Args:
            config: The recipe.
            run: The resolved recipe.
            predicted: Duration, MFU and memory of a step, or None for unknown hardware.
            step: Steps that earlier launches have taken.
            tokens: Supervised tokens of these steps.
            hosts: Number of hosts.
        """
        self._step = step
        if not self._main:
            return
        batch = run.batch
        device = device_name()
        log.info("objective %s on %s; %s", run.objective, device, batch)
        for name, text in domain_rows(config, run):
            log.info("%s: %s", name, text)
        for warning in collect_warnings(config, run, on_cpu=not on_gpu()):
            log.warning(warning)
        facts: dict[str, object] = {
            "step": step,
            "tokens": tokens,
            "steps": run.steps,
            "ranks": batch.ranks,
            "hosts": hosts,
            "device": device,
            "batch": batch.batch,
            "micro_batch": batch.micro,
            "accumulation": batch.accumulation,
            "block": config.data.sequence_len,
            "zero_stage": zero_stage(run.ds_config),
            "attention": run.attention,
            "planned": predicted and predicted.recorded,
        }
        if any(mixture for _, mixture in run.mixtures):
            facts["mixtures"] = [{"step": first, "mixture": m and m.label} for first, m in run.mixtures]
        versions = library_versions("torch", "transformers", "deepspeed")
        self._append("begin", **facts, git=code_version(), **versions)

    def log_sample(self, step: int, text: str) -> None:
        """Log how the model continued the first prompt."""
        log_event(f"step {step:,}  sample: {one_line(text[:100])}", "sample", step=step, text=text)

    def log_stopping(self, step: int, reason: str | None) -> None:
        """Log that all ranks stop after `step`. If `reason` is None, an error follows."""
        self._step = step
        self.reason = reason
        if reason is not None:
            text = f"stopping after step {step:,} ({reason}): saving"
            log_event(text, "stopping", step=step, reason=reason)

    def log_end(self, step: int, finished: bool) -> None:
        """Log how the run ended. Called when everything is written."""
        self._step = step
        export = str(self._run_dir / EXPORT)
        if finished:
            text = f"finished after {counted(step, 'step')}; export: {export}"
            log_event(text, "finished", step=step, export=export)
        else:
            text = f"stopped after step {step:,} and saved ({self.reason}); {RESUME}"
            log_event(text, "stopped", step=step, reason=self.reason)

    def record_end(self, outcome: str, step: int) -> None:
        """Record the outcome (finished, stopped or failed) and the last step (0 if no step was taken)."""
        if self._main and self._step is not None:
            with contextlib.suppress(OSError):  # a full disk may be the reason for the end
                self._append("end", step=max(step, self._step), how=outcome, reason=self.reason)

    def _append(self, event: str, **fields: object) -> None:
        append_records(self._run_dir / LAUNCHES, [{"event": event, "time": time.time(), **fields}])
