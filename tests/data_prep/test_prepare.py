"""`prepare`: the same bytes however the work is shared out, and every choice of rows as the recipe says."""

from __future__ import annotations

import gzip
import json
import random
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest
import zstandard

from emo.common.errors import UserError
from emo.data_prep.cli import main
from emo.data_prep.config import DataConfig
from emo.data_prep.plan import Plan
from emo.data_prep.rows import Rejected, parse, plain_text
from emo.data_prep.sources import open_inputs
from tests.helpers.corpus import (
    alpaca_rows,
    data_config,
    file_bytes,
    prepared,
    run,
    sentence,
    texts,
    tiny_tokenizer,
    train_set,
    write_jsonl,
)


def rows_of(config: DataConfig, split: int = 0) -> list[str]:
    """The texts that the plan gave to a split, in order, copies included."""
    plan, inputs, found = Plan.load(config.dir / "plan.parquet"), open_inputs(config), []
    for shard in range(split * config.shards, (split + 1) * config.shards):
        for part in plan.parts(inputs, shard):
            for row, copies in zip(parse(part.payload, part.spec), part.copies, strict=True):
                found += [] if isinstance(row, Rejected) else [plain_text(row)] * int(copies)
    return found


def rejected(config: DataConfig) -> dict[str, int]:
    return Plan.load(config.dir / "plan.parquet").summary["rejected"]


def documents(tmp_path: Path, count: int = 400) -> list[str]:
    """Documents in a.jsonl, enough for several pieces."""
    made = texts(count, sentences=60)
    write_jsonl(tmp_path / "a.jsonl", made)
    return made


@pytest.mark.parametrize("kind", ["text", "instruct"])
def test_bytes_do_not_depend_on_workers_or_jobs(tmp_path: Path, kind: str) -> None:
    if kind == "text":
        documents(tmp_path)
    else:
        write_jsonl(tmp_path / "a.jsonl", alpaca_rows(1500))
    common = {"kind": kind, "sequence_len": 128, "shards": 3, "validation_fraction": 0.1, "dedup": "near"}
    found = []
    for name, workers, jobs in (
        ("one", 1, [(0, 1)]),
        ("many", 3, [(0, 1)]),
        ("jobs", 1, [(3, 5), (1, 5), (4, 5), (0, 5), (2, 5)]),
    ):
        config = data_config(tmp_path, dir=str(tmp_path / name), **common)
        for job in jobs:
            run(config, shard=job, workers=workers)
        found.append(file_bytes(config.dir))
    assert found[0] == found[1] == found[2]
    assert len(found[0]) == 2 * (3 + 3 + 1)
    assert len(train_set(config)) > 50


def test_finish_needs_all_shards_and_comes_once(tmp_path: Path) -> None:
    documents(tmp_path)
    config = data_config(tmp_path)
    said = run(config, shard=(1, 2))
    assert "train: 1 of 2 shards are still to be made" in said
    with pytest.raises(UserError):
        run(config, finish=True)
    with pytest.raises(UserError):
        train_set(config)
    run(config, shard=(0, 2))
    manifest = config.dir / "train/manifest.json"
    inode = manifest.stat().st_ino
    run(config, finish=True)
    assert manifest.stat().st_ino == inode


def test_every_file_form_gives_the_same_tokens(tmp_path: Path) -> None:
    made = texts(300)
    rows = [{"id": i, "text": text} for i, text in enumerate(made)]
    jsonl = write_jsonl(tmp_path / "a.jsonl", rows).read_bytes()
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(jsonl))
    half = jsonl.index(b"\n", len(jsonl) // 2) + 1
    (tmp_path / "c.jsonl.zst").write_bytes(
        zstandard.compress(jsonl[:half]) + zstandard.compress(jsonl[half:])
    )
    (tmp_path / "d.json").write_text(json.dumps(rows))
    (tmp_path / "e.json").write_text(json.dumps({"version": 1, "data": rows}, indent=1))
    (tmp_path / "f.json").write_bytes(jsonl)
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "g.parquet", row_group_size=70)
    (tmp_path / "h.txt").write_text("\n".join(made))
    (tmp_path / "i.txt").write_text("\n\n".join(made))
    for i in range(3):
        write_jsonl(tmp_path / f"j/{i}.jsonl", rows[i * 100 : i * 100 + 100])
    names = [*sorted(path.name for path in tmp_path.glob("[a-h].*")), "j/*"]
    prints = set()
    for source in [*({"files": name} for name in names), {"files": "i.txt", "format": "paragraphs"}]:
        config = prepared(tmp_path, dir=str(tmp_path / f"out{source['files'][0]}"), sources=[source])
        assert rows_of(config) == made
        prints.add(train_set(config).fingerprint)
    assert len(prints) == 1


ARTICLES = [f"Title {i} = x" if i == 3 else f"Title {i}" for i in range(40)]


def wikitext() -> list[str]:
    """Lines as WikiText has them: headings between blank lines, and a legend that only looks like one."""
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
    # The hub's copy has a line per row, blank ones empty.
    rows = [{"text": "" if line == " \n" else line} for line in lines]
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "b.parquet")
    for source in ({"files": "a.txt"}, {"files": "b.parquet", "format": "wikitext"}):
        config = prepared(tmp_path, dir=str(tmp_path / f"out {source['files']}"), sources=[source])
        found = rows_of(config)
        assert [text.split(" = ")[1] for text in found] == [title.split(" = ")[0] for title in ARTICLES]
        joined = "".join(found).replace(" ", "").replace("\n", "")
        assert joined == "".join(lines).replace(" ", "").replace("\n", "")


def test_quirks_of_data_sets_are_undone(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"text": "one <newline> <newline>two<newline>three"}])
    write_jsonl(tmp_path / "b.jsonl", [{"text": "Wall St.\\band #39;s"}])
    config = prepared(
        tmp_path,
        sequence_len=4,
        sources=[{"files": "a.jsonl", "clean": "writingprompts"}, {"files": "b.jsonl", "clean": "ag_news"}],
    )
    assert rows_of(config) == ["one\n\ntwo\nthree", "Wall St. band's"]


def test_hub_data_sets_load_like_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`datasets` loads a directory like a hub id: the same code path, without network."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    made = texts(200)
    write_jsonl(tmp_path / "repo/train.jsonl", ({"content": text} for text in made))
    sources = [{"hub": str(tmp_path / "repo"), "split": "train[:150]"}]
    config = data_config(tmp_path, sources=sources)
    assert any("is not pinned" in line for line in run(config, shard=(1, 2)))
    run(config, shard=(0, 2))
    assert rows_of(config) == made[:150]
    assert train_set(config).manifest.sources[0]["revision"] == "not pinned"


def test_weights_mix_sources(tmp_path: Path) -> None:
    first, second = texts(2000, seed=1, sentences=1), texts(500, seed=2, sentences=1)
    write_jsonl(tmp_path / "a.jsonl", first)
    write_jsonl(tmp_path / "b.jsonl", second)
    config = prepared(
        tmp_path, sources=[{"files": "a.jsonl", "weight": 0.25}, {"files": "b.jsonl", "weight": 2.5}]
    )
    times = Counter(rows_of(config))
    few, many = [times[t] for t in first], [times[t] for t in second]
    assert set(few) == {0, 1} and abs(sum(few) - 500) < 70
    assert set(many) == {2, 3} and abs(sum(many) - 1250) < 40
    assert rejected(config) == {"weight": few.count(0)}
    assert [source["train"] for source in train_set(config).manifest.sources] == [sum(few), sum(many)]


def test_the_split_goes_by_content(tmp_path: Path) -> None:
    """The place of a row, and what else there is, does not move it between the splits."""
    made = texts(1000, sentences=1)
    sides = []
    for name, rows in (("a", made), ("b", made[::-1][:700])):
        write_jsonl(tmp_path / f"{name}.jsonl", rows)
        config = prepared(
            tmp_path, dir=str(tmp_path / name), sources=[{"files": f"{name}.jsonl"}], validation_fraction=0.1
        )
        sides.append({text: side for side in (0, 1) for text in rows_of(config, side)})
    assert all(sides[0][text] == side for text, side in sides[1].items())
    assert 70 < sum(sides[0].values()) < 130
    other = prepared(tmp_path, dir=str(tmp_path / "c"), validation_fraction=0.1, seed=1)
    assert set(rows_of(other, 1)) != {text for text, side in sides[0].items() if side}


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    documents(tmp_path)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"data: {{dir: {tmp_path / 'out'}, root: {tmp_path}, tokenizer: {tiny_tokenizer()}, "
        "sources: [{files: a.jsonl}], sequence_len: 32}"
    )
    assert main(["prepare", str(recipe), "data.shards=2", "--workers", "1"]) == 0
    assert "shard-00001-of-00002.arrow" in capsys.readouterr().out
    assert main(["prepare", str(recipe), "data.shards=2"]) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert main(["prepare", str(recipe), "data.shard=2"]) == 2
    assert capsys.readouterr().err == "error: unknown key data.shard; did you mean shards?\n"
    assert main(["prepare", str(tmp_path / "no.yaml")]) == 2
    for bad in ("2/2", "x", "1", "-1/2"):
        with pytest.raises(SystemExit):
            main(["prepare", str(recipe), f"--shard={bad}"])


def test_the_last_line_says_what_is_not_there(tmp_path: Path) -> None:
    """Of every job, and again when all is there."""
    rows = [*alpaca_rows(60), *alpaca_rows(5), {"instruction": "q", "output": " "}]
    write_jsonl(tmp_path / "a.jsonl", rows)
    config = data_config(tmp_path, kind="instruct", sequence_len=150, overlong="drop")
    first, second, again = run(config, shard=(0, 2))[-1], run(config, shard=(1, 2))[-1], run(config)[-1]
    for line in (first, second, again):
        assert "6 rows (" in line and "5 duplicate" in line and "1 empty response" in line
    assert second == again != first
