"""One launch per run directory, and what that launch is doing: the lock and heartbeat.json.

Rank 0 holds a lease on the run directory (common/io/lease.py). A thread renews it. While the lease is held, a
second launch is rejected. When the holder has died, the next launch takes over. The same thread writes the
heartbeat, also to the file that PIPELINE_HEARTBEAT names for a container's health check. Each rank also has a
file (heartbeat.py).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from emo.common.errors import FailureError, UserError, may_pass
from emo.common.io.files import write_text
from emo.common.io.lease import Lease

from .heartbeat import BEAT, COPY, RankHeartbeat, RankState
from .run_dir import HEARTBEAT, LOCK, LOCK_SECONDS, RANKS, RANKS_BEFORE

log = logging.getLogger(__name__)

POLL = 0.25  # seconds between attempts to take a lock that another launch holds


class RunLock:
    """This launch's hold on its run directory. Ranks other than 0 only write their heartbeats."""

    def __init__(self, run_dir: Path, active: bool) -> None:
        """active: whether this is rank 0, which holds the lock."""
        self.run_dir = run_dir
        self._lease = Lease(run_dir, LOCK, LOCK_SECONDS, BEAT) if active else None
        self.step = 0  # the last step that this launch has taken
        self._activity = "loading"
        self._since = time.time()
        self.lost = False  # whether another launch had taken over at the last beat
        self._writing = threading.Lock()  # the main thread writes the heartbeat, too
        self._copy = Path(os.environ[COPY]) if active and os.environ.get(COPY) else None
        self._heartbeat: RankHeartbeat | None = None

    def acquire(self) -> None:
        """Take the lock. Wait for a holder on another host that may have died.

        Raises UserError when another launch holds the lock or the directory cannot be written, and
        FailureError when that may pass. Under a scheduler, the other launch may be what is left of this job
        on a node that was lost.
        """
        if self._lease is None:
            return
        began = time.monotonic()
        first = None
        try:
            while not self._lease.acquire(self._beat):
                holder = self._lease.holder()
                if holder is not None and first is None:
                    first = holder
                    line = "%s is locked by %s: waiting up to %.0f s to see whether it still runs"
                    log.info(line, self.run_dir, first, 2 * BEAT if first.here else LOCK_SECONDS)
                elif holder is not None and first is not None:
                    waited = holder.here and time.monotonic() - began > 2 * BEAT
                    if waited or holder.renewed > first.renewed:
                        problem = f"{self.run_dir} is in use by {holder}"
                        cure = "wait until that launch has ended, or set another output_dir"
                        kind = FailureError if _will_start_again() else UserError
                        raise kind(f"{problem}; {cure}", code="run-in-use")
                time.sleep(POLL)
        except OSError as error:
            kind = FailureError if may_pass(error) else UserError
            text = f"output_dir={self.run_dir} cannot be written ({error}); set another"
            raise kind(text, code="unwritable") from None
        self._beat()

    def set_aside_rank_files(self) -> None:
        """Keep the rank files of the previous launch under another name."""
        shutil.rmtree(self.run_dir / RANKS_BEFORE, ignore_errors=True)
        if (self.run_dir / RANKS).is_dir():
            (self.run_dir / RANKS).rename(self.run_dir / RANKS_BEFORE)
        (self.run_dir / RANKS).mkdir()

    def start_heartbeat(self, rank: int) -> None:
        """Start this rank's heartbeat file."""
        self._heartbeat = RankHeartbeat(self.run_dir, rank)
        self.set_activity(self._activity)

    @property
    def problem(self) -> str | None:
        """Return why this launch must stop writing, or None. Reads the directory."""
        if self._lease is None or self._lease.is_held():
            return None
        return f"another launch took over {self.run_dir}, whose lock was not renewed for long"

    def record_step(self, step: int) -> None:
        """Record that step `step` (from 1) was taken."""
        self.step = step
        self._since = time.time()
        if self._heartbeat is not None:
            self._heartbeat.write_copy(self._state)

    def record_facts(self, **facts: object) -> None:
        """Write this rank's heartbeat with what was measured since the last log window."""
        if self._heartbeat is not None:
            self._heartbeat.write(self._state, **facts)

    @property
    def _state(self) -> RankState:
        return {"step": self.step, "doing": self._activity, "since": self._since}

    @contextlib.contextmanager
    def activity(self, name: str) -> Iterator[None]:
        """Show `name` as the run's activity in the heartbeat within the block."""
        before = self._activity
        self.set_activity(name)
        yield
        self.set_activity(before)

    def set_activity(self, name: str) -> None:
        """Set the activity shown in the heartbeat."""
        self._activity = name
        self._since = time.time()
        self.record_facts()
        if self._lease is not None and self._lease.path is not None:
            self._beat()

    def release(self, outcome: str) -> None:
        """Release the lock. The heartbeat keeps the `outcome` of this launch."""
        self.set_activity(outcome)
        if self._heartbeat is not None:
            self._heartbeat.close()
        if self._lease is not None:
            self._lease.release()
            if self._copy is not None:
                self._copy.unlink(missing_ok=True)

    def _beat(self) -> None:
        self.lost = self.lost or self.problem is not None
        if self.lost:
            return
        with self._writing:
            beat = {"time": time.time(), **self._state, "host": socket.gethostname(), "pid": os.getpid()}
            for path in (self._copy, self.run_dir / HEARTBEAT):  # the run directory's disk may hang
                # On a full disk the writers of checkpoints and metrics report the error.
                with contextlib.suppress(OSError):
                    if path is not None:
                        write_text(path, json.dumps(beat))


def _will_start_again() -> bool:
    """Return whether a scheduler starts this launch again after a failure."""
    return int(os.environ.get("SLURM_RESTART_COUNT") or 0) > 0 or "KUBERNETES_SERVICE_HOST" in os.environ
