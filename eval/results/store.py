"""Results on disk: one key, one result, whole or absent; work shared by any number of processes.

    <root>/<key>/identity.json        what the key is a digest of
    <root>/<key>/chunks/00003.json    records of a range of rows
    <root>/<key>/leases/NAME.000002   who is computing NAME; the highest number counts
    <root>/<key>/result.json          written last: what the chunks come to

A chunk is published by linking a finished temporary file under its final name, which fails when the name
exists: of two computations the first counts. What is computed is sealed with the digest of its content; a
file that does not match its seal was damaged from outside and is computed again. No state lives outside the
files, so a job killed anywhere is simply run again. The file system must have atomic O_EXCL
creation and links (local ones and NFS do).
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import json
import logging
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from emo.common.errors import UserError
from emo.common.io import untrusted
from emo.common.io.files import Hashes, write_once, write_text
from emo.common.io.lease import Lease, hold_if_free

log = logging.getLogger(__name__)

STORE = "store"  # beside models/ in a results directory
RESULT = "result.json"
POLL_SECONDS = 0.2  # between looks for chunks that other processes hold
STORED_BYTES = 256 << 20  # of a file at most: the demonstrations of a million rows take 80 MB
LEASE_SECONDS = float(os.environ.get("EVAL_LEASE_SECONDS", "60"))  # without a heartbeat a lease ends


def cache_directory() -> Path:
    """Return the directory of embeddings and digests: $EVAL_CACHE, else the user's cache directory.

    It is a temporary directory of this process where that one cannot be written.
    """
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return _writable(os.environ.get("EVAL_CACHE") or f"{home}/emo-pipeline")


@functools.cache
def _writable(name: str) -> Path:
    try:
        directory = Path(name).expanduser()  # RuntimeError: this user has no home directory
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            return directory
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or error
        log.warning("cannot write the cache %s: %s; set EVAL_CACHE to keep it elsewhere", name, reason)
    temporary = tempfile.TemporaryDirectory(prefix="emo-cache-")
    atexit.register(temporary.cleanup)
    return Path(temporary.name)


def digest(identity: Any) -> str:
    """Return the sha256 of a JSON value, independent of key order; 64 hex digits."""
    text = json.dumps(identity, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def dump(value: Any) -> str:
    """Return the JSON form in which a value is stored."""
    return json.dumps(value, ensure_ascii=False, sort_keys=True, indent=1) + "\n"


def seal(value: Any) -> str:
    """Return `value` as text, with the digest that `unsealed` checks."""
    stored = json.loads(json.dumps(value))  # as a reader will see it: keys are text, tuples are lists
    return dump({"digest": digest(stored), "value": stored})


def unsealed(path: Path) -> Any | None:
    """Return the value in a sealed file; None when it is absent, torn or changed."""
    sealed: Any = read_json(path)
    whole = isinstance(sealed, dict) and digest(sealed.get("value")) == sealed.get("digest")
    return sealed["value"] if whole else None


def read_json(path: Path) -> Any | None:
    """Return the JSON value in a file; None when it is absent, torn, not JSON or too large."""
    try:
        return untrusted.read_json(path, STORED_BYTES)
    except (FileNotFoundError, ValueError):
        return None


def read_records(out: Path, key: str, rows: int) -> list[dict[str, Any]]:
    """Return the per-row records of a finished result under the results directory `out`, in row order.

    UserError unless its files are whole and hold as many as `rows`.
    """
    directory = out / STORE / key / "chunks"
    records = [record for path in sorted(directory.glob("*.json")) for record in unsealed(path) or ()]
    if len(records) != rows:
        raise UserError(
            f"{directory}: {len(records)} of {rows} rows are there undamaged; run the evaluation again"
        )
    return records


def replace(path: Path, text: str) -> None:
    """Write a file that may change (views, caches): whole, the last writer wins."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, text)


def said_of(before: Any, after: Any, ignored: Sequence[str] = ()) -> str:
    """Return a sentence on what a view showed otherwise before; empty when nothing was, or there was none."""
    if not isinstance(before, dict) or not isinstance(after, dict):
        return ""
    names = [key for key in sorted(before.keys() | after.keys()) if key not in ignored]
    other = [key for key in names if before.get(key) != after.get(key)]
    return f"replaces what was there with other {', '.join(other)}; --name keeps both" if other else ""


class Entry:
    """Everything under one key. say: gets a line about each damaged file."""

    def __init__(
        self, root: Path, identity: dict[str, Any], say: Callable[[str], None] = lambda text: None
    ) -> None:
        self.identity = identity
        self.key = digest(identity)[:32]
        self.path = root / self.key
        self._say = say
        self._chunks: dict[int, list[dict[str, Any]]] = {}  # those that have been read and are good

    def result(self) -> dict[str, Any] | None:
        """Return the finished result, if there is one."""
        return self._read(self.path / RESULT)

    def finish(self, result: dict[str, Any]) -> None:
        """Publish what the chunks come to, which stay as the per-row records."""
        replace(self.path / "identity.json", seal(self.identity))
        replace(self.path / RESULT, seal(result))

    def chunk(self, index: int, rows: range) -> list[dict[str, Any]] | None:
        """Return the records of a chunk, one for each of `rows`, if it is done and undamaged."""
        if index not in self._chunks:
            records = self._read(self.path / "chunks" / f"{index:05d}.json")
            if records is not None and [record["row"] for record in records] == list(rows):
                self._chunks[index] = records
        return self._chunks.get(index)

    def finish_chunk(self, index: int, rows: range, records: list[dict[str, Any]]) -> None:
        """Publish a chunk unless it is done: the first counts, as other machines round differently."""
        path, text = self.path / "chunks" / f"{index:05d}.json", seal(records)
        path.parent.mkdir(parents=True, exist_ok=True)
        if not write_once(path, text) and self.chunk(index, rows) is None:
            replace(path, text)  # what is there is damaged, or of other rows

    def is_whole(self, rows: int, chunk: int) -> bool:
        """Return whether all chunks of so many rows are done."""
        return all(self.chunk(i, part) is not None for i, part in enumerate(ranges(rows, chunk)))

    def _read(self, path: Path) -> Any | None:
        value = unsealed(path)
        if value is None and path.is_file():
            self._say(f"{path} is damaged: computing it again")
        return value


def complete(
    entry: Entry,
    rows: int,
    chunk: int,
    compute: Callable[[range], list[dict[str, Any]]],
    advance: Callable[[int], Any] = lambda count: None,
) -> list[dict[str, Any]]:
    """Return records of all `rows` under a key; chunks that no other process is computing are computed.

    compute: returns records of some rows, each with its number as `row`. advance: gets the number of rows
    that are done, those that are computed apart.
    """
    parts = dict(enumerate(ranges(rows, chunk)))
    advance(sum(len(part) for i, part in parts.items() if entry.chunk(i, part) is not None))
    while pending := [i for i, part in parts.items() if entry.chunk(i, part) is None]:
        worked = False
        for i in pending:
            with hold_if_free(lease(entry.path / "leases", f"chunk-{i:05d}")) as acquired:
                if entry.chunk(i, parts[i]) is not None:  # since the last look
                    advance(len(parts[i]))
                elif acquired:
                    entry.finish_chunk(i, parts[i], compute(parts[i]))
                    worked = True
        if not worked:
            time.sleep(POLL_SECONDS)
    return [record for i, part in parts.items() for record in entry.chunk(i, part) or ()]


def ranges(rows: int, chunk: int) -> list[range]:
    """Return the rows of every chunk."""
    return [range(i, min(i + chunk, rows)) for i in range(0, rows, chunk)]


def lease(directory: Path, name: str) -> Lease:
    """Return the right to do the work `name`; it ends LEASE_SECONDS after its holder's last sign of life.

    A holder that was superseded but is still alive can only publish what is already published.
    """
    return Lease(directory, name, LEASE_SECONDS)


def digest_files(root: Path, files: Iterable[Path]) -> str:
    """Return a digest of names and contents of files, which are read again only when they were touched."""
    hashes = Hashes(cache_directory() / "hashes.json")
    lines = [[path.relative_to(root).as_posix(), hashes.sha256(path)] for path in sorted(files)]
    hashes.save()
    return digest(lines)


def remembered(kind: str, key: str, compute: Callable[[], str]) -> str:
    """Return the digest that `compute` gives, from the cache where an earlier call has left it."""
    path = cache_directory() / kind / key[:32]
    content = path.read_bytes().decode("ascii", "replace") if path.is_file() else ""
    if not re.fullmatch("[0-9a-f]{64}", content):
        content = compute()
        with contextlib.suppress(OSError):  # a full disk; the cache only saves time
            replace(path, content)
    return content
