"""Prepared data and scores are read as written. Changed, forged and wrongly encoded data are rejected."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
import zstandard

from emo.common.errors import UserError
from emo.common.io.files import Hashes, sha256
from emo.common.io.lease import register_user
from emo.data_prep.config import MARKER, DataConfig
from emo.data_prep.encoding.tokenizer import load_tokenizer
from emo.data_prep.prepare import JOBS
from emo.data_prep.shards import inspect as look
from emo.data_prep.shards import scores, write
from emo.data_prep.shards.encode import RowEncoder
from emo.data_prep.shards.format import (
    Manifest,
    TokenDataset,
    content_fingerprint,
    manifest_text,
    open_prepared,
    read_manifest,
)
from emo.data_prep.shards.reencode import ShardCheck
from emo.data_prep.shards.scores import Scores
from emo.data_prep.shards.verify import verify
from emo.data_prep.sources import files as source_files
from emo.data_prep.sources.files import read_text
from tests.helpers.chat_templates import CHATML, tokenizer_with
from tests.helpers.corpus import (
    alpaca_rows,
    data_config,
    file_bytes,
    prepared,
    run,
    texts,
    tiny_tokenizer,
    train_set,
    word_tokenizer,
    write_jsonl,
)
from tests.helpers.refusals import refused

# --- reading ----------------------------------------------------------------------------------------------


def plain_batch(row: dict[str, Any], block: int) -> list[list[int]]:
    """Return the ids, shifted labels and positions of a row, derived one token at a time."""
    ids, labels, positions = list(row["input_ids"]), [], []
    spans = row.get("loss_spans", [0, len(ids)])
    learned = {i for a, b in zip(spans[::2], spans[1::2], strict=True) for i in range(a, b)}
    for length in row["segment_lengths"]:
        start = len(positions)
        positions += range(length)
        labels += [ids[i] if i in learned else -100 for i in range(start + 1, start + length)] + [-100]
    padding = block - len(positions)
    return [ids + [0] * padding, labels + [-100] * padding, positions + list(range(padding))]


@pytest.mark.parametrize("kind", ["text", "instruct"])
def test_batches_equal_the_columns(tmp_path: Path, kind: str) -> None:
    """Plain Python derives the same batch from the columns that `datasets` reads from the files."""
    write_jsonl(tmp_path / "a.jsonl", texts(120) if kind == "text" else alpaca_rows(60))
    options = {"shards": 3} if kind == "text" else {"kind": kind, "sequence_len": 180, "overlong": "split"}
    config = prepared(tmp_path, **options)
    data = train_set(config)
    rows, files = [], []
    for info in data.manifest.shards:
        table = datasets.Dataset.from_file(str(config.dir / "train" / info.file))
        assert table.features["input_ids"].feature.dtype == "uint16"
        rows += list(table)
        files += [(info.file, i) for i in range(len(table))]
    assert len(rows) == len(data) == data.manifest.rows > 10
    chosen = np.random.default_rng(0).permutation(len(data))
    batch = data.batch(chosen)
    for i, row in enumerate(chosen):
        expected = plain_batch(rows[row], config.sequence_len)
        assert [batch[name][i].tolist() for name in ("input_ids", "labels", "position_ids")] == expected
        assert data.valid[row] == rows[row]["valid"] == sum(label != -100 for label in expected[1])
    assert data.provenance(chosen) == [files[row] for row in chosen]
    assert data.valid.dtype == np.int64 and data.valid.sum() == data.manifest.valid_tokens


def test_a_segment_names_its_source_document(tmp_path: Path) -> None:
    """The parts of a long example in several rows, and its copies, name the same document."""
    answers = texts(40, sentences=30)
    write_jsonl(tmp_path / "a.jsonl", ({"instruction": "Say it.", "output": text} for text in answers))
    sources = [{"files": "a.jsonl", "weight": 2}]
    config = prepared(tmp_path, kind="instruct", sources=sources, overlong="split", sequence_len=100)
    data, tokenizer = train_set(config), load_tokenizer(config.dir / "tokenizer")
    fits: dict[int, set[int]] = {}  # by source, the answers that contain all its segments
    for row in range(len(data)):
        ids, lengths = data._row(row)[:2]
        parts = np.split(ids, np.cumsum(lengths)[:-1])
        for part, source in zip(parts, data.sources_of(row).tolist(), strict=True):
            text = tokenizer.decode(part, skip_special_tokens=True).rpartition("### Response:")[2].strip()
            near = {i for i, whole in enumerate(answers) if text in whole}
            fits[source] = fits.get(source, near) & near
    assert len(fits) == 40 < data.manifest.segments / 2
    assert sorted(row for rows in fits.values() for row in rows) == list(range(40))


def test_a_large_vocabulary_keeps_its_ids(tmp_path: Path) -> None:
    tokenizer = word_tokenizer(tmp_path / "large", ["?", *(f"w{i}" for i in range(2, 70_000))])
    write_jsonl(tmp_path / "a.jsonl", (f"w{69_000 + i} w{i + 2} w66000" for i in range(60)))
    data = train_set(prepared(tmp_path, tokenizer=tokenizer))
    ids = data.batch(np.arange(len(data)))["input_ids"].ravel().tolist()
    assert ids[:8] == [69_000, 2, 66_000, 0, 69_001, 3, 66_000, 0]
    assert data.manifest.bos_id is None and data.manifest.eos_id == 0


# --- damaged, changed and forged data ---------------------------------------------------------------------


def config_of(root: Path, **data: Any) -> DataConfig:
    """Return a configuration of two splits with three shards and two domains."""
    sources = [{"files": "*.jsonl"}, {"files": "law.txt", "domain": "law"}]
    common = {"sources": sources, "shards": 3, "validation_fraction": 0.2, "tokenizer": "tokenizer"}
    return data_config(root, **(common | data))


@pytest.fixture(scope="module")
def prepared_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with sources, a copy of the tokenizer, and data prepared from them."""
    root = tmp_path_factory.mktemp("integrity")
    write_jsonl(root / "a.jsonl", texts(120))
    write_jsonl(root / "b.jsonl", texts(20, seed=2))
    (root / "law.txt").write_text("\n".join(texts(30, seed=1)))
    shutil.copytree(tiny_tokenizer(), root / "tokenizer")
    run(config_of(root))
    return root


@pytest.fixture
def config(prepared_once: Path, tmp_path: Path) -> DataConfig:
    """Copy the prepared directory and cache the hashes of its files."""
    root = tmp_path / "root"
    shutil.copytree(prepared_once, root, symlinks=True)
    config = config_of(root)
    run(config)
    return config


@pytest.fixture
def examples(tmp_path: Path) -> DataConfig:
    """Prepare packed instructions in a single shard."""
    write_jsonl(tmp_path / "a.jsonl", alpaca_rows(60))
    return prepared(tmp_path, kind="instruct", sequence_len=512, shards=1)


def flip(path: Path, offset: int = -1) -> None:
    """Flip one bit in place, and keep the size and the modification time."""
    times = path.stat()
    with path.open("r+b") as file:
        file.seek(offset % times.st_size)
        byte = file.read(1)[0]
        file.seek(offset % times.st_size)
        file.write(bytes([byte ^ 1]))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def edit(path: Path, **changes: Any) -> None:
    """Change some keys of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | changes), encoding="utf-8")


def swap_ids(path: Path) -> None:
    """Swap the ids of the last two pieces."""
    model = json.loads(path.read_text(encoding="utf-8"))["model"]
    first, second = sorted(model["vocab"], key=model["vocab"].get)[-2:]
    swapped = {first: model["vocab"][second], second: model["vocab"][first]}
    edit(path, model=model | {"vocab": model["vocab"] | swapped})


SHARD, NOTE = "train/shard-00001-of-00003.arrow", "train/shard-00001-of-00003.json"

# Changes to the prepared directory that prepare repairs, and changes that it rejects with an error code.
MENDED: dict[str, Callable[[Path], Any]] = {
    "a shard is deleted": lambda d: (d / SHARD).unlink(),
    "a shard's last byte is flipped": lambda d: flip(d / SHARD),
    "a note and its shard agree, but not with the manifest": lambda d: [
        flip(d / SHARD, 3000),
        edit(d / NOTE, sha256=sha256(d / SHARD)),
    ],
    "validation is removed": lambda d: shutil.rmtree(d / "validation"),
    "a manifest is edited": lambda d: edit(d / "train/manifest.json", vocab_size=32000),
}
REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a new file matches": (lambda d: write_jsonl(d.parent / "c.jsonl", texts(9, seed=9)), "source-new"),
    "a file is gone that is still to be read": (
        lambda d: [file.unlink() for file in (d.parent / "b.jsonl", d / "train/manifest.json")],
        "source-gone",
    ),
    "a file is gone that must be read again": (
        lambda d: [file.unlink() for file in (d.parent / "b.jsonl", d / SHARD)],
        "sources-gone",
    ),
    "a source is edited at equal size": (lambda d: flip(d.parent / "a.jsonl", 200), "source-changed"),
    "the tokenizer has other ids": (
        lambda d: swap_ids(d.parent / "tokenizer/tokenizer.json"),
        "tokenizer-changed",
    ),
    "its copy ends texts otherwise": (
        lambda d: edit(d / "tokenizer/tokenizer_config.json", eos_token="<s>"),
        "tokenizer-changed",
    ),
    "settings are gone": (lambda d: (d / "settings.json").unlink(), "settings-damaged"),
    "settings are edited": (lambda d: edit(d / "settings.json", sequence_len=64), "settings-differ"),
    "the plan is flipped": (lambda d: [flip(d / "plan.parquet", 40), (d / SHARD).unlink()], "plan-damaged"),
    "the rows are flipped": (lambda d: [flip(d / "rows.parquet", 100), (d / SHARD).unlink()], "plan-damaged"),
    "the plan is gone": (lambda d: (d / "plan.parquet").unlink(), "plan-gone"),
}


@pytest.mark.parametrize("case", MENDED)
def test_damage_is_found_and_repaired(config: DataConfig, case: str) -> None:
    """Verify and training find the damage. Prepare also finds it, and restores the same bytes."""
    expected = file_bytes(config.dir)
    MENDED[case](config.dir)
    assert verify(config.dir)[1]
    with contextlib.suppress(UserError):  # training opens it, and hashes it at a run's first start
        data, sets = open_prepared(config)
        assert any(list(each.faults(Hashes(config.dir / "none"))) for each in (data, *sets.values()))
    assert not any("nothing to do" in line for line in run(config))
    assert file_bytes(config.dir) == expected
    assert verify(config.dir)[1] == []


FORCED = {"a file is gone that must be read again", "the tokenizer has other ids", "the plan is gone"}


@pytest.mark.parametrize("case", REFUSED)
def test_damage_that_cannot_be_repaired_is_an_error(config: DataConfig, case: str) -> None:
    """The error leaves all files unchanged. In some cases, --force then prepares the data again."""
    damage, code = REFUSED[case]
    damage(config.dir)
    before = file_bytes(config.dir)
    with refused(code):
        run(config)
    assert file_bytes(config.dir) == before
    if case in FORCED:
        run(config, force=True)
        assert verify(config.dir)[1] == []


def test_a_copy_elsewhere_verifies_and_trains(config: DataConfig, tmp_path: Path) -> None:
    """Only the data sets and the tokenizer have to be copied."""
    copy = tmp_path / "elsewhere"
    for name in ("train", "validation", "tokenizer"):
        shutil.copytree(config.dir / name, copy / name)
    assert verify(copy)[1] == [] and verify(copy / "train")[1] == []
    train, sets = open_prepared(config.model_copy(update={"dir": copy}))
    assert list(sets) == ["validation"] and len(train) > len(sets["validation"]) > 0
    assert not list(train.faults(Hashes(tmp_path / "hashes.json")))


def test_ranks_share_the_hashing(config: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, memory = train_set(config), tmp_path / "hashes.json"
    read: list[str] = []
    monkeypatch.setattr("emo.common.io.files.sha256", lambda path: (read.append(path.name), sha256(path))[1])
    ranks = [Hashes(memory) for _ in range(2)]
    assert not [fault for rank, hashes in enumerate(ranks) for fault in data.faults(hashes, rank, 2)]
    assert sorted(read) == [info.file for info in data.manifest.shards]
    ranks[0].save([ranks[1].new()])
    assert not list(data.faults(Hashes(memory))) and len(read) == len(data.manifest.shards)


def test_a_foreign_directory_is_not_changed(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", texts(120))
    other = tmp_path / "prepared/train/weights.bin"
    other.parent.mkdir(parents=True)
    other.write_text("the only copy")
    for code, force in itertools.product(("not-claimed", "foreign-file"), (False, True)):
        if code == "foreign-file":  # the file appeared after prepare had claimed the directory
            (tmp_path / "prepared" / MARKER).touch()
        with refused(code):
            run(data_config(tmp_path), force=force)
        files = {p for p in tmp_path.rglob("*") if p.is_file() and ".planning" not in p.parts}
        files.discard(tmp_path / "prepared" / MARKER)
        assert files == {tmp_path / "a.jsonl", other} and other.read_text() == "the only copy"


def test_force_keeps_data_after_a_recipe_error_or_during_another_job(config: DataConfig) -> None:
    """Files are removed only after all checks have passed."""
    before = file_bytes(config.dir)
    for wrong in ({"sources": [{"files": "no.jsonl"}]}, {"contamination": "no"}):
        with pytest.raises(UserError):
            run(config_of(config.root, **wrong), force=True)
    with register_user(config.dir / JOBS), refused("in-use"):
        run(config, force=True)
    assert file_bytes(config.dir) == before
    assert "nothing to do" in run(config)[0]


def forge(directory: Path, manifest: Manifest) -> None:
    """Write a manifest with a valid digest, as anyone could who changes it."""
    for note in directory.glob("shard-*.json"):
        note.unlink()
    (directory / "manifest.json").write_text(manifest_text(manifest))


def test_verify_recounts_domains(config: DataConfig) -> None:
    train = config.dir / "train"
    whole = (train / "manifest.json").read_text()
    for change in (
        lambda tree: tree["domains"].reverse(),
        lambda tree: tree["domains"][0].update(documents=3),
        lambda tree: tree["shards"][0]["domains"][-1].update(rows=3),
        lambda tree: tree["shards"][0]["domains"].pop(),
    ):
        change(tree := json.loads(whole))
        forge(train, Manifest.model_validate(tree))
        assert verify(config.dir)[1]
    forge(train, Manifest.model_validate_json(whole))
    assert not verify(config.dir)[1]


def test_verify_recounts_targets(examples: DataConfig) -> None:
    """Counts that agree with each other but not with the rows are also reported."""
    train = examples.dir / "train"
    manifest = read_manifest(train)
    shard = train / manifest.shards[0].file
    table = pa.ipc.open_stream(shard.read_bytes()).read_all()
    counts = table.column("valid").to_numpy().copy()
    counts[3] += 1
    counts[4] -= 1
    with pa.OSFile(str(shard), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as out:
        out.write_table(table.set_column(table.schema.get_field_index("valid"), "valid", pa.array(counts)))
    changes = {"sha256": sha256(shard), "bytes": shard.stat().st_size}
    shards = [manifest.shards[0].model_copy(update=changes)]
    identity = content_fingerprint(manifest.kind, manifest.block, manifest.tokenizer_fingerprint, shards)
    forge(train, manifest.model_copy(update={"shards": shards, "fingerprint": identity}))
    (fault,) = verify(examples.dir)[1]
    assert "row 3 supervises" in fault


def test_a_shard_with_invalid_offsets_is_damaged(examples: DataConfig) -> None:
    """Arrow trusts the lengths in a file, so wrong ones could read other memory or end the process."""
    train = examples.dir / "train"
    rows = read_manifest(train).rows.to_bytes(8, "little")
    (path,) = train.glob("*.arrow")
    assert path.read_bytes().count(rows) >= 2
    path.write_bytes(path.read_bytes().replace(rows, (10**7).to_bytes(8, "little")))
    with pytest.raises(UserError):
        TokenDataset(train)


def test_inspect_colours_exactly_the_supervised_text(examples: DataConfig) -> None:
    data, tokenizer = train_set(examples), load_tokenizer(examples.dir / "tokenizer")
    rows = [look.render_row(data, row, tokenizer) for row in range(len(data))]
    learned = "".join(t.plain[s.start : s.end] for t in rows for s in t.spans if s.style == look.SUPERVISED)
    assert sorted(learned.split("</s>")[:-1]) == sorted({row["output"] for row in alpaca_rows(60)})


def test_unpacked_text_has_a_size_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_files, "TEXT_LIMIT", 10 << 20)
    (tmp_path / "test.jsonl.zst").write_bytes(zstandard.compress(bytes(64 << 20)))
    with pytest.raises(UserError):
        read_text(tmp_path / "test.jsonl.zst")


# --- ids that differ from the tokenizer's are never sealed ------------------------------------------------

COPIES = [{"files": "a.jsonl", "weight": 2.5}, {"files": "b.jsonl", "domain": "b"}]
EXAMPLES = {"kind": "instruct", "sources": [{"files": "i.jsonl"}]}
LONG = {"packing": "best_fit", "min_doc_tokens": 30, "long_doc_tokens": 70, "sequence_len": 64}
SORTS: dict[str, tuple[dict[str, Any], bool]] = {  # settings, and whether `verify` can encode the data again
    "copies": ({"sources": COPIES, "validation_fraction": 0.3}, True),
    "long texts": ({"sources": [{"files": "long.txt", "format": "document"}], "shards": 1}, True),
    "instructions": (EXAMPLES | {"sequence_len": 400}, True),
    "split": (EXAMPLES | {"sequence_len": 60, "overlong": "split"}, False),
    "chat": (EXAMPLES | {"sequence_len": 300, "template": "chat_template"}, False),
    "ids": ({"sources": [{"files": "ids.jsonl", "format": "tokens"}]}, False),
    "best fit": ({"sources": COPIES} | LONG, True),
}
PACKED = {"copies", "instructions", "best fit"}  # one for each packer


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sorts")
    write_jsonl(root / "a.jsonl", ({"text": f" {text}\n\n </s> naïve 日本 {text}"} for text in texts(200)))
    write_jsonl(root / "b.jsonl", texts(200, seed=4))
    write_jsonl(root / "i.jsonl", alpaca_rows(120))
    write_jsonl(root / "ids.jsonl", ({"ids": [7 + i % 90] * (20 + i)} for i in range(60)))
    (root / "long.txt").write_text("\n".join(texts(900)), encoding="utf-8")
    return root


def shifted(self: RowEncoder, part: Any, encode: Any = RowEncoder.encode) -> Any:
    """Return wrong ids, as a faulty worker would."""
    done = encode(self, part)
    return done._replace(ids=done.ids ^ 1)


@pytest.mark.parametrize("sort", SORTS)
def test_a_shard_with_other_ids_is_not_sealed(
    files: Path, tmp_path: Path, sort: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ids that a worker or the packer changed are not sealed. Correct ids are sealed and verified."""
    settings, encoded_again = SORTS[sort]
    if sort == "chat":
        settings = settings | {"tokenizer": str(tokenizer_with(CHATML))}
    config = data_config(files, dir=str(tmp_path / "prepared"), **settings)
    with monkeypatch.context() as broken, refused("not-as-tokenized"):
        broken.setattr(RowEncoder, "encode", shifted)
        run(config)
    assert not [p for name in ("*.arrow", "manifest.json", "*.part") for p in config.dir.rglob(name)]
    if sort in PACKED:
        lists = write.lists_of
        with monkeypatch.context() as broken, pytest.raises(UserError):
            broken.setattr(write, "lists_of", lambda offsets, values: lists(offsets, values[::-1].copy()))
            run(config)
    run(config)
    right, faults = verify(config.dir)
    assert not faults and len(right) == len(config.splits)
    if encoded_again:  # verify finds ids that the check of a shard missed
        with monkeypatch.context() as broken:
            broken.setattr(RowEncoder, "encode", shifted)
            broken.setattr(ShardCheck, "compare", lambda *_: None)
            run(config, force=True)
        assert verify(config.dir)[1]


# --- scores of another model, next to the data ------------------------------------------------------------

MODEL = {"path": "somewhere", "weights": "0" * 64}


def write_scores(data: TokenDataset) -> None:
    """Write a score for every token that identifies its shard and its position."""
    scores.begin(data, "ref", MODEL)
    for shard, info in enumerate(data.manifest.shards):
        scores.write_scores(scores.shard_file(data, "ref", shard), -np.arange(info.tokens) - 1e6 * shard)
    assert scores.finish(data, "ref", MODEL)


def test_scores_are_aligned_with_labels(config: DataConfig) -> None:
    """Every label of every row gets the score of exactly its token in the shard."""
    write_scores(data := train_set(config))
    written = Scores(data, "ref")
    for shard in range(3):
        offset = 0
        for row in data.rows_of(shard):
            stored, n = written.columns(np.array([row]))["stored"][0], data.tokens_of(int(row))
            assert stored[: n - 1].tolist() == [-1e6 * shard - offset - i for i in range(1, n)]
            assert not stored[n - 1 :].any()
            offset += n


def test_damaged_or_foreign_scores_are_errors(config: DataConfig, tmp_path: Path) -> None:
    data = train_set(config)
    path = scores.shard_file(data, "ref", 1)

    def unreadable(code: str, name: str = "ref") -> None:
        with refused(code):
            Scores(data, name)

    unreadable("no-scores")
    scores.begin(data, "ref", MODEL)
    assert not scores.finish(data, "ref", MODEL)
    with refused("other-scores"):
        scores.begin(data, "ref", MODEL | {"weights": "1" * 64})
    for bad in (float("nan"), float("-inf"), 0.5):  # not log-probabilities
        with refused("not-finite"):
            scores.write_scores(path, np.array([-1.0, bad]))
    assert not path.exists()
    unreadable("no-scores")
    write_scores(data)
    unreadable("option-value", "../ref")
    content = path.read_bytes()
    path.write_bytes(content[:-4])
    unreadable("damaged-scores")
    for last, faults in ((b"\0\0\0\0", 1), (content[-4:], 0)):
        path.write_bytes(content[:-4] + last)
        assert len(list(Scores(data, "ref").faults(Hashes(tmp_path / "hashes.json")))) == faults
        assert scores.finish(data, "ref", MODEL) == (not faults)
    edit(scores.directory(data, "ref") / scores.ABOUT, data="other")
    unreadable("other-scores")


def test_inspect_sums_many_sources(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from emo.data_prep.cli import main

    for i, text in enumerate(texts(45)):
        write_jsonl(tmp_path / f"{i:02}.jsonl", [text, ""])
    config = prepared(tmp_path, sources=[{"files": "*.jsonl"}], sequence_len=8)
    assert main(["inspect", str(config.dir / "train"), "--rows", "0"]) == 0
    shown = capsys.readouterr().out
    assert "19.jsonl" in shown and "20.jsonl" not in shown and "25 more" in shown and "25 empty" in shown
