"""Real processes: killed, side by side, out of disk, of an array, in any locale: the bytes are the same."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from emo.common.files import DiskFullError
from emo.data_prep.config import DataConfig
from emo.data_prep.shards import TokenDataset
from emo.data_prep.verify import verify
from tests.conftest import REPO
from tests.helpers.corpus import data_config, file_bytes, run, texts, tiny_tokenizer, write_jsonl

TRIALS = 4


class Job:
    """`emo prepare` in its own process."""

    def __init__(self, root: Path, out: Path, *arguments: str) -> None:
        recipe = root / f"{out.name}.yaml"
        recipe.write_text(
            f"data: {{dir: {out}, root: {root}, tokenizer: {tiny_tokenizer()}, sequence_len: 64, shards: 6, "
            "validation_fraction: 0.2, sources: [{files: a.jsonl}]}"
        )
        command = [sys.executable, "-m", "emo", "prepare", str(recipe), *arguments]
        self.process = subprocess.Popen(
            command, cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def result(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=120)
        return self.process.returncode, out, err

    def children(self) -> list[psutil.Process]:
        try:
            return psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []


def config_of(root: Path, out: Path) -> DataConfig:
    """The configuration of a Job."""
    return data_config(root, dir=str(out), sequence_len=64, shards=6, validation_fraction=0.2)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, bytes], float]:
    """A directory with a.jsonl, the bytes of an undisturbed run, and the seconds that it took."""
    root = tmp_path_factory.mktemp("crash")
    write_jsonl(root / "a.jsonl", texts(1200, sentences=20))
    began = time.monotonic()
    assert Job(root, root / "reference", "--workers", "2").result()[0] == 0
    seconds = time.monotonic() - began
    assert verify(root / "reference")[1] == []
    return root, file_bytes(root / "reference"), seconds


def wait_for_shards(job: Job, out: Path, count: int) -> None:
    """Until so many files of shards stand in `out`, or the job has ended."""
    while job.process.poll() is None and len(list(out.glob("*/shard-*"))) < count:
        time.sleep(0.001)


def gone(processes: list[psutil.Process]) -> bool:
    """Whether all of them end within ten seconds."""
    return not psutil.wait_procs(processes, timeout=10)[1]


@pytest.mark.slow
def test_killed_at_random_moments_then_rerun(corpus: tuple[Path, dict[str, bytes], float]) -> None:
    root, expected, seconds = corpus
    caught, partial = 0, 0
    for trial in range(TRIALS):
        rng = random.Random(trial)
        out = root / f"killed-{trial}"
        job = Job(root, out, "--workers", str(1 + trial % 2))
        if trial % 4 < 2:
            time.sleep(rng.uniform(0.1, 1.0) * seconds)
        else:  # the shards come within a moment at the end: wait for one of them
            wait_for_shards(job, out, rng.randint(1, 6))
        workers = job.children()
        job.process.send_signal(signal.SIGKILL)
        caught += job.result()[0] == -signal.SIGKILL
        assert gone(workers), "workers outlived their job"
        complete = [split for split in ("train", "validation") if (out / split / "manifest.json").is_file()]
        for split in complete:
            TokenDataset(out / split)
        partial += bool(list(out.glob("*/shard-*"))) and len(complete) < 2
        run(config_of(root, out))
        assert file_bytes(out) == expected, f"trial {trial}"
        assert verify(out)[1] == []
    assert caught >= TRIALS // 2, "most trials must meet a running job"
    assert partial >= 1, "some trials must leave some shards"


def test_all_jobs_of_an_array_at_once(corpus: tuple[Path, dict[str, bytes], float]) -> None:
    root, expected, _ = corpus
    out = root / "array"
    jobs = [Job(root, out, "--workers", "1", "--shard", f"{i}/4") for i in range(4)]
    results = [job.result() for job in jobs]
    assert [code for code, _, _ in results] == [0] * 4, results
    assert file_bytes(out) == expected
    assert "".join(text for _, text, _ in results).count("% padding") == 2


@pytest.fixture
def small_disk(tmp_path: Path):  # type: ignore[no-untyped-def]
    """Makes a file system of a few kilobytes; `resize` it with the returned function."""
    place = tmp_path / "disk"
    place.mkdir()

    def resize(kilobytes: int) -> Path:
        mounted = os.path.ismount(place)
        options = f"size={kilobytes}k" + (",remount" if mounted else "")
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)], capture_output=True, text=True
        )
        assert not (mounted and done.returncode), done.stderr
        if done.returncode:
            pytest.skip(f"cannot mount a small file system here: {done.stderr.strip()}")
        return place

    yield resize
    if os.path.ismount(place):
        subprocess.run(["umount", str(place)], check=True)


def test_full_disk(corpus: tuple[Path, dict[str, bytes], float], small_disk) -> None:  # type: ignore[no-untyped-def]
    """At every step the disk may be full: one line says so, nothing half stays, and then it goes on."""
    root, expected, _ = corpus
    total = sum(map(len, expected.values())) // 1024
    met = set()
    for kilobytes in sorted({8, 24, 60, 100, 160, total // 3, total * 2 // 3, total - 20}):
        out = small_disk(kilobytes) / "out"
        with pytest.raises(DiskFullError, match=r"no space left while writing .*; make room in") as caught:
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


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    write_jsonl(tmp_path / "a.jsonl", texts(300))
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"data: {{dir: {tmp_path / 'out'}, root: {tmp_path}, tokenizer: {tiny_tokenizer()}, "
        "sources: [{files: a.jsonl}], sequence_len: 32, shards: 5}"
    )
    return path


def together(commands: list[tuple[list[str], dict[str, str]]]) -> None:
    """Run them at the same time; all must succeed."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    running = [
        subprocess.Popen(
            command,
            cwd=REPO,
            env=os.environ | {"PATH": path} | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for command, environment in commands
    ]
    said = [process.communicate(timeout=120)[0] for process in running]
    assert [process.returncode for process in running] == [0] * len(running), said


def whole(recipe: Path) -> bool:
    out = recipe.parent / "out"
    return len(TokenDataset(out / "train").manifest.shards) == 5 and verify(out)[1] == []


def test_slurm_array(recipe: Path) -> None:
    """An array that starts at 1, as some sites like it."""
    script = ["bash", "launch/slurm/prepare.sbatch", str(recipe), "data.seed=0"]
    slurm = {"SLURM_ARRAY_TASK_COUNT": "3", "SLURM_ARRAY_TASK_MIN": "1", "SLURM_CPUS_PER_TASK": "1"}
    together([(script, slurm | {"SLURM_ARRAY_TASK_ID": str(i)}) for i in (1, 2, 3)])
    assert whole(recipe)
