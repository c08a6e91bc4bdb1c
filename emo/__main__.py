"""The one command, `emo` or `python -m emo`: it hands its words to the room that has the command."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

import emo.common.packages  # noqa: F401 - before all others


class Command(NamedTuple):
    """A command: the function that runs it, as MODULE:FUNCTION, and a line of help."""

    function: str
    help: str


DATA = "emo.data_prep.cli:main"
TRAINING = "emo.pipeline.cli:run"
EVALUATION = "emo.eval.cli:main"
SWEEPS = "emo.experiments.cli:main"
COMMANDS = {
    "sniff": Command(DATA, "show what a file is taken for, and a recipe to paste"),
    "prepare": Command(DATA, "make the token shards of a recipe"),
    "inspect": Command(DATA, "show prepared rows, in colour what carries loss"),
    "verify": Command(DATA, "check prepared data against their hashes and their tokenizer"),
    "world": Command(DATA, "write the eight tasks of the embedded world"),
    "plan": Command(TRAINING, "predict memory, step time and hours on given GPUs"),
    "preflight": Command(TRAINING, "check that every host is fit to train"),
    "score": Command(TRAINING, "write a model's log-probability of every token beside the data"),
    "train": Command("emo.launch.supervise:train", "train a recipe under DeepSpeed, or resume it"),
    "top": Command(TRAINING, "show what the ranks of a run do right now"),
    "eval": Command(EVALUATION, "score one model on tasks"),
    "watch": Command(EVALUATION, "score every complete checkpoint of a run, each exactly once"),
    "compare": Command(EVALUATION, "compare two models, with paired tests"),
    "generate": Command(EVALUATION, "sample text, by default from the whole distribution"),
    "chat": Command(EVALUATION, "talk to a tuned model in the terminal"),
    "quality": Command(EVALUATION, "measure sampled text: MAUVE, ROUGE, perplexities"),
    "answer": Command(EVALUATION, "answer instructions, in AlpacaEval's format"),
    "judge": Command(EVALUATION, "find the win rate of two models' answers by a judge"),
    "report": Command("", "write training runs, or evaluations, as one page"),
    "export": Command(EVALUATION, "write results for lm-evaluation-harness, the hub or Weights & Biases"),
    "sweep": Command(SWEEPS, "do the runs of an experiment file"),
    "table": Command(SWEEPS, "gather the table of an experiment file"),
    "advise": Command("emo.experiments.advise:main", "say what is known where a recipe lies on the map"),
    "quickstart": Command(
        "emo.launch.quickstart:quickstart", "see the whole product on a small world, in minutes"
    ),
}


def main(argv: list[str] | None = None) -> int:
    """Run a command and return its exit code, see `ExitCode`."""
    if argv is None and sys.getfilesystemencoding() != "utf-8":
        # Recipes name files in UTF-8, whatever the locale, and the manifest is the same on every machine.
        typed = Path("/proc/self/cmdline").read_bytes().split(b"\0")[1:-1]
        os.execv(sys.executable, [os.fsencode(sys.executable), b"-X", b"utf8", *typed])
    words = [word for word in (sys.argv[1:] if argv is None else argv) if not word.startswith("--local_rank")]
    # What a shell asks to complete; the options of a command are known to itself.
    line = os.environ["COMP_LINE"] if "_ARGCOMPLETE" in os.environ else ""
    _, *typed_words = line.split() or [""]
    if typed_words and typed_words[0] in COMMANDS and (typed_words[1:] or line.endswith(" ")):
        return run(typed_words)
    from emo import __version__
    from emo.common.cli.commands import Parser, parse_arguments

    parser = Parser(
        prog="emo",
        description="Continual pre-training and instruction tuning with EMO and its peers, and evaluation.",
        epilog="`emo COMMAND --help` shows the options of a command.",
    )
    parser.add_argument("--version", action="version", version=f"emo {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        commands.add_parser(name, help=command.help, add_help=False)
    parse_arguments(parser, words[:1])
    return run(words)


def run(words: list[str]) -> int:
    """Run the command that words[0] names."""
    from emo.common.errors import ExitCode
    from emo.common.text import printable

    if words[0] == "report" and (path := _first_path(words[1:])) is not None and not path.exists():
        line = f"error: {printable(str(path))} does not exist; give a run directory, or one of results"
        print(line, file=sys.stderr)
        return ExitCode.MISTAKE
    functions = _reports(words[1:]) if words[0] == "report" else [COMMANDS[words[0]].function]
    code = 0
    options: dict[str, Any] = {}
    if words[0] == "train":
        from emo.common.cli.commands import first_word
        from emo.pipeline.control.stop import leave_early

        leave_early()
        first_word("train")
    if words[0] == "prepare":  # which uses one section of the recipe; mistakes in the others are found now
        from emo.pipeline.config import RunConfig

        options["recipe"] = RunConfig
    for name in functions:
        module, _, function = name.partition(":")
        try:
            code = getattr(importlib.import_module(module), function)(words, **options)
        except SystemExit as end:  # argparse has answered --help
            if len(functions) == 1 or end.code:
                raise
            print()
    return code


def modules(word: str) -> list[str]:
    """Return the modules that a command may run; none of a word that is no command."""
    if word == "report":
        return [TRAINING.partition(":")[0], EVALUATION.partition(":")[0]]
    return [COMMANDS[word].function.partition(":")[0]] if word in COMMANDS else []


def _reports(words: list[str]) -> list[str]:
    """Return who writes the report: of runs if the first path is a run directory, else of evaluations."""
    if not words or words[0] in {"-h", "--help"}:
        return [TRAINING.replace(":run", ":main"), EVALUATION]
    path = _first_path(words)
    is_run = path is not None and any((path / name).exists() for name in ("metrics.jsonl", "config.yaml"))
    return [TRAINING if is_run else EVALUATION]


def _first_path(words: list[str]) -> Path | None:
    """Return the first word that is no option, nor the value of one."""
    for before, word in zip(["", *words], words, strict=False):
        if not word.startswith("-") and (not before.startswith("--") or "=" in before):
            return Path(word)
    return None


if __name__ == "__main__":
    sys.exit(main())
