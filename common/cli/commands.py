"""Command-line parsing with completion, overrides anywhere, and hints for misspelt options."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from ..errors import similar
from ..text import printable

# Names of our options in other programs and in earlier versions.
OTHER_OPTIONS = {
    "--output_path": "out output output_dir",
    "--results": "out output_path",
    "--num_fewshot": "shots fewshot",
    "--batch_size": "budget batch",
    "--model": "model_args model_name_or_path",
    "--max_new_tokens": "tokens max_length max_tokens",
    "--max_tokens": "max_length",
    "--prefix": "prompt",
    "--samples": "num_return_sequences",
    "--gpus": "num_gpus",
}
_WRONG = re.compile(r"unrecognized arguments: (?:.* )?(-[^ =]*)|argument (.*): invalid choice: '(.*?)'")


class Parser(argparse.ArgumentParser):
    """A parser without abbreviated options. Its subparsers are of this class too."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options | {"allow_abbrev": False})

    def error(self, message: str) -> NoReturn:
        """Exit with `message` and a suggestion for a misspelt option or command."""
        if wrong := _WRONG.match(message):
            option, name, word = wrong.groups()
            actions = (a for a in self._actions if name in ("/".join(a.option_strings), a.metavar, a.dest))
            choices = self._option_string_actions if option else next(actions).choices
            message += suggest_option(option or word, choices or ())
        super().error(message)


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
    args, unknown = parser.parse_known_args(argv)
    if any(word.startswith("-") for word in unknown) or (unknown and not hasattr(args, "overrides")):
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):  # report the subcommand's usage
                parser = action.choices.get(getattr(args, action.dest, ""), parser)
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if unknown:
        args.overrides = [*args.overrides, *unknown]
    return args


def suggest_option(word: str, choices: Iterable[str]) -> str:
    """Return `; did you mean ...?` for a misspelt word, or an empty string."""
    options = [choice for choice in choices if choice not in ("-h", "--help")]
    name = word.lstrip("-").replace("-", "_")
    others = (
        option for option, names in OTHER_OPTIONS.items() if name in names.split() and option in options
    )
    match = next(others, None) or similar(word, options)
    return f"; did you mean {match}?" if match else ""
