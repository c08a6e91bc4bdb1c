"""Bad input: every case ends in one clear line, or in a rejection that is counted by its reason."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
import zstandard

from common.errors import UserError
from data_prep.inputs import open_text
from data_prep.scan.assignment import Assignment
from tests.helpers.corpus import alpaca_rows, data_config, run, texts

GOOD = [{"text": text} for text in texts(9)]


def lines(*rows: Any, ending: str = "\n") -> bytes:
    """Rows as JSON lines; a row that is bytes is taken as it is."""
    done = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    return b"".join(row + ending.encode() for row in done)


def among(row: Any, at: int = 6) -> bytes:
    """Ten lines, one of them (line 7 unless told) the given row."""
    return lines(*GOOD[:at], row, *GOOD[at:])


def talk(*turns: tuple[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


# name: (file, content, what the error says)
ERRORS: dict[str, tuple[str, bytes, str]] = {
    "broken JSON on line 7 of 10": ("a.jsonl", among(b'{"text": "cut of'), r"a.jsonl line 7: broken json \("),
    "broken line after blank lines": ("a.jsonl", b"\n\n" + among(b"{"), r"line 9: broken json"),
    "a JSON list as row": ("a.jsonl", among(["text"]), r"line 7: not an object .*not list"),
    "a number as row": ("a.jsonl", among(b"17"), r"line 7: not an object .*not int"),
    "missing column": (
        "a.jsonl",
        among({"body": "x"}),
        r"line 7: missing column .*no column text, content, sentence, document or story; there are: body",
    ),
    "empty object": ("a.jsonl", among({}), r"missing column .*there are: none"),
    "number for text": ("a.jsonl", among({"text": 3}), r"wrong type \(column text must be text, not int\)"),
    "null for text": ("a.jsonl", among({"text": None}), "must be text, not null"),
    "list for text": ("a.jsonl", among({"text": ["a"]}), "must be text, not list"),
    "nested too deep": ("a.jsonl", among(b"[" * 200_000), "broken json"),
    "empty file": ("a.jsonl", b"", "a.jsonl is empty"),
    "only blank lines": ("a.jsonl", b"\n \n\n", "a.jsonl has no rows"),
    "no such file": ("other.jsonl", lines(*GOOD), r"no file matches .*a\.\*"),
    "unknown ending": ("a.docx", lines(*GOOD), r"a\.docx has none of the known endings"),
    "UTF-16": (
        "a.txt",
        "some words\n".encode("utf-16"),
        r"a.txt is UTF-16, not UTF-8; convert it: iconv -f UTF-16 -t UTF-8",
    ),
    "UTF-32": (
        "a.txt",
        "some words\n".encode("utf-32"),
        r"a.txt is UTF-32, not UTF-8; convert it: iconv -f UTF-32 -t UTF-8",
    ),
    "UTF-32, big end first": ("a.txt", b"\0\0\xfe\xff" + "some".encode("utf-32-be"), "a.txt is UTF-32"),
    "truncated zstd": ("a.jsonl.zst", zstandard.compress(lines(*GOOD))[:-40], "cannot be unpacked"),
    "garbage named zst": ("a.jsonl.zst", b"not zstd at all", "cannot be unpacked"),
    "truncated gzip": ("a.txt.gz", gzip.compress(b"word " * 999)[:-12], "cannot be unpacked"),
    "garbage named parquet": ("a.parquet", b"PAR1 no PAR1", "not readable as parquet"),
    "packed parquet": ("a.parquet.zst", zstandard.compress(b"x"), "parquet is packed inside"),
    "broken JSON array": ("a.json", b'[{"text": "a"},\n{"text": ', "a.json is not JSON"),
    "a JSON string": ("a.json", b'"text"', "not an object"),
    "object with two arrays": ("a.json", b'{"a": [],\n"b": []}', "must be an array of rows"),
    "empty array": ("a.json", b"[]", "a.json has no rows"),
    "nothing usable": ("a.jsonl", lines({"text": ""}, {"text": " "}), r"no row .*: 2 empty"),
    "less than a block": (
        "a.jsonl",
        lines({"text": "red"}),
        "less than one block of 32 tokens in every shard; set a smaller",
    ),
}

# name: (content of a.jsonl or a.txt, rows that are rejected by reason)
COUNTED: dict[str, tuple[str, bytes, dict[str, int]]] = {
    "bad UTF-8 in a line": ("a.jsonl", among(b'{"text": "\xff\xfe"}'), {"bad_utf8": 1}),
    "bad UTF-8 in text": ("a.txt", "\n".join(texts(9)).encode() + b"\nbad \xe9 line", {"bad_utf8": 1}),
    "half a surrogate pair": ("a.jsonl", among(b'{"text": "\\ud83d"}'), {"bad_utf8": 1}),
    "NUL bytes": ("a.jsonl", among({"text": "a\x00b"}), {"control_characters": 1}),
    "escape sequences": ("a.jsonl", among({"text": "\x1b[31mred"}), {"control_characters": 1}),
    "replacement characters": ("a.jsonl", among({"text": "caf\ufffd"}), {"replacement_characters": 1}),
    "empty text": ("a.jsonl", among({"text": ""}), {"empty": 1}),
    "white text": ("a.jsonl", among({"text": " \n\t "}), {"empty": 1}),
    "no letters": ("a.jsonl", among({"text": "*** --- ***"}), {"no_letters": 1}),
    "one sign repeated": ("a.jsonl", among({"text": "a" * 500}), {"repetitive": 1}),
    "a line of 50 MB": ("a.jsonl", among({"text": "long line " * 5_000_000}), {"too_long": 1}),
    "a last line of 50 MB": ("a.jsonl", among({"text": "long line " * 5_000_000}, at=9), {"too_long": 1}),
    "longer than max_chars": ("a.jsonl", among({"text": "many words " * 1_200_000}), {"too_long": 1}),
    "duplicate rows": ("a.jsonl", lines(*GOOD, *GOOD), {"duplicate": 9}),
    "duplicate ids do not matter": ("a.jsonl", lines(*({"id": 1, **row} for row in GOOD)), {}),
    "byte order mark": ("a.jsonl", b"\xef\xbb\xbf" + lines(*GOOD), {}),
    "Windows line ends": ("a.jsonl", lines(*GOOD, ending="\r\n"), {}),
    "no last line end": ("a.jsonl", lines(*GOOD)[:-1], {}),
    "NaN and extra columns": ("a.jsonl", among(b'{"text": "fine words", "score": NaN}'), {}),
}

CHAT: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "assistant first": (talk(("assistant", "a"), ("user", "b")), {"bad_roles": 1}),
    "two users in a row": (talk(("user", "a"), ("user", "b"), ("assistant", "c")), {"bad_roles": 1}),
    "no answer": (talk(("user", "a")), {"bad_roles": 1}),
    "unknown role": (talk(("user", "a"), ("tool", "b")), {"bad_roles": 1}),
    "no messages": ({"messages": []}, {"bad_roles": 1}),
    "empty answer": (talk(("user", "a"), ("assistant", " ")), {"empty_response": 1}),
    "empty question": (talk(("user", ""), ("assistant", "a")), {"empty_instruction": 1}),
    "ShareGPT names": (
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
        {},
    ),
    "empty Alpaca output": ({"instruction": "a", "output": ""}, {"empty_response": 1}),
    "null Alpaca input": ({"instruction": "a", "input": None, "output": "b"}, {}),
    "NUL in an answer": (talk(("user", "a"), ("assistant", "\x00")), {"control_characters": 1}),
}

CHAT_ERRORS: dict[str, tuple[Any, str]] = {
    "messages are text": (
        {"messages": "hello"},
        "line 10: wrong type .*column messages must be text|messages",
    ),
    "a message is text": ({"messages": ["hello"]}, "wrong type"),
    "content is a list": (
        talk(("user", ["a"]), ("assistant", "b")),
        r"column messages\[0\].content must be text, not str",
    ),
    "content is null": (
        talk(("user", "a"), ("assistant", None)),
        r"wrong type \(column messages\[1\].content must be text, not null\)",
    ),
    "role is null": (
        {"messages": [{"role": None, "content": "a"}]},
        r"column messages\[0\].role must be text, not null",
    ),
    "no role": ({"messages": [{"content": "a"}]}, "missing column .*role and content"),
    "no output": (
        {"instruction": "a", "response_text": "b"},
        r"missing column \(no column output, response, completion or answer",
    ),
    "numeric output": ({"instruction": "a", "output": 4}, "column output must be text, not int"),
    "no instruction": (
        {"ask": "a", "output": "b"},
        "no column instruction, prompt, question or query; there are: ask",
    ),
}


def put(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)


def fails(tmp_path: Path, message: str, **data: Any) -> None:
    """Preparing fails with one line, and leaves no data set that training would take."""
    with pytest.raises(UserError, match=message) as caught:
        run(data_config(tmp_path, **({"sources": [{"files": "a.*"}]} | data)))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500
    assert not list(tmp_path.rglob("manifest.json"))


def rejected(tmp_path: Path, **data: Any) -> dict[str, int]:
    """Prepare, and what was rejected."""
    config = data_config(tmp_path, **({"sources": [{"files": "a.*"}]} | data))
    run(config)
    return Assignment.load(config.dir / "plan.parquet").summary["rejected"]


@pytest.mark.parametrize("case", ERRORS)
def test_broken_files_give_one_line(tmp_path: Path, case: str) -> None:
    name, content, message = ERRORS[case]
    put(tmp_path, name, content)
    fails(tmp_path, message)


@pytest.mark.parametrize("case", COUNTED)
def test_useless_rows_are_counted(tmp_path: Path, case: str) -> None:
    name, content, counts = COUNTED[case]
    put(tmp_path, name, content)
    assert rejected(tmp_path) == counts


@pytest.mark.parametrize("case", CHAT)
def test_useless_conversations_are_counted(tmp_path: Path, case: str) -> None:
    row, counts = CHAT[case]
    put(tmp_path, "a.jsonl", lines(*alpaca_rows(9), row))
    assert rejected(tmp_path, kind="instruct", block=128) == counts


@pytest.mark.parametrize("case", CHAT_ERRORS)
def test_conversations_of_another_structure_give_one_line(tmp_path: Path, case: str) -> None:
    row, message = CHAT_ERRORS[case]
    put(tmp_path, "a.jsonl", lines(*alpaca_rows(9), row))
    fails(tmp_path, message, kind="instruct")


def test_structure_is_counted_when_not_strict(tmp_path: Path) -> None:
    put(tmp_path, "a.jsonl", lines(*GOOD, b"{", [1], {"body": 1}, {"text": 2}))
    counts = {"broken_json": 1, "not_an_object": 1, "missing_column": 1, "wrong_type": 1}
    assert rejected(tmp_path, strict=False) == counts


def test_the_line_of_an_error_is_counted_through_all_pieces(tmp_path: Path) -> None:
    rows = [json.dumps({"text": f"{i} " + "word " * 40}).encode() for i in range(6000)]
    rows[5000] = b"{broken"
    put(tmp_path, "a.jsonl.gz", gzip.compress(b"\n".join(rows)))
    fails(tmp_path, "line 5001: broken json")


SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "two origins": ({"sources": [{"files": "a.*", "hub": "x/y"}]}, "exactly one of hub, files, embedded"),
    "unknown corpus": ({"sources": [{"embedded": "wrld"}]}, "sources.0.embedded"),
    "unknown key": ({"sources": [{"file": "a.*"}]}, "unknown key data.sources.0.file; did you mean files"),
    "no source": ({"sources": []}, "data.sources"),
    "block of one": ({"block": 1}, "data.block"),
    "weight of nothing": ({"sources": [{"files": "a.*", "weight": 0}]}, "weight"),
    "two validations": (
        {"validation": [{"files": "a.*"}], "validation_fraction": 0.1},
        "validation or validation_fraction, not both",
    ),
    "two tokenizers": (
        {"train_tokenizer": 300, "tokenizer": "x"},
        "exactly one of tokenizer and train_tokenizer",
    ),
    "text rows for instruct": (
        {"kind": "instruct"},
        r"\(no column instruction, prompt, question or query; there are: text; for plain text set "
        r"data.kind=text\)",
    ),
    "json as paragraphs": (
        {"sources": [{"files": "a.*", "format": "paragraphs"}]},
        "format paragraphs is for text files",
    ),
    "a column that is not there": (
        {"sources": [{"files": "a.*", "column": "body"}]},
        r"line 1: missing column \(no column body",
    ),
    "no test rows": ({"contamination": "nowhere"}, "has no <task>/test.jsonl"),
    # defects D2
    "no pattern": ({"sources": [{"files": ""}]}, "sources.0.files: String should have at least 1 character"),
    "a web page of the hub": ({"sources": [{"hub": "https://x/y"}]}, "is an address; give the data set's id"),
    "a directory": ({"sources": [{"files": "."}]}, r"it is a directory; write \./\*\.jsonl"),
    "output is a file": ({"dir": __file__}, "cannot be written: it is a file; set another data.dir"),
    "output below a file": ({"dir": f"{__file__}/x"}, "cannot be written: Not a directory"),
    "output not writable": ({"dir": "/proc/x/y"}, "data.dir=/proc/x/y cannot be written: No such"),
    "nothing of its own to validate on": (
        {"validation": [{"files": "a.*"}]},
        r"validation set is empty: its sources have no usable row of their own \(9 duplicate\)",
    ),
    "too small a share to validate on": (
        {"validation_fraction": 1e-9},
        "validation set is empty: data.validation_fraction=1e-09 takes no row",
    ),
    "so large a share that nothing is left to train on": (
        {"validation_fraction": 1 - 1e-12},
        r"no row is left to train on: data.validation_fraction=0.9{12} takes all 9 of them; set a smaller",
    ),
    "hub without network": (
        {"sources": [{"hub": "no-such/data-set"}]},
        "hub data set no-such/data-set cannot be loaded",
    ),
    "tokenizer without network": ({"tokenizer": "no-such/model"}, "neither a local path nor reachable"),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_settings_that_cannot_work_give_one_line(tmp_path: Path, case: str) -> None:
    data, message = SETTINGS[case]
    put(tmp_path, "a.jsonl", lines(*GOOD))
    fails(tmp_path, message, **data)


@pytest.mark.parametrize("key", ["tokenizer", "contamination"])
def test_names_are_looked_up_before_the_scan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    """defects C3: what may be misspelt is found wrong before hours of reading."""
    put(tmp_path, "a.jsonl", lines(*GOOD))
    monkeypatch.setattr("data_prep.scan.planning.scan_unit", lambda *_: pytest.fail("scanned first"))
    with pytest.raises(UserError, match=r"does not exist|has no <task>"):
        run(data_config(tmp_path, sources=[{"files": "a.*"}], **{key: str(tmp_path / "not/there/at/all")}))


def test_all_sources_are_opened_before_one_is_scanned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """defects C3."""
    put(tmp_path, "a.jsonl", lines(*GOOD))
    monkeypatch.setattr("data_prep.scan.planning.scan_unit", lambda *_: pytest.fail("scanned first"))
    with pytest.raises(UserError, match="hub data set no-such/data-set cannot be loaded"):
        run(data_config(tmp_path, sources=[{"files": "a.*"}, {"hub": "no-such/data-set"}]))


def test_a_misspelt_tokenizer_gets_a_hint(tmp_path: Path) -> None:
    (tmp_path / "tokenizers/llama").mkdir(parents=True)
    put(tmp_path, "a.jsonl", lines(*GOOD))
    fails(tmp_path, r"did you mean .*tokenizers/llama\?", tokenizer=str(tmp_path / "tokenizers/lama"))


def test_validation_of_less_than_a_block(tmp_path: Path) -> None:
    """defects D2: it would be a data set without rows."""
    put(tmp_path, "a.jsonl", lines(*GOOD))
    (tmp_path / "b.txt").write_text("one two")
    with pytest.raises(UserError, match="the validation data are less than one block of 32 tokens"):
        run(data_config(tmp_path, sources=[{"files": "a.*"}], validation=[{"files": "b.txt"}]))
    assert not (tmp_path / "prepared/validation/manifest.json").exists()


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.zst"])
def test_what_cannot_be_opened_gives_one_line(tmp_path: Path, name: str) -> None:
    """defects D2."""
    (tmp_path / name).mkdir()
    with pytest.raises(UserError, match=f"{name} cannot be read: ") as caught:
        open_text(tmp_path / name).read()
    assert "\n" not in str(caught.value)


def test_files_that_come_and_go_between_jobs(tmp_path: Path) -> None:
    """defects D2: a file that vanished, and one that is new and would shift the others."""
    for name in ("b.jsonl", "c.jsonl"):
        put(tmp_path, name, lines(*({"text": f"{name} {text}"} for text in texts(60))))
    config = data_config(tmp_path, sources=[{"files": "*.jsonl"}])
    run(config, shard=(0, 2))
    put(tmp_path, "a.jsonl", lines(*GOOD))
    with pytest.raises(UserError, match=r"^a.jsonl was not there when .* was prepared; take it away, or"):
        run(config, shard=(1, 2))
    (tmp_path / "a.jsonl").unlink()
    (tmp_path / "b.jsonl").rename(tmp_path / "b")
    with pytest.raises(UserError, match=r"^b.jsonl is gone since .* was prepared; put it back, or"):
        run(config, shard=(1, 2))
    (tmp_path / "b").rename(tmp_path / "b.jsonl")
    run(config, shard=(1, 2))


def test_text_files_need_a_text_format(tmp_path: Path) -> None:
    put(tmp_path, "a.txt", b"words\n" * 9)
    fails(tmp_path, "is plain text", kind="instruct")
    fails(tmp_path, "is plain text", sources=[{"files": "a.txt", "format": "alpaca"}])


def test_parquet_without_the_column(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pa.table({"body": ["a", "b"]}), tmp_path / "a.parquet")
    fails(tmp_path, r"a.parquet row 1: missing column \(no column text")
