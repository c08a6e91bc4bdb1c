"""Real processes: killed, out of disk, of an array: started again, the bytes are the same."""

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


def start(root: Path, out: Path, *arguments: str) -> subprocess.Popen[bytes]:
    """`emo prepare` in its own process."""
    recipe = root / f"{out.name}.yaml"
    recipe.write_text(
        f"data: {{dir: {out}, root: {root}, tokenizer: {tiny_tokenizer()}, sequence_len: 64, shards: 6, "
        "validation_fraction: 0.2, sources: [{files: a.jsonl}]}"
    )
    return subprocess.Popen([sys.executable, "-m", "emo", "prepare", str(recipe), *arguments], cwd=REPO)


def config_of(root: Path, out: Path) -> DataConfig:
    """The configuration of `start`."""
    return data_config(root, dir=str(out), sequence_len=64, shards=6, validation_fraction=0.2)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, bytes], float]:
    """A directory with a.jsonl, the bytes of an undisturbed run, and the seconds that it took."""
    root = tmp_path_factory.mktemp("crash")
    write_jsonl(root / "a.jsonl", texts(1200, sentences=20))
    began = time.monotonic()
    assert start(root, root / "reference", "--workers", "2").wait(120) == 0
    seconds = time.monotonic() - began
    assert verify(root / "reference")[1] == []
    return root, file_bytes(root / "reference"), seconds


@pytest.mark.slow
def test_killed_at_random_moments_then_rerun(corpus: tuple[Path, dict[str, bytes], float]) -> None:
    root, expected, seconds = corpus
    caught, partial = 0, 0
    for trial in range(4):
        rng = random.Random(trial)
        out = root / f"killed-{trial}"
        job = start(root, out, "--workers", str(1 + trial % 2))
        if trial < 2:
            time.sleep(rng.uniform(0.1, 1.0) * seconds)
        count = rng.randint(1, 6) if trial >= 2 else 0  # shards come within a moment: wait for one of them
        while job.poll() is None and len(list(out.glob("*/shard-*"))) < count:
            time.sleep(0.001)
        workers = psutil.Process(job.pid).children(recursive=True) if job.poll() is None else []
        job.send_signal(signal.SIGKILL)
        caught += job.wait(120) == -signal.SIGKILL
        assert not psutil.wait_procs(workers, timeout=10)[1], "workers outlived their job"
        complete = [split for split in ("train", "validation") if (out / split / "manifest.json").is_file()]
        partial += bool(list(out.glob("*/shard-*"))) and len(complete) < 2
        run(config_of(root, out))
        assert file_bytes(out) == expected, f"trial {trial}"
    assert caught >= 2, "most trials must meet a running job"
    assert partial >= 1, "some trials must leave some shards"


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
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"data: {{dir: {tmp_path / 'out'}, root: {tmp_path}, tokenizer: {tiny_tokenizer()}, "
        "sources: [{files: a.jsonl}], sequence_len: 32, shards: 5}"
    )
    slurm = {"SLURM_ARRAY_TASK_COUNT": "3", "SLURM_ARRAY_TASK_MIN": "1", "SLURM_CPUS_PER_TASK": "1"}
    slurm |= {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    script = ["bash", "launch/slurm/prepare.sbatch", str(recipe), "data.seed=0"]
    environments = [os.environ | slurm | {"SLURM_ARRAY_TASK_ID": str(i)} for i in (1, 2, 3)]
    jobs = [subprocess.Popen(script, cwd=REPO, env=environment) for environment in environments]
    assert [job.wait(120) for job in jobs] == [0] * 3
    assert len(TokenDataset(tmp_path / "out/train").manifest.shards) == 5 and not verify(tmp_path / "out")[1]
