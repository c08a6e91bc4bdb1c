"""Results on disk: one key has one complete result or none, and any number of processes share the work.

    <root>/<key>/identity.json        the value whose digest is the key
    <root>/<key>/chunks/00003.json    records of a range of rows
    <root>/<key>/leases/NAME.000002   the process that computes NAME (the highest number counts)
    <root>/<key>/result.json          the result of all chunks, written last

A chunk is published by linking a finished temporary file to its final name. That fails when the name exists,
so the first of two computations counts. Every file is sealed with the digest of its content. A file that does
not match its seal was damaged and is computed again. All state is in these files, so a killed job can simply
run again. The file system must support atomic O_EXCL creation and links, as local file systems and NFS do.
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
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from emo.common.errors import UserError
from emo.common.io import untrusted
from emo.common.io.files import Hashes, write_once, write_text
from emo.common.io.lease import Lease, hold_if_free

log = logging.getLogger(__name__)
R = TypeVar("R", bound=Mapping[str, object])  # the record of a row

STORE = "store"  # next to models/ in a results directory
RESULT = "result.json"
POLL_SECONDS = 0.2  # between checks for chunks of other processes
STORED_BYTES = 256 << 20  # largest file. The demonstrations of a million rows take 80 MB.
LEASE_SECONDS = float(os.environ.get("EVAL_LEASE_SECONDS", "60"))  # a lease without a heartbeat expires


def cache_directory() -> Path:
    """Return the directory of embeddings and digests: $EVAL_CACHE, or the user's cache directory.

    If that directory cannot be written, return a temporary directory of this process.
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
        log.warning("cannot write the cache %s: %s. Set EVAL_CACHE to another directory.", name, reason)
    temporary = tempfile.TemporaryDirectory(prefix="emo-cache-")
    atexit.register(temporary.cleanup)
    return Path(temporary.name)


def digest_json(identity: Any) -> str:
    """Return the sha256 of a JSON value, independent of key order; 64 hex digits."""
    text = json.dumps(identity, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def dump(value: Any) -> str:
    """Return the JSON text in which a value is stored."""
    return json.dumps(value, ensure_ascii=False, sort_keys=True, indent=1) + "\n"


def seal_json(value: Any) -> str:
    """Return `value` as JSON text with its digest, which `unsealed` checks."""
    stored = json.loads(json.dumps(value))  # as a reader sees it: text keys, lists instead of tuples
    return dump({"digest": digest_json(stored), "value": stored})


def unsealed(path: Path) -> Any | None:
    """Return the value in a sealed file, or None when the file is absent, torn or changed."""
    sealed: Any = read_json_or_none(path)
    valid = isinstance(sealed, dict) and digest_json(sealed.get("value")) == sealed.get("digest")
    return sealed["value"] if valid else None


def read_json_or_none(path: Path) -> Any | None:
    """Return the JSON value in a file, or None when the file is absent, torn, not JSON or too large."""
    try:
        return untrusted.read_json(path, STORED_BYTES)
    except (FileNotFoundError, ValueError):
        return None


def read_row_records(out: Path, key: str, rows: int) -> list[dict[str, Any]]:
    """Return the records of a finished result under the results directory `out`, in row order.

    Raises UserError unless its files are undamaged and have `rows` records.
    """
    directory = out / STORE / key / "chunks"
    records = [record for path in sorted(directory.glob("*.json")) for record in unsealed(path) or ()]
    if len(records) != rows:
        raise UserError(
            f"{directory}: only {len(records)} of {rows} rows are undamaged. Run the evaluation again.",
            code="incomplete-results",
        )
    return records


def replace(path: Path, text: str) -> None:
    """Write a file that may change (views, caches) atomically. The last writer wins."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, text)


def describe_replacement(before: Any, after: Any, ignored: Sequence[str] = ()) -> str:
    """Return a phrase that names the facts in which a view differs from the one it replaces, or ""."""
    if not isinstance(before, dict) or not isinstance(after, dict):
        return ""
    names = [key for key in sorted(before.keys() | after.keys()) if key not in ignored]
    other = [key for key in names if before.get(key) != after.get(key)]
    return (
        f"replaces earlier results with other {', '.join(other)}. Set --name to keep both." if other else ""
    )


class Entry:
    """The files of one key. say: receives a line about each damaged file."""

    def __init__(
        self, root: Path, identity: Mapping[str, object], say: Callable[[str], None] = lambda text: None
    ) -> None:
        self.identity = identity
        self.key = digest_json(identity)[:32]
        self.path = root / self.key
        self._say = say
        self._chunks: dict[int, list[Any]] = {}  # that were read and are undamaged

    def result(self) -> Any | None:
        """Return the finished result, if there is one."""
        return self._read(self.path / RESULT)

    def finish(self, result: Mapping[str, object]) -> None:
        """Publish the result of the chunks. The chunks remain as the records of the rows."""
        replace(self.path / "identity.json", seal_json(self.identity))
        replace(self.path / RESULT, seal_json(result))

    def chunk(self, index: int, rows: range) -> list[Any] | None:
        """Return the records of a finished, undamaged chunk, one for each of `rows`, or None."""
        if index not in self._chunks:
            records = self._read(self.path / "chunks" / f"{index:05d}.json")
            if records is not None and [record["row"] for record in records] == list(rows):
                self._chunks[index] = records
        return self._chunks.get(index)

    def finish_chunk(self, index: int, rows: range, records: Sequence[Mapping[str, object]]) -> None:
        """Publish a chunk unless it exists. The first one counts, because machines round differently."""
        path = self.path / "chunks" / f"{index:05d}.json"
        text = seal_json(records)
        path.parent.mkdir(parents=True, exist_ok=True)
        if not write_once(path, text) and self.chunk(index, rows) is None:
            replace(path, text)  # the existing file is damaged or has other rows

    def is_complete(self, rows: int, chunk: int) -> bool:
        """Return whether all chunks of `rows` rows are done."""
        return all(self.chunk(i, part) is not None for i, part in enumerate(ranges(rows, chunk)))

    def _read(self, path: Path) -> Any | None:
        value = unsealed(path)
        if value is None and path.is_file():
            self._say(f"{path} is damaged. Computing it again.")
        return value


def complete(
    entry: Entry,
    rows: int,
    chunk: int,
    compute: Callable[[range], list[R]],
    advance: Callable[[int], Any] = lambda count: None,
) -> list[R]:
    """Return the records of all rows of an entry. Compute the chunks that no other process is computing.

    Args:
        entry: Where chunks are stored.
        rows: Number of rows.
        chunk: Rows per chunk.
        compute: Returns the records of a range of rows, each with its number as `row`.
        advance: Receives the number of rows that are done without `compute`.
    """
    parts = dict(enumerate(ranges(rows, chunk)))
    advance(sum(len(part) for i, part in parts.items() if entry.chunk(i, part) is not None))
    while pending := [i for i, part in parts.items() if entry.chunk(i, part) is None]:
        worked = False
        for i in pending:
            with hold_if_free(lease(entry.path / "leases", f"chunk-{i:05d}")) as acquired:
                if entry.chunk(i, parts[i]) is not None:  # finished since the last check
                    advance(len(parts[i]))
                elif acquired:
                    entry.finish_chunk(i, parts[i], compute(parts[i]))
                    worked = True
        if not worked:
            time.sleep(POLL_SECONDS)
    return [record for i, part in parts.items() for record in entry.chunk(i, part) or ()]


def ranges(rows: int, chunk: int) -> list[range]:
    """Return the range of rows of every chunk."""
    return [range(i, min(i + chunk, rows)) for i in range(0, rows, chunk)]


def lease(directory: Path, name: str) -> Lease:
    """Return the lease on the work `name`, which expires LEASE_SECONDS after its holder's last heartbeat.

    A holder that was replaced but is still alive cannot overwrite published files.
    """
    return Lease(directory, name, LEASE_SECONDS)


def digest_files(root: Path, files: Iterable[Path]) -> str:
    """Return a digest of the names and contents of files. Only files that changed are read again."""
    hashes = Hashes(cache_directory() / "hashes.json")
    lines = [[path.relative_to(root).as_posix(), hashes.sha256(path)] for path in sorted(files)]
    hashes.save()
    return digest_json(lines)


def cached_digest(kind: str, key: str, compute: Callable[[], str]) -> str:
    """Return the digest that `compute` returns, from the cache if an earlier call stored it there."""
    path = cache_directory() / kind / key[:32]
    content = path.read_bytes().decode("ascii", "replace") if path.is_file() else ""
    if not re.fullmatch("[0-9a-f]{64}", content):
        content = compute()
        with contextlib.suppress(OSError):  # a full disk: the cache only saves time
            replace(path, content)
    return content
