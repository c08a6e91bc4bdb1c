"""The checkpoints of a run: written while training continues, published, removed, found valid and read again.

The stall of a save is the copy into host memory. The rest runs beside training on every rank, which talk
through a process group of their own, so that all learn when one of them could not write.

A checkpoint is written as step-N.partial, hashed, given COMPLETE (every file with its size and hash) and
renamed. So a directory without a matching COMPLETE is not a checkpoint, and a torn one is never resumed.

copies.py copies checkpoints to `train.copy_to` and fetches them from there.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from emo.common.errors import FailureError, UserError, one_line
from emo.common.io.files import write_text
from emo.common.io.untrusted import read_json
from emo.common.provenance import code_version, library_versions
from emo.data_prep.config import settings

from ..config import RunConfig
from ..control.lock import RunLock
from ..control.run_dir import (
    COMPLETE,
    HF,
    STATE,
    FileFacts,
    checkpoint_problem,
    checkpoints,
    hash_files,
    list_files,
    listed_files,
    partial_directory,
    step_directory,
    step_of,
)
from ..control.stop import RESUME, node_name
from ..control.world import LONG_TIMEOUT, World, gather_objects, lost_a_peer, raise_on_all_ranks, run_on_main
from ..engine.engine import Engine
from ..engine.snapshots import to_universal
from ..model.export import ModelCopy, check_export_in_subprocess, copy_model, write_export
from .copies import Store, Uploads
from .identity import ANEW, PARTS, Identity, check_same

log = logging.getLogger(__name__)


def write_complete(directory: Path, files: dict[str, FileFacts]) -> None:
    """Mark `directory` complete; the marker appears whole or not at all."""
    write_text(directory / COMPLETE, json.dumps({"files": files}, indent=1))


def publish(run_dir: Path, step: int) -> Path:
    """Give a finished partial directory its final name."""
    final = step_directory(run_dir, step)
    remove(final)
    partial_directory(run_dir, step).rename(final)
    return final


def remove(directory: Path) -> None:
    """Delete a checkpoint, its marker first, so that an interrupted removal leaves no valid one."""
    (directory / COMPLETE).unlink(missing_ok=True)
    shutil.rmtree(directory, ignore_errors=True)


def prune(run_dir: Path, keep_last: int, keep_every: int = 0, spared: Path | None = None) -> None:
    """Delete checkpoints but the newest `keep_last`, those of every `keep_every`-th step, and `spared`."""
    for directory in checkpoints(run_dir)[:-keep_last]:
        if directory != spared and (not keep_every or step_of(directory) % keep_every):
            remove(directory)
    for directory in (*run_dir.glob("step-*.partial"), *run_dir.glob("step-*.universal")):
        shutil.rmtree(directory, ignore_errors=True)


class Saved(NamedTuple):
    """A checkpoint that is valid by content."""

    directory: Path
    step: int
    tokens: int  # supervised tokens up to this step
    ranks: int
    groups: list[int]  # parameters in each of the optimizer's groups
    frozen: int  # of the engine: which weights the adapters belong to
    identity: Identity  # of what was trained with
    progress: dict[str, Any]  # of metrics and guard, between two records


class Saver:
    """Writes the checkpoints of a run, one at a time."""

    def __init__(self, engine: Engine, config: RunConfig, lock: RunLock, identity: Identity) -> None:
        """identity: of what the run has read."""
        self.engine, self.config, self.lock, self.identity = engine, config, lock, identity
        self._problem: UserError | None = None
        self._thread: threading.Thread | None = None
        self._step, self._deadline = 0, 0.0  # of the thread
        # through host memory, for the thread
        self.group = dist.new_group(backend="gloo", timeout=datetime.timedelta(minutes=LONG_TIMEOUT))
        self._uploads: Uploads | None = None
        if config.train.copy_to is not None:
            hosts = gather_objects(node_name())
            names = list(dict.fromkeys(hosts))
            if hosts.index(node_name()) == engine.world.rank:  # the first of its host
                part = names.index(node_name())
                self._uploads = Uploads(config.output_dir, config.train.copy_to, part, len(names))

    def save(self, step: int, tokens: int, progress: dict[str, Any]) -> None:
        """Begin the checkpoint after `step`, once the one before is complete; all ranks must call.

        progress: what metrics and guard have counted, for the run that resumes from here.
        """
        self.finish()
        engine, partial = self.engine, partial_directory(self.config.output_dir, step)
        if engine.world.is_main:
            remove(partial)
        dist.barrier()
        engine.snapshot(partial)
        copied = copy_model(engine) if self.config.train.export_checkpoints else None
        facts = (step, tokens, engine.world.ranks, engine.groups, engine.frozen, self.identity, progress)
        self._step = step
        self._goes_on()
        arguments = (Saved(partial, *facts), copied)
        self._thread = threading.Thread(target=self._write, args=arguments, daemon=True)
        self._thread.start()
        if not self.config.train.async_save:
            self.finish()

    @property
    def problem(self) -> UserError | None:
        """Return why the last checkpoint could not be written, on any rank, or None."""
        writing = self._thread is not None and self._thread.is_alive()
        if self._problem is None and writing and time.monotonic() > self._deadline:
            return self._given_up(FailureError(f"nothing was written for {LONG_TIMEOUT:g} minutes"))
        return self._problem

    def finish(self) -> None:
        """Wait until the last checkpoint is complete; all ranks must call, and raise why it could not be."""
        while self._thread is not None and self._thread.is_alive() and self.problem is None:
            self._thread.join(max(0.0, self._deadline - time.monotonic()))
        failed, self._thread = self.problem, None
        lost = None if self.lock.problem is None else UserError(self.lock.problem, code="lock-lost")
        error = next((e for e in gather_objects(failed or lost) if e is not None), None)
        if error is not None:
            raise error

    def finish_copies(self, stopped: Callable[[], bool]) -> None:
        """Wait for copies as long as bytes move and no rank is asked to stop; all ranks must call."""
        uploads, wait = self._uploads, 0.1
        while True:
            moves = uploads is not None and uploads.goes_on()
            states = gather_objects((moves, stopped()), self.group)
            if not any(move for move, _ in states) or any(stop for _, stop in states):
                break
            self.lock.set_activity("copying")
            time.sleep(wait)
            wait = min(2 * wait, 5.0)
        if uploads is not None and self.engine.world.is_main and (names := uploads.unfinished()):
            log.warning("not in train.copy_to=%s, copy them by hand: %s", uploads.target, ", ".join(names))

    def _goes_on(self) -> None:
        """Give the thread LONG_TIMEOUT minutes for the next thing that it does."""
        self._deadline = time.monotonic() + 60 * LONG_TIMEOUT

    def _given_up(self, why: UserError) -> UserError:
        """Return the error that ends the run, of the same kind as `why`."""
        problem = f"the checkpoint after step {self._step} cannot be written ({why})"
        cure = f"make room, then {RESUME}" if isinstance(why, FailureError) else "correct that first"
        return type(why)(f"{problem}; the last complete one remains; {cure}", code=why.code)

    def _write(self, saved: Saved, copied: ModelCopy | None) -> None:
        """Write one rank's part, and on rank 0 make a checkpoint of all parts: marker, name, pruning."""
        error: UserError | None = None
        files: dict[str, FileFacts] = {}
        rank, train, partial = self.engine.world.rank, self.config.train, saved.directory
        try:
            try:
                files = self._write_part(saved, copied)
            except Exception as failure:  # whatever it is: the other ranks wait to hear of it
                error = failure if isinstance(failure, UserError) else FailureError(one_line(failure, 200))
            self._goes_on()
            parts = gather_objects((error, files), self.group)
            error = next((e for e, _ in parts if e is not None), None)
            self._goes_on()
            if error is None and rank == 0 and self.lock.problem is not None:
                error = FailureError(self.lock.problem)
            elif error is None and rank == 0:
                try:
                    write_complete(partial, {k: v for _, part in parts for k, v in part.items()})
                    final = publish(self.config.output_dir, saved.step)
                    event = {"event": "saved", "step": saved.step, "path": str(final)}
                    log.info("saved: %s", final, extra={"event_fields": event})
                    spared = self._uploads.current if self._uploads is not None else None
                    prune(self.config.output_dir, train.save_total_limit, train.keep_every, spared)
                except OSError as failure:
                    error = FailureError(one_line(failure, 200))
            error = gather_objects(error, self.group)[0]
            if error is None and self._uploads is not None:
                self._uploads.wake()
        except Exception as failure:
            lost = isinstance(failure, RuntimeError) and lost_a_peer(failure)
            error = FailureError("another rank has not written its part" if lost else one_line(failure))
        if error is not None:
            self._problem = self._given_up(error)
            if rank == 0:
                with contextlib.suppress(OSError):  # the disk that failed may fail again
                    remove(partial)

    def _write_part(self, saved: Saved, copied: ModelCopy | None) -> dict[str, FileFacts]:
        """Write this rank's files, and on rank 0 the export; return their sizes and hashes."""
        partial, rank = saved.directory, self.engine.world.rank
        if rank == 0:
            partial.mkdir(parents=True, exist_ok=True)
            state = saved._asdict()
            del state["directory"]
            write_text(partial / STATE, json.dumps(state, allow_nan=False))
        written = self.engine.files.write()
        self._goes_on()
        if rank == 0 and copied is not None:
            info = self.export_info(saved.step, saved.tokens)
            write_export(copied, self.config, partial / HF, info, check_export_in_subprocess)
            self._goes_on()
        names = [path.relative_to(partial).as_posix() for path in written]
        if rank == 0:  # which owns whatever no DeepSpeed rank wrote
            names += [n for n in list_files(partial) if not n.startswith("state/")]
        for name in names:
            with (partial / name).open("rb") as file:
                os.fsync(file.fileno())  # a power cut after COMPLETE must not find unwritten pages
        return hash_files(partial, names)

    def export_info(self, step: int, tokens: int) -> dict[str, Any]:
        """Return what an export says of its origin."""
        config = self.config
        return {
            "run": str(config.output_dir),
            "origin": config.model.path or "new",
            "objective": config.objective.label,
            "params": config.objective.params,
            "cost": config.objective.cost,
            "step": step,
            "tokens": tokens,
            "data_fingerprint": self.identity["data"],
            "template": settings(config.data)["template_version"],  # how prompts of the model are written
            "template_variables": settings(config.data).get("template_variables"),
            "reasoning": settings(config.data).get("reasoning"),
            "seed": config.train.seed,
            "lr": config.train.learning_rate,
            "batch": config.train.global_batch_size,
            "git": code_version(),
            **library_versions("torch", "transformers", "deepspeed"),
        }


def newest_valid(run_dir: Path, world: World) -> Saved | None:
    """Return the newest checkpoint whose files are as COMPLETE says, or None; all ranks hash a part."""
    directories = checkpoints(run_dir)
    for directory in reversed(directories):
        problems = [p for p in gather_objects(checkpoint_problem(directory, world.rank, world.ranks)) if p]
        if not problems:
            return read_saved(directory)
        log.warning("%s is not used: %s", directory.name, problems[0])
    if directories:
        log.warning("no checkpoint in %s is whole: training begins again from step 0", run_dir)
    return None


def fetch_newest(run_dir: Path, target: str, world: World) -> Saved | None:
    """Return the newest checkpoint that is whole in the run's copy, brought into its directory; None: no one.

    Every rank fetches a part of it; all must call.
    """
    store = raise_on_all_ranks(lambda: Store(target))
    for name in gather_objects(raise_on_all_ranks(store.checkpoints))[0]:
        step = step_of(Path(name))
        partial = partial_directory(run_dir, step)
        run_on_main(world, functools.partial(_begin, store, name, partial))
        listed = listed_files(partial) or {}
        names = sorted(listed, key=lambda file: -int(listed[file]["size"]))[world.rank :: world.ranks]
        raise_on_all_ranks(functools.partial(store.fetch, name, partial, names))
        faults = [p for p in gather_objects(checkpoint_problem(partial, world.rank, world.ranks)) if p]
        if not faults and world.is_main:
            publish(run_dir, step)
        dist.barrier()
        if not faults:
            log.info("fetched %s from train.copy_to=%s", name, target)
            return read_saved(step_directory(run_dir, step))
        log.warning("%s in train.copy_to=%s is not used: %s", name, target, faults[0])
        run_on_main(world, functools.partial(remove, partial))
    return None


def _begin(store: Store, name: str, partial: Path) -> None:
    """Fetch what a checkpoint says of itself into a new directory."""
    remove(partial)
    partial.mkdir(parents=True)
    store.fetch(name, partial, [COMPLETE])


def read_saved(directory: Path) -> Saved:
    """Return what state.json says of a checkpoint. Raises UserError for one of another version."""
    state = read_json(directory / STATE)
    if state.keys() != set(Saved._fields[1:]):
        problem = f"{directory} is of another version of this program"
        raise UserError(f"{problem}; continue it with that version, {ANEW}", code="other-version")
    return Saved(directory, **state)


def check_identity(saved: Saved | None, identity: Identity) -> None:
    """Raise UserError unless all ranks and the checkpoint have read the same; all ranks must call."""
    first, *others = gather_objects(identity)
    for other in others:
        if other != first:
            part = next(part for part in first if other.get(part) != first[part])
            problem = f"hosts read different things as {PARTS[part]}; give all of them the same files"
            raise UserError(problem, code=f"hosts-{part}")
    if saved is not None:
        check_same(saved.directory, saved.identity, identity)


class Loadable(NamedTuple):
    """From where the engine loads a checkpoint."""

    directory: Path
    universal: bool  # whether it is DeepSpeed's universal format, which any number of ranks can load


def loadable(saved: Saved, ranks: int, optimizer: str) -> Loadable:
    """Return from where `ranks` ranks load a checkpoint. `make_universal` writes a universal copy first.

    Raises UserError for Muon's state, which has no universal format.
    """
    if saved.ranks == ranks:
        return Loadable(saved.directory, universal=False)
    if optimizer == "Muon":
        problem = f"{saved.directory} holds Muon's state, which cannot be converted for {ranks} ranks"
        raise UserError(f"{problem}; start {saved.ranks} ranks, {ANEW}", code="muon-ranks")
    return Loadable(saved.directory.with_name(saved.directory.name + ".universal"), universal=True)


def make_universal(saved: Saved, target: Path, world: World) -> None:
    """Write the universal copy of a checkpoint to `target`; all ranks must call."""

    def convert() -> None:
        line = "%s was saved by %d ranks: converting it for %d"
        log.info(line, saved.directory.name, saved.ranks, world.ranks)
        shutil.rmtree(target, ignore_errors=True)
        to_universal(saved.directory / "state", target / "state")

    run_on_main(world, convert)


def check_engine(saved: Saved, engine: Engine) -> None:
    """Raise UserError for other groups of parameters, or other weights that do not train, than were saved."""
    if (saved.groups, saved.frozen) != (engine.groups, engine.frozen):
        problem = (
            f"{saved.directory} holds adapters or parameters of another base model than model.path is now"
        )
        raise UserError(f"{problem}; put the old weights back, {ANEW}", code="changed-base")
