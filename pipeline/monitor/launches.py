"""launches.jsonl: when the run was launched, on what, from which step, what was planned, and how it ended.

A line when a launch begins to train and one when it ends. A launch without the second was killed, or runs.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from pathlib import Path
from typing import Any

import torch

from emo.common.errors import one_line
from emo.common.provenance import code_version, library_versions
from emo.common.text import counted

from ..config import RunConfig
from ..control.heartbeat import late, read_ranks
from ..control.run_dir import EXPORT, LAUNCHES, read_records
from ..control.stop import RESUME
from ..engine.devices import on_gpu
from ..engine.ds_config import zero_stage
from ..engine.hardware import GIB, accelerator
from ..planning.checks import Ready
from ..planning.footprint import memory, step_time, utilisation
from ..planning.plan import collect_warnings, domain_rows, setup_of, sizes_of
from .console import Console

log = logging.getLogger(__name__)


class Launch:
    """This launch, as its user and launches.jsonl hear of it. On ranks other than 0 nothing is written."""

    def __init__(self, run_dir: Path, console: Console, main: bool) -> None:
        self.console = console
        self.reason: str | None = None  # why it ends before the run is finished
        self._run_dir, self._main = run_dir, main
        self._step: int | None = None  # that was reached last; None: it has not begun to train

    def before(self) -> None:
        """Say of the launch before what its ranks could not: NCCL aborts all of them at a time-out."""
        records = read_records(self._run_dir / LAUNCHES)[0]
        if records and records[-1].get("event") == "begin" and (reason := late(self._run_dir)) is not None:
            _tell(f"the launch before failed: {reason}", "failed", reason=reason)
            steps = [state.get("step") for state in read_ranks(self._run_dir).values()]
            step = max([records[-1]["step"], *(step for step in steps if isinstance(step, int))])
            self._append("end", step=step, how="failed", reason=reason)

    def begun(self, config: RunConfig, ready: Ready, step: int, tokens: int, hosts: int) -> None:
        """Training goes on after `step`, on so many hosts."""
        self._step = step
        if not self._main:
            return
        batch, planned = ready.batch, None
        device = torch.cuda.get_device_name() if on_gpu() else "CPU"
        log.info("objective %s on %s; %s", ready.objective, device, batch)
        for name, text in domain_rows(config, ready):
            log.info("%s: %s", name, text)
        for warning in collect_warnings(config, ready, on_cpu=not on_gpu()):
            log.warning(warning)
        if (gpu := accelerator(device)) is not None:  # what the footprint predicts of a step on it
            sizes = sizes_of(ready.model, ready.hf_config)
            attended = None if ready.data is None else ready.data.mean_context()
            setup = setup_of(config, batch, ready.ds_config, ready.objective, attended)
            seconds = step_time(sizes, setup, gpu).total
            planned = {"seconds": seconds, "mfu": utilisation(sizes, setup, seconds, gpu)}
            planned["memory_gib"] = memory(sizes, setup).total / GIB
        facts: dict[str, Any] = {"step": step, "tokens": tokens, "steps": ready.steps, "ranks": batch.ranks}
        facts |= {"hosts": hosts, "device": device, "batch": batch.batch, "micro_batch": batch.micro}
        facts |= {"accumulation": batch.accumulation, "block": config.data.sequence_len}
        facts |= {"zero_stage": zero_stage(ready.ds_config), "attention": ready.attention, "planned": planned}
        if any(mixture for _, mixture in ready.mixtures):
            facts["mixtures"] = [{"step": first, "mixture": m and m.label} for first, m in ready.mixtures]
        facts |= {"git": code_version(), **library_versions("torch", "transformers", "deepspeed")}
        self._append("begin", **facts)

    def sampled(self, step: int, text: str | None) -> None:
        """Show how the model went on with the first prompt."""
        if text is not None:
            _tell(f"step {step:,}  sample: {one_line(text[:100])}", "sample", step=step, text=text)

    def stopping(self, step: int, reason: str | None) -> None:
        """Note that all ranks stop after `step`; without a reason, an error that is to come says why."""
        self._step, self.reason = step, reason
        if reason is not None:
            _tell(f"stopping after step {step:,} ({reason}): saving", "stopping", step=step, reason=reason)

    def done(self, step: int, finished: bool) -> None:
        """Note that all is written."""
        self._step = step
        export = str(self._run_dir / EXPORT)
        if finished:
            text = f"finished after {counted(step, 'step')}; export: {export}"
            _tell(text, "finished", step=step, export=export)
        else:
            text = f"stopped after step {step:,} and saved ({self.reason}); {RESUME}"
            _tell(text, "stopped", step=step, reason=self.reason)

    def ended(self, outcome: str, step: int) -> None:
        """Note how it ended, finished, stopped or failed, and the last step that it took; 0 for none."""
        if self._main and self._step is not None:
            with contextlib.suppress(OSError):  # the full disk may be why it ends
                self._append("end", step=max(step, self._step), how=outcome, reason=self.reason)

    def _append(self, event: str, **fields: Any) -> None:
        append(self._run_dir / LAUNCHES, {"event": event, "time": time.time(), **fields})


def _tell(line: str, event: str, **fields: Any) -> None:
    log.info("%s", line, extra={"event_fields": {"event": event, **fields}})


def append(path: Path, record: dict[str, Any]) -> None:
    """Add a line to a file of JSON lines, also where a killed writer has left a piece of one."""
    with path.open("a+b") as file:
        file.seek(max(0, file.tell() - 1))
        torn = file.read(1) not in (b"", b"\n")
        file.write(b"\n" * torn + json.dumps(record, allow_nan=False).encode() + b"\n")
