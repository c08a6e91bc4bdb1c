"""Copies of a run in the store `train.copy_to`. They are made during training. A run can resume from one.

A copy has the file names of a run directory: checkpoints, config.yaml and the records that reports read. One
rank of every host copies a part of the files of each checkpoint, and marks it with a file UPLOADING-i-of-n.
The host that finds all parts finished writes COMPLETE. Hosts communicate through the store only.

A checkpoint is still to be copied if the store lacks its COMPLETE. A launch therefore continues the copies of
an interrupted one, and a slow upload never delays a save.

If the run directory is missing, as on another cluster, it is fetched from the copy: its records before
anything is compared, and later the newest valid checkpoint, of which each rank fetches a part.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

from emo.common.errors import PERMANENT, FailureError, UserError, one_line
from emo.common.io.files import part_file
from emo.common.io.fsspec_store import PIECE, FsspecStore
from emo.common.io.store import Store

from ..config import RunConfig
from ..control.lock import RunLock
from ..control.run_dir import (
    BAD_BATCHES,
    BEST,
    COMPLETE,
    CONFIG,
    LAUNCHES,
    METRICS,
    MLFLOW_ID,
    SAMPLES,
    SELECTION,
    TASK_SCORES,
    TRACKIO_ID,
    VALIDATION,
    WANDB_ID,
    checkpoints,
    is_complete,
    step_of,
)
from ..control.world import gather_objects
from .identity import Identity, check_config_file

log = logging.getLogger(__name__)

STORES: dict[str, type[Store]] = {}  # by scheme of the address. FsspecStore opens the others
# And CONFIG, and the files of VALIDATION.
RECORDS = (
    *(METRICS, LAUNCHES, SAMPLES, BAD_BATCHES, BEST, SELECTION, TASK_SCORES),
    *(WANDB_ID, MLFLOW_ID, TRACKIO_ID),
)
STALL = 600.0  # seconds without progress after which the end of a run does not wait for copies
PATIENCE = 60.0  # seconds to wait for a list of the checkpoints in the store
PATIENCE_STOPPED = 5.0  # the same if the run must end soon
POLL = 2.0  # seconds between checks of what other hosts have done
THREADS = 8  # files that are transferred at the same time
FINISHED = b"\nwhole"  # follows the content of COMPLETE in the marker of a finished part


def open_store(target: str) -> Store:
    """Open the store at an address of `train.copy_to`."""
    return STORES.get(target.partition("://")[0], FsspecStore)(target)


def part_marker(part: int, parts: int) -> str:
    """Return the name of the marker of a part."""
    return f"UPLOADING-{part}-of-{parts}"


class Uploads:
    """Copies one part of each checkpoint of a run in a thread. The first part includes the records.

    The host of the first part starts with the oldest checkpoint and waits for all parts of it before it
    starts the next. The other hosts copy the checkpoints that it has started.
    """

    def __init__(self, run_dir: Path, target: str, part: int = 0, parts: int = 1) -> None:
        self.run_dir = run_dir
        self.target = target
        self.part = part
        self.parts = parts
        self.current: Path | None = None  # the checkpoint that is being copied. It must not be pruned
        self._tried: set[str] = set()
        self._failed: set[str] = set()  # are tried again after the next `wake`
        self._thread = ThreadPoolExecutor(1, "upload")
        self.wake()  # for the checkpoints of an earlier launch

    def wake(self) -> None:
        """Let the thread look for new complete checkpoints."""
        self._note_progress()
        self._last = self._thread.submit(self._copy_new)

    def is_progressing(self) -> bool:
        """Return whether this host copies something and has not stalled."""
        copying = self.current is not None or self.part == 0
        return copying and not self._last.done() and time.monotonic() - self._progressed < STALL

    def find_missing(self, timeout: float) -> list[str]:
        """Return the names of complete checkpoints that the store does not have completely.

        If it does not answer within `timeout` seconds, return those that this launch has not copied.
        """
        names = [directory.name for directory in checkpoints(self.run_dir)]
        with contextlib.suppress(Exception):  # stores raise anything
            return self._thread.submit(self._filter_missing, names).result(timeout)
        current = self.current
        copied = self._tried - self._failed - {"" if current is None else current.name}
        return [name for name in names if name not in copied]

    def warn_of_missing(self, timeout: float) -> None:
        """Log the checkpoints that the store does not have. See `find_missing`."""
        if names := self.find_missing(timeout):
            cure = "Run the same command again to copy them"
            log.warning("not in train.copy_to=%s: %s. %s.", self.target, ", ".join(names), cure)

    def _filter_missing(self, names: list[str]) -> list[str]:
        store = open_store(self.target)
        return [name for name in names if store.read(f"{name}/{COMPLETE}") is None]

    def _copy_new(self) -> None:
        start = time.monotonic()
        self._tried -= self._failed
        self._failed.clear()
        while True:
            waiting = [d for d in checkpoints(self.run_dir) if d.name not in self._tried]
            self.current = directory = next(filter(self._may_start, waiting), None)
            if directory is not None:
                self._note_progress()
                self._tried.add(directory.name)
                self._copy(directory)
            elif waiting and time.monotonic() - start < STALL:
                time.sleep(POLL)
            else:
                return

    def _may_start(self, directory: Path) -> bool:
        """Return whether the host of the first part has started this checkpoint."""
        if self.part == 0:
            return True
        with contextlib.suppress(Exception):  # stores raise anything. The next poll tries again
            marker = (directory / COMPLETE).read_bytes()
            first = open_store(self.target).read(f"{directory.name}/{part_marker(0, self.parts)}")
            return first in (marker, marker + FINISHED)
        return False

    def _copy(self, directory: Path) -> None:
        try:
            store = open_store(self.target)
            if self.part == 0:
                copy_records(self.run_dir, store)
            copy_checkpoint(directory, store, self._note_progress, self.part, self.parts)
            if self.part == 0:
                self._wait_for_others(store, directory)
        except Exception as error:  # stores raise anything. The next `wake` tries again
            reason = one_line(error, 200)
            if not is_complete(directory):
                reason = "it was removed before its turn, because copies are slower than saves"
            log.warning("%s was not copied to train.copy_to=%s: %s", directory.name, self.target, reason)
            self._failed.add(directory.name)

    def _wait_for_others(self, store: Store, directory: Path) -> None:
        start = time.monotonic()
        while store.read(f"{directory.name}/{COMPLETE}") is None:
            if time.monotonic() - start > STALL:
                raise OSError("other hosts have not copied their parts")
            time.sleep(POLL)

    def _note_progress(self) -> None:
        self._progressed = time.monotonic()


def wait_for_copies(
    uploads: Uploads | None, stopped: Callable[[], bool], lock: RunLock, group: Any = None
) -> None:
    """Wait for copies until they stall or a rank has to stop. All ranks must call.

    Args:
        uploads: Those of this host, on the rank that makes them.
        stopped: Returns whether this rank has to stop.
        lock: Shows what the run does.
        group: The process group, or None for all ranks.
    """
    wait = 0.1
    while True:
        progressing = uploads is not None and uploads.is_progressing()
        states = gather_objects((progressing, stopped()), group)
        stopping = any(stop for _, stop in states)
        if stopping or not any(progress for progress, _ in states):
            break
        lock.set_activity("copying")
        time.sleep(wait)
        wait = min(2 * wait, 5.0)
    if uploads is not None and uploads.part == 0:
        uploads.warn_of_missing(PATIENCE_STOPPED if stopping else PATIENCE)


def copy_records(run_dir: Path, store: Store) -> None:
    """Copy the files that reports and validation read, without an unfinished last line."""
    paths = [run_dir / name for name in (CONFIG, *RECORDS)]
    copied = store.list_files(VALIDATION)
    for path in filter(Path.is_file, (*paths, *(run_dir / VALIDATION).rglob("*"))):
        name = path.relative_to(run_dir).as_posix()
        if path.suffix == ".npy" and copied.get(name) == path.stat().st_size:
            continue  # the predictions of the base are large and do not change
        content = path.read_bytes()
        if path.suffix == ".jsonl":
            content = content[: content.rfind(b"\n") + 1]
        store.write(name, [content])


def copy_checkpoint(
    directory: Path, store: Store, on_piece: Callable[[], None], part: int = 0, parts: int = 1
) -> None:
    """Copy one part of the files of a complete checkpoint. The host of the last part completes the copy.

    Files that an interrupted copy of the same part has finished are not copied again.

    Args:
        directory: The checkpoint.
        store: Receives the copy.
        on_piece: Called after every piece of a file.
        part: Number of the part, from 0.
        parts: Number of parts.

    Raises OSError for a file whose content is not the one that COMPLETE lists.
    """
    name = directory.name
    marker = (directory / COMPLETE).read_bytes()
    copied = store.read(f"{name}/{COMPLETE}")
    if copied == marker:
        return
    if copied is not None:  # an earlier checkpoint of this name
        store.delete(f"{name}/{COMPLETE}")
    markers = [f"{name}/{part_marker(i, parts)}" for i in range(parts)]
    present: dict[str, int] = {}
    if store.read(markers[part]) in (marker, marker + FINISHED):
        present = store.list_files(name)
    else:
        store.write(markers[part], [marker])
    listed = json.loads(marker)["files"]
    by_size = sorted(listed, key=lambda file: (-listed[file]["size"], file))  # balances the parts
    files = [f for f in by_size[part::parts] if present.get(f"{name}/{f}") != listed[f]["size"]]

    def copy_file(file: str) -> None:
        digest = hashlib.sha256()
        with (directory / file).open("rb") as source:
            store.write(f"{name}/{file}", _read_pieces(source, digest.update, on_piece))
        if digest.hexdigest() != listed[file]["sha256"]:
            store.delete(f"{name}/{file}")  # the next try would trust its size
            raise OSError(f"{file} has another content than {COMPLETE} lists")

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(copy_file, files))
    store.write(markers[part], [marker + FINISHED])
    if all(store.read(path) == marker + FINISHED for path in markers):
        store.write(f"{name}/{COMPLETE}", [marker])
        for path in store.list_files(name):
            if path.startswith(f"{name}/UPLOADING-"):
                store.delete(path)


def _read_pieces(
    source: IO[bytes], update: Callable[[bytes], None], on_piece: Callable[[], None]
) -> Iterator[bytes]:
    while piece := source.read(PIECE):
        yield piece
        update(piece)
        on_piece()


class RunCopy:
    """Reads the copy of a run. Raises UserError or FailureError if the store cannot be read."""

    def __init__(self, target: str, key: str = "train.copy_to") -> None:
        """Open the copy at the address `target`, which the recipe names in `key`."""
        self.target = target
        self.key = key
        with self._explain_errors():
            self._store = open_store(target)

    @contextlib.contextmanager
    def _explain_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # stores raise anything
            problem = f"{self.key}={self.target} cannot be read ({one_line(error, 200)})"
            lasting = isinstance(
                error, PERMANENT | ImportError | ValueError
            )  # rights, a package, the address
            kind = UserError if lasting else FailureError
            raise kind(
                f"{problem}; correct it, or remove it to start without its checkpoints", code="copies"
            ) from None

    def checkpoints(self) -> list[str]:
        """Return the names of the complete checkpoints, the newest first."""
        with self._explain_errors():
            files = self._store.list_files("")
        matches = (re.fullmatch(rf"(step-\d+)/{COMPLETE}", name) for name in files)
        return sorted((m[1] for m in matches if m), key=lambda name: int(name[5:]), reverse=True)

    def fetch_records(self, run_dir: Path) -> None:
        """Write the records of the run to `run_dir`, its configuration last."""
        for name in (*RECORDS, *self.list_validation(), CONFIG):
            self.fetch_record(name, run_dir)

    def list_validation(self) -> list[str]:
        """Return the names of the records on validation sets."""
        with self._explain_errors():
            return [n for n in self._store.list_files(VALIDATION) if ".." not in n.split("/")]

    def read_record(self, name: str) -> bytes | None:
        """Return the content of a record, or None if there is none."""
        with self._explain_errors():
            return self._store.read(name)

    def fetch_record(self, name: str, directory: Path) -> bool:
        """Write a record below `directory`, and return whether there is one."""
        content = self.read_record(name)
        if content is None:
            return False
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        with part_file(directory / name) as sink:
            sink.write(content)
        return True

    def fetch(self, name: str, directory: Path, files: list[str]) -> None:
        """Write `files` of the checkpoint `name` below `directory`. Files that are missing are left out."""

        def fetch_file(file: str) -> None:
            path = directory / file
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                with path.open("wb") as sink:
                    self._store.download(f"{name}/{file}", sink)
            except FileNotFoundError:
                path.unlink(missing_ok=True)

        with self._explain_errors(), ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(fetch_file, files))


def fetch_records(config: RunConfig, identity: Identity) -> None:
    """Compare the run in `train.copy_to` with the recipe. Fetch its records if the run directory is new.

    Raises UserError for another run, and for a run directory that is older than its copy. A store that cannot
    be read is only reported if the run directory has checkpoints.
    """
    run_dir = config.output_dir
    target = config.train.copy_to
    if target is None:
        return
    is_new = not (run_dir / CONFIG).is_file() and not checkpoints(run_dir)
    try:
        copy = RunCopy(target)
        with tempfile.TemporaryDirectory() as temporary:
            if not copy.fetch_record(CONFIG, Path(temporary)) or not (names := copy.checkpoints()):
                return
            newest = step_of(Path(names[0]))
            check_config_file(target, Path(temporary) / CONFIG, newest, config, identity)
        step = max(map(step_of, checkpoints(run_dir)), default=newest)
        if step < newest:  # the run continued on another host
            problem = f"{run_dir} ends at step {step}, but train.copy_to={target} at step {newest}"
            cure = "Move the directory away to continue from the copy, or set another train.copy_to"
            raise UserError(f"{problem}. {cure}.", code="older-than-copy")
    except FailureError as error:
        if not checkpoints(run_dir):
            raise
        log.warning("%s", error)
        return
    if is_new:
        copy.fetch_records(run_dir)
        log.info("%s is restored from its copy in train.copy_to=%s", run_dir, target)
