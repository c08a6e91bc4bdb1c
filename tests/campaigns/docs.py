"""Run every command of README.md and docs/.

    python -m tests.campaigns.docs [--only lora text-to-report] [--keep DIR]

`--only` takes the names of pages. `--keep` works in DIR and keeps it, so that a later run can use it.
The pages are run in the order of the site in one copy of the repository: README, tutorials, how-to,
reference, explanation. A page can use the files of earlier pages. A `bash` block is run line by line. `yaml`
and `python` blocks with a file name become files. Other `python` blocks and notebooks are run.

The copy first gets small stand-ins for a reader's files: a hub cache with tiny models, texts, answers, tasks.
Words in capitals are filled in, and `--data hub` becomes a directory. Every page starts with the same
recipes and finished runs. `emo train RECIPE key=value` gets a new run directory, so that it does not resume.

A block after a comment with its needs (`<!-- needs: GPUs, hub -->`) is not run. Its recipes are planned
(`--dry_run`), the arguments of its `emo` commands are parsed, and the names in other commands are looked up.
`make` targets are checked with `make --dry-run`. The table shows how each command was checked. Writes
runs/docs.json. Exits with code 1 if a command failed.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import zlib
from itertools import dropwhile
from pathlib import Path
from typing import NamedTuple

import yaml
import zstandard

from emo.__main__ import COMMANDS, DATA, TRAINING
from emo.data_prep.encoding.chat_templates import BUILT_IN
from tests.campaigns.campaign import Campaign, conduct, copy_checkout
from tests.conftest import REPO
from tests.helpers.corpus import alpaca_rows, texts, write_jsonl
from tests.helpers.documents import Block, blocks, documents, faults
from tests.helpers.evaluating import tiny_model, tiny_tokenizer
from tests.helpers.launching import ENVIRONMENT, PIPED

MODEL = "openai-community/gpt2"  # the Hub model that the pages train and evaluate
CHAT_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"  # the Hub model with a chat template
CHAT_TOKENS = {"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>", "<|im_end|>"]}
PATIENCE = 600  # seconds for a command, because other work may share the machine
# Values for the words that a reader fills in.
FILLED = {"RECIPE": "recipe.yaml", "DIR": "data", "TASKS": "data/nlu", "MODEL": MODEL, "RUN_DIR": "runs/mine"}
FILLED |= {"HOSTS": "hosts", "HOST": "localhost", "N": "2", "URL": "none", "FILE": "table2"}
PARSERS = {
    "pipeline": "import sys; from emo.pipeline.cli import make_parser as p; p().parse_args(sys.argv[1:])",
    "eval": "import sys; from emo.eval.cli import make_parser; make_parser().parse_args(sys.argv[1:])",
    "data_prep": "import sys; import emo.data_prep.cli as m; args = "
    "m.parse_arguments(m.make_parser(), sys.argv[1:]); "
    "hasattr(args, 'recipe') and m.load_data_config(args.recipe, args.overrides)",
}


RECIPE = f"""
output_dir: runs/mine
data: {{dir: data/mine, tokenizer: {MODEL}, sequence_len: 64, shards: 1, validation_fraction: 0.1,
       sources: [{{files: notes/*.jsonl}}]}}
model: {{path: {MODEL}, dtype: float32}}
train: {{max_steps: 4, global_batch_size: 8, micro_batch_size: 1, save_steps: 2, export_checkpoints: true}}
"""
TUNED = RECIPE.replace("mine", "tuned").replace("{dir", "{kind: instruct, dir").replace("notes/*", "answers")
RECIPES = {"recipe.yaml": RECIPE, "mine.yaml": RECIPE, "tuned.yaml": TUNED}
RUNS = ("mine", "mle", "emo")  # finished runs that pages evaluate


class Done(NamedTuple):
    mode: str
    code: int
    output: str


class Scratch:
    """A copy of the repository with the files that a reader of the documents has."""

    def __init__(self, directory: Path) -> None:
        self.root = copy_checkout(directory)
        if not (directory / ".venv").exists():
            (directory / ".venv").symlink_to(sys.prefix)
        # Runs on one host share DeepSpeed's port. If the system allows it, these get a separate network.
        self.alone, self.first = ["unshare", "--map-root-user", "--net"], "ip link set lo up; "
        if subprocess.run([*self.alone, "ip", "link"], capture_output=True).returncode:
            self.alone, self.first = [], ""
        self.environment = ENVIRONMENT | {"PYTHONPATH": str(directory), "HF_HOME": str(directory / "hub")}
        self.environment |= {"GLOO_SOCKET_IFNAME": "lo"}

    def furnish(self) -> None:
        """Create models, texts, answers and tasks under the names that the documents use."""
        cached = self.root / "hub" / "hub" / f"models--{MODEL.replace('/', '--')}"
        (cached / "refs").mkdir(parents=True)
        (cached / "refs" / "main").write_text("0" * 40)
        tiny_model(cached / "snapshots" / ("0" * 40), num_attention_heads=8)  # for sequence parallelism
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
        (self.root / "mine.yaml").write_text(RECIPE)
        for command in ("emo prepare mine.yaml", "emo train mine.yaml"):
            done = self.run(command)
            assert done.code == 0, done.output
        (self.root / "runs" / "mine").rename(self.root / "finished")

    def begin_page(self) -> None:
        """Restore the recipes and the finished runs."""
        for name, text in RECIPES.items():
            (self.root / name).write_text(text)
        for name in RUNS:
            shutil.rmtree(self.root / "runs" / name, ignore_errors=True)
            shutil.copytree(self.root / "finished", self.root / "runs" / name)

    def write(self, name: str, text: str) -> None:
        """Write a file of a page. A recipe starts without data and without a run."""
        (self.root / name).write_text(text)
        tree = yaml.safe_load(text) if name.endswith(".yaml") else {}
        for directory in (tree.get("output_dir"), (tree.get("data") or {}).get("dir")):
            if isinstance(directory, str):
                shutil.rmtree(self.root / directory, ignore_errors=True)

    def run(self, command: str, mode: str = "run") -> Done:
        """Run a shell command. The code is 124 if it takes too long."""
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
        """Check a command that cannot be run here, as far as possible."""
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
            return Done("names", 0, "")  # `faults` has checked them
        if words[1] in ("sweep", "table"):  # a table needs finished runs
            runs = shlex.join(["emo", "sweep", *words[2:]])
            return self.run(f"{runs.removesuffix(' --dry_run')} --dry_run", "dry run")
        if words[1] in ("plan", "preflight", "score"):
            return self.run(command)
        rooms = {DATA: "data_prep", TRAINING: "pipeline"}
        room = rooms.get(COMMANDS[words[1]].function, "eval")
        if words[1] == "report" and not any("eval" in word or "results" in word for word in words):
            room = "pipeline"  # reports on runs, which do not exist here
        return self.run(shlex.join(["python", "-c", PARSERS[room], *words[1:]]), "arguments")


def filled(text: str) -> str:
    for word, meant in (FILLED | ({"RECIPE": "tuned.yaml"} if "instruct" in text else {})).items():
        text = re.sub(rf"(?<![\w$-]){word}(?![\w=])", meant, text)
    return text.replace("--data hub", "--data data/nlu")


def separate(command: str) -> str:
    """Add separate directories to a command that trains a shared recipe or changes its data."""
    words = command.split()
    if words[:1] != ["emo"] or not {"recipe.yaml", "tuned.yaml"} & set(words):
        return command
    changes = sorted(word for word in words if re.match(r"[a-z_.]+=", word))
    data = [word for word in changes if word.startswith("data.")]
    if data and not any(word.startswith("data.dir=") for word in data):
        command += f" data.dir=data/{zlib.crc32(' '.join(data).encode())}"
    if words[1] == "train" and not any(word.startswith("output_dir=") for word in changes):
        command += f" output_dir=runs/{zlib.crc32(' '.join(changes).encode())}"
    return command


def go_through(block: Block, scratch: Scratch, show: Campaign) -> None:
    """Write a block's file, or run or check its commands and report each result."""
    commands: list[str] = []
    if block.file or block.language == "python":
        scratch.write(block.file or "block.py", block.text)
        commands = [] if block.file else ["python block.py"]
    elif block.language == "bash":
        lines = Block("", "bash", filled(block.text)).commands
        commands = [separate(command) for line in lines for command in line.split(" && ")]
    for command in commands:
        started = time.monotonic()
        if command.startswith("make "):
            done = scratch.run(command.replace("make ", "make --dry-run ", 1), "make --dry-run")
        elif block.needs and "--slurm" not in command:  # `--slurm` only writes a file
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
            scratch.begin_page()
            wrong = faults(path)
            show(
                str(path.relative_to(REPO)),
                "links, files, options, keys",
                "as they should be",
                not wrong,
                "; ".join(wrong),
            )
            for block in blocks(path):
                go_through(block, scratch, show)


if __name__ == "__main__":
    sys.exit(conduct("docs", run, __doc__, only=[], keep=""))
