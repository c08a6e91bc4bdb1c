"""The training loop.

for each step s:
    rows    = positions [s*B, (s+1)*B) of the seeded order           (batches.py)
    divisor = supervised tokens of those rows, over all ranks
    loss    = sum over tokens of the objective / divisor             (objectives.py, fused.py)
    AdamW step at the scheduled rate                                 (engine.py)
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import gc
import json
import logging
import math
import shutil
import statistics
import zlib
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.integrations import HfDeepSpeedConfig

from emo.common.errors import UserError, one_line
from emo.common.io.files import finite

from .batches.loader import Batches, Loader, check_content, rank_rows
from .batches.on_policy import OnPolicy
from .checkpoint import copies, identity
from .checkpoint import saver as checkpoint
from .config import RunConfig, TrainConfig
from .control.lock import RunLock
from .control.run_dir import BAD_BATCHES, CONFIG, EXPORT, INITIAL
from .control.stop import RESUME, StopRequest, Watch, node_name
from .control.world import (
    World,
    agreed,
    first_reason,
    gather_objects,
    lost_a_peer,
    missed,
    on_main,
    patience,
    wait_at_most,
)
from .engine import engine
from .engine.config import lr_at
from .engine.devices import on_gpu
from .engine.engine import Engine, Sums
from .engine.hardware import accelerator
from .engine.pace import device_facts
from .model.build import build_model, check_model, packed, write_initial_weights
from .model.export import export_model
from .model.kernels import check_kernels
from .model.objectives import Losses, load_losses, measuring, warn_of_twins
from .model.teacher import add_teacher, teacher_identity
from .monitor.console import Console
from .monitor.launches import Launch
from .monitor.metrics import Metrics
from .monitor.profiler import Profile
from .monitor.samples import Samples
from .monitor.validation import Documents, sum_by_document
from .planning.checks import Ready, batch_order, check
from .planning.footprint import Setup, utilisation
from .planning.plan import sizes_of

log = logging.getLogger(__name__)


def train(config: RunConfig, world: World, watch: Watch, console: Console) -> bool:
    """Start or resume the run of `config`; all ranks must call. Return whether it is finished.

    Raises UserError, on all ranks alike, for a mistake in the input or a run directory that is in use.
    """
    ready = agreed(lambda: check(config, world.ranks, local=True))
    if (config.output_dir / EXPORT).is_dir():
        event = {"event": "finished", "export": str(config.output_dir / EXPORT)}
        log.info("%s is finished: its export is in export/", config.output_dir, extra={"event_fields": event})
        return True
    lock = RunLock(config.output_dir, world.is_main)
    launch = Launch(config.output_dir, console, world.is_main)

    def take() -> None:
        """Lock, compare and clear the run directory, before anything is loaded."""
        lock.take()
        copies.restore(config, ready.identity)
        identity.compare(config, ready.identity)  # again: a launch may have held the lock until now
        if not (config.output_dir / CONFIG).is_file():  # of a launch that ended before the run was claimed
            shutil.rmtree(config.output_dir / INITIAL, ignore_errors=True)
        launch.before()
        lock.clear_ranks()
        if config.model.path is None:
            write_initial_weights(config)

    ended, opened = "failed", False
    try:
        on_main(world, take)
        lock.taken(world.rank)
        history = gather_objects(identity.mixtures(config))[0]  # with those of a run in train.copy_to
        if history != ready.mixtures and ready.data is not None and ready.steps is not None:
            order = batch_order(config.train, ready.data, ready.steps, history)
            ready = ready._replace(mixtures=history, order=order)
        opened = True
        console.open(config.output_dir, world.is_main)
        finished = _train(config, world, watch, ready, lock, launch)
        ended = "finished" if finished else "stopped"
        return finished
    except Exception as error:
        launch.reason = one_line(error)
        if opened and lost_a_peer(error) and (known := missed(config.output_dir, world)) is not None:
            error.add_note(known)
            launch.reason += f"; {known}"
        raise
    finally:
        gc.enable()
        gc.unfreeze()
        launch.ended(ended, lock.step)
        lock.release(ended)


def _train(
    config: RunConfig, world: World, watch: Watch, ready: Ready, lock: RunLock, launch: Launch
) -> bool:
    """Train in a directory that this launch owns; return whether the run is finished."""
    data, steps, order = ready.data, ready.steps, ready.order
    assert data is not None and steps is not None and order is not None
    sets, scores = (data, *ready.validation.values()), ready.scores
    stop = StopRequest(config.output_dir, config.train.max_minutes, watch)
    vocab_size = ready.hf_config.get_text_config().vocab_size
    losses = agreed(lambda: load_losses(config, ready.objective, vocab_size))
    check_content(config.output_dir, [file for file in (*sets, *scores) if file is not None], world)
    if world.is_main:
        warn_of_twins(losses.cost, data)
    saved, target = checkpoint.newest_valid(config.output_dir, world), config.train.copy_to
    if saved is None and target is not None:
        with lock.doing("fetching a checkpoint"):
            saved = checkpoint.fetch_newest(config.output_dir, target, world)
    step, tokens, progress = (saved.step, saved.tokens, saved.progress) if saved else (0, 0, {})
    agreed(lambda: identity.check_mixture(config, step))
    read = ready.identity | {"cost": getattr(losses.measure, "fingerprint", None)}
    weights = teacher_identity(config, world)
    read |= {} if weights is None else {"teacher": weights}
    checkpoint.check_identity(saved, read)
    ds_config = ready.ds_config
    source = None if saved is None else checkpoint.loadable(saved, ds_config, world)
    with launch.console.compiling():
        partitioned = HfDeepSpeedConfig(ds_config)  # while it lives transformers builds models partitioned
        model, ratio = build_model(config, losses), config.train.head_lr_ratio
        add_teacher(model, config, ds_config, world, packed([rows.manifest for rows in sets]))
        trainer = Engine(model, ds_config, world, config.model.compile, ratio)
        del partitioned
    check_model(trainer, config, [rows.manifest for rows in sets])
    batches = Batches(data, scores[0], ready.batch.micro, world.device)
    if config.model.kernels is not None:
        rows = order.step_rows(min(step, steps - 1))
        local, _ = rank_rows(rows, world.rank, world.ranks, batches.micro)
        compared = list(batches.read(local[: batches.micro]))
        with measuring(trainer.model, losses):
            agreed(lambda: check_kernels(trainer.model, lambda: trainer.evaluate(compared)))
    if saved is not None and source is not None:
        checkpoint.check_engine(saved, trainer)
        trainer.load(source)
        log.info("resumed from %s", saved.directory)
    watch.trains()
    if _stops_unstarted(stop, step, world, launch):
        return False
    hosts = gather_objects(node_name())  # by rank
    on_main(world, lambda: identity.claim(config, read))
    launch.begun(config, ready, step, tokens, len(set(hosts)))
    gpu = accelerator(torch.cuda.get_device_name()) if on_gpu() else None
    peak_share = None  # of the GPUs' peak, that one step per second would be
    if gpu is not None:
        half, (_, micro, accumulation, ranks) = config.model.dtype == "bfloat16", ready.batch
        setup = Setup(ranks, 0, micro, config.data.sequence_len, accumulation, bf16=half)
        setup = dataclasses.replace(setup, attended=data.mean_context())
        peak_share = utilisation(sizes_of(ready.model, ready.hf_config), setup, 1.0, gpu)
    facts: dict[str, Any] = {"validates": bool(ready.validation), "domains": data.domains, "rows": len(data)}
    facts |= {"peak_share": peak_share, "window": progress.get("metrics"), "console": launch.console}
    facts["hosts"] = hosts if world.ranks > 1 else ()
    metrics = agreed(lambda: Metrics(config, step, steps, world.is_main, **facts))
    profile = Profile(config.train.profile, config.output_dir, world.rank)
    samples = Samples(config, step, writes=world.is_main)
    guard = Guard(config.output_dir, config.train, writes=world.is_main, state=progress.get("guard"))
    saver = checkpoint.Saver(trainer, config, lock, read)
    micro = ready.batch.micro
    loader = Loader(order, batches, world)
    held_out = {
        name: Batches(part, score, micro, world.device)
        for (name, part), score in zip(ready.validation.items(), scores[1:], strict=True)
    }

    def validate() -> None:
        with lock.doing("validating"):
            for name, rows in held_out.items():
                result = evaluate(trainer, losses, rows, config.train.eval_rows)
                metrics.validation(step, tokens, name, *result)
        metrics.pause()

    def save() -> None:
        with lock.doing("saving"), patience(config.train.timeout_minutes, saver.group):
            saver.save(step, tokens, {"metrics": metrics.state(), "guard": guard.state()})
            if finished:  # who asked to stop does not wait for texts
                launch.sampled(step, samples.take(trainer, step, tokens))
        metrics.pause()

    finished, first = True, step
    if step == 0:
        validate()
        if _stops_unstarted(stop, step, world, launch):
            metrics.close()
            return False
        launch.sampled(step, samples.take(trainer, step, tokens))
    head: Any = trainer.model.get_output_embeddings()  # type: ignore[operator]
    student = OnPolicy(config, trainer, len(data.domains)) if config.objective.on_policy else None
    if len(data.domains) > 1:
        head.spec = dataclasses.replace(head.spec, by_token=True)
    lock.now("training")
    metrics.pause()
    gc.collect()
    gc.freeze()  # a collection by itself, in any step, would go through all modules again
    gc.disable()
    while step < steps:
        trainer.own.begins()
        batch = loader.step(step, last=step + 1 == steps)
        lr = lr_at(config.train, step, steps)
        profile.starts(step + 1)
        objective = losses.objective
        written = student is not None and student.due(step)
        if student is not None and written:
            batch, tokens_written, seconds = student.write(batch, step)
            metrics.written(tokens_written, seconds)
            objective = student.objective
            trainer.own.begins()
        if student is not None or objective.schedule is not None:
            head.use(objective.at(step))
        sums = trainer.train_step(
            batch.micro,
            valid=batch.valid,
            lr=lr,
            seed=zlib.crc32(f"{config.train.seed}/{step}".encode()),  # of dropout
            stop=any((stop.reason, saver.problem, lock.lost)),
            domains=batch.domains,
        )
        step, tokens = step + 1, tokens + sums.tokens
        profile.ended(step)
        watch.advanced = True
        if step == first + 1:
            wait_at_most(config.train.timeout_minutes, saver.group)
        if step % 10 == 0:
            gc.collect()
        lock.reached(step)
        norm = trainer.ds.get_global_grad_norm()  # before clipping
        metrics.step(step, sums, math.nan if norm is None else float(norm))
        warning = guard.observe(step, sums, functools.partial(data.provenance, batch.rows), written)
        if warning:
            log.warning(warning)
        if step % config.train.logging_steps == 0 or step == steps:
            metrics.log(step, tokens, lr)
            lock.logged(seconds=finite(sums.seconds[world.rank]), **device_facts())
        if held_out and _due(step, config.train.eval_steps, steps):
            validate()
        finished = not sums.stop or step == steps
        if not finished:
            launch.stopping(step, first_reason(stop.reason))
        if not finished or _due(step, config.train.save_steps, steps):
            save()
        if not finished:
            break
    profile.close()
    loader.close()
    doing = lock.doing("exporting" if finished else "saving")
    with doing, patience(config.train.timeout_minutes, saver.group):
        saver.finish()  # a failed export must not take the last checkpoint with it
        if finished:
            export_model(trainer, config, config.output_dir / EXPORT, saver.export_info(step, tokens))
    if finished:
        saver.finish_copies(lambda: stop.reason is not None)
    metrics.close()
    launch.done(step, finished)
    if not finished and world.is_main:
        stop.file.unlink(missing_ok=True)
    return finished


class Guard:
    """Watches the steps of one rank for losses and gradients that are not finite, and losses that jump.

    A step whose loss or gradient is not finite is never applied (DeepSpeed drops it on all ranks at once).
    Where its rows come from is written to bad_batches.jsonl. After `train.max_skipped` such steps in a row
    the run stops: the weights or the data are at fault, not one batch. All ranks see the same sums and decide
    alike.
    """

    def __init__(
        self, run_dir: Path, train: TrainConfig, writes: bool, state: dict[str, Any] | None = None
    ) -> None:
        """state: what `state` returned when the checkpoint was saved from which the run resumes."""
        self.path, self.train, self.writes = run_dir / BAD_BATCHES, train, writes
        state = state or {}
        self._in_a_row = int(state.get("in_a_row", 0))
        # applied steps that a spike is measured against; batches that the model writes have others
        self._recent: dict[str, deque[float]] = collections.defaultdict(lambda: deque(maxlen=50))
        for name, values in state.get("usual", {}).items():
            self._recent[name].extend(values)

    def state(self) -> dict[str, Any]:
        """Return what later steps are judged by, so that a resumed run judges alike."""
        usual = {name: list(values) for name, values in self._recent.items()}
        return {"in_a_row": self._in_a_row, "usual": usual}

    def observe(
        self, step: int, sums: Sums, rows: Callable[[], list[Any]], written: bool = False
    ) -> str | None:
        """Judge step `step` (from 1). Return a line for the user if something is wrong, else None.

        `rows()` tells where the rows of the batch come from; written: the model has written it itself.
        Raises UserError when the run must end.
        """
        loss, nll = (total / max(1, sums.tokens) for total in (sums.loss, sums.nll))
        line = None
        if not sums.applied or not math.isfinite(loss):
            self._in_a_row += 1
            reason, ends = "not finite", self._in_a_row >= self.train.max_skipped
            line = f"step {step} skipped: its loss or gradient is not finite ({self._in_a_row} in a row)"
            cure = "lower train.learning_rate"
        else:
            self._in_a_row = 0
            reason, ends = "spike", self.train.spike_stops
            cure = "lower train.learning_rate, or set train.spike_stops=false to continue"
            for name, value in (("loss", loss), ("NLL", nll)):
                recent = self._recent[f"written {name}" if written else name]
                usual = statistics.median(recent) if len(recent) >= 10 else math.inf
                if math.isfinite(value):
                    recent.append(value)
                if self.train.spike_factor and usual > 0 and value > self.train.spike_factor * usual:
                    line = line or f"the {name} jumped to {value:.3g} at step {step} (usual: {usual:.3g})"
        if line is None:
            return None
        if self.writes:
            record = {"step": step, "reason": reason, "loss": repr(loss), "nll": repr(nll), "rows": rows()}
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
        if ends:
            code = reason.replace(" ", "-")
            raise UserError(f"{line}; its rows are listed in {self.path}; {cure}", code=code)
        return line


def _stops_unstarted(stop: StopRequest, step: int, world: World, launch: Launch) -> bool:
    """Return whether some rank was asked to stop before this launch took a step; all ranks must call."""
    launch.reason = first_reason(stop.reason)
    if launch.reason is None:
        return False
    event = {"event": "stopped", "step": step, "reason": launch.reason}
    line = f"stopped before step {step + 1} ({launch.reason}), with nothing new to save; {RESUME}"
    log.info(line, extra={"event_fields": event})
    if world.is_main:
        stop.file.unlink(missing_ok=True)
    return True


def evaluate(
    trainer: Engine, losses: Losses, validation: Batches, most: int
) -> tuple[engine.Sums, Documents]:
    """Return sums over at most the first `most` rows of a validation set, and over each of their documents.

    Ranks take equally many micro-batches, so that the rows of all, one rank after the other, are in order.
    """
    world, micro = trainer.world, validation.micro
    rows = np.arange(min(len(validation.data), most))
    local, real = rank_rows(rows, world.rank, world.ranks, micro)
    every, _ = rank_rows(rows, 0, 1, world.ranks * micro)  # those of all ranks, in order
    with measuring(trainer.model, losses):
        sums, *columns = trainer.evaluate(validation.read(local, real))
    nll, tokens = (np.concatenate(parts) for parts in zip(*gather_objects(columns), strict=True))
    data, sources = validation.data, []  # the document of each segment
    for row in every.tolist():
        padding = int(data.tokens_of(row) < data.manifest.block)  # one more segment, of no document
        sources.append(np.append(data.sources_of(row), np.zeros(padding, np.uint64)))
    return sums, sum_by_document(data.fingerprint, np.concatenate(sources), nll, tokens)


def _due(step: int, every: int, steps: int) -> bool:
    return step == steps or (every > 0 and step % every == 0)
