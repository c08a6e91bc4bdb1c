"""The scan in parts: any number of jobs, units, stretches and sizes of sorts give the same, killed or not."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import data_prep.scan.planning as planning
from common.lease import Lease
from common.recipe import parse_section
from data_prep import selection
from data_prep.config import DataConfig, Source
from data_prep.inputs import Input, TextInput
from data_prep.prepare import prepare
from data_prep.rows import REASONS, RowSpec, raw_rows
from data_prep.scan import assignment, near, parts, units
from data_prep.scan.assignment import Assignment
from data_prep.scan.near import PERMUTATIONS
from data_prep.scan.parts import Part, PartWriter, Seen
from data_prep.scan.units import Stretch, Unit, divide
from data_prep.selection import select
from data_prep.verify import verify
from tests.helpers.corpus import data_config, file_bytes, run, texts, write_jsonl
from tests.helpers.scanned import parts_of, select_in_memory


def small(monkeypatch: pytest.MonkeyPatch, unit: int = 2000) -> None:
    """Units, stretches and batches so small that little data takes many of each."""
    for module, name, value in (
        *((assignment, "STRETCH", 7), (parts, "GROUP", 7), (selection, "BATCH", 2048), (near, "BATCH", 4)),
        *((units, "UNIT", unit), (units, "POLL", 0.01)),
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
    drawn: list[tuple[int, ...]],
    weights: list[int],
    splits: list[int],
    dedup: str,
    signed: int,
) -> None:
    """Against the definition, row by row, whatever the sizes of parts, stretches and runs."""
    source, hashes, chars, kind, change = np.array(sorted(drawn, key=lambda row: row[0])).T
    reasons = np.where(chars == 5, 7, 0)
    signatures = np.repeat(kind[:, None] * 1000, PERMUTATIONS, 1) + np.arange(PERMUTATIONS)
    signatures[:, 100:] += change[:, None] * 17  # alike in most bands, and 0.78 in all, or the same
    signatures = np.stack(
        [signatures, np.repeat(hashes[:, None] // 3 + 5000, PERMUTATIONS, 1)][:signed], axis=1
    )
    tree = {"dir": "x", "tokenizer": "t", "sources": [{"files": "a"}], "shards": 3, "dedup": dedup}
    tree |= {"validation": {"a": [{"files": "v"}], "b": [{"files": "w"}]}, "near_threshold": 0.7}
    config = parse_section(DataConfig, tree, "data")
    arrays = (np.array(weights), np.array(splits, np.uint16))
    expected = select_in_memory(config, *arrays, source, hashes, chars, reasons, signatures)
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as name:
        small(patch)
        stored = signatures if dedup == "near" else None
        table = parts_of(Path(name), source, hashes, chars, reasons, stored, size=11)
        found = select(table, config, *arrays, Path(name))
        assert (found.shard[:].tolist(), found.copies[:].tolist()) == expected[:2]
    assert found.rejected.sum(axis=0).tolist() == np.bincount(expected[2], minlength=len(REASONS)).tolist()
    for split in range(3):
        own = np.array(expected[0]) // 3 == split
        assert found.chars[split] == (chars * np.array(expected[1]))[own].sum()
        assert found.rows[split] == own.sum()


FORMS = st.sampled_from(["lines", "paragraphs", "wikitext"])
LINES = st.sampled_from(["", "", " ", "one", "two words", " = Title = ", "\r", "x" * 30])


@settings(deadline=None, max_examples=80)
@given(st.lists(LINES, min_size=1, max_size=60), FORMS, st.sets(st.integers(1, 300), max_size=6))
@example(["", "", " ", "", "one"], "paragraphs", {1, 2})  # two cuts among the lines between two rows
@example(
    ["", "", "", " = Title = ", "", " = Title = ", "", ""], "wikitext", {1}
)  # a document of a title alone
def test_stretches_of_a_file_have_its_rows(lines: list[str], form: str, places: set[int]) -> None:
    """Wherever a file is cut into stretches, each row is in one of them, and whole."""
    spec = RowSpec("text", form, False, None, "none", 1000)
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "a.txt"
        path.write_text("\n".join(lines))
        size = path.stat().st_size
        one = TextInput(Source(files="a.txt"), "a.txt", spec, path, size)
        whole = [row for piece in one.pieces() for row in raw_rows(piece.payload or b"", spec)]
        cuts = sorted(place for place in places if place <= size)
        found = []
        for begin, end in zip([0, *cuts], [*cuts, None], strict=True):
            for piece in one.pieces(begin, end):
                found += raw_rows(piece.payload or b"", spec)
                assert list(one.read([piece.place])) == [piece.payload]
    assert found == whole


@given(
    st.lists(st.tuples(st.integers(0, 60), st.booleans(), st.integers(0, 2)), min_size=1, max_size=30),
    st.integers(1, 50),
)
def test_units_cover_every_input_once(drawn: list[tuple[int, bool, int]], goal: int) -> None:
    sources = [Source(files="a"), Source(files="b", limit=3), Source(files="c")]
    inputs = [Input(sources[which], str(i), None, size) for i, (size, _, which) in enumerate(drawn)]  # type: ignore[arg-type]
    for one, (_, cuttable, _) in zip(inputs, drawn, strict=True):
        one.cuttable = cuttable
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(units, "UNIT", goal)
        found = divide(inputs)
    assert [unit.number for unit in found] == list(range(len(found)))
    assert sum(unit.size for unit in found) == sum(one.size for one in inputs)
    reached = [(0, 0)]  # input, and where its next stretch begins
    for stretch in (stretch for unit in found for stretch in unit.stretches):
        assert (stretch.input, stretch.begin) == reached[-1]
        reached.append((stretch.input, stretch.end) if stretch.end else (stretch.input + 1, 0))
    assert reached[-1] == (len(inputs), 0)
    for unit in found:  # of a source with a limit all rows count, in order
        limited = {one.input for one in unit.stretches if inputs[one.input].source.limit}
        assert not limited or len(limited) == len(unit.stretches)


def corpus(root: Path, **data: Any) -> DataConfig:
    """Two files in several stretches, and some small ones."""
    made = texts(160, sentences=8)
    near_ones = [text + " again" for text in made[:40]]
    write_jsonl(root / "a.jsonl", ({"text": text} for text in made[:80]))
    (root / "b.txt").write_text("\n".join(made[70:] + near_ones))
    for i in range(4):
        write_jsonl(root / f"c{i}.jsonl", ({"text": text} for text in texts(6, seed=i + 7)))
    sources = [{"files": "a.jsonl", "weight": 1.5}, {"files": "b.txt"}, {"files": "c*.jsonl"}]
    common = {"sources": sources, "validation_fraction": 0.2, "dedup": "near", "shards": 3}
    return data_config(root, **(common | data))


def test_bytes_do_not_depend_on_units_or_on_jobs_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One job and one unit, or many units and three jobs that scan side by side."""
    run(whole := corpus(tmp_path, dir=str(tmp_path / "whole")))
    small(monkeypatch)
    config = corpus(tmp_path)
    scanned: list[int] = []
    scan_unit = planning.scan_unit

    def noted(place: Path, unit: units.Unit, *more: Any) -> None:
        scanned.append(unit.number)
        scan_unit(place, unit, *more)

    monkeypatch.setattr(planning, "scan_unit", noted)
    jobs = [threading.Thread(target=run, args=(config, (i, 3))) for i in range(3)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    assert sorted(scanned) == list(range(len(scanned))) and len(scanned) > 8, "each unit once"
    assert file_bytes(config.dir) == file_bytes(whole.dir)
    assert verify(config.dir)[1] == [] and not (config.dir / ".new").exists()


def test_parts_that_are_whole_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that ended goes on where it was; a part that is damaged or of a changed source is made again."""
    small(monkeypatch)
    run(other := corpus(tmp_path, dir=str(tmp_path / "other")))
    config = corpus(tmp_path)
    scanned: list[int] = []
    scan_unit = planning.scan_unit

    def failing(place: Path, unit: units.Unit, *more: Any) -> None:
        if len(scanned) == 7:
            raise KeyboardInterrupt
        scanned.append(unit.number)
        scan_unit(place, unit, *more)

    monkeypatch.setattr(planning, "scan_unit", failing)
    with pytest.raises(KeyboardInterrupt):
        run(config)
    assert scanned == list(range(7))
    rows = config.dir / ".new/scan/000002.pieces"
    rows.write_bytes(rows.read_bytes()[:-1])
    first = tmp_path / "a.jsonl"
    first.write_bytes(first.read_bytes())  # the same text, but nobody can know
    ours = [u.number for u in divide(planning.planned_inputs(config)) if u.stretches[0].input == 0]
    again: list[int] = []
    monkeypatch.setattr(
        planning, "scan_unit", lambda p, u, *more: (again.append(u.number), scan_unit(p, u, *more))
    )
    run(config)
    assert set(again) == {2, *ours} | set(range(7, max(again) + 1)) and len(again) == len(set(again))
    assert file_bytes(config.dir) == file_bytes(other.dir)


def test_a_job_waits_for_a_unit_and_takes_over_from_a_dead_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small(monkeypatch)
    config = corpus(tmp_path)
    place = config.dir / ".new/scan"
    other = Lease(place, "000001.lease")
    set_up = planning.set_up

    def taken(*arguments: Any) -> None:
        set_up(*arguments)
        assert other.acquire()

    def released(line: str) -> None:
        said.append(line)
        if "waiting for" in line:
            other.release()  # it died, and its part was never written

    said: list[str] = []
    monkeypatch.setattr("data_prep.prepare.set_up", taken)
    prepare(config, (0, 1), 1, False, False, released)
    (waiting,) = (line for line in said if "waiting for" in line)
    assert "1 of " in waiting and f"process {os.getpid()} on " in waiting
    assert verify(config.dir)[1] == []


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EIO])
def test_a_file_system_needs_no_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def refused(*_: Any) -> None:
        raise OSError(code, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refused)
    monkeypatch.setattr(fcntl, "lockf", refused)
    small(monkeypatch)
    config = corpus(tmp_path)
    jobs = [threading.Thread(target=run, args=(config, (i, 2))) for i in range(2)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    assert verify(config.dir)[1] == [] and len(list(config.dir.glob("*/manifest.json"))) == 2


def test_notes_have_no_limit(tmp_path: Path) -> None:
    """A unit of as many inputs as a source with a limit may have."""
    inputs = 200_000
    unit = Unit(0, tuple(Stretch(i, 0, None) for i in range(inputs)), 1)
    identity = {"name": "a" * 60, "bytes": 12345, "sha256": "f" * 64}
    with contextlib.ExitStack() as files:
        writer = PartWriter(tmp_path / unit.name, files)
        writer.close()
    writer.finish("key", [Seen(i, identity, rows=1, columns=["text"]) for i in range(inputs)])
    assert Part.read(tmp_path, unit, "other") is None
    part = Part.read(tmp_path, unit, "key")
    assert part is not None
    seen = part.seen()
    assert len(seen) == inputs and seen[-1] == Seen(inputs - 1, identity, rows=1, columns=["text"])


def test_a_plan_says_the_same_or_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever one of its bytes is flipped."""
    small(monkeypatch)
    run(config := corpus(tmp_path, shards=2))
    path = config.dir / "plan.parquet"
    whole, inputs = path.read_bytes(), planning.planned_inputs(config)

    def content(plan: Assignment) -> tuple[Any, ...]:
        parts = [(p.name, p.copies.tolist()) for s in range(4) for p in plan.parts(inputs, s)]
        return plan.pieces.tolist(), plan.summary, parts

    expected = content(Assignment.load(path))
    noticed = 0
    for i in range(0, len(whole), 1 + len(whole) // 300):
        path.write_bytes(whole[:i] + bytes([whole[i] ^ 0x41]) + whole[i + 1 :])
        try:
            assert content(Assignment.load(path)) == expected, i
        except AssertionError:
            raise
        except Exception:
            noticed += 1
    assert noticed > 100
