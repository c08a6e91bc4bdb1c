"""Files, addresses and data sets are read as sources. Bad sources are errors, and bad rows are counted."""

from __future__ import annotations

import bz2
import gc
import gzip
import io
import itertools
import json
import lzma
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import datasets
import fsspec
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import example, given, settings
from hypothesis import strategies as st

from emo.common.errors import FailureError, UserError
from emo.data_prep.checks import planned_inputs
from emo.data_prep.config import DataConfig, Source
from emo.data_prep.sources import files, reader
from emo.data_prep.sources.inputs import READERS, expand_braces, open_inputs
from emo.data_prep.sources.json_array import is_one_value
from emo.data_prep.sources.rows import parse, raw_rows
from emo.data_prep.sources.spec import Rejected, RowSpec
from emo.data_prep.sources.text import TextReader
from tests.helpers.corpus import (
    data_config,
    file_bytes,
    prepared,
    rejected,
    rows_of,
    run,
    segments,
    sentence,
    texts,
    train_set,
    write_jsonl,
)
from tests.helpers.examples import load_example
from tests.helpers.refusals import refused

GOOD = [{"text": text} for text in texts(9)]


def lines(*rows: Any) -> bytes:
    """Return rows as JSON lines. A row of bytes is written unchanged."""
    return b"".join((row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n" for row in rows)


def among(*rows: Any) -> bytes:
    """Return the rows as JSON lines between good rows."""
    return lines(*GOOD[:6], *rows, *GOOD[6:])


def put(path: Path, texts: list[str]) -> Path:
    """Write texts to a file in the format of its suffix."""
    path.parent.mkdir(exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.table({"text": texts}), path)
        return path
    if path.suffix == ".csv":
        data = "text\n" + "".join(f'"{text}"\n' for text in texts)
    elif path.suffix == ".json":
        data = json.dumps([{"text": text} for text in texts])
    else:
        data = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    packing = {".gz": gzip.compress, ".zst": zstandard.compress}.get(path.suffix, bytes)
    path.write_bytes(packing(data.encode()))
    return path


def read(root: Path, files: str = "a.*", **source: Any) -> list[Any]:
    """Return all rows of a source."""
    opened = open_inputs(data_config(root, sources=[{"files": files, **source}]))
    return [
        row for each in opened for piece in each.pieces() for row in parse(piece.payload or b"", each.spec)
    ]


def fails(root: Path, code: str, **data: Any) -> str:
    """Return the one-line error of a preparation, which must leave no data set for training."""
    with refused(code) as caught:
        run(data_config(root, **({"sources": [{"files": "a.*"}]} | data)))
    assert len(str(caught.value)) < 500
    assert not list(root.rglob("manifest.json"))
    return str(caught.value)


CELLS = "".join(f'"{text}",{i}\r\n' for i, text in enumerate(texts(9)))
TABS = "text\tn\n" + "".join(f"{text}\t{i}\r\n" for i, text in enumerate(texts(9)))

DAYS = pa.timestamp("us")
LATIN = pa.array([b"caf\xe9"] * 9, pa.binary()).view(pa.string())  # not UTF-8


def table(*columns: pa.Array) -> bytes:
    """Return a parquet file with the columns text and until."""
    file = io.BytesIO()
    pq.write_table(pa.table(dict(zip(("text", "until"), columns, strict=False))), file)
    return file.getvalue()


BROKEN: dict[str, tuple[str, str, bytes]] = {
    "broken JSON": ("broken-row", "a.jsonl", among(b'{"text": "cut of')),
    "missing column": ("broken-row", "a.jsonl", among({"body": "x"})),
    "empty file": ("empty-file", "a.jsonl", b""),
    "truncated zstd": ("damaged-file", "a.jsonl.zst", zstandard.compress(lines(*GOOD))[:-40]),
    "garbage named parquet": ("damaged-file", "a.parquet", b"PAR1 no PAR1"),
    "broken JSON array": ("not-json", "a.json", b'[{"text": "a"},\n{"text": '),
    "old ends of lines": ("line-ends", "a.txt", b"one\rtwo\rthree\r"),
    "one array": ("broken-row", "a.jsonl", b'[{"text": "a"}]'),
    "nothing usable": ("no-training-rows", "a.jsonl", lines({"text": ""}, {"text": " "})),
    "two columns of a name": ("column", "a.csv", f"text,n,text\n{CELLS}".encode()),
    "too many fields": ("broken-row", "a.csv", f"text,n\n{CELLS}one,two,three\n".encode()),
    "truncated xz": ("damaged-file", "a.jsonl.xz", lzma.compress(lines(*GOOD))[:-40]),
    "damaged xz": ("damaged-file", "a.jsonl.xz", b"x" * 400),
    "cut short": ("broken-table", "a.csv.gz", gzip.compress(f"text,n\n{CELLS * 99}".encode())[:-20]),
    "only a head": ("no-rows", "a.csv", b"text,n\n"),
    "no rows in an array": ("no-rows", "a.json", b"[]"),
    "no rows in parquet": ("no-rows", "a.parquet", table(pa.array([], pa.string()))),
    "dates after the year 9999": ("broken-row", "a.parquet", table(pa.array([2**58], DAYS))),
    "a quote that is not closed": ("broken-row", "a.csv", b'text,n\n"' + b"word, " * 80_000),
    "a quote that another closes": ("broken-table", "a.csv", f'text,n\n"an open, 1\n{CELLS}'.encode()),
}
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "two validations": ("bad-value", {"validation": [{"files": "a.*"}], "validation_fraction": 0.1}),
    "text rows for instruct": ("broken-row", {"kind": "instruct"}),
    "columns of another kind": ("bad-value", {"sources": [{"files": "a.*", "columns": {"output": "text"}}]}),
    "a directory": ("no-file", {"sources": [{"files": "."}]}),
    "nothing of its own to validate on": ("no-validation-rows", {"validation": [{"files": "a.*"}]}),
    "too small a share to validate on": ("no-validation-rows", {"validation_fraction": 1e-9}),
    "a set that is a path": ("bad-value", {"validation": {"../x": [{"files": "a.*"}]}}),
    "hub without network": ("hub", {"sources": [{"hub": "no-such/data-set"}]}),
}


@pytest.mark.parametrize("case", [*BROKEN, *SETTINGS])
def test_a_source_error_is_one_line(tmp_path: Path, case: str) -> None:
    code, data = SETTINGS.get(case, ("", {}))
    code, name, content = BROKEN.get(case, (code, "a.jsonl", lines(*GOOD)))
    (tmp_path / name).write_bytes(content)
    fails(tmp_path, code, **data)


def test_the_advice_for_control_characters_is_to_remove_them(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"caf\xc3\xa9 \x1a\n")
    (row,) = read(tmp_path)
    assert row == Rejected("control_characters", "U+001A. Remove the control characters")
    with refused("control-characters"):
        run(data_config(tmp_path, sources=[{"files": "a.txt"}]))
    (tmp_path / "a.txt").write_bytes(b"caf\xe9 \x1a\nsome\x08\n")
    with refused("not-utf8"):
        run(data_config(tmp_path, sources=[{"files": "a.txt"}]))


@pytest.mark.parametrize("name", ["a.jsonl.zst", "a.csv.zst"])
def test_the_error_for_a_large_zstd_window_tells_how_to_convert(tmp_path: Path, name: str) -> None:
    window = zstandard.ZstdCompressionParameters.from_level(1, window_log=28)
    stream = zstandard.ZstdCompressor(compression_params=window).compressobj()  # without the size
    (tmp_path / name).write_bytes(stream.compress(b"text\n" + lines(*GOOD)) + stream.flush())
    with refused("zstd-window"):
        run(data_config(tmp_path, sources=[{"files": name}]))


def test_an_error_has_the_number_of_the_broken_line(tmp_path: Path) -> None:
    """The number is also right after many pieces of a compressed file."""
    rows = [{"text": f"{i} " + "word " * 40} for i in range(5000)]
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b"\n" + lines(*rows, b"{broken")))
    assert "line 5002" in fails(tmp_path, "broken-row")


def test_rows_beyond_the_limit_are_not_checked(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(*({"text": text} for text in texts(20)), b"{broken"))
    assert "line 21" in fails(tmp_path, "broken-row", sources=[{"files": "a.jsonl", "limit": 21}])
    config = prepared(tmp_path, sources=[{"files": "a.jsonl", "limit": 10}], shards=1)
    assert train_set(config).manifest.documents == 10


# Each file has nine rows that are used. The last entry counts the rejected rows by reason.
READ: dict[str, tuple[str, bytes, dict[str, int]]] = {
    "bad UTF-8 in a line": ("a.jsonl", among(b'{"text": "\xff\xfe"}'), {"bad_utf8": 1}),
    "half a surrogate pair": ("a.jsonl", among(b'{"text": "\\ud83d"}'), {"bad_utf8": 1}),
    "NUL bytes": ("a.jsonl", among({"text": "a\x00b"}), {"control_characters": 1}),
    "replacement characters": ("a.jsonl", among({"text": "caf\ufffd"}), {"replacement_characters": 1}),
    "empty text": ("a.jsonl", among({"text": "", "document": "crawl/2.html"}), {"empty": 1}),
    "no letters": ("a.jsonl", among({"text": "*** --- ***"}), {"no_letters": 1}),
    "one sign repeated": ("a.jsonl", among({"text": "a" * 500}), {"repetitive": 1}),
    "byte order mark": ("a.jsonl", b"\xef\xbb\xbf" + lines(*GOOD), {}),
    "not objects": (
        "a.jsonl",
        among(b"{", [1], {"body": 1}, {"text": 2}),
        {"broken_json": 1, "not_an_object": 1, "missing_column": 1, "wrong_type": 1},
    ),
    "table": ("a.csv", f"text,n\r\n{CELLS}".encode(), {}),
    "quotes and line breaks": ("a.csv", f'text,n\n"a ""word"",\r\nand more",1\n{CELLS}'.encode(), {}),
    "tabs": ("a.tsv", TABS.encode(), {}),
    "packed tabs": ("a.tsv.zst", zstandard.compress(TABS.encode()), {}),
    "empty cells": ("a.csv", f"text,\n,1\n{CELLS}".encode(), {"empty": 1}),
    "not UTF-8": ("a.csv", f"text,n\ncaf\xe9 au lait,1\n{CELLS}".encode("latin-1"), {"bad_utf8": 1}),
}


@pytest.mark.parametrize("case", READ)
def test_good_rows_are_read_and_rejected_rows_counted(tmp_path: Path, case: str) -> None:
    name, content, counts = READ[case]
    (tmp_path / name).write_bytes(content)
    rows = read(tmp_path)
    assert Counter(row.reason for row in rows if isinstance(row, Rejected)) == counts
    assert [row for row in rows if isinstance(row, str)][-9:] == texts(9)


# Columns of nine rows that cannot be read as Python values.
UNREADABLE: dict[str, pa.Array] = {
    "not UTF-8": LATIN,
    "years after 9999": pa.array([2**58] * 9, DAYS),
    "repeated keys": pa.array([[("a", 1), ("a", 2)]] * 9, pa.map_(pa.string(), pa.int64())),
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_columns_that_are_not_needed_are_not_read(tmp_path: Path, case: str) -> None:
    columns = {"text": texts(9), "extra": UNREADABLE[case]}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    assert read(tmp_path) == texts(9)
    sources = [{"files": "a.parquet"}]
    (source,) = train_set(prepared(tmp_path, shards=1, sources=sources)).manifest.sources
    assert (source["columns"], source["columns_not_read"]) == (["text"], ["extra"])
    (tmp_path / "chats").mkdir()
    columns = {"prompt": texts(9), "response": texts(9), "extra": UNREADABLE[case]}
    pq.write_table(pa.table(columns), tmp_path / "chats/a.parquet")
    config = prepared(tmp_path / "chats", kind="instruct", sequence_len=512, shards=1, sources=sources)
    assert train_set(config).manifest.documents == 9


def test_unreadable_values_reject_only_their_rows(tmp_path: Path) -> None:
    """This holds for Parquet files and saved data sets, and the error of strict data names the row."""
    broken = pa.concat_arrays([pa.array(texts(5)), LATIN[:2], pa.array(texts(9)[5:])])
    pq.write_table(pa.table({"text": broken}), tmp_path / "a.parquet")
    datasets.Dataset(pa.table({"text": broken})).save_to_disk(str(tmp_path / "saved"))
    for name in ("a.parquet", "saved"):
        rows = read(tmp_path, name)
        assert [row.reason for row in rows if isinstance(row, Rejected)] == ["bad_utf8"] * 2
        assert rows[:5] + rows[7:] == texts(9)
    maps = pa.array([[("a", 1)]] * 2 + [[("a", 1), ("a", 2)]], pa.map_(pa.string(), pa.int64()))
    pq.write_table(pa.table({"text": maps, "id": range(3)}), tmp_path / "a.parquet")
    assert [row.reason for row in read(tmp_path, "a.parquet")] == ["wrong_type"] * 3
    dates = pa.array([2**58], DAYS)
    pq.write_table(pa.table({"text": dates}), tmp_path / "a.parquet")
    assert "a.parquet row 1: wrong type" in fails(tmp_path, "broken-row", sources=[{"files": "a.parquet"}])


def test_images_next_to_the_text_are_not_read(tmp_path: Path) -> None:
    """A decoded image has other bytes than its file, and another memory address in every read."""
    rows = {"text": texts(300), "image": [{"bytes": b"no image", "path": None}] * 300}
    features = datasets.Features({"text": datasets.Value("string"), "image": datasets.Image()})
    datasets.Dataset.from_dict(rows, features).save_to_disk(str(tmp_path / "saved"))
    config = prepared(tmp_path, sources=[{"files": "saved"}])
    assert train_set(config).manifest.documents == 300
    (source,) = train_set(config).manifest.sources
    assert source["columns_not_read"] == ["image"]


def test_rejections_are_counted_in_the_plan(tmp_path: Path) -> None:
    """The counts include lines that are too long to be held in memory, in the middle and at the end."""
    long = {"text": "long line " * 500_000}
    (tmp_path / "a.jsonl").write_bytes(lines(*GOOD, long, b"{", *GOOD, long))
    config = prepared(tmp_path, strict=False, max_chars=100_000)
    assert rejected(config) == {"broken_json": 1, "duplicate": 9, "too_long": 2}


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.json", "a.parquet"])
def test_a_file_that_changes_during_reading_is_an_error(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifest must describe exactly the bytes that were read."""
    path = put(tmp_path / name, texts(60))
    real = reader.identify_file
    config = data_config(tmp_path, sources=[{"files": name}])
    with monkeypatch.context() as patch, refused("source-changed"):
        patch.setattr(reader, "identify_file", lambda file: (real(file), put(path, texts(70)))[0])
        run(config)
    assert not (config.dir / "train").exists()
    run(config)
    assert train_set(config).manifest.sources[0]["rows"] == 70


def test_patterns_leave_hidden_files_out(tmp_path: Path) -> None:
    for name in ("a.txt", ".b.txt", ".ipynb_checkpoints/a.txt", "c/.d/e.txt", "c/f.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{name}\n", encoding="utf-8")
    write_jsonl(tmp_path / "[set] a*/a[.jsonl", ["brackets and stars of a name"])
    matches = {"*.txt": ["a.txt"], "**/*.txt": ["a.txt", "c/f.txt"], ".*.txt": [".b.txt"]}
    matches |= {"c/.d/*.txt": ["c/.d/e.txt"], "[set] a*/a[.jsonl": ["brackets and stars of a name"]}
    assert {pattern: read(tmp_path, pattern) for pattern in matches} == matches


@pytest.mark.parametrize("ending", ["jsonl", "json", "csv", "parquet"])
def test_the_position_of_every_reader_ends_at_the_size(tmp_path: Path, ending: str) -> None:
    """Progress and forecasts depend on it."""
    table = pa.Table.from_pylist(GOOD)
    path = tmp_path / f"a.{ending}"
    if ending == "parquet":
        pq.write_table(table, path)
    elif ending == "csv":
        pyarrow.csv.write_csv(table, path)
    else:
        path.write_text(json.dumps(GOOD) if ending == "json" else "".join(f"{json.dumps(r)}\n" for r in GOOD))
    (opened,) = open_inputs(data_config(tmp_path, sources=[{"files": path.name}]))
    assert opened.position() == 0
    assert list(opened.pieces()) and opened.position() == opened.size == path.stat().st_size


@pytest.mark.parametrize(
    ("pattern", "expanded"),
    [
        ("{a,{b,c}}.jsonl", ["a.jsonl", "b.jsonl", "c.jsonl"]),
        ("{x,x}", ["x", "x"]),
        ("x{a,b{c,d}}y", ["xay", "xbcy", "xbdy"]),
        ("{a,b}/{c,d}", ["a/c", "a/d", "b/c", "b/d"]),
        ("{a,b", ["{a,b"]),
        ("{a}_{b,c}", ["{a}_b", "{a}_c"]),
    ],
)
def test_braces_mean_what_they_mean_in_a_shell(pattern: str, expanded: list[str]) -> None:
    assert expand_braces(pattern) == expanded


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_braces_are_expanded_as_in_bash() -> None:
    """All patterns of up to five characters after the first agree."""
    patterns = ["x" + "".join(p) for n in range(1, 6) for p in itertools.product("a,{}", repeat=n)]
    script = "set -f\n" + "".join(f"printf '%s ' {pattern}; echo\n" for pattern in patterns)
    done = subprocess.run(["bash"], input=script, capture_output=True, text=True, check=True)
    for pattern, line in zip(patterns, done.stdout.splitlines(), strict=True):
        assert expand_braces(pattern) == line.split(), pattern


def test_braces_are_expanded(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt", "c/d.txt", "{x,y}.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"{name}\n", encoding="utf-8")
    matches = {"{b,a}.txt": ["b.txt", "a.txt"], "{a,c/d}.t{x,x}t": ["a.txt", "a.txt", "c/d.txt", "c/d.txt"]}
    matches["{x,y}.txt"] = ["{x,y}.txt"]
    assert {pattern: read(tmp_path, pattern) for pattern in matches} == matches
    with pytest.raises(UserError):
        read(tmp_path, "{a,none}.txt")


TWICE = {
    "a.jsonl": ("broken-row", b'{"text": "one", "n": 1, "text": "two"}\n'),
    "a.json": ("not-json", b'[{"text": "a"}, {"text": "a", "text": "b"}]'),
}


@pytest.mark.parametrize("name", TWICE)
def test_a_repeated_json_key_is_an_error(tmp_path: Path, name: str) -> None:
    code, content = TWICE[name]
    (tmp_path / name).write_bytes(content)
    assert "'text' is repeated" in fails(tmp_path, code)


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt", "a.csv", "a.json"])
@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le"])
def test_utf_16_is_recognised(tmp_path: Path, name: str, encoding: str) -> None:
    text = {"a.txt": "one\ntwo\n", "a.csv": "text,n\none,1\n"}.get(
        name, '[{"text": "one"},\n{"text": "two"}]\n'
    )
    (tmp_path / name).write_bytes(text.encode(encoding))
    with refused("not-utf8") as caught:
        run(data_config(tmp_path, sources=[{"files": name}]))
    assert "UTF-16" in str(caught.value)


@pytest.mark.parametrize("form", ["lines", "document"])
def test_only_a_byte_order_mark_at_the_beginning_is_removed(tmp_path: Path, form: str) -> None:
    mark = "\ufeff"
    marked = [f"{mark}{i} {text}" for i, text in enumerate(texts(3000))]
    (tmp_path / "a.txt").write_text("\n\n".join(marked) + "\n", encoding="utf-8")
    first, *others = ["\n\n".join(marked)] if form == "document" else marked
    assert [row.rstrip("\n") for row in read(tmp_path, format=form)] == [first.removeprefix(mark), *others]
    # writing a shard reads the same rows as the scan
    run(data_config(tmp_path, sources=[{"files": "a.txt", "format": form}], shards=1))


def test_every_file_format_gives_the_same_rows(tmp_path: Path) -> None:
    texts_read = texts(3000)
    rows = [{"text": text} for text in texts_read]
    jsonl = lines(*rows)
    half = jsonl.index(b"\n", len(jsonl) // 2) + 1
    for name, content in {
        "two frames.jsonl.zst": zstandard.compress(jsonl[:half]) + zstandard.compress(jsonl[half:]),
        "array.json": json.dumps(rows).encode(),
        "on one line longer than a read.json": json.dumps({"version": 1, "data": rows}).encode(),
        "over lines.json": json.dumps({"version": 1, "data": rows}, indent=1).encode(),
        "rows.json": jsonl,
        "lines.txt": "\n".join(texts_read).encode(),
        "other name.ndjson": jsonl,
        "OTHER CASE.JSONL.XZ": lzma.compress(jsonl),
        "third name.jsonlines.bz2": bz2.compress(jsonl),
    }.items():
        (tmp_path / name).write_bytes(content)
        assert read(tmp_path, name) == texts_read, name
    (tmp_path / "a.txt").write_text("\n\n".join(texts_read))
    assert [row.rstrip() for row in read(tmp_path, format="paragraphs")] == texts_read
    (tmp_path / "single.json").write_text(json.dumps(rows[0]))
    assert read(tmp_path, "single.json") == texts_read[:1]


FORMS = st.sampled_from(["lines", "paragraphs", "wikitext"])
LINES = st.sampled_from(["", "", " ", "one", "two words", " = Title = ", "\r", "x" * 30])


@settings(deadline=None, max_examples=80)
@given(st.lists(LINES, min_size=1, max_size=60), FORMS, st.sets(st.integers(1, 300), max_size=6))
@example(["", "", " ", "", "one"], "paragraphs", {1, 2})  # two cuts among the lines between two rows
@example(["", "", "", " = Title = ", "", " = Title = ", "", ""], "wikitext", {1})  # a title alone
def test_ranges_of_a_file_have_its_rows(lines: list[str], form: str, cuts: set[int]) -> None:
    """Wherever a file is cut into stretches, each row is complete in exactly one of them."""
    spec = RowSpec("text", form, False, None, "none", 1000)
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "a.txt"
        path.write_text("\n".join(lines), encoding="utf-8")
        size = path.stat().st_size
        opened = TextReader(Source(files="a.txt"), "a.txt", spec, size, path)
        whole = [row for piece in opened.pieces() for row in raw_rows(piece.payload or b"", spec)]
        bounds = sorted(cut for cut in cuts if cut <= size)
        rows = []
        for begin, end in zip([0, *bounds], [*bounds, None], strict=True):
            for piece in opened.pieces(begin, end):
                rows += raw_rows(piece.payload or b"", spec)
                assert list(opened.read([piece.extent])) == [piece.payload]
    assert rows == whole


ARTICLES = [f"Title {i} = x" if i == 3 else f"Title {i}" for i in range(40)]


def wikitext() -> list[str]:
    """Return lines like WikiText's, with headings between blank lines and a legend like a heading."""
    rng, lines = random.Random(5), [" \n"]
    for title in ARTICLES:
        lines += [f" = {title} = \n", " \n"]
        for section in range(rng.randint(1, 3)):
            lines += [f" {sentence(rng, 20, 60)} \n" for _ in range(rng.randint(1, 4))]
            lines += [" = Wins ; L = Losses = \n"] if section == 1 else []
            lines += [" \n", f" = = Section {section} = = \n", " \n"]
    return [*lines, f" {sentence(rng)} \n", " \n"]


def test_wikitext_documents_begin_at_level_one_headings(tmp_path: Path) -> None:
    lines = wikitext()
    (tmp_path / "a.txt").write_text("".join(lines))
    # The hub's copy has one line per row, and blank lines are empty.
    pq.write_table(
        pa.table({"text": ["" if line == " \n" else line for line in lines]}), tmp_path / "b.parquet"
    )
    for source in ({"files": "a.txt"}, {"files": "b.parquet", "format": "wikitext"}):
        documents = read(tmp_path, **source)
        assert [text.split(" = ")[1] for text in documents] == [title.split(" = ")[0] for title in ARTICLES]
        assert "".join("".join(documents).split()) == "".join("".join(lines).split())


def test_known_escapes_of_data_sets_are_undone(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", ["one <newline> <newline>two<newline>three"])
    write_jsonl(tmp_path / "b.jsonl", ["Wall St.\\band #39;s"])
    assert read(tmp_path, "a.jsonl", clean="writingprompts") == ["one\n\ntwo\nthree"]
    assert read(tmp_path, "b.jsonl", clean="ag_news") == ["Wall St. band's"]


def test_token_ids_are_used_unchanged(tmp_path: Path) -> None:
    rows = [[1, 5, 6, 7], [1, 9, 1, 8], [1, 4, 4, 4]]
    write_jsonl(tmp_path / "t.jsonl", [{"ids": ids, "text": "not read"} for ids in rows])
    tokens = {"files": "t.jsonl", "format": "tokens"}
    config = prepared(tmp_path, sequence_len=4, shards=1, sources=[tokens], dedup="none")
    assert [ids for ids, _ in segments(train_set(config))] == rows
    write_jsonl(tmp_path / "t.jsonl", [{"ids": [*ids, 60_000]} for ids in rows])
    with refused("token-range"):
        run(data_config(tmp_path, sources=[tokens], dir=str(tmp_path / "other")))


def test_a_source_in_data_dir_is_rejected(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", texts(9))
    with refused("source-in-data-dir"):
        planned_inputs(data_config(tmp_path, dir=str(tmp_path)))


def test_hub_and_saved_data_sets_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`datasets` loads a directory like a hub id, so the test needs no network."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    saved = datasets.Dataset.from_dict({"text": texts(100)})
    saved.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": saved, "test": saved.select([1])}).save_to_disk(str(tmp_path / "two"))
    for source in ({"files": "one"}, {"files": "t*"}, {"files": None, "hub": str(tmp_path / "one")}):
        assert read(tmp_path, **source) == texts(100)
    put(tmp_path / "repo/train.jsonl", texts(100))
    here = data_config(tmp_path, sources=[{"hub": str(tmp_path / "one")}], dir=str(tmp_path / "here"))
    run(here)
    shutil.rmtree(tmp_path / "one")
    saved.select(range(40)).save_to_disk(str(tmp_path / "one"))
    with refused("source-changed"):
        run(here)
    for split, kept in (("train[:10]", texts(100)[:10]), ("test", [texts(100)[1]])):
        assert read(tmp_path, files="two", split=split) == kept
    assert read(tmp_path, files="one", split="train[50%:]") == texts(40)[20:]
    with refused("hub"):
        read(tmp_path, files="one", split="test")
    put(tmp_path / "a.jsonl", texts(9))
    with refused("source-format"):
        read(tmp_path, files="a.jsonl", split="train[:5]")
    hub = {"hub": str(tmp_path / "repo"), "split": "train[:50]"}
    (source,) = train_set(prepared(tmp_path, sources=[hub])).manifest.sources
    assert (source["rows"], source["revision"]) == (50, "not pinned")


class Server(SimpleHTTPRequestHandler):
    """A minimal web server without directory lists for fsspec, and without range requests by default."""

    broken = parts = False  # whether requests fail, and whether it sends ranges
    requests = 0

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        Server.requests += 1
        if Server.broken or self.path.startswith("/private"):
            self.send_error(503 if Server.broken else 403)
        elif Server.parts and "Range" in self.headers:
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
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Server, directory=str(tmp_path / "web")))
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    Server.broken = Server.parts = False
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


MEMORY = fsspec.filesystem("memory")  # each test uses separate files in it


def prepared_from(root: Path, name: str, files: str) -> DataConfig:
    return prepared(root, dir=str(root / name), shards=12, sources=[{"files": files}])


def test_an_address_gives_the_same_shards_as_local_files(tmp_path: Path, web: str) -> None:
    """Addresses on a web server with and without range requests, patterns in memory, and file:// work."""
    for name in ("a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet", "a.csv"):
        put(tmp_path / "web" / name, texts(400, seed=5))
    MEMORY.put(str(tmp_path / "web"), "/bucket", recursive=True)
    expected = train_set(prepared_from(tmp_path, "local", "web/a.jsonl")).fingerprint
    for number, address in enumerate(
        (
            *(f"{web}/{name}" for name in ("a.jsonl", "a.jsonl.zst", "a.csv", "a.parquet")),
            *("memory://bucket/a.pa*", "memory://buck?t/a.jsonl.[gh]z", f"file://{tmp_path}/web/a.csv"),
        )
    ):
        Server.parts, Server.requests = address.endswith("parquet"), 0
        config = prepared_from(tmp_path, str(number), address)
        assert Server.parts or Server.requests < 12, "it is read a few times, however many shards"
        assert train_set(config).fingerprint == expected, address
        assert "nothing to do" in run(config)[0]
        (source,) = train_set(config).manifest.sources
        assert "://" in source["name"] and len(source["sha256"]) == 64


def test_a_changed_file_at_an_address_is_an_error(tmp_path: Path) -> None:
    """A changed size is found before a job, and changed content is found even if the size is the same."""
    text = "\n".join(texts(200))
    MEMORY.pipe("/c/a.txt", text.encode())
    config = prepared_from(tmp_path, "out", "memory://c/a.txt")
    before = file_bytes(config.dir)
    (config.dir / "train/shard-00001-of-00012.arrow").unlink()
    for changed in (f"{text}\none more", text.replace("river", "RIVER")):
        MEMORY.pipe("/c/a.txt", changed.encode())
        with pytest.raises(UserError):
            run(config)
    MEMORY.pipe("/c/a.txt", text.encode())
    run(config)
    assert file_bytes(config.dir) == before


def test_a_new_version_at_an_address_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other text of the same length has another version. A new version of the same text is no change."""
    text = "\n".join(texts(200))
    version = "1"

    def info(self: Any, path: str, **options: Any) -> dict[str, Any]:
        return real(self, path, **options) | {"ETag": version}

    real = type(MEMORY).info
    monkeypatch.setattr(type(MEMORY), "info", info)
    MEMORY.pipe("/v/a.txt", text.encode())
    config = prepared_from(tmp_path, "out", "memory://v/a.txt")
    assert "nothing to do" in run(config)[0]
    version = "2"
    assert "nothing to do" in run(config)[0]
    MEMORY.pipe("/v/a.txt", text.replace("river", "RIVER").encode())
    with refused("source-changed"):
        run(config)


UNREACHABLE = {
    "s3://bucket/a.jsonl": "address",
    "nothing://bucket/a.jsonl": "address",
    "https://me:secret@example.org/a.jsonl": "secret",
    "memory://nowhere/*.jsonl": "no-file",
    "memory://d": "no-file",
    "WEB/private/a.jsonl": "address",
    "WEB/a.parquet": "address",
}


@pytest.mark.parametrize("files", UNREACHABLE)
def test_an_unreachable_address_is_a_one_line_error(
    tmp_path: Path, web: str, files: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)  # as if not installed
    MEMORY.pipe("/d/a.docx", b"x")
    put(tmp_path / "web/a.parquet", texts(9000))
    error = fails(tmp_path, UNREACHABLE[files], sources=[{"files": files.replace("WEB", web)}])
    assert "secret" not in error


def test_a_server_error_can_be_retried(tmp_path: Path, web: str) -> None:
    """A server error is a failure instead of a user's mistake, and a later run completes."""
    put(tmp_path / "web/a.jsonl.gz", texts(400))
    config = data_config(tmp_path, sources=[{"files": f"{web}/a.jsonl.gz"}])
    Server.broken = True
    with pytest.raises(FailureError):
        run(config)
    Server.broken = False
    run(config)
    assert train_set(config).manifest.documents == 400


def test_a_new_format_is_one_reader_and_one_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(READERS, ".feather", load_example("my_reader.py").FeatherReader)
    table = pa.table({"text": texts(2000, seed=5)})
    with pa.ipc.new_file(tmp_path / "a.feather", table.schema) as sink:
        sink.write_table(table, max_chunksize=300)
    write_jsonl(tmp_path / "a.jsonl", texts(2000, seed=5))
    configs = [prepared_from(tmp_path, name, f"a.{name}") for name in ("feather", "jsonl")]
    new, known = map(train_set, configs)
    assert new.fingerprint == known.fingerprint and new.manifest.documents == 2000
    (configs[0].dir / "train/shard-00007-of-00012.arrow").unlink()
    run(configs[0])  # reading begins in the middle
    assert train_set(configs[0]).fingerprint == known.fingerprint


def test_a_validation_group_is_not_split(tmp_path: Path) -> None:
    rows = [{"text": f"{text} {i}", "question": i // 5} for i, text in enumerate(texts(400))]
    write_jsonl(tmp_path / "a.jsonl", rows)
    grouped: dict[str, Any] = {"validation_fraction": 0.3, "sequence_len": 8}
    config = prepared(tmp_path, **grouped, validation_group="question")
    question = {row["text"]: row["question"] for row in rows}
    trained, held_out = ({question[text] for text in rows_of(config, split)} for split in (0, 1))
    assert not trained & held_out and len(trained | held_out) == 80 and 10 < len(held_out) < 40
    (tmp_path / "none").mkdir()
    write_jsonl(tmp_path / "none/a.jsonl", rows)
    error = fails(tmp_path / "none", "broken-row", **grouped, validation_group="other")
    assert "no column other" in error
    lines = pa.table({"text": [" = A = ", "b"], "page": [1, 1]})
    pyarrow.csv.write_csv(lines, tmp_path / "none/table.csv")
    sources = [{"files": "table.csv", "format": "wikitext"}]
    grouped |= {"sources": sources, "validation_group": "page"}
    assert "WikiText" in fails(tmp_path / "none", "source-format", **grouped)


FORMS: dict[str, tuple[bytes, bool]] = {
    "an array after spaces": (b"\xef\xbb\xbf" + b" \n" * 50 + b"[1, 2]", True),
    "an object with rows": (b'{"rows": [{"text": "a"}]}\n\n', True),
    "a row": (b'\n{"text": "a"}', False),
    "several rows": (b'{"rows": [{"text": "a"}]}\n \n{"rows": []}', False),
    "several lines": (b'{\n"rows": [{"text": "a"}]}', True),
    "nothing": (b" \n", False),
}


@pytest.mark.parametrize("case", FORMS)
@pytest.mark.parametrize("size", [1, 4, 1000])
def test_one_json_value_is_recognised(
    tmp_path: Path, case: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    content, expected = FORMS[case]
    (tmp_path / "a.json").write_bytes(content)
    monkeypatch.setattr(files, "READ_BYTES", max(size, 3 if content.startswith(b"\xef") else 1))
    assert is_one_value(tmp_path / "a.json") is expected


def test_a_long_line_of_json_is_read_in_linear_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.json").write_bytes(b'{"rows": [' + b'{"text": "word"}, ' * 200_000 + b'{"text": "word"}]}')
    monkeypatch.setattr(files, "READ_BYTES", 1 << 6)
    began = time.process_time()
    assert is_one_value(tmp_path / "a.json")
    assert time.process_time() - began < 1, "copying the line for each read takes longer"


@pytest.mark.parametrize("ending", ["csv", "json", "parquet"])
def test_pieces_of_tables_have_limited_text(
    tmp_path: Path, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The size of the pieces changes no byte of the shards."""
    rows = texts(600, seed=2, sentences=20)
    config = data_config(tmp_path, sources=[{"files": put(tmp_path / f"a.{ending}", rows).name}])
    run(config)
    before = file_bytes(config.dir / "train")
    monkeypatch.setattr(reader, "PIECE_CHARS", 5000)
    (opened,) = open_inputs(config)
    pieces = [[row["text"] for row in piece.payload or ()] for piece in opened.pieces()]
    assert [text for piece in pieces for text in piece] == rows
    assert max(sum(map(len, piece[:-1])) for piece in pieces) < 5000 and max(map(len, pieces)) > 1
    (config.dir / "train/shard-00001-of-00002.arrow").unlink()
    run(config)  # the plan has the larger pieces
    assert file_bytes(config.dir / "train") == before
    run(config, force=True)
    assert file_bytes(config.dir / "train") == before


def test_one_json_array_is_in_memory_at_a_time(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.json").write_text(json.dumps([{"text": f"{name} {i}"} for i in range(5)]))
    readers = planned_inputs(data_config(tmp_path, sources=[{"files": "*.json"}]))
    for each in readers:
        each.probe()
    lists = [value for value in gc.get_objects() if type(value) is list and len(value) == 5]
    firsts = [rows[0] for rows in lists if isinstance(rows[0], dict)]
    assert [row["text"] for row in firsts if "text" in row] == ["b 0"]
