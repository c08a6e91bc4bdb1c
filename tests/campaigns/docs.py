"""Every command of README.md and docs/*.md, run as it stands: are they true?

    python -m tests.campaigns.docs [--only first-run tasks] [--keep DIR]

`--keep` works in a directory and leaves it, for pages that come alone. The documents are gone through in
reading order in one copy of the repository, so that what one page makes the next ones use. A `bash` block is
run line by line; `yaml` and `python` blocks with a file name become files, other `python` blocks are run.
What a reader has, and a machine without network has not, is made first, in small: a hub cache with tiny
models by the names used, files of texts and answers, tasks. Words in capitals are filled in, and `--data hub`
becomes a directory.

A block that says what it needs (`# needs: GPUs, hub`) is not run. Its recipes are planned (`--dry_run`) and
the arguments of its `emo` commands parsed; what other programs name is looked up. `make` is asked what it
would do: its targets are campaigns of their own. The table says of each command which of these it was. Writes
runs/docs.json; exits 1 when a command failed.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from itertools import dropwhile
from pathlib import Path
from typing import NamedTuple

import zstandard

from emo.__main__ import COMMANDS, DATA
from emo.data_prep.encoding.chat_templates import BUILT_IN
from tests.campaigns.campaign import Campaign, conduct, copy_checkout
from tests.helpers.corpus import alpaca_rows, texts, write_jsonl
from tests.helpers.documents import Block, blocks, documents, faults
from tests.helpers.evaluating import tiny_model, tiny_tokenizer
from tests.helpers.launching import ENVIRONMENT, PIPED

MODEL = "openai-community/gpt2"  # of the hub, that documents train and evaluate
CHAT_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"  # the same, with a chat template
CHAT_TOKENS = {"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>", "<|im_end|>"]}
PATIENCE = 600  # seconds for a command; other work may share the machine
# What stands for the words that a reader fills in.
FILLED = {"RECIPE": "mine.yaml", "DIR": "data", "TASKS": "data/nlu", "MODEL": MODEL, "RUN_DIR": "runs/mine"}
FILLED |= {"HOSTS": "hosts", "HOST": "localhost", "N": "2", "URL": "none", "FILE": "table2"}
PARSERS = {
    "pipeline": "import sys; from emo.pipeline.cli import _parser; _parser().parse_args(sys.argv[1:])",
    "eval": "import sys; from emo.eval.cli import parser; parser().parse_args(sys.argv[1:])",
    "data_prep": "import sys; import emo.data_prep.cli as m; "
    "args = m.parse_arguments(m._parser(), sys.argv[1:]); m.load_data_config(args.recipe, args.overrides)",
}


class Done(NamedTuple):
    mode: str
    code: int
    output: str


class Scratch:
    """A copy of the repository with what a reader of the documents has."""

    def __init__(self, directory: Path) -> None:
        self.root = copy_checkout(directory)
        if not (directory / ".venv").exists():
            (directory / ".venv").symlink_to(sys.prefix)
        # Runs on one host meet at DeepSpeed's port: where the system can, these have a network of their own.
        self.alone, self.first = ["unshare", "--map-root-user", "--net"], "ip link set lo up; "
        if subprocess.run([*self.alone, "ip", "link"], capture_output=True).returncode:
            self.alone, self.first = [], ""
        self.environment = ENVIRONMENT | {"PYTHONPATH": str(directory), "HF_HOME": str(directory / "hub")}
        self.environment |= {"GLOO_SOCKET_IFNAME": "lo"}

    def furnish(self) -> None:
        """Make models, texts, answers and tasks, by the names that the documents use."""
        cached = self.root / "hub" / "hub" / f"models--{MODEL.replace('/', '--')}"
        (cached / "refs").mkdir(parents=True)
        (cached / "refs" / "main").write_text("0" * 40)
        tiny_model(cached / "snapshots" / ("0" * 40))
        chat = cached.with_name(f"models--{CHAT_MODEL.replace('/', '--')}")
        (chat / "refs").mkdir(parents=True)
        (chat / "refs" / "main").write_text("0" * 40)
        tokenizer = tiny_tokenizer(cached / "snapshots" / "tokenizer")
        tokenizer.add_special_tokens(CHAT_TOKENS)
        tokenizer.chat_template, _ = BUILT_IN["chatml"]
        tiny_model(chat / "snapshots" / ("0" * 40), tokenizer=tokenizer)
        write_jsonl(self.root / "notes" / "a.jsonl", texts(200))
        (self.root / "notes.txt").write_text("\n".join(texts(60)))
        write_jsonl(self.root / "answers.jsonl", alpaca_rows(120))
        rows = "".join(f"How many are {n} and {n}?,{2 * n}\n" for n in range(40))
        (self.root / "answers.csv").write_text("question,answer\n" + rows)
        (self.root / "hosts").write_text("localhost slots=8\n")
        tiny_tokenizer(self.root / "data" / "tokenizers" / "llama")
        wikitext = self.root / "data" / "lm" / "wikitext-2-v1"
        wikitext.mkdir(parents=True)
        for split, count in (("train", 400), ("validation", 60)):
            articles = (f" \n = Title {i} = \n \n {text} \n" for i, text in enumerate(texts(count, count)))
            (wikitext / f"{split}.txt.zst").write_bytes(zstandard.compress("".join(articles).encode()))
        self.run(f"{sys.executable} -m emo world data/nlu --train 40 --test 12")

    def run(self, command: str, mode: str = "run") -> Done:
        """Run a shell command; code 124 when it takes too long."""
        words = [*self.alone, "bash", "-o", "pipefail", "-c", f"{self.first}{command}"]
        options = PIPED | {"cwd": self.root, "env": self.environment, "stdin": subprocess.DEVNULL}
        process = subprocess.Popen(words, start_new_session=True, **options)
        try:
            output, _ = process.communicate(timeout=PATIENCE)
            return Done(mode, process.returncode, output)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return Done(mode, 124, process.communicate()[0])

    def check(self, command: str) -> Done:
        """Return what can be known of a command that cannot be run here."""
        words = list(dropwhile(lambda word: re.match(r"[A-Z_]+=", word), shlex.split(command)))
        script = next((w for w in words if re.search(r"launch/(continual|instruct)\.sh$", w)), None)
        if script is not None:
            recipe = words[words.index("--" if "--" in words else script) + 1 :]
            return self.run(shlex.join(["python", script, *recipe, "--dry_run", "--ranks", "8"]), "dry run")
        if words[:2] == ["emo", "train"]:
            recipe = words[words.index("--" if "--" in words else "train") + 1 :]
            return self.run(shlex.join(["emo", "train", *recipe, "--dry_run", "--ranks", "8"]), "dry run")
        if words[:2] == ["python", "-m"]:
            return self.run(f"{command} --help", "--help")
        if words[0] != "emo":
            return Done("names", 0, "")  # `faults` has looked them up
        if words[1] in ("sweep", "table"):  # a table wants the runs done
            runs = shlex.join(["emo", "sweep", *words[2:]])
            return self.run(f"{runs.removesuffix(' --dry_run')} --dry_run", "dry run")
        if words[1] in ("plan", "preflight", "score"):
            return self.run(command)
        room = "data_prep" if COMMANDS[words[1]].function == DATA else "eval"
        if words[1] == "report" and not any("eval" in word or "results" in word for word in words):
            room = "pipeline"  # of runs that are not there
        return self.run(shlex.join(["python", "-c", PARSERS[room], *words[1:]]), "arguments")


def filled(text: str) -> str:
    for word, meant in (FILLED | ({"RECIPE": "tuned.yaml"} if "instruct" in text else {})).items():
        text = re.sub(rf"(?<![\w$-]){word}(?![\w=])", meant, text)
    return text.replace("--data hub", "--data data/nlu")


def go_through(block: Block, scratch: Scratch, show: Campaign) -> None:
    """Make a block's file, or run or check its commands and show what came of each."""
    commands: list[str] = []
    if block.file or block.language == "python":
        (scratch.root / (block.file or "block.py")).write_text(block.text)
        commands = [] if block.file else ["python block.py"]
    elif block.language == "bash":
        lines = Block("", "bash", filled(block.text)).commands
        commands = [command for line in lines for command in line.split(" && ")]
    for command in commands:
        started = time.monotonic()
        if command.startswith("make "):
            done = scratch.run(command.replace("make ", "make --dry-run ", 1), "make --dry-run")
        elif block.needs and "--slurm" not in command:  # which only writes a file
            done = scratch.check(command)
        else:
            done = scratch.run(command)
        if done.code:
            print(done.output, flush=True)
        end = f"exit code {done.code}" if done.code else f"{time.monotonic() - started:.0f} s"
        needs = f", needs {', '.join(block.needs)}" if block.needs else ""
        show(block.where, command, f"{done.mode}{needs}: {end}", done.code == 0)


def run(directory: Path, args: argparse.Namespace, show: Campaign) -> None:
    scratch = Scratch(Path(args.keep) if args.keep else directory)
    if not (scratch.root / "hub").exists():
        scratch.furnish()
    for path in documents():
        if not args.only or path.stem in args.only:
            wrong = faults(path)
            show(path.name, "links, files, options, keys", "as they should be", not wrong, "; ".join(wrong))
            for block in blocks(path):
                go_through(block, scratch, show)


if __name__ == "__main__":
    sys.exit(conduct("docs", run, __doc__, only=[], keep=""))
