"""Check that answers and verdicts are correct when `emo answer` and `emo judge` are killed and run again.

    python -m tests.campaigns.judging [--kills 20] [--questions 50] [--seed 0]

Two models answer questions, and a judge compares their answers in both orders. The first evaluation is
undisturbed. Later ones are killed with -9 at seeded random moments (while they load, sample or write) and
started again by the same command, until there were --kills kills. All files except leases must equal the
undisturbed files byte for byte. The judge replies 1 or 2, so that verdicts can be read. Chunks are small, so
that something is left to resume.

Prints a table, writes runs/judging.json, and exits with code 1 if anything differs.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import random
import sys
import time
from pathlib import Path

from emo.eval.cli import main as main_of_eval
from emo.eval.judging.answers import Answering
from emo.eval.judging.judging import Judging
from tests.campaigns.campaign import Campaign, conduct
from tests.helpers.corpus import write_jsonl
from tests.helpers.evaluating import tiny_judge, tiny_model
from tests.helpers.killing import to_the_end

MODELS = ("mle", "emo")
NAMES = ["cat", "dog", "lamp", "town", "boat"]
VERBS = ["see", "draw", "find", "carry", "forget", "paint", "sell", "hide", "name", "describe"]


def files(out: Path) -> dict[str, bytes]:
    paths = [p for p in sorted(out.rglob("*")) if p.is_file() and "leases" not in p.parts]
    return {p.relative_to(out).as_posix(): p.read_bytes() for p in paths if not p.name.endswith(".part")}


def evaluate(root: Path, out: Path) -> None:
    """Let two models answer and a judge compare the answers, with verdicts of one token and small chunks."""
    Answering.chunk, Judging.chunk = 8, 4
    common = f"--output_path {out} --max_new_tokens"
    options = f"--questions {root}/questions.jsonl {common} 40"
    commands = [f"answer --model {root / name} {options}" for name in MODELS]
    a, b = (out / "models" / name / "answers/questions-greedy" for name in MODELS)
    commands.append(f"judge --judge pandalm --a {a} --b {b} --model {root}/judge --name v {common} 1")
    with Path(os.devnull).open("w", encoding="utf-8") as nothing, contextlib.redirect_stdout(nothing):
        for command in commands:
            if code := main_of_eval(command.split()):
                sys.exit(code)


def judging(root: Path, args: argparse.Namespace, show: Campaign) -> None:
    """Kill one evaluation after the other, until there were `args.kills` kills."""
    os.environ["EVAL_CACHE"] = str(root / "cache")
    for seed, name in enumerate(MODELS):
        tiny_model(root / name, seed)
    tiny_judge(root / "judge")
    texts = [f"How would you {verb} a {name}?" for name in NAMES for verb in VERBS][: args.questions]
    write_jsonl(root / "questions.jsonl", [{"id": i, "instruction": text} for i, text in enumerate(texts)])
    began, whole = time.monotonic(), root / "whole"
    to_the_end(evaluate, (root, whole), 0, float)
    # Seconds before each kill, so that each evaluation is killed about six times.
    moment = functools.partial(random.Random(args.seed).uniform, 0, (time.monotonic() - began) / 3)
    expected, killed, lives, same = files(whole), 0, 0, 0
    while killed < args.kills:
        out, lives = root / f"killed-{lives}", lives + 1
        killed += to_the_end(evaluate, (root, out), args.kills - killed, moment)
        actual = {name.replace(str(out), str(whole)): text for name, text in files(out).items()}
        same += actual == expected
        for name in sorted(n for n in actual.keys() | expected.keys() if actual.get(n) != expected.get(n)):
            show("kills", f"judge: {name}", "differs", False)
    numbers = json.loads(expected["judgements/v.json"])
    read = f"{numbers['read']} of {numbers['pairs']} verdicts read, {numbers['counts']['changed']} change"
    text = f"{killed} kills in {lives} evaluations, {same} of them equal; {read}"
    show("kills", "judge as the judge", text, same == lives)


if __name__ == "__main__":
    sys.exit(conduct("judging", judging, __doc__, kills=20, questions=50, seed=0))
