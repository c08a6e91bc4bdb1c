"""How far reading and tokenising are, in bytes, and the last line, which says what is not in the data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest
import zstandard

from emo.data_prep.encode import PartStream
from emo.data_prep.sources import open_inputs
from emo.data_prep.verify import load_plan
from tests.helpers.corpus import alpaca_rows, data_config, run, texts, write_jsonl

ROWS = [{"text": text} for text in texts(6000)]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.zst", "a.csv", "a.parquet"])
def test_what_is_read_and_tokenised_is_told_in_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Never less than before, part of it on the way, and all of it in the end."""
    path, text = tmp_path / name, write_jsonl(tmp_path / "b.txt", ROWS).read_bytes()
    path.write_bytes(zstandard.compress(text) if name.endswith("zst") else text)
    if name == "a.csv":
        path.write_text("text\n" + "".join(f"{row['text']}\n" for row in ROWS))
    if name == "a.parquet":
        pyarrow.parquet.write_table(pa.Table.from_pylist(ROWS), path)
    write_jsonl(tmp_path / "b.jsonl", [{"text": "another file"}])
    config = data_config(tmp_path, sources=[{"files": name}, {"files": "b.jsonl"}], validation_fraction=0.1)
    inputs = open_inputs(config)
    size = path.stat().st_size
    told: list[int] = []
    sizes = []

    @contextmanager
    def telling(_: str, total: int, __: object) -> Iterator[Callable[[int], None]]:
        sizes.append(total)
        yield told.append

    monkeypatch.setattr("emo.data_prep.planning.progress", telling)
    run(config)
    assert sizes == told[-1:]
    assert told == sorted(told) and told[-1] == size + (tmp_path / "b.jsonl").stat().st_size
    if not name.endswith("zst"):  # it is small once it is packed
        assert any(0.2 * size < done < 0.8 * size for done in told)
    stream = PartStream(load_plan(config), inputs, list(range(4)))
    told.clear()
    list(stream.parts(told.append))
    assert told == sorted(told) and told[-1] == stream.size() > 0
    if name.startswith("a.jsonl"):
        assert stream.size() >= len(text)


def test_the_last_line_says_what_is_not_there(tmp_path: Path) -> None:
    """Of every job, again when all is there, and with nothing to say as well."""
    talk = [{"from": "gpt", "value": "x"}, {"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    rows = [*alpaca_rows(60), *alpaca_rows(5), {"instruction": "q", "output": " "}, {"conversations": talk}]
    write_jsonl(tmp_path / "a.jsonl", rows)
    config = data_config(
        tmp_path, kind="instruct", sequence_len=150, overlong="drop", sources=[{"files": "a.jsonl"}]
    )
    first, second, again = run(config, shard=(0, 2))[-1], run(config, shard=(1, 2))[-1], run(config)[-1]
    for line in (first, second, again):
        assert "6 rows (" in line and "5 duplicate" in line and "1 empty response" in line
        assert "1 message before the first prompt or after the last response" in line
        assert "examples are longer than 150 tokens" in line
    assert second == again != first
    write_jsonl(tmp_path / "b.jsonl", alpaca_rows(9))
    config = data_config(
        tmp_path, dir=str(tmp_path / "b"), kind="instruct", sequence_len=512, sources=[{"files": "b.jsonl"}]
    )
    assert run(config)[-1] == f"{config.dir}: cut or dropped: nothing"
