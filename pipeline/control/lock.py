"""One launch per run directory, and what it is doing: the lock and heartbeat.json.

Rank 0 holds a lease on the run directory (common/io/lease.py). A thread renews it, so that a second launch is
refused while the first lives, and takes over when it has died. The same thread writes the heartbeat, also to
the file that PIPELINE_HEARTBEAT names for a container's health check. Every rank has a file besides
(heartbeat.py).
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
from typing import Any

from emo.common.errors import FailureError, UserError, may_pass
from emo.common.io.files import write_text
from emo.common.io.lease import Lease

from .heartbeat import BEAT, COPY, Liveness
from .run_dir import HEARTBEAT, LOCK, LOCK_SECONDS, RANKS, RANKS_BEFORE

log = logging.getLogger(__name__)

LOOK = 0.25  # seconds between looks at a lock that somebody holds


class RunLock:
    """This launch's hold on its run directory; ranks other than 0 only say what they do."""

    def __init__(self, run_dir: Path, active: bool) -> None:
        self.run_dir = run_dir
        self._lease = Lease(run_dir, LOCK, LOCK_SECONDS, BEAT) if active else None
        self.step = 0  # the last one that this launch has taken
        self._doing, self._since = "loading", time.time()
        self.lost = False  # whether another launch took over, as of the last beat
        self._writing = threading.Lock()  # the main thread writes as well
        self._copy = Path(os.environ[COPY]) if active and os.environ.get(COPY) else None
        self._liveness: Liveness | None = None

    def take(self) -> None:
        """Take the lock, waiting for a holder that has died without a word on another host.

        Raises UserError when another launch holds it, or the directory cannot be written, FailureError where
        that may pass.
        """
        if self._lease is None:
            return
        began, first = time.monotonic(), None
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
                        problem = f"{self.run_dir} is in use by {holder}; wait until it has ended"
                        raise UserError(f"{problem}, or set another output_dir", code="run-in-use")
                time.sleep(LOOK)
        except OSError as error:
            kind = FailureError if may_pass(error) else UserError
            text = f"output_dir={self.run_dir} cannot be written ({error}); set another"
            raise kind(text, code="unwritable") from None
        self._beat()

    def taken(self, rank: int) -> None:
        """Note that the directory is this launch's: from now on this rank has a file in it."""
        self._liveness = Liveness(self.run_dir, rank)
        self.now(self._doing)

    def clear_ranks(self) -> None:
        """Put the files of the last launch's ranks aside."""
        shutil.rmtree(self.run_dir / RANKS_BEFORE, ignore_errors=True)
        if (self.run_dir / RANKS).is_dir():
            (self.run_dir / RANKS).rename(self.run_dir / RANKS_BEFORE)
        (self.run_dir / RANKS).mkdir()

    @property
    def problem(self) -> str | None:
        """Return why this launch must not write any more, or None; looks at the directory."""
        if self._lease is None or self._lease.is_held():
            return None
        return f"another launch took over {self.run_dir}, whose lock was not renewed for long"

    def reached(self, step: int) -> None:
        """Note that step `step` has been taken."""
        self.step, self._since = step, time.time()
        if self._liveness is not None:
            self._liveness.copy(self._state)

    def logged(self, **facts: Any) -> None:
        """Note what was measured of this rank since the last log window."""
        if self._liveness is not None:
            self._liveness.write(self._state, **facts)

    @property
    def _state(self) -> dict[str, Any]:
        return {"step": self.step, "doing": self._doing, "since": self._since}

    @contextlib.contextmanager
    def doing(self, activity: str) -> Iterator[None]:
        """Name an activity in the heartbeat within the block."""
        before = self._doing
        self.now(activity)
        yield
        self.now(before)

    def now(self, activity: str) -> None:
        """Name the run's activity from now on."""
        self._doing, self._since = activity, time.time()
        self.logged()
        if self._lease is not None and self._lease.path is not None:
            self._beat()

    def release(self, ended: str) -> None:
        """Let other launches have the directory; the heartbeat keeps saying how this one `ended`."""
        self.now(ended)
        if self._liveness is not None:
            self._liveness.close()
        if self._lease is not None:
            self._lease.release()
            if self._copy is not None:
                self._copy.unlink(missing_ok=True)

    def _beat(self) -> None:
        self.lost = self.lost or self.problem is not None
        if self.lost:
            return
        # Where the disk is full, what must be written reports it.
        with self._writing:
            beat = {"time": time.time(), **self._state, "host": socket.gethostname(), "pid": os.getpid()}
            for path in (self._copy, self.run_dir / HEARTBEAT):  # the run directory's disk may hang
                with contextlib.suppress(OSError):
                    if path is not None:
                        write_text(path, json.dumps(beat))
