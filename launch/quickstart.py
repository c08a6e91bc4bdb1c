"""The complete workflow on a laptop, from raw text to a report, with the same commands as on a cluster.

Each step prints its `emo` commands and runs them. Run it again to resume, or `rm -rf runs/quickstart` to
start from scratch.
"""

from __future__ import annotations

import os
import resource
import shlex
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

sys.path.insert(0, str(next(d for d in Path(__file__).resolve().parents if (d / "emo").is_dir())))

from emo.common.cli.commands import Parser, parse_arguments
from emo.common.errors import ExitCode
from emo.common.provenance import REPOSITORY as SHIPPED

REPOSITORY = SHIPPED if (SHIPPED / "Makefile").exists() else Path.cwd()  # a wheel's directory is not for runs
RUN = Path("runs/quickstart")
RECIPES = Path("launch/recipes")
BIN = Path(sys.executable).parent
RANKS = 2
ABOUT = (
    "Run the complete workflow on generated toy data. A small language model is pre-trained on one half of "
    "the data. Training then continues on the other half, once with MLE and once with EMO. Eight tasks test "
    "both halves. You need no GPU and no network. It takes about 7 minutes on two idle cores. Press Ctrl-C "
    "to stop. The same command resumes."
)
NOTICE = (
    "Toy tasks about a generated world, models of a few million parameters, and one training run each. The "
    "intervals cover test rows only; another seed may differ by more."
)
OWN = RECIPES / "quickstart-own.yaml"


def steps() -> list[tuple[str, list[list[str]]]]:
    """Return the title and commands of each step. The commands of a step run in parallel."""
    emo = [str(BIN / "python"), "-m", "emo"]
    train = [*emo, "train", "--num_gpus", str(RANKS), "--"]
    pretrain = str(RECIPES / "quickstart-pretrain.yaml")
    adapt = str(RECIPES / "quickstart-continue.yaml")
    tasks = str(RUN / "tasks")
    results = str(RUN / "results")
    runs = {"base": "pretrain", "mle": "mle", "emo": "emo"}
    evaluate = []
    generate = []
    for name, run in runs.items():
        model = ["--model", str(RUN / run / "export"), "--name", name, "--output_path", results]
        evaluate.append([*emo, "eval", *model, "--tasks", "all", "--data", tasks])
        generate.append([*emo, "generate", *model, "--samples", "8"])
    page = ["--output_path", f"{RUN}/", "--notice", NOTICE, "--title", "Quickstart"]
    report = [*emo, "report", results, *page]
    report += [f"--run={name}={RUN / run}" for name, run in runs.items()]
    continued = {o: [adapt, f"objective.name={o}", f"output_dir={RUN / o}"] for o in ("mle", "emo")}
    return [
        ("Generate the eight tasks", [[*emo, "world", tasks]]),
        ("Tokenise the pre-training corpus", [[*emo, "prepare", pretrain]]),
        ("Tokenise the adaptation corpus", [[*emo, "prepare", adapt]]),
        ("Pre-train a small LLaMA with MLE (ZeRO-3, 2 ranks)", [[*train, pretrain]]),
        ("Continue it with MLE (ZeRO-3, 2 ranks)", [[*train, *continued["mle"]]]),
        ("Continue it with EMO (ZeRO-3, 2 ranks)", [[*train, *continued["emo"]]]),
        ("Score all three models on the eight tasks", evaluate),
        ("Sample text from all three", generate),
        ("Write the report", [report]),
        ("Compare MLE with the base model", [[*emo, "compare", "base", "mle", "--results", results]]),
        ("Compare EMO with MLE", [[*emo, "compare", "mle", "emo", "--results", results]]),
    ]


def next_commands(file: str) -> list[list[list[str]]]:
    """Return lines of commands that prepare a user's file, train on it, and evaluate the model."""
    emo = [os.path.relpath(BIN / "python", REPOSITORY), "-m", "emo"]
    recipe = [str(OWN), f"data.sources=[{{files: {file}}}]"]
    results = str(RUN / "results")
    evaluate = ["--model", "runs/own/export", "--name", "own", "--tasks", "all", "--data", str(RUN / "tasks")]
    report = ["--run", "own=runs/own", "--output_path", "runs/own/"]
    return [
        [[*emo, "prepare", *recipe]],
        [[*emo, "train", "--num_gpus", str(RANKS), "--", *recipe]],
        [[*emo, "eval", *evaluate, "--output_path", results], [*emo, "report", results, *report]],
    ]


def run_parallel(commands: list[list[str]]) -> list[int]:
    """Run commands in parallel and return their exit codes. Ctrl-C stops all of them."""
    environment = os.environ | {
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        "PATH": f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}",
    }
    running = [subprocess.Popen(command, cwd=REPOSITORY, env=environment) for command in commands]
    try:
        return [process.wait() for process in running]
    except KeyboardInterrupt:
        for process in running:
            process.terminate()
        for process in running:
            process.wait()
        raise


def make_parser() -> Parser:
    """Return the parser of the command."""
    codes = (ExitCode.DONE, ExitCode.FAILURE, ExitCode.MISTAKE, ExitCode.STOPPED)
    return Parser(prog="emo quickstart", description=ABOUT, examples=["emo quickstart"], codes=codes)


def quickstart(words: list[str]) -> int:
    """Run all steps. Returns the exit code of the first one that fails. words[0] is the command's name."""
    parse_arguments(make_parser(), words[1:])

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    started = time.perf_counter()
    plan = steps()
    try:
        print(textwrap.fill(ABOUT, 100), flush=True)
        for number, (title, commands) in enumerate(plan, start=1):
            elapsed = time.perf_counter() - started
            print(f"\n[{number}/{len(plan)}] {title}  ({elapsed:.0f} s so far)", flush=True)
            for command in commands:
                print(f"$ {shlex.join(command).replace(str(BIN) + '/', '')}", flush=True)
            if failed := [code for code in run_parallel(commands) if code]:
                print(f"error: step {number} exited with code {failed[0]}", file=sys.stderr)
                return failed[0] if failed[0] > 0 else ExitCode.FAILURE
    except KeyboardInterrupt:
        print("\nstopped; run the same command again to resume", file=sys.stderr)
        return ExitCode.STOPPED
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = time.perf_counter() - started
    print(
        f"\nDone in {seconds:.0f} s ({used.ru_utime + used.ru_stime:.0f} s of CPU time).\n"
        f"Report:  {REPOSITORY / RUN / 'report.html'}  (open it in a browser)\n"
        f"Numbers: {REPOSITORY / RUN / 'results.json'}\n\n"
        'Next: train on your data, for example my.jsonl with {"text": ...} in each line. The last command\n'
        "writes runs/own/report.html with the loss on your text and the change on the tasks."
    )
    for line in next_commands("my.jsonl"):
        print("$ " + " && ".join(map(shlex.join, line)))
    print(f"{OWN} shows how to start from a real model.")
    return ExitCode.DONE


if __name__ == "__main__":
    sys.exit(quickstart(sys.argv))
