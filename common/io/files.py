"""Atomic writes, directories owned by a tool, and cached file hashes."""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import hashlib
import json
import math
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

from ..errors import DiskFullError, UserError, one_line
from . import objects
from .lease import marked_process_ended, process_mark
from .lease_files import file_system_now

PART = ".part"  # suffix of files that are being written
ABANDONED = 86400.0  # seconds without a write until another machine's part file counts as abandoned
THREADS = 16  # requests to a store at the same time
TICK = 0.05  # seconds; longer than the time resolution of file systems


@contextlib.contextmanager
def part_file(path: Path, publish: Callable[[Path, Path], Any] | None = None) -> Iterator[IO[bytes]]:
    """Yield a hidden file next to `path` that replaces `path` if the block succeeds.

    The file's name identifies its process for `remove_abandoned`. Raises DiskFullError, and leaves no file
    behind, if the disk is full.

    publish: gives the complete file its name. Path.replace keeps it out of the store that `path` belongs to.
    """
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.{process_mark()}{PART}")
    if objects.in_store(path):
        path.parent.mkdir(parents=True, exist_ok=True)  # another host may have made the directory
    try:
        with full_disk(path), part.open("w+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            (publish or publish_file)(part, path)
    finally:
        part.unlink(missing_ok=True)


def publish_file(part: Path, path: Path) -> None:
    """Give a complete file its name, first in the object store that `path` belongs to, if any."""
    upload(part, path)
    part.replace(path)


def upload(file: Path, path: Path) -> None:
    """Write the content of a file to the object store that `path` belongs to, if any."""
    if objects.in_store(path):
        store, name = objects.locate(path)
        store.upload(name, file)


def upload_tree(path: Path) -> None:
    """Upload a file, or all files of a directory, to the object store that they belong to, if any."""
    for file in [path] if path.is_file() else list_files(path):
        upload(file, file)


@contextlib.contextmanager
def full_disk(path: Path) -> Iterator[None]:
    """Convert "no space left" errors of Python and libraries to a DiskFullError about `path`."""
    try:
        yield
    except Exception as error:
        code = getattr(error, "errno", None)
        if code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) or "No space left on device" in str(error):
            directory = path if path.is_dir() else path.parent
            raise DiskFullError(f"no space left while writing {path}; free space in {directory}") from None
        raise


def write_atomically(path: Path, write: Callable[[IO[bytes]], Any]) -> None:
    """Write a file with `write`, and replace `path` by it in one step."""
    with part_file(path) as file:
        write(file)


def write_text(path: Path, text: str) -> None:
    """Write text to `path` atomically."""
    write_atomically(path, lambda sink: sink.write(text.encode()))


def reset_modes(directory: Path) -> None:
    """Give the files in a directory the default mode of new files.

    Some libraries write private temporary files and rename them.
    """
    probe = directory / f".mode{PART}"
    probe.touch()
    mode = stat.S_IMODE(probe.stat().st_mode)
    probe.unlink()
    for file in directory.iterdir():
        file.chmod(mode)


def replace_nonfinite(value: Any) -> Any:
    """Replace NaN and infinite numbers by None, because JSON has neither."""
    if isinstance(value, dict):
        return {key: replace_nonfinite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [replace_nonfinite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_once(path: Path, text: str) -> bool:
    """Write text to `path` unless it exists. Of several writers exactly one gets True."""
    if exists(path):
        return False
    try:
        with part_file(path, _publish_once) as file:
            file.write(text.encode())
    except FileExistsError:
        return False
    return True


def _publish_once(part: Path, path: Path) -> None:
    if objects.in_store(path):
        store, name = objects.locate(path)
        store.create(name, part.read_bytes())
        part.replace(path)
    else:
        os.link(part, path)


def exists(path: Path) -> bool:
    """Return whether a file exists, in its store if it belongs to one."""
    return path.name in objects.list_objects(path.parent, 1) if objects.in_store(path) else path.is_file()


def remove_abandoned(directory: Path) -> int:
    """Delete the part files of dead processes and old ones of other machines, and return their number."""
    removed = 0
    for part in directory.glob(f".*{PART}"):
        with contextlib.suppress(OSError):
            ended = marked_process_ended(part.name.removesuffix(PART).rpartition(".")[2])
            if ended is None:
                ended = file_system_now(directory) - part.stat().st_mtime > ABANDONED
            if ended:
                part.unlink()
                removed += 1
    return removed


def claim_directory(directory: Path, marker: str, note: str, setting: str) -> None:
    """Claim `directory` for a tool, which may then clear it.

    A new or empty directory gets a `marker` file. Raises UserError for a directory that cannot be written, or
    that has files but no marker.

    Args:
        directory: The directory, which is created if necessary.
        marker: Name of the marker file.
        note: Content of the marker file.
        setting: The setting that named the directory, for messages.
    """
    reason = ""
    stored = objects.in_store(directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if not os.access(directory, os.W_OK):
            reason = "cannot be written"
        elif not exists(directory / marker):
            other_marker = f".{marker}.*{PART}"  # another process is claiming the directory too
            listed = objects.list_objects(directory) if stored else [p.name for p in directory.iterdir()]
            names = sorted(name for name in listed if not fnmatch.fnmatchcase(name, other_marker))
            if not names:
                write_once(directory / marker, note)
            elif not exists(directory / marker):  # not claimed meanwhile
                reason = f"is not empty ({names[0]} exists) and has no {marker}"
    except DiskFullError:
        raise
    except OSError as error:
        reason = f"cannot be written: {error.strerror or one_line(error)}"
    if reason:
        cure = f"set another {setting}"
        if stored and reason.startswith("cannot"):
            keys = "check your keys and their rights"
            cure = keys if os.access(directory, os.W_OK) else "set EMO_MIRRORS to another directory"
        raise UserError(f"{setting}={objects.shown(directory)} {reason}; {cure}", code="not-claimed")


def find_foreign_files(directory: Path, patterns: Sequence[str]) -> Iterator[Path]:
    """Yield files and links below `directory` that match none of the patterns, such as `train/*.arrow`."""
    return (path for path, matches in _match_files(directory, patterns) if not matches)


def remove_matching(directory: Path, patterns: Sequence[str]) -> None:
    """Delete files that match one of the patterns, and directories that become empty."""
    paths = [path for path, matches in _match_files(directory, patterns) if matches]
    for path in paths:
        path.unlink(missing_ok=True)
    if objects.in_store(directory):
        store, _ = objects.locate(directory)
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(store.delete, [objects.locate(path)[1] for path in paths]))
    parents = {parent for path in paths for parent in path.parents if directory in parent.parents}
    for parent in sorted(parents, reverse=True):
        with contextlib.suppress(OSError):
            parent.rmdir()


def _match_files(directory: Path, patterns: Sequence[str]) -> Iterator[tuple[Path, bool]]:
    """Yield all files and links below a directory, also of its store, and whether each matches a pattern.

    Links are not followed.
    """
    paths = dict.fromkeys(list_files(directory))
    if objects.in_store(directory):
        paths |= dict.fromkeys(directory / name for name in objects.list_objects(directory))
    return ((path, match_name(path.relative_to(directory).as_posix(), patterns)) for path in paths)


def list_files(directory: Path) -> Iterator[Path]:
    """Yield all files and links below a directory of this machine. Links are not followed."""
    for folder, names, files in os.walk(directory):
        links = [name for name in names if (Path(folder) / name).is_symlink()]
        yield from (Path(folder) / name for name in sorted(files + links))


def match_name(name: str, patterns: Sequence[str]) -> bool:
    """Return whether a relative name matches a pattern. A star does not match a slash."""
    parts = name.split("/")
    same = (pattern for each in patterns if len(pattern := each.split("/")) == len(parts))
    return any(all(map(fnmatch.fnmatchcase, parts, pattern)) for pattern in same)


Signature = tuple[int, ...]  # differs whenever a file's content may have changed


def signature(path: Path) -> Signature:
    """Return size, times and inode of a file. Programs cannot set ctime, so every edit changes it."""
    status = path.stat()
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


def sha256(path: Path) -> str:
    """Hash a file's content. Returns 64 hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Hashes:
    """Hashes of files, cached in the file `cache` until a file's signature changes.

    A missing or damaged cache counts as empty.
    """

    def __init__(self, cache: Path) -> None:
        self.cache = cache
        self._known: dict[str, tuple[Signature, str]] = {}
        self._new: dict[str, tuple[Signature, str]] = {}
        with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
            tree = json.loads(cache.read_text(encoding="utf-8"))
            self._known = {name: (tuple(times), str(digest)) for name, (times, digest) in tree.items()}

    def sha256(self, path: Path) -> str:
        """Return the hash of a file, from the cache if its signature is unchanged."""
        current = signature(path)
        name = str(path.absolute())
        entry = self._new.get(name) or self._known.get(name)
        if entry is not None and entry[0] == current:
            return entry[1]
        digest = sha256(path)
        self.remember(path, current, digest)
        return digest

    def remember(self, path: Path, times: Signature, digest: str) -> None:
        """Record the hash that a file had at the signature `times`."""
        self._new[str(path.absolute())] = times, digest

    def new(self) -> dict[str, tuple[Signature, str]]:
        """Return the hashes computed since the cache was read."""
        return dict(self._new)

    def save(self, others: Iterable[dict[str, tuple[Signature, str]]] = ()) -> None:
        """Write new hashes, of this object and `others`, to the cache if possible.

        Files that changed meanwhile, or so recently that their times could miss a change, are left out.
        """
        computed = {name: entry for entries in (self._new, *others) for name, entry in entries.items()}
        if not computed:
            return
        time.sleep(TICK)
        now = time.time_ns() - int(TICK * 1e9)
        for name, (current, digest) in computed.items():
            with contextlib.suppress(OSError):
                if signature(Path(name)) == current and max(current[1:3]) <= now:
                    self._known[name] = current, digest
        with contextlib.suppress(OSError), part_file(self.cache, Path.replace) as file:
            file.write((json.dumps(self._known, indent=1, sort_keys=True) + "\n").encode())
