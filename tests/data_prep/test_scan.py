"""The scan in parts: any number of jobs, units, stretches and sizes of parts give the same, killed or not."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import tempfile
import threading
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from emo.common.lease import Lease
from emo.common.recipe import parse_section
from emo.data_prep import near, plan, scan
from emo.data_prep.config import DataConfig, Source
from emo.data_prep.inputs import Input, TextInput
from emo.data_prep.plan import load_rows, select_rows
from emo.data_prep.prepare import Preparation, planned_inputs, prepare
from emo.data_prep.rows import REASONS, RowSpec, raw_rows
from emo.data_prep.scan import Scan, Unit, divide
from emo.data_prep.verify import verify
from tests.helpers.corpus import data_config, file_bytes, run, texts, write_jsonl
from tests.helpers.scanned import parts_of, select_in_memory


def small(monkeypatch: pytest.MonkeyPatch, unit: int = 2000) -> None:
    """Make units, stretches and batches so small that little data takes many of each."""
    for module, name, value in (
        *((plan, "GROUP", 7), (scan, "GROUP", 7), (near, "BATCH", 4)),
        *((scan, "UNIT", unit), (scan, "POLL", 0.01)),
    ):
        monkeypatch.setattr(module, name, value)


ROWS = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 8), st.integers(1, 5), st.integers(0, 3), st.integers(0, 2)),
    min_size=1,
    max_size=60,
)


@settings(deadline=None, max_examples=30)
@given(
    drawn=ROWS,
    weights=st.lists(st.integers(1, 3), min_size=4, max_size=4),
    splits=st.lists(st.integers(0, 2), min_size=4, max_size=4),
    dedup=st.sampled_from(["none", "exact", "near"]),
    signed=st.integers(1, 2),
)
def test_rows_are_selected_as_if_all_were_in_memory(
    drawn: list[tuple[int, ...]], weights: list[int], splits: list[int], dedup: str, signed: int
) -> None:
    """Against the definition, row by row, whatever the sizes of parts."""
    source, hashes, chars, kind, change = np.array(sorted(drawn, key=lambda row: row[0])).T
    reasons = np.where(chars == 5, 7, 0)
    signatures = np.repeat(kind[:, None] * 1000, near.PERMUTATIONS, 1) + np.arange(near.PERMUTATIONS)
    signatures[:, 100:] += change[:, None] * 17  # alike in most bands, and 0.78 in all, or the same
    other = np.repeat(hashes[:, None] // 3 + 5000, near.PERMUTATIONS, 1)
    signatures = np.stack([signatures, other][:signed], axis=1)
    tree = {"dir": "x", "tokenizer": "t", "sources": [{"files": "a"}], "shards": 3, "dedup": dedup}
    tree |= {"validation": {"a": [{"files": "v"}], "b": [{"files": "w"}]}, "near_threshold": 0.7}
    config = parse_section(DataConfig, tree, "data")
    columns = (source, hashes, chars, reasons, signatures)
    taken, expected = select_in_memory(config, weights, splits, *columns)
    with tempfile.TemporaryDirectory() as name, contextlib.closing(duckdb.connect()) as db:
        scanned = load_rows(db, parts_of(Path(name), config, *columns, weights, splits, size=11))
        select_rows(db, config, 4, scanned, path := Path(name) / "rows.parquet")
        dealt = pq.read_table(path).to_pydict()
        counts = dict(db.sql("SELECT reason, count(*) FROM rows GROUP BY reason").fetchall())
    assert list(zip(dealt["shard"], dealt["row"], dealt["copies"], strict=True)) == taken
    assert [counts.get(code, 0) for code in range(len(REASONS))] == np.bincount(
        expected, minlength=len(REASONS)
    ).tolist()


FORMS = st.sampled_from(["lines", "paragraphs", "wikitext"])
LINES = st.sampled_from(["", "", " ", "one", "two words", " = Title = ", "\r", "x" * 30])


@settings(deadline=None, max_examples=80)
@given(st.lists(LINES, min_size=1, max_size=60), FORMS, st.sets(st.integers(1, 300), max_size=6))
@example(["", "", " ", "", "one"], "paragraphs", {1, 2})  # two cuts among the lines between two rows
@example(["", "", "", " = Title = ", "", " = Title = ", "", ""], "wikitext", {1})  # a title alone
def test_stretches_of_a_file_have_its_rows(lines: list[str], form: str, cuts: set[int]) -> None:
    """Wherever a file is cut into stretches, each row is in one of them, and whole."""
    spec = RowSpec("text", form, False, None, "none", 1000)
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "a.txt"
        path.write_text("\n".join(lines), encoding="utf-8")
        size = path.stat().st_size
        opened = TextInput(Source(files="a.txt"), "a.txt", spec, size, path)
        whole = [row for piece in opened.pieces() for row in raw_rows(piece.payload or b"", spec)]
        bounds = sorted(cut for cut in cuts if cut <= size)
        rows = []
        for begin, end in zip([0, *bounds], [*bounds, None], strict=True):
            for piece in opened.pieces(begin, end):
                rows += raw_rows(piece.payload or b"", spec)
                assert list(opened.read([piece.extent])) == [piece.payload]
    assert rows == whole


@given(
    st.lists(st.tuples(st.integers(0, 60), st.booleans(), st.integers(0, 2)), min_size=1, max_size=30),
    st.integers(1, 50),
)
def test_units_cover_every_input_once(drawn: list[tuple[int, bool, int]], goal: int) -> None:
    sources = [Source(files="a"), Source(files="b", limit=3), Source(files="c")]
    inputs = [Input(sources[which], str(i), None, size) for i, (size, _, which) in enumerate(drawn)]  # type: ignore[arg-type]
    for opened, (_, cuttable, _) in zip(inputs, drawn, strict=True):
        opened.cuttable = cuttable
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scan, "UNIT", goal)
        units = divide(inputs)
    assert [unit.number for unit in units] == list(range(len(units)))
    assert sum(unit.size for unit in units) == sum(opened.size for opened in inputs)
    reached = [(0, 0)]  # input, and where its next stretch begins
    for stretch in (stretch for unit in units for stretch in unit.stretches):
        assert (stretch.input, stretch.begin) == reached[-1]
        reached.append((stretch.input, stretch.end) if stretch.end else (stretch.input + 1, 0))
    assert reached[-1] == (len(inputs), 0)
    for unit in units:  # of a source with a limit all rows count, in order
        limited = {stretch.input for stretch in unit.stretches if inputs[stretch.input].source.limit}
        assert not limited or len(limited) == len(unit.stretches)


def corpus(root: Path, **data: Any) -> DataConfig:
    """Write two files of several stretches, and some small ones."""
    rows = texts(160, sentences=8)
    write_jsonl(root / "a.jsonl", rows[:80])
    (root / "b.txt").write_text("\n".join(rows[70:] + [text + " again" for text in rows[:40]]))
    for i in range(4):
        write_jsonl(root / f"c{i}.jsonl", texts(6, seed=i + 7))
    sources = [{"files": "a.jsonl", "weight": 1.5}, {"files": "b.txt"}, {"files": "c*.jsonl"}]
    common = {"sources": sources, "validation_fraction": 0.2, "dedup": "near", "shards": 3}
    return data_config(root, **(common | data))


def noted_units(monkeypatch: pytest.MonkeyPatch, most: int = 1000) -> list[int]:
    """The numbers of units as they are scanned; the process is interrupted after the last that may be."""
    numbers: list[int] = []
    make = Scan.make

    def noted(self: Scan, unit: Unit, *others: Any) -> None:
        if len(numbers) == most:
            raise KeyboardInterrupt
        numbers.append(unit.number)
        make(self, unit, *others)

    monkeypatch.setattr(Scan, "make", noted)
    return numbers


def test_bytes_do_not_depend_on_units_or_on_jobs_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One job and one unit, or many units and three jobs side by side, on a file system without locks."""

    def refused(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    run(whole := corpus(tmp_path, dir=str(tmp_path / "whole")))
    small(monkeypatch)
    monkeypatch.setattr(fcntl, "flock", refused)
    monkeypatch.setattr(fcntl, "lockf", refused)
    config = corpus(tmp_path)
    scanned = noted_units(monkeypatch)
    jobs = [threading.Thread(target=run, args=(config, (i, 3))) for i in range(3)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    assert sorted(scanned) == list(range(len(scanned))) and len(scanned) > 8, "each unit once"
    shards = {name: data for name, data in file_bytes(whole.dir).items() if "plan" not in name}
    assert {name: data for name, data in file_bytes(config.dir).items() if "plan" not in name} == shards
    assert verify(config.dir)[1] == [] and not (config.dir / ".new").exists()


def test_parts_that_are_whole_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that ended goes on where it was; a part that is damaged or of a changed source is made again."""
    small(monkeypatch)
    run(other := corpus(tmp_path, dir=str(tmp_path / "other")))
    config = corpus(tmp_path)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        scanned = noted_units(patch, most=7)
        run(config)
    assert scanned == list(range(7))
    rows = config.dir / ".new/scan/000002.parquet"
    rows.write_bytes(rows.read_bytes()[:-1])
    first = tmp_path / "a.jsonl"
    first.write_bytes(first.read_bytes())  # the same text, but nobody can know
    changed = [u.number for u in divide(planned_inputs(config)) if u.stretches[0].input == 0]
    again = noted_units(monkeypatch)
    run(config)
    assert set(again) == {2, *changed} | set(range(7, max(again) + 1)) and len(again) == len(set(again))
    assert file_bytes(config.dir) == file_bytes(other.dir)


def test_a_job_waits_for_a_unit_and_takes_over_from_a_dead_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small(monkeypatch)
    config = corpus(tmp_path)
    other = Lease(config.dir / ".new/scan", "000001.lease")
    set_up = Preparation.set_up

    def taken(*arguments: Any) -> None:
        set_up(*arguments)
        assert other.acquire()

    def released(line: str) -> None:
        lines.append(line)
        if "waiting for" in line:
            other.release()  # it died, and its part was never written

    lines: list[str] = []
    monkeypatch.setattr(Preparation, "set_up", taken)
    prepare(config, (0, 1), 1, False, False, released)
    (waiting,) = (line for line in lines if "waiting for" in line)
    assert "1 of " in waiting and f"process {os.getpid()} on " in waiting
    assert verify(config.dir)[1] == []
