"""The command `emo` or `python -m emo`, which dispatches subcommands to the packages."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

import emo.common.packages  # noqa: F401 - must come first


class Command(NamedTuple):
    """A subcommand: its function as MODULE:FUNCTION, and a line of help."""

    function: str
    help: str


DATA = "emo.data_prep.cli:main"
TRAINING = "emo.pipeline.cli:run"
EVALUATION = "emo.eval.cli:main"
SWEEPS = "emo.experiments.cli:main"
COMMANDS = {
    "sniff": Command(DATA, "detect the format of a data file, and suggest a recipe"),
    "prepare": Command(DATA, "tokenize the data of a recipe into shards"),
    "inspect": Command(DATA, "show prepared rows, with supervised tokens in colour"),
    "verify": Command(DATA, "verify hashes and tokenizer of prepared data"),
    "world": Command(DATA, "write the eight tasks of the built-in toy world"),
    "plan": Command(TRAINING, "predict memory, step time and duration on given GPUs"),
    "preflight": Command(TRAINING, "check that all hosts are ready to train"),
    "score": Command(TRAINING, "store a model's log-probability of each token next to the data"),
    "train": Command("emo.launch.supervise:train", "train a recipe with DeepSpeed, or resume it"),
    "export-model": Command(TRAINING, "turn a checkpoint into a Hugging Face model"),
    "top": Command(TRAINING, "show what the ranks of a run are doing"),
    "eval": Command(EVALUATION, "score one model on tasks"),
    "watch": Command(EVALUATION, "score each complete checkpoint of a run exactly once"),
    "compare": Command(EVALUATION, "compare two models, with paired tests"),
    "generate": Command(EVALUATION, "sample text, by default without truncation"),
    "chat": Command(EVALUATION, "talk to a tuned model in the terminal"),
    "quality": Command(EVALUATION, "measure sampled text: MAUVE, ROUGE, perplexity"),
    "answer": Command(EVALUATION, "answer instructions, in AlpacaEval's format"),
    "judge": Command(EVALUATION, "compare two models' answers with a judge model"),
    "report": Command("", "write a report on training runs or evaluations"),
    "export": Command(EVALUATION, "export results for lm-evaluation-harness, the Hub or Weights & Biases"),
    "sweep": Command(SWEEPS, "run every configuration in an experiment file"),
    "table": Command(SWEEPS, "write the table of an experiment file"),
    "advise": Command("emo.experiments.advise:main", "predict whether EMO helps for a recipe"),
    "quickstart": Command("emo.launch.quickstart:quickstart", "run the complete workflow on toy data"),
}

NEED_CHECKOUT = ("sweep", "table", "advise")  # their package is not in the wheel


def main(argv: list[str] | None = None) -> int:
    """Run a command and return its exit code, see `ExitCode`."""
    if argv is None and sys.getfilesystemencoding() != "utf-8":
        # Restart in UTF-8 mode: recipes and manifests are in UTF-8 in every locale.
        typed = Path("/proc/self/cmdline").read_bytes().split(b"\0")[1:-1]
        os.execv(sys.executable, [os.fsencode(sys.executable), b"-X", b"utf8", *typed])
    words = [word for word in (sys.argv[1:] if argv is None else argv) if not word.startswith("--local_rank")]
    # Shell completion of a subcommand's options is done by its own parser.
    line = os.environ["COMP_LINE"] if "_ARGCOMPLETE" in os.environ else ""
    _, *typed_words = line.split() or [""]
    if typed_words and typed_words[0] in COMMANDS and (typed_words[1:] or line.endswith(" ")):
        return run(typed_words)
    from emo import __version__
    from emo.common.cli.commands import Parser, parse_arguments

    parser = Parser(
        prog="emo",
        description="Continual pre-training, instruction tuning and evaluation of language models.",
        epilog="`emo COMMAND --help` shows the options of a command.",
    )
    parser.add_argument("--version", action="version", version=f"emo {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        commands.add_parser(name, help=command.help, add_help=False)
    parse_arguments(parser, words[:1])
    return run(words)


def run(words: list[str]) -> int:
    """Run the subcommand words[0]."""
    from emo.common.errors import ExitCode
    from emo.common.text import printable

    if words[0] == "report" and (path := _first_path(words[1:])) is not None and not path.exists():
        line = f"error: {printable(str(path))} does not exist; set a run directory or a results directory"
        print(line, file=sys.stderr)
        return ExitCode.MISTAKE
    if words[0] in NEED_CHECKOUT and not (Path(__file__).parent / "experiments").is_dir():
        print(
            f"error: emo {words[0]} needs a checkout of the repository, not an installed wheel",
            file=sys.stderr,
        )
        return ExitCode.MISTAKE
    functions = _reports(words[1:]) if words[0] == "report" else [COMMANDS[words[0]].function]
    code = 0
    options: dict[str, Any] = {}
    if words[0] == "train":
        from emo.common.cli.commands import announce
        from emo.pipeline.control.stop import leave_early

        leave_early()
        announce("train")
    if words[0] == "prepare":  # it uses one section, but also reports errors in the others
        from emo.pipeline.config import RunConfig

        options["recipe"] = RunConfig
    for name in functions:
        module, _, function = name.partition(":")
        try:
            code = getattr(importlib.import_module(module), function)(words, **options)
        except SystemExit as end:  # after --help
            if len(functions) == 1 or end.code:
                raise
            print()
    return code


def modules(word: str) -> list[str]:
    """Return the modules that a subcommand may run. Empty for an unknown one."""
    if word == "report":
        return [TRAINING.partition(":")[0], EVALUATION.partition(":")[0]]
    return [COMMANDS[word].function.partition(":")[0]] if word in COMMANDS else []


def _reports(words: list[str]) -> list[str]:
    """Return the functions for a report: on runs if the first path is a run directory, else on results."""
    if not words or words[0] in {"-h", "--help"}:
        return [TRAINING.replace(":run", ":main"), EVALUATION]
    path = _first_path(words)
    is_run = path is not None and any((path / name).exists() for name in ("metrics.jsonl", "config.yaml"))
    return [TRAINING if is_run else EVALUATION]


def _first_path(words: list[str]) -> Path | None:
    """Return the first positional argument."""
    for before, word in zip(["", *words], words, strict=False):
        if not word.startswith("-") and (not before.startswith("--") or "=" in before):
            return Path(word)
    return None


if __name__ == "__main__":
    sys.exit(main())
