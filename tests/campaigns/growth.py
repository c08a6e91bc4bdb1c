"""Measure how the costs of a preparation grow with its data: CPU time, memory and disk, at three sizes.

    python -m tests.campaigns.growth [--parts rows length files groups limit] [--rows 131072]

Each size is four times the one before, and nothing else changes. The parts are named after what grows:

rows    the number of rows
length  the bytes of a row
files   the number of files, with the same rows
groups  the rows of each group of near duplicates, with the same number of rows
limit   the number of rows, of which data.limit_tokens takes about half

Units, blocks and batches are so small that the smallest number of rows makes four units. An exponent of 1
means proportional growth, and 0 means no growth. Exits with code 1 if an exponent is too high.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tests.campaigns.campaign import Campaign, conduct
from tests.conftest import REPO
from tests.helpers.corpus import tiny_tokenizer

FACTOR = 4
SIZES = 3
MOST = {"CPU": 1.1, "memory": 0.1, "disk": 1.1}  # largest exponents
CHILD = """
import sys, time
from pathlib import Path
from emo.data_prep import prepare as preparing
from emo.data_prep.config import load_data_config
from emo.data_prep.selection import buckets, plan, row_units, scan
share = row_units.UNIT_ROWS // int(sys.argv[2])
for module, name in (
    (buckets, "BATCH_BYTES"), (plan, "GROUP_ROWS"), (row_units, "UNIT_ROWS"), (row_units, "BLOCK_ROWS"),
    (scan, "GROUP_ROWS"), (scan, "UNIT_BYTES"),
):
    setattr(module, name, max(16, getattr(module, name) // share))
config = load_data_config(Path(sys.argv[1]), [])
sizes = []
def measured(self, *arguments):
    sizes.append(sum(path.stat().st_size for path in self.new.rglob("*") if path.is_file()))
    finish(self, *arguments)
finish = preparing.Preparation.make_plan
preparing.Preparation.make_plan = measured
preparing.prepare(config, (0, 1), 1, False, False, str)
sizes.append(sum((config.dir / name).stat().st_size for name in ("rows.parquet", "plan.parquet")))
status = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
peak = next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
print(time.process_time(), peak / 1024, sum(sizes))
"""


def write_rows(directory: Path, rows: int, words: int, files: int = 1, group: int = 1) -> None:
    """Write rows of random words to similarly large files. group: number of rows that differ in one word."""
    rng = np.random.default_rng(0)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    vocabulary = ["".join(rng.choice(letters, length)) for length in rng.integers(3, 9, 20_000)]
    first = rng.integers(0, len(vocabulary), (rows // group, words)) if group > 1 else None
    for number in range(files):
        with (directory / f"{number:05d}.txt").open("w", encoding="utf-8") as file:
            mine = np.arange(rows * number // files, rows * (number + 1) // files)
            for part in np.array_split(mine, -(-len(mine) // 4096)):
                drawn = rng.integers(0, len(vocabulary), (len(part), words))
                if first is not None:
                    changed = np.arange(len(part)), rng.integers(0, words, len(part))
                    drawn, others = first[part % len(first)], drawn[changed]
                    drawn[changed] = others
                file.writelines(" ".join([vocabulary[i] for i in row]) + "\n" for row in drawn.tolist())


def measure(directory: Path, unit: int, data: dict[str, Any]) -> list[float]:
    """Return the costs of a preparation by one process: CPU seconds, MiB, and bytes of parts and plan.

    unit: rows per unit.
    """
    common = {"dir": str(directory / "out"), "root": str(directory), "tokenizer": str(tiny_tokenizer())}
    common |= {"sources": [{"files": "*.txt", "format": "lines"}], "sequence_len": 1024, "shards": 4}
    recipe = directory / "recipe.yaml"
    recipe.write_text(json.dumps({"data": common | data}))
    command = [sys.executable, "-c", CHILD, str(recipe), str(unit)]
    done = subprocess.run(command, cwd=REPO, stdout=subprocess.PIPE, text=True, check=True)
    return [float(number) for number in done.stdout.split()]


class Part(NamedTuple):
    """A quantity that grows."""

    unit: str
    first: int  # smallest size
    sources: Callable[[int], dict[str, int]]  # the arguments of `write_rows` for a size
    data: Callable[[int], dict[str, Any]] = lambda size: {"dedup": "near"}


def parts(rows: int) -> dict[str, Part]:
    """Return the quantities that can grow, by name. rows: the smallest number of rows."""
    return {
        "rows": Part("rows", rows, lambda size: {"rows": size, "words": 12}),
        "length": Part("words a row", 16, lambda size: {"rows": rows // 8, "words": size}),
        "files": Part("files", 64, lambda size: {"rows": rows, "words": 12, "files": size}),
        "groups": Part("rows a group", 4, lambda size: {"rows": rows, "words": 80, "group": size}),
        "limit": Part(
            "rows", rows, lambda size: {"rows": size, "words": 12}, lambda size: {"limit_tokens": 20 * size}
        ),
    }


def campaign(directory: Path, args: argparse.Namespace, show: Campaign) -> None:
    for name in args.parts:
        part = parts(args.rows)[name]
        sizes = [part.first * FACTOR**i for i in range(SIZES)]
        found = []
        for size in sizes:
            home = directory / f"{name}-{size}"
            home.mkdir()
            sources = part.sources(size)
            write_rows(home, **sources)
            found.append(measure(home, args.rows // 4, part.data(size)))
            shutil.rmtree(home)
            seconds, memory, disk = found[-1]
            costs = f"{seconds:.1f} CPU s, {memory:.0f} MiB, {disk / sources['rows']:.1f} bytes on disk a row"
            show(name, f"{size:,} {part.unit}", costs, True)
        exponents = np.polyfit(np.log(sizes), np.log(found), 1)[0].tolist()
        text = ", ".join(f"{cost} {exponent:.2f}" for cost, exponent in zip(MOST, exponents, strict=True))
        if part.unit == "rows":
            there = found[-1][-1] * (1e9 / sizes[-1]) ** exponents[-1] / 1e9
            text += f"; {there:,.0f} GB on disk for 1e9 rows"
        good = all(exponent <= most for exponent, most in zip(exponents, MOST.values(), strict=True))
        show(name, "exponents", text, good)


if __name__ == "__main__":
    sys.exit(conduct("growth", campaign, __doc__, parts=[*parts(1)], rows=1 << 17))
