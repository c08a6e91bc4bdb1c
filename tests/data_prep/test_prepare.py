"""`prepare`: the same bytes however work is shared out, killed or out of disk; rows as the recipe says."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet
import pytest

from emo.common.errors import UserError
from emo.common.files import DiskFullError
from emo.data_prep.cli import main
from emo.data_prep.config import DataConfig
from emo.data_prep.inputs import open_inputs
from emo.data_prep.plan import Plan
from emo.data_prep.rows import Rejected, parse, plain_text
from emo.data_prep.shards import TokenDataset
from emo.data_prep.verify import verify
from tests.conftest import REPO
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


@pytest.mark.parametrize("kind", ["text", "instruct"])
def test_bytes_do_not_depend_on_workers_or_jobs(tmp_path: Path, kind: str) -> None:
    write_jsonl(
        tmp_path / "a.jsonl", texts(400, sentences=60) if kind == "text" else alpaca_rows(1500)
    )  # several pieces
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
    write_jsonl(tmp_path / "a.jsonl", texts(400, sentences=60))  # several pieces
    config = data_config(tmp_path)
    run(config, shard=(1, 2))
    for early in (lambda: run(config, finish=True), lambda: train_set(config)):
        with pytest.raises(UserError):
            early()
    run(config, shard=(0, 2))
    manifest = config.dir / "train/manifest.json"
    inode = manifest.stat().st_ino
    run(config, finish=True)
    assert manifest.stat().st_ino == inode


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
    write_jsonl(tmp_path / "a.jsonl", ["one <newline> <newline>two<newline>three"])
    write_jsonl(tmp_path / "b.jsonl", ["Wall St.\\band #39;s"])
    sources = [{"files": "a.jsonl", "clean": "writingprompts"}, {"files": "b.jsonl", "clean": "ag_news"}]
    config = prepared(tmp_path, sequence_len=4, sources=sources)
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


def recipe_of(root: Path, out: Path) -> Path:
    """A recipe for `emo prepare`; `config_of` is the same."""
    recipe = root / f"{out.name}.yaml"
    recipe.write_text(
        f"data: {{dir: {out}, root: {root}, tokenizer: {tiny_tokenizer()}, sequence_len: 64, shards: 6, "
        "validation_fraction: 0.2, sources: [{files: a.jsonl}]}"
    )
    return recipe


def config_of(root: Path, out: Path) -> DataConfig:
    return data_config(root, dir=str(out), sequence_len=64, shards=6, validation_fraction=0.2)


def start(root: Path, out: Path, workers: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "emo", "prepare", str(recipe_of(root, out)), "--workers", str(workers)]
    return subprocess.Popen(command, cwd=REPO)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, bytes], float]:
    """A directory with a.jsonl, the bytes of an undisturbed run, and the seconds that it took."""
    root = tmp_path_factory.mktemp("crash")
    write_jsonl(root / "a.jsonl", texts(1200, sentences=20))
    began = time.monotonic()
    assert start(root, root / "reference", 2).wait(120) == 0
    seconds = time.monotonic() - began
    assert verify(root / "reference")[1] == []
    return root, file_bytes(root / "reference"), seconds


@pytest.mark.slow
def test_killed_at_random_moments_then_rerun(corpus: tuple[Path, dict[str, bytes], float]) -> None:
    root, expected, seconds = corpus
    partial = 0
    for trial in range(4):
        rng, out = random.Random(trial), root / f"killed-{trial}"
        job = start(root, out, 1 + trial % 2)
        if trial < 2:
            time.sleep(rng.uniform(0.1, 0.9) * seconds)
        count = rng.randint(1, 6) if trial >= 2 else 0  # shards come within a moment: wait for one of them
        while job.poll() is None and len(list((out / "train").glob("shard-*"))) < count:
            time.sleep(0.001)
        workers = psutil.Process(job.pid).children(recursive=True) if job.poll() is None else []
        job.send_signal(signal.SIGKILL)
        job.wait(120)
        assert not psutil.wait_procs(workers, timeout=10)[1], "workers outlived their job"
        partial += bool(list(out.glob("*/shard-*"))) and len(list(out.glob("*/manifest.json"))) < 2
        run(config_of(root, out))
        assert file_bytes(out) == expected, f"trial {trial}"
    assert partial >= 1, "some trials must leave some shards"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Yield a function that mounts a file system of so many kilobytes, or resizes it."""
    disk = tmp_path / "disk"
    disk.mkdir()

    def resize(kilobytes: int) -> Path:
        options = f"size={kilobytes}k" + (",remount" if os.path.ismount(disk) else "")
        if subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(disk)]).returncode:
            pytest.skip("cannot mount a small file system here")
        return disk

    yield resize
    if os.path.ismount(disk):
        subprocess.run(["umount", str(disk)], check=True)


def test_full_disk(corpus: tuple[Path, dict[str, bytes], float], small_disk: Callable[[int], Path]) -> None:
    """At every step the disk may be full: one line says so, nothing half stays, and then it goes on."""
    root, expected, _ = corpus
    total = sum(map(len, expected.values())) // 1024
    met = set()
    for kilobytes in sorted({8, 24, 60, 100, 160, total // 3, total * 2 // 3, total - 20}):
        out = small_disk(kilobytes) / "out"
        with pytest.raises(DiskFullError) as caught:
            run(config_of(root, out))
        assert "\n" not in str(caught.value)
        met.add(str(caught.value).split("writing ")[1].split(";")[0])
        assert [p for p in out.rglob("*") if p.name.endswith(".part")] == []
        assert not list(out.rglob("manifest.json")) or kilobytes > total // 2
        for split in ("train", "validation"):
            if (out / split / "manifest.json").is_file():
                TokenDataset(out / split)
    assert len(met) >= 3, met
    out = small_disk(total * 3) / "out"
    run(config_of(root, out))
    assert file_bytes(out) == expected


def test_slurm_array(tmp_path: Path) -> None:
    """An array that starts at 1, as some sites like it."""
    write_jsonl(tmp_path / "a.jsonl", texts(300))
    recipe = recipe_of(tmp_path, tmp_path / "out")
    slurm = {"SLURM_ARRAY_TASK_COUNT": "3", "SLURM_ARRAY_TASK_MIN": "1", "SLURM_CPUS_PER_TASK": "1"}
    slurm |= {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    script = ["bash", "launch/slurm/prepare.sbatch", str(recipe), "data.seed=0"]
    environments = [os.environ | slurm | {"SLURM_ARRAY_TASK_ID": str(i)} for i in (1, 2, 3)]
    jobs = [subprocess.Popen(script, cwd=REPO, env=environment) for environment in environments]
    assert [job.wait(120) for job in jobs] == [0] * 3
    assert len(TokenDataset(tmp_path / "out/train").manifest.shards) == 6 and not verify(tmp_path / "out")[1]


def test_exit_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_jsonl(tmp_path / "a.jsonl", texts(400, sentences=60))  # several pieces
    recipe = str(recipe_of(tmp_path, tmp_path / "out"))
    assert main(["prepare", recipe, "data.shards=2", "--workers", "1"]) == 0
    assert main(["prepare", recipe, "data.shards=2"]) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert main(["prepare", recipe, "data.shard=2"]) == main(["prepare", str(tmp_path / "no.yaml")]) == 2
    for bad in ("2/2", "x", "1", "-1/2"):
        with pytest.raises(SystemExit):
            main(["prepare", recipe, f"--shard={bad}"])
