"""Files, addresses and data sets as sources: what is read of them, and that they stay what they were."""

from __future__ import annotations

import csv
import gzip
import json
import os
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet
import pyarrow.parquet as pq
import pytest
import zstandard

from emo.common.errors import FailureError, UserError
from emo.data_prep import inputs
from emo.data_prep.inputs import TableInput, TextInput
from emo.data_prep.rows import Rejected, parse
from emo.data_prep.sources import open_inputs
from emo.data_prep.tokenizer import load_tokenizer
from emo.data_prep.verify import verify
from tests.helpers.corpus import (
    alpaca_rows,
    data_config,
    file_bytes,
    prepared,
    run,
    segments,
    texts,
    tiny_tokenizer,
    train_set,
    write_jsonl,
)


def rows_of(tmp_path: Path, **source: Any) -> list[Any]:
    found = []
    for one in open_inputs(data_config(tmp_path, sources=[source])):
        found += [row for piece in one.pieces() for row in parse(piece.payload or b"", one.spec)]
    return found


def put(path: Path, lines: list[str]) -> Path:
    """Texts as a file of the kind that its name says."""
    content = "".join(json.dumps({"text": line}) + "\n" for line in lines)
    if path.suffix == ".parquet":
        pq.write_table(pa.table({"text": lines}), path)
    elif path.suffix == ".csv":
        path.write_text("text\n" + "".join(f'"{line}"\n' for line in lines), encoding="utf-8")
    elif path.suffix == ".json":
        path.write_text(json.dumps([{"text": line} for line in lines]), encoding="utf-8")
    else:
        data = content.encode() if ".jsonl" in path.name else "\n".join([*lines, ""]).encode()
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.txt", "a.csv", "a.json", "a.parquet"])
@pytest.mark.parametrize("moment", ["while it is hashed", "touched"])
def test_a_file_that_changes_as_it_is_read_is_refused(
    tmp_path: Path, name: str, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifest vouches for the bytes that were read, and for no others."""
    path = put(tmp_path / name, texts(60))
    real = inputs.file_identity

    def changing(file: Path) -> dict[str, Any]:
        if moment == "touched":
            os.utime(path)
        found = real(file)
        if moment == "while it is hashed":
            put(path, texts(70))
        return found

    config = data_config(tmp_path, sources=[{"files": name}])
    with monkeypatch.context() as patch:
        patch.setattr(inputs, "file_identity", changing)
        with pytest.raises(UserError) as error:
            run(config)
    assert error.value.code == "source-changed"
    assert not (config.dir / "train").exists()
    run(config)
    assert train_set(config).manifest.sources[0]["rows"] == (60 if moment == "touched" else 70)


def test_patterns_leave_hidden_files_out(tmp_path: Path) -> None:
    for name in ("a.txt", ".b.txt", ".ipynb_checkpoints/a-checkpoint.txt", "c/.d/e.txt", "c/f.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{name}\n", encoding="utf-8")
    assert rows_of(tmp_path, files="*.txt") == ["a.txt"]
    assert rows_of(tmp_path, files="**/*.txt") == ["a.txt", "c/f.txt"]
    assert rows_of(tmp_path, files="*/*.txt") == ["c/f.txt"]
    assert rows_of(tmp_path, files=".*.txt") == [".b.txt"]
    assert rows_of(tmp_path, files="c/.d/*.txt") == ["c/.d/e.txt"]
    assert rows_of(tmp_path, files=".b.txt") == [".b.txt"]


def test_old_line_ends_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\rtwo\rthree\r")
    for form in ("lines", "paragraphs", "auto"):
        with pytest.raises(UserError) as error:
            rows_of(tmp_path, files="a.txt", format=form)
        assert error.value.code == "line-ends"
    assert rows_of(tmp_path, files="a.txt", format="document") == ["one\rtwo\rthree"]
    (tmp_path / "a.txt").write_bytes(b"one line\r")
    assert rows_of(tmp_path, files="a.txt") == ["one line"]


@pytest.mark.parametrize("form", ["lines", "paragraphs", "document"])
def test_a_byte_order_mark_is_one_at_the_beginning_alone(tmp_path: Path, form: str) -> None:
    mark = "\ufeff"
    lines = [f"{mark}{i} {text}" for i, text in enumerate(texts(3000))]
    (tmp_path / "a.txt").write_text("\n\n".join(lines) + "\n", encoding="utf-8")
    found = rows_of(tmp_path, files="a.txt", format=form)
    expected = ["\n\n".join(lines)] if form == "document" else lines
    assert [row.rstrip("\n") for row in found] == [expected[0].removeprefix(mark), *expected[1:]]
    config = data_config(tmp_path, sources=[{"files": "a.txt", "format": form}], shards=1)
    run(config)  # what is read for a shard is what was scanned
    row = {"text": "a"}
    (tmp_path / "b.jsonl").write_text(
        "".join(mark + json.dumps(row) + "\n" for _ in range(3)), encoding="utf-8"
    )
    assert rows_of(tmp_path, files="b.jsonl") == ["a", "a", "a"]  # around JSON it is nobody's text


GOOD = "".join(f'"{text}",{i}\r\n' for i, text in enumerate(texts(9)))
TABS = GOOD.replace('",', '"\t')

# a.csv or the named file: content, rows that are rejected by reason
COUNTED: dict[str, tuple[str, bytes, dict[str, int]]] = {
    "plain": ("a.csv", f"text,n\r\n{GOOD}".encode(), {}),
    "byte order mark": ("a.csv", b"\xef\xbb\xbf" + f"text,n\n{GOOD}".encode(), {}),
    "quotes and line breaks": ("a.csv", f'text,n\n"a ""word"",\r\nand more",1\n{GOOD}'.encode(), {}),
    "tabs": ("a.tsv", f"text\tn\n{TABS}".encode(), {}),
    "empty cells": ("a.csv", f"text,\n,1\n{GOOD}".encode(), {"empty": 1}),
    "not UTF-8": ("a.csv", f"text,n\n{GOOD}caf\xe9 au lait,1\n".encode("latin-1"), {"bad_utf8": 1}),
    "gzip": ("a.csv.gz", gzip.compress(f"text,n\n{GOOD}".encode()), {}),
    "zstd": ("a.tsv.zst", zstandard.compress(f"text\tn\n{TABS}".encode()), {}),
}
ERRORS: dict[str, tuple[str, bytes]] = {
    "two columns of a name": ("a.csv", f"text,n,text\n{GOOD}".encode()),
    "too many fields": ("a.csv", f"text,n\n{GOOD}one,two,three\n".encode()),
    "UTF-16": ("a.csv", f"text,n\n{GOOD}".encode("utf-16")),
    "cut short": ("a.csv.gz", gzip.compress(f"text,n\n{GOOD * 99}".encode())[:-20]),
    "a quote that is not closed": ("a.csv", b'text,n\n"' + b"word, " * 800),
    "a quote that another closes": ("a.csv", f'text,n\n"an open, 1\n{GOOD}'.encode()),
    "text after a closing quote": ("a.csv", f'text,n\n{GOOD}"He" said,1\n'.encode()),
    "quotes as in a csv": ("a.tsv", b'text\tn\n"a ""word"" of it"\t1\n'),
    "one line and no end": ("a.csv", b"text,n\n" + b"word " * 900),
}


@pytest.mark.parametrize("case", COUNTED)
def test_tables_are_read(tmp_path: Path, case: str) -> None:
    name, content, counts = COUNTED[case]
    (tmp_path / name).write_bytes(content)
    (one,) = open_inputs(data_config(tmp_path, sources=[{"files": "a.*"}]))
    rows = [row for piece in one.pieces() for row in parse(piece.payload or [], one.spec)]
    assert Counter(row.reason for row in rows if isinstance(row, Rejected)) == counts
    assert len(rows) >= 9 + len(counts) and one.position() == one.size


@pytest.mark.parametrize("case", ERRORS)
def test_tables_that_are_none_give_one_line(tmp_path: Path, case: str) -> None:
    name, content = ERRORS[case]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as caught:
        run(data_config(tmp_path, sources=[{"files": "a.*"}], max_chars=1000))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


def test_a_table_gives_the_shards_of_the_same_rows_as_json(tmp_path: Path) -> None:
    """Line breaks, quotes and delimiters in cells included; more rows than a piece."""
    rows = [row | {"input": f'"{i}";\r\n,\t '} for i, row in enumerate(alpaca_rows(300))]
    write_jsonl(tmp_path / "a.jsonl", rows)
    with (tmp_path / "b.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    prints = set()
    for name in ("a.jsonl", "b.csv"):
        more = {"kind": "instruct", "sequence_len": 200, "sources": [{"files": name}]}
        config = prepared(tmp_path, dir=str(tmp_path / f"out {name}"), **more)
        prints.add(train_set(config).fingerprint)
    assert len(prints) == 1


@pytest.mark.parametrize("name", ["[set] one/a.jsonl", "a*.jsonl", "a[.jsonl"])
def test_names_with_signs_of_patterns_are_names(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    write_jsonl(path, texts(60))
    write_jsonl(tmp_path / "a1.jsonl", [{"text": "another file"}])
    config = prepared(tmp_path, sources=[{"files": str(path.relative_to(tmp_path))}])
    (source,) = train_set(config).manifest.sources
    assert source["name"] == str(path.relative_to(tmp_path)) and source["rows"] == 60


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl.gz", "a.parquet", "a.json"])
def test_rows_are_read_a_few_times_however_many_shards(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Formats that cannot be entered in the middle are gone through once for all shards of a split."""
    put(tmp_path / name, texts(6000, sentences=1))
    opened: list[int] = []
    for kind in (TextInput, TableInput):
        real = kind._open

        def counting(self: Any, start: int, real: Any = real) -> Any:
            opened.append(start)
            return real(self, start)

        monkeypatch.setattr(kind, "_open", counting)
    config = prepared(tmp_path, sources=[{"files": name}], shards=12, validation_fraction=0.02)
    assert len(opened) <= 4  # to compare words with texts, for each split, and once more
    assert not verify(config.dir)[1]


def test_rows_are_read_from_saved_data_sets(tmp_path: Path) -> None:
    """Directories of save_to_disk, of a data set and of several splits."""
    import datasets

    made = datasets.Dataset.from_dict({"text": texts(100)})
    made.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": made, "test": made.select([1])}).save_to_disk(str(tmp_path / "two"))
    (tmp_path / "a.txt").write_text("\n".join(texts(100)))
    prints = set()
    for i, source in enumerate(({"files": "a.txt"}, {"files": "one"}, {"files": "t*"}, {"hub": "one"})):
        if "hub" in source:
            source = {"hub": str(tmp_path / "one")}
        config = data_config(tmp_path, dir=str(tmp_path / f"out{i}"), sources=[source])
        said = run(config)
        assert not any("not pinned" in line for line in said)
        prints.add(train_set(config).fingerprint)
    assert len(prints) == 1
    with pytest.raises(UserError):
        run(data_config(tmp_path, dir=str(tmp_path / "x"), sources=[{"files": "two", "split": "dev"}]))


def test_json_on_one_line(tmp_path: Path) -> None:
    """An object that holds the rows, on one line, longer than a read; one row is still a row."""
    (tmp_path / "a.json").write_text(json.dumps({"version": "1", "data": [{"text": t} for t in texts(3000)]}))
    (tmp_path / "b.json").write_text(json.dumps({"text": "a single row"}))
    assert len(rows_of(tmp_path, files="a.json")) == 3000
    assert rows_of(tmp_path, files="b.json") == ["a single row"]


def test_a_tokenizer_that_draws_is_made_to_stop(tmp_path: Path) -> None:
    tree = json.loads((tiny_tokenizer() / "tokenizer.json").read_text())
    tree["model"]["dropout"] = 0.5
    (tmp_path / "drawing").mkdir()
    (tmp_path / "drawing" / "tokenizer.json").write_text(json.dumps(tree))
    text = "the same words have the same ids " * 5
    drawing, plain = load_tokenizer(tmp_path / "drawing"), load_tokenizer(tiny_tokenizer())
    assert {tuple(drawing(text).input_ids) for _ in range(5)} == {tuple(plain(text).input_ids)}


def test_tokens_are_used_as_they_are(tmp_path: Path) -> None:
    rows = [[1, 5, 6, 7], [1, 9, 1, 8], [1, 4, 4, 4]]
    write_jsonl(tmp_path / "t.jsonl", [{"ids": ids, "text": "not read"} for ids in rows])
    config = prepared(
        tmp_path, sequence_len=4, shards=1, sources=[{"files": "t.jsonl", "format": "tokens"}], dedup="none"
    )
    assert [ids for ids, _ in segments(train_set(config))] == rows


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


def by_jobs(tmp_path: Path, name: str, files: str, jobs: int = 1) -> Any:
    config = data_config(tmp_path, dir=str(tmp_path / name), shards=3, sources=[{"files": files}])
    for job in range(jobs):
        run(config, shard=(job, jobs))
    return config


def test_the_shards_are_those_of_the_files_on_disk(tmp_path: Path, web: str, memory: Any) -> None:
    """From a server that cannot begin in the middle, from memory by patterns, and by file://."""
    names = forms(tmp_path / "web")
    expected = train_set(by_jobs(tmp_path, "local", "web/a.jsonl")).fingerprint
    memory.put(str(tmp_path / "web"), "/bucket", recursive=True)
    for i, name in enumerate(names):
        Quiet.parts = name.endswith("parquet")
        config = by_jobs(tmp_path, f"web-{i}", f"{web}/{name}", jobs=3 if i == 1 else 1)
        assert train_set(config).fingerprint == expected, name
        assert "nothing to do" in run(config)[0] and verify(config.dir)[1] == []
    for i, pattern in enumerate(
        ("memory://bucket/a.pa*", "memory://buck?t/a.jsonl.[gh]z", f"file://{tmp_path}/web/a.csv")
    ):
        config = by_jobs(tmp_path, f"memory-{i}", pattern)
        assert train_set(config).fingerprint == expected, pattern
        (source,) = train_set(config).manifest.sources
        assert source["name"].startswith(("memory:///bucket/a.", "file:///")) and len(source["sha256"]) == 64


def test_a_file_that_changes_is_noticed(tmp_path: Path, memory: Any) -> None:
    """By its size before a job, and by its content whatever its size."""
    memory.pipe("/c/a.txt", "\n".join(texts(200)).encode())
    config = by_jobs(tmp_path, "out", "memory://c/a.txt")
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
