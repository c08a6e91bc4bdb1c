"""What a run records while it trains: metrics.jsonl, TensorBoard, W&B; and what the console is told of it."""

from __future__ import annotations

import json
import math
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from typing import Any

import torch

from emo.common.errors import UserError, one_line
from emo.common.io.files import finite, write_once
from emo.data_prep.config import VALIDATION, split_of

from ..config import RunConfig
from ..control.run_dir import METRICS, WANDB_ID, drop_records
from ..engine.devices import on_gpu
from ..engine.engine import Sums
from ..engine.hardware import GIB
from ..engine.pace import Stragglers
from ..loss.fused import summarize_weights
from . import validation
from .console import Console, Progress

WORDS = ("set", "time", "slowest_host")  # of a record, that are no measurements


@dataclass
class Window:
    """Sums over the steps since the last record. A checkpoint carries them, so that a resumed run logs what
    an undisturbed one does."""

    steps: int = 0
    skipped: int = 0
    tokens: int = 0  # supervised, of all steps
    applied_tokens: int = 0  # of the steps that updated the weights; the means are over these
    loss: float = 0.0
    nll: float = 0.0
    demd: float = 0.0
    divergence: float = 0.0  # from a teacher; NaN without one
    norm: float = 0.0
    largest_norm: float = 0.0
    seconds: float = 0.0  # of training, without saving and validation
    written: int = 0  # tokens that the model wrote itself
    writing_seconds: float = 0.0  # of `seconds`
    weights: list[float] = field(default_factory=list)  # histogram, see loss/fused.py
    # Of each domain, where there are several: supervised tokens of the steps that updated the weights, loss,
    # and NLL. Of the whole run so far: supervised tokens.
    domains: list[list[float]] = field(default_factory=list)
    domain_tokens: list[int] = field(default_factory=list)

    def add(self, sums: Sums, norm: float, seconds: float) -> None:
        """Count one step; `norm` is that of its gradient before clipping."""
        self.steps += 1
        self.tokens += sums.tokens
        self.seconds += seconds
        self.domain_tokens = _added(self.domain_tokens, [domain.tokens for domain in sums.domains])
        self.domains = self.domains or [[0, 0.0, 0.0] for _ in sums.domains]
        if not sums.applied:
            self.skipped += 1
            return
        self.applied_tokens += sums.tokens
        self.loss += sums.loss
        self.nll += sums.nll
        self.demd += sums.demd
        self.divergence += sums.divergence
        self.norm += norm
        self.largest_norm = max(self.largest_norm, norm)
        self.weights = _added(self.weights, sums.weights)
        self.domains = [_added(*two) for two in zip(self.domains, sums.domains, strict=True)]

    def record(self, domains: Sequence[str]) -> dict[str, Any]:
        """Return means over the window; of each of several `domains`, too."""
        applied = self.steps - self.skipped
        record: dict[str, Any] = _means(self, self.applied_tokens) | {
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


class Metrics:
    """The reporter of rank 0; on other ranks every method does nothing.

    On resume at `step` the lines of later steps are dropped: those steps are about to be taken again.
    """

    def __init__(
        self,
        config: RunConfig,
        step: int,
        steps: int,
        active: bool,
        peak_share: float | None = None,
        window: dict[str, Any] | None = None,
        clock: Callable[[], float] = time.perf_counter,
        console: Console | None = None,
        validates: bool = True,
        domains: Sequence[str] = (),
        rows: int = 0,
        hosts: Sequence[str] = (),
    ) -> None:
        """peak_share: share of the hardware's peak that one step per second would be (for MFU).

        window: what `state` returned when the checkpoint of `step` was saved. console: of plain lines where
        none is given. validates: whether the run has validation rows, for what comes next. domains: names of
        those whose sums come apart. rows: of the training data, where they are known. hosts: by rank, of
        several.
        """
        self.active, train = active, config.train
        self._clock, self._mark, self._paused = clock, clock(), 0.0
        self._opened = ExitStack()
        if not active:
            return
        self._peak_share, self._domains = peak_share, domains
        numbers = json.dumps(window or {}).replace("null", "NaN")  # as `state` has it
        self._window = Window(**json.loads(numbers))
        self._stragglers = Stragglers(hosts)
        self._console = console or Console()
        every = {"validation": train.eval_steps * validates, "save": train.save_steps}
        self._progress = Progress(step, steps, every)
        self._epochs = train.global_batch_size / rows if rows else math.nan  # of a step
        self._run_dir = run_dir = config.output_dir
        validation.drop(run_dir, step)
        drop_records(run_dir / METRICS, step)
        self._file = self._opened.enter_context((run_dir / METRICS).open("a", encoding="utf-8"))
        self._board = self._wandb = None
        if "tensorboard" in train.report_to:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(run_dir / "tensorboard"), purge_step=step + 1 if step else 0)
            self._opened.callback(self._board.close)
        if "wandb" in train.report_to:
            self._wandb = _wandb_run(config)
            self._opened.callback(self._wandb.finish)
        if on_gpu():
            torch.cuda.reset_peak_memory_stats()  # loading is over

    def written(self, tokens: int, seconds: float) -> None:
        """Count what the model has written for the next step."""
        if self.active:
            self._window.written += tokens
            self._window.writing_seconds += seconds

    def step(self, step: int, sums: Sums, grad_norm: float) -> None:
        """Count one optimizer step; `grad_norm` is before clipping."""
        if not self.active:
            return
        now = self._clock()
        self._window.add(sums, grad_norm, now - self._mark)
        self._stragglers.add(sums.seconds)
        loss = _mean(self._window.loss, self._window.applied_tokens)  # as the next record will have it
        self._progress.count(step, now - self._mark, self._paused, sums.tokens, loss)
        self._mark, self._paused = now, 0.0
        self._console.progress(self._progress)

    def log(self, step: int, tokens: int, lr: float) -> None:
        """Record the steps since the last record as one line. tokens: supervised tokens so far.

        `domains` has the tokens so far of each domain, and its loss and NLL over the window. `mfu` is the
        share of the peak spent on what the model needs: what is computed again under activation
        checkpointing does not count. `memory_gib` is the most that rank 0's GPU held. `rank_seconds_...` are
        seconds a step that ranks work alone (pace.py).
        """
        if not self.active or not self._window.steps:
            return
        record = {"step": step, "tokens": tokens, "lr": lr, **self._window.record(self._domains)}
        if self._peak_share is not None:
            record["mfu"] = self._peak_share * _mean(self._window.steps, self._window.seconds)
        if on_gpu():
            record["memory_gib"] = torch.cuda.max_memory_allocated() / GIB  # a counter of the host's
        record |= self._stragglers.record(_mean(self._window.seconds, self._window.steps))
        self._window = Window(domain_tokens=self._window.domain_tokens)
        self._console.record(self._write("train", record), self._progress)

    def state(self) -> dict[str, Any]:
        """Return the steps that are counted and not recorded yet, as JSON can hold them."""
        return finite(asdict(self._window)) if self.active else {}

    def validation(
        self, step: int, tokens: int, name: str, sums: Sums, documents: validation.Documents
    ) -> None:
        """Record a pass over the validation set `name`, and how it changed since step 0."""
        if not self.active:
            return
        means = {f"validation_{key}": value for key, value in _means(sums, sums.tokens).items()}
        record = {"step": step, "tokens": tokens, "set": name, **means}
        validation.write(self._run_dir, name, step, documents)
        start = validation.read(self._run_dir, name, 0) if step else None
        changed = None if start is None else validation.change(start, documents)
        if changed is not None:
            limits = {"": changed.value, "_low": changed.low, "_high": changed.high}
            record |= {f"validation_change{end}": value for end, value in limits.items()}
        event = self._write(split_of(name), record)
        words = {"loss": "loss", "nll": "NLL", "perplexity": "perplexity", "demd": "DEMD"}
        words["divergence"] = "divergence"
        values = ((word, event.get(f"validation_{key}")) for key, word in words.items())
        parts = [f"{word} {x:.4g}" for word, x in values if x is not None] or ["not finite"]
        parts += [f"NLL since step 0 {changed}"] if changed is not None else []
        title = "validation" if name == VALIDATION else f"validation {name}"
        text = f"step {step:,}/{self._progress.steps:,}  {title}: {', '.join(parts)}"
        self._console.event(text, "validation", **event)

    def pause(self) -> None:
        """Leave the time since the last step out of the pace: it went into saving or validation."""
        now = self._clock()
        self._mark, self._paused = now, self._paused + now - self._mark

    def close(self) -> None:
        """Flush the files."""
        self._opened.close()

    def _write(self, group: str, record: dict[str, Any]) -> dict[str, Any]:
        """Keep a record; return it with None where JSON has no number.

        In metrics.jsonl it has the `time` of writing, in seconds since 1970 (UTC), and in `epoch` how many
        times as many rows as the data have were trained on.
        """
        record, step = finite(record), int(record["step"])
        whole = finite({"time": time.time(), "epoch": self._epochs * step}) | record
        self._file.write(_line(whole))
        self._file.flush()
        values = dict(_leaves({key: x for key, x in whole.items() if key not in WORDS}, group))
        if self._wandb is not None:
            self._wandb.log(values, step=step)
        if self._board is not None:
            for key in values.keys() - {f"{group}/step", f"{group}/tokens"}:
                if values[key] is not None:
                    self._board.add_scalar(key, values[key], step)
        return record


def _wandb_run(config: RunConfig) -> Any:
    """Return the W&B run that belongs to the run directory, resumed after a restart."""
    import wandb

    run_dir = config.output_dir
    write_once(run_dir / WANDB_ID, secrets.token_hex(8))
    which: dict[str, Any] = {"project": config.train.project, "name": run_dir.name, "dir": run_dir}
    which |= {"id": (run_dir / WANDB_ID).read_text(encoding="utf-8"), "resume": "allow"}
    try:
        return wandb.init(**which, config=config.model_dump(mode="json"))
    except wandb.errors.Error as error:
        problem = f"train.report_to=[wandb]: {one_line(error, 200)}"
        raise UserError(f"{problem}; set WANDB_API_KEY, or WANDB_MODE=offline") from None


def _means(sums: Window | Sums, tokens: int) -> dict[str, float]:
    """Return losses per supervised token."""
    loss, nll, demd = (_mean(total, tokens) for total in (sums.loss, sums.nll, sums.demd))
    means = {"loss": loss, "nll": nll, "perplexity": math.exp(min(nll, 100.0)), "demd": demd}
    taught = not math.isnan(sums.divergence)
    return means | ({"divergence": _mean(sums.divergence, tokens)} if taught else {})


def _mean(total: float, count: float) -> float:
    return total / count if count else math.nan


def _added(a: Sequence[Any], b: Sequence[Any]) -> list[Any]:
    return [x + y for x, y in zip_longest(a, b, fillvalue=0)]


def _leaves(record: dict[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    """Yield every value of a record with its path, as in `train/domains/home/nll`."""
    for key, value in record.items():
        inner = f"{path}/{key}"
        yield from _leaves(value, inner) if isinstance(value, dict) else [(inner, value)]


def _line(record: dict[str, Any]) -> str:
    return json.dumps(finite(record), allow_nan=False) + "\n"
