"""Check the quickstart's promises on a fresh copy of the checkout, once undisturbed and once with kills.

    python -m tests.campaigns.quickstart [--kills 8] [--seed 0]

whole    The first output comes within 2 seconds. The CPU time is below 8 minutes on two cores. The base model
         has headroom. Gains over it have intervals above zero. Each task has a model better than chance.
killed   All its processes are killed with -9 at seeded random moments, and the same command is run again.
         Every accuracy must equal the undisturbed run's.
next     The commands that it prints at its end are run on a custom file.

Prints a table, writes runs/quickstart-campaign.json, and exits with code 1 if a promise is not kept.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import resource
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from emo.launch import quickstart
from tests.campaigns.campaign import Campaign, conduct, copy_checkout
from tests.helpers.corpus import texts, write_jsonl

CEILING = 0.95  # upper bound of the base model's accuracy on each task
COMMAND = [sys.executable, "launch/quickstart.py"]


def results(file: Path) -> dict[str, Any]:
    return json.loads(file.read_bytes()) if file.is_file() else {"rows": [], "models": []}


def accuracies(directory: Path) -> dict[tuple[str, str], float]:
    output = results(directory / quickstart.RUN / "results.json")
    return {(row["model"], row["task"]): row["accuracy"] for row in output["rows"]}


def whole(directory: Path, show: Campaign) -> None:
    """Run the quickstart undisturbed, and check its time and its results."""
    began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    process = subprocess.Popen(COMMAND, cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert process.stdout is not None
    process.stdout.readline()
    first = time.perf_counter() - began
    process.communicate()
    wall, used = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime
    show("whole", "exit code", str(process.returncode), process.returncode == 0)
    if process.returncode:
        return
    show("whole", "first words", f"{first:.1f} s", first < 2)
    show("whole", "time", f"{wall:.0f} s, {cpu:.0f} s of CPU time", cpu < 2 * 8 * 60)
    output = results(directory / quickstart.RUN / "results.json")
    means = {m["name"]: m["mean_accuracy"] for m in output["models"]}
    words = ", ".join(f"{name} {100 * mean:.1f}" for name, mean in means.items())
    show("whole", "mean accuracies", words, 0.40 <= means["base"] <= 0.75)
    highest = max((r["accuracy"], r["task"]) for r in output["rows"] if r["model"] == "base")
    show("whole", "the base model's best task", f"{highest[1]} {100 * highest[0]:.0f}", highest[0] < CEILING)
    guessed = {r["task"] for r in output["rows"]}
    guessed -= {r["task"] for r in output["rows"] if r["low"] > r["chance"]}
    show("whole", "tasks that all models guess", ", ".join(sorted(guessed)) or "none", not guessed)
    for item in output["mean_comparisons"]:
        low, high = (100 * item["interval"][side] for side in ("low", "high"))
        words = f"{100 * item['difference']:+.1f} [{low:+.1f}, {high:+.1f}]"
        show("whole", f"{item['model']} - {item['baseline']}", words, item["baseline"] != "base" or low > 0)


def killed(directory: Path, kills: int, rng: random.Random, expected: dict, show: Campaign) -> None:
    """Kill a quickstart at random moments, run it again, and compare its accuracies."""
    done, nothing = 0, subprocess.DEVNULL
    for _ in range(kills):
        process = subprocess.Popen(COMMAND, cwd=directory, stdout=nothing, stderr=nothing)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=rng.uniform(2, 75))
            break
        for item in psutil.process_iter():  # all processes that work in the copy
            with contextlib.suppress(psutil.Error):
                if Path(item.cwd()) == directory:
                    item.kill()
        done += 1
        process.wait()
    code = subprocess.run(COMMAND, cwd=directory, stdout=nothing).returncode
    same = code == 0 and accuracies(directory) == expected
    show("killed", f"{done} kills", f"exit code {code}, accuracies {'equal' if same else 'DIFFER'}", same)


def afterwards(directory: Path, show: Campaign) -> None:
    """Run the commands that the quickstart prints at its end, on a custom file."""
    write_jsonl(directory / "my.jsonl", texts(400))
    for command in (command for line in quickstart.next_commands("my.jsonl") for command in line):
        command[0] = sys.executable if command[0].endswith("python") else command[0]
        done = subprocess.run(command, cwd=directory, capture_output=True, text=True)
        show("next", shlex.join(command[1:4]), f"exit code {done.returncode}", done.returncode == 0)
        if done.returncode:
            print(done.stdout[-2000:], done.stderr[-2000:])
            return
    names = {model["name"] for model in results(directory / "runs/own/results.json")["models"]}
    show("next", "models of the report", ", ".join(sorted(names)), "own" in names)


def run(directory: Path, args: argparse.Namespace, show: Campaign) -> None:
    first = copy_checkout(directory / "whole")
    whole(first, show)
    if expected := accuracies(first):
        copy = copy_checkout(directory / "killed")
        killed(copy, args.kills, random.Random(args.seed), expected, show)
        afterwards(first, show)


if __name__ == "__main__":
    sys.exit(conduct("quickstart-campaign", run, __doc__, kills=8, seed=0))
