"""Bad input: every case ends in one clear line, or in a rejection that is counted by its reason."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
import zstandard

from emo.common.errors import UserError
from emo.data_prep.plan import Plan
from emo.data_prep.rows import Rejected, RowSpec, parse
from tests.helpers.corpus import alpaca_rows, data_config, run, texts

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


# name: (file, content, words of the error)
ERRORS: dict[str, tuple[str, bytes, str]] = {
    "broken JSON on line 7 of 10": ("a.jsonl", among(b'{"text": "cut of'), r"a.jsonl line 7: broken json \("),
    "broken line after blank lines": ("a.jsonl", b"\n\n" + among(b"{"), r"line 9: broken json"),
    "a JSON list as row": ("a.jsonl", among(["text"]), r"line 7: not an object .*not list"),
    "missing column": ("a.jsonl", among({"body": "x"}), r"line 7: missing column .*; there are: body"),
    "null for text": ("a.jsonl", among({"text": None}), "must be text, not null"),
    "nested too deep": ("a.jsonl", among(b"[" * 200_000), "broken json"),
    "empty file": ("a.jsonl", b"", "a.jsonl is empty"),
    "only blank lines": ("a.jsonl", b"\n \n\n", "a.jsonl has no rows"),
    "no such file": ("other.jsonl", lines(*GOOD), r"no file matches .*a\.\*"),
    "unknown ending": ("a.docx", lines(*GOOD), r"a\.docx has none of the known endings"),
    "UTF-16": ("a.txt", "some words\n".encode("utf-16"), "a.txt is UTF-16, not UTF-8; convert it: iconv"),
    "UTF-32, big end first": ("a.txt", b"\0\0\xfe\xff" + "some".encode("utf-32-be"), "a.txt is UTF-32"),
    "truncated zstd": ("a.jsonl.zst", zstandard.compress(lines(*GOOD))[:-40], "cannot be unpacked"),
    "truncated gzip": ("a.txt.gz", gzip.compress(b"word " * 999)[:-12], "cannot be unpacked"),
    "garbage named parquet": ("a.parquet", b"PAR1 no PAR1", "not readable as parquet"),
    "packed parquet": ("a.parquet.zst", zstandard.compress(b"x"), "parquet is packed inside"),
    "broken JSON array": ("a.json", b'[{"text": "a"},\n{"text": ', "a.json is not JSON"),
    "object with two arrays": ("a.json", b'{"a": [],\n"b": []}', "must be an array of rows"),
    "nothing usable": ("a.jsonl", lines({"text": ""}, {"text": " "}), r"no row .*: 2 empty"),
    "less than a block": ("a.jsonl", lines({"text": "red"}), "less than one block of 32 tokens"),
    "a line of many pieces": (
        "a.jsonl.gz",
        gzip.compress(lines(*({"text": f"{i} " + "word " * 40} for i in range(5000)), b"{broken")),
        "line 5001: broken json",
    ),
}

TEXT, CHAT = (RowSpec(kind, "auto", True, None, "none", 200_000) for kind in ("text", "instruct"))
LINES = RowSpec("text", "lines", False, None, "none", 200_000)

# name: (content, spec, rows that are rejected by reason)
COUNTED: dict[str, tuple[bytes, RowSpec, dict[str, int]]] = {
    "bad UTF-8 in a line": (among(b'{"text": "\xff\xfe"}'), TEXT, {"bad_utf8": 1}),
    "bad UTF-8 in text": ("\n".join(texts(9)).encode() + b"\nbad \xe9 line", LINES, {"bad_utf8": 1}),
    "half a surrogate pair": (among(b'{"text": "\\ud83d"}'), TEXT, {"bad_utf8": 1}),
    "NUL bytes": (among({"text": "a\x00b"}), TEXT, {"control_characters": 1}),
    "escape sequences": (among({"text": "\x1b[31mred"}), TEXT, {"control_characters": 1}),
    "control before half a pair": (among(b'{"text": "\\u0007\\ud83d"}'), TEXT, {"control_characters": 1}),
    "replacement characters": (among({"text": "caf\ufffd"}), TEXT, {"replacement_characters": 1}),
    "empty text": (among({"text": ""}), TEXT, {"empty": 1}),
    "white text": (among({"text": " \n\t "}), TEXT, {"empty": 1}),
    "no letters": (among({"text": "*** --- ***"}), TEXT, {"no_letters": 1}),
    "one sign repeated": (among({"text": "a" * 500}), TEXT, {"repetitive": 1}),
    "longer than max_chars": (among({"text": "many words " * 20_000}), TEXT, {"too_long": 1}),
    "far longer than max_chars": (among({"text": "many words " * 80_000}), TEXT, {"too_long": 1}),
    "byte order mark": (b"\xef\xbb\xbf" + lines(*GOOD), TEXT, {}),
    "Windows line ends": (lines(*GOOD, ending="\r\n"), TEXT, {}),
    "NaN and extra columns": (among(b'{"text": "fine words", "score": NaN}'), TEXT, {}),
    "an endless integer": (among(b'{"text": "x", "n": ' + b"9" * 6000 + b"}"), TEXT, {"broken_json": 1}),
    "not objects": (
        lines(*GOOD, b"{", [1], {"body": 1}, {"text": 2}),
        TEXT,
        {"broken_json": 1, "not_an_object": 1, "missing_column": 1, "wrong_type": 1},
    ),
    **{
        name: (lines(*alpaca_rows(9), row), CHAT, {reason: 1} if reason else {})
        for name, (row, reason) in {
            "assistant first": (talk(("assistant", "a"), ("user", "b")), "bad_roles"),
            "two users in a row": (talk(("user", "a"), ("user", "b"), ("assistant", "c")), "bad_roles"),
            "no answer": (talk(("user", "a")), "bad_roles"),
            "unknown role": (talk(("user", "a"), ("tool", "b")), "bad_roles"),
            "no messages": ({"messages": []}, "bad_roles"),
            "empty answer": (talk(("user", "a"), ("assistant", " ")), "empty_response"),
            "empty question": (talk(("user", ""), ("assistant", "a")), "empty_instruction"),
            "NUL in an answer": (talk(("user", "a"), ("assistant", "\x00")), "control_characters"),
            "null Alpaca input": ({"instruction": "a", "input": None, "output": "b"}, ""),
            "messages are text": ({"messages": "hello"}, "wrong_type"),
            "a message is text": ({"messages": ["hello"]}, "wrong_type"),
            "content is null": (talk(("user", "a"), ("assistant", None)), "wrong_type"),
            "role is null": ({"messages": [{"role": None, "content": "a"}]}, "wrong_type"),
            "no role": ({"messages": [{"content": "a"}]}, "missing_column"),
            "numeric output": ({"instruction": "a", "output": 4}, "wrong_type"),
            "no instruction": ({"ask": "a", "output": "b"}, "missing_column"),
        }.items()
    },
}


def fails(tmp_path: Path, message: str, **data: Any) -> None:
    """Preparing fails with one line, and leaves no data set that training would take."""
    with pytest.raises(UserError, match=message) as caught:
        run(data_config(tmp_path, **({"sources": [{"files": "a.*"}]} | data)))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500
    assert not list(tmp_path.rglob("manifest.json"))


@pytest.mark.parametrize("case", ERRORS)
def test_broken_files_give_one_line(tmp_path: Path, case: str) -> None:
    name, content, message = ERRORS[case]
    (tmp_path / name).write_bytes(content)
    fails(tmp_path, message)


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
    config = data_config(tmp_path, sources=[{"files": "a.*"}], strict=False, max_chars=100_000)
    run(config)
    rejected = Plan.load(config.dir / "plan.parquet").summary["rejected"]
    assert rejected == {"broken_json": 1, "duplicate": 9, "too_long": 2}


SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "two origins": ({"sources": [{"files": "a.*", "hub": "x/y"}]}, "exactly one of hub, files, embedded"),
    "unknown key": ({"sources": [{"file": "a.*"}]}, "unknown key data.sources.0.file"),
    "block of one": ({"sequence_len": 1}, "data.sequence_len"),
    "weight of nothing": ({"sources": [{"files": "a.*", "weight": 0}]}, "weight"),
    "two validations": (
        {"validation": [{"files": "a.*"}], "validation_fraction": 0.1},
        "validation or validation_fraction, not both",
    ),
    "two tokenizers": (
        {"train_tokenizer": 300, "tokenizer": "x"},
        "exactly one of tokenizer and train_tokenizer",
    ),
    "text rows for instruct": ({"kind": "instruct"}, "for plain text set data.kind=text"),
    "json as paragraphs": (
        {"sources": [{"files": "a.*", "format": "paragraphs"}]},
        "format paragraphs is for text files",
    ),
    "no test rows": ({"contamination": "nowhere"}, "has no <task>/test.jsonl"),
    "a web page of the hub": ({"sources": [{"hub": "https://x/y"}]}, "is an address"),
    "a directory": ({"sources": [{"files": "."}]}, r"it is a directory; write \./\*\.jsonl"),
    "output is a file": ({"dir": __file__}, "cannot be written: it is a file; set another data.dir"),
    "output not writable": ({"dir": "/proc/x/y"}, "data.dir=/proc/x/y cannot be written: No such"),
    "nothing of its own to validate on": (
        {"validation": [{"files": "a.*"}]},
        r"validation set is empty: .*9 dup",
    ),
    "too small a share to validate on": ({"validation_fraction": 1e-9}, "=1e-09 takes no row"),
    "so large a share that nothing is left": (
        {"validation_fraction": 1 - 1e-12},
        r"no row is left to train on: data.validation_fraction=0.9{12} takes all 9 of them",
    ),
    "hub without network": ({"sources": [{"hub": "no-such/data-set"}]}, "data-set cannot be loaded"),
    "tokenizer without network": ({"tokenizer": "no-such/model"}, "neither a local path nor reachable"),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_settings_that_cannot_work_give_one_line(tmp_path: Path, case: str) -> None:
    data, message = SETTINGS[case]
    (tmp_path / "a.jsonl").write_bytes(lines(*GOOD))
    fails(tmp_path, message, **data)


@pytest.mark.parametrize(
    "wrong",
    [
        {"tokenizer": "not/there/at/all"},
        {"contamination": "not/there/at/all"},
        {"sources": [{"files": "a.*"}, {"hub": "no-such/data-set"}]},
    ],
)
def test_names_are_looked_up_before_the_scan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: dict[str, Any]
) -> None:
    """What may be misspelt is found wrong before hours of reading."""
    (tmp_path / "a.jsonl").write_bytes(lines(*GOOD))
    monkeypatch.setattr("emo.data_prep.planning.scan_unit", lambda *_: pytest.fail("scanned first"))
    fails(tmp_path, "not exist|neither|has no <task>|cannot be loaded", **wrong)


def test_files_that_come_and_go_between_jobs(tmp_path: Path) -> None:
    """A file that vanished, and one that is new and would shift the others."""
    for name in ("b.jsonl", "c.jsonl"):
        (tmp_path / name).write_bytes(lines(*({"text": f"{name} {text}"} for text in texts(60))))
    config = data_config(tmp_path, sources=[{"files": "*.jsonl"}])
    run(config, shard=(0, 2))
    (tmp_path / "a.jsonl").write_bytes(lines(*GOOD))
    with pytest.raises(UserError) as caught:
        run(config, shard=(1, 2))
    assert caught.value.code == "source-new"
    (tmp_path / "a.jsonl").unlink()
    (tmp_path / "b.jsonl").rename(tmp_path / "b")
    with pytest.raises(UserError) as caught:
        run(config, shard=(1, 2))
    assert caught.value.code == "source-gone"
    (tmp_path / "b").rename(tmp_path / "b.jsonl")
    run(config, shard=(1, 2))


def test_other_files_of_another_form(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"words\n" * 9)
    fails(tmp_path, "is plain text", kind="instruct")
    pyarrow.parquet.write_table(pa.table({"body": ["a", "b"]}), tmp_path / "b.parquet")
    fails(tmp_path, r"b.parquet row 1: missing column", sources=[{"files": "b.parquet"}])
