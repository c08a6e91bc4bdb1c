"""Files, addresses and data sets as sources: what is read, and what is refused or rejected by its reason."""

from __future__ import annotations

import gzip
import json
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import datasets
import fsspec
import pyarrow as pa
import pyarrow.parquet
import pyarrow.parquet as pq
import pytest
import zstandard

from emo.common.errors import FailureError, UserError
from emo.data_prep import inputs
from emo.data_prep.inputs import TableInput, TextInput, open_inputs
from emo.data_prep.plan import Plan
from emo.data_prep.rows import Rejected, RowSpec, parse
from emo.data_prep.verify import verify
from tests.helpers.corpus import (
    alpaca_rows,
    data_config,
    file_bytes,
    prepared,
    run,
    segments,
    texts,
    train_set,
    write_jsonl,
)

GOOD = [{"text": text} for text in texts(9)]


def lines(*rows: Any, ending: str = "\n") -> bytes:
    """Return rows as JSON lines; a row that is bytes is taken as it is."""
    encoded = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    return b"".join(row + ending.encode() for row in encoded)


def among(row: Any) -> bytes:
    """Return ten lines, the seventh of them the row."""
    return lines(*GOOD[:6], row, *GOOD[6:])


def talk(*turns: tuple[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


CELLS = "".join(f'"{text}",{i}\r\n' for i, text in enumerate(texts(9)))
TABS = CELLS.replace('",', '"\t')

ERRORS: dict[str, tuple[str, bytes]] = {
    "broken JSON on line 7 of 10": ("a.jsonl", among(b'{"text": "cut of')),
    "missing column": ("a.jsonl", among({"body": "x"})),
    "empty file": ("a.jsonl", b""),
    "truncated zstd": ("a.jsonl.zst", zstandard.compress(lines(*GOOD))[:-40]),
    "garbage named parquet": ("a.parquet", b"PAR1 no PAR1"),
    "broken JSON array": ("a.json", b'[{"text": "a"},\n{"text": '),
    "one array": ("a.jsonl", b'[{"text": "a"}]'),
    "nothing usable": ("a.jsonl", lines({"text": ""}, {"text": " "})),
    "two columns of a name": ("a.csv", f"text,n,text\n{CELLS}".encode()),
    "too many fields": ("a.csv", f"text,n\n{CELLS}one,two,three\n".encode()),
    "cut short": ("a.csv.gz", gzip.compress(f"text,n\n{CELLS * 99}".encode())[:-20]),
    "a quote that is not closed": ("a.csv", b'text,n\n"' + b"word, " * 80_000),
    "a quote that another closes": ("a.csv", f'text,n\n"an open, 1\n{CELLS}'.encode()),
}

TEXT, CHAT = (RowSpec(kind, "auto", True, None, "none", 200_000) for kind in ("text", "instruct"))
LINES = RowSpec("text", "lines", False, None, "none", 200_000)

# name: (content, spec, rows that are rejected by reason)
COUNTED: dict[str, tuple[bytes, RowSpec, dict[str, int]]] = {
    "bad UTF-8 in a line": (among(b'{"text": "\xff\xfe"}'), TEXT, {"bad_utf8": 1}),
    "half a surrogate pair": (among(b'{"text": "\\ud83d"}'), TEXT, {"bad_utf8": 1}),
    "NUL bytes": (among({"text": "a\x00b"}), TEXT, {"control_characters": 1}),
    "replacement characters": (among({"text": "caf\ufffd"}), TEXT, {"replacement_characters": 1}),
    "empty text": (among({"text": ""}), TEXT, {"empty": 1}),
    "no letters": (among({"text": "*** --- ***"}), TEXT, {"no_letters": 1}),
    "one sign repeated": (among({"text": "a" * 500}), TEXT, {"repetitive": 1}),
    "longer than max_chars": (among({"text": "many words " * 20_000}), TEXT, {"too_long": 1}),
    "byte order mark": (b"\xef\xbb\xbf" + lines(*GOOD), TEXT, {}),
    "not objects": (
        lines(*GOOD, b"{", [1], {"body": 1}, {"text": 2}),
        TEXT,
        {"broken_json": 1, "not_an_object": 1, "missing_column": 1, "wrong_type": 1},
    ),
    **{
        name: (lines(*alpaca_rows(9), row), CHAT, {reason: 1} if reason else {})
        for name, (row, reason) in {
            "assistant first": (talk(("assistant", "a"), ("user", "b")), "bad_roles"),
            "empty answer": (talk(("user", "a"), ("assistant", " ")), "empty_response"),
            "empty question": (talk(("user", ""), ("assistant", "a")), "empty_instruction"),
            "no role": ({"messages": [{"content": "a"}]}, "missing_column"),
            "no instruction": ({"ask": "a", "output": "b"}, "missing_column"),
        }.items()
    },
}


def fails(tmp_path: Path, **data: Any) -> str:
    """Return the one line of a preparation that fails, and leaves no data set that training would take."""
    with pytest.raises(UserError) as caught:
        run(data_config(tmp_path, **({"sources": [{"files": "a.*"}]} | data)))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500
    assert not list(tmp_path.rglob("manifest.json"))
    return str(caught.value)


@pytest.mark.parametrize("case", ERRORS)
def test_broken_files_give_one_line(tmp_path: Path, case: str) -> None:
    name, content = ERRORS[case]
    (tmp_path / name).write_bytes(content)
    fails(tmp_path)


def test_a_broken_line_is_named_by_its_number(tmp_path: Path) -> None:
    """Also behind many pieces of a packed file."""
    rows = [{"text": f"{i} " + "word " * 40} for i in range(5000)]
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b"\n" + lines(*rows, b"{broken")))
    assert "line 5002" in fails(tmp_path)


@pytest.mark.parametrize("case", COUNTED)
def test_useless_rows_are_counted(case: str) -> None:
    content, spec, counts = COUNTED[case]
    rows = list(parse(content, spec))
    assert Counter(row.reason for row in rows if isinstance(row, Rejected)) == counts
    assert len(rows) >= 9 + sum(counts.values())


def test_rejections_are_counted_in_the_plan(tmp_path: Path) -> None:
    """Also of lines that are too long to be held, in the middle and at the end."""
    long = {"text": "long line " * 500_000}
    (tmp_path / "a.jsonl").write_bytes(lines(*GOOD, long, b"{", *GOOD, long))
    config = prepared(tmp_path, sources=[{"files": "a.*"}], strict=False, max_chars=100_000)
    rejected = Plan.load(config.dir / "plan.parquet").summary["rejected"]
    assert rejected == {"broken_json": 1, "duplicate": 9, "too_long": 2}


SETTINGS: dict[str, dict[str, Any]] = {
    "two validations": {"validation": [{"files": "a.*"}], "validation_fraction": 0.1},
    "text rows for instruct": {"kind": "instruct"},
    "columns of another kind": {"sources": [{"files": "a.*", "columns": {"output": "text"}}]},
    "a directory": {"sources": [{"files": "."}]},
    "nothing of its own to validate on": {"validation": [{"files": "a.*"}]},
    "too small a share to validate on": {"validation_fraction": 1e-9},
    "a set that is a path": {"validation": {"../x": [{"files": "a.*"}]}},
    "hub without network": {"sources": [{"hub": "no-such/data-set"}]},
}


@pytest.mark.parametrize("case", SETTINGS)
def test_settings_that_cannot_work_give_one_line(tmp_path: Path, case: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(*GOOD))
    fails(tmp_path, **SETTINGS[case])


def test_files_that_come_and_go_between_jobs(tmp_path: Path) -> None:
    for name in ("b.jsonl", "c.jsonl"):
        (tmp_path / name).write_bytes(lines(*({"text": f"{name} {text}"} for text in texts(60))))
    config = data_config(tmp_path, sources=[{"files": "*.jsonl"}])
    run(config, shard=(0, 2))
    for before, after, code in (("a", "a.jsonl", "source-new"), ("b.jsonl", "b", "source-gone")):
        (tmp_path / "a").write_bytes(lines(*GOOD))
        (tmp_path / before).rename(tmp_path / after)
        with pytest.raises(UserError) as caught:
            run(config, shard=(1, 2))
        assert caught.value.code == code
        (tmp_path / after).rename(tmp_path / before)
    run(config, shard=(1, 2))


def rows_of(tmp_path: Path, **source: Any) -> list[Any]:
    found = []
    for one in open_inputs(data_config(tmp_path, sources=[source])):
        found += [row for piece in one.pieces() for row in parse(piece.payload or b"", one.spec)]
    return found


def put(path: Path, lines: list[str]) -> Path:
    """Texts as a file of the kind that its name says."""
    rows = [{"text": line} for line in lines]
    if path.suffix == ".parquet":
        pq.write_table(pa.table({"text": lines}), path)
        return path
    data = "".join(json.dumps(row) + "\n" for row in rows)
    if path.suffix == ".csv":
        data = "text\n" + "".join(f'"{line}"\n' for line in lines)
    elif path.suffix == ".json":
        data = json.dumps(rows)
    elif path.suffix == ".txt":
        data = "\n".join([*lines, ""])
    packing = {".gz": gzip.compress, ".zst": zstandard.compress}.get(path.suffix, bytes)
    path.write_bytes(packing(data.encode()))
    return path


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.json", "a.parquet"])
def test_a_file_that_changes_as_it_is_read_is_refused(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifest vouches for the bytes that were read, and for no others."""
    path = put(tmp_path / name, texts(60))
    real = inputs.file_identity
    config = data_config(tmp_path, sources=[{"files": name}])
    with monkeypatch.context() as patch:
        patch.setattr(inputs, "file_identity", lambda file: (real(file), put(path, texts(70)))[0])
        with pytest.raises(UserError) as error:
            run(config)
    assert error.value.code == "source-changed"
    assert not (config.dir / "train").exists()
    run(config)
    assert train_set(config).manifest.sources[0]["rows"] == 70


def test_patterns_leave_hidden_files_out(tmp_path: Path) -> None:
    for name in ("a.txt", ".b.txt", ".ipynb_checkpoints/a.txt", "c/.d/e.txt", "c/f.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{name}\n", encoding="utf-8")
    found = {"*.txt": ["a.txt"], "**/*.txt": ["a.txt", "c/f.txt"], ".*.txt": [".b.txt"]}
    write_jsonl(tmp_path / "[set] a*/a[.jsonl", ["brackets and stars of a name"])
    found |= {"c/.d/*.txt": ["c/.d/e.txt"], "[set] a*/a[.jsonl": ["brackets and stars of a name"]}
    assert {pattern: rows_of(tmp_path, files=pattern) for pattern in found} == found


def test_old_line_ends_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\rtwo\rthree\r")
    with pytest.raises(UserError) as error:
        rows_of(tmp_path, files="a.txt", format="lines")
    assert error.value.code == "line-ends"
    assert rows_of(tmp_path, files="a.txt", format="document") == ["one\rtwo\rthree"]


@pytest.mark.parametrize("form", ["lines", "document"])
def test_a_byte_order_mark_is_one_at_the_beginning_alone(tmp_path: Path, form: str) -> None:
    mark = "\ufeff"
    lines = [f"{mark}{i} {text}" for i, text in enumerate(texts(3000))]
    (tmp_path / "a.txt").write_text("\n\n".join(lines) + "\n", encoding="utf-8")
    found = rows_of(tmp_path, files="a.txt", format=form)
    expected = ["\n\n".join(lines)] if form == "document" else lines
    assert [row.rstrip("\n") for row in found] == [expected[0].removeprefix(mark), *expected[1:]]
    # what is read for a shard is what was scanned
    run(data_config(tmp_path, sources=[{"files": "a.txt", "format": form}], shards=1))
    (tmp_path / "b.jsonl").write_text(f'{mark}{{"text": "a"}}\n' * 3, encoding="utf-8")
    assert rows_of(tmp_path, files="b.jsonl") == ["a", "a", "a"]  # around JSON it is nobody's text


# a.csv or the named file: content, rows that are rejected by reason
TABLES: dict[str, tuple[str, bytes, dict[str, int]]] = {
    "plain": ("a.csv", f"text,n\r\n{CELLS}".encode(), {}),
    "quotes and line breaks": ("a.csv", f'text,n\n"a ""word"",\r\nand more",1\n{CELLS}'.encode(), {}),
    "tabs": ("a.tsv", f"text\tn\n{TABS}".encode(), {}),
    "empty cells": ("a.csv", f"text,\n,1\n{CELLS}".encode(), {"empty": 1}),
    "not UTF-8": ("a.csv", f"text,n\n{CELLS}caf\xe9 au lait,1\n".encode("latin-1"), {"bad_utf8": 1}),
    "zstd": ("a.tsv.zst", zstandard.compress(f"text\tn\n{TABS}".encode()), {}),
}


@pytest.mark.parametrize("case", TABLES)
def test_tables_are_read(tmp_path: Path, case: str) -> None:
    name, content, counts = TABLES[case]
    (tmp_path / name).write_bytes(content)
    (one,) = open_inputs(data_config(tmp_path, sources=[{"files": "a.*"}]))
    rows = [row for piece in one.pieces() for row in parse(piece.payload or [], one.spec)]
    assert Counter(row.reason for row in rows if isinstance(row, Rejected)) == counts
    assert len(rows) >= 9 + len(counts) and one.position() == one.size


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl.gz", "a.parquet"])
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
    made = datasets.Dataset.from_dict({"text": texts(100)})
    made.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": made, "test": made.select([1])}).save_to_disk(str(tmp_path / "two"))
    for source in ({"files": "one"}, {"files": "t*"}, {"hub": str(tmp_path / "one")}):
        assert rows_of(tmp_path, **source) == texts(100)
    with pytest.raises(UserError):
        rows_of(tmp_path, files="two", split="dev")


def test_every_file_form_gives_the_same_rows(tmp_path: Path) -> None:
    made = texts(3000)
    rows = [{"text": text} for text in made]
    jsonl = lines(*rows)
    half = jsonl.index(b"\n", len(jsonl) // 2) + 1
    for name, content in {
        "two frames.jsonl.zst": zstandard.compress(jsonl[:half]) + zstandard.compress(jsonl[half:]),
        "array.json": json.dumps(rows).encode(),
        "on one line longer than a read.json": json.dumps({"version": 1, "data": rows}).encode(),
        "over lines.json": json.dumps({"version": 1, "data": rows}, indent=1).encode(),
        "rows.json": jsonl,
        "lines.txt": "\n".join(made).encode(),
    }.items():
        (tmp_path / name).write_bytes(content)
        assert rows_of(tmp_path, files=name) == made, name
    (tmp_path / "a.txt").write_text("\n\n".join(made))
    assert [row.rstrip() for row in rows_of(tmp_path, files="a.txt", format="paragraphs")] == made
    (tmp_path / "one.json").write_text(json.dumps(rows[0]))
    assert rows_of(tmp_path, files="one.json") == made[:1]


def test_tokens_are_used_as_they_are(tmp_path: Path) -> None:
    rows = [[1, 5, 6, 7], [1, 9, 1, 8], [1, 4, 4, 4]]
    write_jsonl(tmp_path / "t.jsonl", [{"ids": ids, "text": "not read"} for ids in rows])
    config = prepared(
        tmp_path, sequence_len=4, shards=1, sources=[{"files": "t.jsonl", "format": "tokens"}], dedup="none"
    )
    assert [ids for ids, _ in segments(train_set(config))] == rows


FORMS = ("a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet", "a.csv")


class Quiet(SimpleHTTPRequestHandler):
    """A web server of the plainest kind: no lists that fsspec reads, no beginning in the middle."""

    broken = parts = False  # fails; sends parts of files, as most servers do

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        if Quiet.broken or self.path.startswith("/private"):
            self.send_error(503 if Quiet.broken else 403)
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


def by_jobs(tmp_path: Path, name: str, files: str, jobs: int = 1) -> Any:
    config = data_config(tmp_path, dir=str(tmp_path / name), shards=3, sources=[{"files": files}])
    for job in range(jobs):
        run(config, shard=(job, jobs))
    return config


def test_the_shards_are_those_of_the_files_on_disk(tmp_path: Path, web: str, memory: Any) -> None:
    """From a server that cannot begin in the middle, from memory by patterns, and by file://."""
    for name in FORMS:
        put(tmp_path / "web" / name, texts(400, seed=5))
    expected = train_set(by_jobs(tmp_path, "local", "web/a.jsonl")).fingerprint
    memory.put(str(tmp_path / "web"), "/bucket", recursive=True)
    for i, name in enumerate(FORMS):
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

    def pipe(text: str) -> None:
        memory.pipe("/c/a.txt", text.encode())

    pipe(text := "\n".join(texts(200)))
    config = by_jobs(tmp_path, "out", "memory://c/a.txt")
    before = file_bytes(config.dir)
    pipe(f"{text}\none more")
    with pytest.raises(UserError):
        run(config)
    pipe(text.replace("river", "RIVER"))
    (config.dir / "train/shard-00001-of-00003.arrow").unlink()
    with pytest.raises(UserError):
        run(config)
    pipe(text)
    run(config)
    assert file_bytes(config.dir) == before


@pytest.mark.parametrize(
    "files",
    [
        *("s3://bucket/a.jsonl", "nothing://bucket/a.jsonl", "https://me:secret@example.org/a.jsonl"),
        *("memory://nowhere/*.jsonl", "memory://d", "WEB/private/a.jsonl", "WEB/a.parquet"),
    ],
)
def test_addresses_that_cannot_be_read_give_one_line(
    tmp_path: Path, web: str, memory: Any, files: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)  # as where they are not installed
    memory.pipe("/d/a.docx", b"x")
    put(tmp_path / "web/a.parquet", texts(9000))
    assert "secret" not in fails(tmp_path, sources=[{"files": files.replace("WEB", web)}])


def test_a_server_that_fails_may_be_asked_again(tmp_path: Path, web: str) -> None:
    """A failure, which leaves nothing that is believed, not a mistake of the user's."""
    put(tmp_path / "web/a.jsonl.gz", texts(400))
    config = data_config(tmp_path, sources=[{"files": f"{web}/a.jsonl.gz"}])
    Quiet.broken = True
    with pytest.raises(FailureError):
        run(config)
    Quiet.broken = False
    run(config)
    assert train_set(config).manifest.documents == 400
