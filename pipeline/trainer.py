"""The training loop of one run, from its lock to its export.

open_run   lock the run directory, restore it from a copy, compare it with the recipe
set_up     load losses, checkpoint, model and engine
start      claim the run directory, create the components, validate and sample before the first step
fit        for each step s:
               rows    = positions [s * B, (s + 1) * B) of the seeded order      (batches/)
               divisor = supervised tokens of these rows, over all ranks
               loss    = sum over tokens of the objective / divisor              (loss/)
               AdamW or Muon step at the scheduled rate                          (engine/)
               components, validation, checkpoint                    (monitor/, validation/, checkpoint/)
finish     wait for the last checkpoint, write the export, wait for copies
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import shutil
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from transformers.integrations import HfDeepSpeedConfig

from emo.common.errors import one_line
from emo.data_prep.shards.format import TokenDataset

from .batches.loader import Batches, Loader, StepBatch, check_content, rank_rows
from .batches.on_policy import OnPolicy
from .batches.shared_rows import check_shared_rows
from .checkpoint import copies, identity
from .checkpoint.branch import check_branch, fetch_branch
from .checkpoint.export import export_checkpoint
from .checkpoint.saver import (
    Saved,
    Saver,
    check_engine,
    check_identity,
    choose_source,
    fetch,
    fetch_newest,
    make_universal,
    newest_valid,
    remove_unfinished,
    write_best,
)
from .config import RunConfig
from .control.events import log_event
from .control.lock import RunLock
from .control.run_dir import CONFIG, EXPORT, INITIAL, checkpoints, step_directory
from .control.stop import RESUME, SignalWatch, StopRequest, node_name
from .control.world import (
    World,
    diagnose_hang,
    first_reason,
    gather_objects,
    local_errors,
    longer_timeout,
    lost_a_peer,
    raise_on_all_ranks,
    run_on_main,
    set_timeout,
)
from .engine.activations import TILED
from .engine.average import WeightAverage
from .engine.device.devices import device_name
from .engine.ds_config import Grouping
from .engine.engine import TAG, Engine
from .engine.schedule import lr_at
from .engine.sequence import share_rows
from .engine.totals import StepTotals
from .model.build import build_model, check_model, packed, write_initial_weights
from .model.export import export_model
from .model.kernels import check_kernels
from .model.objective.build import load_losses, measuring, warn_of_twins
from .model.teacher import add_teacher, teacher_identity
from .monitor.component import Component, RunState
from .monitor.console import Console
from .monitor.guard import Guard
from .monitor.launches import Launch
from .monitor.metrics import Metrics, RunFacts
from .monitor.profiler import Profiler
from .monitor.upkeep import GarbageCollection, Heartbeat
from .monitor.validation.base import find_bases
from .monitor.validation.evaluation import measure_set
from .monitor.validation.samples import Samples
from .monitor.validation.selection import Selection
from .planning.checks import TrainingRun, check_run
from .planning.setup import predict_step

log = logging.getLogger(__name__)


class Trainer:
    """Starts or resumes one run. All ranks create one and call `run`."""

    lock: RunLock
    launch: Launch
    plan: TrainingRun
    stop: StopRequest
    engine: Engine
    state: RunState
    saver: Saver
    metrics: Metrics
    selection: Selection
    components: tuple[Component, ...]

    def __init__(self, config: RunConfig, world: World, watch: SignalWatch, console: Console) -> None:
        self.config = config
        self.world = world._replace(sequence=config.train.sequence_parallel)
        self.watch = watch
        self.console = console

    def run(self, on_start: Callable[[], None] = lambda: None) -> bool:
        """Train until the run is finished or asked to stop. Return whether it is finished.

        Calls `on_start` before the first step.

        Raises UserError, on all ranks, for a mistake in the input or a run directory that is in use.
        """
        self.plan = raise_on_all_ranks(lambda: check_run(self.config, self.world.ranks))
        if (export := self.config.output_dir / EXPORT).is_dir():
            line = f"{self.config.output_dir} is finished: its export is in export/"
            if self.config.train.copy_to is not None:
                self._finish_copies(self.config.train.copy_to)
            log_event(line, "finished", export=str(export))
            return True
        self.lock = RunLock(self.config.output_dir, self.world.is_main)
        self.launch = Launch(self.config.output_dir, self.console, self.world.is_main)
        ended = "failed"
        opened = False
        try:
            self.open_run()
            opened = True
            self.console.open(self.config.output_dir, self.world.is_main)
            finished = self._train(on_start)
            ended = "finished" if finished else "stopped"
            return finished
        except Exception as error:
            self.launch.reason = one_line(error)
            if opened and lost_a_peer(error):
                late_rank = diagnose_hang(self.config.output_dir, self.world)
                if late_rank is not None:
                    error.add_note(late_rank)
                    self.launch.reason += f"; {late_rank}"
            raise
        finally:
            GarbageCollection.restore()
            self.launch.record_end(ended, self.lock.step)
            self.lock.release(ended)

    def _train(self, on_start: Callable[[], None]) -> bool:
        saved = self.set_up()
        if self._stop_requested_before_first_step():
            return False
        self.start(saved)
        if self.state.step == 0:
            self.validate()
            if self._stop_requested_before_first_step():
                self.metrics.close()
                return False
        on_start()
        finished = self.fit()
        self.finish(finished)
        return finished

    def _finish_copies(self, target: str) -> None:
        """Copy the checkpoints of a finished run that an interrupted launch has not copied."""
        lock = RunLock(self.config.output_dir, self.world.is_main)
        run_on_main(self.world, lock.acquire)
        uploads = copies.Uploads(self.config.output_dir, target) if self.world.is_main else None
        copies.wait_for_copies(uploads, lambda: self.watch.reason is not None, lock)
        lock.release("finished")

    # Opening the run directory

    def open_run(self) -> None:
        """Lock the run directory and compare it with the recipe, before anything is loaded."""
        config = self.config

        def take_directory() -> None:
            self.lock.acquire()
            remove_unfinished(config.output_dir)  # a killed launch leaves them, and they may fill the disk
            copies.fetch_records(config, self.plan.identity)
            identity.check_run_dir(config, self.plan.identity)  # again: another launch may have held the lock
            check_branch(config, self.plan.identity, len(self.plan.data))
            if not (config.output_dir / CONFIG).is_file():  # left by a launch that never claimed the run
                shutil.rmtree(config.output_dir / INITIAL, ignore_errors=True)
            self.launch.report_previous_failure()
            self.lock.set_aside_rank_files()
            if config.model.path is None:
                write_initial_weights(config)

        run_on_main(self.world, take_directory)
        # NFS remembers for some time that a directory did not exist. Only a write asks the server again.
        with contextlib.suppress(OSError):
            config.output_dir.mkdir(parents=True, exist_ok=True)
        self.lock.start_heartbeat(self.world.rank)
        mixtures = gather_objects(identity.mixture_history(config))[0]  # a copy may have more
        self.plan = self.plan.with_mixtures(config, mixtures)

    # Loading

    def set_up(self) -> Saved | None:
        """Load losses, checkpoint, model and engine. Return the checkpoint that the run resumes from."""
        config = self.config
        world = self.world
        plan = self.plan
        self.stop = StopRequest(config.output_dir, config.train.max_minutes, self.watch)
        vocab_size = plan.hf_config.get_text_config().vocab_size
        self.losses = raise_on_all_ranks(lambda: load_losses(config, plan.objective, vocab_size))
        files = [file for file in (*self._data_sets, *plan.scores) if file is not None]
        check_content(config.output_dir, files, world)
        if world.is_main:
            warn_of_twins(self.losses.cost, plan.data)
        saved = self._find_checkpoint()
        self.state = RunState(plan.steps)
        if saved is not None:
            self.state = RunState(plan.steps, first_step=saved.step, step=saved.step, tokens=saved.tokens)
        raise_on_all_ranks(lambda: identity.check_mixture(config, self.state.step))
        self.identity = plan.identity | {"cost": getattr(self.losses.measure, "fingerprint", None)}
        if (teacher := teacher_identity(config, world)) is not None:
            self.identity |= {"teacher": teacher}
        check_identity(saved, self.identity)
        with local_errors():
            self._build_engine(saved)
        shared = (world.part, world.sequence)
        self.batches = Batches(plan.data, plan.scores[0], plan.batch.micro, world.device, *shared)
        if world.sequence > 1:
            check_shared_rows(self.engine, plan.data.batch(self._next_rows()[:1]))
        if config.model.kernels is not None or config.model.tiled_mlp:
            self._check_kernels()
        if saved is not None:
            with local_errors():
                check_engine(saved, self.engine)
                self.engine.load(self._load_from)
                if self.engine.average is not None:
                    self.engine.average.load(saved.directory / TAG)
            log.info("resumed from %s", saved.directory)
        self.watch.enter_training()
        return saved

    @property
    def _data_sets(self) -> tuple[TokenDataset, ...]:
        return (self.plan.data, *self.plan.validation.values())

    def _find_checkpoint(self) -> Saved | None:
        """Return the newest valid checkpoint of the run, of its copy, or of the run that it branches off."""
        saved = newest_valid(self.config.output_dir, self.world)
        target = self.config.train.copy_to
        if saved is None and target is not None:
            with self.lock.activity("fetching a checkpoint"):
                copy = raise_on_all_ranks(lambda: copies.RunCopy(target))
                saved = fetch_newest(self.config.output_dir, copy, self.world)
        if saved is None and self.config.train.decay_from is not None:
            with self.lock.activity("fetching a checkpoint"):
                saved = fetch_branch(self.config, self.world)
        if saved is None and checkpoints(self.config.output_dir):
            log.warning("restarting from step 0")
        return saved

    def _build_engine(self, saved: Saved | None) -> None:
        """Build the model, its teacher and its engine, ready to load `saved`."""
        config = self.config
        world = self.world
        ds_config = self.plan.ds_config
        if saved is not None:
            source = choose_source(saved, world.ranks, ds_config["optimizer"]["type"])
            if source.universal:
                make_universal(saved, source.directory, world)
                ds_config = ds_config | {"checkpoint": {"load_universal": True}}
            self._load_from = source.directory
        manifests = [rows.manifest for rows in self._data_sets]
        if world.sequence > 1:
            share_rows(world)
        with self.console.compiling():
            # While it exists, transformers partitions the models that it builds.
            partitioned = HfDeepSpeedConfig(ds_config)
            model = build_model(config, self.losses)
            teacher = add_teacher(model, config, ds_config, world, packed(manifests))
            options = (config.model.compile, Grouping.of(config), config.train.only_steps)
            self.engine = Engine(model, ds_config, world, *options)
            del partitioned
        if (decay := config.objective.average_decay) is not None:
            self.engine.average = WeightAverage(self.engine.model, teacher, decay, world)
        check_model(self.engine, config, manifests)

    def _check_kernels(self) -> None:
        """Compare the layers that model.kernels and model.tiled_mlp replace, on rows of the next step."""
        local, _ = rank_rows(self._next_rows(), self.world.replica, self.world.replicas, self.batches.micro)
        compared = list(self.batches.read(local[: self.batches.micro]))
        engine = self.engine
        with measuring(engine.model, self.losses):
            run = functools.partial(check_kernels, engine.model, lambda: engine.evaluate(compared))
            raise_on_all_ranks(lambda: run(TILED) if self.config.model.kernels is None else run())

    def _next_rows(self) -> np.ndarray:
        """Return the rows of the next step, or of the last if there is no other."""
        return self.plan.order.step_rows(min(self.state.step, self.state.steps - 1))

    def _stop_requested_before_first_step(self) -> bool:
        """Return whether some rank was asked to stop before this launch took a step; all ranks must call."""
        self.launch.reason = first_reason(self.stop.reason)
        if self.launch.reason is None:
            return False
        step, reason = self.state.step, self.launch.reason
        line = f"stopped before step {step + 1} ({reason}), with nothing new to save; {RESUME}"
        log_event(line, "stopped", step=step, reason=reason)
        if self.world.is_main:
            self.stop.file.unlink(missing_ok=True)
        return True

    # Starting

    def start(self, saved: Saved | None) -> None:
        """Claim the run directory and create everything that works next to the loop."""
        config = self.config
        world = self.world
        plan = self.plan
        state = self.state
        hosts = gather_objects(node_name())  # by rank
        run_on_main(world, lambda: identity.claim_run_dir(config, self.identity))
        predicted = predict_step(config, plan, device_name())
        self.launch.log_start(config, plan, predicted, state.step, state.tokens, len(set(hosts)))
        facts = RunFacts(
            rows=len(plan.data),
            domains=plan.data.domains,
            validates=bool(plan.validation),
            hosts=hosts if world.ranks > 1 else (),
            peak_share=None if predicted is None else predicted.peak_share,
        )
        main = world.is_main
        train = config.train
        self.metrics = raise_on_all_ranks(lambda: Metrics(config, state, main, facts, self.console))
        self.selection = Selection(train, config.output_dir, world)
        self.components = (
            Profiler(train.profile, config.output_dir, world.rank),
            Heartbeat(self.lock, world.rank, train.logging_steps),
            Guard(config.output_dir, train, main, plan.data.provenance),
            self.metrics,
            self.selection,
            Samples(config, self.engine, self.launch, plan.prompts, state),
            GarbageCollection(),
        )
        self._load_components({} if saved is None else saved.progress)
        self._check_best()
        self.saver = Saver(self.engine, config, self.lock, self.identity)
        self.loader = Loader(plan.order, self.batches, world)
        self.validation = {
            name: dataclasses.replace(self.batches, data=rows, scores=scores)
            for (name, rows), scores in zip(plan.validation.items(), plan.scores[1:], strict=True)
        }
        with self.lock.activity("validating"):
            self.bases = find_bases(config, self.engine, self.validation, state.step)
        self.student = None
        if config.objective.on_policy is not None:
            self.student = OnPolicy(config, self.engine, len(plan.data.domains))

    def _load_components(self, progress: Mapping[str, Mapping[str, Any]]) -> None:
        """Give each component its state in the checkpoint that the run resumes from."""
        branches = self.state.step == self.config.train.branch_step
        for component in self.components:
            of_trunk = branches and component is self.selection  # a selection among another run's checkpoints
            if component.name in progress and not of_trunk:
                component.load_state_dict(progress[component.name])

    def _check_best(self) -> None:
        """Forget the best checkpoint if it is gone; all ranks must call."""
        best = self.selection.best
        if best is None or self.config.train.copy_to is not None:
            return
        directory = step_directory(self.config.output_dir, best.step)
        if not gather_objects(directory.is_dir())[0]:
            log.warning(
                "%s was the best checkpoint and is gone: later ones are compared without it", directory
            )
            self.selection.forget_best()

    # The loop

    def fit(self) -> bool:
        """Take steps until the run is finished or a rank is asked to stop. Return whether it is finished."""
        state = self.state
        for component in self.components:
            component.before_training(state)
        head: Any = self.engine.model.get_output_embeddings()  # type: ignore[operator]
        if len(self.plan.data.domains) > 1:
            head.spec = dataclasses.replace(head.spec, by_token=True)
        self.lock.set_activity("training")
        self.metrics.exclude_pause()
        while state.step < state.steps and not self.selection.exhausted:
            self.engine.own.start_step()
            for component in self.components:
                component.before_step(state)
            batch = self._next_batch()
            totals = self._train_step(batch, head)
            state.advance(totals.tokens)
            self._after_first_step()
            for component in self.components:
                component.after_step(state, batch, totals)
            improved = False
            if self.validation and state.is_due(self.config.train.eval_steps):
                improved = self.validate()
            ended = state.step == state.steps or self.selection.exhausted
            stopped = totals.stop and not ended
            if stopped:
                self.launch.log_stopping(state.step, first_reason(self.stop.reason))
            if stopped or ended or improved or state.is_due(self.config.train.save_steps):
                self.save(samples=not stopped)
            if stopped:
                return False
        self.metrics.record_rest(state)
        # A score of a task that arrived during the last save may have ended the run between validations.
        if (
            self.validation
            and state.step > state.first_step
            and not state.is_due(self.config.train.eval_steps)
        ):
            self.validate()
        return True

    def _next_batch(self) -> StepBatch:
        """Return the batch of the next step: rows of the data, or what the model writes after prompts."""
        step = self.state.step
        batch = self.loader.step(step, last=step + 1 == self.state.steps)
        if self.student is not None and self.student.due(step):
            batch = self.student.write(batch, step)
            self.engine.own.start_step()
        return batch

    def _train_step(self, batch: StepBatch, head: Any) -> StepTotals:
        """Take an optimizer step with the objective and the rate of this step."""
        step = self.state.step
        objective = self.losses.objective
        if self.student is not None and batch.written is not None:
            objective = self.student.objective
        if self.student is not None or objective.schedule is not None:
            head.use(objective.at(step))
        if self.engine.freezing is not None:
            self.engine.freezing.start_step(step)
        self.state.lr = lr_at(self.config.train, step, self.state.steps)
        return self.engine.train_step(
            batch.micro,
            valid=batch.valid,
            lr=self.state.lr,
            seed=zlib.crc32(f"{self.config.train.seed}/{step}".encode()),
            stop=any((self.stop.reason, self.saver.problem, self.lock.lost)),
            domains=batch.domains,
        )

    def _after_first_step(self) -> None:
        """Note that this launch makes progress. After its first step, ranks wait only as configured."""
        self.watch.advanced = True
        if self.state.step == self.state.first_step + 1:
            set_timeout(self.config.train.timeout_minutes, self.saver.group)

    def validate(self) -> bool:
        """Measure every validation set. Return whether this is the best step so far. All ranks must call."""
        measured = {}
        last = max(0, self.state.step - 1)
        with self.lock.activity("validating"):
            for name, rows in self.validation.items():
                max_rows = self.config.train.eval_rows
                with self.console.waiting(f"validating {name}"):
                    base = self.bases.get(name)
                    result = measure_set(self.engine, self.losses, last, rows, max_rows, base)
                self.metrics.record_validation(self.state, name, *result)
                measured[name] = result[0]
        self.metrics.exclude_pause()
        return self.selection.compare(self.state.step, measured)

    def save(self, samples: bool) -> None:
        """Begin a checkpoint; all ranks must call. samples: also continue the prompts of the run."""
        timeout = longer_timeout(self.config.train.timeout_minutes, self.saver.group)
        with self.lock.activity("saving"), timeout:
            waiting = self._take_scores()
            progress = {
                component.name: component.state_dict() for component in self.components if component.name
            }
            self.saver.save(self.state.step, self.state.tokens, progress, self.selection.best, waiting)
            if samples:
                for component in self.components:
                    component.after_save(self.state)
        self.metrics.exclude_pause()

    def _take_scores(self) -> list[int]:
        """Take scores of tasks before a save. Return the checkpoints that wait for one, on rank 0."""
        scores = self.selection.scores
        if not scores.tasks:
            return []
        self.saver.finish()  # the previous checkpoint may wait for its score
        self.selection.take_scores(self.state.step)
        train = self.config.train
        return scores.choose_waiting(train.save_total_limit, train.keep_every) if self.world.is_main else []

    # Finishing

    def finish(self, finished: bool) -> None:
        """Wait for the last checkpoint; export the model of a run that is finished."""
        step = self.state.step
        tokens = self.state.tokens
        self.loader.close()
        activity = self.lock.activity("exporting" if finished else "saving")
        with activity, longer_timeout(self.config.train.timeout_minutes, self.saver.group):
            self.saver.finish()  # first: a failed export must not take the last checkpoint with it
            if finished:
                self._export(step, tokens)
        # A time limit or a STOP file leaves time for copies. A signal does not.
        stop = self.stop if finished else self.watch
        self.saver.finish_copies(lambda: stop.reason is not None)
        for component in self.components:
            component.close()
        self.launch.log_end(step, finished)
        if not finished and self.world.is_main:
            self.stop.file.unlink(missing_ok=True)
        # A minute after the first rank has ended, srun kills rank 0, which may still close its trackers.
        gather_objects(None, self.saver.group)

    def _export(self, step: int, tokens: int) -> None:
        """Export the model, or the best checkpoint with load_best_at_end. All ranks must call."""
        export = self.config.output_dir / EXPORT
        self._take_last_scores(step)
        directory = self._find_best(step) if self.config.train.load_best_at_end else None
        if directory is None:
            export_model(self.engine, self.config, export, self.saver.export_info(step, tokens))
            return

        def export_best() -> None:
            export_checkpoint(directory, export)

        run_on_main(self.world, export_best)
        log.info("exported the best checkpoint, %s", directory.name)

    def _take_last_scores(self, step: int) -> None:
        """Choose the best checkpoint by the scores that have arrived. All ranks must call."""
        scores = self.selection.scores
        if not scores.tasks:
            return
        self.selection.take_scores(step, final=True)
        if (best := self.selection.best) is not None:  # also by the validation that followed a score
            run_on_main(self.world, functools.partial(write_best, self.config.output_dir, best))
        if self.config.train.load_best_at_end and (missing := scores.find_unscored()):
            names = ", ".join(f"step-{step:06d}" for step in missing)
            log.warning("the best checkpoint is chosen without scores of %s, which have not arrived", names)

    def _find_best(self, step: int) -> Path | None:
        """Return the best checkpoint, or None if it is gone or of the last step. All ranks must call."""
        best = self.selection.best
        target = self.config.train.copy_to
        if best is None or best.step == step:
            return None
        directory = step_directory(self.config.output_dir, best.step)
        is_here: bool = gather_objects(directory.is_dir())[0]
        if not is_here and target is not None:  # the run came here from its copy
            copy = raise_on_all_ranks(lambda: copies.RunCopy(target))
            is_here = fetch(directory.name, self.config.output_dir, copy, self.world) is not None
        if not is_here:
            log.warning("%s was the best checkpoint and is gone: the last model is exported", directory)
        return directory if is_here else None
