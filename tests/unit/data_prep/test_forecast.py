"""The costs of preparation are predicted, and printed next to the measured costs."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from emo.__main__ import main
from emo.data_prep.checks import planned_inputs
from emo.data_prep.forecast import Sample, _predict, print_forecast
from emo.data_prep.shards.cost_table import cost_tables
from tests.helpers.corpus import alpaca_rows, data_config, run, texts, tiny_tokenizer, write_jsonl
from tests.helpers.refusals import refused


@pytest.mark.parametrize("kind", ["text", "instruct"])
def test_a_forecast_knows_the_rows_and_what_was_measured(tmp_path: Path, kind: str) -> None:
    write_jsonl(tmp_path / "a.jsonl", texts(250) if kind == "text" else alpaca_rows(250))
    write_jsonl(tmp_path / "b.jsonl", texts(40) if kind == "text" else alpaca_rows(40))
    config = data_config(tmp_path, kind=kind, sequence_len=128, sources=[{"files": "*.jsonl"}])
    lines: list[str] = []
    print_forecast(config, 2, 3, lines.append)
    _, part, _, total, *_ = lines[0].split()
    assert float(part) <= float(total)
    rows = int(lines[0].split()[-2].replace(",", ""))
    assert 220 < rows < 360 and lines[1].startswith("on 2 machines with 3 processes each")
    assert [line.split()[0] for line in lines[2:]] == [
        "reading:",
        "selection:",
        "shards:",
        "total:",
        "CPU:",
        "memory:",
    ]
    assert not any("measured" in line for line in lines)
    run(config)
    recipes = [{"data": {"dir": str(config.dir)}}] * 2
    (table,) = cost_tables([{}, *recipes])
    shown = {str(name): texts for name, *texts in table.rows}
    assert shown["Jobs"] == ["2", "1"] and shown["Processes per job"] == ["3", "1"]
    assert shown["Rows read"] == [f"{rows:,}", "290"] and all(map(all, shown.values()))
    predicted, measured = (int(text.replace(",", "")) for text in shown["Tokens"])
    assert 0.7 * measured < predicted < 1.3 * measured
    (config.dir / "settings.json").write_text("{}")
    assert {predicted for _, predicted, _ in cost_tables(recipes)[0].rows} == {None}
    (config.dir / "costs-0-of-1.json").unlink()
    assert not cost_tables(recipes)[0]


def test_a_forecast_is_printed_next_to_what_was_measured(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", texts(50))
    config = data_config(tmp_path, sources=[{"files": "a.jsonl"}])
    run(config)
    lines: list[str] = []
    print_forecast(config, 2, 3, lines.append)
    assert sum("measured" in line for line in lines) == 6
    (other := tmp_path / "other").mkdir()
    (other / "notes").touch()
    print_forecast(config.model_copy(update={"dir": other}), 2, 3, lines.append)
    assert "because data.dir=" in lines[-1] and len(list(other.iterdir())) == 1


@pytest.mark.parametrize("rows", [1, 20_000])
def test_the_size_of_a_file_is_no_limit(tmp_path: Path, rows: int) -> None:
    write_jsonl(tmp_path / "a.jsonl", (texts(100) * (rows // 100 + 1))[:rows])
    lines: list[str] = []
    print_forecast(data_config(tmp_path, sources=[{"files": "a.jsonl"}]), 1, 1, lines.append)
    assert 0.8 * rows <= int(lines[0].split()[-2].replace(",", "")) <= 1.2 * rows


def test_a_forecast_needs_a_tokenizer(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", texts(50))
    with refused("forecast"):
        print_forecast(data_config(tmp_path, tokenizer=None, train_tokenizer=300), 1, 1, print)


def test_plan_data_is_a_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_jsonl(tmp_path / "a.jsonl", texts(50))
    recipe = tmp_path / "recipe.yaml"
    places = f"dir: {tmp_path}/out, root: {tmp_path}, tokenizer: {tiny_tokenizer()}"
    recipe.write_text(f"data: {{{places}, sources: [{{files: a.jsonl}}]}}")
    assert main(["plan", "--data", str(recipe), "--machines", "2"]) == 0
    assert "on 2 machines" in capsys.readouterr().out


def test_a_large_compressed_file_is_read_ahead(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = (
        json.dumps({"text": " ".join(row)}) + "\n"
        for row in rng.integers(0, 1 << 40, (30_000, 8)).astype(str)
    )
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress("".join(rows).encode(), 1))
    lines: list[str] = []
    print_forecast(data_config(tmp_path, sources=[{"files": "a.jsonl.gz"}]), 1, 1, lines.append)
    assert 0.9 * 30_000 <= int(lines[0].split()[-2].replace(",", "")) <= 1.1 * 30_000


def test_machines_do_not_share_a_compressed_file_or_a_shard(tmp_path: Path) -> None:
    for name, count in (("a", 3000), ("b", 1000)):
        rows = "".join(json.dumps({"text": text}) + "\n" for text in texts(count))
        (tmp_path / f"{name}.jsonl.gz").write_bytes(gzip.compress(rows.encode()))
    sources = [{"files": f"{name}.jsonl.gz", "limit": 9000} for name in "ab"]
    config = data_config(tmp_path, sources=sources, shards=4)
    inputs = planned_inputs(config)
    one, three = (_predict(config, inputs, Sample(1, 10, 10, 1, 1, 1), n, 1) for n in (1, 3))
    assert three.shards == pytest.approx(one.shards / 2)
    assert three.reading / one.reading == pytest.approx(inputs[0].size / sum(each.size for each in inputs))


def test_a_small_compressed_file_has_a_forecast(tmp_path: Path) -> None:
    """The file is read at once, so its stored bytes have to be divided among its pieces."""
    rows = "".join(json.dumps({"text": text}) + "\n" for text in texts(400) * 20)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(rows.encode()))
    lines: list[str] = []
    print_forecast(data_config(tmp_path, sources=[{"files": "a.jsonl.gz"}]), 1, 2, lines.append)
    assert int(lines[0].split()[-2].replace(",", "")) > 400


def test_a_large_json_array_has_a_forecast(tmp_path: Path) -> None:
    """The sample is a part of the rows, although the file is read at once."""
    (tmp_path / "a.json").write_text(json.dumps([{"text": f"number {i}"} for i in range(20_000)]))
    lines: list[str] = []
    print_forecast(data_config(tmp_path, sources=[{"files": "a.json"}]), 1, 1, lines.append)
    assert 0.9 * 20_000 <= int(lines[0].split()[-2].replace(",", "")) <= 1.1 * 20_000


def test_sources_of_unknown_size_have_no_forecast(tmp_path: Path) -> None:
    config = data_config(tmp_path, sources=[{"hub": "nobody/nothing"}])
    with refused("forecast"):
        print_forecast(config, 1, 1, str)
