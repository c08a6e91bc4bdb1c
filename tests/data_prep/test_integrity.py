"""Prepared data stay as they are, or are refused: changed files and recipes, forgeries, ids that differ."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard

from emo.common.errors import UserError
from emo.common.files import Hashes, sha256
from emo.data_prep import inputs, write
from emo.data_prep.config import DataConfig
from emo.data_prep.encode import RowEncoder
from emo.data_prep.inputs import read_text
from emo.data_prep.prepare import Workers
from emo.data_prep.reencode import ShardCheck
from emo.data_prep.shards import TokenDataset, open_prepared, read_manifest
from emo.data_prep.tokenizer import save_tokenizer, train_sentencepiece
from emo.data_prep.verify import verify
from tests.helpers.corpus import (
    alpaca_rows,
    data_config,
    file_bytes,
    prepared,
    run,
    texts,
    tiny_tokenizer,
    train_set,
    write_jsonl,
)


def rows(path: Path, count: int = 120, seed: int = 0) -> None:
    write_jsonl(path, texts(count, seed))


@pytest.fixture(scope="module")
def prepared_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A.jsonl, its own copy of the tokenizer, and what was prepared from them: two splits of three shards."""
    root = tmp_path_factory.mktemp("integrity")
    rows(root / "a.jsonl")
    shutil.copytree(tiny_tokenizer(), root / "tokenizer")
    run(config_of(root))
    return root


def config_of(place: Path, **data: Any) -> DataConfig:
    common = {"sources": [{"files": "*.jsonl"}], "shards": 3, "validation_fraction": 0.2}
    return data_config(place, **(common | {"tokenizer": "tokenizer"} | data))


@pytest.fixture
def config(prepared_once: Path, tmp_path: Path) -> DataConfig:
    """A copy of its own of the prepared directory, whose hashes are remembered."""
    root = tmp_path / "root"
    shutil.copytree(prepared_once, root, symlinks=True)
    config = config_of(root)
    run(config)
    return config


def flip(path: Path, at: int = -1) -> None:
    """One bit, in place; size and time of modification stay."""
    times = path.stat()
    with path.open("r+b") as file:
        file.seek(at % times.st_size)
        byte = file.read(1)[0]
        file.seek(at % times.st_size)
        file.write(bytes([byte ^ 1]))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def edit(path: Path, **changes: Any) -> None:
    """Some keys of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | changes), encoding="utf-8")


SHARD, NOTE = "train/shard-00001-of-00003.arrow", "train/shard-00001-of-00003.json"

# Changes to the prepared directory.
MENDED: dict[str, Callable[[Path], None]] = {
    "a shard is deleted": lambda d: (d / SHARD).unlink(),
    "a shard's last byte is flipped": lambda d: flip(d / SHARD),
    "a note and its shard agree, but not with the manifest": lambda d: [
        flip(d / SHARD, 3000),
        edit(d / NOTE, sha256=sha256(d / SHARD)),
    ],
    "validation is removed": lambda d: shutil.rmtree(d / "validation"),
    "another split takes its place": lambda d: [
        shutil.rmtree(d / "validation"),
        shutil.copytree(d / "train", d / "validation"),
    ],
    "a manifest is edited": lambda d: edit(d / "train/manifest.json", vocab_size=32000),
}

REFUSED: dict[str, tuple[Callable[[Path], None], str]] = {
    "a new file matches": (lambda d: rows(d.parent / "b.jsonl", seed=9), "source-new"),
    "a source is edited at equal size": (lambda d: flip(d.parent / "a.jsonl", 200), "source-changed"),
    "the tokenizer is replaced": (lambda d: other_tokenizer(d.parent / "tokenizer"), "tokenizer-changed"),
    "the saved tokenizer is edited": (
        lambda d: (d / "tokenizer/tokenizer.json").write_text(
            (d / "tokenizer/tokenizer.json").read_text().replace('"<0x41>"', '"<0xAB>"', 1)
        ),
        "tokenizer-changed",
    ),
    "settings are gone": (lambda d: (d / "settings.json").unlink(), "settings-damaged"),
    "settings are edited": (lambda d: edit(d / "settings.json", sequence_len=64), "settings-differ"),
    "the plan is flipped": (lambda d: [flip(d / "plan.parquet", 100), (d / SHARD).unlink()], "plan-damaged"),
    "the plan is gone": (lambda d: (d / "plan.parquet").unlink(), "plan-gone"),
}  # fmt: skip


def other_tokenizer(place: Path) -> None:
    """One of another vocabulary at the same place."""
    shutil.rmtree(place)
    train_sentencepiece(texts(300, seed=5), 390, place / "model" / "tokenizer.model")
    save_tokenizer(place / "model" / "tokenizer.model", None, place)


@pytest.mark.parametrize("case", MENDED)
def test_what_was_damaged_is_found_and_mended(config: DataConfig, case: str) -> None:
    """By verify, by training, and by prepare, which gives the same bytes again."""
    expected = file_bytes(config.dir)
    MENDED[case](config.dir)
    assert verify(config.dir)[1]
    if case != "another split takes its place":  # which says what it is
        with contextlib.suppress(UserError):  # training opens it, and hashes it at a run's first start
            data, sets = open_prepared(config)
            assert any(list(each.faults(Hashes(config.dir / "none"))) for each in (data, *sets.values()))
    assert not any("nothing to do" in line for line in run(config))
    assert file_bytes(config.dir) == expected
    assert verify(config.dir)[1] == []


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_mended_is_refused(config: DataConfig, case: str) -> None:
    """One line, nothing changed, and --force helps where the files are sound."""
    damage, code = REFUSED[case]
    damage(config.dir)
    before = file_bytes(config.dir)
    with pytest.raises(UserError) as caught:
        run(config)
    assert caught.value.code == code
    assert "\n" not in str(caught.value) and "--force" in str(caught.value)
    assert file_bytes(config.dir) == before
    run(config, force=True)
    assert verify(config.dir)[1] == []


def test_a_copy_elsewhere_verifies_and_trains(config: DataConfig, tmp_path: Path) -> None:
    """Only the data sets and the tokenizer need to travel."""
    place = tmp_path / "elsewhere"
    for name in ("train", "validation", "tokenizer"):
        shutil.copytree(config.dir / name, place / name)
    assert verify(place)[1] == [] and verify(place / "train")[1] == []
    train, sets = open_prepared(config.model_copy(update={"dir": place}))
    assert list(sets) == ["validation"] and len(train) > len(sets["validation"]) > 0
    assert not list(train.faults(Hashes(tmp_path / "hashes.json")))


def test_ranks_share_the_hashing_and_touched_shards_are_hashed_again(
    config: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, memory = train_set(config), tmp_path / "hashes.json"
    read: list[str] = []
    monkeypatch.setattr("emo.common.files.sha256", lambda path: (read.append(path.name), sha256(path))[1])
    ranks = [Hashes(memory) for _ in range(2)]
    assert not [fault for rank, hashes in enumerate(ranks) for fault in data.faults(hashes, rank, 2)]
    assert sorted(read) == [info.file for info in data.manifest.shards]
    ranks[0].save([ranks[1].new()])
    read.clear()
    assert not list(data.faults(Hashes(memory))) and read == []
    flip(config.dir / SHARD, 3000)
    (fault,) = data.faults(Hashes(memory))
    assert SHARD in fault and read == [Path(SHARD).name]


def test_a_directory_of_others_is_not_touched(tmp_path: Path) -> None:
    rows(tmp_path / "a.jsonl")
    other = tmp_path / "prepared/train/weights.bin"
    other.parent.mkdir(parents=True)
    other.write_text("the only copy")
    for force in (False, True):
        with pytest.raises(UserError):
            run(data_config(tmp_path), force=force)
        kept = [p for p in tmp_path.rglob("*") if p.is_file() and ".planning" not in p.parts]
        assert sorted(kept) == sorted([tmp_path / "a.jsonl", other]) and other.read_text() == "the only copy"


@pytest.mark.parametrize("wrong", [{"sources": [{"files": "no.jsonl"}]}, {"contamination": "no"}])
def test_a_wrong_recipe_under_force_loses_nothing(config: DataConfig, wrong: dict[str, Any]) -> None:
    """What is there is cleared when all that could fail has been done."""
    before = file_bytes(config.dir)
    with pytest.raises(UserError):
        run(config_of(config.root, **wrong), force=True)
    assert file_bytes(config.dir) == before and not list((config.dir / ".new").rglob("*.*"))
    assert run(config)[:-1] == [f"{config.dir} is already prepared; nothing to do"]


def test_force_waits_for_no_one(config: DataConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another job's directory is not cleared under it."""
    (config.dir / SHARD).unlink()
    tried: list[str] = []

    class Meanwhile(Workers):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            monkeypatch.setattr("emo.data_prep.prepare.Workers", Workers)
            with pytest.raises(UserError) as caught:
                run(config, force=True)
            assert caught.value.code == "in-use"
            tried.append("force")

    monkeypatch.setattr("emo.data_prep.prepare.Workers", Meanwhile)
    run(config)
    assert tried == ["force"] and verify(config.dir)[1] == []


def test_a_shard_that_points_beyond_itself_is_damaged(tmp_path: Path) -> None:
    """Arrow believes the lengths in a file; reading such a row reads other memory, or ends the process."""
    write_jsonl(tmp_path / "a.jsonl", alpaca_rows(12))
    place = prepared(tmp_path, kind="instruct", shards=1, sequence_len=512).dir / "train"
    rows = read_manifest(place).rows.to_bytes(8, "little")
    (path,) = place.glob("*.arrow")
    assert path.read_bytes().count(rows) >= 2
    path.write_bytes(path.read_bytes().replace(rows, (10**7).to_bytes(8, "little")))
    with pytest.raises(UserError):
        TokenDataset(place)


def test_a_small_file_does_not_unpack_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "test.jsonl.zst"
    monkeypatch.setattr(inputs, "TEXT_LIMIT", 10 << 20)
    path.write_bytes(zstandard.compress(bytes(9 << 20)))
    assert len(read_text(path)) == 9 << 20
    path.write_bytes(zstandard.compress(bytes(64 << 20)))
    with pytest.raises(UserError):
        read_text(path)


def test_a_tokenizer_of_nonsense_is_one_line(tmp_path: Path) -> None:
    """A huge id ended the process: the library makes room for all ids below it."""
    whole = json.loads((tiny_tokenizer() / "tokenizer.json").read_text())
    model, added = whole["model"], whole["added_tokens"]
    for wrong in (
        {"model": model | {"vocab": model["vocab"] | {"a": 4 * 10**9}}},
        {"added_tokens": [added[0] | {"id": -1}, *added[1:]]},
        {"model": None},
    ):
        (tmp_path / "tokenizer.json").write_text(json.dumps(whole | wrong))
        with pytest.raises(UserError):
            save_tokenizer(tmp_path, None, tmp_path / "out")
    assert not (tmp_path / "out").exists()


CHATML = (
    "{% for m in messages %}<s>{{ m['role'] }}\n{{ m['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
EXAMPLES = {"kind": "instruct", "sources": [{"files": "i.jsonl"}]}
SORTS: dict[str, tuple[dict[str, Any], bool]] = {
    "text": ({"validation_fraction": 0.3}, True),
    "copies": ({"sources": [{"files": "a.jsonl", "weight": 2.5}, {"files": "b.jsonl", "domain": "b"}]}, True),
    "long texts": ({"sources": [{"files": "long.txt", "format": "document"}], "shards": 1}, True),
    "instructions": (EXAMPLES | {"sequence_len": 400}, True),
    "split": (EXAMPLES | {"sequence_len": 60, "overlong": "split"}, False),
    "chat": (EXAMPLES | {"sequence_len": 300, "template": "chat_template", "tokenizer": "chat"}, False),
    "ids": ({"sources": [{"files": "ids.jsonl", "format": "tokens"}]}, False),
}


@pytest.fixture
def files(tmp_path: Path) -> Path:
    write_jsonl(
        tmp_path / "a.jsonl", ({"text": f" {text}\n\n </s> naïve 日本 {text}"} for text in texts(200))
    )
    write_jsonl(tmp_path / "b.jsonl", texts(200, seed=4))
    write_jsonl(tmp_path / "i.jsonl", alpaca_rows(120))
    write_jsonl(tmp_path / "ids.jsonl", ({"ids": [7 + i % 90] * (20 + i)} for i in range(60)))
    (tmp_path / "long.txt").write_text("\n".join(texts(900)), encoding="utf-8")
    save_tokenizer(tiny_tokenizer(), None, tmp_path / "chat")
    (tmp_path / "chat" / "chat_template.jinja").write_text(CHATML, encoding="utf-8")
    return tmp_path


def sorted_config(files: Path, sort: str) -> Any:
    return data_config(files, **({"sources": [{"files": "b.jsonl"}]} | SORTS[sort][0]))


def shifted(self: RowEncoder, part: Any, encode: Any = RowEncoder.encode) -> Any:
    """Ids that are wrong as they leave a worker."""
    done = encode(self, part)
    return done._replace(ids=done.ids ^ 1)


@pytest.mark.parametrize("sort", SORTS)
def test_what_differs_is_not_sealed(files: Path, sort: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong as it leaves a worker, or as it is packed; what is right is sealed, and verified."""
    config = sorted_config(files, sort)
    with monkeypatch.context() as broken:
        broken.setattr(RowEncoder, "encode", shifted)
        with pytest.raises(UserError) as error:
            run(config)
    assert error.value.code == "not-as-tokenized"
    assert not [p for name in ("*.arrow", "manifest.json", "*.part") for p in config.dir.rglob(name)]
    lists = write.lists_of
    with monkeypatch.context() as broken:
        broken.setattr(write, "lists_of", lambda offsets, values: lists(offsets, values[::-1].copy()))
        with pytest.raises(UserError):
            run(config)
    run(config)
    right, faults = verify(config.dir)
    assert not faults and len(right) == len(config.splits)
    if SORTS[sort][1]:  # then `verify` can encode again, and notices what the check of a shard lets pass
        assert all("same: none" not in line for line in right)
        with monkeypatch.context() as broken:
            broken.setattr(RowEncoder, "encode", shifted)
            broken.setattr(ShardCheck, "compare", lambda *_: None)
            run(config, force=True)
        assert verify(config.dir)[1]
