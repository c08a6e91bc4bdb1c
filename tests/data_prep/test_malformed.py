"""Bad input: every case ends in one clear line, or in a rejection that is counted by its reason."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import zstandard

from emo.common.errors import UserError
from emo.data_prep.plan import Plan
from emo.data_prep.rows import Rejected, RowSpec, parse
from tests.helpers.corpus import alpaca_rows, data_config, prepared, run, texts

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


ERRORS: dict[str, tuple[str, bytes]] = {
    "broken JSON on line 7 of 10": ("a.jsonl", among(b'{"text": "cut of')),
    "a JSON list as row": ("a.jsonl", among(["text"])),
    "missing column": ("a.jsonl", among({"body": "x"})),
    "null for text": ("a.jsonl", among({"text": None})),
    "nested too deep": ("a.jsonl", among(b"[" * 200_000)),
    "empty file": ("a.jsonl", b""),
    "no such file": ("other.jsonl", lines(*GOOD)),
    "unknown ending": ("a.docx", lines(*GOOD)),
    "UTF-16": ("a.txt", "some words\n".encode("utf-16")),
    "truncated zstd": ("a.jsonl.zst", zstandard.compress(lines(*GOOD))[:-40]),
    "truncated gzip": ("a.txt.gz", gzip.compress(b"word " * 999)[:-12]),
    "garbage named parquet": ("a.parquet", b"PAR1 no PAR1"),
    "broken JSON array": ("a.json", b'[{"text": "a"},\n{"text": '),
    "object with two arrays": ("a.json", b'{"a": [],\n"b": []}'),
    "one array": ("a.jsonl", b'[{"text": "a"}]'),
    "nothing usable": ("a.jsonl", lines({"text": ""}, {"text": " "})),
    "less than a block": ("a.jsonl", lines({"text": "red"})),
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
            "no answer": (talk(("user", "a")), "bad_roles"),
            "empty answer": (talk(("user", "a"), ("assistant", " ")), "empty_response"),
            "empty question": (talk(("user", ""), ("assistant", "a")), "empty_instruction"),
            "NUL in an answer": (talk(("user", "a"), ("assistant", "\x00")), "control_characters"),
            "null Alpaca input": ({"instruction": "a", "input": None, "output": "b"}, ""),
            "a message is text": ({"messages": ["hello"]}, "wrong_type"),
            "role is null": ({"messages": [{"role": None, "content": "a"}]}, "wrong_type"),
            "no role": ({"messages": [{"content": "a"}]}, "missing_column"),
            "numeric output": ({"instruction": "a", "output": 4}, "wrong_type"),
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
    "two origins": {"sources": [{"files": "a.*", "hub": "x/y"}]},
    "two validations": {"validation": [{"files": "a.*"}], "validation_fraction": 0.1},
    "two tokenizers": {"train_tokenizer": 300, "tokenizer": "x"},
    "text rows for instruct": {"kind": "instruct"},
    "json as paragraphs": {"sources": [{"files": "a.*", "format": "paragraphs"}]},
    "columns of another kind": {"sources": [{"files": "a.*", "columns": {"output": "text"}}]},
    "no test rows": {"contamination": "nowhere"},
    "a directory": {"sources": [{"files": "."}]},
    "output not writable": {"dir": "/proc/x/y"},
    "nothing of its own to validate on": {"validation": [{"files": "a.*"}]},
    "too small a share to validate on": {"validation_fraction": 1e-9},
    "so large a share that nothing is left": {"validation_fraction": 1 - 1e-12},
    "a set that is a path": {"validation": {"../x": [{"files": "a.*"}]}},
    "sets that differ in case alone": {"validation": {"A": [{"files": "a.*"}], "a": [{"files": "a.*"}]}},
    "hub without network": {"sources": [{"hub": "no-such/data-set"}]},
    "tokenizer without network": {"tokenizer": "no-such/model"},
}


@pytest.mark.parametrize("case", SETTINGS)
def test_settings_that_cannot_work_give_one_line(tmp_path: Path, case: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(*GOOD))
    fails(tmp_path, **SETTINGS[case])


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
