"""The one command, `emo` or `python -m emo`: it hands its words to the room that has the command."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import NamedTuple

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
    "eval": Command(EVALUATION, "score one model on tasks"),
    "watch": Command(EVALUATION, "score every complete checkpoint of a run, each exactly once"),
    "compare": Command(EVALUATION, "compare two models, with paired tests"),
    "generate": Command(EVALUATION, "sample text, by default from the whole distribution"),
    "quality": Command(EVALUATION, "measure sampled text: MAUVE, ROUGE, perplexities"),
    "answer": Command(EVALUATION, "answer instructions, in AlpacaEval's format"),
    "judge": Command(EVALUATION, "find the win rate of two models' answers by a judge"),
    "report": Command("", "write training runs, or evaluations, as one page"),
    "export": Command(EVALUATION, "write results for lm-evaluation-harness, the hub or Weights & Biases"),
    "sweep": Command(SWEEPS, "do the runs of an experiment file"),
    "table": Command(SWEEPS, "gather the table of an experiment file"),
    "quickstart": Command(
        "emo.launch.quickstart:quickstart", "see the whole product on a small world, in minutes"
    ),
}
USAGE = "usage: emo [-h] [--version] COMMAND ..."


def main(argv: list[str] | None = None) -> int:
    """Run a command and return its exit code, see `ExitCode`."""
    if argv is None and sys.getfilesystemencoding() != "utf-8":
        # Recipes name files in UTF-8, whatever the locale, and the manifest is the same on every machine.
        typed = Path("/proc/self/cmdline").read_bytes().split(b"\0")[1:-1]
        os.execv(sys.executable, [os.fsencode(sys.executable), b"-X", b"utf8", *typed])
    from emo.common.commands import hint

    words = [word for word in (sys.argv[1:] if argv is None else argv) if not word.startswith("--local_rank")]
    if "_ARGCOMPLETE" in os.environ:
        return _complete()
    if not words or words[0] in {"-h", "--help"}:
        print(_help())
        return 0 if words else 2
    if words[0] == "--version":
        from emo import __version__

        print(f"emo {__version__}")
        return 0
    if words[0] not in COMMANDS:
        meant = hint(words[0], COMMANDS)
        print(f"{USAGE}\nemo: error: there is no command {words[0]}{meant}", file=sys.stderr)
        return 2
    return run(words)


def run(words: list[str]) -> int:
    """Run the command that words[0] names."""
    functions = _reports(words[1:]) if words[0] == "report" else [COMMANDS[words[0]].function]
    code = 0
    for name in functions:
        module, _, function = name.partition(":")
        try:
            code = getattr(importlib.import_module(module), function)(words)
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
    values = [word for before, word in zip(["", *words], words, strict=False) if not before.startswith("--")]
    paths = [Path(word) for word in values if not word.startswith("-")]
    is_run = any((path / name).exists() for path in paths[:1] for name in ("metrics.jsonl", "config.yaml"))
    return [TRAINING if is_run else EVALUATION]


def _help() -> str:
    lines = [
        USAGE,
        "",
        "Continual pre-training and instruction tuning with EMO and its peers, and evaluation.",
        "",
    ]
    lines += [f"  {name:12}{command.help}" for name, command in COMMANDS.items()]
    return "\n".join([*lines, "", "`emo COMMAND --help` shows the options of a command."])


def _complete() -> int:
    """Answer a shell that asks for words: for the commands here, for options where the command is."""
    words = os.environ.get("COMP_LINE", "").split()
    if len(words) > 1 and words[1] in COMMANDS and (len(words) > 2 or os.environ["COMP_LINE"].endswith(" ")):
        return run(words[1:])
    import argparse

    import argcomplete

    parser = argparse.ArgumentParser(prog="emo")
    parser.add_argument("command", choices=list(COMMANDS))
    argcomplete.autocomplete(parser)
    return 0


if __name__ == "__main__":
    sys.exit(main())
