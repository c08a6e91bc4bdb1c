"""Saving, pruning and loading of the checkpoints of a run.

Saving stops training only for the copy into host memory. A thread on every rank does the rest while training
continues. The threads have their own process group, through which all learn if one of them cannot write.

A checkpoint is written as step-N.partial, hashed, marked with COMPLETE (size and hash of every file) and then
renamed. A directory without a matching COMPLETE is not a checkpoint and is never resumed from.

copies.py copies checkpoints to `train.copy_to`.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from emo.common.errors import FailureError, UserError, one_line
from emo.common.io.files import write_text
from emo.common.io.untrusted import read_json
from emo.common.provenance import code_version, library_versions
from emo.data_prep.config import settings

from ..config import RunConfig
from ..control.events import log_event
from ..control.lock import RunLock
from ..control.run_dir import (
    BEST,
    COMPLETE,
    HF,
    HF_SETTINGS,
    STATE,
    Best,
    FileFacts,
    checkpoint_files,
    checkpoint_problem,
    checkpoints,
    hash_files,
    listed_files,
    partial_directory,
    step_directory,
    step_of,
)
from ..control.stop import RESUME, node_name
from ..control.world import LONG_TIMEOUT, World, gather_objects, lost_a_peer, raise_on_all_ranks, run_on_main
from ..engine.engine import TAG, Engine
from ..engine.snapshots import to_universal
from ..model.export import (
    ModelCopy,
    check_export_in_subprocess,
    copy_model,
    unwrap,
    write_export,
    write_metadata,
)
from .claims import NEW_DIRECTORY
from .copies import RunCopy, Uploads, wait_for_copies
from .identity import PARTS, Identity, check_unchanged

log = logging.getLogger(__name__)


def write_complete(directory: Path, files: dict[str, FileFacts]) -> None:
    """Mark `directory` as complete, atomically."""
    write_text(directory / COMPLETE, json.dumps({"files": files}, indent=1))


def write_best(run_dir: Path, best: Best) -> None:
    """Write best.json."""
    write_text(run_dir / BEST, json.dumps(best._asdict()))


def publish(run_dir: Path, step: int) -> Path:
    """Give a finished partial directory its final name."""
    final = step_directory(run_dir, step)
    remove(final)
    partial_directory(run_dir, step).rename(final)
    return final


def remove(directory: Path) -> None:
    """Delete a checkpoint, its marker first, so that an interrupted removal leaves no valid checkpoint."""
    (directory / COMPLETE).unlink(missing_ok=True)
    shutil.rmtree(directory, ignore_errors=True)


def prune(run_dir: Path, step: int, keep_last: int, keep_every: int = 0, *spared: Path | None) -> None:
    """Delete checkpoints up to `step`, except the newest `keep_last`, every `keep_every` steps and `spared`.

    Later checkpoints were damaged when the run continued from an earlier one. They do not count.
    """
    earlier = [directory for directory in checkpoints(run_dir) if step_of(directory) <= step]
    for directory in earlier[:-keep_last]:
        if directory not in spared and (not keep_every or step_of(directory) % keep_every):
            remove(directory)
    remove_unfinished(run_dir)


def remove_unfinished(run_dir: Path) -> None:
    """Delete checkpoints that were not finished, and copies in DeepSpeed's universal format."""
    for directory in (*run_dir.glob("step-*.partial"), *run_dir.glob("step-*.universal")):
        shutil.rmtree(directory, ignore_errors=True)


class Saved(NamedTuple):
    """The state.json of a checkpoint, and its directory."""

    directory: Path
    step: int
    tokens: int  # supervised tokens up to this step
    ranks: int
    groups: list[int]  # number of parameters in each group of the optimizer
    frozen: int  # digest of the frozen weights of the engine, to which adapters belong
    identity: Identity
    progress: Mapping[str, Mapping[str, object]]  # state of each component by name


class Saver:
    """Writes the checkpoints of a run, one at a time."""

    def __init__(self, engine: Engine, config: RunConfig, lock: RunLock, identity: Identity) -> None:
        """Create the saver of one rank. All ranks must call."""
        self.engine = engine
        engine.files.copies = config.train.async_save
        self.config = config
        self.lock = lock
        self.identity = identity
        self._error: UserError | None = None
        self._thread: threading.Thread | None = None
        self._best: Best | None = None
        self._waiting: Sequence[int] = ()
        self._step = 0  # of the checkpoint that the thread writes
        self._deadline = 0.0  # of the current action of the thread
        timeout = datetime.timedelta(minutes=LONG_TIMEOUT)
        self.group = dist.new_group(backend="gloo", timeout=timeout)  # of the threads
        self._uploads: Uploads | None = None
        if config.train.copy_to is not None:
            hosts = gather_objects(node_name())
            if hosts.index(node_name()) == engine.world.rank:  # the first rank of its host
                names = list(dict.fromkeys(hosts))
                part = names.index(node_name())
                self._uploads = Uploads(config.output_dir, config.train.copy_to, part, len(names))

    def save(
        self,
        step: int,
        tokens: int,
        progress: Mapping[str, Mapping[str, object]],
        best: Best | None = None,
        waiting: Sequence[int] = (),
    ) -> None:
        """Start to write a checkpoint, when the previous one is complete. All ranks must call.

        Args:
            step: Optimizer steps so far.
            tokens: Supervised tokens so far.
            progress: State of each component by name.
            best: The best checkpoint so far, perhaps this one. It is kept.
            waiting: Steps of checkpoints that are kept because they wait for a score.
        """
        self.finish()
        self._best = best
        self._waiting = waiting
        engine = self.engine
        partial = partial_directory(self.config.output_dir, step)
        if engine.world.is_main:
            remove(partial)
        dist.barrier()
        engine.snapshot(partial)
        copied = copy_model(engine, self.config) if self.config.train.export_checkpoints else None
        facts = (step, tokens, engine.world.ranks, engine.groups, engine.frozen, self.identity, progress)
        self._step = step
        self._extend_deadline()
        arguments = (Saved(partial, *facts), copied)
        self._thread = threading.Thread(target=self._write, args=arguments, daemon=True)
        self._thread.start()
        if not self.config.train.async_save:
            self.finish()

    @property
    def problem(self) -> UserError | None:
        """Return why some rank could not write the last checkpoint, or None."""
        writing = self._thread is not None and self._thread.is_alive()
        if self._error is None and writing and time.monotonic() > self._deadline:
            return self._explain(
                FailureError(f"nothing was written for {LONG_TIMEOUT:g} minutes", code="save-failed")
            )
        return self._error

    def finish(self) -> None:
        """Wait until the last checkpoint is complete. All ranks must call.

        Raises UserError on all ranks if it cannot be written.
        """
        while self._thread is not None and self._thread.is_alive() and self.problem is None:
            self._thread.join(max(0.0, self._deadline - time.monotonic()))
        error = self.problem
        self._thread = None
        if error is None and self.lock.problem is not None:
            error = FailureError(self.lock.problem, code="lock-lost")
        error = _first_error(gather_objects(error))
        if error is not None:
            raise error

    def finish_copies(self, stopped: Callable[[], bool]) -> None:
        """Wait for copies until they stall or a rank has to stop. All ranks must call."""
        wait_for_copies(self._uploads, stopped, self.lock, self.group)

    def _extend_deadline(self) -> None:
        """Give the thread LONG_TIMEOUT minutes for its next action."""
        self._deadline = time.monotonic() + 60 * LONG_TIMEOUT

    def _explain(self, reason: UserError) -> UserError:
        """Return the error that ends the run, of the same class as `reason`."""
        problem = f"the checkpoint after step {self._step} cannot be written ({reason})"
        cure = f"make room, then {RESUME}" if isinstance(reason, FailureError) else "correct that first"
        return type(reason)(f"{problem}; the last complete one remains; {cure}", code=reason.code)

    def _write(self, saved: Saved, copied: ModelCopy | None) -> None:
        """Write this rank's part of a checkpoint. Rank 0 then completes it. Runs in the thread."""
        error: UserError | None = None
        files: dict[str, FileFacts] = {}
        is_main = self.engine.world.is_main
        try:
            try:
                files = self._write_part(saved, copied)
            except Exception as failure:  # the other ranks wait for the outcome
                error = (
                    failure
                    if isinstance(failure, UserError)
                    else FailureError(one_line(failure, 200), code="save-failed")
                )
            self._extend_deadline()
            parts = gather_objects((error, files), self.group)
            error = _first_error([error for error, _ in parts])
            self._extend_deadline()
            if error is None and is_main:
                error = self._complete(
                    saved, {name: facts for _, part in parts for name, facts in part.items()}
                )
            error = gather_objects(error, self.group)[0]
            if error is None and self._uploads is not None:
                self._uploads.wake()
        except Exception as failure:
            lost = isinstance(failure, RuntimeError) and lost_a_peer(failure)
            error = FailureError(
                "another rank has not written its part" if lost else one_line(failure), code="save-failed"
            )
        if error is not None:
            self._error = self._explain(error)
            if is_main:
                with contextlib.suppress(OSError):  # the disk that failed may fail again
                    remove(saved.directory)

    def _complete(self, saved: Saved, files: dict[str, FileFacts]) -> FailureError | None:
        """Mark and rename a checkpoint of which all parts are written, and prune. Return what failed."""
        if self.lock.problem is not None:
            return FailureError(self.lock.problem, code="lock-lost")
        run_dir = self.config.output_dir
        train = self.config.train
        try:
            write_complete(saved.directory, files)
            final = publish(run_dir, saved.step)
            log_event(f"saved: {final}", "saved", step=saved.step, path=str(final))
            spared = [self._uploads.current if self._uploads is not None else None]
            if self._best is not None:  # the old best checkpoint is deleted after the new one is complete
                write_best(run_dir, self._best)
                spared.append(step_directory(run_dir, self._best.step))
            spared += [step_directory(run_dir, step) for step in self._waiting]
            prune(run_dir, saved.step, train.save_total_limit, train.keep_every, *spared)
        except OSError as failure:
            return FailureError(one_line(failure, 200), code="save-failed")
        return None

    def _write_part(self, saved: Saved, copied: ModelCopy | None) -> dict[str, FileFacts]:
        """Write this rank's files, and on rank 0 the export or its settings. Return sizes and hashes."""
        partial = saved.directory
        is_main = self.engine.world.is_main
        if is_main:
            partial.mkdir(parents=True, exist_ok=True)
            state = saved._asdict()
            del state["directory"]
            write_text(partial / STATE, json.dumps(state, allow_nan=False))
        written = self.engine.files.write()
        self._extend_deadline()
        if is_main:
            info = self.export_info(saved.step, saved.tokens)
            if copied is None:
                write_metadata(unwrap(self.engine.model), self.config, partial / HF_SETTINGS, info)
            else:
                write_export(copied, self.config, partial / HF, info, check_export_in_subprocess)
            self._extend_deadline()
        names = [path.relative_to(partial).as_posix() for path in written]
        if is_main:  # also describes what DeepSpeed did not write
            names += [name for name in checkpoint_files(partial) if not name.startswith("state/")]
        for name in names:
            with (partial / name).open("rb") as file:
                os.fsync(file.fileno())  # COMPLETE must not survive a power cut that loses the files
        return hash_files(partial, names)

    def export_info(self, step: int, tokens: int) -> dict[str, object]:
        """Return the content of export.json: the origin of an export."""
        config = self.config
        data = settings(self.config.data)
        return {
            "run": str(config.output_dir),
            "origin": config.model.path or "new",
            "base_dtype": config.model.linear_dtype,
            "objective": config.objective.label,
            "params": config.objective.params,
            "cost": config.objective.cost,
            "teacher": config.objective.teacher_label,
            "step": step,
            "tokens": tokens,
            "data_fingerprint": self.identity["data"],
            "template": data["template_version"],  # of the prompts that the model was trained on
            "template_variables": data.get("template_variables"),
            "reasoning": data.get("reasoning"),
            "seed": config.train.seed,
            "lr": config.train.learning_rate,
            "batch": config.train.global_batch_size,
            "git": code_version(),
            **library_versions("torch", "transformers", "deepspeed"),
        }


def _first_error(errors: list[UserError | None]) -> UserError | None:
    return next((error for error in errors if error is not None), None)


def newest_valid(run_dir: Path, world: World) -> Saved | None:
    """Return the newest checkpoint whose files match its COMPLETE, or None. All ranks hash a part."""
    directories = gather_objects(checkpoints(run_dir))[0]  # a shared file system may show hosts other lists
    for directory in reversed(directories):
        if (reason := _find_problem(directory, world)) is None:
            return read_saved(directory)
        log.warning("%s is not used: %s", directory.name, reason)
    if directories:
        log.warning("no valid checkpoint in %s", run_dir)
    return None


def fetch_newest(run_dir: Path, copy: RunCopy, world: World) -> Saved | None:
    """Fetch the newest valid checkpoint of the run's copy, or return None if there is none.

    All ranks must call.
    """
    names = gather_objects(raise_on_all_ranks(copy.checkpoints))[0]
    return next(filter(None, (fetch(name, run_dir, copy, world) for name in names)), None)


def fetch(name: str, run_dir: Path, copy: RunCopy, world: World) -> Saved | None:
    """Fetch the checkpoint `name`, or return None if it is not valid.

    All ranks must call. Each fetches a part.
    """
    step = step_of(Path(name))
    partial = partial_directory(run_dir, step)
    run_on_main(world, functools.partial(_fetch_complete, copy, name, partial))
    listed = listed_files(partial) or {}
    files = sorted(listed, key=lambda file: -int(listed[file]["size"]))[world.rank :: world.ranks]
    raise_on_all_ranks(functools.partial(copy.fetch, name, partial, files))
    reason = _find_problem(partial, world)
    if reason is None and world.is_main:
        publish(run_dir, step)
    dist.barrier()
    if reason is None:
        log.info("fetched %s from %s=%s", name, copy.key, copy.target)
        return read_saved(step_directory(run_dir, step))
    log.warning("%s in %s=%s is not used: %s", name, copy.key, copy.target, reason)
    run_on_main(world, functools.partial(remove, partial))
    return None


def _find_problem(directory: Path, world: World) -> str | None:
    """Return why a checkpoint is not valid, or None. All ranks hash a part."""
    problems = gather_objects(checkpoint_problem(directory, world.rank, world.ranks))
    return next((reason for reason in problems if reason is not None), None)


def _fetch_complete(copy: RunCopy, name: str, partial: Path) -> None:
    """Fetch the COMPLETE of a checkpoint into a new directory."""
    remove(partial)
    partial.mkdir(parents=True)
    copy.fetch(name, partial, [COMPLETE])


def read_saved(directory: Path) -> Saved:
    """Read the state.json of a checkpoint. Raises UserError if another version wrote it."""
    state = read_json(directory / STATE)
    if state.keys() != set(Saved._fields[1:]):
        problem = f"{directory} was written by another version of emo"
        raise UserError(f"{problem}. Continue it with that version, {NEW_DIRECTORY}", code="other-version")
    return Saved(directory, **state)


def check_identity(saved: Saved | None, identity: Identity) -> None:
    """Raise UserError unless all ranks and the checkpoint have the same identity. All ranks must call."""
    first, *others = gather_objects(identity)
    for other in others:
        if other != first:
            part = next(part for part in first if other.get(part) != first[part])
            problem = f"hosts have different {PARTS[part]}"
            raise UserError(f"{problem}. Make the files identical on all hosts", code=f"hosts-{part}")
    if saved is not None:
        check_unchanged(saved.directory, saved.identity, identity)


class LoadSource(NamedTuple):
    """The directory from which the engine loads a checkpoint."""

    directory: Path
    universal: bool  # whether it has DeepSpeed's universal format, which any number of ranks can load


def choose_source(saved: Saved, ranks: int, optimizer: str) -> LoadSource:
    """Return the directory from which `ranks` ranks load a checkpoint.

    A universal copy does not exist before `make_universal` writes it.
    Raises UserError for the state of other optimizers than AdamW, which have no universal format.
    """
    if saved.ranks == ranks:
        return LoadSource(saved.directory, universal=False)
    if optimizer != "AdamW":
        problem = (
            f"{saved.directory} has the state of {optimizer}, which cannot be converted for {ranks} ranks"
        )
        raise UserError(f"{problem}; start {saved.ranks} ranks, {NEW_DIRECTORY}", code="optimizer-ranks")
    return LoadSource(saved.directory.with_name(saved.directory.name + ".universal"), universal=True)


def make_universal(saved: Saved, target: Path, world: World) -> None:
    """Write the universal copy of a checkpoint to `target`. All ranks must call."""

    def convert() -> None:
        message = "%s was saved by %d ranks: converting it for %d"
        log.info(message, saved.directory.name, saved.ranks, world.ranks)
        shutil.rmtree(target, ignore_errors=True)
        to_universal(saved.directory / TAG, target / TAG)

    run_on_main(world, convert)


def check_engine(saved: Saved, engine: Engine) -> None:
    """Raise UserError if the checkpoint has other groups of parameters or other frozen weights."""
    if (saved.groups, saved.frozen) != (engine.groups, engine.frozen):
        problem = f"{saved.directory} has adapters or parameters of another base model than model.path"
        raise UserError(f"{problem}. Restore the old weights, {NEW_DIRECTORY}", code="changed-base")
