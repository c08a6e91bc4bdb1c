"""The command `emo` or `python -m emo`, which dispatches subcommands to the packages."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

import emo.common.packages  # noqa: F401 - must come first


class Command(NamedTuple):
    """A subcommand: its function as MODULE:FUNCTION, and its line in `emo --help`."""

    function: str
    help: str


DATA = "emo.data_prep.cli:main"
TRAINING = "emo.pipeline.cli:run_and_exit"
EVALUATION = "emo.eval.cli:main"
SWEEPS = "emo.experiments.cli:main"
GROUPS = {
    "Data": {
        "sniff": Command(DATA, "detect the format of a data file and print the data section of a recipe"),
        "prepare": Command(DATA, "tokenize the data of a recipe into shards"),
        "inspect": Command(DATA, "show prepared rows with the supervised tokens in colour"),
        "verify": Command(DATA, "check prepared data: hashes, tokenizer and every row"),
    },
    "Training": {
        "plan": Command(TRAINING, "predict memory, step time and duration on given GPUs"),
        "preflight": Command(TRAINING, "check that all hosts are ready to train"),
        "train": Command("emo.launch.supervise:train", "train a recipe with DeepSpeed, or resume it"),
        "top": Command(TRAINING, "show what the ranks of a run are doing"),
        "export-model": Command(TRAINING, "turn a checkpoint into a Hugging Face model"),
        "push": Command(TRAINING, "upload an export to the Hugging Face Hub"),
        "extend-vocabulary": Command(TRAINING, "add tokens to a model's vocabulary"),
        "merge": Command(TRAINING, "merge models of one architecture into one"),
        "score": Command(TRAINING, "store a model's token log-probabilities for a teacher or reference"),
    },
    "Evaluation": {
        "tasks": Command(EVALUATION, "list the evaluation tasks"),
        "eval": Command(EVALUATION, "score a model on tasks"),
        "watch": Command(EVALUATION, "score each checkpoint of a run as soon as it is saved"),
        "compare": Command(EVALUATION, "compare two models with paired tests"),
        "report": Command("", "write a report on training runs or evaluations"),
        "export": Command(EVALUATION, "export results to lm-eval's format, the Hub or Weights & Biases"),
    },
    "Text": {
        "generate": Command(EVALUATION, "sample text from a model"),
        "chat": Command(EVALUATION, "talk to a chat model in the terminal"),
        "quality": Command(EVALUATION, "measure sampled text: MAUVE, ROUGE, perplexity"),
        "answer": Command(EVALUATION, "answer instructions, in AlpacaEval's format"),
        "judge": Command(EVALUATION, "compare two models' answers with a judge model"),
    },
    "Experiments": {
        "quickstart": Command("emo.launch.quickstart:quickstart", "run the complete workflow on toy data"),
        "world": Command(DATA, "write the evaluation tasks of the toy data"),
        "advise": Command(SWEEPS, "predict whether EMO helps for a recipe"),
        "sweep": Command(SWEEPS, "run every configuration in an experiment file"),
        "table": Command(SWEEPS, "write the results of an experiment as a table"),
    },
}
COMMANDS = {name: command for group in GROUPS.values() for name, command in group.items()}
OWN = {
    "help": "show this help, that of a command, or what an error code means",
    "version": "print the version",
}
# Commands of other programs and what to type instead.
OTHER_COMMANDS = {
    "train": "sft finetune fine-tune fine_tune pretrain cpt tune run resume launch",
    "eval": "lm_eval lm-eval lm-evaluation-harness evaluate evaluation benchmark test",
    "generate": "inference infer sample predict",
    "prepare": "preprocess tokenize tokenise",
    "sniff": "init",
    "preflight": "doctor env check",
    "plan": "estimate estimate-memory dry-run",
    "top": "status",
    "tasks": "ls-tasks list",
    "push": "upload push-to-hub push_to_hub",
    "extend-vocabulary": "add-tokens resize-embeddings expand-vocab",
    "merge": "merge-lora mergekit mergekit-yaml average",
}
NEED_CHECKOUT = ("sweep", "table", "advise")  # their package is not in the wheel


def main(argv: list[str] | None = None) -> int:
    """Run a command and return its exit code, see `ExitCode`."""
    from emo.common.errors import exit_code_of

    return exit_code_of(lambda: _dispatch(argv))


def _dispatch(argv: list[str] | None) -> int:
    """Find the command and run it.

    Without arguments the help goes to stderr and the code is 2, as in uv.
    """
    from emo.common.errors import ExitCode, UserError, similar

    if sys.platform != "linux":
        problem = f"emo needs Linux, and this is {sys.platform}. Use a Linux machine or a container"
        raise UserError(problem, code="needs-linux")
    if argv is None and sys.getfilesystemencoding() != "utf-8":
        # Restart in UTF-8 mode: recipes and manifests are in UTF-8 in every locale.
        typed = Path("/proc/self/cmdline").read_bytes().split(b"\0")[1:-1]
        os.execv(sys.executable, [os.fsencode(sys.executable), b"-X", b"utf8", *typed])
    words = [word for word in (sys.argv[1:] if argv is None else argv) if not word.startswith("--local_rank")]
    # Shell completion of a subcommand's options is done by its own parser.
    line = os.environ["COMP_LINE"] if "_ARGCOMPLETE" in os.environ else ""
    _, *typed_words = line.split() or [""]
    if typed_words and typed_words[0] in COMMANDS and (typed_words[1:] or line.endswith(" ")):
        return run_subcommand(typed_words)
    if words and words[0] in COMMANDS and not line:
        return run_subcommand(words)
    if words[:1] == ["help"] and words[1:]:
        return _help(words[1])
    from emo import __version__
    from emo.common.cli.commands import parse_arguments

    if words[:1] == ["version"]:
        print(f"emo {__version__}")
        return ExitCode.DONE
    parser = _top_parser()
    if not words and not line:
        parser.print_help(sys.stderr)
        return ExitCode.MISTAKE
    if words[:1] == ["help"]:
        parser.print_help()
        return ExitCode.DONE
    if not line and not words[0].startswith("-"):
        match = next((name for name, others in OTHER_COMMANDS.items() if words[0] in others.split()), None)
        match = match or similar(words[0], [*COMMANDS, *OWN])
        hint = f"did you mean `emo {match}`?" if match else "`emo help` lists the commands"
        raise UserError(f"unknown command {words[0]!r}; {hint}", code="usage")
    parse_arguments(parser, words[:1])
    return ExitCode.DONE


def _help(topic: str) -> int:
    """Print the help of a command, or explain an error code."""
    from emo.common.errors import ExitCode, UserError, error_index, explain_code, similar

    text = explain_code(topic)
    if topic in COMMANDS or topic.startswith("-"):
        if text:  # some error codes are also names of commands
            print(f"Error code {topic}:\n{text}\n\nCommand {topic}:", flush=True)
        return main([topic, "--help"])
    if text or topic in OWN:
        print(text or f"emo {topic}: {OWN[topic]}")
        return ExitCode.DONE
    match = similar(topic, [*COMMANDS, *error_index()])
    hint = f"did you mean {match}?" if match else "`emo help` lists the commands"
    raise UserError(f"{topic!r} is neither a command nor an error code; {hint}", code="usage")


def _top_parser() -> argparse.ArgumentParser:
    """Return the parser of `emo` without a subcommand, whose help lists the subcommands in groups."""
    from emo import __version__
    from emo.common.cli.commands import Parser

    width = max(map(len, COMMANDS)) + 2
    lines = ["Fine-tune language models with EMO and other objectives, and measure whether they helped."]
    for title, group in GROUPS.items():
        lines += ["", f"{title}:"] + [f"  {name:{width}}{command.help}" for name, command in group.items()]
    lines += ["", "Help:"] + [f"  {name:{width}}{text}" for name, text in OWN.items()]
    parser = Parser(
        prog="emo",
        usage="emo COMMAND [options]",
        description="\n".join(lines),
        epilog="`emo help COMMAND` shows the options, examples and exit codes of a command. "
        "`emo help CODE` explains an error.",
    )
    parser.add_argument("--version", action="version", version=f"emo {__version__}", help="print the version")
    # The description lists the commands. This action completes them in the shell.
    parser.add_argument("command", nargs="?", choices=[*COMMANDS, *OWN], help=argparse.SUPPRESS)
    return parser


def has_experiments() -> bool:
    """Return whether the package of experiments is installed, which a wheel does not have."""
    return (Path(__file__).parent / "experiments").is_dir()


def run_subcommand(words: list[str]) -> int:
    """Run the subcommand words[0]."""
    from emo.common.errors import UserError

    if words[0] == "report" and (path := _first_path(words[1:])) is not None and not path.exists():
        raise UserError(f"{path} does not exist; set a run directory or a results directory", code="no-run")
    if words[0] in NEED_CHECKOUT and not has_experiments():
        problem = "needs a checkout of the repository, not an installed wheel"
        raise UserError(f"emo {words[0]} {problem}", code="needs-checkout")
    functions = _reports(words[1:]) if words[0] == "report" else [COMMANDS[words[0]].function]
    if plans_data := words[0] == "plan" and "--data" in words:
        functions = [DATA]
    code = 0
    options: dict[str, Any] = {}
    if words[0] == "train":
        from emo.pipeline.control.stop import leave_early

        leave_early()
    if words[0] == "prepare" or plans_data:  # it uses one section, but also reports errors in the others
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
        return [TRAINING.replace(":run_and_exit", ":main"), EVALUATION]
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
