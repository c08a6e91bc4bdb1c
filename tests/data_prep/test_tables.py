"""csv and tsv, and names of files with signs of patterns: read as what they are, refused in a line."""

from __future__ import annotations

import contextlib
import csv
import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from emo.common.errors import UserError
from emo.data_prep.inputs import TableInput, TextInput
from emo.data_prep.rows import Rejected, parse
from emo.data_prep.sources import open_inputs
from emo.data_prep.verify import verify
from tests.helpers.corpus import alpaca_rows, data_config, file_bytes, run, texts, train_set, write_jsonl

GOOD = "".join(f'"{text}",{i}\r\n' for i, text in enumerate(texts(9)))
TABS = GOOD.replace('",', '"\t')

# a.csv or the named file: content, rows that are rejected by reason
COUNTED: dict[str, tuple[str, bytes, dict[str, int]]] = {
    "plain": ("a.csv", f"text,n\r\n{GOOD}".encode(), {}),
    "byte order mark": ("a.csv", b"\xef\xbb\xbf" + f"text,n\n{GOOD}".encode(), {}),
    "old line ends": ("a.csv", f"text,n\r{GOOD}".replace("\r\n", "\r").encode(), {}),
    "blank lines": ("a.csv", f"\n\ntext,n\n\n{GOOD}\n\n".encode(), {}),
    "quotes and line breaks": ("a.csv", f'text,n\n"a ""word"",\r\nand more",1\n{GOOD}'.encode(), {}),
    "semicolons": ("a.csv", f"text;n\n{GOOD}".replace('",', '";').encode(), {}),
    "tabs": ("a.tsv", f"text\tn\n{TABS}".encode(), {}),
    "tabs in a csv": ("a.csv", f"text\tn\n{TABS}".encode(), {}),
    "empty cells": ("a.csv", f"text,\n,1\n{GOOD}".encode(), {"empty": 1}),
    "not UTF-8": ("a.csv", f"text,n\n{GOOD}caf\xe9 au lait,1\n".encode("latin-1"), {"bad_utf8": 1}),
    "separators of Unicode": ("a.csv", f"text,n\none\u2028two\x85three,1\n{GOOD}".encode(), {}),
    "gzip": ("a.csv.gz", gzip.compress(f"text,n\n{GOOD}".encode()), {}),
    "zstd": ("a.tsv.zst", zstandard.compress(f"text\tn\n{TABS}".encode()), {}),
}
ERRORS: dict[str, tuple[str, bytes, str]] = {
    "two columns of a name": ("a.csv", f"text,n,text\n{GOOD}".encode(), "has two columns 'text'"),
    "too many fields": ("a.csv", f"text,n\n{GOOD}one,two,three\n".encode(), r"row 10: wrong type \(3 fields"),
    "nothing": ("a.csv", b"\n \n", "a.csv has no rows"),
    "UTF-16": ("a.csv", f"text,n\n{GOOD}".encode("utf-16"), "a.csv is UTF-16, not"),
    "cut short": ("a.csv.gz", gzip.compress(f"text,n\n{GOOD * 99}".encode())[:-20], "cannot be unpacked"),
    "a quote that is not closed": (
        "a.csv",
        b'text,n\n"' + b"word, " * 800,
        "not a row .* quote",
    ),
    "a quote that another closes": (
        "a.csv",
        f'text,n\n"an open, 1\n{GOOD}'.encode(),
        "not a row .* quote",
    ),
    "a quote that opens in the last row": ("a.csv", f'text,n\n{GOOD}"cut he'.encode(), "row 10: .*line 11: "),
    "text after a closing quote": ("a.csv", f'text,n\n{GOOD}"He" said,1\n'.encode(), "row 10: .*line 11: "),
    "quotes as in a csv": ("a.tsv", b'text\tn\n"a ""word"" of it"\t1\n', "a field is quoted as in a csv"),
    "a line break in quotes": ("a.tsv", b'text\tn\n"one\ntwo"\t1\n', r"row 1: wrong type \(1 fields"),
    "one line and no end": ("a.csv", b"text,n\n" + b"word " * 900, "after line 1: .*too long"),
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
    name, content, message = ERRORS[case]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        run(data_config(tmp_path, sources=[{"files": "a.*"}], max_chars=1000))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


def test_a_table_gives_the_shards_of_the_same_rows_as_json(tmp_path: Path) -> None:
    """Line breaks, quotes and delimiters in cells included; more rows than a piece, several jobs."""
    rows = [row | {"input": f'"{i}";\r\n,\t '} for i, row in enumerate(alpaca_rows(300))]
    write_jsonl(tmp_path / "a.jsonl", rows)
    with (tmp_path / "b.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    found = []
    for name in ("a.jsonl", "b.csv"):
        more = {"kind": "instruct", "sequence_len": 200, "shards": 3, "sources": [{"files": name}]}
        one = data_config(tmp_path, dir=str(tmp_path / f"{name}-one"), **more)
        many = data_config(tmp_path, dir=str(tmp_path / f"{name}-many"), **more)
        run(one)
        for job in (1, 2, 0):
            run(many, shard=(job, 3))
        assert file_bytes(one.dir) == file_bytes(many.dir)
        found.append(train_set(one).fingerprint)
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "name", ["a[1].jsonl", "[set] one/a.jsonl", "what?.jsonl", "a*.jsonl", "a[.jsonl", "[!]"]
)
def test_names_with_signs_of_patterns_are_names(tmp_path: Path, name: str) -> None:
    path = tmp_path / name if name.endswith("jsonl") else tmp_path / f"{name}.jsonl"
    write_jsonl(path, ({"text": text} for text in texts(60)))
    write_jsonl(tmp_path / "a1.jsonl", [{"text": "another file"}])
    config = data_config(tmp_path, sources=[{"files": str(path.relative_to(tmp_path))}])
    run(config)
    (source,) = train_set(config).manifest.sources
    assert source["name"] == str(path.relative_to(tmp_path)) and source["rows"] == 60


def test_patterns_and_brackets_together(tmp_path: Path) -> None:
    for name in ("[v1]/a1.jsonl", "[v1]/a2.jsonl", "w/a3.jsonl", "w/b4.jsonl"):
        write_jsonl(tmp_path / name, ({"text": f"{name} {text}"} for text in texts(40)))
    for pattern, names in {
        "[v1]/a*.jsonl": ["[v1]/a1.jsonl", "[v1]/a2.jsonl"],  # nothing matches as a pattern
        "w/[ab]*.jsonl": ["w/a3.jsonl", "w/b4.jsonl"],
        "w/a[0-9].jsonl": ["w/a3.jsonl"],
    }.items():
        config = data_config(
            tmp_path, dir=str(tmp_path / f"out{len(names)}{pattern[0]}"), sources=[{"files": pattern}]
        )
        run(config)
        assert [one["name"] for one in train_set(config).manifest.sources] == names


def test_a_tsv_file_has_no_quotes(tmp_path: Path) -> None:
    """Each line is a row, and all of a field is text."""
    fields = ['"Well', 'he said "no"', '"all of it"', '"', "5\" and 6'", "plain"]
    (tmp_path / "a.tsv").write_text("text\tlabel\n" + "".join(f"{f} x\t{i}\n" for i, f in enumerate(fields)))
    (one,) = open_inputs(data_config(tmp_path, sources=[{"files": "a.tsv"}]))
    rows = [row for piece in one.pieces() for row in parse(piece.payload or [], one.spec)]
    assert rows == [f"{field} x" for field in fields]


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl.gz", "a.parquet", "a.json"])
def test_rows_are_read_a_few_times_however_many_shards(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Formats that cannot be entered in the middle are gone through once for all shards of a split."""
    rows = [{"text": text} for text in texts(6000, sentences=1)]
    if name == "a.csv":
        with (tmp_path / name).open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([["text"], *([row["text"]] for row in rows)])
    elif name == "a.parquet":
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / name)
    elif name == "a.json":
        (tmp_path / name).write_text(json.dumps(rows))
    else:
        content = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / name).write_bytes(gzip.compress(content.encode()))
    opened: list[int] = []
    for kind in (TextInput, TableInput):
        real = kind._open

        def counting(self: Any, start: int, real: Any = real) -> Any:
            opened.append(start)
            return real(self, start)

        monkeypatch.setattr(kind, "_open", counting)
    config = data_config(
        tmp_path, sources=[{"files": name}], shards=12, validation_fraction=0.002, sequence_len=8
    )
    with contextlib.suppress(UserError):  # so few rows are held out that some shards have none
        run(config)
    assert len(opened) <= 4  # to compare words with texts, for each split, and once more
    whole = data_config(
        tmp_path, dir=str(tmp_path / "b"), sources=[{"files": name}], shards=12, validation_fraction=0.02
    )
    run(whole)
    assert not verify(whole.dir)[1]
