"""Command-line parsing: help with examples and exit codes, overrides anywhere, hints for wrong options."""

from __future__ import annotations

import argparse
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ..errors import ExitCode, similar
from ..io.objects import is_address, local_directory
from ..text import printable

if TYPE_CHECKING:
    from ..config.recipe import Section

# Names of our options in other programs and in earlier versions.
OTHER_OPTIONS = {
    "--output_path": "out output output_dir",
    "--results": "out output_path",
    "--num_fewshot": "shots fewshot",
    "--batch_size": "budget batch",
    "--model": "model_args model_name_or_path base_model pretrained",
    "--max_new_tokens": "tokens max_length max_tokens",
    "--max_tokens": "max_length",
    "--prefix": "prompt",
    "--samples": "num_return_sequences",
    "--gpus": "num_gpus",
    "--shard": "part",
    "--dtype": "torch_dtype",
}
_WRONG_CHOICE = re.compile(r"argument (.*): invalid choice: '(.*?)'")
ALWAYS = (
    ExitCode.DONE,
    ExitCode.FAILURE,
    ExitCode.MISTAKE,
    ExitCode.INTERRUPTED,
    ExitCode.UNREAD,
)


class _Formatter(argparse.HelpFormatter):
    """Wraps paragraphs, and keeps indented lines such as examples as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines = (line if line.startswith(" ") else textwrap.fill(line, width) for line in text.splitlines())
        return "\n".join(lines)


class Parser(argparse.ArgumentParser):
    """A parser without abbreviated options. Its subparsers are of this class too."""

    def __init__(
        self,
        *,
        examples: Sequence[str] = (),
        codes: Sequence[ExitCode] = ALWAYS,
        notes: Mapping[ExitCode, str] | None = None,
        hints: Mapping[str, str] | None = None,
        **options: Any,
    ) -> None:
        """Describe a command.

        Args:
            examples: Command lines that work. The help shows them.
            codes: Exit codes that the command can return. Without examples the help does not list them.
            notes: What some of these codes mean for this command.
            hints: What to type instead of options of other programs, by the option without dashes.
            options: Arguments of argparse.ArgumentParser.
        """
        super().__init__(**{"formatter_class": _Formatter} | options | {"allow_abbrev": False})
        self.examples = tuple(examples)
        self.exit_codes = {code: (notes or {}).get(code, code.meaning) for code in sorted(codes)}
        self.hints = dict(hints or {})
        self.section: type[Section] | None = None  # of the recipe that is an argument
        if self.examples:
            listed = [f"  {code.value:<4} {meaning}" for code, meaning in self.exit_codes.items()]
            shown = [f"  {example}" for example in self.examples]
            title = "examples:" if len(shown) > 1 else "example:"
            self.epilog = "\n".join([title, *shown, "", "exit codes:", *listed])

    def error(self, message: str) -> NoReturn:
        """Exit with `message` as one line, and with a suggestion for a misspelt choice."""
        if wrong := _WRONG_CHOICE.match(message):
            name, word = wrong.groups()
            actions = (a for a in self._actions if name in ("/".join(a.option_strings), a.metavar, a.dest))
            message += suggest_option(word, next(actions).choices or ())
        if "; " not in message:
            message += f"; see {self.prog} --help"
        self.exit(ExitCode.MISTAKE, f"error: {printable(message)} [usage]\n")


def add_recipe(
    parser: argparse.ArgumentParser, section: type[Section] | None = None, noun: str = "recipe"
) -> Callable[..., argparse.Action]:
    """Add the arguments RECIPE and key=value. Return the function that adds more.

    Args:
        parser: The parser of a command.
        section: The model of the file, in which keys that were typed as options are looked up.
        noun: Kind of file: "recipe" or "experiment".
    """
    if isinstance(parser, Parser):
        parser.section = section
    about = {
        "recipe": "YAML file with the data, model and settings of a run. Examples are in launch/recipes/",
        "experiment": "YAML file with a sweep over recipes. Examples are in experiments/configs/",
    }[noun]
    key = {"recipe": "train.learning_rate=2e-5", "experiment": "out=runs/mine"}[noun]
    parser.add_argument(noun, type=Path, metavar=noun.upper(), help=about)
    text = f"replaces a value of the {noun}, for example {key}. Repeatable; the value is YAML"
    # Without a default argparse says that it is required.
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help=text)
    return parser.add_argument


def parse_shard(text: str) -> tuple[int, int]:
    """Parse I/N, job I of N. Raises ArgumentTypeError."""
    index, _, jobs = text.partition("/")
    if not (index.isdecimal() and jobs.isdecimal() and int(index) < int(jobs)):
        raise argparse.ArgumentTypeError(f"{text!r} must be I/N with I from 0 to N - 1, for example 0/8")
    return int(index), int(jobs)


def parse_directory(text: str) -> Path:
    """Parse a directory or its address, as `local_directory` does. Raises ArgumentTypeError."""
    try:
        return local_directory(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error}") from None


def announce(subject: object, loaded: str = "libraries") -> None:
    """Print the command's subject to stderr before slow imports or loading weights."""
    print(printable(f"{subject}: loading {loaded}"), file=sys.stderr, flush=True)


def parse_arguments(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse arguments like `parser.parse_args`, and accept `overrides` after options too.

    Shell completion is enabled by `eval "$(register-python-argcomplete emo)"`.
    """
    if "_ARGCOMPLETE" in os.environ:
        import argcomplete  # imported here so that commands start fast

        argcomplete.autocomplete(parser)
    words = sys.argv[1:] if argv is None else [*argv]
    for action in parser._actions:  # a wrong option is reported before a missing argument
        if isinstance(action, argparse._SubParsersAction) and words and words[0] in action.choices:
            _reject_unknown(action.choices[words[0]], words[1:])
    _reject_unknown(parser, words)
    args, unknown = parser.parse_known_args(words)
    if unknown and not hasattr(args, "overrides"):
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if unknown:
        args.overrides = [*args.overrides, *unknown]
    for name, value in vars(args).items():
        paths = value if isinstance(value, list) else [value]
        if address := next((p for p in paths if isinstance(p, Path) and is_address(str(p))), None):
            parser.error(f"{name}: {address} is an address. Use a directory or a file of this machine")
    return args


def _reject_unknown(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """Exit if an option is unknown, with a line that says what to type instead."""
    if any(isinstance(action, argparse._SubParsersAction) for action in parser._actions):
        return
    for number, word in enumerate(words):
        option, equals, value = word.partition("=")
        if word == "--" or option in ("-h", "--help"):
            return
        if not re.match(r"--?[A-Za-z]", word) or option in parser._option_string_actions:
            continue
        value = value if equals else next(iter(words[number + 1 :]), "")
        is_value = value and not value.startswith("-") and (equals or "=" not in value)
        hint = _explain_option(parser, option, value if is_value else "")
        parser.error(f"unknown option {option}{hint}")


def _explain_option(parser: argparse.ArgumentParser, option: str, value: str) -> str:
    """Return what to type instead of an unknown option, or an empty string."""
    name = option.lstrip("-").replace("-", "_")
    if isinstance(parser, Parser):
        if name in parser.hints:
            return f"; {parser.hints[name]}"
        if parser.section is not None and not suggest_option(option, parser._option_string_actions, 0.85):
            from ..config.recipe import find_keys

            keys, hint = find_keys(parser.section, name)
            if keys:
                forms = " or ".join(f"{key}={value or 'VALUE'}" for key in keys)
                return f"; to set this key of the recipe, write {forms}"
            if hint:
                return f"; {hint}"
    return suggest_option(option, parser._option_string_actions)


def suggest_option(word: str, choices: Iterable[str], cutoff: float = 0.6) -> str:
    """Return `; did you mean ...?` for a misspelt word, or an empty string."""
    options = [choice for choice in choices if choice not in ("-h", "--help")]
    name = word.lstrip("-").replace("-", "_")
    others = (
        option for option, names in OTHER_OPTIONS.items() if name in names.split() and option in options
    )
    match = next(others, None) or similar(word, options, cutoff)
    return f"; did you mean {match}?" if match else ""
