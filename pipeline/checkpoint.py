"""The checkpoints of a run: written while training continues, published, removed, found valid and read again.

The stall of a save is the copy into host memory. The rest runs beside training on every rank, which talk
through a process group of their own, so that all learn when one of them could not write.

A checkpoint is written as step-N.partial, hashed, given COMPLETE (every file with its size and hash) and
renamed. So a directory without a matching COMPLETE is not a checkpoint, and a torn one is never resumed.

Checkpoints are copied to `train.copy_to` beside training. What is left to copy is read from the two
directories: checkpoints whose COMPLETE the target lacks. So a launch goes on where an earlier one was
interrupted, and no upload, however slow, holds up a save. In the target UPLOADING holds what COMPLETE will
say while files are missing, and COMPLETE comes last.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import fsspec
import torch.distributed as dist

from emo.common.errors import FailureError, UserError, one_line
from emo.common.files import write_text
from emo.common.provenance import code_version, library_versions
from emo.common.untrusted import read_json
from emo.data_prep.config import settings
from emo.pipeline.config import RunConfig
from emo.pipeline.engine import Engine, to_universal
from emo.pipeline.export import Copied, check_aside, copy_model, write_export
from emo.pipeline.identity import ANEW, PARTS, Identity, check_same
from emo.pipeline.lock import RunLock
from emo.pipeline.ranks import PATIENCE, World, gather_objects, lost_a_peer, on_main
from emo.pipeline.run_dir import (
    COMPLETE,
    HF,
    STATE,
    FileFacts,
    checkpoints,
    describe,
    is_complete,
    list_files,
    partial_directory,
    problem,
    step_directory,
    step_of,
)
from emo.pipeline.stop import RESUME

log = logging.getLogger(__name__)

STALL = 600.0  # seconds without a piece after which the end of a run no longer waits


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
        self.group = dist.new_group(backend="gloo", timeout=datetime.timedelta(minutes=PATIENCE))
        target = config.train.copy_to
        self._uploads = Uploads(config.output_dir, target) if target and engine.world.is_main else None

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
            return self._given_up(FailureError(f"nothing was written for {PATIENCE:g} minutes"))
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
            if not states[0][0] or any(stop for _, stop in states):
                break
            self.lock.now("copying")
            time.sleep(wait)
            wait = min(2 * wait, 5.0)
        if uploads is not None and (names := uploads.unfinished()):
            log.warning("not in train.copy_to=%s, copy them by hand: %s", uploads.target, ", ".join(names))

    def _goes_on(self) -> None:
        """Give the thread PATIENCE minutes for the next thing that it does."""
        self._deadline = time.monotonic() + 60 * PATIENCE

    def _given_up(self, why: UserError) -> UserError:
        """Return the error that ends the run, of the same kind as `why`."""
        problem = f"the checkpoint after step {self._step} cannot be written ({why})"
        cure = f"make room, then {RESUME}" if isinstance(why, FailureError) else "correct that first"
        return type(why)(f"{problem}; the last complete one remains; {cure}", code=why.code)

    def _write(self, saved: Saved, copied: Copied | None) -> None:
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
                    if self._uploads is not None:
                        self._uploads.wake()
                except OSError as failure:
                    error = FailureError(one_line(failure, 200))
            error = gather_objects(error, self.group)[0]
        except Exception as failure:
            lost = isinstance(failure, RuntimeError) and lost_a_peer(failure)
            error = FailureError("another rank has not written its part" if lost else one_line(failure))
        if error is not None:
            self._problem = self._given_up(error)
            if rank == 0:
                with contextlib.suppress(OSError):  # the disk that failed may fail again
                    remove(partial)

    def _write_part(self, saved: Saved, copied: Copied | None) -> dict[str, FileFacts]:
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
            write_export(copied, self.config, partial / HF, info, check_aside)
            self._goes_on()
        names = [path.relative_to(partial).as_posix() for path in written]
        if rank == 0:  # which owns whatever no DeepSpeed rank wrote
            names += [n for n in list_files(partial) if not n.startswith("state/")]
        for name in names:
            with (partial / name).open("rb") as file:
                os.fsync(file.fileno())  # a power cut after COMPLETE must not find unwritten pages
        return describe(partial, names)

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
        problems = [p for p in gather_objects(problem(directory, world.rank, world.ranks)) if p is not None]
        if not problems:
            return read_saved(directory)
        log.warning("%s is not used: %s", directory.name, problems[0])
    if directories:
        log.warning("no checkpoint in %s is whole: training begins again from step 0", run_dir)
    return None


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


def loadable(saved: Saved, ds_config: dict[str, Any], world: World) -> Path:
    """Return the path from which this many ranks can load `saved`.

    Where another number of ranks saved it that is a universal copy, as `ds_config` then says; Muon's state
    has no place in one.
    """
    if saved.ranks == world.ranks:
        return saved.directory
    if ds_config["optimizer"]["type"] == "Muon":
        problem = f"{saved.directory} holds Muon's state, which cannot be converted for {world.ranks} ranks"
        raise UserError(f"{problem}; start {saved.ranks} ranks, {ANEW}", code="muon-ranks")
    copy = saved.directory.with_name(saved.directory.name + ".universal")

    def convert() -> None:
        line = "%s was saved by %d ranks: converting it for %d"
        log.info(line, saved.directory.name, saved.ranks, world.ranks)
        shutil.rmtree(copy, ignore_errors=True)
        to_universal(saved.directory / "state", copy / "state")

    on_main(world, convert)
    ds_config["checkpoint"] = {"load_universal": True}
    return copy


def check_engine(saved: Saved, engine: Engine) -> None:
    """Raise UserError for other groups of parameters, or other weights that do not train, than were saved."""
    if (saved.groups, saved.frozen) != (engine.groups, engine.frozen):
        problem = (
            f"{saved.directory} holds adapters or parameters of another base model than model.path is now"
        )
        raise UserError(f"{problem}; put the old weights back, {ANEW}", code="changed-base")


class Uploads:
    """A thread that copies the checkpoints of a run, oldest first."""

    def __init__(self, run_dir: Path, target: str) -> None:
        self.run_dir, self.target = run_dir, target
        self.current: Path | None = None  # is being copied, and must not be pruned
        self._copied: set[str] = set()
        self._thread = ThreadPoolExecutor(1, "upload")
        self.wake()  # for what an earlier launch has left

    def wake(self) -> None:
        """Let the thread look for checkpoints that have become complete."""
        self._move()
        self._last = self._thread.submit(self._copy_new)

    def goes_on(self) -> bool:
        """Return whether something is being copied and moves."""
        return not self._last.done() and time.monotonic() - self._moved < STALL

    def unfinished(self) -> list[str]:
        """Return the names of complete checkpoints that are not in the target."""
        return [d.name for d in checkpoints(self.run_dir) if d.name not in self._copied]

    def _copy_new(self) -> None:
        for directory in checkpoints(self.run_dir):
            if directory.name in self._copied:
                continue
            self.current = directory
            self._move()
            try:
                copy_checkpoint(directory, self.target, self._move)
                self._copied.add(directory.name)
            except Exception as error:  # of whatever store it is; the next `wake` tries again
                why = one_line(error, 200)
                if not is_complete(directory):
                    why = "it was removed before its turn came: copies are slower than saves"
                log.warning("%s was not copied to train.copy_to=%s: %s", directory.name, self.target, why)
        self.current = None

    def _move(self) -> None:
        self._moved = time.monotonic()


def copy_checkpoint(directory: Path, target: str, moved: Callable[[], None]) -> None:
    """Copy a complete checkpoint into `target`, calling `moved` after every piece.

    Files that an interrupted copy of the same checkpoint has left whole stay. Raises OSError for a file that
    is no longer what COMPLETE says.
    """
    system, root = fsspec.core.url_to_fs(f"{target}/{directory.name}")
    system.invalidate_cache()
    marker = (directory / COMPLETE).read_bytes()
    listed = json.loads(marker)["files"]
    complete, uploading = f"{root}/{COMPLETE}", f"{root}/UPLOADING"

    def content(path: str) -> bytes | None:
        return system.cat_file(path) if system.exists(path) else None

    def copy(name: str) -> None:
        path = f"{root}/{name}"
        if resumes and system.exists(path) and system.size(path) == listed[name]["size"]:
            return
        system.makedirs(path.rpartition("/")[0], exist_ok=True)
        digest = hashlib.sha256()
        with (directory / name).open("rb") as source, system.open(path, "wb") as sink:
            while piece := source.read(16 << 20):
                sink.write(piece)
                digest.update(piece)
                moved()
        if digest.hexdigest() != listed[name]["sha256"]:
            raise OSError(f"{name} has another content than {COMPLETE} says")

    if content(complete) != marker:
        resumes = content(uploading) == marker
        if system.exists(complete):  # of another checkpoint of this name
            system.rm_file(complete)
        if not resumes:
            system.makedirs(root, exist_ok=True)
            system.pipe_file(uploading, marker)
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(copy, sorted(listed)))
        system.pipe_file(complete, marker)
    if system.exists(uploading):
        system.rm_file(uploading)
