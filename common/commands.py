"""What all commands of this project have: completion, overrides anywhere, hints at mistakes."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from emo.common.errors import similar
from emo.common.text import printable

# Options by their names in other programs and in earlier versions of this one.
OTHER_OPTIONS = {
    "out": ("--output_path", "--results"),
    "output": ("--output_path",),
    "output_dir": ("--output_path",),
    "output_path": ("--results",),
    "shots": ("--num_fewshot",),
    "fewshot": ("--num_fewshot",),
    "budget": ("--batch_size",),
    "batch": ("--batch_size",),
    "model_args": ("--model",),
    "model_name_or_path": ("--model",),
    "tokens": ("--max_new_tokens",),
    "max_length": ("--max_new_tokens", "--max_tokens"),
    "max_tokens": ("--max_new_tokens",),
    "prompt": ("--prefix",),
    "num_return_sequences": ("--samples",),
    "num_gpus": ("--gpus",),
}


class Parser(argparse.ArgumentParser):
    """A parser whose options are written out; its commands' parsers are of this class too."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options | {"allow_abbrev": False})


def first_word(subject: object) -> None:
    """Say on stderr what the command is about, before it loads libraries for seconds."""
    print(printable(f"{subject}: loading libraries"), file=sys.stderr, flush=True)


def parse_arguments(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Like `parser.parse_args`, but commands that take `overrides` find them after their options too.

    What is misspelt is answered with the nearest command or option of the command that was called. A shell
    that asks for words gets them (`eval "$(register-python-argcomplete emo)"` makes it ask).
    """
    if "_ARGCOMPLETE" in os.environ:
        import argcomplete  # only then: commands shall start fast

        argcomplete.autocomplete(parser)
    parser.exit_on_error = False  # the parser's own mistakes come here; its commands' end the program
    try:
        args, unknown = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        misspelt = re.search(r"^argument ([^:]*): invalid choice: '(.*?)'", str(error))
        name, word = misspelt.groups() if misspelt else ("", "")
        choices = (
            action.choices or () for action in parser._actions if name in (action.dest, action.metavar)
        )
        parser.error(f"{error}{hint(word, next(choices, ()))}")
    options = [argument for argument in unknown if argument.startswith("-")]
    if options or (unknown and not hasattr(args, "overrides")):
        called = _called(parser, args)
        meant = hint(options[0].partition("=")[0], called._option_string_actions) if options else ""
        called.error(f"unrecognized arguments: {' '.join(unknown)}{meant}")
    if unknown:
        args.overrides = [*args.overrides, *unknown]
    return args


def _called(parser: argparse.ArgumentParser, args: argparse.Namespace) -> argparse.ArgumentParser:
    """Return the parser of the command that was called, which is `parser` itself where it has no commands."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return action.choices.get(getattr(args, action.dest, ""), parser)
    return parser


def hint(word: str, choices: Iterable[str]) -> str:
    """Return `; did you mean ...?` with the choice that is meant by a word, or nothing."""
    options = [choice for choice in choices if choice not in ("-h", "--help")]
    others = OTHER_OPTIONS.get(word.lstrip("-").replace("-", "_"), ())
    match = next((name for name in others if name in options), None) or similar(word, options)
    return f"; did you mean {match}?" if match else ""
