"""Shared parts of all comparisons: alternation, medians, peak memory, the table, the verdict.

Contestants run in turn within one process, round after round, so that changes of the machine's load affect
all of them. A ratio is the median over rounds of the quotient within a round.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
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
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

REPO = Path(__file__).resolve().parents[2]
RESULTS = REPO / "runs" / "bench"
SHARED = Path(os.environ.get("SHARED_DATA", REPO.parent / "shared" / "data"))
PEERS = Path(tempfile.gettempdir()) / f"bench-peers-{os.getuid()}"
Name = TypeVar("Name")
Contestants = dict[str, Callable[[int], object]]  # called with the round's number
Times = dict[Name, list[float]]  # seconds by contestant and round


def parser(description: str | None, rounds: int = 5, parts: Collection[str] = ()) -> argparse.ArgumentParser:
    """Return a parser with the options of all benches. Its help has the first line of `description`.

    Also sets one thread. Contestants are compared by CPU time, which does not include other load.
    """
    torch.set_num_threads(1)
    result = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    result.add_argument("--rounds", type=int, default=rounds, help="measured rounds per contestant")
    result.add_argument("--quick", action="store_true", help="small sizes: does it run at all")
    if parts:
        result.add_argument("--parts", nargs="+", choices=parts, default=list(parts))
    return result


def machine() -> str:
    """Describe the machine without its name."""
    match = re.search("model name.*: (.*)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    words = [match[1] if match else platform.machine(), f"{os.cpu_count()} cores"]
    words += [f"torch {torch.__version__}", f"{torch.get_num_threads()} thread(s)"]
    return ", ".join(words + ([torch.cuda.get_device_name()] if torch.cuda.is_available() else []))


def seconds(run: Callable[[], object]) -> float:
    """Return the CPU seconds of one call, or on a GPU the time between two CUDA events."""
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


def turns(names: Sequence[Name], rounds: int, first: int = 0) -> Iterator[tuple[int, Name]]:
    """Yield every name in every round from `first` on. The order rotates by one each round."""
    for number in range(first, rounds):
        offset = number % len(names)
        for name in (*names[offset:], *names[:offset]):
            yield number, name


def race(contestants: Contestants, rounds: int) -> Times[str]:
    """Return the seconds of each contestant in each round. Round -1 warms up and does not count."""
    times: Times[str] = {name: [] for name in contestants}
    for number, name in turns(list(contestants), rounds, first=-1):
        gc.collect()
        took = seconds(functools.partial(contestants[name], number))
        if number >= 0:
            times[name].append(took)
    return times


def ratio(times: Times[Name], name: Name, base: Name) -> float:
    """Return the median over rounds of `name` divided by `base` in the same round."""
    return statistics.median(a / b for a, b in zip(times[name], times[base], strict=True))


def peak_memory_mb(run: Callable[[], object]) -> float:
    """Return the peak memory during `run` in MiB, above the memory before it.

    On a CPU the kernel counts resident pages, which include every temporary of every library. On a GPU the
    allocator counts. Call this in a fresh process (`in_child`), because pages that an earlier contestant
    left in the allocator would hide the memory of this one.
    """
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    # Reset the high-water mark to the current memory.
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")

    def status_kb(key: str) -> int:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        return int(next(line for line in lines if line.startswith(key)).split()[1])

    before = status_kb("VmRSS")
    run()
    return (status_kb("VmHWM") - before) / 1024


def in_child(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in a fresh process with one thread, which frees large buffers immediately."""
    settings = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    context = multiprocessing.get_context("spawn")
    with mock.patch.dict(os.environ, settings), context.Pool(1, torch.set_num_threads, (1,)) as pool:
        return pool.apply(function, arguments)


def random_llama(vocabulary: int, context: int) -> Any:
    """Return a random LLaMA of 6 layers of width 256. With 32,000 tokens it has 21 million parameters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 6, "num_attention_heads": 8}
    config = LlamaConfig(vocab_size=vocabulary, max_position_embeddings=context, **sizes)
    return LlamaForCausalLM(config).eval()


def import_peer(package: str, module: str, alias: str = "") -> Any:
    """Import `module` of a peer `package` (NAME==VERSION), which is installed only for benches.

    It is installed without dependencies and comes last on the path. `alias` is the name to import it as, if
    this project has a top-level module of the same name. Raises ImportError with the reason.
    """
    with contextlib.suppress(ImportError):
        return importlib.import_module(alias or module)
    target = PEERS / package
    if not target.is_dir():
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(target)]
        done = subprocess.run([*command, package], capture_output=True, text=True)
        if done.returncode:
            raise ImportError(f"{package} could not be installed: {done.stderr.strip()[-200:]}")
    if alias:
        spec = importlib.util.spec_from_file_location(alias, target / module / "__init__.py")
        assert spec is not None and spec.loader is not None
        sys.modules[alias] = loaded = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(loaded)
        return loaded
    if str(target) not in sys.path:
        sys.path.append(str(target))
    importlib.invalidate_caches()
    return importlib.import_module(module)


@dataclass
class Report:
    """The rows of the table, and the ratios for the verdict."""

    name: str
    judged: bool = True  # False for small sizes, where no target applies
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
        """Add a ratio, which is only reported without a target. A missing value misses its target."""
        better, target = ("lower", at_most) if at_least is None else ("higher", at_least)
        entry: dict[str, Any] = {"value": None if value is None else round(value, 4), "target": None}
        if self.judged and target is not None:
            met = value is not None and (value <= target if better == "lower" else value >= target)
            entry |= {"target": target, "better": better, "met": met}
        self.ratios[name] = entry

    def skip(self, part: str, reason: str) -> None:
        """Note why a part could not be measured, and count this as a missed target."""
        self.note(f"{part} skipped: {reason}")
        self.ratio(f"{part}: share that was measured", None, at_least=1.0)

    def race(self, contestants: Contestants, rounds: int, column: str, **cells: Any) -> Times[str]:
        """Race contestants. Add a row for each, with its name in `column` and its median seconds."""
        times = race(contestants, rounds)
        for name, took in times.items():
            self.row(**cells, **{column: name}, seconds=statistics.median(took))
        return times

    def finish(self, **settings: Any) -> int:
        """Print the table and write runs/bench/NAME.json. Return 1 if a target is missed, else 0.

        A judged report without ratios measured nothing, which is also a miss.
        """
        print(f"\n{machine()}")
        columns = list(dict.fromkeys(key for row in self.rows for key in row))
        lines = [columns, *([_shown(row.get(column)) for column in columns] for row in self.rows)]
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
        missed = any(entry.get("met") is False for entry in self.ratios.values())
        return int(missed or (self.judged and not self.ratios))


def _shown(cell: Any) -> str:
    if cell is None:
        return ""
    return f"{cell:.3f}" if isinstance(cell, float) else str(cell)
