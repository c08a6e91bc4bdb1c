"""metrics.jsonl: what a run records while it trains, and the progress that the console shows."""

from __future__ import annotations

import functools
import json
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from typing import Any

import torch

from emo.common.errors import one_line
from emo.common.io.files import replace_nonfinite
from emo.data_prep.config import VALIDATION, split_of

from ..batches.loader import StepBatch
from ..config import RunConfig, flatten
from ..control.run_dir import METRICS, drop_records
from ..engine.device.devices import on_gpu
from ..engine.device.hardware import GIB
from ..engine.totals import StepTotals
from ..loss.fused import summarize_weights
from .component import Component, RunState
from .console import Console, Progress
from .documents import Documents, compute_change, drop_documents, read_documents, write_documents
from .loggers import LOGGERS
from .stragglers import Stragglers

log = logging.getLogger(__name__)

NOT_MEASURED = ("set", "time", "slowest_host")  # keys of a record that loggers do not receive


@dataclass
class Window:
    """Sums over the steps since the last record.

    A checkpoint holds them, so that a resumed run logs what an undisturbed run does.
    """

    steps: int = 0
    skipped: int = 0
    tokens: int = 0  # supervised tokens of all steps
    applied_tokens: float = 0  # weight of the tokens of the steps that updated the model, for means
    data_tokens: float = 0  # those of them that are from the data, for means of `nll`, `demd` and domains
    loss: float = 0.0
    nll: float = 0.0
    demd: float = 0.0
    divergence: float = 0.0  # from a teacher; NaN without one
    norm: float = 0.0
    largest_norm: float = 0.0
    seconds: float = 0.0  # of training, without saving and validation
    written: int = 0  # tokens that the model wrote
    writing_seconds: float = 0.0  # part of `seconds`
    weights: list[float] = field(default_factory=list)  # histogram, see loss/fused.py
    # By domain, if there are several: [supervised tokens, loss, NLL] of the steps that updated the model,
    # and supervised tokens of the whole run so far, both weighted.
    domains: list[list[float]] = field(default_factory=list)
    domain_tokens: list[float] = field(default_factory=list)

    def add(self, totals: StepTotals, seconds: float, written: bool = False) -> None:
        """Count one step, which took `seconds`. written: whether the model wrote its text."""
        self.steps += 1
        self.tokens += totals.tokens
        self.seconds += seconds
        self.domain_tokens = _add_lists(self.domain_tokens, [domain.tokens for domain in totals.domains])
        self.domains = self.domains or [[0, 0.0, 0.0] for _ in totals.domains]
        if not totals.applied:
            self.skipped += 1
            return
        self.applied_tokens += totals.divisor
        self.loss += totals.loss
        self.divergence += totals.divergence
        self.norm += totals.grad_norm
        self.largest_norm = max(self.largest_norm, totals.grad_norm)
        self.weights = _add_lists(self.weights, totals.weights)
        if written:  # its NLL is the entropy of the model
            return
        self.data_tokens += totals.divisor
        self.nll += totals.nll
        self.demd += totals.demd
        self.domains = [_add_lists(*two) for two in zip(self.domains, totals.domains, strict=True)]

    def record(self, domains: Sequence[str]) -> dict[str, object]:
        """Return means over the window, also of each domain if there are several."""
        applied = self.steps - self.skipped
        record: dict[str, object] = {
            **means_per_token(self, self.applied_tokens, self.data_tokens),
            "grad_norm": _mean(self.norm, applied),
            "grad_norm_max": self.largest_norm if applied else math.nan,
            "skipped": self.skipped,
            "tokens_per_s": _mean(self.tokens, self.seconds),
            **(summarize_weights(self.weights) if self.weights else {}),
        }
        if self.written:
            record |= {"written_tokens": self.written, "writing_seconds": self.writing_seconds}
        if self.domains:
            parts = zip(domains, self.domain_tokens, self.domains, strict=True)
            record["domains"] = {
                name: {"tokens": so_far, "nll": _mean(nll, tokens), "loss": _mean(loss, tokens)}
                for name, so_far, (tokens, loss, nll) in parts
            }
        return record


@dataclass(frozen=True)
class RunFacts:
    """Facts about a run that its metrics need."""

    rows: int = 0  # of the training data, 0 if not known
    domains: Sequence[str] = ()  # names of the domains whose losses are summed separately
    validates: bool = True  # whether the run has validation sets
    hosts: Sequence[str] = ()  # by rank, if there are several ranks
    peak_share: float | None = None  # model FLOPs of one step over what the hardware could do in a second


class Metrics(Component):
    """Records metrics on rank 0. On other ranks every method does nothing.

    When a run resumes, records of later steps are dropped: those steps will be taken again.
    """

    name = "metrics"

    def __init__(
        self,
        config: RunConfig,
        start: RunState,
        active: bool,
        facts: RunFacts,
        console: Console,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Open the files and loggers of the run.

        Args:
            config: The configuration of the run.
            start: Where this launch begins.
            active: Whether this is rank 0.
            facts: Facts about the run.
            console: Shows progress and records.
            clock: Returns the time in seconds.
        """
        self.active = active
        self._clock = clock
        self._mark = clock()
        self._paused = 0.0
        self._logging_steps = config.train.logging_steps
        if not active:
            return
        self._facts = facts
        self._window = Window()
        self._stragglers = Stragglers(facts.hosts)
        self._console = console
        every = {"validation": config.train.eval_steps * facts.validates, "save": config.train.save_steps}
        self._progress = Progress(start.step, start.steps, every)
        self._epochs_per_step = config.train.global_batch_size / facts.rows if facts.rows else math.nan
        self._run_dir = config.output_dir
        drop_documents(self._run_dir, start.step)
        drop_records(self._run_dir / METRICS, start.step)
        self._file = (self._run_dir / METRICS).open("a", encoding="utf-8")
        self._warned = False  # that a tracker failed
        self._loggers = [LOGGERS[name](config, start.step) for name in config.train.report_to]
        if on_gpu():
            torch.cuda.reset_peak_memory_stats()  # loading is over

    def after_step(self, state: RunState, batch: StepBatch, totals: StepTotals) -> None:
        """Count the step, and record the window when it is due."""
        if not self.active:
            return
        if batch.written is not None:
            self._window.written += batch.written.tokens
            self._window.writing_seconds += batch.written.seconds
        now = self._clock()
        self._window.add(totals, now - self._mark, batch.written is not None)
        self._stragglers.add(totals.seconds)
        loss = _mean(self._window.loss, self._window.applied_tokens)  # as the next record will have it
        self._progress.count(state.step, now - self._mark, self._paused, totals.tokens, loss)
        self._mark = now
        self._paused = 0.0
        self._console.progress(self._progress)
        if state.is_due(self._logging_steps):
            self._record_window(state)

    def _record_window(self, state: RunState) -> None:
        """Record the steps since the last record.

        `domains` has the tokens of each domain so far, and its loss and NLL over the window. `mfu` is the
        share of the peak that the model needs, without what activation checkpointing computes again.
        `memory_gib` is the largest memory that rank 0's GPU held. `rank_seconds_...` are the seconds per step
        in which a rank does not wait for others (engine/device/pace.py).
        """
        record: dict[str, object] = {"step": state.step, "tokens": state.tokens, "lr": state.lr}
        record |= self._window.record(self._facts.domains)
        if self._facts.peak_share is not None:
            record["mfu"] = self._facts.peak_share * _mean(self._window.steps, self._window.seconds)
        if on_gpu():
            record["memory_gib"] = torch.cuda.max_memory_allocated() / GIB  # does not wait for the device
        record |= self._stragglers.record(_mean(self._window.seconds, self._window.steps))
        self._window = Window(domain_tokens=self._window.domain_tokens)
        self._console.record(self._write("train", state.step, record))

    def state_dict(self) -> dict[str, object]:
        """Return the steps since the last record."""
        return replace_nonfinite(asdict(self._window)) if self.active else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.active:
            self._window = Window(**json.loads(json.dumps(state).replace("null", "NaN")))

    def record_validation(self, state: RunState, name: str, totals: StepTotals, documents: Documents) -> None:
        """Record a pass over the validation set `name`, and how its NLL changed since step 0."""
        if not self.active:
            return
        means = {f"validation_{key}": value for key, value in means_per_token(totals, totals.divisor).items()}
        if not math.isnan(totals.kl_from_base):
            means["validation_kl_from_base"] = _mean(totals.kl_from_base, totals.divisor)
        record = {"step": state.step, "tokens": state.tokens, "set": name, **means}
        write_documents(self._run_dir, name, state.step, documents)
        start = read_documents(self._run_dir, name, 0) if state.step else None
        changed = None if start is None else compute_change(start, documents)
        if changed is not None:
            limits = {"": changed.value, "_low": changed.low, "_high": changed.high}
            record |= {f"validation_change{end}": value for end, value in limits.items()}
        event = self._write(split_of(name), state.step, record)
        labels = {"loss": "loss", "nll": "NLL", "perplexity": "perplexity", "demd": "DEMD"}
        labels |= {"divergence": "divergence", "kl_from_base": "KL from base"}
        values = ((label, event.get(f"validation_{key}")) for key, label in labels.items())
        parts = [f"{label} {x:.4g}" for label, x in values if x is not None] or ["not finite"]
        parts += [f"NLL since step 0 {changed}"] if changed is not None else []
        title = "validation" if name == VALIDATION else f"validation {name}"
        text = f"step {state.step:,}/{state.steps:,}  {title}: {', '.join(parts)}"
        self._console.event(text, "validation", **event)

    def record_rest(self, state: RunState) -> None:
        """Record the steps since the last record, of a run that ends between two records."""
        if self.active and self._window.steps:
            self._record_window(state)

    def exclude_pause(self) -> None:
        """Exclude the time since the last step from the pace: it went into saving or validation."""
        now = self._clock()
        self._paused += now - self._mark
        self._mark = now

    def close(self) -> None:
        if self.active:
            self._file.close()
            for logger in reversed(self._loggers):
                self._call_tracker(logger.close)

    def _write(self, group: str, step: int, record: Mapping[str, object]) -> dict[str, Any]:
        """Write a record. Return it with None instead of numbers that are not finite.

        metrics.jsonl also has `time`, the seconds since 1970 (UTC), and `epoch`, the passes over the data.
        """
        finite: dict[str, Any] = replace_nonfinite(record)
        line = replace_nonfinite({"time": time.time(), "epoch": self._epochs_per_step * step}) | finite
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()
        measured = {key: value for key, value in line.items() if key not in NOT_MEASURED}
        values = dict(flatten({group: measured}, "/"))
        for logger in self._loggers:
            self._call_tracker(functools.partial(logger.log, values, step))
        return finite

    def _call_tracker(self, call: Callable[[], None]) -> None:
        """Call a tracker. Training continues if it fails."""
        try:
            call()
        except Exception as error:  # its server may be gone, and it may raise anything
            line = "train.report_to: a tracker failed (%s); metrics.jsonl has every record"
            log.log(logging.DEBUG if self._warned else logging.WARNING, line, one_line(error, 120))
            self._warned = True


def means_per_token(
    totals: Window | StepTotals, tokens: float, data_tokens: float | None = None
) -> dict[str, float]:
    """Return losses per supervised token. data_tokens: those from the data, if there are others."""
    data_tokens = tokens if data_tokens is None else data_tokens
    nll = _mean(totals.nll, data_tokens)
    means = {
        "loss": _mean(totals.loss, tokens),
        "nll": nll,
        "perplexity": math.exp(min(nll, 100.0)),
        "demd": _mean(totals.demd, data_tokens),
    }
    if not math.isnan(totals.divergence):
        means["divergence"] = _mean(totals.divergence, tokens)
    return means


def _mean(total: float, count: float) -> float:
    return total / count if count else math.nan


def _add_lists(a: Sequence[Any], b: Sequence[Any]) -> list[Any]:
    return [x + y for x, y in zip_longest(a, b, fillvalue=0)]
