"""Copies of a run in `train.copy_to`, a directory or any store of fsspec: made beside training, resumed from.

A copy has the names of a run directory: checkpoints, config.yaml, and the records that reports read. One rank
of every host copies a part of each checkpoint's files. Which parts are there is said by UPLOADING-i-of-n, one
for each host; whoever finds that the last is there writes COMPLETE. Hosts talk through the store alone.

What is left to copy is read from the two directories: checkpoints whose COMPLETE the copy lacks. So a launch
goes on where an earlier one was interrupted, and no upload, however slow, holds up a save.

A run directory that is not there, as on another cluster, is fetched: its records before anything is compared,
the newest checkpoint that is whole, a part by each rank, before it is loaded.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import re
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec

from emo.common.errors import PERMANENT, FailureError, UserError, one_line
from emo.common.io.files import part_file

from ..config import RunConfig
from ..control.run_dir import (
    BAD_BATCHES,
    COMPLETE,
    CONFIG,
    LAUNCHES,
    METRICS,
    SAMPLES,
    VALIDATION,
    checkpoints,
    is_complete,
    step_of,
)
from .identity import Identity, compare_claimed

log = logging.getLogger(__name__)

RECORDS = (CONFIG, METRICS, LAUNCHES, SAMPLES, BAD_BATCHES)  # and the files of VALIDATION
STALL = 600.0  # seconds without a piece after which the end of a run no longer waits
LOOK = 2.0  # seconds between looks at what other hosts have done
PIECE = 16 << 20  # bytes
AT_ONCE = 8  # files
WHOLE = b"\nwhole"  # behind what COMPLETE will say, in the marker of a part that is there


def uploading(part: int, parts: int) -> str:
    """Return the name of the marker of a part."""
    return f"UPLOADING-{part}-of-{parts}"


class Uploads:
    """A thread that copies a part of each checkpoint of a run. The first part has the records.

    The host of the first part chooses: it begins the oldest, waits until all parts of it are there, and goes
    on to the next. The others copy what it has begun.
    """

    def __init__(self, run_dir: Path, target: str, part: int = 0, parts: int = 1) -> None:
        self.run_dir, self.target, self.part, self.parts = run_dir, target, part, parts
        self.current: Path | None = None  # is being copied, and must not be pruned
        self._copied: set[str] = set()  # or tried since the last `wake`
        self._failed: set[str] = set()
        self._thread = ThreadPoolExecutor(1, "upload")
        self.wake()  # for what an earlier launch has left

    def wake(self) -> None:
        """Let the thread look for checkpoints that have become complete."""
        self._move()
        self._last = self._thread.submit(self._copy_new)

    def goes_on(self) -> bool:
        """Return whether something is being copied and moves."""
        copying = self.current is not None or self.part == 0
        return copying and not self._last.done() and time.monotonic() - self._moved < STALL

    def unfinished(self) -> list[str]:
        """Return the names of complete checkpoints that the target has not whole."""
        names = [directory.name for directory in checkpoints(self.run_dir)]
        with contextlib.suppress(Exception):  # of whatever store it is
            return self._thread.submit(self._missing, names).result(timeout=60)
        return names

    def _missing(self, names: list[str]) -> list[str]:
        store = Store(self.target)
        return [name for name in names if store.content(f"{name}/{COMPLETE}") is None]

    def _copy_new(self) -> None:
        began = time.monotonic()
        self._copied -= self._failed
        self._failed.clear()
        while True:
            left = [d for d in checkpoints(self.run_dir) if d.name not in self._copied]
            directory = next(filter(self._begun, left), None)
            self.current = directory
            if directory is not None:
                self._move()
                self._copied.add(directory.name)
                self._copy(directory)
            elif left and time.monotonic() - began < STALL:
                time.sleep(LOOK)
            else:
                return

    def _begun(self, directory: Path) -> bool:
        """Return whether it is this checkpoint's turn."""
        if self.part == 0:
            return True
        with contextlib.suppress(Exception):  # of whatever store it is; it is looked at again
            marker = (directory / COMPLETE).read_bytes()
            state = Store(self.target).content(f"{directory.name}/{uploading(0, self.parts)}")
            return state in (marker, marker + WHOLE)
        return False

    def _copy(self, directory: Path) -> None:
        try:
            if self.part == 0:
                copy_records(self.run_dir, self.target)
            copy_checkpoint(directory, self.target, self._move, self.part, self.parts)
            if self.part == 0:
                self._wait_for_others(directory)
        except Exception as error:  # of whatever store it is; the next `wake` tries again
            why = one_line(error, 200)
            if not is_complete(directory):
                why = "it was removed before its turn came: copies are slower than saves"
            log.warning("%s was not copied to train.copy_to=%s: %s", directory.name, self.target, why)
            self._failed.add(directory.name)

    def _wait_for_others(self, directory: Path) -> None:
        store, began = Store(self.target), time.monotonic()
        while store.content(f"{directory.name}/{COMPLETE}") is None:
            if time.monotonic() - began > STALL:
                raise OSError("other hosts have not copied their parts")
            time.sleep(LOOK)

    def _move(self) -> None:
        self._moved = time.monotonic()


def copy_records(run_dir: Path, target: str) -> None:
    """Copy what reports read of a run to `target`, whole lines of it."""
    system, root = fsspec.core.url_to_fs(target)
    paths = [run_dir / name for name in RECORDS]
    for path in filter(Path.is_file, (*paths, *(run_dir / VALIDATION).rglob("*"))):
        name, content = path.relative_to(run_dir).as_posix(), path.read_bytes()
        if path.suffix == ".jsonl":  # the last line may be under way
            content = content[: content.rfind(b"\n") + 1]
        system.makedirs(f"{root}/{name}".rpartition("/")[0], exist_ok=True)
        system.pipe_file(f"{root}/{name}", content)


def copy_checkpoint(
    directory: Path, target: str, moved: Callable[[], None], part: int = 0, parts: int = 1
) -> None:
    """Copy one of the `parts` of a complete checkpoint into `target`, calling `moved` after every piece.

    Files that an interrupted copy of the same part has left whole stay. Whoever copies the last part
    completes the copy. Raises OSError for a file that is no longer what COMPLETE says.
    """
    system, root = fsspec.core.url_to_fs(f"{target}/{directory.name}")
    system.invalidate_cache()
    marker = (directory / COMPLETE).read_bytes()
    listed = json.loads(marker)["files"]
    names = sorted(listed, key=lambda name: (-listed[name]["size"], name))[part::parts]  # alike in size
    complete, markers = f"{root}/{COMPLETE}", [f"{root}/{uploading(i, parts)}" for i in range(parts)]
    whole = marker + WHOLE

    def content(path: str) -> bytes | None:
        return system.cat_file(path) if system.exists(path) else None

    def copy(name: str) -> None:
        path = f"{root}/{name}"
        if resumes and system.exists(path) and system.size(path) == listed[name]["size"]:
            return
        system.makedirs(path.rpartition("/")[0], exist_ok=True)
        digest = hashlib.sha256()
        with (directory / name).open("rb") as source, system.open(path, "wb") as sink:
            while piece := source.read(PIECE):
                sink.write(piece)
                digest.update(piece)
                moved()
        if digest.hexdigest() != listed[name]["sha256"]:
            system.rm_file(path)  # it has the right size, which the next try would believe
            raise OSError(f"{name} has another content than {COMPLETE} says")

    state = content(complete)
    if state == marker:
        return
    if state is not None:  # of another checkpoint of this name
        with contextlib.suppress(FileNotFoundError):
            system.rm_file(complete)
    resumes = content(markers[part]) in (marker, whole)
    if not resumes:
        system.makedirs(root, exist_ok=True)
        system.pipe_file(markers[part], marker)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(copy, names))
    system.pipe_file(markers[part], whole)
    system.invalidate_cache()
    if all(content(path) == whole for path in markers):
        system.pipe_file(complete, marker)
        for path in system.glob(f"{root}/UPLOADING-*"):
            with contextlib.suppress(FileNotFoundError):  # of another host, which found the same
                system.rm_file(path)


class Store:
    """The copy of a run, to be read."""

    def __init__(self, target: str) -> None:
        """Raises FailureError where the store cannot be reached."""
        self.target = target
        with self._reached():
            self.system, self.root = fsspec.core.url_to_fs(target)

    @contextlib.contextmanager
    def _reached(self) -> Any:
        try:
            yield
        except Exception as error:  # of whatever store it is
            problem = f"train.copy_to={self.target} cannot be read ({one_line(error, 200)})"
            lasting = isinstance(
                error, PERMANENT | ImportError | ValueError
            )  # rights, a package, the address
            kind = UserError if lasting else FailureError
            raise kind(f"{problem}; correct it, or leave it out to begin without its checkpoints") from None

    def checkpoints(self) -> list[str]:
        """Return the names of the complete checkpoints, the newest first."""
        with self._reached():
            paths = self.system.glob(f"{self.root}/step-*/{COMPLETE}")
        names = [path.split("/")[-2] for path in paths]
        numbered = [name for name in names if re.fullmatch(r"step-\d+", name)]
        return sorted(numbered, key=lambda name: int(name[5:]), reverse=True)

    def content(self, name: str) -> bytes | None:
        """Return the content of a file; None where it is not there."""
        with self._reached():
            self.system.invalidate_cache()
            path = f"{self.root}/{name}"
            return self.system.cat_file(path) if self.system.exists(path) else None

    def fetch_records(self, run_dir: Path) -> None:
        """Write the records of the run to `run_dir`, its configuration last."""
        with self._reached():
            names = [name for name in RECORDS if name != CONFIG]
            paths = self.system.find(f"{self.root}/{VALIDATION}")
            names += [path[path.rindex(f"/{VALIDATION}/") + 1 :] for path in paths]
            inside = [name for name in names if ".." not in name.split("/")]
        for name in (*inside, CONFIG):
            self.fetch_record(name, run_dir)

    def fetch_record(self, name: str, directory: Path) -> bool:
        """Write one of the records below `directory`; return whether there is one."""
        content = self.content(name)
        if content is None:
            return False
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        with part_file(directory / name) as sink:
            sink.write(content)
        return True

    def fetch(self, name: str, directory: Path, files: list[str]) -> None:
        """Write `files` of the checkpoint `name` below `directory`."""

        def copy(file: str) -> None:
            (directory / file).parent.mkdir(parents=True, exist_ok=True)
            with (
                contextlib.suppress(FileNotFoundError),  # which makes the checkpoint one that is not whole
                self.system.open(f"{self.root}/{name}/{file}", "rb") as source,
                (directory / file).open("wb") as sink,
            ):
                while piece := source.read(PIECE):
                    sink.write(piece)

        with self._reached(), ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(copy, files))


def restore(config: RunConfig, identity: Identity) -> None:
    """Compare the run in `train.copy_to` with what is to run; fetch its records where they are there alone.

    Raises UserError for another run. A store that cannot be read is passed over where it is not needed.
    """
    run_dir, target = config.output_dir, config.train.copy_to
    if target is None:
        return
    begun = (run_dir / CONFIG).is_file() or bool(checkpoints(run_dir))
    try:
        store = Store(target)
        with tempfile.TemporaryDirectory() as claimed:
            if not store.fetch_record(CONFIG, Path(claimed)) or not (names := store.checkpoints()):
                return
            compare_claimed(target, Path(claimed) / CONFIG, step_of(Path(names[0])), config, identity)
    except FailureError as error:
        if not checkpoints(run_dir):
            raise
        log.warning("%s", error)
        return
    if not begun:
        store.fetch_records(run_dir)
        log.info("%s is the run that is copied to train.copy_to=%s", run_dir, target)
