"""Files as sources: which are read, that they stay what they were, and how text begins and ends in them."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from emo.common.errors import UserError
from emo.data_prep import inputs
from emo.data_prep.rows import parse
from emo.data_prep.sources import open_inputs
from tests.helpers.corpus import data_config, run, texts, train_set, write_jsonl


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


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.txt", "a.csv", "a.json", "a.parquet"])
@pytest.mark.parametrize("moment", ["before it is hashed", "while it is hashed", "touched"])
def test_a_file_that_changes_as_it_is_read_is_refused(
    tmp_path: Path, name: str, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifest vouches for the bytes that were read, and for no others."""
    path = put(tmp_path / name, texts(60))
    real = inputs.file_identity

    def changing(file: Path) -> dict[str, Any]:
        if moment == "touched":
            os.utime(path)
        if moment == "before it is hashed":
            put(path, texts(70))
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


def test_a_file_that_grows_between_two_pieces_is_refused(tmp_path: Path) -> None:
    put(tmp_path / "a.jsonl", texts(9000))
    (one,) = open_inputs(data_config(tmp_path, sources=[{"files": "a.jsonl"}]))
    pieces = one.pieces()
    next(pieces)
    with (tmp_path / "a.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"text": "more"}\n')
    with pytest.raises(UserError) as error:
        list(pieces)
    assert error.value.code == "source-changed"


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


def test_an_empty_file_among_others(tmp_path: Path) -> None:
    """An error that names it, or passed over as other things that are broken are."""
    put(tmp_path / "a.jsonl", texts(60))
    (tmp_path / "b.jsonl").touch()
    with pytest.raises(UserError) as error:
        run(data_config(tmp_path, sources=[{"files": "*.jsonl"}]))
    assert error.value.code == "empty-file"
    config = data_config(tmp_path, sources=[{"files": "*.jsonl"}], strict=False)
    run(config)
    assert [source["name"] for source in train_set(config).manifest.sources] == ["a.jsonl"]
    with pytest.raises(UserError) as error:
        run(data_config(tmp_path, sources=[{"files": "b.jsonl"}], strict=False, dir=str(tmp_path / "b")))
    assert error.value.code == "empty-file"


def test_files_without_rows_are_passed_over_unless_strict(tmp_path: Path) -> None:
    """Refused by default: blank lines, and nothing in a packed file."""
    write_jsonl(tmp_path / "a1.jsonl", ({"text": text} for text in texts(60)))
    (tmp_path / "a2.jsonl").write_text("\n \n\n", encoding="utf-8")
    (tmp_path / "a3.jsonl.gz").write_bytes(gzip.compress(b""))
    sources = [{"files": "a*"}]
    with pytest.raises(UserError) as error:
        run(data_config(tmp_path, sources=sources))
    assert error.value.code == "no-rows"
    config = data_config(tmp_path, sources=sources, strict=False)
    run(config)
    assert [source["rows"] for source in train_set(config).manifest.sources] == [60, 0, 0]


def test_files_beyond_a_limit_are_not_read(tmp_path: Path) -> None:
    """They have no hash, may be changed afterwards, and need not even hold rows."""
    write_jsonl(tmp_path / "a1.jsonl", ({"text": text} for text in texts(60)))
    write_jsonl(tmp_path / "a2.jsonl", ({"text": text} for text in texts(60)))
    (tmp_path / "a3.jsonl").write_text("\n\n", encoding="utf-8")
    config = data_config(tmp_path, sources=[{"files": "a*", "limit": 60}])
    run(config)
    first, *others = train_set(config).manifest.sources
    assert first["rows"] == 60 and "sha256" in first
    assert all(source["rows"] == 0 and "sha256" not in source for source in others)
    (tmp_path / "a3.jsonl").write_text("broken", encoding="utf-8")
    assert "already prepared" in "".join(run(config))


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


@pytest.mark.parametrize("overlong", ["drop", "truncate"])
def test_rows_without_tokens_go_to_no_other_split(tmp_path: Path, overlong: str) -> None:
    """limit_tokens deals rows by tokens: those that come to nothing stay in training, wherever they are."""
    rows = [{"instruction": f"q{i}", "output": text} for i, text in enumerate(texts(60))]
    rows += [{"instruction": f"q{i}", "output": "much longer " * 80} for i in range(60, 75)]
    write_jsonl(tmp_path / "a.jsonl", rows)
    held = [{"instruction": f"v{i}", "output": text} for i, text in enumerate(texts(20, seed=5))]
    write_jsonl(tmp_path / "v.jsonl", held)
    config = data_config(
        tmp_path,
        kind="instruct",
        template="chat",
        sequence_len=150,
        overlong=overlong,
        limit_tokens=10**6,
        sources=[{"files": "a.jsonl"}],
        validation=[{"files": "v.jsonl"}],
    )
    run(config)
    train = train_set(config).manifest
    validation = type(train_set(config))(config.dir / "validation").manifest
    assert (train.documents, validation.documents) == (75, 20)
    assert validation.counts.get("overlong", 0) == 0 and train.counts["overlong"] == 15
