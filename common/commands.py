"""What all commands of this project have: names in usage lines, a version, completion, hints at mistakes."""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from common import __version__
from common.text import printable


def program(script: str, otherwise: str) -> str:
    """What a usage line calls this command: `script` where the user gave that, else `otherwise`."""
    return script if Path(sys.argv[0]).name == script else otherwise


def first_word(what: object) -> None:
    """Libraries take seconds; what the command is about is said before, on stderr."""
    print(printable(f"{what}: loading libraries"), file=sys.stderr, flush=True)


def offer_completion(parser: argparse.ArgumentParser) -> None:
    """Give `parser` its --version; answer a shell that asks for words of it, and end.

    `eval "$(register-python-argcomplete NAME)"` makes a shell ask.
    """
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    if "_ARGCOMPLETE" in os.environ:
        import argcomplete  # only then: commands shall start fast

        argcomplete.autocomplete(parser)


def parse_arguments(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Like `parser.parse_args`, but commands that take `overrides` find them after their options too.

    What is misspelt is answered with the nearest command or option of the command that was called.
    """
    parser.exit_on_error = False  # the parser's own mistakes come here; its commands' end the program
    try:
        args, rest = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        parser.error(f"{error}{_choice_meant(parser, str(error))}")
    options = [one for one in rest if one.startswith("-")]
    if options or (rest and not hasattr(args, "overrides")):
        called = _called(parser, args)
        meant = _hint(options[0].partition("=")[0], called._option_string_actions) if options else ""
        called.error(f"unrecognized arguments: {' '.join(rest)}{meant}")
    if rest:
        args.overrides = [*args.overrides, *rest]
    return args


def _called(parser: argparse.ArgumentParser, args: argparse.Namespace) -> argparse.ArgumentParser:
    """The parser of the command that was called, which is `parser` itself where it has no commands."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            command = action.choices.get(getattr(args, action.dest, ""))
            return parser if command is None else command
    return parser


def _choice_meant(parser: argparse.ArgumentParser, message: str) -> str:
    """A hint for `argument command: invalid choice: 'prepar' (choose from ...)`."""
    given = re.search(r"^argument ([^:]*): invalid choice: '(.*?)'", message)
    if given is None:
        return ""
    found = (action.choices or () for action in parser._actions if given[1] in (action.dest, action.metavar))
    return _hint(given[2], next(found, ()))


def _hint(given: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(given[:200], list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""
