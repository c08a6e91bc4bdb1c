"""Files at addresses: the shards of the same files on disk, whatever the server can do."""

from __future__ import annotations

import gzip
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet
import pytest
import zstandard

from emo.common.errors import FailureError, UserError
from emo.data_prep.verify import verify
from tests.helpers.corpus import data_config, file_bytes, run, texts, train_set, write_jsonl

ROWS = [{"text": text} for text in texts(400, seed=5)]


class Quiet(SimpleHTTPRequestHandler):
    """A web server of the plainest kind: no lists that fsspec reads, no beginning in the middle."""

    broken = parts = False  # fails; sends parts of files, as most servers do

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        if Quiet.broken:
            self.send_error(503)
        elif self.path.startswith("/private"):
            self.send_error(403)
        elif Quiet.parts and "Range" in self.headers:
            content = (Path(self.directory) / self.path[1:]).read_bytes()
            first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(content)}")
            self.end_headers()
            self.wfile.write(content[first : last + 1])
        else:
            super().do_GET()


@pytest.fixture
def web(tmp_path: Path) -> Iterator[str]:
    (tmp_path / "web").mkdir()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path / "web")))
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    Quiet.broken = Quiet.parts = False
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture
def memory() -> Iterator[Any]:
    system = fsspec.filesystem("memory")
    yield system
    system.rm("/", recursive=True)
    system.store.clear()
    system.pseudo_dirs[:] = [""]


def forms(place: Path) -> list[str]:
    """The same rows in several forms of file; their names."""
    plain = write_jsonl(place / "a.jsonl", ROWS).read_bytes()
    (place / "a.jsonl.gz").write_bytes(gzip.compress(plain))
    (place / "a.jsonl.zst").write_bytes(zstandard.compress(plain))
    pyarrow.parquet.write_table(pa.Table.from_pylist(ROWS), place / "a.parquet", row_group_size=400)
    (place / "a.csv").write_text("text\n" + "".join(f'"{row["text"]}"\n' for row in ROWS))
    return ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet", "a.csv"]


def prepared(tmp_path: Path, name: str, files: str, jobs: int = 1) -> Any:
    config = data_config(tmp_path, dir=str(tmp_path / name), shards=3, sources=[{"files": files}])
    for job in range(jobs):
        run(config, shard=(job, jobs))
    return config


def test_the_shards_are_those_of_the_files_on_disk(tmp_path: Path, web: str, memory: Any) -> None:
    """From a server that cannot begin in the middle, from memory by patterns, and by file://."""
    names = forms(tmp_path / "web")
    expected = train_set(prepared(tmp_path, "local", "web/a.jsonl")).fingerprint
    memory.put(str(tmp_path / "web"), "/bucket", recursive=True)
    for i, name in enumerate(names):
        Quiet.parts = name.endswith("parquet")
        config = prepared(tmp_path, f"web-{i}", f"{web}/{name}", jobs=3 if i == 1 else 1)
        assert train_set(config).fingerprint == expected, name
        assert "nothing to do" in run(config)[0] and verify(config.dir)[1] == []
    for i, pattern in enumerate(
        ("memory://bucket/a.pa*", "memory://buck?t/a.jsonl.[gh]z", f"file://{tmp_path}/web/a.csv")
    ):
        config = prepared(tmp_path, f"memory-{i}", pattern)
        assert train_set(config).fingerprint == expected, pattern
        (source,) = train_set(config).manifest.sources
        assert source["name"].startswith(("memory:///bucket/a.", "file:///")) and len(source["sha256"]) == 64


def test_a_file_that_changes_is_noticed(tmp_path: Path, memory: Any) -> None:
    """By its size before a job, and by its content whatever its size."""
    memory.pipe("/c/a.txt", "\n".join(texts(200)).encode())
    config = prepared(tmp_path, "out", "memory://c/a.txt")
    before = file_bytes(config.dir)
    memory.pipe("/c/a.txt", "\n".join(texts(201)).encode())
    with pytest.raises(UserError):
        run(config)
    memory.pipe("/c/a.txt", "\n".join(texts(200)).replace("river", "RIVER").encode())
    (config.dir / "train/shard-00001-of-00003.arrow").unlink()
    with pytest.raises(UserError):
        run(config)
    memory.pipe("/c/a.txt", "\n".join(texts(200)).encode())
    run(config)
    assert file_bytes(config.dir) == before


@pytest.mark.parametrize(
    "files",
    [
        *("s3://bucket/a.jsonl", "nothing://bucket/a.jsonl", "https://me:secret@example.org/a.jsonl"),
        *("memory://nowhere/*.jsonl", "memory://d", "WEB/none.jsonl", "WEB/private/a.jsonl", "WEB/a.parquet"),
    ],
)
def test_addresses_that_cannot_be_read_give_one_line(
    tmp_path: Path, web: str, memory: Any, files: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)  # as where they are not installed
    memory.pipe("/d/a.docx", b"x")
    if files == "WEB/a.parquet":
        pyarrow.parquet.write_table(pa.table({"text": texts(9000)}), tmp_path / "web/a.parquet")
    with pytest.raises(UserError) as caught:
        run(data_config(tmp_path, sources=[{"files": files.replace("WEB", web)}]))
    assert "\n" not in str(caught.value) and "secret" not in str(caught.value)
    assert not list(tmp_path.rglob("manifest.json"))


def test_a_server_that_fails_may_be_asked_again(tmp_path: Path, web: str) -> None:
    """A failure, which leaves nothing that is believed, not a mistake of the user's."""
    forms(tmp_path / "web")
    config = data_config(tmp_path, sources=[{"files": f"{web}/a.jsonl.gz"}])
    Quiet.broken = True
    with pytest.raises(FailureError):
        run(config)
    Quiet.broken = False
    run(config)
    assert train_set(config).manifest.documents == 400
