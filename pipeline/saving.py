"""Saving while training continues: copy the state, then write, hash and publish it in a thread.

The stall of a save is the copy into host memory. What follows runs beside training on every rank: writing,
hashing what was written, and on rank 0 the export, COMPLETE, the final name and pruning; upload.py copies.
Ranks talk through a process group of their own, so that all learn when one of them could not write.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common.errors import FailureError, UserError, one_line
from common.files import write_text
from common.provenance import code_version, library_versions
from data_prep.config import settings
from pipeline import checkpoint
from pipeline.config import RunConfig
from pipeline.engine import DamagedError, Engine
from pipeline.export import Copied, ExportError, check_aside, copy_model, write_export
from pipeline.identity import Identity
from pipeline.lock import RunLock
from pipeline.ranks import PATIENCE, barrier, gather_objects, host_group, lost_a_peer
from pipeline.run_dir import HF, STATE, FileFacts, describe, list_files, partial_directory
from pipeline.stop import RESUME
from pipeline.upload import Uploads

log = logging.getLogger(__name__)


class Saver:
    """Writes the checkpoints of a run, one at a time."""

    def __init__(self, engine: Engine, config: RunConfig, lock: RunLock, identity: Identity) -> None:
        """identity: of what the run has read."""
        self.engine, self.config, self.lock, self.identity = engine, config, lock, identity
        self._problem: UserError | None = None
        self._thread: threading.Thread | None = None
        self._step, self._deadline = 0, 0.0  # of the thread
        self.group = host_group()
        target = config.train.copy_to
        self._uploads = Uploads(config.run_dir, target) if target and engine.world.is_main else None

    def save(self, step: int, tokens: int, progress: dict[str, Any]) -> None:
        """Begin the checkpoint after `step` by the directory protocol; all ranks must call.

        progress: what metrics and guard have counted, for the run that resumes from here. Raises UserError
        when the checkpoint before could not be written.
        """
        self.finish()
        run_dir = self.config.run_dir
        partial = partial_directory(run_dir, step)
        if self.engine.world.is_main:
            checkpoint.remove(partial)
        barrier()
        self.engine.snapshot(partial)
        copied = copy_model(self.engine) if self.config.train.export_checkpoints else None
        state = {
            "step": step,
            "tokens": tokens,
            "ranks": self.engine.world.ranks,
            "groups": self.engine.groups,
            "frozen": self.engine.frozen,
            "identity": self.identity,
            "progress": progress,
        }
        self._step, self._deadline = step, time.monotonic() + 60 * PATIENCE
        self._thread = threading.Thread(target=self._write, args=(partial, state, copied), daemon=True)
        self._thread.start()
        if not self.config.train.async_save:
            self.finish()

    @property
    def problem(self) -> UserError | None:
        """Return why the last checkpoint could not be written, on any rank, or None."""
        writing = self._thread is not None and self._thread.is_alive()
        if self._problem is None and writing and time.monotonic() > self._deadline:
            hung = f"nothing was written for {PATIENCE:g} minutes, as when a disk hangs"
            return self._given_up(FailureError(hung))
        return self._problem

    def finish(self) -> None:
        """Wait until the last checkpoint is complete; all ranks must call.

        Raises UserError, on all ranks alike, when it could not be written or the run directory was lost.
        """
        while self._thread is not None and self._thread.is_alive() and self.problem is None:
            self._thread.join(max(0.0, self._deadline - time.monotonic()))
        failed, self._thread = self.problem, None
        lost = None if self.lock.problem is None else UserError(self.lock.problem)
        problem = next((p for p in gather_objects(failed or lost) if p is not None), None)
        if problem is not None:
            raise problem

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
        message = f"the checkpoint after step {self._step} cannot be written ({why})"
        if isinstance(why, DamagedError):
            return DamagedError(f"{message}; the last complete one remains", code=why.code)
        if isinstance(why, ExportError):
            cure = "set train.export_checkpoints=false to go on from it without exports"
            return ExportError(f"{message}; the last complete one remains; {cure}")
        return FailureError(f"{message}; the last complete one remains; make room, then {RESUME} from it")

    def _write(self, partial: Path, state: dict[str, Any], copied: Copied | None) -> None:
        """One rank's part, and on rank 0 what makes a checkpoint of all parts."""
        problem: UserError | None
        try:
            error, files = self._write_part(partial, state, copied)
            self._goes_on()
            parts = gather_objects((error, files), self.group)
            problem = next((p for p, _ in parts if p is not None), None)
            self._goes_on()
            if problem is None and self.engine.world.is_main:
                problem = self._publish(partial, {k: v for _, part in parts for k, v in part.items()})
            problem = gather_objects(problem, self.group)[0]
        except Exception as found:
            lost = isinstance(found, RuntimeError) and lost_a_peer(found)
            problem = FailureError("another rank has not written its part" if lost else one_line(found))
        if problem is not None:
            self._problem = self._given_up(problem)
            if self.engine.world.is_main:
                with contextlib.suppress(OSError):  # the disk that failed may fail again
                    checkpoint.remove(partial)

    def _write_part(
        self, partial: Path, state: dict[str, Any], copied: Copied | None
    ) -> tuple[UserError | None, dict[str, FileFacts]]:
        """Write this rank's files, and on rank 0 the export; why that failed, or None, and their hashes."""
        rank = self.engine.world.rank
        try:
            if rank == 0:
                partial.mkdir(parents=True, exist_ok=True)
                write_text(partial / STATE, json.dumps(state, allow_nan=False))
            written = self.engine.files.write()
            self._goes_on()
            if rank == 0 and copied is not None:
                info = self.export_info(state["step"], state["tokens"])
                problem = write_export(copied, self.config, partial / HF, info, check_aside)
                if problem is not None:
                    return type(problem)(f"rank 0: {problem}"), {}
                self._goes_on()
            return None, self._describe(partial, written)
        except DamagedError as error:
            return error, {}
        except Exception as found:  # whatever it is: the other ranks wait to hear of it
            return FailureError(f"rank {rank}: {one_line(found, 200)}"), {}

    def _publish(self, partial: Path, files: dict[str, FileFacts]) -> UserError | None:
        """Give a checkpoint its marker and name, and remove old ones; return what failed, or None."""
        train = self.config.train
        if self.lock.problem is not None:
            return FailureError(self.lock.problem)
        try:
            checkpoint.write_complete(partial, files)
            final = checkpoint.publish(self.config.run_dir, self._step)
            event = {"event": "saved", "step": self._step, "path": str(final)}
            log.info("saved: %s", final, extra={"event_fields": event})
            spared = self._uploads.current if self._uploads is not None else None
            checkpoint.prune(self.config.run_dir, train.keep_last, train.keep_every, spared)
            if self._uploads is not None:
                self._uploads.wake()
        except OSError as error:
            return FailureError(f"rank 0: {one_line(error, 200)}")
        return None

    def _describe(self, partial: Path, written: list[Path]) -> dict[str, FileFacts]:
        """Return hashes of the files of this rank; rank 0 owns whatever no DeepSpeed rank wrote."""
        names = [path.relative_to(partial).as_posix() for path in written]
        if self.engine.world.is_main:
            names += [n for n in list_files(partial) if not n.startswith("state/")]
        for name in names:
            with (partial / name).open("rb") as file:
                os.fsync(file.fileno())  # a power cut after COMPLETE must not find unwritten pages
        return describe(partial, names)

    def export_info(self, step: int, tokens: int) -> dict[str, Any]:
        """Return what an export says of its origin."""
        config = self.config
        return {
            "run": str(config.run_dir),
            "origin": config.model.path or "new",
            "objective": config.objective.label,
            "objective_params": config.objective.params,
            "cost": config.objective.cost,
            "step": step,
            "tokens": tokens,
            "data_fingerprint": self.identity["data"],
            "template": settings(config.data)["template_version"],  # how prompts of the model are written
            "seed": config.train.seed,
            "lr": config.train.lr,
            "batch": config.train.batch,
            "git": code_version(),
            **library_versions("torch", "transformers", "deepspeed"),
        }
