"""What every side-by-side measurement shares: alternation, medians, peak memory, the table, the verdict.

Contestants run in turn within one process, round after round, so that a change in the machine's mood hits
all of them. A ratio is the median over rounds of the quotient within the round.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import importlib.util
import json
import multiprocessing
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

REPO = Path(__file__).resolve().parents[2]
RESULTS = REPO / "runs" / "bench"
SHARED = Path(os.environ.get("SHARED_DATA", REPO.parent / "shared" / "data"))
Times = dict[str, list[float]]  # seconds by contestant and round


def settle(threads: int = 1) -> None:
    """One thread: contestants are compared by CPU time, which other people's load does not enter."""
    torch.set_num_threads(threads)


def machine() -> str:
    """The machine in words, without any name of it."""
    known = re.search("model name.*: (.*)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    words = [known[1] if known else platform.machine(), f"{os.cpu_count()} cores"]
    words += [f"torch {torch.__version__}", f"{torch.get_num_threads()} thread(s)"]
    return ", ".join(words + ([torch.cuda.get_device_name()] if torch.cuda.is_available() else []))


def seconds(run: Callable[[], object]) -> float:
    """CPU seconds of one call; on a GPU the time between two CUDA events."""
    if torch.cuda.is_available():
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1000
    begin = time.process_time()
    run()
    return time.process_time() - begin


def race(contestants: dict[str, Callable[[int], object]], rounds: int) -> Times:
    """Seconds of each contestant in each round; `contestant(i)` gets the round's number (>= 0).

    Rounds below zero warm up and do not count. The order turns by one place every round.
    """
    times: Times = {name: [] for name in contestants}
    names = list(contestants)
    for i in range(-1, rounds):
        turn = i % len(names)
        for name in names[turn:] + names[:turn]:
            gc.collect()
            took = seconds(lambda name=name, i=i: contestants[name](i))  # type: ignore[misc]
            if i >= 0:
                times[name].append(took)
    return times


def ratio(times: Times, name: str, base: str) -> float:
    """Median over rounds of `name` divided by `base` in the same round."""
    return statistics.median(a / b for a, b in zip(times[name], times[base], strict=True))


def peak_memory_mb(run: Callable[[], object]) -> float:
    """Largest memory held during `run` above what was held before it, in MiB.

    On a CPU from the kernel's count of resident pages, so every temporary of every library is in it; on a
    GPU from the allocator. Call it in a fresh process (`in_child`): pages that an earlier contestant left
    in the allocator would hide what this one takes.
    """
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    # Sets the high-water mark back to the present.
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")

    def status_kb(key: str) -> int:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        return int(next(line for line in lines if line.startswith(key)).split()[1])

    before = status_kb("VmRSS")
    run()
    return (status_kb("VmHWM") - before) / 1024


def in_child(function: Callable[..., Any], *arguments: Any) -> Any:
    """`function(*arguments)` in a fresh Python process; large buffers go back to the system at once."""
    settings = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    with mock.patch.dict(os.environ, settings), multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


def peer_directory(package: str) -> Path:
    """Where a peer `package` (NAME==VERSION) is installed for benches alone, without what it depends on."""
    target = Path(tempfile.gettempdir()) / f"bench-peers-{os.getuid()}" / package
    if not target.is_dir():
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(target)]
        done = subprocess.run([*command, package], capture_output=True, text=True)
        if done.returncode:
            raise ImportError(f"{package} could not be installed: {done.stderr.strip()[-200:]}")
    return target


def import_peer(package: str, module: str) -> Any:
    """Import `module` of a peer, behind everything else on the path; ImportError with the reason."""
    with contextlib.suppress(ImportError):
        return importlib.import_module(module)
    if (target := str(peer_directory(package))) not in sys.path:
        sys.path.append(target)
    importlib.invalidate_caches()
    return importlib.import_module(module)


def import_peer_as(name: str, package: str, module: str) -> Any:
    """A peer's top-level `module` under another `name`, where this project has one of its own name."""
    file = peer_directory(package) / module / "__init__.py"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    sys.modules[name] = loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


@dataclass
class Report:
    """Rows for the reader, ratios for the verdict."""

    name: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    ratios: dict[str, dict[str, Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def row(self, **cells: Any) -> None:
        self.rows.append(cells)

    def note(self, text: str) -> None:
        self.notes.append(text)
        print(text, flush=True)

    def ratio(
        self, name: str, value: float | None, *, at_most: float | None = None, at_least: float | None = None
    ) -> None:
        """A figure that is claimed, with its target (none: reported only). One without a value misses it."""
        shown = None if value is None else round(value, 4)
        entry: dict[str, Any] = {"value": shown, "target": at_least if at_most is None else at_most}
        if at_most is not None:
            entry |= {"better": "lower", "met": value is not None and value <= at_most}
        if at_least is not None:
            entry |= {"better": "higher", "met": value is not None and value >= at_least}
        self.ratios[name] = entry

    def race(
        self, contestants: dict[str, Callable[[int], object]], rounds: int, column: str, **cells: Any
    ) -> Times:
        """Race, with a row for each contestant, named in `column`: its median seconds."""
        times = race(contestants, rounds)
        for name, took in times.items():
            self.row(**cells, **{column: name}, seconds=statistics.median(took))
        return times

    def finish(self, **settings: Any) -> int:
        """Print the table, write runs/bench/NAME.json; 1 when a target falls short, else 0."""
        print(f"\n{machine()}")
        columns = list(dict.fromkeys(key for row in self.rows for key in row))
        lines = [columns]
        for row in self.rows:
            cells = (row.get(column) for column in columns)
            shown = (f"{cell:.3f}" if isinstance(cell, float) else cell for cell in cells)
            lines.append(["" if cell is None else str(cell) for cell in shown])
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        for line in [columns, ["-" * width for width in widths], *lines[1:]]:
            print("| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |")
        print()
        for name, entry in self.ratios.items():
            sign = {"lower": "<=", "higher": ">="}.get(entry.get("better", ""))
            target = f"target {sign} {entry['target']}" if sign else "no target"
            mark = {True: "met", False: "MISSED", None: ""}[entry.get("met")]
            value = "not measured" if entry["value"] is None else f"{entry['value']:.3f}"
            print(f"{name}: {value} ({target}) {mark}".rstrip())
        RESULTS.mkdir(parents=True, exist_ok=True)
        path = RESULTS / f"{self.name}.json"
        content = {"name": self.name, "machine": machine(), "settings": settings}
        content |= {"rows": self.rows, "ratios": self.ratios, "notes": self.notes}
        path.write_text(json.dumps(content, indent=1) + "\n")
        print(f"written to {path.relative_to(REPO)}")
        return int(any(entry.get("met") is False for entry in self.ratios.values()))


def parser(description: str | None, rounds: int = 5) -> argparse.ArgumentParser:
    """Options that all benches have; the description is the first line."""
    result = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    result.add_argument("--rounds", type=int, default=rounds, help="measured rounds per contestant")
    result.add_argument("--quick", action="store_true", help="small sizes: does it run at all")
    return result
